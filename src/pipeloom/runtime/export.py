"""Weights as safetensors under the model's own names: what transformers, and most other tools, load.

    folder/
      model.safetensors                    or, of a model in several parts:
      model-00001-of-00004.safetensors …   each written by the rank that owns its tensors
      model.safetensors.index.json         tensor -> file
      config.json, generation_config.json  if the model has them

Every rank writes its own tensors, in files of a bounded size, so that none holds the whole model. A tied weight is
there once, under its first name; buffers that the model doesn't save aren't there. The folder appears whole or not at
all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from .checkpoint import Stage, replicas_of, tensors_of
from .folders import by_replicas, placed
from .initial import INDEX
from .parameters import ParameterStore

#: bytes of tensors in one file, unless a single tensor is larger
FILE_BYTES = 4 << 30


class _File(NamedTuple):
    stage: int
    names: list[str]


def export(
    stages: Stage | Sequence[Stage], folder: str | os.PathLike[str], file_bytes: int = FILE_BYTES
) -> None:
    """Write the weights of all ranks to `folder`, replacing what was there. stages: this rank's, or, in one process,
    all of one pipeline. file_bytes: the most that a file holds. A collective call. Raises OSError where it can't be
    written."""
    given = stages if isinstance(stages, Sequence) else [stages]
    place = Path(folder).absolute()
    replicas = replicas_of(stages)
    with by_replicas(replicas, "export the weights"):
        if replicas.index == 0:
            with placed(given[0].transport.process_group, place) as partial:
                _write(given, partial, file_bytes)


def _write(stages: Sequence[Stage], folder: Path, file_bytes: int) -> None:
    store = stages[0].store
    sizes = _sizes(store)
    files = _files(store, sizes, file_bytes)
    for stage in stages:
        mine = tensors_of(stage.store)
        for number, file in enumerate(files):
            if file.stage == stage.store.stage:
                save_file(
                    _apart({name: mine[name] for name in file.names}),
                    folder / _name(number, len(files)),
                    {"format": "pt"},
                )
                _sync(folder / _name(number, len(files)))
    if store.stage:
        return
    if len(files) > 1:
        places = {name: _name(number, len(files)) for number, file in enumerate(files) for name in file.names}
        index = {
            "metadata": {"total_size": sum(sizes[name] for name in places)},
            "weight_map": dict(sorted(places.items())),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    for what in ("config", "generation_config"):
        save = getattr(getattr(store.module, what, None), "save_pretrained", None)
        if callable(save):
            save(folder)


def _sizes(store: ParameterStore) -> dict[str, int]:
    """Bytes of every tensor that is exported, on whatever stage, in model order. Other stages' are on the meta device,
    and have their sizes all the same."""
    saved = store.module.state_dict(keep_vars=True)
    names = [*store.order, *(name for name in store.buffer_owner if name in saved)]
    return {name: saved[name].nbytes for name in names}


def _files(store: ParameterStore, sizes: dict[str, int], file_bytes: int) -> list[_File]:
    """The same on every rank."""
    owner = {**store.buffer_owner, **store.owner}
    files: list[_File] = []
    for stage in sorted({owner[name] for name in sizes}):
        room = 0
        for name, size in sizes.items():
            if owner[name] != stage:
                continue
            if not files or files[-1].stage != stage or size > room:
                files.append(_File(stage, []))
                room = file_bytes
            files[-1].names.append(name)
            room -= size
    return files


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, contiguous, each in memory of its own: safetensors takes no others."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage()
        shared = memory.data_ptr() in seen or memory.nbytes() != tensor.nbytes
        seen.add(memory.data_ptr())
        found[name] = tensor.clone(memory_format=torch.contiguous_format) if shared else tensor.contiguous()
    return found


def _name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
