"""What a step must know of the other replicas' shards before it begins: one small gather.

Each replica is given a shard of the batch, of any size. With the figures of all shards each micro-batch counts as in
one process on the whole batch (the shards one after another), and draws the random numbers that it would there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .agreement import DisagreementError
from .replicas import Replicas
from .stepping import Work, arrive


@dataclass(frozen=True)
class Shards:
    """first: number of this replica's first micro-batch among all. samples, weight, counts: of the whole batch (weight
    0 where it isn't known yet)."""

    first: int
    samples: float
    weight: float
    counts: tuple[float, ...]


def shards_of(
    replicas: Replicas,
    sizes: Sequence[int],
    weights: Sequence[float] | None,
    counts: Sequence[float],
    *,
    update: bool,
) -> Work[Shards]:
    """From this replica's sizes of micro-batches, their weights and the totals of what its means count. A collective
    call of a stage's replicas. Raises DisagreementError unless all are about to update, or none."""
    mine = [float(len(sizes)), float(sum(sizes)), float(update), sum(weights or ()), *counts]
    rows = (yield from arrive(replicas.gather(torch.tensor(mine, dtype=torch.float64)))).tolist()
    others = [replica for replica, row in enumerate(rows) if row[2] != rows[0][2]]
    if others:
        raise DisagreementError(
            f"replica {replicas.index}: replicas 0 and {others[0]} were called with different update=: all replicas "
            "make the same steps"
        )
    first = sum(int(row[0]) for row in rows[: replicas.index])
    _, samples, _, weight, *totals = (sum(column) for column in zip(*rows, strict=True))
    return Shards(first, samples, weight, tuple(totals))
