"""A step's figures in words: what the console's table and the page's tables both print.

Takes StepFigures (schedules/timeline.py), one or two of them, and gives rows of text: a label, its one-line
definition, a value for each step and the difference of the second from the first. The two bubbles are those
of the zero-bubble papers (span) and of a step with a synchronous optimizer (global); see `Timeline.figures`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipeloom.schedules.timeline import StepFigures, Timeline

MISSING = "–"


class FigureRow(NamedTuple):
    """One line of a table: `values` has a text for each step, `difference` is of the second to the first."""

    label: str
    definition: str
    values: tuple[str, ...]
    difference: str


def check_timelines(timelines: Sequence[Timeline]) -> None:
    """Refuse what can't be drawn: unknown ranks, times that aren't finite, spans that end before they start.

    Raises ValueError, which names the timeline and the span, message or memory point.
    """
    for timeline in timelines:
        where = f"timeline {timeline.title!r}"
        for span in timeline.spans:
            if not 0 <= span.rank < timeline.ranks:
                raise ValueError(
                    f"{where}: {span.name} is on rank {span.rank}, but there are {timeline.ranks} ranks"
                )
            if not (math.isfinite(span.start) and math.isfinite(span.end) and span.start <= span.end):
                raise ValueError(
                    f"{where}: {span.name} on rank {span.rank} runs from {span.start} to {span.end}: "
                    "both must be finite, and the end not before the start"
                )
        for flow in timeline.flows:
            name = f"message {flow.direction}{flow.source}>{flow.target}.{flow.micro_batch}"
            if not (0 <= flow.sender < timeline.ranks and 0 <= flow.receiver < timeline.ranks):
                raise ValueError(
                    f"{where}: {name} goes from rank {flow.sender} to {flow.receiver}, "
                    f"but there are {timeline.ranks} ranks"
                )
            if not (math.isfinite(flow.sent) and math.isfinite(flow.arrived)):
                raise ValueError(
                    f"{where}: {name} was sent at {flow.sent} and arrived at {flow.arrived}: not finite"
                )
        if len(timeline.memory) not in (0, timeline.ranks):
            raise ValueError(
                f"{where}: memory of {len(timeline.memory)} ranks, but there are {timeline.ranks} ranks"
            )
        for rank, points in enumerate(timeline.memory):
            for time, nbytes in points:
                if not (math.isfinite(time) and math.isfinite(nbytes)):
                    raise ValueError(
                        f"{where}: memory of rank {rank} is {nbytes} at {time}: both must be finite"
                    )


def peak_bytes(timeline: Timeline) -> tuple[int, ...]:
    """The highest point of each rank's memory curve; empty where no rank has one."""
    if not any(timeline.memory):
        return ()
    return tuple(int(max((nbytes for _, nbytes in points), default=0)) for points in timeline.memory)


def format_time(value: float, unit: str = "s") -> str:
    """Seconds as s, ms or µs, whichever reads best; another unit as a plain number."""
    if unit != "s":
        return f"{value:.4g} {unit}".rstrip()
    for factor, name in ((1.0, "s"), (1e-3, "ms")):
        if abs(value) >= factor:
            return f"{_three_digits(value / factor)} {name}"
    return f"{_three_digits(value / 1e-6)} µs" if value else "0 s"


def format_bytes(value: float, unit: str = "s") -> str:
    """Bytes as B, kB, MB, GB or TB (powers of 1000).

    Where times aren't seconds, memory is in the units of the costs given, and so it is printed without the B.
    """
    size, prefix = float(value), ""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(size) < 999.5 or prefix == "T":
            break
        size /= 1000
    name = prefix + ("B" if unit == "s" else "")
    if prefix:
        return f"{_three_digits(size)} {name}"
    return f"{size:.0f} B" if unit == "s" else f"{size:.4g}"


def format_share(value: float) -> str:
    """A share of 1 as a percentage, with one decimal."""
    return f"{100 * value:.1f}%"


def figure_rows(figures: Sequence[StepFigures], units: Sequence[str]) -> list[FigureRow]:
    """The rows of the figures table: step time, both bubbles, mean busy share, peak bytes.

    `units[i]` is the unit of `figures[i]`. With exactly two steps of one unit each row has a difference.
    """
    comparable = len(figures) == 2 and units[0] == units[1]

    def row(
        label: str,
        definition: str,
        get: Callable[[StepFigures], float | None],
        show: Callable[[float, str], str],
        shares: bool = False,
    ) -> FigureRow:
        numbers = [get(f) for f in figures]
        values = tuple(MISSING if n is None else show(n, u) for n, u in zip(numbers, units, strict=True))
        difference = MISSING
        if len(figures) == 2 and numbers[0] is not None and numbers[1] is not None and (comparable or shares):
            difference = points(numbers[0], numbers[1]) if shares else percent(numbers[0], numbers[1])
        return FigureRow(label, definition, values, difference)

    def share(value: float, _unit: str) -> str:
        return format_share(value)

    return [
        row(
            "Step time",
            "From the start of the step to the end of its last job.",
            lambda f: f.step_time,
            format_time,
        ),
        row(
            "Bubble, global",
            "1 − work ÷ (ranks × makespan): what a step with a synchronous optimizer leaves idle.",
            lambda f: f.bubble_global,
            share,
            shares=True,
        ),
        row(
            "Bubble, span",
            "1 − work ÷ (ranks × longest span of a rank, first job to last): what zero-bubble papers print.",
            lambda f: f.bubble_span,
            share,
            shares=True,
        ),
        row(
            "Busy, mean of ranks",
            "The share of the makespan in which a rank computes.",
            lambda f: sum(f.busy) / len(f.busy) if f.busy else None,
            share,
            shares=True,
        ),
        row(
            "Peak memory, highest rank",
            "The most bytes alive at once on any one rank.",
            lambda f: max(f.peak_bytes) if f.peak_bytes else None,
            format_bytes,
        ),
    ]


def percent(first: float, second: float) -> str:
    """How much more (+) or less (−) the second is, in percent of the first."""
    if first == 0:
        return MISSING if second else "±0.0%"
    return _signed(100 * (second - first) / first, "%")


def points(first: float, second: float) -> str:
    """The difference of two shares, in percentage points."""
    return _signed(100 * (second - first), " pt")


def _signed(value: float, suffix: str) -> str:
    text = f"{abs(value):.1f}"
    sign = "±" if float(text) == 0 else "+" if value > 0 else "−"
    return f"{sign}{text}{suffix}"


def _three_digits(value: float) -> str:
    """Three significant digits, never with an exponent."""
    if value == 0 or abs(value) >= 999.5:
        return f"{value:,.0f}"
    value = float(f"{value:.3g}")  # rounded first: 0.9996 has as many decimals as 1
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value)) + 1e-12))}f}"
