"""Every plan that a model could run with, side by side: what `pipeloom plan` puts in its table.

A Candidate is a placement with its chunks' costs. Each schedule of the catalogue that takes it becomes a Row: the
plan, lowered and proven, with its time, memory and traffic. The search's own plans are rows like the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ..schedules import build
from ..schedules.catalogue import CATALOGUE
from ..schedules.jobs import Edge
from ..schedules.schedule import Schedule, linear, loop, vee
from .bounds import lower_bound
from .costs import Costs
from .plan import Plan
from .recompute import added_seconds, least, mixed

#: rows whose makespans differ by less are as good as each other; the simpler one is chosen
EVEN: Final = 1e-3

AUTO: Final = "auto"


@dataclass(frozen=True)
class Candidate:
    """A placement called `name` (linear, loop or v), with `chunks` a stage, cut at `cuts`: positions in the order of
    the model's forward ops. again: its costs if all chunks were computed again in the backward; recompute: the chunks
    that are, in `costs`, and extra: by what share they add to all jobs' seconds."""

    name: str
    chunks: int
    placement: tuple[int, ...]
    cuts: tuple[int, ...]
    costs: Costs
    edges: tuple[Edge, ...]
    again: Costs | None = None
    recompute: tuple[int, ...] = ()
    extra: float = 0.0

    def recomputed(self, chunks: Iterable[int]) -> Candidate:
        """With these chunks computed again; of a candidate in which none is yet, and that knows what it costs."""
        assert self.again is not None
        which = tuple(sorted(chunks))
        whole = sum(map(sum, (self.costs.forward, self.costs.backward_b, self.costs.backward_w)))
        extra = added_seconds(self.costs, self.again, which) / whole if whole else 0.0
        return replace(self, costs=mixed(self.costs, self.again, which), recompute=which, extra=extra)

    def bound(self, micro_batches: int, memory_limit: float | None = None) -> float:
        """No order of this candidate ends earlier."""
        limit = None if memory_limit is None or math.isinf(memory_limit) else memory_limit
        return lower_bound(self.placement, micro_batches, self.costs, self.edges, limit)


@dataclass(frozen=True)
class Row:
    """A plan of a candidate. schedule: a name of the catalogue, or "auto"; split: with B and W apart."""

    schedule: str
    split: bool
    candidate: Candidate
    plan: Plan

    @property
    def name(self) -> str:
        """The schedule, and whether its backwards are split where that is a choice."""
        optional = self.schedule in CATALOGUE and not CATALOGUE[self.schedule].splits
        return f"{self.schedule} split" if optional and self.split else self.schedule

    @property
    def makespan(self) -> float:
        """From the first job's start to the last one's end, in the units of the costs."""
        return self.plan.simulation.makespan

    @property
    def step(self) -> float:
        """The makespan and what ends a step: reductions and the update."""
        return self.plan.predicted.step_time

    @property
    def peak(self) -> tuple[float, ...]:
        """The most bytes on each rank, buffers of receives posted ahead included."""
        return self.plan.simulation.peak

    @property
    def sent(self) -> int:
        """Bytes that all ranks send in a step."""
        on = self.candidate.placement
        crossing = (edge.nbytes for edge in self.plan.edges if on[edge.source] != on[edge.target])
        return sum(crossing) * self.plan.micro_batches

    def fits(self, memory_limit: float) -> bool:
        return max(self.peak) <= memory_limit

    def to_json(self, bound: float, memory_limit: float) -> dict[str, Any]:
        """Plain values: seconds, bytes, shares of 1."""
        fits = self.fits(memory_limit)
        return {
            "schedule": self.schedule,
            "split_backward": self.split,
            "chunks": self.candidate.chunks,
            "placement": list(self.candidate.placement),
            "cuts": list(self.candidate.cuts),
            "recompute": list(self.candidate.recompute),
            "step": self.step,
            "makespan": self.makespan,
            "bubble_global": self.plan.predicted.bubble_global,
            "bubble_span": self.plan.predicted.bubble_span,
            "peak_bytes": [round(p) for p in self.peak],
            "sent_bytes": self.sent,
            "above_bound": self.makespan / bound - 1 if fits and bound else None,
            "fits": fits,
        }


def placements(stages: int, chunks_allowed: Sequence[int]) -> list[tuple[str, int, tuple[int, ...]]]:
    """(name, chunks a stage, placement) of all that a pipeline of S stages may use. One stage has one chunk."""
    out = []
    for chunks in sorted(set(chunks_allowed)) if stages > 1 else [1]:
        if chunks == 1:
            out.append(("linear", 1, tuple(linear(stages))))
        else:
            out.append(("loop", chunks, tuple(loop(stages, chunks))))
            out.append(("v", chunks, tuple(vee(stages, chunks))))
    return out


def named_rows(candidates: Iterable[Candidate], micro_batches: int) -> list[Row]:
    """A row for each schedule of the catalogue and each candidate that it can run on, with whole and with split
    backwards; of plans that are the same under two names, the first."""
    rows: dict[str, Row] = {}
    for candidate in candidates:
        for name, split, plan_of in _named(candidate, micro_batches):
            plan = plan_of(candidate.costs)
            rows.setdefault(plan.digest(), Row(name, split, candidate, plan))
    return list(rows.values())


def recomputing_rows(candidates: Iterable[Candidate], micro_batches: int, memory_limit: float) -> list[Row]:
    """The rows of the same schedules with as little recompute as makes them fit; none for those that don't fit even if
    every chunk is computed again. The candidates know what that costs."""
    rows: dict[tuple[str, tuple[int, ...]], Row] = {}
    for candidate in candidates:
        assert candidate.again is not None
        for name, split, plan_of in _named(candidate, micro_batches):
            found = least(plan_of, candidate.costs, candidate.again, memory_limit)
            if found is not None:
                chunks, plan = found
                rows.setdefault((plan.digest(), chunks), Row(name, split, candidate.recomputed(chunks), plan))
    return list(rows.values())


def recomputing(candidates: Iterable[Candidate], rows: Sequence[Row]) -> list[Candidate]:
    """The candidates for a search, with chunks computed again as in the fastest of these rows, or with all of them."""
    out = []
    for candidate in candidates:
        mine = [row for row in rows if row.candidate.placement == candidate.placement]
        best = min(mine, key=lambda row: row.makespan, default=None)
        every = range(len(candidate.placement))
        out.append(candidate.recomputed(every) if best is None else best.candidate)
    return out


def chosen(rows: Iterable[Row], memory_limit: float) -> Row | None:
    """The fastest row that fits; of those that are even, a named schedule before a searched one, then the one with
    fewer chunks, then the one with the lowest peak. None where none fits."""
    fitting = [row for row in rows if row.fits(memory_limit)]
    if not fitting:
        return None
    least = min(row.makespan for row in fitting)
    even = [row for row in fitting if row.makespan <= least * (1 + EVEN)]
    return min(even, key=lambda row: (row.schedule == AUTO, row.candidate.chunks, max(row.peak)))


def _named(candidate: Candidate, micro_batches: int) -> Iterator[tuple[str, bool, Callable[[Costs], Plan]]]:
    """(name, whether split, the plan for costs) of every schedule that takes the candidate."""
    stages = max(candidate.placement) + 1
    for name, entry in CATALOGUE.items():
        if entry.chunks not in (None, candidate.chunks):
            continue
        for split in (True,) if entry.splits else (False, True):

            def schedule(costs: Costs, name: str = name, split: bool = split) -> Schedule:
                return build(
                    name,
                    stages=stages,
                    chunks=candidate.chunks,
                    micro_batches=micro_batches,
                    split_backward=split,
                    ascending=True,
                    unit_costs=_typical(candidate, costs),
                )

            def plan_of(costs: Costs, schedule: Callable[[Costs], Schedule] = schedule) -> Plan:
                return Plan.make(schedule(costs), candidate.edges, costs)

            if tuple(schedule(candidate.costs).placement) == candidate.placement:
                yield name, split, plan_of


def _typical(candidate: Candidate, costs: Costs) -> tuple[float, float, float, float]:
    """(F, B, W, transfer) of a typical chunk."""
    f, b, w = (sum(c) / len(c) for c in (costs.forward, costs.backward_b, costs.backward_w))
    delays = [costs.delay(edge, candidate.placement) for edge in candidate.edges]
    return (f, b, w, max(delays, default=0.0)) if f + b + w else (1.0, 1.0, 1.0, 0.0)
