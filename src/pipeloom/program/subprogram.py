"""What a rank runs: the forward, backward, backward_b and backward_w programs of one chunk.

A SubProgram is a boxed FX graph with every input and output named. Names of values are the names of the
nodes in the joint graph, so that they mean the same on every rank; the executor turns them into slots.

    F   forward               outputs: what later chunks, this chunk's backward, and the user need
    B   backward_b            outputs: gradients for earlier chunks, and what W still needs
    W   backward_w            outputs nothing: it adds into the accumulators
    X   backward              B and W in one
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from ..schedules.jobs import Direction, Edge, Kind
from .means import Means

#: param: a parameter, by its name in the model · buffer: the version of a buffer that this micro-batch's F reads
#: input: a flat leaf of the micro-batch, or behind them a divisor (see `Means`)
#: tangent: the seed of the backward (0-dim, the loss's dtype) · key: the micro-batch's random key (0-dim int64, on
#: the CPU) · acc: a gradient accumulator (see GradientSlot) · value: an intermediate of the joint graph, in the
#: micro-batch's scope
InputKind = Literal["param", "buffer", "input", "tangent", "key", "acc", "value"]


class Input(NamedTuple):
    """One input of a sub-program. `name`: parameter or buffer name, "0", "1" … for a leaf of the batch,
    "" for tangent and key, the slot's name for acc, the value's name for value."""

    kind: InputKind
    name: str


@dataclass(frozen=True)
class ValueInfo:
    """Shape, stride and dtype of a value that lives in a scope or crosses between chunks. `storage` groups values of
    one chunk that share memory (so that bytes are counted once). nbytes: of its elements. storage_bytes: of the memory
    that it keeps alive where it was made, which is more for a part of a larger tensor, and none for a part of a weight
    or buffer."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: int
    nbytes: int
    storage_bytes: int


@dataclass(frozen=True)
class GradientSlot:
    """A place where one use of a parameter sums its gradient over the micro-batches of a step.

    A parameter that is used twice, or tied under two names, has one slot a use; the slots of a parameter are
    summed in the order of `index` after the last micro-batch. `name` is unique in the program.
    """

    name: str
    parameter: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunk: int


@dataclass
class SubProgram:
    """One program of one chunk. `call(list of inputs) -> tuple of outputs` consumes its list (boxed).

    outputs: names of values, in the order that `call` returns them.
    buffers: {buffer name: value name}: new versions of buffers among the outputs (F only).
    peak_bytes: estimated bytes that the program needs at its worst moment beyond what is alive before it.
    flops: floating point operations; moved: bytes read and written (a roofline's two inputs).
    shapes: shape and dtype of each input.
    structure: equal for programs that are the same code on the same shapes (compile once).
    """

    kind: Kind
    chunk: int
    call: Callable[[list[Any]], tuple[Any, ...]]
    inputs: list[Input]
    outputs: list[str]
    buffers: dict[str, str] = field(default_factory=dict)
    flops: float = 0.0
    moved: float = 0.0
    peak_bytes: int = 0
    structure: str = ""
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)
    graph: Any = None

    @property
    def empty(self) -> bool:
        """Nothing to run: the job costs nothing and only its transfers matter."""
        return self.graph is None


@dataclass
class ProgramSet:
    """All sub-programs for micro-batches of one shape, of all chunks (cheap: graphs only, no weights).

    messages: for each edge, the values that one message carries, in order. A rank needs `programs` of its own chunks,
    `messages` of the edges that touch them, and `values` for the shapes.
    loss, weight: names of the values that hold the micro-batch's loss and weight (weight None: the number of samples).
    loss_chunk, weight_chunk: the chunks that make them.
    outputs: names of the values that make up the model's own output (evaluation only); output_chunks: who makes
    each.
    means: how to compute the divisors that follow the leaves of the batch among the inputs; None: there are none.
    """

    chunks: int
    programs: dict[tuple[Kind, int], SubProgram]
    values: dict[str, ValueInfo]
    messages: dict[tuple[Direction, int, int], list[str]]
    slots: list[GradientSlot]
    loss: str
    loss_chunk: int
    weight: str | None = None
    weight_chunk: int = -1
    outputs: list[str] = field(default_factory=list)
    output_chunks: list[int] = field(default_factory=list)
    draws: int = 0
    means: Means | None = None

    def edges(self) -> list[Edge]:
        """The edges between chunks, with their bytes a micro-batch."""
        return [
            Edge(direction, source, target, sum(self.values[v].nbytes for v in names))
            for (direction, source, target), names in self.messages.items()
        ]

    def parameters(self, chunk: int) -> list[str]:
        """Names of the parameters that a chunk reads or has gradients for, sorted by first use."""
        return self._names(chunk, "param")

    def buffers(self, chunk: int) -> list[str]:
        """Names of the buffers that a chunk reads, or gives new values without reading them."""
        written = {name: None for (_, c), p in self.programs.items() if c == chunk for name in p.buffers}
        return list(dict.fromkeys([*self._names(chunk, "buffer"), *written]))

    def _names(self, chunk: int, kind: InputKind) -> list[str]:
        seen: dict[str, None] = {}
        for program in self.programs.values():
            if program.chunk == chunk:
                seen.update((i.name, None) for i in program.inputs if i.kind == kind)
        return list(seen)
