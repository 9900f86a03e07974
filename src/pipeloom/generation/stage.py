"""One stage of a generating pipeline: its chunk's programs and its weights.

Takes chunk programs and the tensors that they read; gives `run`, one step of one scope. Nothing here knows of ranks
or messages: values come as a list and leave as a list. Only this stage's weights are held; the caches belong to the
scopes under way, and a stage makes a fresh one for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .chunks import ChunkProgram
from .spec import GenerationError, GenerationSpec
from .step_graph import SIZES


class BoundStep:
    """A chunk's program of one graph with its weights in place. own: names of the cache leaves of this stage, in the
    order in which its caches hold them. Raises GenerationError for a tensor that isn't there."""

    def __init__(self, program: ChunkProgram, tensors: Mapping[str, Tensor], own: Sequence[str]) -> None:
        self._call = program.call
        self._template: list[object] = []
        self._leaves: list[tuple[int, int]] = []
        self._values: list[tuple[int, int]] = []
        self._sizes: list[tuple[int, int]] = []
        self._consts: list[tuple[int, str]] = []
        self._ids: int | None = None
        self._start: int | None = None
        for at, (kind, name) in enumerate((i.kind, i.name) for i in program.inputs):
            weight = kind in ("param", "buffer")
            if weight and name not in tensors:
                raise GenerationError(
                    f"the step reads {kind} {name!r}, whose value was not loaded on this stage"
                )
            self._template.append(tensors[name] if weight else None)
            if kind == "cache":
                self._leaves.append((at, own.index(name)))
            elif kind == "value":
                self._values.append((at, program.receives.index(name)))
            elif kind == "input" and name in SIZES:
                self._sizes.append((at, SIZES.index(name)))
            elif kind == "input" and name == "ids":
                self._ids = at
            elif kind == "input" and name == "start":
                self._start = at
            elif kind == "input":
                self._consts.append((at, name))
        made = {o.name: i for i, o in enumerate(program.outputs) if o.kind == "value"}
        received = {name: i for i, name in enumerate(program.receives)}
        #: what goes on to the next stage: (whether it was made here, its place)
        self._sends = [(n in made, made[n] if n in made else received[n]) for n in program.sends]
        self._grown = [(i, own.index(o.name)) for i, o in enumerate(program.outputs) if o.kind == "cache"]
        self._logits = next((i for i, o in enumerate(program.outputs) if o.kind == "logits"), None)

    def __call__(
        self,
        ids: Tensor,
        start: Tensor,
        past: int,
        leaves: list[Tensor],
        consts: Mapping[str, Tensor],
        values: Sequence[Tensor],
    ) -> list[Tensor]:
        """One step: the values for the next stage, or [logits] on the last one. `leaves` then holds the new cache."""
        args = self._template.copy()
        batch, q = ids.shape
        sizes = (batch, q, past)
        for at, size in self._sizes:
            args[at] = sizes[size]
        for at, name in self._consts:
            args[at] = consts[name]
        if self._ids is not None:
            args[self._ids] = ids
        if self._start is not None:
            args[self._start] = start
        for at, value in self._values:
            args[at] = values[value]
        for at, leaf in self._leaves:
            args[at] = leaves[leaf]
        made = self._call(args)
        for at, leaf in self._grown:
            leaves[leaf] = made[at]
        if self._logits is not None:
            return [made[self._logits]]
        return [made[at] if here else values[at] for here, at in self._sends]


class Stage:
    """One stage: `index` of `stages`. own: names of the cache's leaves that lie here. tensors: its weights and buffers
    by name. graph(prompt, several): this stage's program of that graph, and constants of its own."""

    def __init__(
        self,
        index: int,
        stages: int,
        spec: GenerationSpec,
        device: torch.device,
        own: Sequence[str],
        tensors: Mapping[str, Tensor],
        graph: Callable[[bool, bool], tuple[ChunkProgram, Mapping[str, Tensor]]],
    ) -> None:
        self.index, self.stages = index, stages
        self.spec, self.device = spec, device
        self.own = tuple(own)
        self.tensors = dict(tensors)
        self._graph = graph
        self._steps: dict[tuple[bool, bool], BoundStep] = {}
        self._starts: dict[int, Tensor] = {}

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.stages - 1

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights and buffers that this stage holds, shared ones counted once."""
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.tensors.values()}
        return sum(held.values())

    def prepare(self, *, several: bool) -> None:
        """Makes the programs for scopes of one row, or of several: capture takes seconds, and is better done before
        the first token is waited for."""
        for prompt in (True, False):
            self._step(prompt, several)

    def new_cache(self, batch: int) -> list[Tensor]:
        """This stage's leaves of a fresh cache for `batch` rows."""
        leaves = dict(self.spec.new_cache(batch, self.device))
        return [leaves[name] for name in self.own]

    def run(
        self,
        ids: Tensor,
        past: int,
        leaves: list[Tensor],
        consts: Mapping[str, Tensor],
        values: Sequence[Tensor],
    ) -> list[Tensor]:
        """The next step of a scope. ids: int64 (rows, q), the new ones (without a cache: all so far). past: positions
        that the cache holds."""
        batch, q = ids.shape
        if past not in self._starts:
            self._starts[past] = torch.tensor(past, device=self.device)
        return self._step(q > 1, batch > 1)(ids, self._starts[past], past, leaves, consts, values)

    def _step(self, prompt: bool, several: bool) -> BoundStep:
        key = (prompt, several)
        if key not in self._steps:
            program, constants = self._graph(prompt, several)
            self._steps[key] = BoundStep(program, {**constants, **self.tensors}, self.own)
        return self._steps[key]
