"""Proves lowered lists safe, or says what is wrong with them.

Takes lists from anywhere: the lowering, a file, a user's hand. A list that ends early hangs the others
silently, so every list is checked before the first send. The checks, in order, each a PlanError that names
the jobs:

    entries       every entry means something, on a stage that exists
    jobs          every (kind, chunk, micro-batch) exactly once, on its own stage; X stands for B and W
    phases        finalize after all else, then update, the same on every stage
    dependencies  on a stage, a job follows what it needs; transfers stand between producer and consumer
    transfers     each message has exactly one post, recv and send, on the right stages
    channels      a channel's posts come in the order of its sends
    cycle         program order and data edges have no circle
    hang          nor have they where each send blocks until its receive is posted
    memory        the most bytes alive on a stage are within the limit
    order         chunks that update buffers run their forwards in ascending order of micro-batches

Lists that the lowering made carry a certificate, and arrays prove them safe at once (proof.py). Others, and those that
the certificate doesn't prove, are checked entry by entry and walked.

That nothing is alive at the end needs no check of its own: each F has its B and W, each message its consumer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ..schedules.jobs import KINDS, Job, Phase, Transfer
from ..schedules.schedule import Schedule
from .costs import Costs
from .errors import JobKey, PlanError, job_name, some
from .lower import Lowered, check_edges
from .memory import levels
from .proof import proved
from .replay import Hang, replay
from .transfers import check_channels, check_transfers


def verify(
    lowered: Lowered,
    *,
    costs: Costs | None = None,
    memory_limit: float | Sequence[float] | None = None,
    ascending_chunks: Collection[int] = (),
) -> None:
    """Raises PlanError for the first check that fails. costs: needed for a memory limit (bytes, for all
    stages or for each). ascending_chunks: chunks whose F's must run in ascending order of micro-batches."""
    check_model(lowered)
    if not proved(lowered):
        _entries(lowered)
        where = _jobs(lowered)
        _phases(lowered)
        _local_order(lowered, where)
        check_channels(lowered, check_transfers(lowered, where))
        _walk(lowered)
    if memory_limit is not None:
        _memory(lowered, costs, memory_limit)
    _buffers(lowered, ascending_chunks)


def check_model(lowered: Lowered) -> None:
    """Raises PlanError unless there is a list for each stage of the placement, and edges between its chunks."""
    total, stages, micro_batches = len(lowered.placement), lowered.stages, lowered.micro_batches
    if stages == 0 or set(lowered.placement) != set(range(stages)) or micro_batches < 1:
        raise PlanError(
            "entries",
            f"there are {stages} lists, {micro_batches} micro-batches and a placement on stages "
            f"{sorted(set(lowered.placement))}: each stage from 0 on needs one list and at least one chunk",
        )
    try:
        check_edges(lowered.edges, total)
    except (ValueError, TypeError) as error:
        raise PlanError("entries", str(error)) from error


def ascending(schedule: Schedule) -> bool:
    """Whether each chunk's F's, B's and W's run in ascending order of micro-batches. Where they do, gradients
    are summed in the same order, and are bit-equal between schedules; elsewhere they are equal to
    rounding."""
    for codes in schedule.codes:
        group, micro_batch = np.divmod(codes, schedule.micro_batches)
        # an X is a B and a W: a chunk that has both X's and B's or W's mixes them in one order
        kind, chunk = np.divmod(group, schedule.total_chunks)
        for one in (("F",), ("B", "X"), ("W", "X")):
            member = np.isin(kind, [KINDS.index(k) for k in one])
            by_chunk = np.argsort(chunk[member], kind="stable")
            chunks, numbers = chunk[member][by_chunk], micro_batch[member][by_chunk]
            if bool(((np.diff(chunks) == 0) & (np.diff(numbers) <= 0)).any()):
                return False
    return True


# ---- one check each
# --------------------------------------------------------------------------------------------


def _entries(lowered: Lowered) -> None:
    total, stages, micro_batches = len(lowered.placement), lowered.stages, lowered.micro_batches
    for stage, jobs in enumerate(lowered.jobs):
        for index, job in enumerate(jobs):
            at = f"entry {index} of stage {stage}"
            if isinstance(job, Job):
                sound = (
                    job.kind in KINDS
                    and _within(job.chunk, total)
                    and _within(job.micro_batch, micro_batches)
                )
            elif isinstance(job, Transfer):
                sound = (
                    job.action in ("post", "recv", "send")
                    and _within(job.micro_batch, micro_batches)
                    and _within(job.peer, stages)
                )
            elif isinstance(job, Phase):
                sound = job.name in ("finalize", "update")
            else:
                raise PlanError("entries", f"{at} is {job!r}: not a job, a transfer or a phase")
            if not sound:
                name = str(job) if isinstance(job, Job) else repr(job)
                raise PlanError(
                    "entries",
                    f"{at}, {name}, doesn't fit {total} chunks, {micro_batches} micro-batches and "
                    f"{stages} stages",
                )


def _within(number: object, end: int) -> bool:
    return isinstance(number, int) and 0 <= number < end


def _jobs(lowered: Lowered) -> dict[JobKey, tuple[int, int]]:
    """(stage, index) of each F, B and W; an X counts as both."""
    where: dict[JobKey, tuple[int, int]] = {}
    for stage, jobs in enumerate(lowered.jobs):
        for index, job in enumerate(jobs):
            if not isinstance(job, Job):
                continue
            own = lowered.placement[job.chunk]
            if own != stage:
                raise PlanError(
                    "jobs", f"{job} is on stage {stage}, but chunk {job.chunk} lives on stage {own}"
                )
            for kind in "BW" if job.kind == "X" else job.kind:
                key = (kind, job.chunk, job.micro_batch)
                if key in where:
                    first = lowered.jobs[stage][where[key][1]]
                    raise PlanError(
                        "jobs",
                        f"stage {stage} has {job_name(key)} twice: entries {where[key][1]} ({first}) and "
                        f"{index} ({job})",
                    )
                where[key] = (stage, index)
    kinds = "F" if lowered.forward_only else "FBW"
    want = {
        (k, c, m) for k in kinds for c in range(len(lowered.placement)) for m in range(lowered.micro_batches)
    }
    missing = sorted(want - where.keys(), key=lambda key: (lowered.placement[key[1]], key[2], key[0]))
    if missing:
        raise PlanError("jobs", f"missing: {some([_on_stage(lowered, key) for key in missing])}")
    if len(where) > len(want):
        extra = [_on_stage(lowered, key) for key in where if key not in want]
        raise PlanError("jobs", f"a forward-only plan has backwards: {some(extra)}")
    return where


def _phases(lowered: Lowered) -> None:
    want = () if lowered.forward_only else ("finalize", "update")
    for stage, jobs in enumerate(lowered.jobs):
        phases = [(index, job.name) for index, job in enumerate(jobs) if isinstance(job, Phase)]
        expected = [(len(jobs) - len(want) + n, name) for n, name in enumerate(want)]
        if phases != expected:
            ends = " and ".join(want) or "no phase"
            have = ", ".join(f"{name} at {index}" for index, name in phases) or "none"
            raise PlanError(
                "phases",
                f"stage {stage}'s list must end with {ends}, after its {len(jobs)} entries' last job (has "
                f"{have}): otherwise a rank reduces gradients that are not complete, or in another order "
                "than its peers",
            )


def _local_order(lowered: Lowered, where: dict[JobKey, tuple[int, int]]) -> None:
    """What a job needs of its own stage comes first."""
    pairs = [] if lowered.forward_only else [(("F", c), ("B", c)) for c in range(len(lowered.placement))]
    pairs += [
        ((edge.direction, edge.source), (edge.direction, edge.target))
        for edge in lowered.edges
        if lowered.placement[edge.source] == lowered.placement[edge.target]
    ]
    for (kind, source), (later, target) in pairs:
        for micro_batch in range(lowered.micro_batches):
            _follows(lowered, where, (kind, source, micro_batch), (later, target, micro_batch))
    if not lowered.forward_only:
        for (kind, chunk, micro_batch), at in where.items():
            b = ("B", chunk, micro_batch)
            if kind == "W" and at != where[b]:
                _follows(lowered, where, b, (kind, chunk, micro_batch))


def _follows(lowered: Lowered, where: dict[JobKey, tuple[int, int]], first: JobKey, then: JobKey) -> None:
    stage, before = where[first]
    _, after = where[then]
    if before >= after:
        one, other = lowered.jobs[stage][after], lowered.jobs[stage][before]
        raise PlanError(
            "dependencies",
            f"stage {stage}: {one} (entry {after}) needs {other}, which comes later (entry {before})",
        )


def _walk(lowered: Lowered) -> None:
    """Walks the lists with sends that block. Where that hangs, tells a circle of data from one of blocked
    sends. What jobs cost doesn't matter."""
    free = Costs.uniform(len(lowered.placement))
    try:
        replay(lowered, free)
    except Hang as hang:
        try:
            replay(lowered, free, rendezvous=False)
        except Hang as always:
            raise PlanError(
                "cycle", f"program order and data have a circle:\n{_circle(lowered, always)}"
            ) from always
        raise PlanError(
            "hang", f"ranks hang where a send blocks until its receive is posted:\n{_circle(lowered, hang)}"
        ) from hang


def _circle(lowered: Lowered, hang: Hang) -> str:
    """The stages that wait for each other, one a line."""
    stage = next(iter(hang.waits))
    seen: list[int] = []
    while stage not in seen:
        seen.append(stage)
        stage = hang.waits[stage][1]
    lines = []
    for one in seen[seen.index(stage) :]:
        index, peer = hang.waits[one]
        job = lowered.jobs[one][index]
        assert isinstance(job, Transfer)
        wanted = job._replace(action="post" if job.action == "send" else "send", peer=one)
        at = lowered.jobs[peer].index(wanted)
        lines.append(
            f"  stage {one} stands at entry {index}, {job}, and waits for entry {at} of stage {peer}, "
            f"{wanted}"
        )
    return "\n".join(lines)


def _memory(lowered: Lowered, costs: Costs | None, memory_limit: float | Sequence[float]) -> None:
    if costs is None:
        raise ValueError("a memory limit needs costs: pass the bytes that each chunk holds")
    for stage in range(lowered.stages):
        limit = memory_limit if isinstance(memory_limit, int | float) else memory_limit[stage]
        level = levels(lowered.codes, lowered.coding, stage, costs)
        if level.peak > limit:
            job = lowered.schedule().jobs[stage][int(level.during.argmax())] if len(level.during) else "rest"
            raise PlanError(
                "memory",
                f"stage {stage} needs {level.peak:,.6g} bytes at {job} and may use {limit:,.6g}: allow "
                "more, or take a schedule with fewer micro-batches in flight (1F1B and ZBV are lean), "
                "smaller micro-batches, or recompute",
            )


def _buffers(lowered: Lowered, chunks: Collection[int]) -> None:
    coding = lowered.coding
    for stage, codes in enumerate(lowered.codes):
        forwards = codes[codes < coding.size]
        for chunk in chunks:
            numbers = forwards[forwards // coding.micro_batches == chunk]
            (falls,) = np.nonzero(np.diff(numbers) < 0)
            if len(falls):
                before, job = (coding.decode(int(number)) for number in numbers[falls[0] : falls[0] + 2])
                raise PlanError(
                    "order",
                    f"stage {stage} runs {before} before {job}: chunk {chunk} updates buffers, so "
                    "its forwards must run in ascending order of micro-batches",
                )


def _on_stage(lowered: Lowered, key: JobKey) -> str:
    return f"{job_name(key)} on stage {lowered.placement[key[1]]}"
