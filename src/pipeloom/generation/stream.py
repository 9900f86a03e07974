"""A run as its user sees it: an iterator of tokens that steps this rank (or, in memory, all ranks) from one to the
next.

Takes the work of the ranks that live here, gives tokens, results and figures. Nothing runs between two tokens that are
asked for. A stream that is left early is cancelled and brought to its end by `close`, which the next run does too: so
no rank is left waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from ..runtime.errors import StepError
from ..runtime.stepping import Work, rounds
from .request import Request, Result, Token
from .running import Running
from .spec import GenerationError


class StreamError(StepError):
    """A run ended before all prompts were over. The cause is chained. results: of every prompt that had begun, those
    that were over first; what wasn't over has stopped = ""."""

    def __init__(self, cause: StepError, results: list[Result], prompts: int) -> None:
        over = sum(bool(result.stopped) for result in results)
        super().__init__(
            f"{cause}\n{over} of {prompts} prompts were over; their text is kept (StreamError.results)"
        )
        self.results = results


@dataclass(frozen=True)
class RankFigures:
    """One rank in a run. weight_bytes: of its weights. cache_bytes: of its caches, when they were largest. left_bytes:
    of caches that remain. busy: seconds that its layers and its sampling took; seconds: of the run."""

    weight_bytes: int
    cache_bytes: int
    left_bytes: int
    busy: float
    seconds: float


@dataclass(frozen=True)
class StreamFigures:
    """A run. tokens: new ones of all prompts; seconds: on the slowest rank; ranks: by stage."""

    tokens: int
    seconds: float
    ranks: tuple[RankFigures, ...]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Stream(Iterator[Token]):
    """Tokens as they come, of all prompts, each prompt's in order; the same on every rank, but texts on the first
    alone. Also a context manager that closes it."""

    def __init__(
        self,
        works: Sequence[Work[list[list[float]]]],
        running: Running,
        requests: Sequence[Request],
        cancelled: set[int],
        guard: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._rounds = rounds(works)
        self._running = running
        self._requests = requests
        self._cancelled = cancelled
        self._guard = guard
        self._open = True
        self._figures: StreamFigures | None = None

    def __next__(self) -> Token:
        fresh = self._running.fresh
        while not fresh and self._open:
            self._step()
        if not fresh:
            raise StopIteration
        return fresh.popleft()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, StreamError):
            self.close()

    def cancel(self, prompt: int) -> None:
        """Ends a prompt early: its text so far is its result. Counts on the first rank; elsewhere nothing happens.
        Raises GenerationError for a prompt that there isn't."""
        if not 0 <= prompt < len(self._requests):
            raise GenerationError(
                f"there is no prompt {prompt} to cancel: they are 0 to {len(self._requests) - 1}"
            )
        self._cancelled.add(prompt)

    def close(self) -> None:
        """Cancels what isn't over and brings the run to its end. All ranks do it."""
        if self._open:
            self._cancelled.update(range(len(self._requests)))
        while self._open:
            self._step()
        self._running.fresh.clear()

    @property
    def results(self) -> list[Result]:
        """Of the prompts that are over, in their order."""
        return [self._running.results[index] for index in sorted(self._running.results)]

    @property
    def figures(self) -> StreamFigures:
        """Once the run is over. Raises GenerationError before."""
        if self._figures is None:
            raise GenerationError("a run has figures when it is over: take all its tokens first")
        return self._figures

    def _step(self) -> None:
        rows: list[list[float]] | None = None
        try:
            with self._guard():
                try:
                    next(self._rounds)
                except StopIteration as stop:
                    rows = stop.value[0]
        except StepError as error:
            self._open = False
            results = self.results + self._running.unfinished()
            raise StreamError(error, results, len(self._requests)) from error
        except BaseException:
            self._open = False
            raise
        if rows is not None:
            self._open = False
            self._count(rows)

    def _count(self, rows: list[list[float]]) -> None:
        ranks = tuple(
            RankFigures(int(weights), int(peak), int(left), busy, seconds)
            for weights, peak, left, busy, seconds in rows
        )
        tokens = sum(len(result.tokens) for result in self._running.results.values())
        self._figures = StreamFigures(tokens, max(rank.seconds for rank in ranks), ranks)
