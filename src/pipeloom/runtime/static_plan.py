"""What the executor does without thinking: one stage's jobs as `compile_jobs` makes them.

A job is an argument template with the positions to fill from slots, the slots whose last reader it is (dropped before
the call, so that memory is freed early), and the places its outputs go to. One slot list (a *scope*) a (chunk,
micro-batch).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ..schedules.jobs import Job, Phase, Transfer
from .completions import MessageId
from .layout import Wire
from .transport import Channel


@dataclass(slots=True)
class Run:
    """A compute job. call None: nothing to compute, but values may be handed over."""

    job: Job
    scope: int
    call: Callable[[list[Any]], tuple[Any, ...]] | None
    template: list[Any] = field(default_factory=list)
    #: (position among the arguments, slot)
    fill: list[tuple[int, int]] = field(default_factory=list)
    #: slots that nobody reads after this call
    drops: list[int] = field(default_factory=list)
    #: (output position, scope, slot): values kept, here or in a chunk on the same rank
    stores: list[tuple[int, int, int]] = field(default_factory=list)
    #: (slot here, scope, slot there): older values handed to a chunk on the same rank
    moves: list[tuple[int, int, int]] = field(default_factory=list)
    late_drops: list[int] = field(default_factory=list)
    #: (slot, buffer name): the version that this micro-batch's jobs read; F only
    buffer_reads: list[tuple[int, str]] = field(default_factory=list)
    #: (output position, buffer name): new versions; F only
    buffer_writes: list[tuple[int, str]] = field(default_factory=list)
    #: (output position, what, index): what the step's result needs
    collects: list[tuple[int, Literal["loss", "weight", "output"], int]] = field(default_factory=list)


@dataclass(slots=True)
class Message:
    """One side of a message: the values in order, with their wires and slots (slot −1: nobody here reads it)."""

    transfer: Transfer
    scope: int
    channel: Channel
    tag: int
    wires: list[Wire]
    slots: list[int]
    drops: list[int] = field(default_factory=list)
    #: own sends that are done once this message has arrived; recv only
    completes: list[MessageId] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(wire.nbytes for wire in self.wires)


@dataclass(slots=True)
class Share:
    """Give the losses and/or weights, now complete on this rank, to all other ranks."""

    losses: bool
    weights: bool


@dataclass(slots=True)
class Reduce:
    """Begin to sum a chunk's gradients over the replicas: its last W is done, here and now or before."""

    chunk: int


Item = Run | Message | Share | Reduce | Phase


@dataclass
class StaticPlan:
    """items: what to do, in order. scopes: number of slots of each scope.
    leaves, tangents, keys: (scope, slot, micro-batch[, leaf]): inputs that are there when the step begins.
    live_bytes[i]: bytes of values alive after item i; top_bytes[i]: at the worst moment of item i, working memory
    included; peak_bytes: at the worst of all."""

    stage: int
    micro_batches: int
    items: list[Item]
    scopes: list[int]
    leaves: list[tuple[int, int, int, int]]
    tangents: list[tuple[int, int, int]]
    keys: list[tuple[int, int, int]]
    live_bytes: list[int]
    top_bytes: list[int]
    peak_bytes: int
    loss_stage: int
    weight_stage: int | None
    written_buffers: list[str]
