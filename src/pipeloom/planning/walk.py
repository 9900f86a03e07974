"""The kernels that judge an order: when it ends, and whether it fits.

`finish` times all jobs in one pass with a worklist: a stage that lacks an input is set aside under the job
that it waits for, and goes on when that job has run. `fits` walks one stage's bytes. Both leave behind what
retime.py needs to judge a change.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from .case import Arrays, Case, Floats, Ints
from .compiled import compiled

#: what `finish` returns for an order that can't run
STUCK: Final = 1e300

_NEVER: Final = -1.0  # in `end`: has not run, and no stage waits for it; −2−s: stage s waits for it


class Times(NamedTuple):
    """An order's times, and working memory.

    Of the order's i-th entry: start[i], done[i], its micro-batch number[i], the bytes level[i] alive after it,
    and the work rest[i] that its stage has left after it. Of F's and B's: end[entry · M + m], and their places
    where[entry · M + m]. The rest is the kernels' own.
    """

    start: Floats
    done: Floats
    number: Ints
    level: Floats
    rest: Floats
    end: Floats
    where: Ints
    place: Ints
    clock: Floats
    seen: Ints
    behind: Ints
    stack: Ints


def blank(case: Case) -> Times:
    """Room for the times of a case's orders."""
    stages, total = case.stages, len(case.placement)
    entries, jobs = case.jobs, 2 * total * case.micro_batches

    def ints(count: int) -> Ints:
        return np.zeros(count, dtype=np.int64)

    return Times(
        start=np.zeros(entries),
        done=np.zeros(entries),
        number=ints(entries),
        level=np.zeros(entries),
        rest=np.zeros(entries),
        end=np.zeros(jobs),
        where=ints(jobs),
        place=ints(stages),
        clock=np.zeros(stages),
        seen=ints(3 * total),
        behind=ints(stages),
        stack=ints(stages),
    )


@compiled
def finish(a: Arrays, order: Ints, t: Times) -> float:
    """The makespan, or STUCK where the order can't run."""
    total, size = a.total, a.micro_batches
    t.end[:] = _NEVER
    t.seen[:] = 0
    top = 0
    for stage in range(a.stages - 1, -1, -1):
        t.place[stage] = a.offset[stage]
        t.clock[stage] = 0.0
        t.behind[stage] = -1
        t.stack[top] = stage
        top += 1
    while top > 0:
        top -= 1
        stage = t.stack[top]
        now = t.clock[stage]
        i = t.place[stage]
        last = a.offset[stage + 1]
        while i < last:
            entry = order[i]
            if entry >= 2 * total:
                # a W, or a joined one that doesn't follow its B
                plain = entry if entry < 3 * total else entry - total
                if t.seen[plain] >= t.seen[plain - total]:
                    return STUCK
                t.number[i] = t.seen[plain]
                t.seen[plain] += 1
                t.start[i] = now
                now += a.duration[plain]
                t.done[i] = now
                i += 1
                continue
            m = t.seen[entry]
            if entry >= total and t.seen[entry - total] <= m:
                return STUCK
            begin = now
            blocked = -1
            for k in range(a.into[entry], a.into[entry + 1]):
                job = a.source[k] * size + m
                there = t.end[job]
                if there < 0.0:
                    if a.near[k]:
                        return STUCK
                    blocked = job
                    break
                begin = max(begin, there + a.delay[k])
            if blocked >= 0:
                # several stages may wait for one job: `behind` chains them
                ahead = t.end[blocked]
                t.behind[stage] = -1 if ahead == _NEVER else np.int64(-2.0 - ahead)
                t.end[blocked] = -2.0 - stage
                break
            t.seen[entry] = m + 1
            t.number[i] = m
            t.start[i] = begin
            job = entry * size + m
            t.where[job] = i
            now = begin + a.duration[entry]
            joined = False
            if entry >= total and i + 1 < last and order[i + 1] == entry + 2 * total:
                joined = t.seen[entry + total] == m
            if joined:
                now += a.duration[entry + 2 * total]
                t.seen[entry + total] = m + 1
                t.number[i + 1] = m
                t.start[i + 1] = now
                t.done[i + 1] = now
            t.done[i] = now
            i += 2 if joined else 1
            waiting = t.end[job]
            t.end[job] = now
            while waiting != _NEVER:
                other = np.int64(-2.0 - waiting)
                t.stack[top] = other
                top += 1
                waiting = -2.0 - t.behind[other] if t.behind[other] >= 0 else _NEVER
        t.place[stage] = i
        t.clock[stage] = now
    makespan = 0.0
    for stage in range(a.stages):
        if t.place[stage] < a.offset[stage + 1]:
            return STUCK
        makespan = max(makespan, t.clock[stage])
        rest = 0.0
        for i in range(a.offset[stage + 1] - 1, a.offset[stage] - 1, -1):
            t.rest[i] = rest
            entry = order[i]
            rest += a.least[entry if entry < 3 * total else entry - total]
    return makespan


@compiled
def fits(a: Arrays, order: Ints, t: Times, stage: int, begin: int, end: int) -> bool:
    """Whether a stage's bytes stay within its limit from entry `begin` up to `end`, which doesn't part a B from
    the W that it is joined with. Reads t.level before `begin` and t.number, and writes t.level."""
    total = a.total
    limit = a.limit[stage]
    level, number = t.level, t.number
    i = begin
    alive = level[i - 1] if i > a.offset[stage] else 0.0
    while i < end:
        entry = order[i]
        if i + 1 < end and joined(entry, order[i + 1], total) and number[i + 1] == number[i]:
            if alive + a.join_add[entry - total] > limit:
                return False
            level[i] = alive
            alive += a.join_keep[entry - total]
            i += 1
        else:
            if alive + a.add[entry] > limit:
                return False
            alive += a.keep[entry]
        level[i] = alive
        i += 1
    return True


@compiled
def joined(entry: int, following: int, total: int) -> bool:
    """Whether an entry is a B and the next one a W of its chunk that joins the B of its micro-batch."""
    return total <= entry < 2 * total and following == entry + 2 * total
