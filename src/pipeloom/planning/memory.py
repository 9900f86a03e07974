"""Bytes alive on a stage, job by job.

A stage's memory depends on the order of jobs alone, not on time, so one pass over its list (and over its peers', which
say when a message is known to have arrived) gives its exact peak under the costs given, whatever the clock does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..schedules.coded import Codes
from ..schedules.jobs import KINDS
from .costs import Costs
from .entries import POST, RECV, SEND, EntryCoding, Floats


@dataclass(frozen=True)
class Levels:
    """during[i], after[i]: bytes alive at the worst moment of a stage's i-th compute job, and when it has
    ended. buffered[i]: how many of those of `during` are buffers of posted receives. base: always alive."""

    base: float
    during: Floats
    after: Floats
    buffered: Floats

    @property
    def peak(self) -> float:
        return float(self.during.max(initial=self.base))

    @property
    def peak_buffered(self) -> float:
        """The most that posted receives take."""
        return float(self.buffered.max(initial=0.0))

    @property
    def peak_held(self) -> float:
        """The peak if receives took nothing: what stays, activations and workspace."""
        return float((self.during - self.buffered).max(initial=self.base))


def levels(lists: Sequence[Codes], coding: EntryCoding, stage: int, costs: Costs) -> Levels:
    """The bytes alive on a stage along its list, in which each message is posted once, before it is consumed. Its
    buffer counts from its post until the job that consumes it has ended, and what is sent until it has arrived; lists
    without transfers, and a coding without edges, have neither. lists: of all stages: they tell when messages arrive.
    """
    codes = lists[stage]
    base = costs.persistent[stage] if stage < len(costs.persistent) else 0.0
    added, freed, rise, consumed, handed = _tables(coding, costs)
    sizes = np.array([edge.nbytes for edge in coding.edges], dtype=np.float64)
    is_job = codes < coding.jobs_end
    kind_chunk = codes[is_job] // coding.micro_batches
    number = codes - coding.jobs_end
    is_post = ~is_job & (number // max(1, coding.messages) == POST) & (codes < coding.transfers_end)
    posted = np.zeros(len(codes))
    posted[is_post] = sizes[number[is_post] // coding.micro_batches]
    gone = np.cumsum(consumed[kind_chunk])
    before = np.cumsum(posted)[is_job] - gone + consumed[kind_chunk]  # buffers that are there during the job
    change = added[kind_chunk] - freed[kind_chunk]
    held = np.cumsum(change)
    between = np.cumsum(handed[kind_chunk])  # after the job
    if costs.sent:
        between += _under_way(lists, coding, stage, costs)[is_job]
    during = base + held - change + before + between - handed[kind_chunk] + rise[kind_chunk]
    return Levels(base, during, base + held + before - consumed[kind_chunk] + between, before)


def _under_way(lists: Sequence[Codes], coding: EntryCoding, stage: int, costs: Costs) -> Floats:
    """At each entry of a stage's list: bytes that only its messages under way keep alive. A message is known to have
    arrived when a later one comes that its receiver sent after it had received it (runtime.completions has the same
    rule)."""
    codes, count = lists[stage], coding.micro_batches
    size = np.array([costs.sent.get(edge[:3], 0.0) for edge in coding.edges])
    sender, receiver = (
        np.array([coding.placement[end] for end in ends], dtype=np.int64)
        for ends in ([e.source for e in coding.edges], [e.target for e in coding.edges])
    )

    def messages(of: Codes, action: int, ends: Codes, peer: int) -> tuple[Codes, Codes]:
        """Places in a list, and numbers, of the messages of one action whose other end is `peer`."""
        number = of - (coding.jobs_end + action * coding.messages)
        (at,) = np.nonzero((number >= 0) & (number < coding.messages))
        mine = ends[number[at] // count] == peer
        return at[mine], number[at[mine]]

    change = np.zeros(len(codes) + 1)
    for peer in sorted({*sender[receiver == stage].tolist(), *receiver[sender == stage].tolist()} - {stage}):
        at, number = messages(codes, SEND, receiver, peer)
        np.add.at(change, at, size[number // count])
        taken_at, taken = messages(lists[peer], RECV, sender, stage)
        answer_at, answers = messages(lists[peer], SEND, receiver, stage)
        known = np.zeros(coding.messages, dtype=np.int64)
        known[answers] = np.searchsorted(taken_at, answer_at)
        came_at, came = messages(codes, RECV, sender, peer)
        first = np.searchsorted(np.maximum.accumulate(known[came]), np.arange(len(taken)), side="right")
        np.subtract.at(change, np.append(came_at, len(codes))[first], size[taken // count])
    return np.cumsum(change)[:-1]


def _tables(coding: EntryCoding, costs: Costs) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """By kind · chunks + chunk: bytes that a job adds, frees when it has ended, needs meanwhile, frees of received
    messages, and adds to what is handed over within the stage."""
    until_b, until_w, from_b = (
        np.asarray(values) for values in (costs.held_forward, costs.held_weight, costs.held_backward)
    )
    nothing = np.zeros(len(coding.placement))
    # F, B, W, X, in the order of KINDS
    added = np.concatenate([until_b + until_w, from_b, nothing, nothing])
    freed = np.concatenate([nothing, until_b, until_w + from_b, until_b + until_w])
    received = {"F": nothing.copy(), "B": nothing.copy()}
    handed = {"F": nothing.copy(), "B": nothing.copy()}
    for edge in coding.edges:
        if coding.placement[edge.source] != coding.placement[edge.target]:
            received[edge.direction][edge.target] += edge.nbytes
        else:
            size = costs.sent.get(edge[:3], 0.0)
            handed[edge.direction][edge.source] += size
            handed[edge.direction][edge.target] -= size
    consumed, passed = (
        np.concatenate([table["F"], table["B"], nothing, table["B"]]) for table in (received, handed)
    )
    workspace = np.array([costs.workspace_of(kind, c) for kind in KINDS for c in range(len(nothing))])
    # A job frees what was kept for it, and what it was handed, as it goes: its workspace, where it is known, has that
    # in it.
    known = np.maximum(added - freed + passed, workspace)
    rise = np.where(workspace > 0, known, added + np.maximum(passed, 0.0))
    return added, freed, rise, consumed, passed
