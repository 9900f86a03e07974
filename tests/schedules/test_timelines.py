"""The timeline's figures and its JSON."""

import json

import pytest

from pipeloom.schedules import Flow, Span, Timeline


def test_both_bubbles_by_hand():
    """Two ranks, one works 0–4, the other 2–6 with a gap: work 4 + 3, makespan 6, longest span 4."""
    spans = [
        Span(0, "F", 0, 0, 0, 4),
        Span(1, "wait", 1, 0, 0, 2),
        Span(1, "F", 1, 0, 2, 4),
        Span(1, "X", 1, 0, 5, 6),
    ]
    figures = Timeline("t", 2, [*spans, Span(1, "update", -1, -1, 6, 8)]).figures((10, 20))
    assert figures.step_time == 8
    assert figures.bubble_global == pytest.approx(1 - 7 / 12)
    assert figures.bubble_span == pytest.approx(1 - 7 / 8)
    assert figures.busy == pytest.approx((4 / 6, 3 / 6))
    assert figures.peak_bytes == (10, 20)


def test_nothing_ran():
    assert Timeline("t", 2, []).figures().bubble_global == 0


def test_json_and_back():
    flow = Flow("F", 0, 1, 2, 0, 1, 0.5, 0.75, 64)
    timeline = Timeline("t", 2, [Span(0, "F", 0, 2, 0.0, 0.5)], [flow], [[(0.0, 1.0)], []], "ms")
    assert Timeline.from_json(json.loads(json.dumps(timeline.to_json()))) == timeline
    assert timeline.spans[0].name == "F0.2"
    assert Span(0, "update", -1, -1, 0, 1).name == "update"
