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
buffer until it is wanted. The planned times stay with the lists as their certificate (see proof.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from ..schedules.coded import Codes
from ..schedules.jobs import Direction, Edge, Job, LoweredJob
from ..schedules.schedule import BACKWARD, BACKWARD_B, FORWARD, Schedule
from ..schedules.timing import Stuck, Times, times
from .costs import Costs
from .entries import POST, RECV, SEND, Certificate, CodedLists, EntryCoding, Floats

#: (sender, receiver, direction)
Channel = tuple[int, int, Direction]


@dataclass(frozen=True)
class Lowered:
    """The lists that ranks walk. placement, micro_batches, edges: what they were made for. jobs[stage]: posts,
    receives, sends and compute jobs in order, as CodedLists if `lower` made them. forward_only: an evaluation's
    lists, without backwards and phases.
    """

    name: str
    placement: tuple[int, ...]
    micro_batches: int
    edges: tuple[Edge, ...]
    jobs: Sequence[Sequence[LoweredJob]]
    forward_only: bool = False

    @property
    def stages(self) -> int:
        return len(self.jobs)

    @property
    def coding(self) -> EntryCoding:
        return EntryCoding(self.placement, self.micro_batches, self.edges)

    @property
    def certificate(self) -> Certificate | None:
        """The planned times that prove the lists safe; None for lists that a user wrote."""
        return self.jobs.certificate if isinstance(self.jobs, CodedLists) else None

    @cached_property
    def codes(self) -> tuple[Codes, ...]:
        """The lists as integers (see entries.py). Raises ValueError for an entry that doesn't fit."""
        if isinstance(self.jobs, CodedLists) and self.jobs.coding == self.coding:
            return self.jobs.codes
        encode = self.coding.encode
        return tuple(np.array([encode(entry) for entry in jobs], dtype=np.int64) for jobs in self.jobs)

    def compute(self) -> list[list[Job]]:
        """Each stage's compute jobs, in order."""
        return [[job for job in jobs if isinstance(job, Job)] for jobs in self.jobs]

    def schedule(self) -> Schedule:
        """The schedule within. Raises ValueError for an entry that doesn't fit."""
        end = self.coding.jobs_end
        return Schedule(self.name, self.placement, self.micro_batches, [c[c < end] for c in self.codes])


@dataclass(frozen=True)
class _Messages:
    """A channel's messages in the order in which they are sent. produced, consumed: places of their producers and
    consumers among their stages' compute jobs; number: edge · M + micro-batch."""

    produced: Codes
    consumed: Codes
    number: Codes


def lower(schedule: Schedule, edges: Iterable[Edge], costs: Costs) -> Lowered:
    """The lists for a schedule. Raises timing.Stuck if the schedule itself has a cycle, ValueError for an
    edge that doesn't fit the model, or a job that is missing."""
    forward_only = schedule.forward_only
    used = check_edges(edges, schedule.total_chunks)
    if forward_only:
        used = [edge for edge in used if edge.direction == "F"]
    when = times(schedule, costs.duration, used, lambda edge: costs.delay(edge, schedule.placement))
    certificate = _certificate(when, costs)
    coding = EntryCoding(schedule.placement, schedule.micro_batches, tuple(used))
    channels = _channels(schedule, used)
    lists = [_assemble(schedule, stage, channels, certificate, coding) for stage in range(schedule.stages)]
    if not forward_only:
        phases = [coding.transfers_end, coding.transfers_end + 1]
        lists = [np.append(codes, phases) for codes in lists]
    return Lowered(
        schedule.name,
        schedule.placement,
        schedule.micro_batches,
        tuple(used),
        CodedLists(lists, coding, certificate),
        forward_only,
    )


def recognised(lowered: Lowered, costs: Costs) -> Lowered:
    """The lists with their certificate, if they are those that `lower` makes under these costs; others as they are."""
    try:
        again = lower(lowered.schedule(), lowered.edges, costs)
        same = again.edges == lowered.edges and again.jobs == CodedLists(lowered.codes, lowered.coding)
    except (ValueError, Stuck):
        return lowered
    return replace(lowered, jobs=again.jobs) if same else lowered


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


def _certificate(when: Times, costs: Costs) -> Certificate:
    start, end = (tuple(np.asarray(t, dtype=np.float64) for t in side) for side in (when.start, when.end))
    return Certificate(start, end, when.turns(), costs)


def _channels(schedule: Schedule, edges: Sequence[Edge]) -> dict[Channel, _Messages]:
    """The messages of each channel in the order of their producers; of one producer's, that which is consumed
    first goes first."""
    place = _places(schedule)
    placement, micro_batches = schedule.placement, schedule.micro_batches
    members: defaultdict[Channel, list[tuple[Codes, Codes, Codes]]] = defaultdict(list)
    for number, edge in enumerate(edges):
        sender, receiver = placement[edge.source], placement[edge.target]
        if sender != receiver:
            where = place[edge.direction].reshape(-1, micro_batches)
            for chunk in (edge.source, edge.target):
                if where[chunk].min() < 0:
                    kind = "F" if edge.direction == "F" else "B or X"
                    raise ValueError(
                        f"the schedule has no {kind} of chunk {chunk} for micro-batch {where[chunk].argmin()}, "
                        f"on stage {placement[chunk]}: each chunk runs every micro-batch once"
                    )
            numbers = np.arange(number * micro_batches, (number + 1) * micro_batches)
            members[sender, receiver, edge.direction].append(
                (where[edge.source], where[edge.target], numbers)
            )
    channels = {}
    for channel in sorted(members):
        produced, consumed, numbers = map(np.concatenate, zip(*members[channel], strict=True))
        order = np.lexsort((numbers, consumed, produced))
        channels[channel] = _Messages(produced[order], consumed[order], numbers[order])
    return channels


def _places(schedule: Schedule) -> dict[Direction, Codes]:
    """Index of each F ("F") and of each B or X ("B") in its stage's list, by chunk · M + micro-batch."""
    size = schedule.total_chunks * schedule.micro_batches
    places: dict[Direction, Codes] = {"F": np.full(size, -1), "B": np.full(size, -1)}
    for codes in schedule.codes:
        kind, number = np.divmod(codes, size)
        for direction, members in (
            ("F", kind == FORWARD),
            ("B", (kind == BACKWARD_B) | (kind == BACKWARD)),
        ):
            (at,) = np.nonzero(members)
            places[direction][number[at]] = at  # type: ignore[index]
    return places


def _posts(made: Floats, starts: Floats, ends: Floats) -> Codes:
    """Index of the receiver's compute job before which each message's receive is posted. made: when messages are
    made, ascending. Consumers start no earlier than their producer ends, so a post is never behind its consumer,
    nor behind a later post of its channel."""
    at = np.maximum(np.searchsorted(starts, made, side="left") - 1, 0)  # the last job that started before
    return at + (ends[at] < made)  # the receiver idles: before the next job


def _assemble(
    schedule: Schedule,
    stage: int,
    channels: dict[Channel, _Messages],
    times_of: Certificate,
    coding: EntryCoding,
) -> Codes:
    """A stage's list: around each compute job its posts, its recvs, the job, its sends."""
    jobs = schedule.codes[stage]
    codes = [jobs]
    places = [4 * np.arange(len(jobs)) + 2]
    base = coding.jobs_end
    for (sender, receiver, _), messages in channels.items():
        if receiver == stage:
            made = times_of.end[sender][messages.produced]
            codes += [base + POST * coding.messages + messages.number]
            places += [4 * _posts(made, times_of.start[stage], times_of.end[stage])]
            codes += [base + RECV * coding.messages + messages.number]
            places += [4 * messages.consumed + 1]
        elif sender == stage:
            codes += [base + SEND * coding.messages + messages.number]
            places += [4 * messages.produced + 3]
    order = np.argsort(np.concatenate(places), kind="stable")
    return np.concatenate(codes)[order]
