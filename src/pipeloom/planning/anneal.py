"""Improves an order by annealing (Kirkpatrick et al. 1983).

A move shifts one entry within its stage, half of the time an entry on the critical path; an order is judged
by its makespan and, a little, by how early the other stages are done, which leads across plateaus. Orders
that exceed a stage's memory or can't run are refused. The temperature falls from `hot` to `cold` several
times. What a run costs is counted in jobs timed, not seconds: the same start, seed and count give the same
answer, on a busy machine too.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from .case import Arrays, Case, Floats, Ints, Order, unit
from .compiled import compiled
from .walk import LATE, Scratch, finish, fits, scratch

#: weight of the other stages' ends in what an order is worth
_EARLY = 0.02


@compiled
def _random(state: Ints) -> float:
    """The next number in 0 … 1 of a xorshift generator (Marsaglia 2003)."""
    x = np.uint64(state[0])
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = np.int64(x)
    return float(x >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@compiled
def _worth(a: Arrays, work: Scratch, makespan: float) -> float:
    early = 0.0
    for stage in range(a.stages):
        share = work.clock[stage] / makespan
        early += share**4
    return makespan * (1.0 + _EARLY * early / a.stages)


@compiled
def _critical(a: Arrays, order: Ints, work: Scratch, path: Ints, tiny: float) -> int:
    """Writes the places of the jobs of a longest chain, last first; returns how many."""
    total = a.total
    stage = 0
    for other in range(a.stages):
        if work.clock[other] > work.clock[stage]:
            stage = other
    i = a.offset[stage + 1] - 1
    length = 0
    while True:
        path[length] = i
        length += 1
        begin = work.start[i]
        entry = order[i]
        if begin <= tiny:
            return length
        tight = -1
        if entry < 2 * total:
            for k in range(a.into[entry], a.into[entry + 1]):
                job = a.source[k] * a.micro_batches + work.number[i]
                if a.delay[k] >= 0.0 and work.end[job] + a.delay[k] >= begin - tiny:
                    tight = work.where[job]
        stage = a.stage_of[entry % total]
        if tight < 0 or (i > a.offset[stage] and _end(a, order, work, i - 1) >= begin - tiny):
            i -= 1
        else:
            i = tight


@compiled
def _end(a: Arrays, order: Ints, work: Scratch, i: int) -> float:
    total = a.total
    entry = order[i]
    if entry < 2 * total:
        return work.start[i] + a.duration[entry]
    if entry >= 3 * total:
        pair = i > 0 and order[i - 1] == entry - 2 * total and work.number[i - 1] == work.number[i]
        if not pair:
            entry -= total
    return work.start[i] + a.duration[entry]


@compiled
def _shift(order: Ints, i: int, j: int) -> None:
    """Moves the entry at i to j; those between give way."""
    entry = order[i]
    step = 1 if j > i else -1
    while i != j:
        order[i] = order[i + step]
        i += step
    order[j] = entry


@compiled
def _run(
    a: Arrays,
    order: Ints,
    best: Ints,
    makespan: float,
    now: Scratch,
    then: Scratch,
    path: Ints,
    random: Ints,
    span: Floats,
    used: int,
    upto: int,
    share: int,
    cycles: int,
    goal: float,
    joins: bool,
) -> tuple[float, int, int]:
    """Anneals `order` in place until `upto` of `share` jobs have been timed. span: hot, cold, and the smallest
    time that counts. Returns (best makespan, jobs timed, moves tried); `now` is left with `order`'s times."""
    hot, cold, tiny = span[0], span[1], span[2]
    current, done = finish(a, order, now, np.inf)
    used += done
    value = _worth(a, now, current)
    fourth = 0.0
    for stage in range(a.stages):
        fourth += a.work[stage] ** 4
    fourth *= _EARLY / a.stages
    moves = 0
    length = 0
    heat = hot
    while used < upto and makespan > goal + tiny:
        if moves % 32 == 0:
            phase = (used / share * cycles) % 1.0
            heat = hot * (cold / hot) ** phase
        moves += 1
        used += 1
        if joins and _random(random) < 0.1:
            # a W joins its B, or leaves it
            i = int(_random(random) * len(order))
            entry = order[i]
            if entry < 2 * a.total:
                continue
            j = i
            order[i] = entry + a.total if entry < 3 * a.total else entry - a.total
            stage = a.stage_of[entry % a.total]
        else:
            reach = 1 + int(_random(random) ** 2.5 * 14.0)
            if _random(random) < 0.5:
                if length == 0:
                    length = _critical(a, order, now, path, tiny)
                i = path[int(_random(random) * length)]
                stage = a.stage_of[order[i] % a.total]
                if _random(random) < 0.5:
                    j = max(i - reach, a.offset[stage])
                else:
                    j = i
                    i = max(i - reach, a.offset[stage])
            else:
                stage = int(_random(random) * a.stages)
                first, last = a.offset[stage], a.offset[stage + 1] - 1
                i = first + int(_random(random) * (last - first + 1))
                j = min(i + reach, last) if _random(random) < 0.5 else max(i - reach, first)
            entry = order[i]
            step = 1 if j > i else -1
            near = i
            while near != j and order[near + step] == entry:
                near += step
            if near == j:
                continue  # equal entries: nothing would change
            _shift(order, i, j)
        accepted = False
        if fits(a, order, stage, then.count):
            most = value - heat * math.log(_random(random) + 1e-300)
            # all stages' work is known, so their part of the worth is no less than this
            end, done = finish(a, order, then, most - fourth / most**3)
            used += done
            if end < LATE:
                worth = _worth(a, then, end)
                if worth <= most:
                    accepted = True
                    value = worth
                    length = 0
                    now, then = then, now
                    if end < makespan - tiny:
                        makespan = end
                        best[:] = order
        if not accepted:
            if i == j:
                order[i] = entry
            else:
                _shift(order, j, i)
    return makespan, used, moves


@dataclass
class Annealed:
    """The best order, its makespan, the jobs timed, the moves tried, and whether time ended it."""

    order: Order
    makespan: float
    visits: int
    moves: int
    late: bool


class StuckOrder(ValueError):
    """The order given can't run or exceeds a limit."""


def makespan(case: Case, order: Order) -> float:
    """When an order ends if every job starts as soon as it can. Raises StuckOrder for one that can't run or
    exceeds a limit."""
    work = scratch(case)
    for stage in range(case.stages):
        if not fits(case.arrays, order.entries, stage, work.count):
            raise StuckOrder(f"{order.name} exceeds the memory limit of stage {stage}")
    end, _ = finish(case.arrays, order.entries, work, np.inf)
    if end >= LATE:
        raise StuckOrder(f"{order.name} can't run: its stages wait for each other")
    return end


def anneal(
    case: Case,
    order: Order,
    *,
    visits: int,
    seed: int = 0,
    hot: float = 0.35,
    cold: float = 0.004,
    cycles: int = 3,
    goal: float = 0.0,
    deadline: float = math.inf,
) -> Annealed:
    """Anneals from `order` until `visits` jobs have been timed, `goal` is reached or time.monotonic passes
    `deadline`. hot, cold: temperatures in units of a chunk's forward. The answer is never worse than `order`;
    it depends on `seed` and `visits` alone unless the deadline cuts it. Raises StuckOrder for an order that
    can't run or exceeds a limit."""
    best = makespan(case, order)
    scale = unit(case)
    now, then = scratch(case), scratch(case)
    entries, champion = order.entries.copy(), order.entries.copy()
    path = np.zeros(case.jobs, dtype=np.int64)
    random = np.array([(seed * 2654435761 + 88172645463325252) % (1 << 62) + 1], dtype=np.int64)
    span = np.array([hot * scale, cold * scale, 1e-9 * max(best, scale)])
    used = moves = 0
    late = False
    slice_ = max(visits // 50, 4_000_000)
    while used < visits and best > goal + span[2]:
        if time.monotonic() > deadline:
            late = True
            break
        upto = min(used + slice_, visits)
        best, used, tried = _run(
            case.arrays,
            entries,
            champion,
            best,
            now,
            then,
            path,
            random,
            span,
            used,
            upto,
            visits,
            cycles,
            goal,
            case.joins,
        )
        moves += tried
    return Annealed(Order(order.name, champion), best, used, moves, late)
