"""Walks lowered lists as ranks would, in planned time.

A post takes no time. A send waits until its receive is posted (a rendezvous, the strictest form of sending;
or not at all, if `rendezvous` is off), then the message travels, after those before it on its link if links are
exclusive. A recv waits until the message is there.
Ranks only ever block, they never choose, so what hangs here hangs under all costs, and what doesn't hangs
under none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..schedules.jobs import Job, LoweredJob, Transfer
from ..schedules.timeline import Flow, Span
from .costs import Costs
from .lower import Lowered

_Message = tuple[str, int, int, int]


class Hang(Exception):
    """The lists can't be walked to the end. waits[stage] = (index in its list, stage that it waits for)."""

    def __init__(self, waits: dict[int, tuple[int, int]]) -> None:
        self.waits = waits
        super().__init__(f"stages {sorted(waits)} wait for each other")


@dataclass
class Replay:
    """start[stage][i], end[stage][i] of the stage's i-th compute job; waits for receives and sends;
    messages."""

    start: list[list[float]]
    end: list[list[float]]
    clock: list[float]
    waits: list[Span] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)


def replay(lowered: Lowered, costs: Costs, *, rendezvous: bool = True) -> Replay:
    """The lists' times. Each send needs its one post and recv in the lists. Raises Hang."""
    return _Walk(lowered, costs, rendezvous).run()


class _Walk:
    def __init__(self, lowered: Lowered, costs: Costs, rendezvous: bool) -> None:
        stages = lowered.stages
        self.jobs: Sequence[Sequence[LoweredJob]] = lowered.jobs
        self.costs = costs
        self.rendezvous = rendezvous
        self.size = {(e.direction, e.source, e.target): e.nbytes for e in lowered.edges}
        self.delay = {
            (e.direction, e.source, e.target): costs.delay(e, lowered.placement) for e in lowered.edges
        }
        self.occupancy = {
            (e.direction, e.source, e.target): costs.occupancy(e, lowered.placement) for e in lowered.edges
        }
        self.busy: dict[
            tuple[int, int], float
        ] = {}  # link -> until when; a link's sends are its sender's, in order
        self.at = [0] * stages
        self.posted: dict[_Message, float] = {}
        self.arrived: dict[_Message, float] = {}
        self.blocked: dict[_Message, int] = {}  # message -> the stage that waits for its post or its arrival
        self.runnable = list(range(stages - 1, -1, -1))
        self.out = Replay([[] for _ in range(stages)], [[] for _ in range(stages)], [0.0] * stages)

    def run(self) -> Replay:
        while self.runnable:
            self._advance(self.runnable.pop())
        waits = {}
        for stage, at in enumerate(self.at):
            if at < len(self.jobs[stage]):
                job = self.jobs[stage][at]
                assert isinstance(job, Transfer)  # nothing else blocks
                waits[stage] = (at, job.peer)
        if waits:
            raise Hang(waits)
        return self.out

    def _advance(self, stage: int) -> None:
        """Walks a stage's list until it blocks or ends."""
        jobs, out, duration = self.jobs[stage], self.out, self.costs.duration
        while self.at[stage] < len(jobs):
            job = jobs[self.at[stage]]
            if isinstance(job, Job):
                start = out.clock[stage]
                out.start[stage].append(start)
                out.clock[stage] = start + duration(job.kind, job.chunk)
                out.end[stage].append(out.clock[stage])
            elif isinstance(job, Transfer) and not self._transfer(stage, job):
                return
            self.at[stage] += 1

    def _transfer(self, stage: int, job: Transfer) -> bool:
        """False: the stage blocks."""
        message = job.message
        now = self.out.clock[stage]
        if job.action == "post":
            self.posted[message] = now
            self._wake(message)
        elif job.action == "send":
            sent = now
            if self.rendezvous:
                if message not in self.posted:
                    self.blocked[message] = stage
                    return False
                sent = max(now, self.posted[message])
                self._wait(stage, job, sent)
            edge = message[:3]
            if self.costs.exclusive_links:
                link = (stage, job.peer)
                sent = max(sent, self.busy.get(link, 0.0))
                self.busy[link] = sent + self.occupancy[edge]
            there = self.arrived[message] = sent + self.delay[edge]
            self.out.flows.append(Flow(*message, stage, job.peer, sent, there, self.size[edge]))
            self._wake(message)
        else:
            if message not in self.arrived:
                self.blocked[message] = stage
                return False
            self._wait(stage, job, max(now, self.arrived[message]))
        return True

    def _wait(self, stage: int, job: Transfer, until: float) -> None:
        now = self.out.clock[stage]
        if until > now:
            chunk = job.source if job.action == "send" else job.target
            self.out.waits.append(Span(stage, "wait", chunk, job.micro_batch, now, until))
            self.out.clock[stage] = until

    def _wake(self, message: _Message) -> None:
        stage = self.blocked.pop(message, None)
        if stage is not None:
            self.runnable.append(stage)
