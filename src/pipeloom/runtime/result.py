"""What a step gives back, without waiting for it.

The rank that makes the losses sends all of them to every other rank as soon as the last one is there; the
receives were posted when the step began. A StepResult reads them when it is asked, and computes the same
figures from the same numbers in the same order on every rank, so that they are bit-equal everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..program import compat
from .transport import Receive


class StepResult:
    """The figures of one step; every one is a 0-dim tensor on the stage's device, computed when first read. The batch
    is that of all replicas together; `losses`, `weights` and `outputs` are of this pipeline's micro-batches.

    loss: "average": the mean over the batch, weighted by the micro-batches' weights; "sum": their sum.
    weight: total weight of the batch (float64; number of samples unless loss_fn returned weights).
    grad_norm: the 2-norm of all gradients before clipping; None where the step made no update.
    skipped: whether the update was left out (gradients not finite under a loss scaler, or total weight 0).
    outputs[m]: {index: tensor}, the parts of the model's output that this rank made for micro-batch m.
    """

    def __init__(
        self, losses_are_sums: bool, average: bool, weights: Sequence[float] | None, micro_batches: int
    ):
        self._losses_are_sums = losses_are_sums
        self._average = average
        self._known = weights
        self._losses: Tensor | Receive | None = None
        self._weights: Tensor | Receive | None = None
        self._parts: Tensor | Receive | None = None
        self._norm: Tensor | None = None
        self._norm_parts: Sequence[Tensor | Receive] | None = None
        self._norm_order: Tensor | None = None
        self.skipped = False
        self.outputs: list[dict[int, Tensor]] = [{} for _ in range(micro_batches)]

    @property
    def loss(self) -> Tensor:
        total, weight = self._totals.unbind()
        return (total / weight if self._average else total).to(self.losses.dtype)

    @property
    def _totals(self) -> Tensor:
        """The sum of the losses, as they count, and of the weights: shape (2,), float64."""
        if self._parts is None:
            return self.part
        self._parts = _arrived(self._parts, "losses of other replicas")
        return torch.stack([in_order(column) for column in self._parts.unbind(1)])

    @property
    def part(self) -> Tensor:
        """What this pipeline's micro-batches add to the batch's two sums."""
        losses, weights = self.losses, self.weights.to(self.losses.device)
        values = losses.double()
        if self._average and not self._losses_are_sums:
            values = values * weights
        return torch.stack([in_order(values), in_order(weights)])

    @property
    def losses(self) -> Tensor:
        """What the loss function returned for each micro-batch: shape (M,)."""
        self._losses = _arrived(self._losses, "losses")
        return self._losses

    @property
    def weights(self) -> Tensor:
        """The weight of each micro-batch: shape (M,), float64."""
        if self._known is not None:
            return torch.tensor(self._known, dtype=torch.float64)
        self._weights = _arrived(self._weights, "weights")
        return self._weights.double()

    @property
    def weight(self) -> Tensor:
        return in_order(self.weights) if self._parts is None else self._totals[1]

    @property
    def grad_norm(self) -> Tensor | None:
        if self._norm is None and self._norm_parts is not None:
            assert self._norm_order is not None
            parts = [p if isinstance(p, Tensor) else p.wait() for p in self._norm_parts]
            self._norm = torch.cat(parts)[self._norm_order].sum().sqrt()
            self._norm_parts = None
        return self._norm

    @property
    def weights_unknown(self) -> bool:
        """Whether the weights are made by the programs, not known when the step begins."""
        return self._known is None

    @property
    def losses_arrive_by(self) -> Receive | None:
        """The message to wait for before `losses` can be read without blocking."""
        return self._losses if self._losses is not None and not isinstance(self._losses, Tensor) else None

    @property
    def weights_arrive_by(self) -> Receive | None:
        """The message to wait for before `weights` can be read without blocking."""
        return None if self._known is not None or isinstance(self._weights, Tensor) else self._weights

    # -- filled by the step

    def will_have(self, losses: Receive | None = None, weights: Receive | None = None) -> None:
        """Receives that were posted for figures made on other ranks."""
        self._losses = losses
        self._weights = weights

    def has_losses(self, losses: Tensor) -> None:
        self._losses = losses

    def has_weights(self, weights: Tensor) -> None:
        self._weights = weights

    def parts_from(self, parts: Receive) -> None:
        """The replicas' `part`s: shape (replicas, 2)."""
        self._parts = parts

    def norm_from(self, parts: Sequence[Tensor | Receive], order: Tensor) -> None:
        """Squared norms of each rank's own parameters, and the order that puts them in model order."""
        self._norm_parts = parts
        self._norm_order = order

    def settle(self) -> None:
        """Read everything that is still under way, so that the next step finds the channels empty."""
        if self._losses is not None:
            self._losses = _arrived(self._losses, "losses")
        if self._weights is not None:
            self._weights = _arrived(self._weights, "weights")
        if self._parts is not None:
            self._parts = _arrived(self._parts, "losses of other replicas")
        _ = self.grad_norm


class EvalResult:
    """loss: 0-dim, the same on every rank, read when first asked for. outputs: the model's output for the whole batch,
    with None for the parts that other ranks made; None unless it was asked for."""

    def __init__(self, result: StepResult, outputs: Any) -> None:
        self._result = result
        self.outputs = outputs

    @property
    def loss(self) -> torch.Tensor:
        return self._result.loss

    @property
    def weight(self) -> torch.Tensor:
        return self._result.weight


def in_order(values: Tensor) -> Tensor:
    """The sum of a vector from first to last, whatever its length (torch.sum pairs its terms)."""
    return values.cumsum(0)[-1]


def joined_outputs(result: StepResult, form: Any) -> Any:
    """The model's output for the whole batch: tensor leaves of the micro-batches joined along dimension 0."""
    spec, leaves = form
    flat: list[Any] = []
    number = 0
    for leaf in leaves:
        if leaf is not None:
            flat.append(leaf)
            continue
        parts = [outputs.get(number) for outputs in result.outputs]
        have = [p for p in parts if p is not None]
        flat.append(
            None if len(have) < len(parts) else torch.cat(have) if have[0].dim() else torch.stack(have)
        )
        number += 1
    return compat.tree_unflatten(flat, spec)


def _arrived(value: Tensor | Receive | None, what: str) -> Tensor:
    if value is None:
        raise RuntimeError(f"the {what} of this step are not there: the step did not run to its end")
    return value if isinstance(value, Tensor) else value.wait()
