"""Every kind of model (kinds.py, sequence_kinds.py), cut and piped: bit-equal to one stage, right by eager PyTorch in
float64, and the same in evaluation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import sequence_kinds  # noqa: F401 - registers more of them
from kinds import KINDS, SLOW, kind
from parity import Deep, Outcome, eager_outcome, pipe_outcome, pipeline
from pipeloom.program.batch import flatten_batch, split_batch
from pipeloom.strategy import Strategy

PLANS = (("1F1B", 3, 1), ("ZBV", 2, 2))
SAMPLES, SIZES = 6, [2, 2, 2]
#: draw in evaluation too
DRAWS = {"draws"}


def strategy_of(schedule: str, stages: int, chunks: int) -> Strategy:
    return Strategy(
        schedule_mode=schedule,
        pp_degree=stages,
        vpp_degree=chunks,
        costs="roofline",
        accumulate_steps=len(SIZES),
    )


def evaluated(case: Deep, model: torch.nn.Module, batch: Any) -> float:
    """Eager PyTorch's mean loss over micro-batches in evaluation."""
    leaves, form = flatten_batch(*batch)
    total = 0.0
    with torch.no_grad():
        for piece in split_batch(leaves, SIZES):
            args, kwargs, targets = form.rebuild(piece)
            total += float(case.loss_fn(model(*args, **kwargs), targets)) / len(SIZES)
    return total


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow, pytest.mark.nightly] if n in SLOW else ()) for n in KINDS],
)
def test_a_kind_is_eager_pytorch(name: str) -> None:
    case = kind(name)
    batch = case.batch(SAMPLES)
    trained = copy.deepcopy(case.model)
    reference = eager_outcome(case, batch, SIZES, model=trained)
    first: Outcome | None = None
    for plan in (("1F1B", 1, 1), *PLANS):
        pipe = pipeline(case, strategy_of(*plan), batch)
        outcome = pipe_outcome(pipe, batch)
        outcome.gradients = {
            n: g for n, g in outcome.gradients.items() if n in reference.gradients or g.any()
        }
        assert outcome.error(reference) <= 1e-9, plan
        first = first or outcome
        assert not outcome.differences(first), plan
        buffers = {n: b for stage in pipe.stages for n, b in stage.store.buffers.items()}
        for buffer, value in trained.named_buffers():
            torch.testing.assert_close(buffers[buffer], value, rtol=1e-10, atol=1e-12)
        if name not in DRAWS:
            expected = evaluated(case, copy.deepcopy(trained).eval(), batch)
            assert float(pipe.eval(*batch).loss) == pytest.approx(expected, rel=1e-10, abs=1e-12), plan
