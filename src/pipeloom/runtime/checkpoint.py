"""Checkpoints that don't know how the model was cut.

Written by torch.distributed.checkpoint, with everything under the model's own names, so that what S 2, V 2 saved loads
at S 1 or S 4, and the model part loads into plain PyTorch:

    model.<name>                  a parameter (once, under its first name) or a persistent buffer
    optimizer.state.<name>.<key>  a tensor of the optimizer's state for that parameter
    optimizer.options.<name>      JSON: the options of its parameter group, and state that is no tensor
    training                      JSON: steps done, seed, scheduler, loss scaler

JSON travels as a uint8 tensor: nothing of the user's is pickled. A folder appears whole or not at all: it is written
beside its place and moved there when every rank is done. Works without a process group too.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from .folders import agreed, by_replicas, placed, whole_folder
from .parameters import ParameterStore
from .replicas import Alone, Replicas
from .transport import Transport
from .update import Updater

FORMAT = 1
_MODEL, _STATE, _OPTIONS, _TRAINING = "model.", "optimizer.state.", "optimizer.options.", "training"
#: torch's remark on a checkpoint without a process group
_ALONE = ".*assuming the intent is to (save|load) in a single process.*"
#: how an optimizer computes, not what: left as the loading run has them
_NOT_RESTORED = {"params", "foreach", "fused", "capturable", "differentiable"}


class _Seeded(Protocol):
    @property
    def seed(self) -> int: ...


class Stage(Protocol):
    """What a checkpoint needs of a pipeline's stage. steps: how many it has done."""

    store: ParameterStore
    updater: Updater
    transport: Transport
    replicas: Replicas
    steps: int

    @property
    def strategy(self) -> _Seeded: ...


def save(stages: Stage | Sequence[Stage], folder: str | os.PathLike[str]) -> None:
    """Write the state of all ranks to `folder`. stages: this rank's, or, in one process, all of one pipeline.

    A collective call of all ranks and replicas (which hold the same; replica 0 writes). An older checkpoint at `folder`
    is replaced. Raises OSError where it can't be written, ValueError for scheduler or optimizer state that is neither a
    tensor nor JSON.
    """
    given, place = _several(stages), Path(folder).absolute()
    replicas = replicas_of(stages)
    with by_replicas(replicas, "save the checkpoint"):
        if replicas.index == 0:
            _save(given, place)


def _save(stages: Sequence[Stage], place: Path) -> None:
    group = stages[0].transport.process_group
    with placed(group, place) as partial, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_ALONE)
        state: dict[str, Tensor] = {}
        for stage in stages:
            state |= _owned(stage)
        dcp_save(state, checkpoint_id=partial, process_group=group, no_dist=group is None)


def load(stages: Stage | Sequence[Stage], folder: str | os.PathLike[str]) -> None:
    """Read what `save` wrote, into a pipeline cut in any way. A collective call of all ranks and replicas, which each
    read all of their state; nobody goes on before all have it.

    Raises FileNotFoundError where there is no checkpoint, ValueError where it doesn't fit the model; OSError on ranks
    and replicas for which it would have fitted, where it doesn't for another.
    """
    with by_replicas(replicas_of(stages), "load the checkpoint"):
        _load(_several(stages), Path(folder).absolute())


def _load(stages: Sequence[Stage], place: Path) -> None:
    group = stages[0].transport.process_group
    with agreed(group, f"{place}: another rank can't load it"):
        reader = FileSystemReader(whole_folder(place, ".metadata"))
        sizes = _sizes(reader)
        templates = [_wanted(stage, sizes, place) for stage in stages]
    for stage, template in zip(stages, templates, strict=True):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_ALONE)
            dcp_load(template, storage_reader=reader, process_group=group, no_dist=group is None)
        _apply(stage, template)


def state_dict(stage: Stage) -> dict[str, Any]:
    """This stage's part, nested: {"model": …, "optimizer": {"state": …, "options": …}, "training": …}. Tensors are the
    live ones. An optimizer that has not stepped yet gets its state made, so that a checkpoint can be loaded into it."""
    _make_state(stage.updater.optimizer)
    flat = _owned(stage, held=True)
    return {
        "model": {k.removeprefix(_MODEL): v for k, v in flat.items() if k.startswith(_MODEL)},
        "optimizer": {
            "state": {k.removeprefix(_STATE): v for k, v in flat.items() if k.startswith(_STATE)},
            "options": {k.removeprefix(_OPTIONS): v for k, v in flat.items() if k.startswith(_OPTIONS)},
        },
        "training": flat[_TRAINING],
    }


def load_state_dict(stage: Stage, state: Mapping[str, Any]) -> None:
    """Takes what `state_dict` gives, from this or any other cut; names of other stages are passed over."""
    store = stage.store
    held = tensors_of(store, held=True)
    missing = sorted(set(held) - set(state["model"]))
    if missing:
        raise ValueError(
            f"the state has no {missing[0]!r}, which stage {store.stage} holds ({len(missing)} missing)"
        )
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(state["model"][name])
    mine = {name for name, _ in store.trainable()}
    flat: dict[str, Tensor] = {_TRAINING: state["training"]}
    for key, value in state["optimizer"]["state"].items():
        if key.rpartition(".")[0] in mine:
            flat[_STATE + key] = value.clone()
    for name, value in state["optimizer"]["options"].items():
        if name in mine:
            flat[_OPTIONS + name] = value
    _apply(stage, flat)


# -- what is saved


def tensors_of(store: ParameterStore, held: bool = False) -> dict[str, Tensor]:
    """Parameters by first name and persistent buffers: those that this stage owns, or all that it holds."""
    saved = store.module.state_dict(keep_vars=True)
    found: dict[str, Tensor] = {}
    for name in store.order:
        if (held and name in store.parameters) or store.owner[name] == store.stage:
            found[name] = store.module.get_parameter(name).detach()
    for name in store.buffer_owner:
        if name in saved and ((held and name in store.buffers) or store.buffer_owner[name] == store.stage):
            found[name] = store.module.get_buffer(name)
    return found


def _owned(stage: Stage, held: bool = False) -> dict[str, Tensor]:
    store, updater = stage.store, stage.updater
    state = {_MODEL + name: tensor for name, tensor in tensors_of(store, held).items()}
    if updater.optimizer is not None:
        options = _options_of(updater.optimizer)
        for name, parameter in store.trainable():
            if not held and store.owner[name] != store.stage:
                continue
            if id(parameter) not in options:
                continue  # the user left it out of the optimizer
            plain: dict[str, Any] = {}
            for key, value in updater.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    state[f"{_STATE}{name}.{key}"] = value
                else:
                    plain[key] = value
            entry = {"group": options[id(parameter)], "state": plain}
            state[_OPTIONS + name] = _as_tensor(entry, 256, f"the optimizer's options for {name!r}")
    if held or store.stage == _scheduling_stage(stage):
        state[_TRAINING] = _as_tensor(_training(stage), 1024, "the scheduler's state")
    return state


def _scheduling_stage(stage: Stage) -> int:
    """The stage that saves the training state: the first that trains something, and so has a scheduler."""
    return min((stage.store.owner[name] for name in stage.store.trained), default=0)


def _training(stage: Stage) -> dict[str, Any]:
    scheduler, scaler = stage.updater.scheduler, stage.updater.scaler
    own = getattr(scheduler, "state_dict", None)
    return {
        "format": FORMAT,
        "steps": stage.steps,
        "seed": stage.strategy.seed,
        "scheduler": own() if own is not None else None,
        "scaler": scaler.state_dict() if scaler is not None else None,
    }


def _options_of(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Parameter identity -> the options of its group."""
    found: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = {
            key: value for key, value in group.items() if key not in _NOT_RESTORED and key != "param_names"
        }
        found.update((id(parameter), options) for parameter in group["params"])
    return found


def _as_tensor(value: Any, unit: int, what: str) -> Tensor:
    """JSON in a uint8 tensor, padded so that values of about one length have one shape."""
    try:
        text = json.dumps(value, default=_plain).encode()
    except TypeError as error:
        raise ValueError(
            f"{what} can't be saved: {error}; a checkpoint holds tensors and JSON, nothing else"
        ) from error
    return torch.frombuffer(bytearray(text.ljust(-(-len(text) // unit) * unit)), dtype=torch.uint8)


def _as_value(tensor: Tensor) -> Any:
    return json.loads(bytes(tensor.cpu().numpy().tobytes()), object_hook=_tensor_again)


def _plain(value: Any) -> dict[str, Any]:
    """A small tensor (a learning rate) as JSON. Floats of any width survive Python's double."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{type(value).__name__} is not JSON")
    return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}


def _tensor_again(entry: dict[str, Any]) -> Any:
    if entry.keys() == {"tensor", "dtype"}:
        return torch.tensor(entry["tensor"], dtype=getattr(torch, entry["dtype"]))
    return entry


# -- what is loaded


def _sizes(reader: FileSystemReader) -> dict[str, tuple[torch.Size, torch.dtype]]:
    sizes: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            sizes[key] = (entry.size, entry.properties.dtype)
    return sizes


def _wanted(
    stage: Stage, sizes: dict[str, tuple[torch.Size, torch.dtype]], folder: Path
) -> dict[str, Tensor]:
    """Tensors to read into: the model's own, and new ones for the optimizer."""
    store = stage.store
    template: dict[str, Tensor] = {}
    for name, tensor in tensors_of(store, held=True).items():
        key = _MODEL + name
        if key not in sizes:
            raise ValueError(f"the checkpoint in {folder} has no {name!r}, which the model has")
        if sizes[key][0] != tensor.shape:
            raise ValueError(
                f"{name!r} is {tuple(sizes[key][0])} in the checkpoint in {folder}, "
                f"and {tuple(tensor.shape)} in the model"
            )
        template[key] = tensor
    if _TRAINING not in sizes:
        raise ValueError(f"{folder} is not a checkpoint of a pipeline: it has no training state")
    mine = {name for name, _ in store.trainable()} if stage.updater.optimizer is not None else set()
    for key, (size, dtype) in sizes.items():
        of_mine = (key.startswith(_OPTIONS) and key.removeprefix(_OPTIONS) in mine) or (
            key.startswith(_STATE) and key.removeprefix(_STATE).rpartition(".")[0] in mine
        )
        if of_mine or key == _TRAINING:
            template[key] = torch.empty(size, dtype=dtype)
    return template


def _apply(stage: Stage, state: Mapping[str, Tensor]) -> None:
    """The optimizer's and the training's part of what was read."""
    training = _as_value(state[_TRAINING])
    if training["format"] != FORMAT:
        raise ValueError(
            f"this checkpoint has format {training['format']}; this version of pipeloom reads {FORMAT}"
        )
    if stage.updater.optimizer is not None:
        _apply_optimizer(stage.updater.optimizer, stage.store.trainable(), state)
    stage.steps = int(training["steps"])
    restore = getattr(stage.updater.scheduler, "load_state_dict", None)
    if restore is not None and training["scheduler"] is not None:
        restore(training["scheduler"])
    if stage.updater.scaler is not None and training["scaler"] is not None:
        stage.updater.scaler.load_state_dict(training["scaler"])
    stage.store.clear()


def _apply_optimizer(
    optimizer: torch.optim.Optimizer,
    trainable: Iterable[tuple[str, nn.Parameter]],
    state: Mapping[str, Tensor],
) -> None:
    options: dict[int, dict[str, Any]] = {}
    for name, parameter in trainable:
        tensors = {
            key.rpartition(".")[2]: value
            for key, value in state.items()
            if key.startswith(_STATE) and key.removeprefix(_STATE).rpartition(".")[0] == name
        }
        entry = _as_value(state[_OPTIONS + name]) if _OPTIONS + name in state else {"group": {}, "state": {}}
        options[id(parameter)] = entry["group"]
        own: dict[str, Any] = dict(entry["state"])
        for key, value in tensors.items():
            own[key] = value if key == "step" else value.to(parameter.device)
        optimizer.state.pop(parameter, None)
        if own:
            optimizer.state[parameter] = own
    for group in optimizer.param_groups:
        for parameter in group["params"][:1]:
            for key, value in options.get(id(parameter), {}).items():
                present = group.get(key)
                if isinstance(present, Tensor):
                    present.copy_(torch.as_tensor(value))
                else:
                    group[key] = tuple(value) if isinstance(present, tuple) else value


def _make_state(optimizer: torch.optim.Optimizer | None) -> None:
    """One step at learning rate 0 with zero gradients makes the state of an optimizer that has none."""
    if optimizer is None or optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for own in optimizer.state.values():
        if isinstance(own.get("step"), Tensor):
            own["step"].zero_()


def _several(stages: Stage | Sequence[Stage]) -> Sequence[Stage]:
    return stages if isinstance(stages, Sequence) else [stages]


def replicas_of(stages: Stage | Sequence[Stage]) -> Replicas:
    """Those that wait for each other: in one process, where one pipeline is given at a time, nobody."""
    return Alone() if isinstance(stages, Sequence) else stages.replicas
