"""What the tape of `deferred` asks about an op and its arguments, as torch calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from . import compat

aten = torch.ops.aten

#: random ops that move the generator equally far, whatever the values of their arguments
_STEADY: Final = frozenset(
    {
        *("normal", "normal_", "normal_functional", "uniform", "uniform_", "rand", "rand_like", "randn"),
        *("randn_like", "randint", "randint_like", "random", "random_", "randperm"),
        *("bernoulli", "bernoulli_", "exponential", "exponential_"),
    }
)
#: ops by which Python sees values
_READS: Final = frozenset({aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default})
_LIFTS: Final = frozenset({aten.lift.default, aten.lift_fresh.default, aten.lift_fresh_copy.default})


def draws(op: Any) -> bool:
    """Whether it draws random numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags


def draws_steadily(op: Any) -> bool:
    return compat.is_op_overload(op) and op.overloadpacket.__name__ in _STEADY


def reads_values(op: Any) -> bool:
    """Whether Python is about to see the values of its arguments."""
    return op in _READS


def lifts(op: Any) -> bool:
    """Whether it stands for a tensor made from Python's numbers (torch.tensor)."""
    return op in _LIFTS


def written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that it changes in place."""
    found = []
    for position, argument in enumerate(compat.arguments_of(op)):
        if compat.is_written(argument):
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            found += tensors_in(given)
    return found


def on(op: Any, kwargs: dict[str, Any], device: str) -> dict[str, Any]:
    """The keyword arguments with which it makes its result on this device."""
    if compat.is_op_overload(op) and any(a.name == "device" for a in compat.arguments_of(op)):
        return {**kwargs, "device": torch.device(device)}
    return kwargs


# ---- arguments and results


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in compat.tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def generator_in(tree: Any) -> torch.Generator | None:
    return next((leaf for leaf in compat.tree_flatten(tree)[0] if isinstance(leaf, torch.Generator)), None)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    return _mapped(Tensor, function, tree)


def map_generators(function: Callable[[torch.Generator], Any], tree: Any) -> Any:
    return _mapped(torch.Generator, function, tree)


def _mapped(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    leaves, spec = compat.tree_flatten(tree)
    return compat.tree_unflatten([function(x) if isinstance(x, kind) else x for x in leaves], spec)


# ---- memory


def memory_of(value: Tensor, meta: Tensor) -> Tensor:
    """The bytes of a value, flat, laid out as the storage of its meta tensor; its own memory if it lies so already."""
    size = meta.untyped_storage().nbytes()
    storage = value.untyped_storage()
    same = (value.stride(), value.storage_offset()) == (meta.stride(), meta.storage_offset())
    if same and storage.nbytes() == size:
        return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))
    memory = torch.empty(size, dtype=torch.uint8)
    tensor_in(memory, meta).copy_(value)
    return memory


def tensor_in(memory: Tensor, meta: Tensor) -> Tensor:
    """The tensor that lies in some memory as the meta tensor lies in its storage."""
    blank = torch.empty(0, dtype=meta.dtype)
    return blank.set_(memory.untyped_storage(), meta.storage_offset(), meta.shape, meta.stride())


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
