import math

import pytest
from made_up_timelines import one_f_one_b

from pipeloom.report.figures import (
    check_timelines,
    figure_rows,
    format_bytes,
    format_time,
    peak_bytes,
    percent,
    points,
)
from pipeloom.schedules.timeline import Flow, Span, StepFigures, Timeline


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0, "s", "0 s"),
        (12.345, "s", "12.3 s"),
        (0.0123, "s", "12.3 ms"),
        (0.001, "s", "1.00 ms"),
        (4.56e-5, "s", "45.6 µs"),
        (1234.0, "s", "1,234 s"),
        (42.5, "units", "42.5 units"),
        (42.5, "", "42.5"),
    ],
)
def test_times_take_the_unit_that_reads_best(value: float, unit: str, text: str) -> None:
    assert format_time(value, unit) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "s", "0 B"),
        (999, "s", "999 B"),
        (63_090_000, "s", "63.1 MB"),
        (999_600, "s", "1.00 MB"),
        (2.5e15, "s", "2,500 TB"),
        (3.5, "units", "3.5"),
        (312e6, "units", "312 M"),
    ],
)
def test_bytes(value: float, unit: str, text: str) -> None:
    assert format_bytes(value, unit) == text


def test_differences_say_their_direction() -> None:
    assert percent(2.0, 3.0) == "+50.0%"
    assert percent(3.0, 2.0) == "−33.3%"
    assert percent(2.0, 2.0) == "±0.0%"
    assert percent(0.0, 2.0) == "–"
    assert points(0.25, 0.20) == "−5.0 pt"


def test_rows_of_two_steps() -> None:
    predicted = StepFigures(0.1, 0.20, 0.10, (0.8, 0.8), (1_000_000, 2_000_000))
    measured = StepFigures(0.2, 0.25, 0.10, (0.7, 0.8), ())
    rows = {r.label: r for r in figure_rows([predicted, measured], ["s", "s"])}
    assert rows["Step time"].values == ("100 ms", "200 ms")
    assert rows["Step time"].difference == "+100.0%"
    assert rows["Bubble, global"].difference == "+5.0 pt"
    assert rows["Busy, mean of ranks"].values == ("80.0%", "75.0%")
    assert rows["Peak memory, highest rank"].values == ("2.00 MB", "–")
    assert rows["Peak memory, highest rank"].difference == "–"


def test_times_of_different_units_have_no_difference_but_shares_have() -> None:
    figures = StepFigures(10.0, 0.2, 0.1, (0.8,), (5,))
    rows = {r.label: r for r in figure_rows([figures, figures], ["units", "s"])}
    assert rows["Step time"].difference == "–"
    assert rows["Peak memory, highest rank"].difference == "–"
    assert rows["Bubble, span"].difference == "±0.0 pt"


def test_peaks_are_the_highest_points() -> None:
    assert peak_bytes(one_f_one_b(stages=3, micro_batches=8, activation=5)) == (15, 10, 5)
    assert peak_bytes(Timeline("no memory", 2, [], memory=[[], []])) == ()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Timeline("t", 1, [Span(1, "F", 0, 0, 0.0, 1.0)]), "F0.0 is on rank 1, but there are 1 ranks"),
        (Timeline("t", 1, [Span(0, "F", 0, 3, 2.0, 1.0)]), "F0.3 on rank 0 runs from 2.0 to 1.0"),
        (Timeline("t", 1, [Span(0, "F", 0, 0, 0.0, math.nan)]), "finite"),
        (
            Timeline("t", 2, [], [Flow("F", 0, 1, 4, 0, 2, 0.0, 1.0, 8)]),
            "message F0>1.4 goes from rank 0 to 2",
        ),
        (Timeline("t", 2, [], [Flow("F", 0, 1, 4, 0, 1, 0.0, math.inf, 8)]), "arrived at inf"),
        (Timeline("t", 2, [], memory=[[(0.0, 1.0)]]), "memory of 1 ranks"),
        (Timeline("t", 1, [], memory=[[(0.0, math.nan)]]), "memory of rank 0 is nan"),
    ],
)
def test_what_cannot_be_drawn_is_named(broken: Timeline, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.").replace(">", r"\>")):
        check_timelines([broken])
