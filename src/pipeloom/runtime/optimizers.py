"""Optimizers and schedulers by name, and parameter groups by the names of parameters.

    optimizer="AdamW"
    optimizer={"name": "AdamW", "lr": 3e-4, "groups": {r".*(bias|norm).*": {"weight_decay": 0.0}}}
    scheduler={"name": "CosineAnnealingLR", "T_max": 1000}

A table like that can stand in a run's TOML file, and means the same on every rank: each has all groups, in one order,
and in each the parameters that it trains itself, so that a scheduler or a checkpoint finds the same groups everywhere.
What needs more than the gradients of a rank's own parameters can't run in a pipeline, and is refused here.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

Named = Iterable[tuple[str, nn.Parameter]]
MakeOptimizer = Callable[[Named], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]
#: what `compile` takes: a function, a name, or a table with a name and options
OptimizerSpec = MakeOptimizer | str | Mapping[str, Any]
SchedulerSpec = MakeScheduler | str | Mapping[str, Any]


class OptimizerError(ValueError):
    """An optimizer or scheduler that can't be made, or can't run in a pipeline."""


def make_optimizer(wanted: OptimizerSpec, named: Named, trained: Collection[str]) -> torch.optim.Optimizer:
    """The optimizer of one rank.

    wanted: a function of (name, parameter) pairs, the name of a class of torch.optim, or a table with such a `name`,
    options, and `groups`: {regular expression: options}; a parameter is in the first group whose expression matches
    its whole name. named: the pairs of this rank. trained: names of all trained parameters of the model. Raises
    OptimizerError.
    """
    if callable(wanted):
        made = wanted(iter(named))
    else:
        cls, options = _class(wanted, "optimizer", torch.optim, torch.optim.Optimizer)
        groups = options.pop("groups", None)
        params = list(named) if groups is None else _grouped(groups, list(named), trained)
        made = _called(cls, "optimizer", (params,), options)
    if not isinstance(made, torch.optim.Optimizer):
        raise OptimizerError(
            f"the optimizer function returned {type(made).__name__}: it must return a torch.optim.Optimizer"
        )
    if _needs_arguments(made.step):
        raise OptimizerError(
            f"the optimizer {type(made).__name__} evaluates the loss again inside its step (a closure), which a "
            "pipeline can't: use one that needs gradients alone, like AdamW"
        )
    return made


def make_scheduler(wanted: SchedulerSpec, optimizer: torch.optim.Optimizer) -> Any:
    """The learning-rate scheduler of one rank: of a function, a name of torch.optim.lr_scheduler, or a table with one.
    Raises OptimizerError."""
    if callable(wanted):
        made = wanted(optimizer)
    else:
        schedulers = torch.optim.lr_scheduler
        cls, options = _class(wanted, "scheduler", schedulers, schedulers.LRScheduler)
        made = _called(cls, "scheduler", (optimizer,), options)
    if _needs_arguments(made.step):
        raise OptimizerError(
            f"the scheduler {type(made).__name__} needs a figure at each step, which isn't known when the update runs: "
            "leave scheduler out, make it of pipe.optimizer, and call its step(float(result.loss)) after each step; "
            "the loss is the same on every rank"
        )
    return made


def _class(
    wanted: str | Mapping[str, Any], what: str, room: Any, base: type
) -> tuple[Callable[..., Any], dict[str, Any]]:
    options = {"name": wanted} if isinstance(wanted, str) else dict(wanted)
    name = options.pop("name", None)
    known = {
        n: c for n, c in vars(room).items() if isinstance(c, type) and issubclass(c, base) and c is not base
    }
    if not isinstance(name, str) or name not in known:
        close = difflib.get_close_matches(str(name or ""), known, 1, 0.5)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(known))}"
        said = "has no name" if name is None else f"names {name!r}, which {room.__name__} doesn't have"
        raise OptimizerError(f"{what} {said}: {hint}")
    return known[name], options


def _called(cls: Callable[..., Any], what: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    try:
        return cls(*args, **options)
    except (TypeError, ValueError) as error:
        name = getattr(cls, "__name__", "?")
        raise OptimizerError(f"{what} {name} can't be made with {options}: {error}") from error


def _grouped(
    groups: Mapping[str, Mapping[str, Any]], named: list[tuple[str, nn.Parameter]], trained: Collection[str]
) -> list[dict[str, Any]]:
    """A group for the parameters that no expression matches, then one for each expression; some may be empty here."""
    expressions = []
    for text, options in groups.items():
        if not isinstance(options, Mapping):
            raise OptimizerError(
                f"optimizer group {text!r} is {options!r}: give it options, like {{'lr': 1e-4}}"
            )
        try:
            expressions.append((re.compile(text), dict(options)))
        except re.error as error:
            raise OptimizerError(f"optimizer group {text!r} is no regular expression: {error}") from error
    rest = set(trained)
    for expression, _ in expressions:
        mine = {name for name in rest if expression.fullmatch(name)}
        if not mine:
            some = ", ".join(sorted(rest)[:4]) or "none is left"
            raise OptimizerError(
                f"optimizer group {expression.pattern!r} matches no parameter in full that an earlier group hasn't "
                f"taken (left are {some}{' …' if len(rest) > 4 else ''}): loosen the expression, or drop the group"
            )
        rest -= mine
    found: list[dict[str, Any]] = [{"params": []}, *({"params": [], **options} for _, options in expressions)]
    for pair in named:
        number = next((i for i, (e, _) in enumerate(expressions, 1) if e.fullmatch(pair[0])), 0)
        found[number]["params"].append(
            pair[1]
        )  # without its name: torch wants all groups alike, and some may be empty
    return found


def _needs_arguments(step: Callable[..., Any]) -> bool:
    """Whether a step can't be called without arguments."""
    parameters = inspect.signature(step).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is p.empty and p.kind not in kinds for p in parameters)


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
