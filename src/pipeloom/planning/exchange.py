"""Plans out to torch.distributed.pipelining, and schedules in from it, as its CSV.

A row is a rank, a cell an action: chunk, what, micro-batch, as in `0F3`. torch calls a chunk a stage, and what we
call X, B and W it calls B (full backward), I (backward for the input) and W. Its runtime
(`_PipelineScheduleRuntime._load_csv`, torch 2.13) takes two forms:

    compute_only    F, B, I, W; an empty cell is a time step without work; (0F1;3B0)OVERLAP_F_B is two actions in turn
    compute_comms   also SEND_F, RECV_F, SEND_B, RECV_B (a RECV posts a receive), UNSHARD, RESHARD and REDUCE_GRAD

Out goes compute_comms, with the posts and sends of our lowering and a REDUCE_GRAD for each chunk where we finalize:
torch scales its gradients there. The B of chunk 0, which is empty for us, stays an `0I`: torch too does nothing in it,
and the whole backward in `0W`. In come both forms; transfers and reductions are dropped, since `lower` places its own.

torch's messages have no tags: all that go from one rank to another are matched in one order, forward or backward.
So receives are written in the order in which their sender sends, whatever the direction.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Final

from ..schedules.jobs import Job, Kind, LoweredJob, Phase, Placement, Transfer
from ..schedules.schedule import Schedule
from .errors import PlanError
from .lower import Lowered

#: our kind -> torch's letter, and back
_LETTERS: Final[dict[Kind, str]] = {"F": "F", "B": "I", "W": "W", "X": "B"}
_KINDS: Final[dict[str, Kind]] = {letter: kind for kind, letter in _LETTERS.items()}
_COMPUTE: Final = re.compile(r"(\d+)([FIWB])(\d+)\Z")
_DROPPED: Final = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*\Z")
_OVERLAP: Final = re.compile(r"\((.*)\)OVERLAP_F_B\Z")


def to_csv(lowered: Lowered) -> str:
    """The lists in the form compute_comms, one line a rank. Raises PlanError for lists that torch's runtime can't
    run: without backwards, or with messages between chunks that aren't neighbours."""
    if lowered.forward_only:
        raise PlanError(
            "exchange", "torch's runtime takes training schedules only: this plan has no backward"
        )
    for edge in lowered.edges:
        if abs(edge.source - edge.target) != 1:
            raise PlanError(
                "exchange",
                f"chunk {edge.source} sends to chunk {edge.target}, and torch's runtime passes values between "
                "neighbouring chunks only: cut the model where no value skips a chunk",
            )
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    for stage, jobs in enumerate(lowered.jobs):
        writer.writerow(_cells(lowered, stage, _receives_as_sent(lowered, stage, jobs)))
    return rows.getvalue()


def schedule_from_csv(text: str, placement: Placement | None = None, name: str = "CSV") -> Schedule:
    """The schedule of a CSV in either form, for as many micro-batches as it names. placement[chunk]: the stage of
    each chunk; None: the row in which a chunk's first action stands. Raises ValueError, naming row and column
    (counted from 1), for what isn't an action, or stands in another row than its chunk's; not otherwise checked
    (`verify` does that)."""
    rows: list[list[Job]] = []
    found: dict[int, int] = {}
    for stage, row in enumerate(csv.reader(io.StringIO(text.rstrip("\r\n")))):
        rows.append([])
        for column, cell in enumerate(row):
            for job in _jobs(cell.strip(), f"row {stage + 1}, column {column + 1}"):
                own = found.setdefault(job.chunk, stage)
                if placement is not None and job.chunk < len(placement):
                    own = placement[job.chunk]
                if own != stage:
                    raise ValueError(
                        f"row {stage + 1}, column {column + 1}: {cell.strip()} is an action of chunk {job.chunk}, "
                        f"which lives in row {own + 1}"
                    )
                rows[-1].append(job)
    if not found:
        raise ValueError("the CSV has no action: write a row a rank, with cells like 0F0, 0I0, 0W0 or 0B0")
    if placement is None:
        absent = sorted(set(range(max(found) + 1)) - found.keys())
        if absent:
            raise ValueError(f"the CSV has no action of chunk {absent[0]}, but one of chunk {max(found)}")
        placement = [found[chunk] for chunk in range(len(found))]
    micro_batches = 1 + max(job.micro_batch for row in rows for job in row)
    return Schedule.from_jobs(name, placement, micro_batches, rows)


def read_csv(path: str | PathLike[str], name: str = "CSV") -> Schedule:
    """The schedule of a CSV file, see `schedule_from_csv`. Raises ValueError naming the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: can't be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: isn't text in UTF-8") from None
    try:
        return schedule_from_csv(text, name=name)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _jobs(cell: str, where: str) -> list[Job]:
    """The compute jobs of one cell."""
    if not cell or _DROPPED.match(cell):
        return []
    if both := _OVERLAP.match(cell):
        return [job for part in both[1].split(";") for job in _jobs(part.strip(), where)]
    match = _COMPUTE.match(cell)
    if match is None:
        raise ValueError(
            f"{where}: {cell!r} is no action of torch.distributed.pipelining: write chunk, F, I, W or B, and "
            "micro-batch, like 0F3"
        )
    chunk, letter, micro_batch = match.groups()
    return [Job(_KINDS[letter], int(chunk), int(micro_batch))]


def _cells(lowered: Lowered, stage: int, jobs: Sequence[LoweredJob]) -> list[str]:
    cells = []
    for job in jobs:
        if isinstance(job, Job):
            cells.append(f"{job.chunk}{_LETTERS[job.kind]}{job.micro_batch}")
        elif isinstance(job, Transfer) and job.action != "recv":  # torch's compute actions wait themselves
            verb, chunk = ("SEND", job.source) if job.action == "send" else ("RECV", job.target)
            cells.append(f"{chunk}{verb}_{job.direction}{job.micro_batch}")
        elif isinstance(job, Phase) and job.name == "finalize":
            cells += [f"{chunk}REDUCE_GRAD" for chunk, on in enumerate(lowered.placement) if on == stage]
    return cells


def _receives_as_sent(lowered: Lowered, stage: int, jobs: Sequence[LoweredJob]) -> list[LoweredJob]:
    """The list with the posts of each peer's messages in the order in which that peer sends them. Raises PlanError
    where a message would then be posted behind its consumer."""
    coming = {
        peer: iter([j for j in other if isinstance(j, Transfer) and j.action == "send" and j.peer == stage])
        for peer, other in enumerate(lowered.jobs)
    }
    posted: set[object] = set()
    ordered: list[LoweredJob] = []
    for job in jobs:
        entry = job
        if isinstance(job, Transfer) and job.action == "post":
            entry = next(coming[job.peer])._replace(action="post", peer=job.peer)
            posted.add(entry.message)
        elif isinstance(job, Transfer) and job.action == "recv" and job.message not in posted:
            raise PlanError(
                "exchange",
                f"stage {stage} needs '{job}' before messages that stage {job.peer} sends earlier, and torch's "
                "runtime matches all messages between two ranks in one order",
            )
        ordered.append(entry)
    return ordered
