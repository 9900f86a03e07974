"""recompute="auto": the plan fits, what it predicts is what a step takes, and gradients are the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeloom import PlanError, Strategy
from pipeloom.local import LocalPipeline, compile_local
from pipeloom.strategy import StrategyError
from pipeloom.training.config import ModelConfig
from pipeloom.training.model import GPT, character_loss

M = 6
CONFIG = ModelConfig(width=32, heads=2, layers=4, sequence=16, dropout=0.2)


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(17, CONFIG)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    windows = torch.randint(0, 17, (M, CONFIG.sequence + 1), generator=torch.Generator().manual_seed(1))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def local(model: GPT, **options: Any) -> LocalPipeline:
    strategy = Strategy(
        **{
            "pp_degree": 2,
            "accumulate_steps": M,
            "costs": "roofline",
            "search_seconds": 0.3,
            "seed": 3,
            **options,
        }
    )
    return compile_local(model, character_loss, example=batch(), strategy=strategy)


def outcome(pipe: LocalPipeline) -> tuple[float, dict[str, torch.Tensor]]:
    for stage in pipe.stages:
        stage.zero_grad()
    loss = float(pipe.step(*batch(), update=False).loss)
    return loss, {name: g.clone() for name, g in pipe.gradients().items()}


KINDS = {
    "1F1B": {},
    "1F1B split": {"schedule_mode": "1F1B", "split_backward": True},
    "FThenB": {"schedule_mode": "FThenB"},
    "ZBH1": {"schedule_mode": "ZBH1"},
    "VPP": {"schedule_mode": "VPP", "vpp_degree": 2},
    "ZBV": {"schedule_mode": "ZBV", "vpp_degree": 2},
}


#: `make test` runs a whole and a split schedule, and one with two chunks a stage
OFTEN = ("1F1B", "ZBV")


@pytest.mark.parametrize(
    "kind", [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS]
)
def test_it_fits_and_gradients_are_the_same_bits(model: GPT, kind: str) -> None:
    kept = local(model, **KINDS[kind])
    every = local(model, **KINDS[kind], recompute="all")
    before, least = (max(pipe.plan.simulation.peak) for pipe in (kept, every))
    assert least < before
    limit = int(least + 0.4 * (before - least))
    pipe = local(model, **KINDS[kind], recompute="auto", memory_limit=limit)
    chosen = pipe.stages[0].planner.recompute
    assert 0 < len(chosen) <= pipe.plan.chunks * 2
    assert max(pipe.plan.simulation.peak) <= limit
    loss, gradients = outcome(pipe)
    expected, wanted = outcome(kept)
    assert loss == expected
    assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)
    assert pipe.measured is not None
    assert kept.measured is not None
    # the runtime's ledger: bytes as they were allocated and freed
    assert pipe.measured.peak_bytes == pytest.approx(pipe.plan.simulation.peak, rel=0.03)
    assert max(pipe.measured.peak_bytes) < max(kept.measured.peak_bytes)
    assert sum(pipe.plan.costs.backward) > sum(kept.plan.costs.backward), "computing again isn't free"


def test_nothing_is_computed_again_where_the_plan_fits(model: GPT) -> None:
    kept = local(model)
    roomy = local(model, recompute="auto", memory_limit=int(max(kept.plan.simulation.peak)))
    assert roomy.stages[0].planner.recompute == ()
    assert roomy.plan.digest() == kept.plan.digest()
    assert local(model, recompute="auto").stages[0].planner.recompute == ()


def test_only_the_stages_that_are_short_of_memory_compute_again(model: GPT) -> None:
    """1F1B's first stage holds two micro-batches, its last one."""
    kept = local(model, cuts="2-2")
    first, last = kept.plan.simulation.peak
    assert first > last
    pipe = local(model, cuts="2-2", recompute="auto", memory_limit=int((first + last) / 2))
    assert pipe.stages[0].planner.recompute == (0,)


def test_what_never_fits_says_so(model: GPT) -> None:
    with pytest.raises(PlanError, match=r"stage \d needs .* bytes"):
        local(model, recompute="auto", memory_limit=1000)


def test_auto_computes_again_where_that_is_faster(model: GPT) -> None:
    """Within what 1F1B needs if all is computed again, only orders that wait for each micro-batch fit otherwise."""
    every = local(model, recompute="all")
    tight = int(max(every.plan.simulation.peak) * 1.05)
    kept = local(model, schedule_mode="auto", recompute="none", memory_limit=tight)
    pipe = local(model, schedule_mode="auto", memory_limit=tight)
    planner = pipe.stages[0].planner
    assert planner.choice is not None
    assert planner.recompute == planner.choice.recompute != ()
    assert max(pipe.plan.simulation.peak) <= tight
    assert pipe.plan.simulation.makespan < kept.plan.simulation.makespan
    loss, gradients = outcome(pipe)
    expected, wanted = outcome(kept)
    assert loss == expected
    assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)
    roomy = local(model, schedule_mode="auto", recompute="auto", memory_limit="1GB")
    assert roomy.stages[0].planner.recompute == ()


def test_numbers_of_chunks_need_chunks_that_are_known() -> None:
    with pytest.raises(StrategyError, match="names chunks by number"):
        Strategy(schedule_mode="auto", recompute=[0])
