"""Predicts a step: times, bubbles, memory.

Takes a schedule and costs. Without lowered lists every job starts as soon as its inputs are there, the best
that the order allows; with them, ranks walk their lists, and blocked sends and receives count. Lists that carry
planned times for these costs are not walked again: the plan's promise is that they take just that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..schedules.jobs import Edge, chain_edges
from ..schedules.schedule import BACKWARD, BACKWARD_W, Schedule
from ..schedules.timeline import Flow, Span, StepFigures, Timeline, step_figures
from ..schedules.timing import times
from .costs import Costs
from .entries import EntryCoding
from .lower import Lowered, lower
from .memory import Levels, levels
from .replay import Replay, replay


@dataclass(frozen=True)
class Simulation:
    """A predicted step. start[stage][i], end[stage][i]: times of the stage's i-th compute job; clock[stage]: when its
    list is done; memory[stage]: bytes along its list. edges, lowered: what was simulated; walked: the walk along the
    lists, where planned times wouldn't do. Times and bytes are in the units of the costs."""

    schedule: Schedule
    costs: Costs
    start: Sequence[Sequence[float]]
    end: Sequence[Sequence[float]]
    clock: Sequence[float]
    memory: Sequence[Levels]
    edges: Sequence[Edge] = field(repr=False)
    lowered: Lowered | None = field(repr=False)
    walked: Replay | None = field(repr=False)

    @property
    def makespan(self) -> float:
        """From the first compute job's start to the last one's end."""
        begin = min((s[0] for s in self.start if s), default=0.0)
        return max((e[-1] for e in self.end if e), default=0.0) - begin

    @property
    def peak(self) -> tuple[float, ...]:
        """The most bytes alive on each stage."""
        return tuple(level.peak for level in self.memory)

    @property
    def peak_held(self) -> tuple[float, ...]:
        """The same without the buffers of posted receives: what always stays, activations and workspace."""
        return tuple(level.peak_held for level in self.memory)

    @property
    def peak_buffered(self) -> tuple[float, ...]:
        """The most that posted receives take on each stage, before their messages are consumed."""
        return tuple(level.peak_buffered for level in self.memory)

    @cached_property
    def figures(self) -> StepFigures:
        work = [float(np.subtract(e, s).sum()) for s, e in zip(self.start, self.end, strict=True)]
        first = [s[0] if s else float("inf") for s in self.start]
        last = [e[-1] if e else 0.0 for e in self.end]
        end = max([*last, *self.clock, *(span.end for span in self._tails)])
        return step_figures(work, first, last, end, tuple(round(p) for p in self.peak))

    @property
    def bubble_global(self) -> float:
        return self.figures.bubble_global

    @property
    def bubble_span(self) -> float:
        return self.figures.bubble_span

    @property
    def others(self) -> list[Span]:
        """Waits, reductions over replicas, and the step's last two jobs."""
        waits = [] if self._replay is None else self._replay.waits
        return [*waits, *self._tails]

    @property
    def flows(self) -> list[Flow]:
        """The messages between stages."""
        if self._replay is not None:
            return self._replay.flows
        return _flows(self.schedule, self.edges, self.end, self.costs)

    def timeline(self, title: str) -> Timeline:
        """The step in the schema that measured steps share."""
        spans = self.others
        memory = []
        for stage, jobs in enumerate(self.schedule.jobs):
            starts, ends, level = self.start[stage], self.end[stage], self.memory[stage]
            points = [(0.0, level.base)]
            levels_of = zip(level.during.tolist(), level.after.tolist(), strict=True)
            for job, start, end, (during, after) in zip(jobs, starts, ends, levels_of, strict=True):
                spans.append(Span(stage, *job, start, end))
                points += [(start, during), (end, after)]
            memory.append(points)
        spans.sort(key=lambda span: (span.start, span.rank))
        return Timeline(title, self.schedule.stages, spans, list(self.flows), memory, self.costs.unit)

    @cached_property
    def _replay(self) -> Replay | None:
        """The walk along the lists, if there are lists. Walked late where planned times did for the rest."""
        if self.walked is None and self.lowered is not None:
            return replay(self.lowered, self.costs)
        return self.walked

    @cached_property
    def _tails(self) -> list[Span]:
        return [] if self.schedule.forward_only else _tails(self.schedule, self.clock, self.end, self.costs)


def simulate(
    schedule: Schedule, costs: Costs, edges: Sequence[Edge] | None = None, lowered: Lowered | None = None
) -> Simulation:
    """The predicted step. edges: a plain chain by default. lowered: the schedule's lists, verified, with their own
    edges. Raises timing.Stuck for an order with a cycle, replay.Hang for lists that hang, ValueError for
    costs of another number of chunks."""
    if costs.chunks != schedule.total_chunks:
        raise ValueError(
            f"the costs are of {costs.chunks} chunks and the schedule has {schedule.total_chunks} "
            f"({schedule.stages} stages × {schedule.chunks})"
        )
    if lowered is not None:
        memory = [levels(lowered.codes, lowered.coding, stage, costs) for stage in range(lowered.stages)]
        planned = lowered.certificate
        if planned is not None and planned.costs == costs and not costs.exclusive_links:
            start, end = ([t.tolist() for t in side] for side in (planned.start, planned.end))
            return Simulation(schedule, costs, start, end, _last(end), memory, lowered.edges, lowered, None)
        walked = replay(lowered, costs)
        return Simulation(
            schedule, costs, walked.start, walked.end, walked.clock, memory, lowered.edges, lowered, walked
        )
    coding = EntryCoding(schedule.placement, schedule.micro_batches, ())
    memory = [levels(schedule.codes, coding, stage, costs) for stage in range(schedule.stages)]
    used = chain_edges(schedule.total_chunks) if edges is None else list(edges)
    if costs.exclusive_links:  # who is on a link first is known only when ranks walk
        walked = replay(lower(schedule, used, costs), costs, rendezvous=False)
        return Simulation(schedule, costs, walked.start, walked.end, walked.clock, memory, used, None, walked)
    when = times(schedule, costs.duration, used, lambda edge: costs.delay(edge, schedule.placement))
    return Simulation(schedule, costs, when.start, when.end, _last(when.end), memory, used, None, None)


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


def _last(ends: Sequence[Sequence[float]]) -> list[float]:
    return [mine[-1] if mine else 0.0 for mine in ends]


def _tails(
    schedule: Schedule, clock: Sequence[float], ends: Sequence[Sequence[float]], costs: Costs
) -> list[Span]:
    """A stage's reductions, and what follows its list: the wait for them, finalize, and update once all stages have
    finalized (the gradient norm is all stages' business)."""
    spans = []
    finalized = []
    for stage, now in enumerate(clock):
        reductions = _reductions(schedule, stage, ends[stage], costs)
        spans += reductions
        reduced = max([now, *(span.end for span in reductions)])
        if reduced > now:
            spans.append(Span(stage, "wait", -1, -1, now, reduced))
        finalized.append(reduced + costs.finalize)
        spans.append(Span(stage, "finalize", -1, -1, reduced, finalized[-1]))
    ready = max(finalized)
    return spans + [Span(stage, "update", -1, -1, ready, ready + costs.update) for stage in range(len(clock))]


def _reductions(schedule: Schedule, stage: int, ends: Sequence[float], costs: Costs) -> list[Span]:
    """When a stage's gradients are reduced: chunk by chunk from the last W of each on, one at a time."""
    if not any(costs.reduce):
        return []
    kind_chunk = schedule.codes[stage] // schedule.micro_batches
    kind, chunk = np.divmod(kind_chunk, schedule.total_chunks)
    weights = (kind == BACKWARD_W) | (kind == BACKWARD)
    last = {int(c): e for c, e in zip(chunk[weights], np.asarray(ends)[weights].tolist(), strict=True)}
    spans: list[Span] = []
    for ready, one in sorted((end, c) for c, end in last.items() if costs.reduce[c]):
        begin = max(ready, spans[-1].end) if spans else ready
        spans.append(Span(stage, "reduce", one, -1, begin, begin + costs.reduce[one]))
    return spans


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
