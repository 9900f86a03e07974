"""CTC loss with fixed shapes.

What torch's op keeps for its backward is as wide as the longest target of the batch, a value. So while a model is
traced the loss is an op of our own, which runs torch's and keeps what it made in a tensor as wide as the targets.

Followed: Graves et al., Connectionist Temporal Classification (ICML 2006), as torch's `ctc_loss` computes it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten
#: torch.ctc_loss has numbers for what nn.functional names
_REDUCTIONS = ("none", "mean", "sum")


class FixedCtc(TorchFunctionMode):
    """While open, `ctc_loss` of a batch with targets in rows (samples, length) is traced with fixed shapes."""

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.ctc_loss and func is not torch.ctc_loss:
            return func(*args, **kwargs)
        given = inspect.signature(F.ctc_loss).bind(*args, **kwargs)
        given.apply_defaults()
        options = given.arguments
        if options["log_probs"].dim() != 3 or options["targets"].dim() != 2:
            return func(*args, **kwargs)
        if not isinstance(options["reduction"], str):
            options["reduction"] = _REDUCTIONS[options["reduction"]]
        return _loss(**options)


def _loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int,
    reduction: str,
    zero_infinity: bool,
) -> Tensor:
    if log_probs.dtype in (torch.float16, torch.bfloat16):  # as under autocast: the kernels know no others
        log_probs = log_probs.float()
    lengths = [
        given if isinstance(given, Tensor) else torch.tensor(given, device=targets.device)
        for given in (input_lengths, target_lengths)
    ]
    loss: Tensor = _ctc(log_probs, targets, *lengths, blank, zero_infinity)[0]
    if zero_infinity:
        loss = torch.where(loss == torch.inf, 0.0, loss)
    if reduction == "mean":
        return (loss / lengths[1].to(loss).clamp_min(1.0)).mean()
    return loss.sum() if reduction == "sum" else loss


@torch.library.custom_op("pipeloom::ctc_loss", mutates_args=())
def _ctc(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    """The loss of each sample, and what its backward needs: (samples, time, 2·length + 1)."""
    loss, alpha = _aten._ctc_loss.Tensor(
        log_probs, targets, input_lengths, target_lengths, blank, zero_infinity
    )
    wide = alpha.new_zeros(_alpha_shape(log_probs, targets))
    wide[..., : alpha.shape[2]] = alpha
    return loss, wide


@_ctc.register_fake
def _(
    log_probs: Tensor,
    targets: Tensor,
    _input_lengths: Tensor,
    _target_lengths: Tensor,
    _blank: int,
    _zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), log_probs.new_empty(_alpha_shape(log_probs, targets))


def _alpha_shape(log_probs: Tensor, targets: Tensor) -> tuple[int, int, int]:
    return log_probs.shape[1], log_probs.shape[0], 2 * targets.shape[1] + 1


@torch.library.custom_op("pipeloom::ctc_loss_backward", mutates_args=())
def _ctc_backward(
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    loss: Tensor,
    alpha: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The gradient of `log_probs`."""
    longest = int(target_lengths.max()) if target_lengths.numel() else 0
    found: Tensor = _aten._ctc_loss_backward.Tensor(
        gradient.contiguous(),
        log_probs,
        targets,
        input_lengths,
        target_lengths,
        loss,
        alpha[..., : 2 * longest + 1].contiguous(),
        blank,
        zero_infinity,
    )
    return found.contiguous()


@_ctc_backward.register_fake
def _(_gradient: Tensor, log_probs: Tensor, *_others: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, blank, zero_infinity = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.options = (blank, zero_infinity)


def _derive(ctx: Any, gradient: Tensor, _alpha: Tensor) -> tuple[Tensor | None, ...]:
    return _ctc_backward(gradient, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


_ctc.register_autograd(_derive, setup_context=_keep)
