"""The kernels that judge an order: when it ends, and whether it fits.

`finish` times all jobs in one pass with a worklist: a stage that lacks an input is set aside under the job
that it waits for, and goes on when that job has run. It gives up as soon as some stage's clock and the work
left on it pass a bound, which is how most bad moves of a search end. `fits` walks one stage's bytes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from .case import Arrays, Case, Floats, Ints
from .compiled import compiled

#: what `finish` returns for an order that can't run, and for one that passes the bound
STUCK: Final = 1e300
LATE: Final = 1e299

_NEVER: Final = -1.0  # in `end`: has not run, and no stage waits for it; −2−s: stage s waits for it


class Scratch(NamedTuple):
    """Working memory of `finish`.

    start[i], number[i]: start and micro-batch of the order's i-th entry; end[entry · M + m], where[entry · M
    + m]: end and place of F's and B's; clock[stage]: when a stage is done. The rest is its own.
    """

    start: Floats
    number: Ints
    end: Floats
    where: Ints
    place: Ints
    clock: Floats
    left: Floats
    count: Ints
    behind: Ints
    stack: Ints


def scratch(case: Case) -> Scratch:
    """Fresh working memory for a case."""
    stages, total, jobs = case.stages, len(case.placement), 2 * len(case.placement) * case.micro_batches
    return Scratch(
        np.zeros(case.jobs),
        np.zeros(case.jobs, dtype=np.int64),
        np.zeros(jobs),
        np.zeros(jobs, dtype=np.int64),
        np.zeros(stages, dtype=np.int64),
        np.zeros(stages),
        np.zeros(stages),
        np.zeros(3 * total, dtype=np.int64),
        np.zeros(stages, dtype=np.int64),
        np.zeros(stages, dtype=np.int64),
    )


@compiled
def finish(a: Arrays, order: Ints, work: Scratch, bound: float) -> tuple[float, int]:
    """(makespan, jobs timed). STUCK where the order can't run, LATE where it must end after `bound`."""
    total, size = a.total, a.micro_batches
    work.end[:] = _NEVER
    work.count[:] = 0
    top = 0
    for stage in range(a.stages - 1, -1, -1):
        work.place[stage] = a.offset[stage]
        work.clock[stage] = 0.0
        work.behind[stage] = -1
        work.stack[top] = stage
        top += 1
        work.left[stage] = a.work[stage]
    done = 0
    while top > 0:
        top -= 1
        stage = work.stack[top]
        now = work.clock[stage]
        i = work.place[stage]
        last = a.offset[stage + 1]
        left = work.left[stage]
        while i < last:
            entry = order[i]
            if entry >= 2 * total:
                # a W, or a joined one that doesn't follow its B
                plain = entry if entry < 3 * total else entry - total
                if work.count[plain] >= work.count[plain - total]:
                    return STUCK, done
                work.number[i] = work.count[plain]
                work.count[plain] += 1
                work.start[i] = now
                now += a.duration[plain]
                left -= a.least[plain]
                i += 1
                done += 1
                continue
            m = work.count[entry]
            if entry >= total and work.count[entry - total] <= m:
                return STUCK, done
            begin = now
            blocked = -1
            for k in range(a.into[entry], a.into[entry + 1]):
                job = a.source[k] * size + m
                there = work.end[job]
                if there < 0.0:
                    if a.delay[k] < 0.0:
                        return STUCK, done
                    blocked = job
                    break
                if a.delay[k] > 0.0:
                    there += a.delay[k]
                if there > begin:
                    begin = there
            if blocked >= 0:
                # several stages may wait for one job: `behind` chains them
                work.behind[stage] = -1 if work.end[blocked] == _NEVER else np.int64(-2.0 - work.end[blocked])
                work.end[blocked] = -2.0 - stage
                break
            work.count[entry] = m + 1
            work.number[i] = m
            work.start[i] = begin
            job = entry * size + m
            work.where[job] = i
            now = begin + a.duration[entry]
            left -= a.least[entry]
            i += 1
            done += 1
            if entry >= total and i < last and order[i] == entry + 2 * total:
                weight = entry + total
                if work.count[weight] == m:
                    work.count[weight] = m + 1
                    work.number[i] = m
                    work.start[i] = now
                    now += a.duration[entry + 2 * total]
                    left -= a.least[weight]
                    i += 1
                    done += 1
            waiting = work.end[job]
            work.end[job] = now
            if now + left > bound:
                return LATE, done
            while waiting != _NEVER:
                other = np.int64(-2.0 - waiting)
                work.stack[top] = other
                top += 1
                waiting = -2.0 - work.behind[other] if work.behind[other] >= 0 else _NEVER
        work.place[stage] = i
        work.clock[stage] = now
        work.left[stage] = left
    makespan = 0.0
    for stage in range(a.stages):
        if work.place[stage] < a.offset[stage + 1]:
            return STUCK, done
        makespan = max(makespan, work.clock[stage])
    return makespan, done


@compiled
def fits(a: Arrays, order: Ints, stage: int, count: Ints) -> bool:
    """Whether a stage's bytes stay within its limit. count: working memory, 3 · C numbers."""
    total = a.total
    for entry in range(3 * total):
        count[entry] = 0
    alive = 0.0
    i = a.offset[stage]
    last = a.offset[stage + 1]
    limit = a.limit[stage]
    while i < last:
        entry = order[i]
        chunk = entry % total
        pair = total <= entry < 2 * total and i + 1 < last and order[i + 1] == entry + 2 * total
        if pair and count[entry] == count[entry + total]:
            if alive + a.join_add[chunk] > limit:
                return False
            alive += a.join_keep[chunk]
            count[entry] += 1
            count[entry + total] += 1
            i += 2
            continue
        if alive + a.add[entry] > limit:
            return False
        alive += a.keep[entry]
        count[entry if entry < 3 * total else entry - total] += 1
        i += 1
    return True
