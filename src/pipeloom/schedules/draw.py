"""Draws a schedule as text, one row a stage, one column a unit of time.

F, B and W of a chunk take one column, X two; transfers take none. The n-th prime marks a stage's n-th further
chunk.
"""

from __future__ import annotations

from .generator import own_chunks
from .jobs import Kind, chain_edges
from .schedule import Schedule
from .timing import times

_COLUMNS: dict[Kind, int] = {"F": 1, "B": 1, "W": 1, "X": 2}


def draw(schedule: Schedule, *, columns: int | None = None) -> str:
    """The drawing. columns: cut after so many units of time and say so. Raises timing.Stuck for an unsafe
    order."""
    when = times(schedule, lambda kind, _: _COLUMNS[kind], chain_edges(schedule.total_chunks), lambda _: 0.0)
    length = round(when.makespan)
    shown = length if columns is None else min(length, columns)
    local = {
        chunk: n for own in own_chunks(schedule.placement, schedule.stages) for n, chunk in enumerate(own)
    }
    rows = [["."] * length for _ in range(schedule.stages)]
    for stage, jobs in enumerate(schedule.jobs):
        for job, start, end in zip(jobs, when.start[stage], when.end[stage], strict=True):
            name = f"{job.kind}{job.micro_batch}" + "'" * local[job.chunk]
            rows[stage][round(start) : round(end)] = [name] + ["-"] * (round(end - start) - 1)
    width = max((len(cell) for row in rows for cell in row[:shown]), default=1) + 1
    label = len(str(schedule.stages - 1))
    lines = []
    for stage, row in enumerate(rows):
        cells = "".join(
            cell.ljust(width, "-" if row[at + 1 : at + 2] == ["-"] else " ")
            for at, cell in enumerate(row[:shown])
        )
        lines.append(f"stage {stage:>{label}}  {cells.rstrip()}" + (" …" if shown < length else ""))
    return "\n".join(lines)
