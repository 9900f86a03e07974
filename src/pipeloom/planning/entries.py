"""Lowered lists as integers, and the times that prove them safe.

A plan of a thousand ranks has millions of entries; as int64 codes they are small, and numpy checks them in seconds.
What is looked at is decoded to jobs, transfers and phases.

    code < 4·C·M            (kind · C + chunk) · M + micro-batch, as in schedules.schedule.Coding
    then 3·E·M transfers    (action · E + edge) · M + micro-batch, where edges are counted as given
    then 2 phases           finalize, update

with C chunks, M micro-batches, E edges. Which stage a transfer belongs to, and its peer, follow from its edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, overload

import numpy as np
import numpy.typing as npt

from ..schedules.coded import CodedList, Codes
from ..schedules.jobs import KINDS, Edge, Job, LoweredJob, Phase, Transfer
from ..schedules.schedule import KIND_NUMBER
from .costs import Costs

Action = Literal["post", "recv", "send"]
ACTIONS: Final[tuple[Action, ...]] = ("post", "recv", "send")
POST, RECV, SEND = range(3)
PHASES: Final = (Phase("finalize"), Phase("update"))

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class EntryCoding:
    """What the codes of a plan's entries mean."""

    placement: tuple[int, ...]
    micro_batches: int
    edges: tuple[Edge, ...]

    @cached_property
    def size(self) -> int:
        """Jobs of one kind."""
        return len(self.placement) * self.micro_batches

    @cached_property
    def jobs_end(self) -> int:
        """Codes of compute jobs are below this."""
        return len(KINDS) * self.size

    @cached_property
    def messages(self) -> int:
        """Messages if every edge joined two stages: transfers of one action."""
        return len(self.edges) * self.micro_batches

    @cached_property
    def transfers_end(self) -> int:
        return self.jobs_end + len(ACTIONS) * self.messages

    @cached_property
    def _edge_number(self) -> dict[tuple[str, int, int], int]:
        return {(e.direction, e.source, e.target): number for number, e in enumerate(self.edges)}

    def owner(self, action: int, edge: Edge) -> int:
        """The stage that posts, receives or sends an edge's messages."""
        return self.placement[edge.source if action == SEND else edge.target]

    def sends(self, codes: Codes) -> int:
        """How many of a list's entries are sends."""
        first = self.jobs_end + SEND * self.messages
        return int(((codes >= first) & (codes < self.transfers_end)).sum())

    def decode(self, code: int) -> LoweredJob:
        rest, micro_batch = divmod(code, self.micro_batches)
        if code < self.jobs_end:
            kind, chunk = divmod(rest, len(self.placement))
            return Job(KINDS[kind], chunk, micro_batch)
        if code >= self.transfers_end:
            return PHASES[code - self.transfers_end]
        action, number = divmod((code - self.jobs_end) // self.micro_batches, len(self.edges))
        edge = self.edges[number]
        peer = self.placement[edge.target if action == SEND else edge.source]
        return Transfer(ACTIONS[action], edge.direction, edge.source, edge.target, micro_batch, peer)

    def encode(self, entry: LoweredJob) -> int:
        """Raises ValueError for an entry that doesn't fit the model, its edges or their stages."""
        code = -1
        if isinstance(entry, Job) and entry.kind in KIND_NUMBER and 0 <= entry.chunk < len(self.placement):
            code = KIND_NUMBER[entry.kind] * len(self.placement) + entry.chunk
        elif isinstance(entry, Transfer) and entry.action in ACTIONS:
            number = self._edge_number.get((entry.direction, entry.source, entry.target), -1)
            if number >= 0:
                code = (
                    len(KINDS) * len(self.placement) + ACTIONS.index(entry.action) * len(self.edges) + number
                )
        elif entry in PHASES:
            return self.transfers_end + PHASES.index(entry)
        if code >= 0 and isinstance(entry, Job | Transfer) and 0 <= entry.micro_batch < self.micro_batches:
            code = code * self.micro_batches + entry.micro_batch
            if self.decode(code) == entry:  # a transfer's peer is its edge's other stage
                return code
        raise ValueError(f"{entry!r} fits neither the model nor its edges")


@dataclass(frozen=True)
class Certificate:
    """Planned times of the compute jobs under `costs`: start[stage], end[stage], and turn[stage], the jobs' numbers in
    an order in which every job comes after those that it needs. `proof` checks them, nothing trusts them."""

    start: tuple[Floats, ...]
    end: tuple[Floats, ...]
    turn: tuple[Codes, ...]
    costs: Costs


class CodedLists(Sequence[Sequence[LoweredJob]]):
    """One list of entries a stage, as codes. Equal to any sequence of the same lists. Raises ValueError for a code
    that means nothing."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, codes: Iterable[Codes], coding: EntryCoding, certificate: Certificate | None = None
    ) -> None:
        self.codes = tuple(codes)
        self.coding = coding
        self.certificate = certificate
        for stage, mine in enumerate(self.codes):
            if len(mine) and not 0 <= mine.min() <= mine.max() < coding.transfers_end + len(PHASES):
                raise ValueError(f"stage {stage}'s list holds numbers that stand for no entry of this plan")

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, index: int) -> Sequence[LoweredJob]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sequence[LoweredJob]]: ...
    def __getitem__(self, index: int | slice) -> Sequence[LoweredJob] | Sequence[Sequence[LoweredJob]]:
        if isinstance(index, slice):
            return [CodedList(codes, self.coding.decode) for codes in self.codes[index]]
        return CodedList(self.codes[index], self.coding.decode)

    def __iter__(self) -> Iterator[Sequence[LoweredJob]]:
        return (CodedList(codes, self.coding.decode) for codes in self.codes)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, CodedLists) and self.coding == other.coding and len(self) == len(other):
            return all(np.array_equal(a, b) for a, b in zip(self.codes, other.codes, strict=True))
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
