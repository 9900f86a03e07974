"""Gaussian negative log likelihood, whose check of its variances is part of the dataflow.

torch looks at values before it computes this loss, and raises where a variance is negative; nothing has a value while a
model is traced. So the look becomes an op that the loss passes through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .compat import EachOp
from .ops import reads_values


class CheckedGaussian(TorchFunctionMode):
    """While open, `gaussian_nll_loss` is traced; it raises its ValueError when the program runs."""

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.gaussian_nll_loss:
            return func(*args, **(kwargs or {}))
        looks: list[Tensor] = []

        def note(op: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
            if not reads_values(op):
                return op(*given, **options)
            looks.append(given[0])
            return False

        with EachOp(note):
            loss = func(*args, **(kwargs or {}))
        return _unless(loss, looks[0]) if looks else loss


@torch.library.custom_op("pipeloom::unless_negative", mutates_args=())
def _unless(loss: Tensor, negative: Tensor) -> Tensor:
    if bool(negative):
        raise ValueError("gaussian_nll_loss: a variance is negative")
    return loss.clone()


@_unless.register_fake
def _(loss: Tensor, _negative: Tensor) -> Tensor:
    return torch.empty_like(loss)


_unless.register_autograd(lambda _ctx, gradient: (gradient, None))
