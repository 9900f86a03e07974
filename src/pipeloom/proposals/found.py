"""Proposals: what `plan` found, to be shown, kept as JSON, drawn, or run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..planning import PlanError
from ..planning.candidates import Row
from ..report.proposals import show_proposals
from ..schedules.timeline import Timeline
from ..strategy import Strategy


@dataclass(frozen=True)
class Proposals:
    """What `plan` found.

    rows: all plans, the chosen one first, then those that fit, fastest first. best: the chosen row, None where nothing
    fits; why: it, in a sentence. memory_limit: bytes a rank. bound: seconds that no order of any candidate
    within it can beat, or none at all where nothing fits. costs: where seconds come from, and how sure they are.
    next_gib: what a GiB more on each rank would buy. modules[row]: the modules at which a row's chunks begin.
    strategy: runs the best row's schedule, with cuts and order chosen anew on its ranks; None if there is none.
    """

    rows: tuple[Row, ...]
    best: Row | None
    why: str
    bound: float
    memory_limit: float
    memory: str
    costs: str
    next_gib: str
    micro_batches: int
    modules: tuple[tuple[str, ...], ...]
    strategy: Strategy | None

    @property
    def ranks(self) -> int:
        return self.rows[0].plan.stages

    def show(self, *, every: bool = False) -> None:
        """Prints the table: of each schedule its fastest plan, or all plans."""
        notes = [("Costs", self.costs), ("Memory", self.memory), ("Chosen", self.why)]
        if self.best is not None:
            where = self.modules[self.rows.index(self.best)]
            notes.append(("Chunks", f"begin at {', '.join(where)}" if where else "the whole model is one"))
            if again := self.best.candidate.recompute:
                chunks = ", ".join(map(str, again))
                notes.append(
                    ("Again", f"chunks {chunks} of {len(where) + 1} are computed again in the backward")
                )
        notes.append(("Next GiB", self.next_gib))
        show_proposals(self.rows, self.best, self.bound, self.memory_limit, notes, every=every)

    def timeline(self) -> Timeline:
        """The chosen plan's step. Raises PlanError where nothing fits."""
        if self.best is None:
            raise PlanError("memory", self.why)
        timeline = self.best.plan.timeline()
        timeline.title = f"predicted {self.best.name}"
        return timeline

    def to_json(self) -> dict[str, Any]:
        """Plain values: seconds, bytes, shares of 1."""
        rows = []
        for row, modules in zip(self.rows, self.modules, strict=True):
            rows.append({**row.to_json(self.bound, self.memory_limit), "chunks_begin_at": list(modules)})
        return {
            "ranks": self.ranks,
            "micro_batches": self.micro_batches,
            "memory_limit": round(self.memory_limit),
            "memory": self.memory,
            "costs": self.costs,
            "bound": self.bound,
            "chosen": None if self.best is None else self.rows.index(self.best),
            "why": self.why,
            "next_gib": self.next_gib,
            "strategy": None if self.strategy is None else self.strategy.to_dict(),
            "rows": rows,
        }
