"""The page in a browser: that it draws, answers the mouse and the keys, stays quiet and stays fast."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Chromium, find_chromium
from made_up_timelines import one_f_one_b

from pipeloom.report.timeline import write_timeline
from pipeloom.schedules.timeline import WORK, Timeline

pytestmark = [
    pytest.mark.page,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium binary on the PATH"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium(width=1280, height=1000) as chromium:
        yield chromium


@pytest.fixture
def both() -> list[Timeline]:
    return [one_f_one_b("Predicted"), one_f_one_b("Measured", jitter=0.4, latency=0.002)]


def show(browser: Chromium, folder: Path, timelines: list[Timeline]) -> Path:
    """Write and open the page; nothing may be logged, thrown or asked of the network by it."""
    path = write_timeline(
        folder / "timeline.html", timelines, title="<i>step</i>", subtitle=[("schedule", "1F1B")]
    )
    browser.open(path)
    quiet(browser, path)
    return path


def quiet(browser: Chromium, path: Path) -> None:
    assert browser.log == []
    assert browser.requests == [path.resolve().as_uri()]
    assert browser.evaluate("document.getElementById('problem').hidden") is True


def drawn(browser: Chromium) -> list[int]:
    """How many spans each panel drew."""
    return browser.evaluate(
        "[...document.querySelectorAll('canvas[role=img]')].map(c => Number(c.dataset.drawn))"
    )


def colours(browser: Chromium, panel: int = 0, top: bool = False) -> dict[str, int]:
    """How many pixels of each opaque colour a panel's lower or upper canvas has."""
    pick = "plot.children[1]" if top else "plot.children[0]"
    return browser.evaluate(
        f"""(() => {{
          const plot = document.querySelectorAll('.plot')[{panel}], canvas = {pick}, found = {{}};
          const copy = new OffscreenCanvas(canvas.width, canvas.height);
          const pen = copy.getContext('2d', {{ willReadFrequently: true }});
          pen.drawImage(canvas, 0, 0);
          const data = pen.getImageData(0, 0, canvas.width, canvas.height).data;
          for (let i = 0; i < data.length; i += 4) {{
            if (data[i + 3] < 255) continue;
            const key = [data[i], data[i + 1], data[i + 2]].join(',');
            found[key] = (found[key] || 0) + 1;
          }}
          return found;
        }})()"""
    )


def position(browser: Chromium, panel: int, rank: int, share: float) -> tuple[float, float]:
    """Where a share of the time axis is on a rank's row, in window coordinates (two ranks, memory shown)."""
    left, top, width, height = browser.evaluate(
        f"(() => {{ const b = document.querySelectorAll('.plot')[{panel}].getBoundingClientRect();"
        " return [b.left, b.top, b.width, b.height]; })()"
    )
    return left + 92 + share * (width - 92 - 12), top + 26 + rank * (height - 28) / 2 + 13


FORWARD, BACKWARD = "0,114,178", "213,94,0"


def test_every_job_of_both_steps_is_drawn(browser: Chromium, tmp_path: Path, both: list[Timeline]) -> None:
    show(browser, tmp_path, both)
    assert drawn(browser) == [len(t.spans) for t in both]
    for panel, timeline in enumerate(both):
        painted = colours(browser, panel)
        # A job's pixels are its share of the common axis times the row's height, less gaps and letters.
        width = browser.evaluate("document.querySelector('.plot').clientWidth") - 104
        extent = max(s.end for t in both for s in t.spans)
        for colour, kind in ((FORWARD, "F"), (BACKWARD, "X")):
            seconds = sum(s.end - s.start for s in timeline.spans if s.kind == kind)
            expected = seconds / extent * width * 26
            assert 0.8 * expected < painted[colour] <= 1.02 * expected
    text = browser.evaluate("document.body.innerText")
    for piece in (
        "<i>step</i>",
        "Step time",
        "Bubble, global",
        "Difference",
        "rank 1",
        "F forward",
        "X backward",
        "finalize",
    ):
        assert piece in text


def test_the_screenshot_is_not_blank(browser: Chromium, tmp_path: Path, both: list[Timeline]) -> None:
    show(browser, tmp_path, both)
    picture = browser.screenshot(tmp_path / "page.png")
    (tmp_path / "blank.html").write_text("<!doctype html><title>blank</title>", encoding="utf-8")
    browser.open(tmp_path / "blank.html")
    blank = browser.screenshot(tmp_path / "blank.png")
    assert len(picture) > 5 * len(blank)


def test_hovering_tells_about_a_job_and_marks_it_in_both(
    browser: Chromium, tmp_path: Path, both: list[Timeline]
) -> None:
    path = show(browser, tmp_path, both)
    extent = max(s.end for t in both for s in t.spans)
    job = next(s for s in both[0].spans if s.name == "X1.2")
    browser.mouse("mouseMoved", *position(browser, 0, 1, (job.start + job.end) / 2 / extent))
    browser.settle()
    tip = browser.evaluate("document.getElementById('tip').innerText")
    assert tip.startswith("X1.2 · backward on rank 1")
    for piece in (
        "Chunk\n1",
        "Micro-batch\n2",
        "Duration\n20.00 ms",
        "Duration, Measured",
        "Sent to rank 0\n1.00 MB",
    ):
        assert piece in tip
    assert all(colours(browser, panel, top=True).get("28,37,48", 0) > 50 for panel in (0, 1))
    browser.mouse("mouseMoved", 5, 5)
    browser.settle()
    assert browser.evaluate("document.getElementById('tip').hidden") is True
    assert colours(browser, 0, top=True) == {}
    quiet(browser, path)


def test_wheel_drag_buttons_and_keys_move_the_view(
    browser: Chromium, tmp_path: Path, both: list[Timeline]
) -> None:
    path = show(browser, tmp_path, both)
    label = "document.getElementById('range').textContent"
    x, y = position(browser, 0, 0, 0.5)
    everything = drawn(browser)
    assert browser.evaluate(label) == "whole step"
    for _ in range(8):
        browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-200)
    browser.settle()
    zoomed = browser.evaluate(label)
    assert zoomed != "whole step"
    assert all(0 < few < all_ for few, all_ in zip(drawn(browser), everything, strict=True))

    browser.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    browser.mouse("mouseMoved", x + 120, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x + 120, y, button="left", clickCount=1)
    browser.settle()
    dragged = browser.evaluate(label)
    start, end = (float(word.split()[0]) for word in zoomed.split(" – "))
    assert float(dragged.split()[0]) == pytest.approx(
        start - (end - start) * 120 / (1280 - 92 - 12 - 90), rel=0.02
    )

    browser.evaluate("document.querySelector('.plot').focus()")
    browser.press("ArrowRight")
    browser.settle()
    assert browser.evaluate(label) not in (dragged, "whole step")
    browser.evaluate("document.getElementById('fit').click()")
    browser.settle()
    assert browser.evaluate(label) == "whole step"
    assert drawn(browser) == everything
    browser.evaluate("document.getElementById('zoom-in').click()")
    browser.settle()
    assert browser.evaluate(label) != "whole step"
    browser.press("0")
    browser.settle()
    assert browser.evaluate(label) == "whole step"
    quiet(browser, path)


def test_a_click_follows_a_micro_batch(browser: Chromium, tmp_path: Path, both: list[Timeline]) -> None:
    show(browser, tmp_path, both)
    before = colours(browser)
    extent = max(s.end for t in both for s in t.spans)
    job = next(s for s in both[0].spans if s.name == "F0.1")
    x, y = position(browser, 0, 0, (job.start + job.end) / 2 / extent)
    for kind in ("mousePressed", "mouseReleased"):
        browser.mouse(kind, x, y, button="left", clickCount=1)
    browser.settle()
    followed = colours(browser)
    # One micro-batch of four keeps its colours.
    for colour in (FORWARD, BACKWARD):
        assert followed[colour] == pytest.approx(before[colour] / 4, rel=0.1)


def test_one_time_axis_or_each_its_own(browser: Chromium, tmp_path: Path, both: list[Timeline]) -> None:
    show(browser, tmp_path, both)
    shared = colours(browser, 0)[FORWARD]
    browser.evaluate("document.getElementById('shared').click()")
    browser.settle()
    ends = [max(s.end for s in t.spans) for t in both]
    assert colours(browser, 0)[FORWARD] / shared == pytest.approx(ends[1] / ends[0], rel=0.05)


def test_units_that_disagree_are_each_scaled_to_their_own_length(browser: Chromium, tmp_path: Path) -> None:
    units = one_f_one_b("Predicted", forward=1, backward=2, latency=0.1, unit="units")
    show(browser, tmp_path, [units, one_f_one_b("Measured")])
    assert browser.evaluate("document.getElementById('shared-control').offsetParent === null") is True
    first, second = colours(browser, 0), colours(browser, 1)
    assert first[FORWARD] == pytest.approx(second[FORWARD], rel=0.02)


def test_thirty_thousand_spans_are_drawn_and_zoomed_quickly(browser: Chromium, tmp_path: Path) -> None:
    timelines = [one_f_one_b("Predicted", 8, 1000), one_f_one_b("Measured", 8, 1000, jitter=0.2)]
    assert sum(s.kind in WORK for t in timelines for s in t.spans) == 32_000
    path = show(browser, tmp_path, timelines)
    assert drawn(browser) == [len(t.spans) for t in timelines]
    began = time.monotonic()
    for _ in range(10):
        browser.evaluate("document.getElementById('zoom-in').click()")
        browser.settle()
    assert time.monotonic() - began < 10
    quiet(browser, path)
