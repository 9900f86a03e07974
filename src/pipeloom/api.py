"""compile, and the Pipeline that it gives: one rank's end of a pipeline.

    pipe = pipeloom.compile(model, loss_fn, example=(inputs, targets), strategy=strategy, optimizer=make_optimizer)
    result = pipe.step(inputs, targets)
    print(float(result.loss))

Every rank of a pipeline runs the same lines with the same batch. Inside, a step is a generator that yields where
it waits for
another rank (see `runtime.stepping`): over torch.distributed it is run to its end at once; `pipeloom.local` steps
all ranks of one
process in turn.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import nn

from .auto import choose, refine
from .passes.random_keys import key_of, preserved_generators
from .planner import Captured, Planner, digest_of
from .planning import Plan
from .planning.choice import Choice
from .program import compat
from .program.batch import BatchForm, batch_size, flatten_batch, shape_key, split_batch
from .program.capture import LossFunction, split_example
from .program.subprogram import ProgramSet
from .runtime import agreement, checkpoint, launch
from .runtime.calibrate import time_programs
from .runtime.executor import Executor
from .runtime.failure import FailureWatch
from .runtime.figures import StageFigures, exchange_figures
from .runtime.measure import clock_offsets, measured_timeline
from .runtime.parameters import ParameterStore
from .runtime.result import StepResult
from .runtime.stepping import Work, finish
from .runtime.transport import Transport
from .runtime.update import LossScaler, Updater
from .schedules.timeline import StepFigures, Timeline
from .strategy import AUTO, Strategy

MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
T = TypeVar("T")
MakeScheduler = Callable[[torch.optim.Optimizer], Any]

#: executors kept: each is the static plan for one division of a batch into shapes
EXECUTORS = 32
#: evaluation draws from keys of its own, so that an evaluation between two steps changes neither
_EVALUATION = 1 << 62


def compile(
    model: nn.Module,
    loss_fn: LossFunction | None = None,
    *,
    example: Any,
    strategy: Strategy,
    optimizer: MakeOptimizer | None = None,
    scheduler: MakeScheduler | None = None,
    mesh: Any = None,
    device: torch.device | str | None = None,
) -> Pipeline:
    """This rank's end of a pipeline that trains `model`.

    loss_fn(output, targets) gives a 0-dim loss, or (sum, weight); None: the model returns its loss. example:
    (inputs, targets), or
    inputs where loss_fn is None; its tensors may be meta or `torch.Size`. optimizer gets this rank's (name,
    parameter) pairs, and is
    not called on a rank that trains nothing; scheduler gets the optimizer. mesh: a DeviceMesh with a dimension
    "pp"; without one, all
    ranks of the default process group are the pipeline (one is made from torchrun's environment if there is none).
    pp_degree=1 needs none.

    A collective call of all ranks of the pipeline. The model's parameters that other ranks own are released.
    Raises StrategyError,
    CaptureError, ProgramError, PlanError, or ValueError, before anything of a step is sent.
    """
    inputs, targets = split_example(example, loss_fn)
    place = launch.join(strategy.pp_degree, device, mesh)
    pipe = Pipeline(
        Planner(model, loss_fn, strategy, place.device),
        place.transport,
        optimizer,
        scheduler,
        watch=place.watch,
    )
    pipe.run(pipe.prepare(inputs, targets))
    return pipe


class EvalResult:
    """loss: 0-dim, the same on every rank, read when first asked for. outputs: the model's output for the whole
    batch, with None for the
    parts that other ranks made; None unless it was asked for."""

    def __init__(self, result: StepResult, outputs: Any) -> None:
        self._result = result
        self.outputs = outputs

    @property
    def loss(self) -> torch.Tensor:
        return self._result.loss

    @property
    def weight(self) -> torch.Tensor:
        return self._result.weight


@dataclass
class _Division:
    """What runs one division of a batch into micro-batches."""

    sets: list[ProgramSet]
    plan: Plan
    executor: Executor
    output_form: Any


class Pipeline:
    """One stage of a compiled model: `compile` makes it.

    plan: the plan of the example's batch (`plan.predicted`, `plan.jobs`, `plan.show()`). stage: this rank's.
    model: the user's, with this
    rank's parameters. timelines: of the steps in `strategy.profile`.
    """

    def __init__(
        self,
        planner: Planner,
        transport: Transport,
        optimizer: MakeOptimizer | None = None,
        scheduler: MakeScheduler | None = None,
        *,
        watch: FailureWatch | None = None,
        release: bool | None = None,
    ) -> None:
        self.planner = planner
        self.strategy = planner.strategy
        self.model = planner.model
        self.transport = transport
        self.watch = watch
        self.stage = transport.rank
        self.device = planner.device
        self.plan: Plan
        self.store: ParameterStore
        self.updater: Updater
        self.steps = 0
        self.timelines: list[Timeline] = []
        self._make_optimizer = optimizer
        self._make_scheduler = scheduler
        self._release = transport.size > 1 if release is None else release
        self._divisions: OrderedDict[Any, _Division] = OrderedDict()
        self._persistent: list[int] = []
        self._offset = 0.0
        self._last: Executor | None = None
        self._figures: StageFigures | None = None

    # ---- the user's calls

    def step(self, inputs: Any, targets: Any = None, *, update: bool = True) -> StepResult:
        """One training step on a batch (the same on every rank): forward, backward, finalize, and the update
        unless update=False;
        two such steps without an update add up. Returns at once; `result.loss`, `.grad_norm`, `.weight` and
        `.skipped` wait when read."""
        return self.run(self.step_work(inputs, targets, update=update))

    def eval(self, inputs: Any, targets: Any = None, *, outputs: bool = False) -> EvalResult:
        """The loss of a batch in evaluation mode, no gradients; the model's outputs where asked for. Any batch
        size, at any time."""
        return self.run(self.eval_work(inputs, targets, outputs=outputs))

    def gradients(self) -> dict[str, torch.Tensor]:
        """{parameter name: this rank's finalized gradient}, after `step(..., update=False)`. Views: they change
        with the next step."""
        return {g.name: g.view for g in self.store.gradients}

    def zero_grad(self) -> None:
        """Makes all gradients zero."""
        self.store.clear()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self.updater.optimizer

    @property
    def scheduler(self) -> Any:
        return self.updater.scheduler

    @property
    def measured(self) -> StepFigures | None:
        """What the last step cost on all ranks; None before the first."""
        return None if self._figures is None else self._figures.read()

    def timeline(self) -> Timeline:
        """The last step as it happened on all ranks. A collective call."""
        return self.run(self.timeline_work())

    def save(self, folder: str | PathLike[str]) -> None:
        """Writes a checkpoint of all ranks: model, optimizer, scheduler, loss scaler and step. A collective call;
        the folder appears whole
        or not at all."""
        checkpoint.save(self, folder)

    def load(self, folder: str | PathLike[str]) -> None:
        """Reads a checkpoint, saved with any number of stages and chunks. A collective call."""
        checkpoint.load(self, folder)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state under the model's own names (torch.distributed.checkpoint's Stateful)."""
        return checkpoint.state_dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        checkpoint.load_state_dict(self, state)

    def close(self) -> None:
        """Gives the connections back. The process group itself stays the user's."""
        self.transport.close()

    # ---- what they are made of: each checks its arguments at once, and returns the generator that does the work

    def run(self, work: Work[T]) -> T:
        """Runs a generator to its end; when this rank or another fails, every rank stops and names the one that did."""
        with contextlib.nullcontext() if self.watch is None else self.watch.guard(), self.preserved():
            return finish(work)

    def prepare(self, inputs: Any, targets: Any) -> Work[None]:
        """Captures, places parameters, measures, plans, and checks that all ranks did the same."""
        strategy, planner, transport = self.strategy, self.planner, self.transport
        if transport.size != strategy.pp_degree:
            raise ValueError(
                f"the strategy has pp_degree={strategy.pp_degree}, but the pipeline has {transport.size} "
                "rank(s): start that many "
                "(torchrun --nproc-per-node), or change pp_degree"
            )
        leaves, form = flatten_batch(inputs, targets)
        sizes = strategy.micro_batches(batch_size(leaves, form))
        if strategy.schedule_mode != AUTO:  # what can't be captured is refused before anything is sent
            planner.captured(split_batch(leaves, sizes)[0], form, training=True)
        return self._prepare(leaves, form, sizes)

    def _prepare(self, leaves: list[torch.Tensor], form: BatchForm, sizes: list[int]) -> Work[None]:
        strategy, planner, transport = self.strategy, self.planner, self.transport
        first = split_batch(leaves, sizes)[0]
        if strategy.schedule_mode == AUTO:
            chosen = choose(planner, first, form, len(sizes)).to_json() if transport.rank == 0 else None
            planner.choose(Choice.from_json((yield from agreement.tell(transport, chosen))))
        programs = planner.captured(first, form, training=True).programs
        yield from agreement.compare(
            transport,
            "program",
            f"schedule {strategy.schedule_name}, {strategy.pp_degree} stages × {strategy.vpp_degree} chunks, "
            f"micro-batches {sizes}, "
            f"leaves {[tuple(t.shape) for t in leaves]}, programs {digest_of([programs])[:16]}",
        )
        placement = planner.placement
        self.store = ParameterStore(self.model, programs, placement, self.stage, self.device, self._release)
        if strategy.costs == "measured":
            yield from self._measure(programs, placement, first)
        self._make_updater()
        resident = yield from agreement.gather(transport, [float(self._resident())])
        self._persistent = [int(r[0]) for r in resident]
        if strategy.schedule_mode == AUTO:
            refined = None
            if transport.rank == 0:
                refined = refine(planner, programs, len(sizes), self._persistent).to_json()
            planner.choose(Choice.from_json((yield from agreement.tell(transport, refined))))
        division = self._division(leaves, form, sizes, training=True)
        self.plan = division.plan
        yield from agreement.compare(transport, "plan", f"{self.plan.schedule} {self.plan.digest()[:32]}")
        self._offset = yield from clock_offsets(transport)

    def step_work(self, inputs: Any, targets: Any = None, *, update: bool = True) -> Work[StepResult]:
        leaves, form = flatten_batch(inputs, targets)
        sizes = self.strategy.micro_batches(batch_size(leaves, form))
        return self._step(leaves, sizes, self._division(leaves, form, sizes, training=True), update)

    def _step(
        self, leaves: list[torch.Tensor], sizes: list[int], division: _Division, update: bool
    ) -> Work[StepResult]:
        yield from agreement.compare_batches(self.transport, leaves)
        scale = self.updater.scaler.scale if self.updater.scaler is not None else 1.0
        known = [float(n) for n in sizes] if division.sets[0].weight is None else None
        result = yield from division.executor.run(
            self._moved(split_batch(leaves, sizes)),
            self._tangents(division.sets[0], known, len(sizes), scale),
            [key_of(self.strategy.seed, self.steps, m) for m in range(len(sizes))],
            weights=known,
            unscale=1.0 / scale,
            update=update,
        )
        self._last = division.executor
        if self._figures is not None:
            self._figures.settle()
        self._figures = exchange_figures(
            self.transport, division.executor.recorder, self._offset, self._peak(division)
        )
        profile = self.strategy.profile
        if profile is not None and profile[0] <= self.steps <= profile[1]:
            self.timelines.append((yield from self.timeline_work()))
        self.steps += 1
        return result

    def eval_work(self, inputs: Any, targets: Any = None, *, outputs: bool = False) -> Work[EvalResult]:
        leaves, form = flatten_batch(inputs, targets)
        sizes = self.strategy.micro_batches(batch_size(leaves, form))
        return self._eval(leaves, sizes, self._division(leaves, form, sizes, training=False), outputs)

    def _eval(
        self, leaves: list[torch.Tensor], sizes: list[int], division: _Division, outputs: bool
    ) -> Work[EvalResult]:
        yield from agreement.compare_batches(self.transport, leaves)
        known = [float(n) for n in sizes] if division.sets[0].weight is None else None
        result = yield from division.executor.run(
            self._moved(split_batch(leaves, sizes)),
            [torch.zeros(())] * len(sizes),
            [key_of(self.strategy.seed, _EVALUATION + self.steps, m) for m in range(len(sizes))],
            weights=known,
        )
        return EvalResult(result, _joined(result, division.output_form) if outputs else None)

    def timeline_work(self) -> Work[Timeline]:
        if self._last is None:
            raise ValueError("there is no timeline yet: run a step first")
        title = f"measured {self.plan.schedule}"
        return measured_timeline(self.transport, self._last.recorder, self._offset, title, self._resident())

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Puts the caller's random state back after draws."""
        with preserved_generators(self.device):
            yield

    # ---- parts

    def _division(
        self, leaves: Sequence[torch.Tensor], form: Any, sizes: list[int], *, training: bool
    ) -> _Division:
        """The executor for a batch cut like this: from the cache, or compiled now (each new shape is captured once)."""
        shapes: dict[Any, Captured] = {}
        captured = []
        for micro_batch in split_batch(leaves, sizes):
            shape = shape_key(micro_batch)
            if shape not in shapes:
                shapes[shape] = self.planner.captured(micro_batch, form, training=training)
            captured.append(shapes[shape])
        sets = [c.programs for c in captured]
        key = (training, tuple(id(s) for s in sets))
        if key not in self._divisions:
            plan = self.planner.plan(sets, training=training, persistent=self._persistent)
            executor = Executor(
                self.stage,
                plan.jobs[self.stage],
                sets,
                plan.placement,
                self.store,
                self.transport,
                updater=self.updater if training else None,
                average=self.strategy.gradient_merge == "average",
                overlap=self.strategy.enable_send_recv_overlap,
                lists=plan.jobs,
            )
            self._divisions[key] = _Division(sets, plan, executor, captured[0].output_form)
            if len(self._divisions) > EXECUTORS:
                self._divisions.popitem(last=False)
        self._divisions.move_to_end(key)
        return self._divisions[key]

    def _measure(
        self, programs: ProgramSet, placement: Sequence[int], leaves: Sequence[torch.Tensor]
    ) -> Work[None]:
        """Times this stage's programs and shares the seconds; every rank plans with the same ones."""
        chunks = [c for c, stage in enumerate(placement) if stage == self.stage]
        with self.preserved():
            times = time_programs(self.store, programs, chunks, leaves)
        structures = sorted({p.structure for p in programs.programs.values() if not p.empty})
        mine = [times.get(s, float("nan")) for s in structures]
        rows = yield from agreement.gather(self.transport, mine)
        seconds = {}
        for i, structure in enumerate(structures):
            found = [row[i] for row in rows if row[i] == row[i]]
            if found:
                seconds[structure] = sum(found) / len(found)
        self.planner.learn(seconds, programs)

    def _make_updater(self) -> None:
        pairs = self.store.trainable()
        optimizer = self._make_optimizer(iter(pairs)) if self._make_optimizer is not None and pairs else None
        scheduler = (
            self._make_scheduler(optimizer)
            if self._make_scheduler is not None and optimizer is not None
            else None
        )
        scale = self.strategy.loss_scale
        scaler = None
        if scale is not None:
            scaler = LossScaler() if scale == "dynamic" else LossScaler(float(scale), dynamic=False)
        self.updater = Updater(
            self.store, self.transport, optimizer, scheduler, scaler, self.strategy.max_norm
        )

    def _tangents(
        self, programs: ProgramSet, weights: list[float] | None, micro_batches: int, scale: float
    ) -> list[torch.Tensor]:
        """The seeds of the backward: each micro-batch's share of the batch where weights are known, times the loss
        scale."""
        shares = [1.0] * micro_batches
        if weights is not None and self.strategy.gradient_merge == "average":
            shares = [w / sum(weights) for w in weights]
        dtype = programs.values[programs.loss].dtype
        return [torch.tensor(scale * share, dtype=dtype, device=self.device) for share in shares]

    def _moved(self, micro_batches: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        return [[t.to(self.device, non_blocking=True) for t in leaves] for leaves in micro_batches]

    def _resident(self) -> int:
        """Bytes that are always alive here: weights, buffers, gradients, the optimizer's state."""
        return self.store.persistent_bytes() + optimizer_bytes(self.updater.optimizer)

    def _peak(self, division: _Division) -> int:
        if self.device.type != "cpu":
            return int(torch.accelerator.max_memory_allocated(self.device))
        return division.executor.plan.peak_bytes + self._resident()


def optimizer_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of an optimizer's state: what it holds, or, before its first step, what its kind will hold for each
    parameter."""
    if optimizer is None:
        return 0
    if optimizer.state:
        tensors = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        return sum(t.nbytes for t in tensors)
    total = 0
    for group in optimizer.param_groups:
        copies = 2 if "betas" in group else 1 if group.get("momentum") else 0
        copies += bool(group.get("amsgrad"))
        total += copies * sum(p.nbytes for p in group["params"])
    return total


def _joined(result: StepResult, form: Any) -> Any:
    """The model's output for the whole batch: tensor leaves of the micro-batches joined along dimension 0."""
    spec, leaves = form
    flat: list[Any] = []
    number = 0
    for leaf in leaves:
        if leaf is not None:
            flat.append(leaf)
            continue
        parts = [outputs.get(number) for outputs in result.outputs]
        have = [p for p in parts if p is not None]
        flat.append(
            None if len(have) < len(parts) else torch.cat(have) if have[0].dim() else torch.stack(have)
        )
        number += 1
    return compat.tree_unflatten(flat, spec)
