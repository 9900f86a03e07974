"""The table of `pipeloom plan`: plans side by side, the chosen one marked, and below it what was found out.

Takes rows of planning.candidates and notes in words; prints with rich. Times and sizes are right-aligned; a plan that
doesn't fit is dim and has no distance to the bound, which holds within the limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeloom.planning.candidates import Row
from pipeloom.report.figures import format_bytes, format_share, format_time

_MARK, _TOO_LARGE = "▸", "✗"
_KEY = (
    f"{_MARK} chosen  {_TOO_LARGE} exceeds the limit  over: the bound  bubble: of the step\n"
    "span: bubble of the longest rank  peak: of the largest rank  sent: by all ranks"
)

_PEAKS = (
    "tensors alone: weights, gradients, optimizer state, activations, receive buffers, and what a job needs while it "
    "runs; leave a margin for the allocator and for libraries"
)


def show_proposals(
    rows: Sequence[Row],
    best: Row | None,
    bound: float,
    memory_limit: float,
    notes: Sequence[tuple[str, str]],
    *,
    every: bool = False,
    console: Console | None = None,
) -> None:
    """Prints the table. rows: in the order to be shown; memory_limit: bytes a rank; every: False shows one row a
    schedule, its first."""
    console = console if console is not None else Console()
    shown = list(rows) if every else firsts(rows)
    plan = rows[0].plan
    count = f"{len(rows)} plans" if every else f"the best of each schedule, of {len(rows)} plans"
    console.print(f"{plan.stages} ranks, {plan.micro_batches} micro-batches: {count}", highlight=False)
    console.print()
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("")
    table.add_column("schedule", no_wrap=True)
    again = any(row.candidate.recompute for row in rows)
    for name in ("chunks", *["again"][:again], "step", "over", "bubble", "span", "peak", "sent"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in shown:
        fits = row.fits(memory_limit)
        figures = row.plan.predicted
        shape = "" if row.candidate.chunks == 1 else f" {row.candidate.name}"
        recomputed = f"{len(row.candidate.recompute)}/{len(row.candidate.placement)}"
        table.add_row(
            _MARK if row is best else "" if fits else _TOO_LARGE,
            row.name,
            f"{row.candidate.chunks}{shape}",
            *[recomputed if row.candidate.recompute else "–"][:again],
            format_time(row.step),
            f"{row.makespan / bound - 1:.1%}" if fits and bound else "–",
            format_share(figures.bubble_global),
            format_share(figures.bubble_span),
            format_bytes(max(row.peak)),
            format_bytes(row.sent),
            style="bold" if row is best else None if fits else "dim",
        )
    console.print(table)
    console.print(_KEY, style="dim", highlight=False)
    console.print()
    console.print(_peaks(shown, best, memory_limit))
    if again:
        console.print(
            "again: chunks whose forward is computed again in the backward", style="dim", highlight=False
        )
    facts = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    within = " within the limit" if best is not None and math.isfinite(memory_limit) else ""
    facts.add_row("Bound", Text(f"{format_time(bound)}: no order of any of these{within} ends earlier"))
    for name, text in notes:
        facts.add_row(name, Text(text))
    facts.add_row("Peaks", _PEAKS)
    console.print()
    console.print(facts)


def _peaks(rows: Sequence[Row], best: Row | None, memory_limit: float) -> Table:
    """Each rank's peak bytes, a line a row."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("")
    table.add_column("peak of rank", no_wrap=True)
    for rank in range(rows[0].plan.stages):
        table.add_column(str(rank), justify="right")
    for row in rows:
        fits = row.fits(memory_limit)
        again = ", again" if row.candidate.recompute else ""
        table.add_row(
            _MARK if row is best else "" if fits else _TOO_LARGE,
            f"{row.name}{again}",
            *map(format_bytes, row.peak),
            style="bold" if row is best else None if fits else "dim",
        )
    return table


def firsts(rows: Sequence[Row]) -> list[Row]:
    """Of each schedule the first row, without and with recompute."""
    found: dict[tuple[str, bool], Row] = {}
    for row in rows:
        found.setdefault((row.name, bool(row.candidate.recompute)), row)
    return list(found.values())
