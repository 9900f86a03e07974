"""Numbers of messages: one space for all channels, because Gloo knows tags only.

Control messages have small fixed numbers; the message of a tied slot is counted from TIED; values that cross
between chunks are numbered by (edge, micro-batch, value) from VALUES on, equally on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..program.subprogram import ProgramSet
from ..schedules.jobs import Direction

LOSSES: Final = 1
WEIGHTS: Final = 2
NORMS: Final = 3
CLOCK: Final = 4
LENGTHS: Final = 5
RECORDS: Final = 6
AGREEMENT: Final = 7
FIGURES: Final = 8
FRAMES: Final = 9
PARCELS: Final = 10
GATHER: Final = 11
REDUCE: Final = 12
BROADCAST: Final = 13
TIED: Final = 1 << 10
VALUES: Final = 1 << 20
_MOST: Final = (1 << 31) - 1


class ValueTags:
    """The numbers of all messages between chunks in one step."""

    def __init__(self, program_sets: Sequence[ProgramSet]):
        edges = sorted({edge for programs in program_sets for edge in programs.messages})
        self._edge = {edge: number for number, edge in enumerate(edges)}
        self._micro_batches = len(program_sets)
        widths = (len(names) for programs in program_sets for names in programs.messages.values())
        self._width = max(widths, default=0)
        if VALUES + len(edges) * self._micro_batches * self._width > _MOST:
            raise ValueError(
                f"{len(edges)} edges with up to {self._width} values for {self._micro_batches} micro-batches "
                "are more messages than can be numbered: use fewer micro-batches a step"
            )

    def of(self, edge: tuple[Direction, int, int], micro_batch: int) -> int:
        """The tag of the first value of a message; the next values follow it."""
        return VALUES + (self._edge[edge] * self._micro_batches + micro_batch) * self._width
