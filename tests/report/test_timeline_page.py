"""The page as text: what a browser isn't needed for."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_up_timelines import one_f_one_b

from pipeloom.report.timeline import timeline_page, write_timeline
from pipeloom.schedules.timeline import StepFigures, Timeline

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&<!--"


class Tags(HTMLParser):
    """Every start tag, and the text of script and style elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[tuple[str, dict[str, str | None], str]] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag, attrs = self.tags[-1] if self.tags else ("", {})
        if tag in ("script", "style") and self.lasttag == tag and self.cdata_elem == tag:
            self.inline.append((tag, attrs, data))
        else:
            self.words.append(data)


def test_hostile_text_stays_text() -> None:
    timeline = one_f_one_b(HOSTILE, unit=HOSTILE)
    page = timeline_page([timeline, timeline], title=HOSTILE, subtitle=[HOSTILE, (HOSTILE, HOSTILE)])
    plain = Tags(timeline_page([one_f_one_b()] * 2, title="t", subtitle=["a", ("b", "c")]))
    tags = Tags(page)
    assert [t for t, _ in tags.tags] == [t for t, _ in plain.tags]
    assert not any("onerror" in attrs for _, attrs in tags.tags)
    assert sum(HOSTILE in word for word in tags.words) >= 5
    [data] = [text for tag, attrs, text in tags.inline if attrs.get("id") == "data"]
    assert Timeline.from_json(json.loads(data)[1]) == timeline


def test_nothing_is_loaded_and_only_the_named_script_and_style_run() -> None:
    tags = Tags(timeline_page([one_f_one_b()]))
    assert not any(name in attrs for _, attrs in tags.tags for name in ("src", "href", "style", "onclick"))
    [policy] = [a["content"] or "" for t, a in tags.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag, attrs, text in tags.inline:
        if attrs.get("type") != "application/json":
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"https?://", "".join(text for _, _, text in tags.inline))


def cells(page: str, table: str) -> list[list[str]]:
    """The rows of a table as plain text (definitions left out)."""
    body = page.split(f'<table id="{table}">')[1].split("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", body.split("<tbody>")[1], re.S)
    return [
        [
            re.sub(r"<svg.*?</svg>|<small>.*?</small>|<[^>]*>", "", cell)
            for cell in re.findall(r"<t[hd].*?</t[hd]>", row, re.S)
        ]
        for row in rows
    ]


def test_the_tables_hold_both_steps_and_their_difference() -> None:
    predicted = one_f_one_b("Predicted", stages=2, micro_batches=4, latency=0.0)
    measured = one_f_one_b("Measured", stages=2, micro_batches=4, latency=0.0, forward=0.02, backward=0.04)
    page = timeline_page([predicted, measured])
    assert cells(page, "figures") == [
        ["Step time", "158 ms", "315 ms", "+100.0%"],
        ["Bubble, global", "20.0%", "20.0%", "±0.0 pt"],
        ["Bubble, span", "20.0%", "20.0%", "±0.0 pt"],
        ["Busy, mean of ranks", "80.0%", "80.0%", "±0.0 pt"],
        ["Peak memory, highest rank", "8.00 MB", "8.00 MB", "±0.0%"],
    ]
    assert cells(page, "ranks")[1] == [
        "rank 1",
        "80.0%",
        "80.0%",
        "±0.0 pt",
        "4.00 MB",
        "4.00 MB",
        "±0.0%",
    ]


def test_given_figures_are_printed_instead() -> None:
    figures = StepFigures(1.0, 0.5, 0.25, (0.5, 0.125), (1_000, 3_000))
    page = timeline_page([one_f_one_b()], figures=[figures])
    assert cells(page, "figures")[0] == ["Step time", "1.00 s"]
    assert cells(page, "ranks")[1] == ["rank 1", "12.5%", "3.00 kB"]


def test_what_cannot_be_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one timeline"):
        timeline_page([])
    with pytest.raises(ValueError, match="0 figures for 1 timelines"):
        timeline_page([one_f_one_b()], figures=[])


def test_the_file_is_the_page(tmp_path: Path) -> None:
    path = write_timeline(tmp_path / "timeline.html", [one_f_one_b()], title="Grüße")
    assert path.read_text(encoding="utf-8") == timeline_page([one_f_one_b()], title="Grüße")
