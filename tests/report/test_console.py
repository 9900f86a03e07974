import io
import math

import pytest
from rich.console import Console

from pipeloom.report.console import TrainingConsole, clock_text, printable, show_figures, sparkline, summary
from pipeloom.schedules.timeline import StepFigures


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def console(terminal: bool = False, width: int = 110) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)


def text(of: Console) -> str:
    assert isinstance(of.file, io.StringIO)
    return of.file.getvalue()


def test_plain_lines_are_throttled_but_first_last_and_held_out_always_come() -> None:
    out, clock = console(), Clock()
    with TrainingConsole("GPT", 2, 10, console=out, clock=clock) as live:
        assert live.plain
        for step in range(1, 11):
            clock.now += 1
            live.update(step, 3.0 - step / 10, 2.5 if step == 4 else None, 12345.6, [0.5, 0.75], lr=1e-3)
    lines = text(out).splitlines()
    assert lines[0] == "GPT: 2 ranks, 10 steps"
    assert [line.split(" ")[1] for line in lines[1:]] == ["1/10", "4/10", "9/10", "10/10"]
    assert lines[2] == (
        "step 4/10 · loss 2.6000 · held-out 2.5000 · 12,346 tokens/s · busy 50% 75% · lr 1.00e-03"
        " · elapsed 0:04 · left 0:06"
    )
    assert lines[1].endswith("left –")
    assert lines[-1].endswith("left 0:00")


def test_the_time_left_counts_from_where_a_resumed_run_began() -> None:
    out, clock = console(), Clock()
    with TrainingConsole("GPT", 1, 1000, console=out, clock=clock, every=0) as live:
        live.update(900, 1.0, None, 1.0, [1.0])
        clock.now += 20
        live.update(910, 1.0, None, 1.0, [1.0])
    assert text(out).splitlines()[-1].endswith("left 3:00")


def test_the_live_table_shows_every_figure_and_keeps_the_last_held_out_loss() -> None:
    out, clock = console(terminal=True), Clock()
    with TrainingConsole("GPT [d 192]", 2, 1500, console=out, clock=clock) as live:
        assert not live.plain
        live.update(1, 3.5, 3.25, 9000.0, [0.25, 1.0])
        clock.now += 90
        live.update(750, 2.125, None, 23456.0, [0.4, 0.95], lr=0.002)
        live.message("checkpoint [bold] written")
    shown = text(out)
    for piece in [
        "GPT [d 192]",
        "750 / 1,500",
        "2.1250",
        "3.2500",
        "23,456",
        "1:30",
        "2.00e-03",
        "40% busy",
        "95% busy",
    ]:
        assert piece in shown
    assert "checkpoint [bold] written" in shown


def test_many_ranks_are_summed_up() -> None:
    out = console(terminal=True)
    with TrainingConsole("GPT", 40, 10, console=out) as live:
        live.update(1, 1.0, None, 1.0, [0.5] * 40)
    assert "24 more" in text(out)
    assert "rank 16" not in text(out)


def test_a_wrong_number_of_busy_shares_is_refused() -> None:
    with (
        TrainingConsole("GPT", 2, 10, console=console()) as live,
        pytest.raises(ValueError, match="busy shares of 3 ranks at step 7, but the run has 2 ranks"),
    ):
        live.update(7, 1.0, None, 1.0, [1.0] * 3)


def test_the_live_table_ends_when_the_run_fails() -> None:
    out = console(terminal=True)
    live = TrainingConsole("GPT", 1, 10, console=out)
    with pytest.raises(ValueError, match="busy shares"), live:
        live.update(1, 1.0, None, 1.0, [])
    before = text(out)
    assert before.endswith("\x1b[?25h")  # the cursor is shown again
    live.message("after")
    assert text(out) == before + "after\n"


def test_the_summary_prints_samples_as_they_are_but_no_control_characters() -> None:
    out = console()
    summary(
        [("held-out loss", "3.1 → 1.9"), ("run folder", "runs/[a]")],
        "def f(x):\n    [bold]x\x1b[2J",
        console=out,
    )
    shown = text(out)
    assert "runs/[a]" in shown
    assert "    [bold]x\\x1b[2J" in shown
    assert "\x1b" not in shown


def test_the_figures_table() -> None:
    out = console()
    show_figures(
        StepFigures(0.1, 0.2, 0.1, (0.8, 0.7), (1_000_000, 2_000_000)),
        StepFigures(0.11, 0.25, 0.1, (0.75, 0.7), (1_500_000, 2_000_000)),
        console=out,
    )
    rows = {line[:28].strip(): line[28:].split() for line in text(out).splitlines()}
    assert rows["Step time"] == ["100", "ms", "110", "ms", "+10.0%"]
    assert rows["Bubble, global"] == ["20.0%", "25.0%", "+5.0", "pt"]
    assert rows["Busy, rank 0"] == ["80.0%", "75.0%", "−5.0", "pt"]
    assert rows["Peak memory, rank 0"] == ["1.00", "MB", "1.50", "MB", "+50.0%"]


def test_the_predicted_figures_alone() -> None:
    out = console()
    show_figures(StepFigures(42.5, 0.2, 0.1, (0.8,), (3,)), unit="units", console=out)
    assert "42.5 units" in text(out)
    assert "measured" not in text(out)
    assert "difference" not in text(out)


def test_small_texts() -> None:
    assert sparkline([1.0, 2.0, math.nan, 3.0]) == "▁▅!█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert clock_text(3725) == "1:02:05"
    assert printable("a\tb\n\x07é") == "a\tb\n\\x07é"
