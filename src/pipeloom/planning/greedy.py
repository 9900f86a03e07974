"""A list scheduler with a memory limit: orders for an annealing to start from.

Runs the step in time: a stage that is free takes the job that its policy prefers among those that can start;
a W fills waits and makes room. An F of chunk c starts only if memory + its bytes + one micro-batch of each
deeper chunk of the stage with nothing in flight stay within the limit, so the most advanced micro-batch can
always go on. Where B's and W's add bytes of their own the tightest limits may defeat it; `one_at_a_time` then
still fits. Policies in the spirit of the heuristic
of Qi et al. (2023, "Zero Bubble Pipeline Parallelism"). Alone they are up to five times the bound at tight
limits; as starting points they are worth having.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from ..schedules.schedule import BACKWARD_B, BACKWARD_W
from .case import JOINED, Arrays, Case, Flags, Floats, Ints, Order
from .compiled import compiled

BACKWARD_FIRST: Final = 0
ALTERNATE: Final = 1
DEEP: Final = 0
SHALLOW: Final = 1
OLD: Final = 2

_NEVER: Final = 1e300


class GreedyPolicy(NamedTuple):
    """turn: BACKWARD_FIRST, or ALTERNATE between F and B. look: wait for a B that comes within this share of
    an F. overrun: a W may delay the next job by this share of itself. chunk: the F taken among several, DEEP
    (last chunk), SHALLOW (first) or OLD (lowest group of S micro-batches). room: share of the limit used."""

    turn: int
    look: float
    overrun: float
    chunk: int
    room: float = 1.0

    @property
    def name(self) -> str:
        turn = ("backward first", "alternate")[self.turn]
        chunk = ("deep", "shallow", "old")[self.chunk]
        room = f", room {self.room:g}" if self.room != 1 else ""
        return f"greedy ({turn}, {chunk}, look {self.look:g}, overrun {self.overrun:g}{room})"


def policies(chunks: int) -> Iterator[GreedyPolicy]:
    """The grid of policies for V chunks a stage: 72, or 24 where there is one chunk to choose from."""
    for turn in (BACKWARD_FIRST, ALTERNATE):
        for look in (0.0, 0.3, 0.6, 1.0):
            for overrun in (0.0, 0.5, 0.99):
                for chunk in (DEEP, SHALLOW, OLD) if chunks > 1 else (DEEP,):
                    yield GreedyPolicy(turn, look, overrun, chunk)


def greedy(case: Case, policy: GreedyPolicy) -> Order | None:
    """The policy's order, or None where it finds none within the limits. X's are not used."""
    jobs = 2 * len(case.placement) * case.micro_batches
    order = np.zeros(case.jobs, dtype=np.int64)
    costs = case.costs
    # what a B may add beyond what its F holds is set aside when the F starts
    later = np.maximum(np.array(costs.held_backward) - np.array(costs.held_forward), 0.0)
    done = _list_schedule(
        case.arrays,
        order,
        np.full(jobs, _NEVER),
        later,
        case.arrays.limit * policy.room,
        policy.turn,
        policy.look,
        policy.overrun,
        policy.chunk,
        np.zeros(3 * len(case.placement), dtype=np.int64),
        case.arrays.offset[:-1].copy(),
        np.zeros(case.stages),
        np.zeros(case.stages),
        np.zeros(case.stages),
        np.zeros(case.stages, dtype=np.bool_),
    )
    return Order(policy.name, order) if done else None


def one_at_a_time(case: Case) -> Order:
    """The order that needs the least: a micro-batch goes through all its jobs before the next begins, on each
    stage with backwards split or joined, whichever is leaner."""
    total = len(case.placement)
    parts = []
    for stage, chunks in enumerate(case.own):
        split, joined = case.alone(stage)
        weights = JOINED if joined <= split else BACKWARD_W
        block = [*chunks, *(kind * total + c for c in reversed(chunks) for kind in (BACKWARD_B, weights))]
        parts.append(np.tile(np.array(block, dtype=np.int64), case.micro_batches))
    return Order("one micro-batch at a time", np.concatenate(parts))


@compiled
def _ready(a: Arrays, end: Floats, entry: int, m: int) -> float:
    """When the inputs of a job from other chunks are there, _NEVER where that isn't known yet."""
    when = 0.0
    for k in range(a.into[entry], a.into[entry + 1]):
        there = end[a.source[k] * a.micro_batches + m]
        if there == _NEVER:
            return _NEVER
        when = max(when, there + a.delay[k])
    return when


@compiled
def _list_schedule(
    a: Arrays,
    order: Ints,
    end: Floats,
    later: Floats,
    limit: Floats,
    turn: int,
    look: float,
    overrun: float,
    prefer: int,
    count: Ints,
    place: Ints,
    free: Floats,
    event: Floats,
    alive: Floats,
    forward_last: Flags,
) -> bool:
    """Fills `order`. count by entry; of each stage: place in the order, when it is free, event: when it looks
    again, bytes alive, and whether an F came last."""
    total, size, stages = a.total, a.micro_batches, a.stages
    left = len(order)
    while left > 0:
        stage = 0
        for other in range(1, stages):
            if event[other] < event[stage]:
                stage = other
        now = event[stage]
        if now == _NEVER:
            return False
        event[stage] = _NEVER
        f = b = w = -1
        coming_b = coming_f = _NEVER
        blocked = False
        deeper = 0.0
        for n in range(a.own_from[stage + 1] - 1, a.own_from[stage] - 1, -1):
            chunk = a.own[n]
            mf, mb, mw = count[chunk], count[total + chunk], count[2 * total + chunk]
            if mf < size:
                when = _ready(a, end, chunk, mf)
                if when < _NEVER:
                    need = alive[stage] + a.add[chunk] + later[chunk] + deeper
                    if need > limit[stage]:
                        blocked = blocked or when <= now
                    elif when > now:
                        coming_f = min(coming_f, when)
                    elif f < 0 or prefer == SHALLOW or (prefer == OLD and mf // stages <= count[f] // stages):
                        f = chunk
                if mw == mf:
                    deeper += a.keep[chunk] + later[chunk]
            if mb < mf:
                when = max(_ready(a, end, total + chunk, mb), end[chunk * size + mb])
                if when > now:
                    coming_b = min(coming_b, when)
                elif b < 0 or mb < count[total + b]:
                    b = chunk
            if mw < mb and (w < 0 or mw <= count[2 * total + w]):
                w = chunk
        if f >= 0 and b >= 0:
            if turn == ALTERNATE and not forward_last[stage]:
                b = -1
            else:
                f = -1
        coming = min(coming_b, coming_f)
        entry = -1
        if b >= 0:
            entry = total + b
        elif f >= 0:
            entry = f
            if coming_b - now < look * a.duration[f]:
                entry = -1
                coming = coming_b
        if entry < 0:
            if w >= 0:
                weight = a.duration[2 * total + w]
                if blocked or coming == _NEVER or now + weight * (1.0 - overrun) <= coming:
                    entry = 2 * total + w
            if entry < 0:
                event[stage] = coming
                continue
        order[place[stage]] = entry
        place[stage] += 1
        left -= 1
        kind = entry // total
        chunk = entry % total
        m = count[entry]
        count[entry] += 1
        alive[stage] += a.keep[entry]
        if kind == 0:
            alive[stage] += later[chunk]
            forward_last[stage] = True
        elif kind == 1:
            alive[stage] -= later[chunk]
            forward_last[stage] = False
        done = now + a.duration[entry]
        free[stage] = done
        event[stage] = done
        if kind < 2:
            end[entry * size + m] = done
            # whoever needs it looks when it arrives
            for n in range(a.out[entry], a.out[entry + 1]):
                target = a.target[n]
                at = a.stage_of[target % total]
                for k in range(a.into[target], a.into[target + 1]):
                    if a.source[k] == entry:
                        event[at] = min(event[at], max(done + a.delay[k], free[at]))
    return True
