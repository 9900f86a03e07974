"""When each job of a schedule starts and ends, if every job starts as soon as it can.

One pass over the jobs with a worklist: a stage that lacks an input is set aside under the job that it waits
for, and goes on when that job has run. Linear in jobs and edges. The simulator, the lowering and the drawings
read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .coded import Codes
from .jobs import Edge, Job, Kind
from .schedule import BACKWARD, BACKWARD_B, BACKWARD_W, FORWARD, Schedule

#: (kind, chunk) -> duration
Duration = Callable[[Kind, int], float]
#: edge -> time from the end of its producer until its value is there
Delay = Callable[[Edge], float]


class Stuck(Exception):
    """The order can't run. waits[stage] = (job that can't start, job that it waits for)."""

    def __init__(self, waits: dict[int, tuple[Job, Job]]) -> None:
        self.waits = waits
        super().__init__("; ".join(f"stage {s}: {a} waits for {b}" for s, (a, b) in sorted(waits.items())))


@dataclass
class Times:
    """start[stage][i], end[stage][i] of the stage's i-th job. runs: (stage, number of jobs) of each piece of a list
    that was walked at once, in an order in which every job comes after those that it needs."""

    start: list[list[float]]
    end: list[list[float]]
    runs: tuple[list[int], list[int]]

    @property
    def makespan(self) -> float:
        return max((ends[-1] for ends in self.end if ends), default=0.0)

    def turns(self) -> tuple[Codes, ...]:
        """turns[stage][i]: the number of the stage's i-th job in an order of all jobs in which every job comes after
        those that it needs."""
        stages, lengths = (np.asarray(values, dtype=np.int64) for values in self.runs)
        first = np.cumsum(lengths) - lengths
        by_stage = np.argsort(stages, kind="stable")
        bounds = np.searchsorted(stages[by_stage], np.arange(len(self.start) + 1))
        out = []
        for stage, starts in enumerate(self.start):
            mine = by_stage[bounds[stage] : bounds[stage + 1]]
            begin = np.cumsum(lengths[mine]) - lengths[mine]
            out.append(np.repeat(first[mine] - begin, lengths[mine]) + np.arange(len(starts)))
        return tuple(out)


def times(schedule: Schedule, duration: Duration, edges: Sequence[Edge], delay: Delay) -> Times:
    """The times of a schedule under costs. Each job must be there once; raises Stuck if the order has a
    cycle."""
    total, micro_batches = schedule.total_chunks, schedule.micro_batches
    size = total * micro_batches
    cost = [[duration(kind, chunk) for chunk in range(total)] for kind in ("F", "B", "W", "X")]
    inputs = _inputs(total, size, micro_batches, edges, delay)
    end = [-1.0] * (2 * size)  # of F's and of B's or X's, −1: has not run
    waiters: dict[int, list[int]] = {}  # job that has not run -> the stages that wait for it
    start_of: list[list[float]] = [[0.0] * len(codes) for codes in schedule.codes]
    end_of: list[list[float]] = [[0.0] * len(codes) for codes in schedule.codes]
    orders = [codes.tolist() for codes in schedule.codes]
    place = [0] * schedule.stages
    clock = [0.0] * schedule.stages
    walked: list[int] = []
    lengths: list[int] = []
    runnable = list(range(schedule.stages - 1, -1, -1))
    while runnable:
        stage = runnable.pop()
        order, starts, ends = orders[stage], start_of[stage], end_of[stage]
        at, now = place[stage], clock[stage]
        while at < len(order):
            kind, rest = divmod(order[at], size)
            chunk = rest // micro_batches
            blocked = -1
            begin = now
            for offset, wait in inputs[kind][chunk]:
                there = end[rest + offset]
                if there < 0:
                    blocked = rest + offset
                    break
                if there + wait > begin:
                    begin = there + wait
            if blocked >= 0:
                waiters.setdefault(blocked, []).append(stage)
                break
            now = begin + cost[kind][chunk]
            starts[at], ends[at] = begin, now
            at += 1
            if kind != BACKWARD_W:
                done = rest if kind == FORWARD else rest + size
                end[done] = now
                if done in waiters:
                    runnable += waiters.pop(done)
        walked.append(stage)
        lengths.append(at - place[stage])
        place[stage], clock[stage] = at, now
    if any(at < len(order) for at, order in zip(place, orders, strict=True)):
        raise Stuck(_waits(schedule, place, waiters))
    return Times(start_of, end_of, (walked, lengths))


def _inputs(
    total: int, size: int, micro_batches: int, edges: Sequence[Edge], delay: Delay
) -> list[list[list[tuple[int, float]]]]:
    """inputs[kind][chunk]: (where the end of the input lies, counted from the job's own number; delay)
    pairs."""
    forward: list[list[tuple[int, float]]] = [[] for _ in range(total)]
    backward: list[list[tuple[int, float]]] = [[(0, 0.0)] for _ in range(total)]
    for edge in edges:
        offset = (edge.source - edge.target) * micro_batches
        if edge.direction == "F":
            forward[edge.target].append((offset, delay(edge)))
        else:
            backward[edge.target].append((size + offset, delay(edge)))
    by_kind = {
        FORWARD: forward,
        BACKWARD_B: backward,
        BACKWARD_W: [[(size, 0.0)]] * total,
        BACKWARD: backward,
    }
    return [by_kind[kind] for kind in range(4)]


def _waits(schedule: Schedule, place: list[int], waiters: dict[int, list[int]]) -> dict[int, tuple[Job, Job]]:
    jobs = schedule.jobs
    waits = {}
    for code, stages in waiters.items():
        missing = schedule.coding.decode(code)
        whole = missing._replace(kind="X")
        if missing.kind == "B" and whole in jobs[schedule.placement[missing.chunk]]:
            missing = whole
        for stage in stages:
            waits[stage] = (jobs[stage][place[stage]], missing)
    return waits
