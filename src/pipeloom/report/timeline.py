"""The timeline page: what a step was predicted to do above what it did, in one file that needs no network.

Takes Timelines (predicted, measured, or any others to be compared) and writes an HTML file: figures tables
that read without scripts, and a chart with a row a rank, memory under it and messages across it, which zooms
and pans. The markup, style and script are the three files in report/page/; this module fills them in. The
data is embedded as JSON in a data block, never as script, and the page's Content-Security-Policy lets in only
the style and script whose hashes it names: nothing is loaded from anywhere. The drawing follows the pipeline
diagrams of the GPipe, Megatron-LM and zero-bubble papers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import string
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from pipeloom.report.figures import (
    MISSING,
    check_timelines,
    figure_rows,
    format_bytes,
    format_share,
    peak_bytes,
    percent,
    points,
)
from pipeloom.schedules.timeline import StepFigures, Timeline


def write_timeline(
    path: str | Path,
    timelines: Sequence[Timeline],
    *,
    title: str = "Pipeline step",
    subtitle: Sequence[str | tuple[str, str]] = (),
    figures: Sequence[StepFigures] | None = None,
) -> Path:
    """Write the page of `timelines`, first on top, and return its path.

    `subtitle`: lines under the title; a pair is printed as name and value. `figures[i]` are those of
    `timelines[i]`; None: computed from the timelines, with the tops of their memory curves as peaks.
    Raises ValueError where there is no timeline, where one can't be drawn, or where `figures` doesn't match.
    """
    path = Path(path)
    path.write_text(
        timeline_page(timelines, title=title, subtitle=subtitle, figures=figures), encoding="utf-8"
    )
    return path


def timeline_page(
    timelines: Sequence[Timeline],
    *,
    title: str = "Pipeline step",
    subtitle: Sequence[str | tuple[str, str]] = (),
    figures: Sequence[StepFigures] | None = None,
) -> str:
    """The page that `write_timeline` writes, as a string."""
    if not timelines:
        raise ValueError(
            "a timeline page needs at least one timeline: give the predicted one, the measured one or both"
        )
    check_timelines(timelines)
    if figures is None:
        figures = [t.figures(peak_bytes(t)) for t in timelines]
    if len(figures) != len(timelines):
        raise ValueError(
            f"{len(figures)} figures for {len(timelines)} timelines: give one StepFigures for each"
        )
    style, script = _resource("timeline.css"), _resource("timeline.js")
    return string.Template(_resource("timeline.html")).substitute(
        style_hash=_hash(style),
        script_hash=_hash(script),
        title=escape(title),
        subtitle=_subtitle(subtitle),
        step_table=_step_table(timelines, figures),
        rank_table=_rank_table(timelines, figures),
        data=_data_block([t.to_json() for t in timelines]),
        style=style,
        script=script,
    )


def _resource(name: str) -> str:
    return (files("pipeloom.report") / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The source expression of Content-Security-Policy for an inline element that holds exactly this text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data_block(data: object) -> str:
    """JSON that can't end the script element it stands in, nor open a comment in it ("</" and "<!--")."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=True).replace("<", "\\u003c")


def _subtitle(rows: Sequence[str | tuple[str, str]]) -> str:
    parts = []
    for row in rows:
        if isinstance(row, str):
            parts.append(f"<div><dd>{escape(row)}</dd></div>")
        else:
            name, value = row
            parts.append(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>")
    return f'<dl class="facts">{"".join(parts)}</dl>' if parts else ""


def _step_table(timelines: Sequence[Timeline], figures: Sequence[StepFigures]) -> str:
    difference = len(timelines) == 2
    head = "".join(f'<th scope="col">{escape(t.title)}</th>' for t in timelines)
    if difference:
        head += '<th scope="col">Difference</th>'
    body = []
    for row in figure_rows(figures, [t.unit for t in timelines]):
        cells = "".join(f"<td>{escape(v)}</td>" for v in row.values)
        if difference:
            cells += f'<td class="difference">{escape(row.difference)}</td>'
        label = f"{escape(row.label)}<small>{escape(row.definition)}</small>"
        body.append(f'<tr><th scope="row">{label}</th>{cells}</tr>')
    return (
        f'<table id="figures"><caption>The step</caption><thead><tr><td></td>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def _rank_table(timelines: Sequence[Timeline], figures: Sequence[StepFigures]) -> str:
    """Busy share and peak bytes of each rank: a column a timeline, and the difference where there are two."""
    difference = len(timelines) == 2
    columns = len(timelines) + difference
    memory = any(f.peak_bytes for f in figures)
    groups = ["Busy"] + (["Peak memory"] if memory else [])
    names = [escape(t.title) for t in timelines] + (["Difference"] if difference else [])
    top = "".join(f'<th scope="colgroup" colspan="{columns}">{g}</th>' for g in groups)
    second = "".join(f'<th scope="col">{n}</th>' for _ in groups for n in names)
    same_unit = len({t.unit for t in timelines}) == 1
    body = []
    for rank in range(max(t.ranks for t in timelines)):
        busy = [f.busy[rank] if rank < len(f.busy) else None for f in figures]
        cells = "".join(f"<td>{MISSING if b is None else _bar(b) + format_share(b)}</td>" for b in busy)
        if difference:
            cells += f'<td class="difference">{_difference(busy, points)}</td>'
        if memory:
            peaks = [f.peak_bytes[rank] if rank < len(f.peak_bytes) else None for f in figures]
            cells += "".join(
                f"<td>{MISSING if p is None else escape(format_bytes(p, t.unit))}</td>"
                for p, t in zip(peaks, timelines, strict=True)
            )
            if difference:
                text = _difference(peaks, percent) if same_unit else MISSING
                cells += f'<td class="difference">{text}</td>'
        body.append(f'<tr><th scope="row">rank {rank}</th>{cells}</tr>')
    return (
        f'<table id="ranks"><caption>Each rank</caption><thead><tr><td rowspan="2"></td>{top}</tr>'
        f"<tr>{second}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )


def _difference(pair: Sequence[float | None], by: Callable[[float, float], str]) -> str:
    first, second = pair
    return MISSING if first is None or second is None else by(first, second)


def _bar(share: float) -> str:
    """A bar of a share, as SVG: attributes, since the page's policy lets no inline style in."""
    width = f"{100 * min(max(share, 0.0), 1.0):.1f}"
    return (
        '<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="100" height="10"/><rect class="value" width="{width}" height="10"/></svg>'
    )
