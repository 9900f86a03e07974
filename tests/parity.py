"""The one promise, as a tool for tests: a pipeline of any shape computes what one stage computes, and that is what
eager PyTorch computes.

    case = deep("chain")                               # enough ops for 24 chunks
    pipe = pipeline(case, Strategy(pp_degree=4, …))    # all stages in this process
    outcome = pipe_outcome(pipe, case.batch(8))        # loss and gradients of one step
    reference = eager_outcome(case, case.batch(8), [2, 2, 2, 2])

Captures are shared by all pipelines of a case that have the same number of chunks, so that a test of hundreds of plans
captures a few times.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.fx as fx
from torch import Tensor, nn

import pipeloom.planner
from models import TIME, WIDTH, WORDS, Chain, TiedEnds, cross_entropy, squares
from oracle import KeyedDraws, worst_error
from pipeloom.api import Pipeline
from pipeloom.local import LocalPipeline
from pipeloom.passes.random_keys import key_of, preserved_generators
from pipeloom.planner import Captured, Planner
from pipeloom.program.batch import BatchForm, flatten_batch, shape_key, split_batch
from pipeloom.program.capture import capture_leaves, split_example
from pipeloom.program.ir import Program
from pipeloom.runtime.optimizers import OptimizerSpec, SchedulerSpec
from pipeloom.runtime.transport import MemoryTransport
from pipeloom.strategy import Strategy

CPU = torch.device("cpu")
#: with an activation after each: 24 ops or more, so that there are 24 chunks
LAYERS = 12


class FirstToLast(nn.Module):
    """The first layer's output is read again by the last: a skip over all chunks between."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.layers[0](x))
        x = first
        for layer in self.layers[1:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x * first)


class Twice(nn.Module):
    """One module runs first and runs last."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.shared(x)


Batch = tuple[Any, Any]


@dataclass
class Deep:
    """A model, its loss function and how to make a batch of n samples: (inputs, targets), the same for the same n."""

    model: nn.Module
    loss_fn: Any
    make: Callable[[int], Batch]

    def batch(self, samples: int, seed: int = 1) -> Batch:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inputs, targets = self.make(samples)
        dtype = next(self.model.parameters()).dtype
        return _cast(inputs, dtype), _cast(targets, dtype)

    def double(self) -> Deep:
        """A copy in float64."""
        return dataclasses.replace(self, model=copy.deepcopy(self.model).double())


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, tuple):
        return tuple(_cast(x, dtype) for x in tree)
    return {k: _cast(x, dtype) for k, x in tree.items()} if isinstance(tree, dict) else tree


def dense(samples: int) -> Batch:
    return torch.randn(samples, WIDTH), torch.randn(samples, WIDTH)


def text(samples: int, time: int = TIME) -> Batch:
    tokens = torch.randint(0, WORDS, (samples, time + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


DEEP: dict[str, Callable[[], Deep]] = {
    "chain": lambda: Deep(Chain(LAYERS), squares, dense),
    "tied": lambda: Deep(TiedEnds(LAYERS // 2), cross_entropy, text),
    "skip": lambda: Deep(FirstToLast(), squares, dense),
    "twice": lambda: Deep(Twice(), squares, dense),
    "dropout": lambda: Deep(Chain(LAYERS, dropout=0.2), squares, dense),
}


def made(make: Callable[[], Any]) -> Any:
    """What `make` returns from a fixed seed; the caller's random state is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def deep(name: str) -> Deep:
    return made(DEEP[name])  # type: ignore[no-any-return]


class Maker(Planner):
    """A Planner that captures a shape once for all numbers of chunks, and cuts a copy."""

    def captured(self, leaves: Sequence[Tensor], form: BatchForm, *, training: bool) -> Captured:
        with mock.patch.object(pipeloom.planner, "capture_leaves", captured_once):
            return super().captured(leaves, form, training=training)


def captured_once(
    model: nn.Module, loss_fn: Any, leaves: list[Tensor], form: BatchForm, **options: Any
) -> Program:
    """`capture_leaves`, from the second time on a copy of what it gave."""
    modes = tuple(m.training for m in model.modules())
    frozen = tuple(p.requires_grad for p in model.parameters())
    key = (id(model), id(loss_fn), form.key(), shape_key(leaves), modes, frozen, *options.items())
    if key not in _PROGRAMS:
        _PROGRAMS[key] = capture_leaves(model, loss_fn, leaves, form, **options)
    return copied(_PROGRAMS[key])


def copied(program: Program) -> Program:
    """The same program with a graph of its own, before any pass."""
    graph = fx.Graph()
    twin: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        twin[node] = graph.node_copy(node, lambda n: twin[n])
    return dataclasses.replace(
        program,
        graph_module=fx.GraphModule(program.graph_module, graph),
        inputs={twin[n]: desc for n, desc in program.inputs.items()},
        outputs=[(twin[n], desc) for n, desc in program.outputs],
    )


class SharedCaptures(Planner):
    """A Planner that takes its programs from another one: they depend on the number of chunks, not on the schedule."""

    def __init__(self, maker: Planner, strategy: Strategy) -> None:
        super().__init__(maker.model, maker.loss_fn, strategy, maker.device)
        self.maker = maker

    def captured(self, leaves: Sequence[Tensor], form: BatchForm, *, training: bool) -> Captured:
        return self.maker.captured(leaves, form, training=training)


_MAKERS: dict[Any, Planner] = {}
_PROGRAMS: dict[Any, Program] = {}


def planner_for(case: Any, strategy: Strategy) -> Planner:
    """A planner for this strategy, with the captures of all earlier ones for the same model and chunks."""
    key = (
        id(case.model),
        id(case.loss_fn),
        strategy.chunks,
        strategy.split_backward,
        strategy.autocast,
        strategy.cuts,
    )
    if key not in _MAKERS:
        # the maker keeps the model alive, so that its id stays its own
        _MAKERS[key] = Maker(case.model, case.loss_fn, strategy, CPU)
    return SharedCaptures(_MAKERS[key], strategy)


def pipeline(
    case: Any,
    strategy: Strategy,
    example: Any,
    optimizer: OptimizerSpec | None = None,
    scheduler: SchedulerSpec | None = None,
) -> LocalPipeline:
    """As `pipeloom.local.compile_local`, with shared captures. `case`: anything with a model and a loss_fn."""
    planner = planner_for(case, strategy)
    inputs, targets = split_example(example, case.loss_fn)
    stages = []
    for transport in MemoryTransport.group(strategy.pp_degree):
        stage = Pipeline(planner, transport, optimizer, scheduler, release=True)
        stage.model = copy.deepcopy(case.model)
        stages.append(stage)
    local = LocalPipeline(stages)
    local.each(lambda stage: stage.prepare(inputs, targets))
    return local


@dataclass
class Outcome:
    """What a step made of a batch. losses: what the loss function returned for each micro-batch."""

    loss: Tensor
    gradients: dict[str, Tensor]
    losses: Tensor

    def differences(self, other: Outcome) -> list[str]:
        """What isn't the same to the bit."""
        found = [] if torch.equal(self.loss, other.loss) else [f"loss {self.loss} is not {other.loss}"]
        if set(self.gradients) != set(other.gradients):
            found.append(f"only one has gradients of {set(self.gradients) ^ set(other.gradients)}")
        both = set(self.gradients) & set(other.gradients)
        unequal = (n for n in sorted(both) if not torch.equal(self.gradients[n], other.gradients[n]))
        return found + [f"gradient of {name}" for name in unequal]

    def error(self, reference: Outcome) -> float:
        """The larger of the loss's relative error and the gradients', by the measure of `oracle.worst_error`."""
        loss = float((self.loss.double() - reference.loss.double()).abs() / reference.loss.double().abs())
        return max(loss, worst_error(self.gradients, reference.gradients))


def pipe_outcome(pipe: LocalPipeline, batch: Batch) -> Outcome:
    """One step without an update, from zero gradients."""
    pipe.zero_grad()
    result = pipe.step(*batch, update=False)
    gradients = {n: g.clone() for n, g in pipe.gradients().items()}
    return Outcome(result.loss.clone(), gradients, result.losses.clone())


def eager_outcome(
    case: Any,
    batch: Batch,
    sizes: Sequence[int],
    *,
    seed: int = 0,
    step: int = 0,
    model: nn.Module | None = None,
    average: bool = True,
    autocast: torch.dtype | None = None,
) -> Outcome:
    """Eager PyTorch, micro-batch by micro-batch in the same order, with the same random draws.

    A loss function that returns (sum, weight) is averaged over the total weight, any other over samples. model: to run
    instead of a copy of the case's (its buffers move, its gradients are left cleared).
    """
    model = copy.deepcopy(case.model) if model is None else model
    if hasattr(model, "checkpointing"):
        model.checkpointing = None  # the recomputation would draw again, outside of the mode that keys draws
    leaves, form = flatten_batch(*batch)
    pieces = split_batch(leaves, sizes)
    weights: list[Any] = []
    losses = []
    returned = []
    with preserved_generators(CPU):
        for m, piece in enumerate(pieces):
            args, kwargs, targets = form.rebuild(piece)
            with (
                KeyedDraws(key_of(seed, step, m)),
                torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None),
            ):
                loss = model(*args, **kwargs)
                loss = loss if case.loss_fn is None else case.loss_fn(loss, targets)
            weight: Any = sizes[m]
            if isinstance(loss, tuple):
                loss, weight = loss
                returned.append(loss.detach())
            else:
                returned.append(loss.detach())
                loss = loss * weight if average else loss
            loss.backward()
            weights.append(float(weight))
            losses.append(loss.detach())
    total = sum(weights) if average else 1.0
    gradients = {n: p.grad / total for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Outcome(sum(losses[1:], losses[0]) / total, gradients, torch.stack(returned))
