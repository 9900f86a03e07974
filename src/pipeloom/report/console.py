"""What a training run prints: a live table while it runs, the figures and a sample of text at its end.

`TrainingConsole` takes numbers (step, losses, tokens/s, each rank's busy share) and draws them with rich, in
place, on a terminal; where the output is no terminal (a log file, CI) it prints one plain line at a time
instead. It knows nothing of training, ranks or torch: whoever trains calls `update`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeloom.report.figures import MISSING, figure_rows, format_bytes, format_share, percent, points
from pipeloom.schedules.timeline import StepFigures

_SPARKS: Final = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH: Final = 48
#: ranks that get a bar of their own in the live table; the others are summed up in one line
_MOST_BARS: Final = 16


class TrainingConsole:
    """A live view of one training run; a context manager.

    `plain` True: plain lines, at most one each `every` seconds (the first and the last step always); False:
    the live table; None: the live table where the output is a terminal. `clock` gives seconds (for tests).
    """

    def __init__(
        self,
        title: str,
        ranks: int,
        total_steps: int,
        plain: bool | None = None,
        *,
        every: float = 5.0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if ranks < 1 or total_steps < 1:
            raise ValueError(
                f"a training console needs at least one rank and one step, not {ranks} and {total_steps}"
            )
        self.title = title
        self.ranks = ranks
        self.total_steps = total_steps
        self.console = console if console is not None else Console()
        self.plain = not self.console.is_terminal if plain is None else plain
        self.every = every
        self._clock = clock
        self._began = clock()
        self._first_step: int | None = None
        self._first_time = 0.0
        self._printed = -math.inf
        self._losses: deque[float] = deque(maxlen=_SPARK_WIDTH)
        self._held_out: float | None = None
        self._live: Live | None = None

    def __enter__(self) -> TrainingConsole:
        self._began = self._clock()
        if self.plain:
            self.console.print(Text(f"{self.title}: {self.ranks} ranks, {self.total_steps} steps"))
        else:
            waiting = Panel(
                Text("compiling and starting the ranks …", style="dim"),
                title=Text(self.title),
                title_align="left",
                border_style="dim",
            )
            self._live = Live(waiting, console=self.console, refresh_per_second=8)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(
        self,
        step: int,
        loss: float,
        held_out: float | None,
        tokens_per_second: float,
        busy: Sequence[float],
        lr: float | None = None,
    ) -> None:
        """Show that `step` of `total_steps` is done.

        `held_out` None keeps the last held-out loss in view. `busy`: one share in 0 … 1 a rank. The first
        update of a run, which may be any step after a resume, is where the time left is reckoned from.
        """
        if len(busy) != self.ranks:
            raise ValueError(
                f"busy shares of {len(busy)} ranks at step {step}, but the run has {self.ranks} ranks"
            )
        now = self._clock()
        if self._first_step is None:
            self._first_step, self._first_time = step, now
        self._losses.append(loss)
        if held_out is not None:
            self._held_out = held_out
        if not self.plain:
            if self._live is not None:
                self._live.update(self._panel(step, loss, tokens_per_second, busy, lr))
            return
        # A new held-out loss is rare and wanted: it is never held back.
        if now - self._printed < self.every and step < self.total_steps and held_out is None:
            return
        self._printed = now
        parts = [f"step {step}/{self.total_steps}", f"loss {loss:.4f}"]
        if held_out is not None:
            parts.append(f"held-out {held_out:.4f}")
        parts += [f"{tokens_per_second:,.0f} tokens/s", "busy " + " ".join(f"{b:.0%}" for b in busy)]
        if lr is not None:
            parts.append(f"lr {lr:.2e}")
        parts += [f"elapsed {clock_text(now - self._began)}", f"left {self._left(step, now)}"]
        self.console.print(Text(" · ".join(parts)), soft_wrap=True)

    def message(self, text: str) -> None:
        """Print one line that stays: above the live table, or among the plain lines."""
        self.console.print(Text(printable(text)), soft_wrap=True)

    def summary(self, rows: Sequence[tuple[str, str]], sample: str | None = None) -> None:
        """`summary` on this console, after the live table."""
        summary(rows, sample, console=self.console)

    def show_figures(
        self, predicted: StepFigures, measured: StepFigures | None = None, unit: str = "s"
    ) -> None:
        """`show_figures` on this console."""
        show_figures(predicted, measured, unit=unit, console=self.console)

    def _left(self, step: int, now: float) -> str:
        assert self._first_step is not None
        done = step - self._first_step
        if step >= self.total_steps:
            return clock_text(0)
        return (
            clock_text((now - self._first_time) / done * (self.total_steps - step)) if done > 0 else MISSING
        )

    def _panel(
        self, step: int, loss: float, tokens_per_second: float, busy: Sequence[float], lr: float | None
    ) -> RenderableType:
        now = self._clock()
        head = Table.grid(padding=(0, 3))
        for _ in range(3):
            head.add_column(no_wrap=True)
        cells = [
            ("step", f"{step:,} / {self.total_steps:,}"),
            ("loss", f"{loss:.4f}"),
            ("held-out loss", MISSING if self._held_out is None else f"{self._held_out:.4f}"),
            ("tokens/s", f"{tokens_per_second:,.0f}"),
            ("lr", MISSING if lr is None else f"{lr:.2e}"),
            ("elapsed", f"{clock_text(now - self._began)}, left {self._left(step, now)}"),
        ]
        for first in (0, 3):
            row = cells[first : first + 3]
            head.add_row(*(Text.assemble((f"{name}  ", "dim"), (value, "bold")) for name, value in row))
        bars = Table.grid(padding=(0, 1), expand=True)
        bars.add_column(no_wrap=True, style="dim")
        bars.add_column(ratio=1)
        bars.add_column(justify="right", no_wrap=True)

        def add_bar(label: str, share: float, text: str, style: str = "cyan") -> None:
            shown = min(max(share, 0.0), 1.0)
            bar = ProgressBar(total=1.0, completed=shown, complete_style=style, finished_style=style)
            bars.add_row(label, bar, text)

        add_bar("steps", step / self.total_steps, f"{step / self.total_steps:.0%} done", style="green")
        for rank, share in enumerate(busy[:_MOST_BARS]):
            add_bar(f"rank {rank}", share, f"{share:.0%} busy")
        if rest := busy[_MOST_BARS:]:
            mean = sum(rest) / len(rest)
            add_bar(f"{len(rest)} more", mean, f"{mean:.0%} busy")
        bars.add_row("loss", Text(sparkline(self._losses)), f"last {len(self._losses)}")
        return Panel(Group(head, bars), title=Text(self.title), title_align="left", border_style="dim")


def summary(
    rows: Sequence[tuple[str, str]], sample: str | None = None, *, console: Console | None = None
) -> None:
    """Print the end of a run: names and values, and below them a sample of text (as it is, no markup)."""
    console = console if console is not None else Console()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(printable(name)), Text(printable(value)))
    console.print(table)
    if sample is not None:
        console.print(Panel(Text(printable(sample)), title="sample", title_align="left", border_style="dim"))


def show_figures(
    predicted: StepFigures,
    measured: StepFigures | None = None,
    *,
    unit: str = "s",
    console: Console | None = None,
) -> None:
    """Print the figures of a predicted step, and of the measured one beside it with the difference.

    Times are in `unit`; where it isn't seconds, memory is printed as a plain number too (see `format_bytes`).
    """
    console = console if console is not None else Console()
    figures = [predicted] if measured is None else [predicted, measured]
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for name in ["predicted", "measured", "difference"][: len(figures) + (len(figures) == 2)]:
        table.add_column(name, justify="right")
    both = len(figures) == 2
    for row in figure_rows(figures, [unit] * len(figures)):
        table.add_row(row.label, *row.values, *([row.difference] if both else []))
    for rank in range(max(len(f.busy) for f in figures)):
        shares = [f.busy[rank] if rank < len(f.busy) else None for f in figures]
        texts = [MISSING if s is None else format_share(s) for s in shares]
        table.add_row(f"Busy, rank {rank}", *texts, *([_difference(shares, points)] if both else []))
    for rank in range(max(len(f.peak_bytes) for f in figures)):
        peaks = [f.peak_bytes[rank] if rank < len(f.peak_bytes) else None for f in figures]
        texts = [MISSING if p is None else format_bytes(p, unit) for p in peaks]
        table.add_row(f"Peak memory, rank {rank}", *texts, *([_difference(peaks, percent)] if both else []))
    console.print(table)


def sparkline(values: Sequence[float] | deque[float]) -> str:
    """The values as block characters, from their lowest to their highest; one that isn't finite is "!"."""
    finite = [v for v in values if math.isfinite(v)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    top = len(_SPARKS) - 1
    return "".join(
        "!" if not math.isfinite(v) else _SPARKS[round((v - low) / (high - low) * top) if high > low else 0]
        for v in values
    )


def clock_text(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def printable(text: str) -> str:
    """The text with its control characters, which could change the terminal's state, written as escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def _difference(pair: Sequence[float | None], by: Callable[[float, float], str]) -> str:
    first, second = pair
    return MISSING if first is None or second is None else by(first, second)
