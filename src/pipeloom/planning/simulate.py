"""Predicts a step: times, bubbles, memory.

Takes a schedule and costs. Without lowered lists every job starts as soon as its inputs are there, the best
that the order allows; with them, ranks walk their lists, and blocked sends and receives count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..schedules.jobs import Edge, chain_edges
from ..schedules.schedule import Schedule
from ..schedules.timeline import Flow, Span, StepFigures, Timeline
from ..schedules.timing import times
from .costs import Costs
from .lower import Lowered
from .memory import Levels, incoming, levels
from .replay import replay


@dataclass(frozen=True)
class Simulation:
    """A predicted step. start[stage][i], end[stage][i]: times of the stage's i-th compute job; others: waits
    and the step's last two jobs; memory[stage]: bytes along its list. Times and bytes are in the units of the
    costs."""

    schedule: Schedule
    costs: Costs
    start: Sequence[Sequence[float]]
    end: Sequence[Sequence[float]]
    others: Sequence[Span]
    flows: Sequence[Flow]
    memory: Sequence[Levels]

    @property
    def makespan(self) -> float:
        """From the first compute job's start to the last one's end."""
        begin = min((s[0] for s in self.start if s), default=0.0)
        return max((e[-1] for e in self.end if e), default=0.0) - begin

    @property
    def peak(self) -> tuple[float, ...]:
        """The most bytes alive on each stage."""
        return tuple(level.peak for level in self.memory)

    @cached_property
    def figures(self) -> StepFigures:
        return self.timeline("predicted").figures(tuple(round(p) for p in self.peak))

    @property
    def bubble_global(self) -> float:
        return self.figures.bubble_global

    @property
    def bubble_span(self) -> float:
        return self.figures.bubble_span

    def timeline(self, title: str) -> Timeline:
        """The step in the schema that measured steps share."""
        spans = list(self.others)
        memory = []
        for stage, jobs in enumerate(self.schedule.jobs):
            starts, ends, level = self.start[stage], self.end[stage], self.memory[stage]
            points = [(0.0, level.base)]
            for index, job in enumerate(jobs):
                spans.append(Span(stage, *job, starts[index], ends[index]))
                points.append((starts[index], level.during[index]))
                points.append((ends[index], level.after[index]))
            memory.append(points)
        spans.sort(key=lambda span: (span.start, span.rank))
        return Timeline(title, self.schedule.stages, spans, list(self.flows), memory, self.costs.unit)


def simulate(
    schedule: Schedule, costs: Costs, edges: Sequence[Edge] | None = None, lowered: Lowered | None = None
) -> Simulation:
    """The predicted step. edges: a plain chain by default. lowered: the schedule's lists, with their own
    edges. Raises timing.Stuck for an order with a cycle, replay.Hang for lists that hang, ValueError for
    costs of another number of chunks."""
    if costs.chunks != schedule.total_chunks:
        raise ValueError(
            f"the costs are of {costs.chunks} chunks and the schedule has {schedule.total_chunks} "
            f"({schedule.stages} stages × {schedule.chunks})"
        )
    if lowered is not None:
        walked = replay(lowered, costs)
        into = incoming(lowered.edges)
        memory = [levels(jobs, stage, costs, into) for stage, jobs in enumerate(lowered.jobs)]
        others = walked.waits + ([] if lowered.forward_only else _tails(walked.clock, costs))
        return Simulation(schedule, costs, walked.start, walked.end, others, walked.flows, memory)
    used = chain_edges(schedule.total_chunks) if edges is None else list(edges)
    when = times(schedule, costs.duration, used, lambda edge: costs.delay(edge, schedule.placement))
    memory = [levels(jobs, stage, costs, {}) for stage, jobs in enumerate(schedule.jobs)]
    others = [] if schedule.forward_only else _tails([ends[-1] if ends else 0.0 for ends in when.end], costs)
    return Simulation(
        schedule, costs, when.start, when.end, others, _flows(schedule, used, when.end, costs), memory
    )


def simulation_json(schedule: Schedule, simulation: Simulation, bound: float) -> dict[str, Any]:
    """What `pipeloom simulate --json` writes, in the units of the costs."""
    return {
        "placement": list(schedule.placement),
        "jobs": [[str(job) for job in jobs] for jobs in schedule.jobs],
        "makespan": simulation.makespan,
        "bubble_global": simulation.bubble_global,
        "bubble_span": simulation.bubble_span,
        "peak": list(simulation.peak),
        "lower_bound": bound,
    }


def _tails(clock: Sequence[float], costs: Costs) -> list[Span]:
    """finalize on each stage once its list is done, and update once all stages have finalized (the gradient
    norm is all stages' business)."""
    finalized = [now + costs.finalize for now in clock]
    ready = max(finalized)
    spans = [
        Span(stage, "finalize", -1, -1, now, done)
        for stage, (now, done) in enumerate(zip(clock, finalized, strict=True))
    ]
    return spans + [Span(stage, "update", -1, -1, ready, ready + costs.update) for stage in range(len(clock))]


def _flows(
    schedule: Schedule, edges: Sequence[Edge], ends: Sequence[Sequence[float]], costs: Costs
) -> list[Flow]:
    placement = schedule.placement
    made: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for stage, jobs in enumerate(schedule.jobs):
        for job, end in zip(jobs, ends[stage], strict=True):
            if job.kind != "W":
                made.setdefault(("F" if job.kind == "F" else "B", job.chunk), []).append(
                    (job.micro_batch, end)
                )
    flows = []
    for edge in edges:
        sender, receiver = placement[edge.source], placement[edge.target]
        if sender != receiver:
            delay = costs.delay(edge, placement)
            for micro_batch, end in made.get((edge.direction, edge.source), ()):
                message = (edge.direction, edge.source, edge.target, micro_batch)
                flows.append(Flow(*message, sender, receiver, end, end + delay, edge.nbytes))
    return flows
