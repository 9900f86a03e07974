"""Places posts, receives and sends among the compute jobs of a schedule.

Takes a schedule, the edges between chunks and the costs; gives, for every stage, the list that its rank
walks. One message a micro-batch travels along each edge between two stages. Messages from one stage to
another in one direction share a channel, and are sent, and their receives posted, in one order: that in which
the sender makes them.

- A send stands right after its producer, a recv right before its consumer.
- A post stands just in time: before the job that the receiver runs when the producer ends in the plan. Strictly: the
  last job that started before that; if the receiver has ended it and idles, the job after it.

So no send ever waits in the plan, and none can hang even where a send blocks until its receive is posted,
whatever jobs really cost: along program order and data, planned time never falls, and from a post to its send
it rises, so no circle of waits can close. A message that overtakes another's consumer lies in its posted
buffer until it is wanted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from ..schedules.jobs import Direction, Edge, Job, LoweredJob, Phase, Transfer
from ..schedules.schedule import BACKWARD, BACKWARD_B, FORWARD, Schedule
from ..schedules.timing import Times, times
from .costs import Costs

#: (sender, receiver, direction)
Channel = tuple[int, int, Direction]


@dataclass(frozen=True)
class Lowered:
    """The lists that ranks walk. placement, micro_batches, edges: what they were made for.

    start[stage][i], end[stage][i]: the planned times of the stage's i-th compute job, which prove the lists
    safe; empty for lists that a user wrote. forward_only: an evaluation's lists, without backwards and
    phases.
    """

    name: str
    placement: tuple[int, ...]
    micro_batches: int
    edges: tuple[Edge, ...]
    jobs: tuple[tuple[LoweredJob, ...], ...]
    start: tuple[tuple[float, ...], ...] = ()
    end: tuple[tuple[float, ...], ...] = ()
    forward_only: bool = False

    @property
    def stages(self) -> int:
        return len(self.jobs)

    def compute(self) -> list[list[Job]]:
        """Each stage's compute jobs, in order."""
        return [[job for job in jobs if isinstance(job, Job)] for jobs in self.jobs]

    def schedule(self) -> Schedule:
        """The schedule within. Raises ValueError if a job lies outside the model."""
        return Schedule.from_jobs(self.name, self.placement, self.micro_batches, self.compute())


class _Message(NamedTuple):
    produced: int  # index of the producer among the sender's compute jobs
    consumed: int  # index of the consumer among the receiver's
    edge: Edge
    micro_batch: int


def lower(schedule: Schedule, edges: Iterable[Edge], costs: Costs) -> Lowered:
    """The lists for a schedule. Raises timing.Stuck if the schedule itself has a cycle, ValueError for an
    edge that doesn't fit the model."""
    forward_only = schedule.forward_only
    used = check_edges(edges, schedule.total_chunks)
    if forward_only:
        used = [edge for edge in used if edge.direction == "F"]
    when = times(schedule, costs.duration, used, lambda edge: costs.delay(edge, schedule.placement))
    channels = _channels(schedule, used)
    lists = [_assemble(schedule, stage, channels, when, forward_only) for stage in range(schedule.stages)]
    return Lowered(
        schedule.name,
        schedule.placement,
        schedule.micro_batches,
        tuple(used),
        tuple(tuple(jobs) for jobs in lists),
        tuple(tuple(s) for s in when.start),
        tuple(tuple(e) for e in when.end),
        forward_only,
    )


def check_edges(edges: Iterable[Edge], chunks: int) -> list[Edge]:
    """The edges in a canonical order. Raises ValueError for one that leaves the model, runs the wrong way or
    comes twice."""
    ordered = sorted(Edge(*edge) for edge in edges)
    for edge in ordered:
        low, high = (edge.source, edge.target) if edge.direction == "F" else (edge.target, edge.source)
        if edge.direction not in ("F", "B") or not 0 <= low < high < chunks or edge.nbytes < 0:
            raise ValueError(
                f"{edge} doesn't fit a model of {chunks} chunks: an F edge runs to a later chunk, a B edge "
                "to an earlier one, and bytes are not negative"
            )
    for one, other in pairwise(ordered):
        if one[:3] == other[:3]:
            raise ValueError(f"{one} and {other} are the same edge: give it once, with the bytes of both")
    return ordered


def _channels(schedule: Schedule, edges: Sequence[Edge]) -> dict[Channel, list[_Message]]:
    """The messages of each channel in the order of their producers."""
    place = _places(schedule)
    placement, micro_batches = schedule.placement, schedule.micro_batches
    channels: defaultdict[Channel, list[_Message]] = defaultdict(list)
    for edge in edges:
        sender, receiver = placement[edge.source], placement[edge.target]
        if sender != receiver:
            where = place[edge.direction]
            channel = channels[sender, receiver, edge.direction]
            for micro_batch in range(micro_batches):
                produced = where[edge.source * micro_batches + micro_batch]
                consumed = where[edge.target * micro_batches + micro_batch]
                channel.append(_Message(produced, consumed, edge, micro_batch))
    for messages in channels.values():
        messages.sort()
    return dict(sorted(channels.items()))


def _places(schedule: Schedule) -> dict[str, list[int]]:
    """Index of each F ("F") and of each B or X ("B") in its stage's list, by chunk · M + micro-batch."""
    size = schedule.total_chunks * schedule.micro_batches
    places = {"F": [-1] * size, "B": [-1] * size}
    for codes in schedule.codes:
        for index, code in enumerate(codes.tolist()):
            kind, number = divmod(code, size)
            if kind == FORWARD:
                places["F"][number] = index
            elif kind in (BACKWARD_B, BACKWARD):
                places["B"][number] = index
    return places


def _posts(messages: Sequence[_Message], channel: Channel, when: Times) -> list[int]:
    """Index of the receiver's compute job before which each message's receive is posted. Consumers start no earlier
    than their producer ends, so a post is never behind its consumer, nor behind a later post of its channel."""
    sender, receiver, _ = channel
    starts, ends = when.start[receiver], when.end[receiver]
    places = []
    for message in messages:
        made = when.end[sender][message.produced]
        at = max(0, bisect_left(starts, made) - 1)  # the last job that started before
        if ends[at] < made:  # the receiver idles: before the next job
            at += 1
        places.append(at)
    return places


def _assemble(
    schedule: Schedule,
    stage: int,
    channels: dict[Channel, list[_Message]],
    when: Times,
    forward_only: bool,
) -> list[LoweredJob]:
    posts: defaultdict[int, list[LoweredJob]] = defaultdict(list)
    recvs: defaultdict[int, list[LoweredJob]] = defaultdict(list)
    sends: defaultdict[int, list[LoweredJob]] = defaultdict(list)
    for channel, messages in channels.items():
        sender, receiver, _ = channel
        if receiver == stage:
            for message, at in zip(messages, _posts(messages, channel, when), strict=True):
                posts[at].append(_transfer("post", message, sender))
                recvs[message.consumed].append(_transfer("recv", message, sender))
        elif sender == stage:
            for message in messages:
                sends[message.produced].append(_transfer("send", message, receiver))
    out: list[LoweredJob] = []
    for index, job in enumerate(schedule.jobs[stage]):
        out += posts.get(index, ())
        out += recvs.get(index, ())
        out.append(job)
        out += sends.get(index, ())
    if not forward_only:
        out += [Phase("finalize"), Phase("update")]
    return out


def _transfer(action: Literal["post", "recv", "send"], message: _Message, peer: int) -> Transfer:
    edge = message.edge
    return Transfer(action, edge.direction, edge.source, edge.target, message.micro_batch, peer)
