"""pipeloom: a pipeline-parallel compiler and runtime for PyTorch.

One example is the whole tour. On each rank of `torchrun --nproc-per-node 2 train.py`:

    import pipeloom, torch

    strategy = pipeloom.Strategy(pp_degree=2, vpp_degree=2, schedule_mode="ZBV", accumulate_steps=8)
    pipe = pipeloom.compile(model, loss_fn, example=(inputs, targets), strategy=strategy,
                            optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4))
    for inputs, targets in batches:                 # the same batch on every rank
        result = pipe.step(inputs, targets)         # returns at once
        print(float(result.loss))                   # the same number on every rank

What `compile` does, and the room where each part lives:

    strategy/       the options, checked                                            Strategy
    program/        the model and its loss as one joint graph of ATen ops           capture → Program
    passes/         rewrites: random keys, chunk labels, gradient merge, the split
                    into F, B, W and X programs of each chunk                       register_pass
    schedules/      who computes what, in which order: 1F1B, VPP, ZBV, …            schedules.build
    planning/       costs, transfers placed and proven safe, the predicted step     Plan
    planner.py      the one place where passes and planning meet; footprint.py: bytes that programs keep
    proposals/      which plan to take, before any rank is started                  plan
    runtime/        one executor a rank: transports, gradients, update, checkpoints
    fleet/          task nodes with credits: the second runtime, and graphs of one's own        TaskNode, Graph
    api.py          compile, and the Pipeline that it returns                       compile, Pipeline
    report/         console, Perfetto trace, the timeline page
    generation/     text from a model that is cut by stages, many prompts at once   generation.compile
    training/       the GPT that `pipeloom train` trains; prompting/: `pipeloom generate`; cli.py has the commands

`pipe.plan.show()` prints the order that was chosen; `pipe.plan.predicted` and `pipe.measured` say what a step was
thought to cost and what it did. Nothing imports upwards: schedules and planning know no torch, and names here
are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import fleet, generation, schedules
    from .api import Pipeline, compile
    from .passes import Pass, register_pass
    from .planning import Plan, PlanError
    from .program import Program, capture
    from .program.deferred import deferred
    from .proposals import Proposals, plan
    from .runtime.initial import Weights
    from .strategy import Strategy, StrategyError

__all__ = [
    "Pass",
    "Pipeline",
    "Plan",
    "PlanError",
    "Program",
    "Proposals",
    "Strategy",
    "StrategyError",
    "Weights",
    "capture",
    "compile",
    "deferred",
    "fleet",
    "generation",
    "plan",
    "register_pass",
    "schedules",
]

#: PEP 562: name → the room that has it, so that `import pipeloom.schedules` imports no torch
_ROOMS = {
    "Pass": "passes",
    "Pipeline": "api",
    "Plan": "planning",
    "PlanError": "planning",
    "Program": "program",
    "Proposals": "proposals",
    "Strategy": "strategy",
    "StrategyError": "strategy",
    "capture": "program",
    "compile": "api",
    "deferred": "program.deferred",
    "Weights": "runtime.initial",
    "plan": "proposals",
    "register_pass": "passes",
}


def __getattr__(name: str) -> Any:
    if name in ("fleet", "generation", "schedules"):
        return importlib.import_module(f".{name}", __name__)
    if name not in _ROOMS:
        raise AttributeError(f"module 'pipeloom' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(f".{_ROOMS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
