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
from typing import Final

import numpy as np

from .case import Arrays, Case, Floats, Ints, Order, unit
from .compiled import compiled
from .retime import Spread, first_turns, renew_turns, retime, shift, sound, spread, touched, undo
from .walk import STUCK, Times, blank, finish, fits

#: weight of the other stages' ends in what an order is worth
_EARLY: Final = 0.02
#: what a move costs beyond the jobs that it times, in jobs
_OVERHEAD: Final = 10
#: accepted moves until entries are put in the order of their starts anew
_RENEW: Final = 200
#: jobs timed between two looks at the clock
_SLICE: Final = 2_000_000


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
def _worth(a: Arrays, t: Times) -> tuple[float, float]:
    """(makespan, what the order is worth)."""
    makespan = 0.0
    for stage in range(a.stages):
        makespan = max(makespan, t.done[a.offset[stage + 1] - 1])
    early = 0.0
    for stage in range(a.stages):
        share = t.done[a.offset[stage + 1] - 1] / makespan
        early += share * share * share * share
    return makespan, makespan * (1.0 + _EARLY * early / a.stages)


@compiled
def _critical(a: Arrays, order: Ints, t: Times, path: Ints, tiny: float) -> int:
    """Writes the places of the jobs of a longest chain, last first; returns how many."""
    total = a.total
    i = a.offset[1] - 1
    for stage in range(1, a.stages):
        if t.done[a.offset[stage + 1] - 1] > t.done[i]:
            i = a.offset[stage + 1] - 1
    length = 0
    while True:
        path[length] = i
        length += 1
        begin = t.start[i]
        if begin <= tiny:
            return length
        entry = order[i]
        if i > a.offset[a.stage_of[entry % total]] and t.done[i - 1] >= begin - tiny:
            i -= 1
            continue
        before = i
        for k in range(a.into[entry], a.into[entry + 1]):
            job = a.source[k] * a.micro_batches + t.number[i]
            if t.end[job] + a.delay[k] >= begin - tiny:
                before = t.where[job]
        i = before


@compiled
def _run(
    a: Arrays,
    order: Ints,
    best: Ints,
    makespan: float,
    t: Times,
    s: Spread,
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
    time that counts. Returns (best makespan, jobs timed, moves tried)."""
    hot, cold, tiny = span[0], span[1], span[2]
    total = a.total
    _, value = _worth(a, t)
    fourth = 0.0
    for stage in range(a.stages):
        fourth += a.work[stage] ** 4
    fourth *= _EARLY / a.stages
    moves = changes = length = 0
    heat = hot
    while used < upto and makespan > goal + tiny:
        if moves % 32 == 0:
            heat = hot * (cold / hot) ** ((used / share * cycles) % 1.0)
        moves += 1
        used += _OVERHEAD
        joining = joins and _random(random) < 0.1
        if joining:
            # a W joins its B, or leaves it
            i = int(_random(random) * len(order))
            if order[i] < 2 * total:
                continue
            stage = a.stage_of[order[i] % total]
            j = i
            order[i] += total if order[i] < 3 * total else -total
            first, last = touched(a, order, stage, i, i)
        else:
            reach = 1 + int(_random(random) ** 2.5 * 14.0)
            if _random(random) < 0.5:
                if length == 0:
                    length = _critical(a, order, t, path, tiny)
                    used += length
                i = path[int(_random(random) * length)]
                stage = a.stage_of[order[i] % total]
                if _random(random) < 0.5:
                    j = max(i - reach, a.offset[stage])
                else:
                    # what comes before a critical job goes behind it
                    j = i
                    i = max(i - reach, a.offset[stage])
            else:
                stage = int(_random(random) * a.stages)
                first, last = a.offset[stage], a.offset[stage + 1] - 1
                i = first + int(_random(random) * (last - first + 1))
                j = min(i + reach, last) if _random(random) < 0.5 else max(i - reach, first)
            step = 1 if j > i else -1
            near = i
            while near != j and order[near + step] == order[i]:
                near += step
            if near == j:
                continue  # equal entries: nothing would change
            shift(a, order, t, i, j)
            first, last = touched(a, order, stage, i, j)
        if sound(a, order, t, first, last) and fits(a, order, t, stage, first, last + 1):
            most = value - heat * math.log(_random(random) + 1e-12)
            # all stages' work is known, so their part of the worth is no less than this
            ends, timed = retime(a, order, t, s, first, last, most - fourth / most**3)
            used += timed
            if ends:
                end, worth = _worth(a, t)
                if worth <= most:
                    value = worth
                    length = 0
                    changes += 1
                    if changes % _RENEW == 0:
                        renew_turns(t, s)
                        used += len(order)
                    if end < makespan - tiny:
                        makespan = end
                        for place in range(len(order)):
                            best[place] = order[place]
                    continue
            undo(t, s)
        if joining:
            order[i] += total if order[i] < 3 * total else -total
        else:
            shift(a, order, t, j, i)
        fits(a, order, t, stage, first, last + 1)
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
    times = blank(case)
    end = finish(case.arrays, order.entries, times)
    if end >= STUCK:
        raise StuckOrder(f"{order.name} can't run: its stages wait for each other")
    for stage in range(case.stages):
        first, last = case.arrays.offset[stage : stage + 2]
        if not fits(case.arrays, order.entries, times, stage, first, last):
            raise StuckOrder(f"{order.name} exceeds the memory limit of stage {stage}")
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
    times, room = blank(case), spread(case)
    entries, champion = order.entries.copy(), order.entries.copy()
    path = np.zeros(case.jobs, dtype=np.int64)
    random = np.array([(seed * 2654435761 + 88172645463325252) % (1 << 62) + 1], dtype=np.int64)
    span = np.array([hot * scale, cold * scale, 1e-9 * max(best, scale)])
    used = moves = 0
    late = False
    finish(case.arrays, entries, times)
    for stage in range(case.stages):
        fits(case.arrays, entries, times, stage, *case.arrays.offset[stage : stage + 2])
    first_turns(times, room)
    while used < visits and best > goal + span[2]:
        if time.monotonic() > deadline:
            late = True
            break
        upto = min(used + _SLICE, visits)
        best, used, tried = _run(
            case.arrays,
            entries,
            champion,
            best,
            times,
            room,
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
