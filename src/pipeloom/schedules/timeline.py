"""What happened when: one schema for predicted and measured steps.

The simulator writes a Timeline, the executor writes a Timeline, and the report reads either, so that the two
can be laid side by side. Times are seconds since the start of the step (or the units of the costs given, when
`unit` says so); bytes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Span(NamedTuple):
    """A job on a rank. kind: F, B, W, X, "finalize", "update", "wait" (blocked on a receive or a send), or "reduce" (a
    chunk's gradients are summed over replicas, beside other jobs). chunk and micro_batch are −1 where the span has
    none."""

    rank: int
    kind: str
    chunk: int
    micro_batch: int
    start: float
    end: float

    @property
    def name(self) -> str:
        if self.micro_batch >= 0:
            return f"{self.kind}{self.chunk}.{self.micro_batch}"
        return f"{self.kind} {self.chunk}" if self.chunk >= 0 else self.kind


class Flow(NamedTuple):
    """A message between ranks: `sent` is when the send began, `arrived` when the receiver could use it."""

    direction: str
    source: int
    target: int
    micro_batch: int
    sender: int
    receiver: int
    sent: float
    arrived: float
    nbytes: int


#: kinds of span that are work; "wait" is not
WORK = frozenset({"F", "B", "W", "X"})


@dataclass
class Timeline:
    """One step on all ranks. `memory[rank]` is a list of (time, live bytes) points, each valid until the next."""

    title: str
    ranks: int
    spans: list[Span]
    flows: list[Flow] = field(default_factory=list)
    memory: list[list[tuple[float, float]]] = field(default_factory=list)
    unit: str = "s"

    def figures(self, peak_bytes: tuple[int, ...] = ()) -> StepFigures:
        """The step's figures: both bubbles as in docs: global 1 − work / (S·makespan), span 1 − work / (S·longest
        span of one rank), where work counts F, B, W and X and the makespan is that of those jobs."""
        work = [0.0] * self.ranks
        first = [float("inf")] * self.ranks
        last = [0.0] * self.ranks
        end = 0.0
        for span in self.spans:
            end = max(end, span.end)
            if span.kind in WORK:
                work[span.rank] += span.end - span.start
                first[span.rank] = min(first[span.rank], span.start)
                last[span.rank] = max(last[span.rank], span.end)
        return step_figures(work, first, last, end, peak_bytes)

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "unit": self.unit,
            "ranks": self.ranks,
            "spans": [list(s) for s in self.spans],
            "flows": [list(f) for f in self.flows],
            "memory": [[list(p) for p in m] for m in self.memory],
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Timeline:
        return Timeline(
            title=str(data["title"]),
            unit=str(data["unit"]),
            ranks=int(data["ranks"]),
            spans=[Span(*s) for s in data["spans"]],
            flows=[Flow(*f) for f in data["flows"]],
            memory=[[(float(t), float(b)) for t, b in m] for m in data["memory"]],
        )


@dataclass(frozen=True)
class StepFigures:
    """What a step costs: seconds (or the timeline's unit), bubbles and busy shares in 0 … 1, peak bytes a rank."""

    step_time: float
    bubble_global: float
    bubble_span: float
    busy: tuple[float, ...]
    peak_bytes: tuple[int, ...]


def step_figures(
    work: Sequence[float],
    first: Sequence[float],
    last: Sequence[float],
    end: float,
    peak_bytes: tuple[int, ...] = (),
) -> StepFigures:
    """The figures of a step. work[rank]: time in F, B, W and X; first[rank], last[rank]: when these begin and end
    (infinity and 0 where there are none); end: of the step."""
    total = sum(work)
    if total <= 0:
        return StepFigures(end, 0.0, 0.0, tuple(work), peak_bytes)
    begin, makespan = min(first), max(last)
    longest = max(b - a for a, b in zip(first, last, strict=True) if b > 0)
    return StepFigures(
        step_time=end,
        bubble_global=1 - total / (len(work) * (makespan - begin)),
        bubble_span=1 - total / (len(work) * longest),
        busy=tuple(w / (makespan - begin) for w in work),
        peak_bytes=peak_bytes,
    )
