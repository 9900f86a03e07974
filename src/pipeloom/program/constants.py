"""Constants of a model that it computes with in place: tensors that are neither parameters nor buffers.

They are real while all else is traced. What is made from them alone is real too, and a change of it in place is no part
of the trace's functional form. Here they enter it as copies, when an op that makes something new first reads them. An
op that looks at them (a view) or changes them reads the original: who changes a constant is told, as before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import compat, ops


def lifted_constants() -> compat.EachOp:
    """While open, ops that make something new read copies of constants."""
    return compat.EachOp(_call)


def _call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    apart = compat.is_op_overload(op) and not (
        op.is_view or ops.lifts(op) or ops.reads_values(op) or ops.written(op, args, kwargs)
    )
    if apart:
        args, kwargs = ops.map_tensors(_lifted, (args, kwargs))
    return op(*args, **kwargs)


def _lifted(tensor: Tensor) -> Tensor:
    if compat.is_traced(tensor):
        return tensor
    if 0 in tensor.stride():  # torch predicts a copy that is expanded too
        with compat.untraced():
            tensor = tensor.contiguous()
    copy: Tensor = torch.ops.aten.lift_fresh_copy.default(tensor)
    return copy
