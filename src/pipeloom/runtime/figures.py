"""The figures of the last step on all ranks, without a collective call by the user.

At the end of a step each rank sends its peers five numbers and waits for nothing; whoever reads
`Pipeline.measured` puts them together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..schedules.timeline import StepFigures
from . import tags
from .measure import Recorder
from .static_plan import Run
from .stepping import start_exchange
from .transport import Receive, Transport

_FIELDS = 6


class StageFigures:
    """Five numbers a rank, some of them still on their way."""

    def __init__(self, rows: list[Tensor | Receive]) -> None:
        self._rows = rows
        self._read: StepFigures | None = None

    def settle(self) -> None:
        """Waits for what is still coming: the next step's numbers follow on the same tag."""
        self._rows = [row if isinstance(row, Tensor) else row.wait() for row in self._rows]

    def read(self) -> StepFigures:
        """The figures; waits for the other ranks' numbers where they haven't come."""
        if self._read is None:
            self.settle()
            began, first, last, ended, work, peak = zip(
                *(r.tolist() for r in self._rows if isinstance(r, Tensor)), strict=True
            )
            ranks, total = len(self._rows), sum(work)
            makespan = max(last) - min(first)
            longest = max(b - a for a, b in zip(first, last, strict=True))
            idle = total <= 0 or makespan <= 0
            self._read = StepFigures(
                step_time=max(ended) - min(began),
                bubble_global=0.0 if idle else 1 - total / (ranks * makespan),
                bubble_span=0.0 if idle else 1 - total / (ranks * longest),
                busy=tuple(0.0 if idle else w / makespan for w in work),
                peak_bytes=tuple(int(p) for p in peak),
            )
        return self._read


def exchange_figures(
    transport: Transport, recorder: Recorder, offset: float, peak_bytes: int
) -> StageFigures:
    """Sends this rank's numbers for the step that just ended; waits for nothing."""
    first, last, ended, work = float("inf"), recorder.began, recorder.began, 0.0
    for item, start, end in zip(recorder.plan.items, recorder.start, recorder.end, strict=True):
        if not end:
            continue
        ended = max(ended, end)
        if isinstance(item, Run) and item.call is not None:
            work += end - start
            first, last = min(first, start), max(last, end)
    first = min(first, last)
    times = [t + offset for t in (recorder.began, first, last, ended)]
    mine = torch.tensor([*times, work, float(peak_bytes)], dtype=torch.float64)
    receives = start_exchange(transport, tags.FIGURES, mine, [(_FIELDS,)] * transport.size)
    return StageFigures(
        [mine if rank == transport.rank else receives[rank] for rank in range(transport.size)]
    )
