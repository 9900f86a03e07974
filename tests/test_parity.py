"""The promise: whatever the schedule, the number of stages, chunks and micro-batches, a step's loss and gradients are
those of one stage to the bit, and those are eager PyTorch's.

Four models, each with one difficulty of cutting: none, weights tied across the ends, a skip over all chunks, a module
that runs in the first and in the last chunk.
"""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Iterator

import pytest
import torch

from parity import Deep, Outcome, deep, eager_outcome, pipe_outcome, pipeline
from pipeloom.local import LocalPipeline
from pipeloom.schedules.catalogue import CATALOGUE
from pipeloom.strategy import Strategy

MODELS = ("chain", "tied", "skip", "twice")
STAGES = (1, 2, 3, 4, 8)
MICRO_BATCHES = (1, 2, 3, 4, 8, 9)
SAMPLES = 2  # in a micro-batch, so that one capture serves every number of them


#: with split backwards by choice, for these numbers of chunks a stage
SPLIT = {"FThenB": (1,), "1F1B": (1,), "VPP": (1, 2, 3)}


def variants() -> list[tuple[str, int, bool]]:
    """(schedule, chunks a stage, split backward): all that the catalogue builds, with up to three chunks a stage."""
    found = []
    for name, entry in CATALOGUE.items():
        for chunks in (entry.chunks,) if entry.chunks else (1, 2, 3):
            found.append((name, chunks, entry.splits))
            if chunks in SPLIT.get(name, ()):
                found.append((name, chunks, True))
    return found


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    """The garbage collector walks every captured graph again and again: a fifth of the time of these tests."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@functools.cache
def case_of(model: str) -> Deep:
    return deep(model)


@functools.cache
def one_stage(model: str, micro_batches: int) -> Outcome:
    """Our own programs run by one stage, uncut."""
    case = case_of(model)
    pipe = pipeline(case, Strategy(micro_batch_size=SAMPLES, costs="roofline"), case.batch(SAMPLES))
    return pipe_outcome(pipe, case.batch(SAMPLES * micro_batches))


@pytest.mark.parametrize(("schedule", "chunks", "split"), variants())
@pytest.mark.parametrize("model", MODELS)
def test_every_plan_is_bit_equal_to_one_stage(model: str, schedule: str, chunks: int, split: bool) -> None:
    case = case_of(model)
    for stages in STAGES:
        strategy = Strategy(
            pp_degree=stages,
            vpp_degree=chunks,
            schedule_mode=schedule,
            split_backward=split,
            micro_batch_size=SAMPLES,
            costs="roofline",
        )
        pipe = pipeline(case, strategy, case.batch(SAMPLES))
        assert pipe.plan.chunks == chunks
        assert pipe.plan.stages == stages
        for micro_batches in MICRO_BATCHES:
            outcome = pipe_outcome(pipe, case.batch(SAMPLES * micro_batches))
            different = outcome.differences(one_stage(model, micro_batches))
            assert not different, f"S {stages}, M {micro_batches}: {different}"


@pytest.mark.parametrize(("precision", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("model", MODELS)
def test_one_stage_is_eager_pytorch(model: str, precision: torch.dtype, bound: float) -> None:
    case = case_of(model)
    if precision == torch.float64:
        case = case.double()
    pipe = pipeline(case, Strategy(micro_batch_size=SAMPLES, costs="roofline"), case.batch(SAMPLES))
    for micro_batches in MICRO_BATCHES:
        batch = case.batch(SAMPLES * micro_batches)
        reference = eager_outcome(case, batch, [SAMPLES] * micro_batches)
        assert pipe_outcome(pipe, batch).error(reference) <= bound, f"M {micro_batches}"


#: (schedule, S, V, split backward)
CHOSEN = (
    ("1F1B", 2, 1, False),
    ("Eager1F1B", 2, 1, False),
    ("ZBH1", 4, 1, True),
    ("ZBH2", 3, 1, True),
    ("VPP", 3, 2, False),
    ("ZBV", 2, 2, True),
    ("InterleavedZeroBubble", 4, 2, True),
    ("FThenB", 8, 3, True),
)


def ten_steps(model: str, strategy: Strategy) -> tuple[dict[str, torch.Tensor], torch.Tensor, LocalPipeline]:
    """Weights and (loss, gradient norm) of ten clipped AdamW steps, on ten batches of which each third is smaller."""
    case = case_of(model)
    pipe = pipeline(
        case,
        strategy,
        case.batch(SAMPLES),
        lambda named: torch.optim.AdamW(named, lr=1e-2, weight_decay=0.1),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5),
    )
    results = [pipe.step(*case.batch(SAMPLES * (2 if i % 3 == 2 else 4), seed=i)) for i in range(10)]
    figures = torch.stack([torch.stack([r.loss.double(), r.grad_norm]) for r in results])
    return {n: p.clone() for n, p in pipe.parameters().items()}, figures, pipe


@functools.cache
def ten_steps_of_one_stage(model: str, max_norm: float) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    strategy = Strategy(micro_batch_size=SAMPLES, costs="roofline", max_norm=max_norm)
    return ten_steps(model, strategy)[:2]


MAX_NORM = 0.3


@pytest.mark.parametrize(("schedule", "stages", "chunks", "split"), CHOSEN)
@pytest.mark.parametrize("model", ["tied", "twice"])
def test_ten_steps_end_in_the_same_weights(
    model: str, schedule: str, stages: int, chunks: int, split: bool
) -> None:
    strategy = Strategy(
        pp_degree=stages,
        vpp_degree=chunks,
        schedule_mode=schedule,
        split_backward=split,
        micro_batch_size=SAMPLES,
        costs="roofline",
        max_norm=MAX_NORM,
    )
    weights, figures, pipe = ten_steps(model, strategy)
    expected, expected_figures = ten_steps_of_one_stage(model, MAX_NORM)
    assert set(weights) == set(expected)
    assert torch.equal(figures, expected_figures)
    assert [n for n, w in weights.items() if not torch.equal(w, expected[n])] == []
    for stage in pipe.stages:  # every holder of a shared weight has the same copy
        for name, parameter in stage.store.parameters.items():
            assert torch.equal(parameter, expected[stage.store.first_name[name]]), (stage.stage, name)


@pytest.mark.parametrize("model", ["tied", "twice"])
def test_ten_steps_of_one_stage_are_those_of_eager_pytorch(model: str) -> None:
    case = case_of(model)
    trained = copy.deepcopy(case.model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    norms = []
    for i in range(10):
        inputs, targets = case.batch(SAMPLES * (2 if i % 3 == 2 else 4), seed=i)
        optimizer.zero_grad()
        case.loss_fn(trained(inputs), targets).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained.parameters(), MAX_NORM))
        optimizer.step()
        scheduler.step()
    weights, figures = ten_steps_of_one_stage(model, MAX_NORM)
    assert max(norms) > MAX_NORM, "nothing was clipped"
    torch.testing.assert_close(figures[:, 1].float(), torch.stack(norms), rtol=1e-4, atol=0)
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-3, atol=1e-4)
