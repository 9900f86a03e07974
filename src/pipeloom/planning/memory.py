"""Bytes alive on a stage, job by job.

A stage's memory depends on the order of its own jobs alone, not on time, so one walk over its list gives its
exact peak under the costs given, whatever the clock does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..schedules.jobs import Edge, Job, LoweredJob, Transfer
from .costs import Costs

#: edges by (direction, target chunk): what a job consumes
Incoming = Mapping[tuple[str, int], Sequence[Edge]]


@dataclass
class Levels:
    """during[i], after[i]: bytes alive at the worst moment of a stage's i-th compute job, and when it has
    ended."""

    base: float
    during: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    @property
    def peak(self) -> float:
        return max(self.during, default=self.base)


def incoming(edges: Iterable[Edge]) -> dict[tuple[str, int], list[Edge]]:
    table: dict[tuple[str, int], list[Edge]] = {}
    for edge in edges:
        table.setdefault((edge.direction, edge.target), []).append(edge)
    return table


def levels(jobs: Iterable[LoweredJob], stage: int, costs: Costs, edges: Incoming) -> Levels:
    """The bytes alive on a stage along its list. A posted receive's buffer counts from its post until the job
    that consumes the message has ended; in a list without transfers no buffers are counted."""
    base = costs.persistent[stage] if stage < len(costs.persistent) else 0.0
    out = Levels(base)
    alive = base
    posted: dict[tuple[str, int, int, int], int] = {}
    sizes = {(e.direction, e.source, e.target): e.nbytes for into in edges.values() for e in into}
    for job in jobs:
        if isinstance(job, Transfer):
            if job.action == "post":
                size = sizes.get((job.direction, job.source, job.target), 0)
                posted[job.message] = size
                alive += size
        elif isinstance(job, Job):
            kind, chunk, micro_batch = job
            added, freed = _change(kind, chunk, costs)
            out.during.append(alive + max(added, costs.workspace_of(kind, chunk)))
            alive += added - freed
            if kind != "W":
                for edge in edges.get(("F" if kind == "F" else "B", chunk), ()):
                    alive -= posted.pop((edge.direction, edge.source, chunk, micro_batch), 0)
            out.after.append(alive)
    return out


def _change(kind: str, chunk: int, costs: Costs) -> tuple[float, float]:
    """(bytes that a job adds, bytes that it frees when it has ended)."""
    if kind == "F":
        return costs.held_forward[chunk] + costs.held_weight[chunk], 0.0
    if kind == "B":
        return costs.held_backward[chunk], costs.held_forward[chunk]
    if kind == "W":
        return 0.0, costs.held_weight[chunk] + costs.held_backward[chunk]
    return 0.0, costs.held_forward[chunk] + costs.held_weight[chunk]
