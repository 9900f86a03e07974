"""What an op of a captured graph knows of the user's code: the module that ran it, the checkpoint region around it."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch.fx as fx
import torch.fx.traceback as fx_traceback
from torch import nn

from .compat import marked_checkpoints

_MODULE = "pipeloom_module"
_REGION = "pipeloom_checkpoint"
_MEAN = "pipeloom_mean"


@contextlib.contextmanager
def annotated_modules(root: nn.Module, names: dict[int, str]) -> Iterator[None]:
    """While open, each op that a module of `root` runs carries the module's name, and each op inside a
    `torch.utils.checkpoint` region the region's number. `names`: id(module) -> name.

    An instance attribute `forward` shadows the class's; the one that a user had set is put back.
    """
    wrapped: list[tuple[nn.Module, Any]] = []
    missing = object()
    try:
        for module in root.modules():
            name = names.get(id(module))
            if name is None or isinstance(
                module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
            ):
                continue
            wrapped.append((module, module.__dict__.get("forward", missing)))
            module.forward = _annotated(module.forward, name)
        with _annotated_checkpoints():
            yield
    finally:
        for module, own in reversed(wrapped):
            if own is missing:
                del module.__dict__["forward"]
            else:
                module.forward = own


def _annotated(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with fx_traceback.annotate({_MODULE: name}):
            try:
                return forward(*args, **kwargs)
            except Exception as error:
                if not getattr(error, "__notes__", None):
                    error.add_note(f"in module {name!r}" if name else "in its own forward")
                raise

    return run


def _annotated_checkpoints() -> contextlib.AbstractContextManager[None]:
    """Each checkpoint region with a number of its own; the recompute pass reads the marks."""
    count = itertools.count()
    return marked_checkpoints(lambda: fx_traceback.annotate({_REGION: next(count)}))


def counted_mean() -> contextlib.AbstractContextManager[Any]:
    """While open, each op is marked as the division of a mean over what counts (see `program.means`)."""
    return fx_traceback.annotate({_MEAN: True})


def is_counted_mean(node: fx.Node) -> bool:
    return bool((node.meta.get("custom") or {}).get(_MEAN))


def module_of(node: fx.Node) -> str:
    """The name of the innermost module that ran the op ("" where none is known)."""
    return str((node.meta.get("custom") or {}).get(_MODULE, ""))


def checkpoint_region(node: fx.Node) -> int | None:
    """The number of the `torch.utils.checkpoint` region of a forward op, if it is in one."""
    region = (node.meta.get("custom") or {}).get(_REGION)
    return None if region is None else int(region)
