"""Stopping a run: all ranks after the same step, whoever is asked.

Why so: a rank that stops alone leaves its peers waiting for messages that never come. So a signal only
leaves a note, and after each step the ranks agree on the greatest of their notes. The second signal doesn't
wait: it interrupts at once.
"""

from __future__ import annotations

import enum
import signal
from types import FrameType, TracebackType
from typing import Any

from .ranks import Ranks


class Reason(enum.IntEnum):
    """Why a run ends; of several the greatest counts."""

    NONE = 0
    TIME = 1
    INTERRUPTED = 2


class Stop:
    """Notes SIGINT and SIGTERM while entered (in the main thread)."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._asked = Reason.NONE
        self._before: dict[signal.Signals, Any] = {}

    def ask(self, reason: Reason) -> None:
        """This rank wants to stop after the current step."""
        self._asked = max(self._asked, reason)

    def agree(self) -> Reason:
        """The greatest reason of all ranks, the same on each. Collective: once a step."""
        return Reason(self._ranks.maximum(self._asked))

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if self._asked is Reason.INTERRUPTED:
            raise KeyboardInterrupt
        self.ask(Reason.INTERRUPTED)
