"""Layouts: where the shapes that torch predicts are right, and the strides aren't.

A program is made from predictions. A view that was captured on wrong strides fails when it runs, and a mask drawn over
them lies otherwise than eager PyTorch's. So while a model is traced, ops whose prediction is known to be wrong for some
layouts get their inputs in one for which it is right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class PredictedLayouts(TorchFunctionMode):
    """While open, batch norm reads dense memory in a usual order: of others torch predicts the input's strides for the
    result, which has those of a contiguous tensor."""

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        if args:
            return func(_usual(args[0]), *args[1:], **kwargs)
        return func(**{**kwargs, "input": _usual(kwargs["input"])})


def _usual(x: Tensor) -> Tensor:
    order = _CHANNELS_LAST.get(x.dim())
    if order is not None and x.is_contiguous(memory_format=order):
        return x
    return x.contiguous()
