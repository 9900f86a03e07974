"""What a search chose: where chunks begin and lie, and in which order their jobs run. Plain data: one rank
chooses, all run it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..schedules.schedule import Schedule


@dataclass(frozen=True)
class Choice:
    """placement[chunk] -> stage. positions: where chunks begin, in the order of the program's forward ops. jobs:
    one list a stage for `micro_batches`. makespan and bound: seconds that were expected of it, and that no candidate
    could beat. recompute: chunks whose forward is computed again in the backward."""

    placement: tuple[int, ...]
    positions: tuple[int, ...]
    micro_batches: int
    jobs: tuple[tuple[str, ...], ...]
    makespan: float
    bound: float
    recompute: tuple[int, ...] = ()

    @staticmethod
    def of(
        schedule: Schedule,
        positions: Sequence[int],
        makespan: float,
        bound: float,
        recompute: Sequence[int] = (),
    ) -> Choice:
        jobs = tuple(tuple(map(str, stage)) for stage in schedule.jobs)
        cuts, again = tuple(positions), tuple(recompute)
        return Choice(schedule.placement, cuts, schedule.micro_batches, jobs, makespan, bound, again)

    @property
    def chunks(self) -> int:
        """Chunks of the whole model."""
        return len(self.placement)

    def schedule(self, micro_batches: int) -> Schedule | None:
        """The chosen order for M micro-batches: as it is, or without the last ones (which stays safe and never
        needs more
        memory); None where M is more than was planned for."""
        if micro_batches > self.micro_batches:
            return None
        kept = [[j for j in stage if int(j.partition(".")[2]) < micro_batches] for stage in self.jobs]
        return Schedule.from_jobs("auto", self.placement, micro_batches, kept)

    def to_json(self) -> str:
        return json.dumps(
            {
                "placement": self.placement,
                "positions": self.positions,
                "micro_batches": self.micro_batches,
                "jobs": [" ".join(stage) for stage in self.jobs],
                "makespan": self.makespan,
                "bound": self.bound,
                "recompute": self.recompute,
            }
        )

    @staticmethod
    def from_json(text: str) -> Choice:
        data: Mapping[str, Any] = json.loads(text)
        return Choice(
            tuple(data["placement"]),
            tuple(data["positions"]),
            int(data["micro_batches"]),
            tuple(tuple(stage.split()) for stage in data["jobs"]),
            float(data["makespan"]),
            float(data["bound"]),
            tuple(data["recompute"]),
        )
