"""From seconds a round to the tables that are printed and kept in RESULTS.md.

A ratio is ours ÷ torch's: below 1 we are faster. Two figures of it: the ratio of the medians, and the spread of
the ratios of the rounds (each takes both steps from one round, so that a noisy minute hits both).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

MEGABYTE = 1e6


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The 10th and the 90th percentile, interpolated between the values."""
    if len(values) == 1:
        return values[0], values[0]
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """ "0.93 (0.91–0.97)": of the medians, and the 10th to 90th percentile of the rounds' ratios."""
    low, high = spread([a / b for a, b in zip(ours, theirs, strict=True)])
    return f"{statistics.median(ours) / statistics.median(theirs):.3f} ({low:.3f}–{high:.3f})"


def time_table(found: dict[str, Any], pairs: Sequence[str]) -> str:
    """Markdown: a row a contender. found: as `rounds.time_steps` gives it on rank 0."""
    seconds = found["seconds"]
    rows = [
        [
            "contender",
            "median ms",
            "min",
            "max",
            "÷ torch's (10–90% of rounds)",
            "÷ no pipeline",
            "bubble planned",
            "measured",
            "gradient error",
        ]
    ]
    for name, times in seconds.items():
        against = next((f"torch {s}" for s in pairs if name.split()[1:2] == [s]), None)
        measured = found["measured"].get(name)
        rows.append(
            [
                _title(name),
                *(f"{1e3 * t:.1f}" for t in (statistics.median(times), min(times), max(times))),
                ratio(times, seconds[against]) if against not in (None, name) else "",
                ratio(times, seconds["alone"]) if name != "alone" else "",
                f"{found['planned'][name]:.1%}" if measured else "",
                f"{statistics.median(measured):.1%}" if measured else "",
                f"{found['errors'][name]:.1e}" if name in found["errors"] else "",
            ]
        )
    return markdown(rows)


def overhead_text(found: dict[str, Any], pairs: Sequence[str]) -> str:
    """Two sentences: what the clocks cost, and what comparing batches costs."""
    on, off = (found["seconds"][f"ours {pairs[0]} equal{more}"] for more in ("", " unrecorded"))
    low, high = spread(found["compare_batches"])
    return (
        f"Always-on measuring: {pairs[0]} with its clocks ÷ without them {ratio(on, off)}. Comparing the "
        f"batches of both ranks: {1e6 * statistics.median(found['compare_batches']):.0f} µs a step "
        f"({1e6 * low:.0f}–{1e6 * high:.0f})."
    )


def memory_table(found: dict[str, list[dict[str, int]]]) -> str:
    """Markdown: a row a contender, both ranks in MB. found[contender][rank]: as `rounds.memory_growth` gives it."""
    rows = [["contender", "before the first step MB, rank 0 | 1", "growth in three steps", "peak"]]
    for name, ranks in found.items():
        columns = (
            [r["before"] for r in ranks],
            [r["peak"] - r["before"] for r in ranks],
            [r["peak"] for r in ranks],
        )
        rows.append([_title(name), *(" / ".join(f"{b / MEGABYTE:.0f}" for b in c) for c in columns)])
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are also straight as plain text; the first row is the head."""
    rows = [[cell.replace("|", "/") for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _title(name: str) -> str:
    if name == "alone":
        return "no pipeline: each rank half of the batch"
    words = name.split()
    if words[0] == "torch":
        return f"{words[1]} torch"
    return f"{words[1]} ours, {words[2]} cuts{', no clocks' if 'unrecorded' in words else ''}"
