"""A time that no order of the jobs can beat, for one placement.

The largest of: the longest chain of dependencies; on each stage, the wait for its first input and then its
work, with the idle time that a memory limit forces between its last affordable forward and its first
backward; and, under a memory limit, Little's law: bytes times how long they must be held can't exceed the
limit times the makespan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..schedules.generator import own_chunks
from ..schedules.jobs import Edge, Placement, chain_edges
from .costs import Costs


def lower_bound(
    placement: Placement,
    micro_batches: int,
    costs: Costs,
    edges: Sequence[Edge] | None = None,
    memory_limit: float | Sequence[float] | None = None,
) -> float:
    """The bound on the makespan of the compute jobs, in the units of the costs. memory_limit: bytes, for all
    stages or for each. Backwards may be whole or split, whichever is cheaper."""
    total = len(placement)
    stages = max(placement) + 1
    used = chain_edges(total) if edges is None else edges
    b = [min(half, whole) for half, whole in zip(costs.backward_b, costs.backward, strict=True)]
    whole = [
        min(x, y + z) for x, y, z in zip(costs.backward, costs.backward_b, costs.backward_w, strict=True)
    ]
    first_f, first_b = _earliest(placement, costs, used, b, range(total))
    bound = max(first_b[c] + whole[c] for c in range(total))
    for stage, chunks in enumerate(own_chunks(placement, stages)):
        head = min(first_f[c] for c in chunks)
        work = micro_batches * sum(costs.forward[c] + whole[c] for c in chunks)
        affordable = micro_batches * sum(costs.forward[c] for c in chunks)
        limit = _limit(memory_limit, stage, costs)
        if limit is not None:
            held = [costs.held_forward[c] + costs.held_weight[c] for c in chunks]
            if min(held) > 0:
                affordable = min(affordable, limit / min(held) * max(costs.forward[c] for c in chunks))
            turnover = micro_batches * sum(
                costs.held_forward[c] * (turn + b[c]) + costs.held_weight[c] * (turn + whole[c])
                for c, turn in ((c, _earliest(placement, costs, used, b, [c])[1][c]) for c in chunks)
            )
            if limit > 0:
                bound = max(bound, head + turnover / limit)
        idle = max(0.0, min(first_b[c] for c in chunks) - head - affordable)
        bound = max(bound, head + work + idle)
    return bound


def _earliest(
    placement: Placement, costs: Costs, edges: Sequence[Edge], b: Sequence[float], origins: Sequence[int]
) -> tuple[list[float], list[float]]:
    """When the F and the B of each chunk can start at the earliest, for a micro-batch whose F's of `origins`
    may start at 0 and of which nothing else is asked. Minus infinity: doesn't depend on them."""
    total = len(placement)
    first_f = [-math.inf] * total
    for chunk in origins:
        first_f[chunk] = 0.0
    for edge in sorted(edges, key=lambda e: e.target):
        if edge.direction == "F":
            there = first_f[edge.source] + costs.forward[edge.source] + costs.delay(edge, placement)
            first_f[edge.target] = max(first_f[edge.target], there)
    first_b = [first_f[c] + costs.forward[c] for c in range(total)]
    for edge in sorted(edges, key=lambda e: -e.target):
        if edge.direction == "B":
            there = first_b[edge.source] + b[edge.source] + costs.delay(edge, placement)
            first_b[edge.target] = max(first_b[edge.target], there)
    return first_f, first_b


def _limit(memory_limit: float | Sequence[float] | None, stage: int, costs: Costs) -> float | None:
    """The bytes that a stage may use beyond what it always holds."""
    if memory_limit is None:
        return None
    given = memory_limit if isinstance(memory_limit, int | float) else memory_limit[stage]
    return given - (costs.persistent[stage] if stage < len(costs.persistent) else 0.0)
