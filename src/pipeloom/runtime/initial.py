"""Where the values of a model on the meta device come from, tensor by tensor, for what one rank holds.

In this order, for a parameter or buffer:

    files          `weights=`: safetensors, read one tensor at a time
    the tape       of a model that `pipeloom.deferred` made: what a plain seeded build gives, to the bit
    its module     `reset_parameters()` of the module that holds it, from random numbers that depend on the strategy's
                   seed and the module's name alone: the same for every cut, but not those of a plain build

Nothing is unpickled. No rank holds more than its own tensors, and one other at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..program import compat
from ..program.deferred import tape_of

INDEX = "model.safetensors.index.json"


class WeightsError(ValueError):
    """Values that can't be found or don't fit; the message names the tensor and says what to do."""


def _same(name: str) -> str:
    return name


@dataclass(frozen=True)
class Weights:
    """Files of weights. path: a folder of safetensors files (with or without an index), a file, an index, or several
    files. name: what the files call a tensor of the model; None where they don't have it, and it begins as it would
    without files. Every other parameter and saved buffer must be there."""

    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    name: Callable[[str], str | None] = _same


#: what `compile` takes
WeightsSpec = Weights | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class Initial:
    """The values that training begins with. model: as it was handed to `compile`; each rank, or each stage of one
    process, asks for its own tensors by name."""

    def __init__(self, model: nn.Module, weights: WeightsSpec | None = None, seed: int = 0) -> None:
        self._model = model
        self._seed = seed
        self._tape = tape_of(model)
        self._tensors = {**_named(model.named_parameters), **_named(model.named_buffers)}
        self._saved = model.state_dict(keep_vars=True).keys()
        given = weights if weights is None or isinstance(weights, Weights) else Weights(weights)
        self._weights = given
        self._files = {} if given is None else _files(given.path)

    def values(self, wanted: Iterable[str]) -> dict[str, Tensor]:
        """Values for those of these tensors that need some: all that are in the files, and what else is on the meta
        device. On the CPU. Raises WeightsError."""
        names = list(wanted)
        found = self._read(names)
        rest = [name for name in names if name not in found and self._tensors[name].is_meta]
        if self._tape is not None:
            tensors = [self._tensors[name] for name in rest]
            for name, tensor in zip(rest, tensors, strict=True):
                if not self._tape.knows(tensor):
                    raise WeightsError(
                        f"{name!r} was changed after pipeloom.deferred had made the model: change it (cast it, replace "
                        "it) in the function that deferred is given"
                    )
            return found | dict(zip(rest, self._tape.values(tensors), strict=True))
        return found | self._reset(rest)

    # ---- files

    def _read(self, names: list[str]) -> dict[str, Tensor]:
        places: dict[Path, list[tuple[str, str]]] = {}
        for name in names:
            key = self._key(name)
            if key is not None:
                places.setdefault(self._files[key], []).append((name, key))
        found: dict[str, Tensor] = {}
        for path, pairs in places.items():
            with safe_open(path, framework="pt") as file:
                for name, key in pairs:
                    found[name] = self._fitting(name, key, file.get_tensor(key), path)
        return found

    def _key(self, name: str) -> str | None:
        """What the files call a tensor, under whichever of its names they have it; None where it isn't theirs."""
        if self._weights is None or name not in self._saved:
            return None
        aliases = [n for n, t in self._tensors.items() if t is self._tensors[name]]
        keys = [self._weights.name(alias) for alias in (name, *aliases)]
        if None in keys:
            return None
        there = next((key for key in keys if key in self._files), None)
        if there is None:
            near = [key for key in self._files if key.endswith(f".{name}") or name.endswith(f".{key}")]
            hint = (
                f" They have {near[0]!r}: say so with weights=pipeloom.Weights(path, name=…)." if near else ""
            )
            raise WeightsError(
                f"the weights have no {keys[0]!r} ({len(self._files)} tensors in {_first_path(self._weights)}), which "
                f"the model has.{hint} For a tensor that isn't to be read, let that name= return None."
            )
        return there

    def _fitting(self, name: str, key: str, value: Tensor, path: Path) -> Tensor:
        wanted = self._tensors[name]
        if value.shape != wanted.shape:
            raise WeightsError(
                f"{key!r} is {tuple(value.shape)} in {path}, and {name!r} is {tuple(wanted.shape)} in the model"
            )
        return torch.empty_strided(wanted.shape, wanted.stride(), dtype=wanted.dtype).copy_(value)

    # ---- the modules' own

    def _reset(self, names: list[str]) -> dict[str, Tensor]:
        owners: dict[str, list[str]] = {}
        for name in names:
            owners.setdefault(name.rpartition(".")[0], []).append(name)
        found: dict[str, Tensor] = {}
        state = torch.default_generator.get_state()
        try:
            for owner, mine in owners.items():
                found |= self._reset_module(owner, mine)
        finally:
            torch.default_generator.set_state(state)
        return found

    def _reset_module(self, owner: str, names: list[str]) -> dict[str, Tensor]:
        module = self._model.get_submodule(owner)
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        tensors: dict[str, Tensor] = {}
        for name, tensor in own:
            blank = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            tensors[name] = nn.Parameter(blank, False) if isinstance(tensor, nn.Parameter) else blank
        before = {name: compat.version_of(tensor) for name, tensor in tensors.items()}
        reset = getattr(compat.bare_twin(module, tensors), "reset_parameters", None)
        if callable(reset):
            torch.default_generator.manual_seed(_number(f"{self._seed}/{owner}"))
            with torch.no_grad():
                reset()
        for name in names:
            last = name.rpartition(".")[2]
            if not callable(reset) or compat.version_of(tensors[last]) == before[last]:
                kind = type(module).__name__
                raise WeightsError(
                    f"{name!r} is on the meta device and has no values: {kind} has no reset_parameters that gives it "
                    "some. Build the model with pipeloom.deferred(lambda: …), or pass weights= to compile."
                )
        return {name: tensors[name.rpartition(".")[2]].detach() for name in names}


def _named(of: Callable[..., Iterable[tuple[str, Tensor]]]) -> dict[str, Tensor]:
    return dict(of(remove_duplicate=False))


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _first_path(weights: Weights) -> str:
    path = weights.path
    return str(path) if isinstance(path, str | os.PathLike) else ", ".join(str(one) for one in path)


def _files(given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> dict[str, Path]:
    """Tensor -> the file that has it."""
    several = [given] if isinstance(given, str | os.PathLike) else given
    found: dict[str, Path] = {}
    for path in map(Path, several):
        if path.is_dir():
            index = path / INDEX
            files = [index] if index.exists() else sorted(path.glob("*.safetensors"))
            if not files:
                raise WeightsError(
                    f"{path} has no safetensors files; other formats are pickled, and aren't read"
                )
        else:
            files = [path]
        for file in files:
            found |= _tensors_of(file)
    return found


def _tensors_of(file: Path) -> dict[str, Path]:
    if not file.exists():
        raise FileNotFoundError(f"there is no {file}")
    if file.suffix == ".json":
        return _indexed(file)
    if file.suffix != ".safetensors":
        raise WeightsError(
            f"{file} isn't a safetensors file; other formats are pickled, and aren't read: convert it first"
        )
    with safe_open(file, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), file)


def _indexed(index: Path) -> dict[str, Path]:
    try:
        places: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(name), str(file)) for name, file in places.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} isn't an index of safetensors files: {error}") from error
    for name, file in pairs:
        if Path(file).name != file or not (index.parent / file).is_file():
            raise WeightsError(f"{index} says that {name!r} is in {file!r}, which isn't a file beside it")
    return {name: index.parent / file for name, file in pairs}
