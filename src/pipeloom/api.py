"""compile, and the Pipeline that it gives: one rank's end of a pipeline.

    pipe = pipeloom.compile(model, loss_fn, example=(inputs, targets), strategy=strategy, optimizer=make_optimizer)
    result = pipe.step(inputs, targets)
    print(float(result.loss))

Every rank of a pipeline runs the same lines with the same batch. Inside, a step is a generator that yields where it
waits for another rank (see `runtime.stepping`): over torch.distributed it is run to its end at once; `pipeloom.local`
steps all ranks of one process in turn.
"""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import nn

from .auto import Auto, choose, recompute_to_fit, refine
from .fleet.bus import Bus, connect_bus
from .fleet.executor import FleetExecutor
from .passes.random_keys import key_of, preserved_generators
from .planner import Captured, Planner, digest_of
from .planning import Plan
from .planning.choice import Choice
from .program.batch import BatchForm, batch_size, flatten_batch, shape_key, split_batch
from .program.capture import LossFunction, split_example
from .program.checks import check_surroundings
from .program.subprogram import ProgramSet
from .runtime import agreement, checkpoint, launch
from .runtime.alike import make_alike
from .runtime.compile_jobs import last_backwards
from .runtime.executor import Executor
from .runtime.export import export
from .runtime.failure import FailureWatch
from .runtime.figures import StageFigures, exchange_figures
from .runtime.initial import Initial, WeightsSpec
from .runtime.measure import clock_offsets, measured_timeline
from .runtime.optimizers import (
    OptimizerSpec,
    SchedulerSpec,
    make_optimizer,
    make_scheduler,
    optimizer_bytes,
)
from .runtime.parameters import ParameterStore
from .runtime.replicas import Alone, Replicas, tell
from .runtime.result import EvalResult, StepResult, joined_outputs
from .runtime.stepping import Work, finish
from .runtime.timing import time_together
from .runtime.transport import Transport
from .runtime.update import LossScaler, Updater
from .runtime.weighing import Weighed, weigh
from .schedules.timeline import StepFigures, Timeline
from .strategy import AUTO, Strategy

T = TypeVar("T")

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
    optimizer: OptimizerSpec | None = None,
    scheduler: SchedulerSpec | None = None,
    mesh: Any = None,
    device: torch.device | str | None = None,
    weights: WeightsSpec | None = None,
) -> Pipeline:
    """This rank's end of a pipeline that trains `model`.

    loss_fn(output, targets) gives a 0-dim loss, or (sum, weight); None: the model returns its loss. example:
    (inputs, targets), or inputs where loss_fn is None; its tensors may be meta or `torch.Size`. optimizer: a function
    of this rank's (name, parameter) pairs, a name of torch.optim, or a table like {"name": "AdamW", "lr": 3e-4,
    "groups": {".*bias": {"weight_decay": 0.0}}}; not made on a rank that trains nothing. scheduler: a function of the
    optimizer, or likewise.

    mesh: a DeviceMesh with a dimension "pp"; without one, all ranks of the default process group are the pipeline (one
    is made from torchrun's environment if there is none). pp_degree=1 needs none. A dimension "dp" makes replicas of
    the pipeline: each is given a shard of the batch, and a step is that of one process on the whole batch (see
    docs/replicas.md).

    weights: safetensors files (a folder, a file, several, or a `Weights`) that this rank's tensors are read from. A
    model on the meta device that `deferred` made needs none (see docs/large_models.md).

    A collective call of all ranks of the pipeline and its replicas. The model's parameters that other ranks own are
    released. Raises StrategyError, CaptureError, ProgramError, PlanError, or ValueError, before anything of a step is
    sent.
    """
    inputs, targets = split_example(example, loss_fn)
    place = launch.join(strategy.pp_degree, device, mesh)
    pipe = Pipeline(
        Planner(model, loss_fn, strategy, place.device, replicas=place.replicas.size),
        place.transport,
        optimizer,
        scheduler,
        watch=place.watch,
        replicas=place.replicas,
        initial=Initial(model, weights, strategy.seed),
    )
    pipe.run(pipe.prepare(inputs, targets))
    return pipe


@dataclass
class _Division:
    """What runs one division of a batch into micro-batches."""

    sets: list[ProgramSet]
    plan: Plan
    executor: Executor
    output_form: Any


class Pipeline:
    """One stage of a compiled model: `compile` makes it.

    plan: the plan of the example's batch (`plan.predicted`, `plan.jobs`, `plan.show()`). stage: this rank's. replicas:
    of this stage, `replicas.index` this rank's among them. model: the user's, with this
    rank's parameters. timelines: of the steps in `strategy.profile`.
    """

    def __init__(
        self,
        planner: Planner,
        transport: Transport,
        optimizer: OptimizerSpec | None = None,
        scheduler: SchedulerSpec | None = None,
        *,
        watch: FailureWatch | None = None,
        release: bool | None = None,
        replicas: Replicas | None = None,
        initial: Initial | None = None,
    ) -> None:
        self.planner = planner
        self.strategy = planner.strategy
        self.model = planner.model
        self.transport = transport
        self.replicas: Replicas = replicas or Alone()
        self.watch = watch
        self.stage = transport.rank
        self.device = planner.device
        self.plan: Plan
        self.store: ParameterStore
        self.updater: Updater
        self.steps = 0
        self.timelines: list[Timeline] = []
        self._initial = initial
        self._make_optimizer = optimizer
        self._make_scheduler = scheduler
        self._release = transport.size > 1 if release is None else release
        self._divisions: OrderedDict[Any, _Division] = OrderedDict()
        self._persistent: list[int] = []
        self._reduced: list[int] | None = None
        self._offset = 0.0
        self._last: Executor | None = None
        self.bus: Bus | None = None
        self._figures: StageFigures | None = None

    # ---- the user's calls

    def step(self, inputs: Any, targets: Any = None, *, update: bool = True) -> StepResult:
        """One training step on a batch (the same on every rank): forward, backward, finalize, and the update unless
        update=False; two such steps without an update add up. Returns at once; `result.loss`, `.grad_norm`, `.weight`
        and `.skipped` wait when read."""
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
        """Writes a checkpoint of all ranks: model, optimizer, scheduler, loss scaler and step. A collective call; the
        folder appears whole or not at all."""
        checkpoint.save(self, folder)

    def load(self, folder: str | PathLike[str]) -> None:
        """Reads a checkpoint, saved with any number of stages and chunks. A collective call."""
        checkpoint.load(self, folder)

    def export(self, folder: str | PathLike[str]) -> None:
        """Writes the weights as safetensors under the model's own names, and its config.json: what transformers loads.
        A collective call; each rank writes its own."""
        export(self, folder)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state under the model's own names (torch.distributed.checkpoint's Stateful)."""
        return checkpoint.state_dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        checkpoint.load_state_dict(self, state)

    def close(self) -> None:
        """Gives the connections back. The process group itself stays the user's."""
        if self.bus is not None:
            self.bus.close()
        self.transport.close()
        self.replicas.close()

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
        if strategy.executor == "fleet":
            self.bus = connect_bus(transport)
            if self.watch is not None:
                self.watch.also_closes(self.bus.abort)
        leads = transport.rank == self.replicas.index == 0
        first = split_batch(leaves, sizes)[0]
        auto = None
        if leads and (strategy.schedule_mode == AUTO or strategy.chooses_recompute):
            auto = Auto(planner, first, form)
        if strategy.schedule_mode == AUTO:
            chosen = None if auto is None else choose(auto, len(sizes)).to_json()
            planner.choose(Choice.from_json((yield from self._told(chosen))))
        programs = planner.captured(first, form, training=True).programs
        yield from self._compare(
            "program",
            f"schedule {strategy.schedule_name}, {strategy.pp_degree} stages × {strategy.vpp_degree} chunks, "
            f"micro-batches {sizes}, "
            f"leaves {[tuple(t.shape) for t in leaves]}, programs {digest_of([programs])[:16]}",
        )
        placement = planner.placement
        self.store = ParameterStore(
            self.model, programs, placement, self.stage, self.device, self._release, self._initial
        )
        self._initial = None  # it holds on to the model as it was
        yield from make_alike(self.store, transport, self.replicas)
        if strategy.costs == "measured":
            yield from self._measure(programs, placement, first)
        self._make_updater()
        resident = yield from agreement.gather(transport, [float(self._resident())])
        self._persistent = [int(r[0]) for r in resident]
        if strategy.schedule_mode == AUTO:
            refined = None
            if auto is not None:
                refined = refine(auto, programs, len(sizes), self._persistent).to_json()
            planner.choose(Choice.from_json((yield from self._told(refined))))
        elif strategy.chooses_recompute:
            again = None
            if auto is not None:
                again = json.dumps(recompute_to_fit(auto, programs, len(sizes), self._persistent))
            planner.recomputes(json.loads((yield from self._told(again))))
        fitted = planner.captured(first, form, training=True).programs
        if fitted is not programs and strategy.costs == "measured":
            yield from self._measure(fitted, placement, first)
        division = self._division(leaves, form, sizes, training=True)
        self.plan = division.plan
        yield from self._compare("plan", f"{self.plan.schedule} {self.plan.digest()[:32]}")
        self._offset = yield from clock_offsets(transport)

    def step_work(self, inputs: Any, targets: Any = None, *, update: bool = True) -> Work[StepResult]:
        check_surroundings(self.device)
        leaves, form = flatten_batch(inputs, targets)
        sizes = self.strategy.micro_batches(batch_size(leaves, form))
        return self._step(leaves, sizes, self._division(leaves, form, sizes, training=True), update)

    def _step(
        self, leaves: list[torch.Tensor], sizes: list[int], division: _Division, update: bool
    ) -> Work[StepResult]:
        yield from agreement.compare_batches(self.transport, leaves)
        scale = self.updater.scaler.scale if self.updater.scaler is not None else 1.0
        weighed = yield from self._weighed(division, leaves, sizes, update=update)
        result = yield from division.executor.run(
            weighed.batch,
            self._tangents(division.sets[0], weighed, scale),
            self._keys(weighed, self.steps),
            weights=weighed.weights,
            total=weighed.total,
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
        check_surroundings(self.device)
        leaves, form = flatten_batch(inputs, targets)
        sizes = self.strategy.micro_batches(batch_size(leaves, form))
        return self._eval(leaves, sizes, self._division(leaves, form, sizes, training=False), outputs)

    def _eval(
        self, leaves: list[torch.Tensor], sizes: list[int], division: _Division, outputs: bool
    ) -> Work[EvalResult]:
        yield from agreement.compare_batches(self.transport, leaves)
        weighed = yield from self._weighed(division, leaves, sizes, update=False)
        result = yield from division.executor.run(
            weighed.batch,
            [torch.zeros(())] * len(sizes),
            self._keys(weighed, _EVALUATION + self.steps),
            weights=weighed.weights,
            total=weighed.total,
        )
        return EvalResult(result, joined_outputs(result, division.output_form) if outputs else None)

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

    def _told(self, text: str | None) -> Work[str]:
        """The first rank's text, on every rank of every replica."""
        told = yield from agreement.tell(self.transport, text)
        return (yield from tell(self.replicas, told))

    def _compare(self, what: str, line: str) -> Work[None]:
        yield from agreement.compare(self.transport, what, line)
        yield from agreement.compare_replicas(self.replicas, what, line)

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
            if self._reduced is None:
                mine = last_backwards(plan.jobs[self.stage]) if self.replicas.size > 1 else []
                self._reduced = [chunk for chunk in mine if self.store.summed(chunk)]
            executor = self._executor(plan, sets, self._reduced, training=training)
            self._divisions[key] = _Division(sets, plan, executor, captured[0].output_form)
            if len(self._divisions) > EXECUTORS:
                self._divisions.popitem(last=False)
        self._divisions.move_to_end(key)
        return self._divisions[key]

    def _executor(
        self, plan: Plan, sets: Sequence[ProgramSet], reduced: Sequence[int], *, training: bool
    ) -> Executor:
        options: dict[str, Any] = {
            "updater": self.updater if training else None,
            "average": self.strategy.gradient_merge == "average",
            "replicas": self.replicas,
            "reduced": reduced if training else (),
        }
        if self.bus is not None:
            options.update(bus=self.bus, schedule=self.strategy.named_schedule)
            make: type[Executor] = FleetExecutor
        else:
            options.update(overlap=self.strategy.enable_send_recv_overlap, lists=plan.jobs)
            make = Executor
        jobs = plan.jobs[self.stage]
        return make(self.stage, jobs, sets, plan.placement, self.store, self.transport, **options)

    def _measure(
        self, programs: ProgramSet, placement: Sequence[int], leaves: Sequence[torch.Tensor]
    ) -> Work[None]:
        """Times this stage's programs; every rank plans with the same seconds."""
        chunks = [c for c, stage in enumerate(placement) if stage == self.stage]
        known, reductions = yield from time_together(
            self.store, programs, chunks, leaves, self.transport, self.replicas, self.preserved
        )
        self.planner.learn(known, programs)
        self.planner.measured.reduce = reductions

    def _make_updater(self) -> None:
        pairs = self.store.trainable()
        optimizer = scheduler = None
        if self._make_optimizer is not None and pairs:
            optimizer = make_optimizer(self._make_optimizer, pairs, self.store.trained)
        if self._make_scheduler is not None and optimizer is not None:
            scheduler = make_scheduler(self._make_scheduler, optimizer)
        scale = self.strategy.loss_scale
        scaler = None
        if scale is not None:
            scaler = LossScaler() if scale == "dynamic" else LossScaler(float(scale), dynamic=False)
        self.updater = Updater(
            self.store,
            self.transport,
            optimizer,
            scheduler,
            scaler,
            self.strategy.max_norm,
            schedules_later=self.bus is not None,
        )

    def _tangents(self, programs: ProgramSet, weighed: Weighed, scale: float) -> list[torch.Tensor]:
        """The seeds of the backward: each micro-batch's share of the batch where weights are known, times the loss
        scale."""
        shares = [1.0] * len(weighed.batch)
        if weighed.weights is not None and self.strategy.gradient_merge == "average":
            shares = [w / (weighed.total or 1.0) for w in weighed.weights]
        dtype = programs.values[programs.loss].dtype
        return [torch.tensor(scale * share, dtype=dtype, device=self.device) for share in shares]

    def _keys(self, weighed: Weighed, step: int) -> list[torch.Tensor]:
        return [key_of(self.strategy.seed, step, weighed.first + m) for m in range(len(weighed.batch))]

    def _weighed(
        self, division: _Division, leaves: list[torch.Tensor], sizes: list[int], *, update: bool
    ) -> Work[Weighed]:
        batch = self._moved(split_batch(leaves, sizes))
        of = [s.means for s in division.sets]
        has_weight = division.sets[0].weight is not None
        average = self.strategy.gradient_merge == "average"
        return weigh(self.replicas, batch, sizes, of, has_weight=has_weight, average=average, update=update)

    def _moved(self, micro_batches: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        return [[t.to(self.device, non_blocking=True) for t in leaves] for leaves in micro_batches]

    def _resident(self) -> int:
        """Bytes that are always alive here: weights, buffers, gradients, the optimizer's state."""
        return self.store.persistent_bytes() + optimizer_bytes(self.updater.bare_optimizer)

    def _peak(self, division: _Division) -> int:
        if self.device.type != "cpu":
            return int(torch.accelerator.max_memory_allocated(self.device))
        return division.executor.peak_bytes + self._resident()
