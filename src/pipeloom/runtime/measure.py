"""When each thing of a step happened: always on, two clock readings an item.

A Recorder belongs to one executor and is overwritten by each step. `measured_timeline` turns the recorders of
all ranks into one schedules.timeline.Timeline (asked for between steps: it exchanges messages). Ranks have
clocks of their own: `clock_offsets` measures, once, by how much each differs from rank 0's, by a few pings
and the shortest one.
"""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor

from ..schedules.jobs import Phase
from ..schedules.timeline import Flow, Span, Timeline
from . import tags
from .static_plan import Message, Reduce, Run, StaticPlan
from .stepping import Work, arrive, exchange
from .transport import Transport

_PINGS = 8
_KINDS = ("F", "B", "W", "X", "finalize", "update", "wait", "post", "recv", "send", "reduce")
_FIELDS = 10


class Recorder:
    """start[i], end[i]: perf_counter when item i of the plan began and ended. live[i]: bytes of values alive after
    it."""

    def __init__(self, plan: StaticPlan):
        self.plan = plan
        self.start = [0.0] * len(plan.items)
        self.end = [0.0] * len(plan.items)
        self.live = list(plan.live_bytes)
        self.began = 0.0

    def begin(self) -> None:
        self.began = perf_counter()
        self.start[:] = [0.0] * len(self.start)
        self.end[:] = [0.0] * len(self.end)

    def table(self, offset: float, resident: int = 0) -> Tensor:
        """One row an item that ran: kind, chunk or source, target, micro-batch, peer, start, end, nbytes,
        direction, live bytes (those that are always alive, `resident`, among them); float64, shape (n, 10).
        Times are rank 0's perf_counter. The first row holds the start of the step."""
        rows = [[-1.0] * 5 + [self.began + offset] * 2 + [0.0] * 2 + [float(resident)]]
        for item, start, end, live in zip(self.plan.items, self.start, self.end, self.live, strict=True):
            if not end:
                continue
            times = [start + offset, end + offset]
            live += resident
            if isinstance(item, Run):
                job = item.job
                rows.append([_KINDS.index(job.kind), job.chunk, -1, job.micro_batch, -1, *times, 0, 0, live])
            elif isinstance(item, Reduce):
                rows.append([_KINDS.index("reduce"), item.chunk, -1, -1, -1, *times, 0, 0, live])
            elif isinstance(item, Phase):
                rows.append([_KINDS.index(item.name), -1, -1, -1, -1, *times, 0, 0, live])
            elif isinstance(item, Message):
                t = item.transfer
                way = float(t.direction == "B")
                rows.append(
                    [
                        _KINDS.index(t.action),
                        t.source,
                        t.target,
                        t.micro_batch,
                        t.peer,
                        *times,
                        item.nbytes,
                        way,
                        live,
                    ]
                )
        return torch.tensor(rows, dtype=torch.float64)


def clock_offsets(transport: Transport) -> Work[float]:
    """Seconds to add to this rank's perf_counter to get rank 0's. A collective call of all ranks.

    Rank 0's answer was read between our two readings, which bounds the difference from both sides. Where the bounds
    of all pings allow 0, it is 0: ranks of one machine share a clock.
    """
    if transport.shares_clock or transport.size == 1:
        return 0.0
    token = torch.zeros(1, dtype=torch.float64)
    if transport.rank == 0:
        for peer in range(1, transport.size):
            for _ in range(_PINGS):
                yield from arrive(transport.post(peer, "control", tags.CLOCK, (1,), torch.float64))
                transport.send(peer, "control", tags.CLOCK, _reading())
                transport.flush()
        return 0.0
    least, most = float("-inf"), float("inf")
    for _ in range(_PINGS):
        answer = transport.post(0, "control", tags.CLOCK, (1,), torch.float64)
        before = perf_counter()
        transport.send(0, "control", tags.CLOCK, token)
        theirs = float((yield from arrive(answer)))
        after = perf_counter()
        transport.flush()
        least, most = max(least, theirs - after), min(most, theirs - before)
    return 0.0 if least <= 0.0 <= most else (least + most) / 2


def _reading() -> Tensor:
    return torch.tensor([perf_counter()], dtype=torch.float64)


def measured_timeline(
    transport: Transport, recorder: Recorder, offset: float, title: str, resident: int = 0
) -> Work[Timeline]:
    """The last step on all ranks, the same Timeline on every rank. resident: bytes that are always alive here.
    A collective call of all ranks."""
    table = recorder.table(offset, resident)
    rows = yield from exchange(
        transport, tags.LENGTHS, torch.tensor([len(table)], dtype=torch.float64), [(1,)] * transport.size
    )
    tables = yield from exchange(transport, tags.RECORDS, table, [(int(n), _FIELDS) for n in rows])
    return assemble(tables, title)


def assemble(tables: list[Tensor], title: str) -> Timeline:
    """A Timeline from each rank's table; time 0 is the first rank's start."""
    zero = min(float(table[0, 5]) for table in tables)
    spans: list[Span] = []
    sent: dict[tuple[int, int, int, int], tuple[int, float, int]] = {}
    arrived: dict[tuple[int, int, int, int], tuple[int, float]] = {}
    memory: list[list[tuple[float, float]]] = []
    for rank, table in enumerate(tables):
        points = [(0.0, float(table[0, 9]))]
        for row in table[1:].tolist():
            kind, source, target, micro_batch, _, start, end, nbytes, way, live = row
            start, end = start - zero, end - zero
            name = _KINDS[int(kind)]
            points.append((end, live))
            message = (int(way), int(source), int(target), int(micro_batch))
            if name == "send":
                sent[message] = (rank, start, int(nbytes))
            elif name == "recv":
                arrived[message] = (rank, end)
                spans.append(Span(rank, "wait", int(target), int(micro_batch), start, end))
            elif name != "post":
                spans.append(Span(rank, name, int(source), int(micro_batch), start, end))
        memory.append(points)
    flows = [
        Flow("FB"[way], source, target, micro_batch, sender, arrived[m][0], start, arrived[m][1], nbytes)
        for m, (sender, start, nbytes) in sent.items()
        if m in arrived
        for way, source, target, micro_batch in [m]
    ]
    return Timeline(title, len(tables), spans, flows, memory)
