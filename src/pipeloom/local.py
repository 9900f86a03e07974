"""All stages of a pipeline in one process, stepped one after another over an in-memory transport.

    pipe = compile_local(model, loss_fn, example=…, strategy=Strategy(pp_degree=8, …))
    pipe.step(inputs, targets); pipe.gradients()

The same programs, plans and executors as on real ranks, without processes: what a schedule does to gradients at
S 8 can be seen to the bit in a second. Each stage works on a copy of the model; one capture serves all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

import torch
from torch import nn

from .api import Pipeline
from .planner import Planner
from .planning import Plan
from .program import compat
from .program.batch import batch_size, flatten_batch, split_batch
from .program.capture import LossFunction, split_example
from .runtime import checkpoint
from .runtime.export import export
from .runtime.initial import Initial, WeightsSpec
from .runtime.optimizers import OptimizerSpec, SchedulerSpec
from .runtime.replicas import MemoryReplicas, Replicas
from .runtime.result import EvalResult, StepResult
from .runtime.stepping import Work, drive
from .runtime.transport import MemoryTransport
from .schedules.timeline import StepFigures, Timeline
from .strategy import Strategy


def compile_local(
    model: nn.Module,
    loss_fn: LossFunction | None = None,
    *,
    example: Any,
    strategy: Strategy,
    optimizer: OptimizerSpec | None = None,
    scheduler: SchedulerSpec | None = None,
    device: torch.device | str = "cpu",
    replicas: int = 1,
    weights: WeightsSpec | None = None,
) -> LocalPipeline:
    """Like `pipeloom.compile`, for all stages at once. The model itself isn't changed: stages train copies of it.
    replicas: of the pipeline, each for an equal share of the batches (the example is a whole one)."""
    planner = Planner(model, loss_fn, strategy, torch.device(device), replicas=replicas)
    inputs, targets = split_example(example, loss_fn)
    initial = Initial(model, weights, strategy.seed)
    stages = [
        Pipeline(planner, transport, optimizer, scheduler, release=True, replicas=group, initial=initial)
        for transport, group in connected(strategy.pp_degree, replicas)
    ]
    for stage in stages:
        stage.model = copy.deepcopy(model)
    local = LocalPipeline(stages)
    local.on_shards((inputs, targets), lambda stage, *shard: stage.prepare(*shard))
    return local


def connected(stages: int, replicas: int) -> list[tuple[MemoryTransport, Replicas]]:
    """The connections of every rank of `replicas` pipelines of `stages` stages, pipeline by pipeline."""
    size = stages * replicas
    pipelines = [MemoryTransport.group(stages, range(d, d + stages)) for d in range(0, size, stages)]
    groups = [MemoryReplicas.group(replicas, range(s, size, stages)) for s in range(stages)]
    return [(transport, groups[s][d]) for d, pipe in enumerate(pipelines) for s, transport in enumerate(pipe)]


class LocalPipeline:
    """The stages of one pipeline, and of its replicas after them. `stages[s]` is a Pipeline as a rank would have it."""

    def __init__(self, stages: list[Pipeline]) -> None:
        self.stages = stages
        self.first = [stage for stage in stages if stage.replicas.index == 0]

    def each(self, work: Callable[[Pipeline], Work[Any]]) -> list[Any]:
        """Runs the same generator of every stage in turn; the results by stage."""
        with self.stages[0].preserved():
            return drive([work(stage) for stage in self.stages])

    def shards(self, inputs: Any, targets: Any) -> list[tuple[Any, Any]]:
        """Each replica's share of a batch: as torch.tensor_split does, the larger first."""
        count = len(self.stages) // len(self.first)
        if count == 1:
            return [(inputs, targets)]
        leaves, form = flatten_batch(inputs, targets)
        size = batch_size(leaves, form)
        if size < count:
            raise ValueError(f"a batch of {size} samples can't be shared out among {count} replicas")
        small, larger = divmod(size, count)
        found = []
        for part in split_batch(leaves, [small + 1] * larger + [small] * (count - larger)):
            args, kwargs, wanted = form.rebuild(part)
            found.append((kwargs or args, wanted))
        return found

    def on_shards(self, batch: tuple[Any, Any], work: Callable[..., Work[Any]]) -> list[Any]:
        """Runs `work(stage, inputs, targets)` of every stage, on its replica's share of the batch."""
        shards = self.shards(*batch)
        return self.each(lambda stage: work(stage, *shards[stage.replicas.index]))

    @property
    def plan(self) -> Plan:
        return self.stages[0].plan

    @property
    def measured(self) -> StepFigures | None:
        return self.stages[0].measured

    def step(self, inputs: Any, targets: Any = None, *, update: bool = True) -> StepResult:
        batch = (inputs, targets)
        results = self.on_shards(batch, lambda stage, *shard: stage.step_work(*shard, update=update))
        return results[0]  # type: ignore[no-any-return]

    def eval(self, inputs: Any, targets: Any = None, *, outputs: bool = False) -> EvalResult:
        """The outputs are whole: each part from the stage that made it, and the replicas' joined."""
        batch = (inputs, targets)
        results = self.on_shards(batch, lambda stage, *shard: stage.eval_work(*shard, outputs=outputs))
        if outputs:
            flat = [compat.tree_flatten(result.outputs) for result in results]
            stages = len(self.first)
            wholes = [
                [
                    next((leaf for leaf in leaves if leaf is not None), None)
                    for leaves in zip(*(leaves for leaves, _ in flat[d : d + stages]), strict=True)
                ]
                for d in range(0, len(flat), stages)
            ]
            joined = [_joined(parts) for parts in zip(*wholes, strict=True)]
            results[0].outputs = compat.tree_unflatten(joined, flat[0][1])
        return results[0]  # type: ignore[no-any-return]

    def timeline(self) -> Timeline:
        return self.each(lambda stage: stage.timeline_work())[0]  # type: ignore[no-any-return]

    def gradients(self) -> dict[str, torch.Tensor]:
        """All stages' finalized gradients; of a shared parameter, the first holder's."""
        merged: dict[str, torch.Tensor] = {}
        for stage in reversed(self.stages):
            merged.update(stage.gradients())
        return merged

    def save(self, folder: str | PathLike[str]) -> None:
        checkpoint.save(self.first, folder)

    def export(self, folder: str | PathLike[str]) -> None:
        export(self.first, folder)

    def load(self, folder: str | PathLike[str]) -> None:
        checkpoint.load(self.stages, folder)

    def zero_grad(self) -> None:
        for stage in self.stages:
            stage.zero_grad()

    def parameters(self) -> dict[str, torch.Tensor]:
        """All stages' parameters under their first names."""
        merged: dict[str, torch.Tensor] = {}
        for stage in reversed(self.stages):
            names = stage.store.first_name
            merged.update({names[n]: p.detach() for n, p in stage.store.parameters.items()})
        return merged


def _joined(parts: Sequence[Any]) -> Any:
    """A leaf of the model's output, of all replicas."""
    if len(parts) == 1 or not isinstance(parts[0], torch.Tensor):
        return parts[0]
    return torch.cat(list(parts))
