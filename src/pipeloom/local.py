"""All stages of a pipeline in one process, stepped one after another over an in-memory transport.

    pipe = compile_local(model, loss_fn, example=…, strategy=Strategy(pp_degree=8, …))
    pipe.step(inputs, targets); pipe.gradients()

The same programs, plans and executors as on real ranks, without processes: what a schedule does to gradients at
S 8 can be seen to the bit in a second. Each stage works on a copy of the model; one capture serves all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from os import PathLike
from typing import Any

import torch
from torch import nn

from .api import EvalResult, MakeOptimizer, MakeScheduler, Pipeline
from .planner import Planner
from .planning import Plan
from .program import compat
from .program.capture import LossFunction, split_example
from .runtime import checkpoint
from .runtime.result import StepResult
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
    optimizer: MakeOptimizer | None = None,
    scheduler: MakeScheduler | None = None,
    device: torch.device | str = "cpu",
) -> LocalPipeline:
    """Like `pipeloom.compile`, for all stages at once. The model itself isn't changed: stages train copies of it."""
    planner = Planner(model, loss_fn, strategy, torch.device(device))
    inputs, targets = split_example(example, loss_fn)
    stages = []
    for transport in MemoryTransport.group(strategy.pp_degree):
        stage = Pipeline(planner, transport, optimizer, scheduler, release=True)
        stage.model = copy.deepcopy(model)
        stages.append(stage)
    local = LocalPipeline(stages)
    local.each(lambda stage: stage.prepare(inputs, targets))
    return local


class LocalPipeline:
    """The stages of one pipeline. `stages[s]` is a Pipeline as a rank would have it."""

    def __init__(self, stages: list[Pipeline]) -> None:
        self.stages = stages

    def each(self, work: Callable[[Pipeline], Work[Any]]) -> list[Any]:
        """Runs the same generator of every stage in turn; the results by stage."""
        with self.stages[0].preserved():
            return drive([work(stage) for stage in self.stages])

    @property
    def plan(self) -> Plan:
        return self.stages[0].plan

    @property
    def measured(self) -> StepFigures | None:
        return self.stages[0].measured

    def step(self, inputs: Any, targets: Any = None, *, update: bool = True) -> StepResult:
        results = self.each(lambda stage: stage.step_work(inputs, targets, update=update))
        return results[0]  # type: ignore[no-any-return]

    def eval(self, inputs: Any, targets: Any = None, *, outputs: bool = False) -> EvalResult:
        """The outputs are whole: each part from the stage that made it."""
        results = self.each(lambda stage: stage.eval_work(inputs, targets, outputs=outputs))
        if outputs:
            flat = [compat.tree_flatten(result.outputs) for result in results]
            parts = zip(*(leaves for leaves, _ in flat), strict=True)
            whole = [next((leaf for leaf in leaves if leaf is not None), None) for leaves in parts]
            results[0].outputs = compat.tree_unflatten(whole, flat[0][1])
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
        checkpoint.save(self.stages, folder)

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
