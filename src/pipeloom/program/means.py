"""Means over what counts: a loss that divides by something that the batch decides.

Cross entropy with `ignore_index`, or with class weights, is a sum over the targets that count, divided by how many
count. Averaged over micro-batches by their samples it would not be the mean of the whole batch, since what counts is
spread unevenly. So while a model is traced, such a mean is written as its sum divided by its count, two ops that the
batch_means pass finds again; `Means` says what the pass made of them, and a batch's figures are computed from it
before the step begins, from the batch alone, so that every rank has them and none is sent.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .annotations import counted_mean

Boxed = Callable[[list[Any]], tuple[Any, ...]]


class CountedMeans(TorchFunctionMode):
    """While open, cross entropy over classes is traced as its sum divided by what counts."""

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.cross_entropy and func is not F.nll_loss:
            return func(*args, **kwargs)
        given = inspect.signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        options = given.arguments
        target, weight = options["target"], options["weight"]
        counted = (
            options["reduction"] == "mean"
            and options["size_average"] is None
            and options["reduce"] is None
            and not target.is_floating_point()
        )
        if not counted:
            return func(*args, **kwargs)
        options["reduction"] = "sum"
        total = func(*given.args, **given.kwargs)
        counts = target != options["ignore_index"]
        if weight is not None:
            counts = torch.where(counts, weight[torch.where(counts, target, 0)], 0)
        count = counts.sum().to(total.dtype)
        with counted_mean():
            return total / count


@dataclass(frozen=True)
class Means:
    """The means that a program divides by inputs of their own, one 0-dim input each behind the leaves of the batch.

    counts: a function of some of the leaves (numbers `leaves`) that gives what counts in a micro-batch, one 0-dim
    tensor a mean. whole[k]: that number is the whole batch's already. tails[k]: what is done to the batch's count
    before it divides (a floor of 1, say); None: nothing. dtypes: of the inputs. alone: the loss is the one mean, so
    that the counts are the weights of the micro-batches.
    """

    counts: Boxed
    leaves: tuple[int, ...]
    whole: tuple[bool, ...]
    tails: tuple[Boxed | None, ...]
    dtypes: tuple[torch.dtype, ...]
    alone: bool

    def count(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """What counts in a micro-batch with these leaves, for each mean."""
        with torch.no_grad():
            return list(self.counts([leaves[i] for i in self.leaves]))

    def divisor(self, mean: int, count: Tensor, factor: float = 1.0) -> Tensor:
        """What a mean is divided by where `count` counts, times a factor."""
        tail = self.tails[mean]
        with torch.no_grad():
            value: Tensor = count if tail is None else tail([count])[0]
        return (value.double() * factor).to(self.dtypes[mean])


def counted(means: Sequence[Means | None], batch: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """What counts in each micro-batch, for each of its means. means[m], batch[m]: of micro-batch m."""
    return [[] if m is None else m.count(leaves) for m, leaves in zip(means, batch, strict=True)]


def totals(means: Sequence[Means | None], counts: Sequence[Sequence[Tensor]]) -> list[float]:
    """What counts in the whole batch, for each mean."""
    if means[0] is None:
        return []
    return [
        float(counts[0][k] if whole else torch.stack([count[k] for count in counts]).sum())
        for k, whole in enumerate(means[0].whole)
    ]


def weights(
    means: Sequence[Means | None], counts: Sequence[Sequence[Tensor]], sizes: Sequence[int]
) -> list[float]:
    """What each micro-batch weighs: its count, where the loss is one mean; else its samples."""
    if means[0] is not None and means[0].alone:
        return [float(count[0]) for count in counts]
    return [float(size) for size in sizes]


def with_divisors(
    means: Sequence[Means | None],
    batch: Sequence[Sequence[Tensor]],
    counts: Sequence[Sequence[Tensor]],
    whole: Sequence[float],
    shares: Sequence[float],
    *,
    average: bool,
) -> list[list[Tensor]]:
    """The leaves of each micro-batch with its divisors behind them.

    whole[k]: what counts in the whole batch. shares[m]: of the batch's samples, those in micro-batch m. Averaged, the
    step's loss and gradients are those of the whole batch: either the weights are the counts and each micro-batch has
    its own mean, or a mean's sum is divided by the batch's count times the micro-batch's share. Not averaged
    (gradient_merge "sum"), each micro-batch has its own mean. A count of 0 divides as 1: its sum is 0.
    """
    leaves = [list(micro_batch) for micro_batch in batch]
    for m, mean in enumerate(means):
        if mean is None:
            continue
        for k, count in enumerate(counts[m]):
            if mean.alone or not average:
                leaves[m].append(mean.divisor(k, count if count else torch.ones_like(count)))
            else:
                leaves[m].append(mean.divisor(k, torch.full_like(count, whole[k]), shares[m]))
    return leaves
