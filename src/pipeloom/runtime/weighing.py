"""How much each micro-batch counts in its batch, and the batch among the shards of all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..program import means
from ..program.means import Means
from .replicas import Replicas
from .shards import shards_of
from .stepping import Work


@dataclass
class Weighed:
    """A step's inputs. batch[m]: the leaves of micro-batch m and the divisors of its means. weights: of micro-batches,
    where they are known before the step; total: of all replicas. first: number of the first micro-batch, counted over
    replicas."""

    batch: list[list[Tensor]]
    weights: list[float] | None
    total: float
    first: int


def weigh(
    replicas: Replicas,
    batch: list[list[Tensor]],
    sizes: Sequence[int],
    of: Sequence[Means | None],
    *,
    has_weight: bool,
    average: bool,
    update: bool,
) -> Work[Weighed]:
    """A batch as the executor takes it. batch[m]: leaves of a micro-batch of sizes[m] samples, on the stage's device.
    of[m]: the means in its loss. has_weight: whether the loss function returns (sum, weight). average: whether
    gradients are means over the batch. A collective call of a stage's replicas."""
    counts = means.counted(of, batch)
    known = None if has_weight else means.weights(of, counts, sizes)
    shards = yield from shards_of(replicas, sizes, known, means.totals(of, counts), update=update)
    shares = [size / shards.samples for size in sizes]
    batch = means.with_divisors(of, batch, counts, shards.counts, shares, average=average)
    return Weighed(batch, known, shards.weight, shards.first)
