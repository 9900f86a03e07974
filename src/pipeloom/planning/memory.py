"""Bytes alive on a stage, job by job.

A stage's memory depends on the order of its own jobs alone, not on time, so one pass over its list gives its
exact peak under the costs given, whatever the clock does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..schedules.coded import Codes
from ..schedules.jobs import KINDS
from .costs import Costs
from .entries import POST, EntryCoding, Floats


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


def levels(codes: Codes, coding: EntryCoding, stage: int, costs: Costs) -> Levels:
    """The bytes alive on a stage along its list, in which each message is posted once, before it is consumed. Its
    buffer counts from its post until the job that consumes it has ended; a list without transfers, and a coding
    without edges, has none."""
    base = costs.persistent[stage] if stage < len(costs.persistent) else 0.0
    added, freed, workspace, consumed = _tables(coding, costs)
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
    during = base + held - change + np.maximum(added, workspace)[kind_chunk] + before
    return Levels(base, during, base + held + before - consumed[kind_chunk], before)


def _tables(coding: EntryCoding, costs: Costs) -> tuple[Floats, Floats, Floats, Floats]:
    """By kind · chunks + chunk: bytes that a job adds, frees when it has ended, needs meanwhile, and frees of
    received messages."""
    until_b, until_w, from_b = (
        np.asarray(values) for values in (costs.held_forward, costs.held_weight, costs.held_backward)
    )
    nothing = np.zeros(len(coding.placement))
    # F, B, W, X, in the order of KINDS
    added = np.concatenate([until_b + until_w, from_b, nothing, nothing])
    freed = np.concatenate([nothing, until_b, until_w + from_b, until_b + until_w])
    workspace = np.array([costs.workspace_of(kind, c) for kind in KINDS for c in range(len(nothing))])
    forward, backward = nothing.copy(), nothing.copy()
    for edge in coding.edges:
        if coding.placement[edge.source] != coding.placement[edge.target]:
            (forward if edge.direction == "F" else backward)[edge.target] += edge.nbytes
    return added, freed, workspace, np.concatenate([forward, backward, nothing, backward])
