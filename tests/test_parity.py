"""The promise: whatever the schedule, the number of stages, chunks and micro-batches, a step's loss and gradients are
those of one stage to the bit, and those are eager PyTorch's.

Four models, each with one difficulty of cutting: none, weights tied across the ends, a skip over all chunks, a module
that runs in the first and in the last chunk.
"""

from __future__ import annotations

import functools

import pytest
import torch
from parity import Deep, Outcome, deep, eager_outcome, pipe_outcome, pipeline

from pipeloom.schedules.catalogue import CATALOGUE
from pipeloom.strategy import Strategy

MODELS = ("chain", "tied", "skip", "twice")
STAGES = (1, 2, 3, 4, 8)
MICRO_BATCHES = (1, 2, 3, 4, 8, 9)
SAMPLES = 2  # in a micro-batch, so that one capture serves every number of them


def variants() -> list[tuple[str, int, bool]]:
    """(schedule, chunks a stage, split backward): all that the catalogue builds, with up to three chunks a stage."""
    return [
        (name, chunks, split)
        for name, entry in CATALOGUE.items()
        for chunks in ((entry.chunks,) if entry.chunks else (1, 2, 3))
        for split in ((True,) if entry.splits else (False, True))
    ]


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
