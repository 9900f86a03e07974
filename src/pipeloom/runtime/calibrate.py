"""Times the sub-programs of one stage before the first step, so that a plan predicts from measured seconds.

Values that would come from other stages are zeros of their shapes; everything inside a chunk is what its own
forward makes. One program of each structure is timed. The accumulators are cleared afterwards; buffers don't
move (new versions are outputs).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from ..program.subprogram import ProgramSet, SubProgram
from ..schedules.jobs import Kind


class Store(Protocol):
    """What timing needs of a parameter store."""

    @property
    def device(self) -> torch.device: ...

    @property
    def parameters(self) -> Mapping[str, Tensor]: ...

    @property
    def buffers(self) -> Mapping[str, Tensor]: ...

    @property
    def accumulators(self) -> Mapping[str, Tensor]: ...

    def clear(self) -> None: ...


class BlankStore:
    """Made-up weights, buffers and accumulators, made when they are asked for and not kept: for timing a model
    that hasn't been
    placed yet. They are filled, since pages that were never written would all be one page, and too fast."""

    def __init__(self, programs: ProgramSet, device: torch.device) -> None:
        self.device = device
        given = {i: s for p in programs.programs.values() for i, s in zip(p.inputs, p.shapes, strict=True)}
        self.parameters = _Blanks({i.name: s for i, s in given.items() if i.kind == "param"}, device, 0.01)
        self.buffers = _Blanks({i.name: s for i, s in given.items() if i.kind == "buffer"}, device, 1)
        self.accumulators = _Blanks({s.name: (s.shape, s.dtype) for s in programs.slots}, device, 0)

    def clear(self) -> None:
        """Nothing is kept."""


class _Blanks(Mapping[str, Tensor]):
    def __init__(
        self, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device, value: float
    ) -> None:
        self._shapes = shapes
        self._device = device
        self._value = value

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self._shapes[name]
        value = self._value if dtype.is_floating_point else int(self._value)
        return torch.full(shape, value, dtype=dtype, device=self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def time_programs(
    store: Store,
    programs: ProgramSet,
    chunks: Sequence[int],
    leaves: Sequence[Tensor],
    rounds: int = 3,
) -> dict[str, float]:
    """{structure: seconds} of the programs of these chunks; the median of `rounds` after one that warms up. One that
    raises on made-up values isn't among them.

    leaves: those of one micro-batch; meta ones count as zeros.
    """
    real = [torch.zeros_like(t, device=store.device) if t.is_meta else t.to(store.device) for t in leaves]
    if programs.means is not None:
        real += [torch.ones((), dtype=dtype, device=store.device) for dtype in programs.means.dtypes]
    times: dict[str, float] = {}
    with torch.no_grad():
        for chunk in chunks:
            _Chunk(store, programs, chunk, real).time(times, rounds)
    store.clear()
    return times


class _Chunk:
    """Runs one chunk as the steady state of 1F1B does, F of the next micro-batch before the backward of this one: so
    each job finds its values as cold as in a step, where other work came between. Repeating one program by itself
    finds everything in the caches and promises too much."""

    def __init__(self, store: Store, programs: ProgramSet, chunk: int, leaves: Sequence[Tensor]) -> None:
        self.store = store
        self.programs = programs
        self.chunk = chunk
        self.leaves = leaves
        self.values: dict[str, Any] = {}
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def time(self, times: dict[str, float], rounds: int) -> None:
        order: tuple[Kind, ...] = ("F", "X", "B", "W")
        found = (self.programs.programs.get((kind, self.chunk)) for kind in order)
        mine = [p for p in found if p is not None and not p.empty]
        if all(p.structure in times for p in mine):
            return
        forward = [p for p in mine if p.kind == "F"]
        backward = [p for p in mine if p.kind != "F"]
        waiting: dict[str, Any] = {}
        for round_ in range(rounds + 2):
            self.values = {}
            self._run(forward)
            self.values, waiting = waiting, self.values
            if round_:
                self._run(backward)
        times.update({n: statistics.median(seen[1:]) for n, seen in self.seconds.items() if len(seen) > 1})

    def _run(self, programs: Sequence[SubProgram]) -> None:
        for program in programs:
            arguments = [self._argument(program, i) for i in range(len(program.inputs))]
            self._wait()
            begin = perf_counter()
            try:
                outputs = program.call(arguments)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError):
                continue  # made-up values may be refused, as a singular matrix is: it stays untimed
            self._wait()
            self.seconds[program.structure].append(perf_counter() - begin)
            self.values.update(zip(program.outputs, outputs, strict=True))

    def _argument(self, program: SubProgram, position: int) -> Any:
        kind, name = program.inputs[position]
        if kind == "param":
            return self.store.parameters[name]
        if kind == "acc":
            return self.store.accumulators[name]
        if kind == "buffer":
            return self.store.buffers[name]
        if kind == "input":
            return self.leaves[int(name)]
        if kind == "key":
            return torch.zeros((), dtype=torch.int64)
        if kind == "tangent":
            dtype = self.programs.values[self.programs.loss].dtype
            return torch.ones((), dtype=dtype, device=self.store.device)
        if name not in self.values:
            value = self.programs.values[name]
            empty = torch.empty_strided(
                value.shape, value.stride, dtype=value.dtype, device=self.store.device
            )
            self.values[name] = empty.zero_() if 0 not in value.stride else torch.zeros_like(empty)
        return self.values[name]

    def _wait(self) -> None:
        if self.store.device.type != "cpu":
            torch.accelerator.synchronize(self.store.device)
