"""A schedule: for every stage, the order of its compute jobs.

Takes nothing but numbers: a placement (chunk → stage), the number of micro-batches, and one list of jobs a
stage. Jobs are kept as integers, so that a schedule of millions of jobs stays small and quick to walk; `jobs`
decodes them on demand. Transfers are no part of a schedule: the lowering in `planning` places them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .coded import CodedList, Codes
from .jobs import KINDS, Job, Placement

#: kind -> its number in a code
KIND_NUMBER: Final = {kind: number for number, kind in enumerate(KINDS)}
FORWARD, BACKWARD_B, BACKWARD_W, BACKWARD = range(4)


def linear(stages: int) -> list[int]:
    """One chunk a stage: chunk c on stage c."""
    return list(range(stages))


def loop(stages: int, chunks: int) -> list[int]:
    """`chunks` passes over the stages in the same direction: chunk c on stage c mod S."""
    return [c % stages for c in range(stages * chunks)]


def vee(stages: int, chunks: int = 2) -> list[int]:
    """Odd passes run backwards, so that a pass begins on the stage where the last one ended."""
    return [c % stages if (c // stages) % 2 == 0 else stages - 1 - c % stages for c in range(stages * chunks)]


@dataclass(frozen=True)
class Coding:
    """The integers that stand for the jobs of `total` chunks and `micro_batches`:
    code = (kind · total + chunk) · micro_batches + micro_batch."""

    total: int
    micro_batches: int

    def encode(self, job: Job) -> int:
        return (KIND_NUMBER[job.kind] * self.total + job.chunk) * self.micro_batches + job.micro_batch

    def decode(self, code: int) -> Job:
        rest, micro_batch = divmod(code, self.micro_batches)
        kind, chunk = divmod(rest, self.total)
        return Job(KINDS[kind], chunk, micro_batch)


#: a stage's jobs, decoded when looked at
JobList = CodedList[Job]


class Schedule:
    """An order of compute jobs for each of `stages` stages.

    chunks: V, the chunks a stage holds. placement[chunk] is the stage of a chunk, chunks counted through the
    model. codes[stage]: int64 codes (see Coding). forward_only: an evaluation's schedule, without any
    backward. A Schedule is not checked beyond its numbers: `planning.verify` does that.
    """

    def __init__(
        self, name: str, placement: Placement, micro_batches: int, codes: Iterable[Sequence[int] | Codes]
    ) -> None:
        self.name = name
        self.placement = tuple(placement)
        self.micro_batches = micro_batches
        self.codes: tuple[Codes, ...] = tuple(np.asarray(c, dtype=np.int64) for c in codes)
        self.stages = len(self.codes)
        self.chunks = len(self.placement) // self.stages
        self.coding = Coding(len(self.placement), micro_batches)

    @classmethod
    def from_jobs(
        cls, name: str, placement: Placement, micro_batches: int, jobs: Iterable[Iterable[Job | str]]
    ) -> Schedule:
        """A schedule that a user wrote: Jobs, or strings such as "F0.3". Raises ValueError for a job that
        isn't one or lies outside the model."""
        coding = Coding(len(placement), micro_batches)
        stages = [[Job.parse(j) if isinstance(j, str) else j for j in stage] for stage in jobs]
        if stages and len(placement) % len(stages):
            raise ValueError(f"{len(placement)} chunks can't be spread evenly over {len(stages)} stages")
        if not stages or set(placement) != set(range(len(stages))):
            raise ValueError(
                f"a placement must use each of the {len(stages)} stages, got {sorted(set(placement))}: "
                "give one list of jobs a stage and name every stage in the placement"
            )
        for number, stage in enumerate(stages):
            for job in stage:
                if not (0 <= job.chunk < coding.total and 0 <= job.micro_batch < micro_batches):
                    raise ValueError(
                        f"job {job} on stage {number}: there are {coding.total} chunks "
                        f"and {micro_batches} micro-batches"
                    )
        return cls(name, placement, micro_batches, [[coding.encode(j) for j in stage] for stage in stages])

    @property
    def total_chunks(self) -> int:
        return len(self.placement)

    @property
    def jobs(self) -> list[JobList]:
        """jobs[stage]: a lazy view of the stage's jobs, in order."""
        return [CodedList(codes, self.coding.decode) for codes in self.codes]

    @property
    def forward_only(self) -> bool:
        return all(bool((codes < self.coding.total * self.micro_batches).all()) for codes in self.codes)

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return (
            (self.name, self.placement, self.micro_batches)
            == (other.name, other.placement, other.micro_batches)
            and self.stages == other.stages
            and all(np.array_equal(a, b) for a, b in zip(self.codes, other.codes, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        numbers = f"stages={self.stages}, chunks={self.chunks}, micro_batches={self.micro_batches}"
        return f"Schedule({self.name!r}, {numbers})"
