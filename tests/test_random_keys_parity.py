"""Dropout: a mask is decided by (seed, step, micro-batch, draw), whatever the schedule, the cut and the number of
stages; and eager PyTorch under the keyed oracle draws the same."""

from __future__ import annotations

import functools

import pytest
import torch

from models import GPT, cross_entropy
from parity import DEEP, Deep, Outcome, eager_outcome, made, pipe_outcome, pipeline, text
from pipeloom.local import compile_local
from pipeloom.strategy import Strategy

SAMPLES = 2
MICRO_BATCHES = (1, 3, 4)

SHAPES = [
    ("FThenB", 2, 1, False),
    ("FThenB", 3, 3, False),
    ("1F1B", 2, 1, False),
    ("1F1B", 8, 1, True),
    ("Eager1F1B", 3, 1, False),
    ("VPP", 2, 2, False),
    ("VPP", 4, 3, True),
    ("ZBH1", 4, 1, True),
    ("ZBH2", 2, 1, True),
    ("ZBV", 1, 2, True),
    ("ZBV", 4, 2, True),
    ("InterleavedZeroBubble", 2, 3, True),
]

CASES = {
    "chain": DEEP["dropout"],
    "gpt": lambda: Deep(GPT(layers=2, dropout=0.2, tied=True), cross_entropy, text),
    "checkpointed": lambda: Deep(GPT(layers=2, dropout=0.2, checkpointing=False), cross_entropy, text),
}


@functools.cache
def case_of(model: str) -> Deep:
    return made(CASES[model])  # type: ignore[no-any-return]


def outcomes(model: str, strategy: Strategy) -> list[Outcome]:
    """Of three steps of 1, 3 and 4 micro-batches; the step counts, so the order matters."""
    case = case_of(model)
    pipe = pipeline(case, strategy, case.batch(SAMPLES))
    return [pipe_outcome(pipe, case.batch(SAMPLES * count)) for count in MICRO_BATCHES]


@functools.cache
def one_stage(model: str) -> list[Outcome]:
    return outcomes(model, Strategy(micro_batch_size=SAMPLES, costs="roofline", seed=7))


@pytest.mark.parametrize(("schedule", "stages", "chunks", "split"), SHAPES)
@pytest.mark.parametrize("model", CASES)
def test_every_plan_draws_the_same_masks(
    model: str, schedule: str, stages: int, chunks: int, split: bool
) -> None:
    strategy = Strategy(
        pp_degree=stages,
        vpp_degree=chunks,
        schedule_mode=schedule,
        split_backward=split,
        micro_batch_size=SAMPLES,
        costs="roofline",
        seed=7,
    )
    for count, outcome, expected in zip(
        MICRO_BATCHES, outcomes(model, strategy), one_stage(model), strict=True
    ):
        assert not outcome.differences(expected), f"M {count}"


@pytest.mark.parametrize("model", CASES)
def test_the_masks_are_those_of_eager_pytorch(model: str) -> None:
    case = case_of(model)
    for step, (count, outcome) in enumerate(zip(MICRO_BATCHES, one_stage(model), strict=True)):
        reference = eager_outcome(case, case.batch(SAMPLES * count), [SAMPLES] * count, seed=7, step=step)
        assert torch.equal(outcome.losses, reference.losses), f"M {count}"
        assert outcome.error(reference) <= 1e-5, f"M {count}"


@pytest.mark.parametrize("costs", ["roofline", "measured"])
def test_the_callers_random_state_is_untouched(costs: str) -> None:
    case = case_of("chain")
    before = torch.get_rng_state()
    pipe = compile_local(
        case.model,
        case.loss_fn,
        example=case.batch(4),
        strategy=Strategy(pp_degree=2, accumulate_steps=2, costs=costs),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
    assert torch.equal(torch.get_rng_state(), before), "compile"
    pipe.step(*case.batch(4))
    assert torch.equal(torch.get_rng_state(), before), "step"
    pipe.eval(*case.batch(4), outputs=True)
    assert torch.equal(torch.get_rng_state(), before), "eval"


def losses_of(seed: int, user_seed: int = 0, steps: int = 2) -> list[torch.Tensor]:
    case = case_of("chain")
    strategy = Strategy(pp_degree=2, micro_batch_size=SAMPLES, costs="roofline", seed=seed)
    pipe = pipeline(case, strategy, case.batch(SAMPLES))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(user_seed)
        return [pipe.step(*case.batch(4), update=False).losses for _ in range(steps)]


def test_a_seed_decides_the_masks_and_the_callers_generator_does_not() -> None:
    first, again = losses_of(3), losses_of(3, user_seed=5)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other = losses_of(4)
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_each_step_and_each_micro_batch_has_its_own_masks() -> None:
    first, second = losses_of(3)
    assert not torch.equal(first, second)
    case = case_of("chain")
    inputs, targets = case.batch(1)
    strategy = Strategy(pp_degree=2, accumulate_steps=2, costs="roofline")
    batch = (inputs.expand(2, -1).contiguous(), targets.expand(2, -1).contiguous())
    losses = pipeline(case, strategy, batch).step(*batch, update=False).losses
    assert losses[0] != losses[1]


def test_evaluation_draws_nothing_and_moves_no_mask() -> None:
    case = case_of("chain")
    strategy = Strategy(pp_degree=2, micro_batch_size=SAMPLES, costs="roofline")
    plain, mixed = (pipeline(case, strategy, case.batch(SAMPLES)) for _ in range(2))
    losses = []
    for _ in range(2):
        losses.append(mixed.eval(*case.batch(6)).loss)
        assert not pipe_outcome(mixed, case.batch(4)).differences(pipe_outcome(plain, case.batch(4)))
    assert torch.equal(losses[0], losses[1])
