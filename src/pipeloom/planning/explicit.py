"""A user's own schedule: lists of jobs a stage, or a function that makes them.

    [["F0.0", "F0.1", "X0.0", "X0.1"], ["F1.0", "X1.0", "F1.1", "X1.1"]]          lists of job strings, or of Jobs
    def order(stages, chunks, micro_batches): return lists, or a schedules.Schedule

What comes of it is a Schedule like those of the catalogue: verified before it is lowered, and never trusted. Its
micro-batches may run in any order; gradients are then equal to other schedules' to rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..schedules.jobs import Job, Phase, Placement
from ..schedules.schedule import Schedule
from .lower import Lowered
from .verify import verify

#: what a user may give for a schedule, besides a name
Lists = Sequence[Sequence[Job | str]]
Own = Lists | Schedule | Callable[[int, int, int], "Lists | Schedule"]


def own_schedule(
    given: Lists | Schedule, name: str, stages: int, total: int, placement: Placement | None = None
) -> Schedule:
    """The Schedule that a user wrote for `total` chunks on `stages` stages, with as many micro-batches as its jobs
    name. placement: None: a chunk is on the stage whose list names it first. Raises ValueError for what isn't a
    list of jobs a stage, or isn't made for that many stages and chunks."""
    if isinstance(given, Schedule):
        if placement is not None and tuple(placement) != given.placement:
            raise ValueError(
                f"{name} has its chunks on stages {list(given.placement)}, not {list(placement)}: leave placement "
                "None"
            )
        _fits(name, given.stages, len(given.placement), stages, total)
        return given
    lists = [
        [_job(job, f"{name}, stage {stage}, entry {i}") for i, job in enumerate(jobs)]
        for stage, jobs in enumerate(_lists(given, name))
    ]
    if not any(lists):
        raise ValueError(f"{name} has no job: give a list of jobs a stage, like [['F0.0', 'X0.0'], …]")
    found: dict[int, int] = {}
    for stage, jobs in enumerate(lists):
        for job in jobs:
            found.setdefault(job.chunk, stage)
    _fits(name, len(lists), max(found) + 1, stages, total)
    if absent := sorted(set(range(total)) - found.keys()):
        raise ValueError(
            f"{name} has no job of chunk {absent[0]}: each of the {total} chunks needs its F and backward"
        )
    micro_batches = 1 + max(job.micro_batch for jobs in lists for job in jobs)
    where = [found[chunk] for chunk in range(total)] if placement is None else placement
    return Schedule.from_jobs(name, where, micro_batches, lists)


def first_micro_batches(schedule: Schedule, micro_batches: int) -> Schedule:
    """The schedule for M micro-batches: without those from M on, which stays safe and never needs more memory.
    Raises ValueError where it has fewer."""
    if micro_batches > schedule.micro_batches:
        raise ValueError(
            f"{schedule.name} is a schedule for {schedule.micro_batches} micro-batches, but the batch makes "
            f"{micro_batches}: set accumulate_steps={schedule.micro_batches}, or write a schedule for {micro_batches}"
        )
    if micro_batches == schedule.micro_batches:
        return schedule
    kept = [[job for job in jobs if job.micro_batch < micro_batches] for jobs in schedule.jobs]
    return Schedule.from_jobs(schedule.name, schedule.placement, micro_batches, kept)


def check_jobs(schedule: Schedule) -> None:
    """Raises PlanError where a job is missing, comes twice, lies on another stage than its chunk, or comes before one
    of its own stage that it needs. (Circles between stages show when the schedule is lowered.)"""
    ends = () if schedule.forward_only else (Phase("finalize"), Phase("update"))
    lists = tuple((*jobs, *ends) for jobs in schedule.jobs)
    verify(
        Lowered(schedule.name, schedule.placement, schedule.micro_batches, (), lists, schedule.forward_only)
    )


def _lists(given: Any, name: str) -> Sequence[Sequence[Any]]:
    if not isinstance(given, list | tuple) or not all(isinstance(jobs, list | tuple) for jobs in given):
        raise ValueError(
            f"{name} is {type(given).__name__}: give one list of jobs a stage, like [['F0.0', 'X0.0'], …], or a "
            "schedules.Schedule"
        )
    return given


def _job(given: Any, where: str) -> Job:
    if isinstance(given, Job):
        return given
    try:
        return Job.parse(given)
    except (TypeError, ValueError):
        raise ValueError(
            f"{where}: {given!r} is not a job: write a kind (F, B, W or X), a chunk, a dot and a micro-batch, like F0.3"
        ) from None


def _fits(name: str, lists: int, chunks: int, stages: int, total: int) -> None:
    if lists != stages:
        raise ValueError(f"{name} has lists for {lists} stages, but pp_degree is {stages}: give one a stage")
    if chunks != total:
        raise ValueError(
            f"{name} names {chunks} chunks, but pp_degree {stages} × vpp_degree {total // stages} make {total}: set "
            "vpp_degree to the chunks of a stage"
        )
