"""Optimizers and schedulers by name, groups by pattern, and what can't run in a pipeline."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import models
from parity import Deep, dense, made, pipeline
from pipeloom.local import LocalPipeline
from pipeloom.runtime.optimizers import OptimizerError
from pipeloom.strategy import Strategy

GROUPS = {
    "name": "AdamW",
    "lr": 1e-2,
    "groups": {r".*\.bias": {"weight_decay": 0.0, "lr": 2e-2}, r"layers\.[23]\..*": {"lr": 3e-2}},
}


@functools.cache
def case_of() -> Deep:
    return made(lambda: Deep(models.Chain(), F.mse_loss, dense))  # type: ignore[no-any-return]


def piped(optimizer: Any, scheduler: Any = None, stages: int = 2) -> LocalPipeline:
    strategy = Strategy(pp_degree=stages, accumulate_steps=2, costs="roofline")
    return pipeline(case_of(), strategy, case_of().batch(4), optimizer, scheduler)


def trained(pipe: LocalPipeline) -> dict[str, torch.Tensor]:
    for seed in range(3):
        pipe.step(*case_of().batch(4, seed=seed))
    return pipe.parameters()


def test_a_name_is_the_function() -> None:
    by_name = trained(piped({"name": "SGD", "lr": 0.1, "momentum": 0.9}, {"name": "StepLR", "step_size": 1}))
    by_function = trained(
        piped(
            lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
            lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        )
    )
    assert all(torch.equal(p, by_function[n]) for n, p in by_name.items())
    assert type(piped("AdamW").stages[0].optimizer) is torch.optim.AdamW


def test_groups_by_pattern_are_those_of_one_process() -> None:
    model = case_of()
    alone = trained(piped(GROUPS, stages=1))
    pipe = piped(GROUPS, {"name": "LambdaLR", "lr_lambda": [lambda _: 1.0] * 3})
    assert all(torch.equal(p, alone[n]) for n, p in trained(pipe).items())
    for stage in pipe.stages:
        optimizer = stage.optimizer
        assert optimizer is not None
        assert [g["lr"] for g in optimizer.param_groups] == [1e-2, 2e-2, 3e-2]
        assert optimizer.param_groups[1]["weight_decay"] == 0
    names = {n for stage in pipe.stages for n, _ in stage.store.trainable()}
    assert names == {n for n, _ in model.model.named_parameters()}


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("Adamw", "optimizer names 'Adamw', which torch.optim doesn't have: did you mean Adam"),
        ({"lr": 1e-3}, "optimizer has no name: there are .*AdamW"),
        ({"name": "SGD", "lr": -1}, r"optimizer SGD can't be made with \{'lr': -1\}: Invalid learning rate"),
        ({"name": "SGD", "rate": 1}, "optimizer SGD can't be made with .*unexpected keyword argument 'rate'"),
        ({"name": "SGD", "groups": {"(": {}}}, r"optimizer group '\(' is no regular expression"),
        ({"name": "SGD", "groups": {".*": 1e-3}}, r"optimizer group '\.\*' is 0.001: give it options"),
        (
            {"name": "SGD", "groups": {"blocks.*": {}}},
            r"optimizer group 'blocks.\*' matches no parameter in full .*left are layers.0.bias",
        ),
        (lambda named: list(named), "the optimizer function returned list"),
        ("LBFGS", r"the optimizer LBFGS evaluates the loss again inside its step \(a closure\)"),
    ],
)
def test_what_is_no_optimizer(optimizer: Any, message: str) -> None:
    with pytest.raises(OptimizerError, match=message):
        piped(optimizer)


def test_a_scheduler_that_needs_a_figure() -> None:
    with pytest.raises(OptimizerError, match=re.escape("call its step(float(result.loss)) after each step")):
        piped("SGD", "ReduceLROnPlateau")
    pipe = piped("SGD")
    optimizer = pipe.stages[0].optimizer
    assert optimizer is not None
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(3):
        scheduler.step(float(pipe.step(*case_of().batch(4)).loss) * 0 + 1)
    assert optimizer.param_groups[0]["lr"] < 1e-3
