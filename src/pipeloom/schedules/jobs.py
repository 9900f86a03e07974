"""The words of a schedule: jobs, transfers, placements.

A job is data. It never executes itself: the generator writes jobs, the lowering places transfers among
them, and the simulator, the verifier, the executor and the exporters all read the same tuples.

    F0.3   forward of chunk 0 for micro-batch 3
    B0.3   backward for the input ("backward_b")
    W0.3   backward for the weights ("backward_w")
    X0.3   whole backward: B and W in one
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

Kind = Literal["F", "B", "W", "X"]
KINDS: Final[tuple[Kind, ...]] = ("F", "B", "W", "X")

#: A message travels along an edge: "F" carries values made by the producer's forward to a later chunk,
#: "B" carries values made by the producer's backward (B or X) to an earlier chunk.
Direction = Literal["F", "B"]

_JOB: Final = re.compile(r"([FBWX])(\d+)\.(\d+)\Z")


class Job(NamedTuple):
    """One compute job. `chunk` counts through the whole model (0 … S·V−1)."""

    kind: Kind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.micro_batch}"

    @staticmethod
    def parse(text: str) -> Job:
        """The job that `str` would print so. Raises ValueError for anything else."""
        match = _JOB.match(text)
        if match is None:
            raise ValueError(
                f"{text!r} is not a job: write a kind (F, B, W or X), a chunk, a dot and a micro-batch, like F0.3"
            )
        kind, chunk, micro_batch = match.groups()
        return Job(kind, int(chunk), int(micro_batch))  # type: ignore[arg-type]


class Transfer(NamedTuple):
    """One side of a message between two stages.

    `action` is "post" (the receive is posted: a buffer is ready), "recv" (the receiver needs the message now)
    or "send". `peer` is the other stage. A message is identified on both sides by
    (direction, source chunk, target chunk, micro-batch).
    """

    action: Literal["post", "recv", "send"]
    direction: Direction
    source: int
    target: int
    micro_batch: int
    peer: int

    @property
    def message(self) -> tuple[Direction, int, int, int]:
        return (self.direction, self.source, self.target, self.micro_batch)

    def __str__(self) -> str:
        way = {"post": "from", "recv": "from", "send": "to"}[self.action]
        return f"{self.action} {self.direction}{self.source}>{self.target}.{self.micro_batch} {way} stage {self.peer}"


class Phase(NamedTuple):
    """A job of the whole step rather than of one micro-batch: "finalize" or "update"."""

    name: Literal["finalize", "update"]

    def __str__(self) -> str:
        return self.name


#: What a lowered list (`plan.jobs[stage]`) holds.
LoweredJob = Job | Transfer | Phase


class Edge(NamedTuple):
    """A dependency between chunks that carries `nbytes` a micro-batch.

    direction "F": the F of `target` needs the F of `source` (source < target);
    direction "B": the B (or X) of `target` needs the B (or X) of `source` (source > target).
    """

    direction: Direction
    source: int
    target: int
    nbytes: int = 0


def chain_edges(chunks: int, nbytes: int = 0) -> list[Edge]:
    """The edges of a plain chain of chunks: activations up, gradients down."""
    up = [Edge("F", c, c + 1, nbytes) for c in range(chunks - 1)]
    return up + [Edge("B", c + 1, c, nbytes) for c in range(chunks - 1)]


#: placement[chunk] -> stage
Placement = Sequence[int]
