"""Pipelined generation: `compile`, and the Generator that it returns.

    gen = pipeloom.generation.compile(model, strategy=Strategy(pp_degree=2), words=words)   # on each of two ranks
    for token in gen.stream(prompts, max_new_tokens=64, temperature=0.8, seed=7):
        print(token.text, end="")
    results = gen.generate(prompts)

The step is captured and cut alike on every rank, each of which keeps its own weights; the prompts go through the
stages as scopes of a fleet graph (`stream_graph.py`). Tokens don't depend on the number of stages, nor on what else is
in flight.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from time import perf_counter
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..fleet.bus import Bus, connect_bus
from ..fleet.carrier import Carrier
from ..runtime import launch
from ..runtime.agreement import compare, gather
from ..runtime.distributed import DEFAULT_TIMEOUT
from ..runtime.failure import FailureWatch
from ..runtime.stepping import Work
from ..runtime.transport import MemoryTransport, Transport
from ..strategy import Strategy
from .cutting import Cutting, Graphs, ReadWeights, weights_of
from .passage import grouped
from .request import Request, Result, Words, requests
from .running import Running, step_figures
from .sampling import processors_of
from .spec import GenerationError, GenerationSpec
from .stage import Stage
from .stream import Stream
from .stream_graph import stream_graph

Refill = Literal["continuous", "batch"]


def compile(
    model: nn.Module,
    spec: GenerationSpec | None = None,
    strategy: Strategy | None = None,
    *,
    words: Words | None = None,
    weights: ReadWeights | None = None,
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Generator:
    """Takes this rank's part in a generating pipeline. A collective call of all ranks, as is every method of what it
    returns; the model, and later the prompts, are the same on every rank.

    spec: how the model makes a token; None: by the adapter, for a model of transformers. strategy: of its options
    pp_degree and cuts count. words: the tokenizer, for prompts and stops that are text (`transformers.HubWords`).
    weights: reads weights by name, where the model is on the meta device. timeout: seconds that a rank waits for the
    others. Raises GenerationError for a model that can't be captured or cut, ValueError where the ranks don't fit.
    """
    strategy = strategy or Strategy()
    place = launch.join(strategy.pp_degree, device, mesh, timeout)
    cutting = Cutting(Graphs(model, spec or _adapted(model), place.device), strategy)
    stage = cutting.stage(place.stage, weights or weights_of(model))
    bus = connect_bus(place.transport, timeout)
    return Generator(stage, place.transport, bus, place.watch, words)


def compile_local(
    model: nn.Module,
    spec: GenerationSpec | None = None,
    strategy: Strategy | None = None,
    *,
    words: Words | None = None,
    weights: ReadWeights | None = None,
    device: torch.device | str = "cpu",
) -> LocalGenerator:
    """Like `compile`, for all stages in this one process, stepped in turn: the same programs, graph and tokens."""
    strategy = strategy or Strategy()
    cutting = Cutting(Graphs(model, spec or _adapted(model), torch.device(device)), strategy)
    read = weights or weights_of(model)
    return LocalGenerator([cutting.stage(index, read) for index in range(cutting.stages)], words)


class _Base:
    """What both kinds of generator share: options in, streams out."""

    def __init__(self, stages: Sequence[Stage], words: Words | None) -> None:
        self.stages = list(stages)
        self.words = words
        self._stream: Stream | None = None

    @property
    def spec(self) -> GenerationSpec:
        return self.stages[0].spec

    def stream(
        self,
        prompts: Any,
        *,
        batch: int = 1,
        in_flight: int | None = None,
        refill: Refill = "continuous",
        **limits: Any,
    ) -> Stream:
        """Tokens of all prompts as they come (see Stream).

        prompts: a text, or a list of texts, ids, or mappings with "prompt" and limits of its own. batch: prompts a
        scope; they go through the stages together, padded on the left. in_flight: scopes under way at once; None: two a
        stage. refill: "continuous" lets a scope in as soon as one is over, "batch" when all in flight are. limits: see
        `Limits`. Raises GenerationError, before anything is sent, for a prompt that can't be run.
        """
        if self._stream is not None:
            self._stream.close()
        found = requests(prompts, self.words, limits)
        rows = self._batch(batch)
        flying = 2 * self.stages[0].stages if in_flight is None else in_flight
        if not isinstance(flying, int) or flying < 1:
            raise GenerationError(f"in_flight={in_flight!r}: write a whole number of at least 1")
        if refill not in ("continuous", "batch"):
            raise GenerationError(f'refill={refill!r}: write "continuous" or "batch"')
        for request in found:
            self.spec.check_lengths(request.name, len(request.ids), request.limits.max_new_tokens)
            processors_of(request)
        groups = grouped(found, rows)
        several = {len(group) > 1 for group in groups}
        for stage in self.stages:
            for more in several:
                stage.prepare(several=more)
        self._stream = self._start(found, groups, min(flying, len(groups)), refill == "continuous")
        return self._stream

    def generate(
        self,
        prompts: Any,
        *,
        batch: int = 1,
        in_flight: int | None = None,
        refill: Refill = "continuous",
        **limits: Any,
    ) -> list[Result]:
        """The same, to the end: a Result a prompt, in their order."""
        stream = self.stream(prompts, batch=batch, in_flight=in_flight, refill=refill, **limits)
        for _ in stream:
            pass
        return stream.results

    def _batch(self, batch: int) -> int:
        if not isinstance(batch, int) or batch < 1:
            raise GenerationError(f"batch={batch!r}: write a whole number of at least 1")
        if batch > 1 and self.spec.scope_inputs is None:
            raise GenerationError(
                f"batch={batch}: this model's spec has no scope_inputs, so it can't tell left padding from ids; take "
                "batch=1, or write scope_inputs"
            )
        return batch

    def _start(
        self, found: list[Request], groups: list[list[Request]], flying: int, continuous: bool
    ) -> Stream:
        raise NotImplementedError


class Generator(_Base):
    """One rank of a generating pipeline."""

    def __init__(
        self,
        stage: Stage,
        transport: Transport,
        bus: Bus,
        watch: FailureWatch | None,
        words: Words | None,
    ) -> None:
        super().__init__([stage], words)
        self._transport = transport
        self._bus = bus
        self._watch = watch
        if watch is not None:
            watch.also_closes(bus.abort)

    def close(self) -> None:
        """Ends the stream that is open, and says goodbye to the other ranks. All ranks do it."""
        if self._stream is not None:
            self._stream.close()
        self._bus.close()
        self._transport.close()

    def _start(
        self, found: list[Request], groups: list[list[Request]], flying: int, continuous: bool
    ) -> Stream:
        cancelled: set[int] = set()
        running = Running(self.stages[0], groups, self.words, cancelled)
        work = _run(running, self._transport, self._bus, flying, continuous)
        guard = self._watch.guard if self._watch is not None else contextlib.nullcontext
        return Stream([work], running, found, cancelled, guard)


class LocalGenerator(_Base):
    """All ranks of a generating pipeline in one process."""

    def _start(
        self, found: list[Request], groups: list[list[Request]], flying: int, continuous: bool
    ) -> Stream:
        cancelled: set[int] = set()
        runs = [Running(stage, groups, self.words, cancelled) for stage in self.stages]
        works = [
            _run(run, transport, connect_bus(transport), flying, continuous)
            for run, transport in zip(runs, MemoryTransport.group(len(self.stages)), strict=True)
        ]
        return Stream(works, runs[0], found, cancelled, contextlib.nullcontext)


def _run(
    running: Running, transport: Transport, bus: Bus, flying: int, continuous: bool
) -> Work[list[list[float]]]:
    """One rank's run; every rank's figures."""
    stage = running.stage
    yield from compare(transport, "prompts", _line(running.groups, flying, continuous))
    graph = stream_graph(
        stage.stages,
        len(running.groups),
        flying,
        continuous=continuous,
        rank=stage.index,
        programs=running.programs(),
    )
    began = perf_counter()
    yield from Carrier(graph, bus).work()
    rows = yield from gather(transport, step_figures(running, perf_counter() - began))
    return rows


def _line(groups: Sequence[Sequence[Request]], flying: int, continuous: bool) -> str:
    """What ranks compare: a word on the prompts, and a digest of them."""
    known = [
        [(r.ids, r.limits.max_new_tokens, r.limits.ends, r.limits.stop) for r in group] for group in groups
    ]
    digest = hashlib.blake2b(repr(known).encode(), digest_size=8).hexdigest()
    count = sum(map(len, groups))
    return f"{count} prompts in {len(groups)} scopes, {flying} in flight, continuous: {continuous}; digest {digest}"


def _adapted(model: nn.Module) -> GenerationSpec:
    from .transformers import hub_spec, is_hub_model

    if not is_hub_model(model):
        raise GenerationError(
            f"{type(model).__name__} is no model of transformers, so how it makes a token isn't known: pass a "
            "GenerationSpec (`recomputing()` will do for a module that maps ids to logits)"
        )
    return hub_spec(model)
