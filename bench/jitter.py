"""Steps whose jobs don't always take the same time: learned from steps of 1F1B, used to predict other orders.

On a machine with other work a job takes now more, now less than its median, for both ranks or for one. Ranks that wait
for each other lose by it: a step takes longer than its median jobs add up to, and the more so the tighter the order is.
So the steps that were watched are played again: in the n-th, a rank's jobs are stretched as its jobs in the n-th
watched step were, at the same part of its work.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pipeloom import Plan
from pipeloom.schedules.timeline import Span, Timeline

#: kinds of jobs that compute
COMPUTE = "FBWX"

#: a kind of job of one chunk
Class = tuple[str, int]
#: which parts of a rank's work took how much longer than they should: (begin, end, factor); begin and end from 0 to 1
Stretches = list[tuple[float, float, float]]


@dataclass(frozen=True)
class Jitter:
    """steps[n][rank]: the stretches of a watched step."""

    steps: list[list[Stretches]]

    @classmethod
    def of(cls, timelines: Sequence[Timeline]) -> Jitter:
        usual = medians(timelines)
        return cls([[_stretches(jobs, usual) for jobs in jobs_of(timeline)] for timeline in timelines])

    def makespan(self, plan: Plan) -> float:
        """Seconds from the first job to the end of the last one: the median of the watched steps, played again."""
        return statistics.median(_play(plan, stretches) for stretches in self.steps)


def medians(timelines: Sequence[Timeline]) -> dict[Class, float]:
    """{(kind, chunk): median seconds of a job}."""
    found: dict[Class, list[float]] = defaultdict(list)
    for timeline in timelines:
        for job in (job for jobs in jobs_of(timeline) for job in jobs):
            found[job.kind, job.chunk].append(job.end - job.start)
    return {class_: statistics.median(seconds) for class_, seconds in found.items()}


def jobs_of(timeline: Timeline) -> list[list[Span]]:
    """Each rank's jobs in their order."""
    jobs: list[list[Span]] = [[] for _ in range(timeline.ranks)]
    for span in sorted(timeline.spans, key=lambda span: span.start):
        if span.kind in COMPUTE:
            jobs[span.rank].append(span)
    return jobs


def _stretches(jobs: Sequence[Span], usual: dict[Class, float]) -> Stretches:
    """What a rank's jobs took ÷ what such jobs usually take."""
    should = [usual[job.kind, job.chunk] for job in jobs]
    edges = [edge / sum(should) for edge in accumulate(should, initial=0.0)]
    took = [(job.end - job.start) / s if s else 1.0 for job, s in zip(jobs, should, strict=True)]
    return list(zip(edges, edges[1:], took, strict=False))


def _play(plan: Plan, stretches: Sequence[Stretches]) -> float:
    """Seconds of the plan's step with these stretches: each job starts when its rank is free and what it needs is
    there."""
    orders = jobs_of(plan.timeline())
    took = [_stretched(jobs, s) for jobs, s in zip(orders, stretches, strict=True)]
    home = {(job.kind, job.chunk, job.micro_batch): job.rank for jobs in orders for job in jobs}
    above = {way: [(e.source, e.target) for e in plan.lowered.edges if e.direction == way] for way in "FB"}

    def needs(job: Span) -> list[tuple[str, int, int]]:
        kind, chunk, m = job.kind, job.chunk, job.micro_batch
        if kind == "F":
            return [("F", source, m) for source, target in above["F"] if target == chunk]
        if kind == "W":
            return [("B" if ("B", chunk, m) in home else "F", chunk, m)]
        return [("F", chunk, m)] + [(kind, source, m) for source, target in above["B"] if target == chunk]

    end: dict[tuple[str, int, int], float] = {}
    done, clock = [0] * len(orders), [0.0] * len(orders)
    while len(end) < len(home):
        for rank, jobs in enumerate(orders):
            while done[rank] < len(jobs):
                job = jobs[done[rank]]
                wanted = [need for need in needs(job) if need in home]
                if any(need not in end for need in wanted):
                    break
                there = [end[need] + (plan.costs.latency if home[need] != rank else 0.0) for need in wanted]
                clock[rank] = max([clock[rank], *there]) + took[rank][done[rank]]
                end[job.kind, job.chunk, job.micro_batch] = clock[rank]
                done[rank] += 1
    return max(clock)


def _stretched(jobs: Sequence[Span], stretches: Stretches) -> list[float]:
    """Seconds of a rank's jobs: what each should take times the mean stretch over its part of the work."""
    should = [job.end - job.start for job in jobs]
    edges = [edge / sum(should) for edge in accumulate(should, initial=0.0)]
    found = []
    for seconds, begin, end in zip(should, edges, edges[1:], strict=False):
        shared = sum(f * max(0.0, min(end, b) - max(begin, a)) for a, b, f in stretches)
        found.append(seconds * shared / (end - begin) if end > begin else 0.0)
    return found
