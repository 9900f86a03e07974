"""schedule_mode "auto": chosen, run, and equal to one stage to the bit; limits; other numbers of micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeloom import PlanError, Strategy
from pipeloom.auto import Auto, within
from pipeloom.local import LocalPipeline, compile_local
from pipeloom.planner import Planner
from pipeloom.planning.search import Found
from pipeloom.program.batch import flatten_batch
from pipeloom.training.config import ModelConfig
from pipeloom.training.model import GPT, character_loss

SAMPLES = 6


@pytest.fixture(scope="module")
def model() -> GPT:
    return GPT(17, ModelConfig(width=16, heads=2, layers=3, sequence=8))


def batch(samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    windows = torch.randint(0, 17, (samples, 9), generator=torch.Generator().manual_seed(samples))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def local(model: GPT, stages: int, **options: Any) -> LocalPipeline:
    """A pipeline of micro-batches of one window, with modelled costs and a moment's search."""
    base: dict[str, Any] = {"schedule_mode": "auto", "search_seconds": 0.2, "costs": "roofline"}
    strategy = Strategy(pp_degree=stages, micro_batch_size=1, **{**base, **options})
    return compile_local(model, character_loss, example=batch(), strategy=strategy)


def outcome(pipe: LocalPipeline, samples: int) -> tuple[float, dict[str, torch.Tensor]]:
    for stage in pipe.stages:
        stage.zero_grad()
    loss = float(pipe.step(*batch(samples), update=False).loss)
    return loss, {name: g.clone() for name, g in pipe.gradients().items()}


@pytest.fixture(scope="module")
def one(model: GPT) -> LocalPipeline:
    return local(model, 1, schedule_mode="1F1B", split_backward=True)


@pytest.mark.parametrize("stages", [2, 4])
def test_what_auto_runs_is_equal_to_one_stage_to_the_bit(model: GPT, one: LocalPipeline, stages: int) -> None:
    """For as many micro-batches as were planned for, fewer (the plan's own order, cut short) and more (one searched
    for at once)."""
    pipe = local(model, stages)
    assert pipe.plan.schedule == "auto"
    assert pipe.plan.ascending
    for samples in (SAMPLES, 3, SAMPLES + 3):
        loss, gradients = outcome(pipe, samples)
        expected, wanted = outcome(one, samples)
        assert loss == expected
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            assert torch.equal(gradient, wanted[name]), name


def test_auto_is_no_worse_than_named_schedules(model: GPT) -> None:
    """Its makespan is at most that of the best named schedule for the cuts that it chose."""
    strategy = Strategy(pp_degree=2, schedule_mode="auto", costs="roofline")
    auto = auto_of(model, strategy)
    found = auto.propose(6, budget_seconds=0.3).found
    assert found.makespan <= found.named * (1 + 1e-9)
    assert found.bound <= found.makespan * (1 + 1e-9)


def auto_of(model: GPT, strategy: Strategy) -> Auto:
    leaves, form = flatten_batch(*batch(1))
    return Auto(Planner(model, character_loss, strategy, torch.device("cpu")), leaves, form)


def test_a_limit_holds_with_buffers_of_posted_receives(model: GPT) -> None:
    free = local(model, 2)  # without an optimizer, so that its state must not be counted
    limit = int(max(free.plan.simulation.peak) * 1.1)
    pipe = local(model, 2, memory_limit=limit)
    assert max(pipe.plan.simulation.peak) <= limit
    assert pipe.plan.memory_limit == limit


def test_a_limit_that_nothing_fits(model: GPT) -> None:
    with pytest.raises(
        PlanError, match=r"no order fits the memory limit\. One micro-batch alone needs"
    ) as refused:
        local(model, 2, memory_limit=1000)
    assert refused.value.check == "memory"
    assert "allow more, take smaller micro-batches, more stages, or recompute" in str(refused.value)


@pytest.mark.parametrize("stashes", [[30.0, 10.0], [0.0, 30.0, 10.0], [0.0, 0.0]])
def test_within_keeps_to_its_budget_and_leaves_room_for_receives(stashes: list[float]) -> None:
    """A short search shows what receives take; the one after it has less, and so has another if it needs more."""
    asked: list[tuple[list[float], float]] = []

    def find(allowed: Any, seconds: float) -> Found:
        asked.append((list(allowed), seconds))
        stash = (stashes[len(asked) - 1], 0.0)
        blank = {**dict.fromkeys(Found.__dataclass_fields__), "makespan": 1.0, "ratio": 1.1}
        return Found(**{**blank, "peak": (allowed[0], 50.0), "stash": stash})  # type: ignore[arg-type]

    found = within(find, 100.0, 2, 8.0)
    assert len(asked) == len(stashes)
    assert sum(seconds for _, seconds in asked) <= 8.0 * (1 + 1e-9)
    assert asked[0] == ([100.0, 100.0], pytest.approx(1.2))
    for (before, _), (after, _), stash in zip(asked, asked[1:], stashes, strict=False):
        assert after == [before[0] - max(0.0, before[0] + stash - 100.0), 100.0]
    assert found.peak[0] + found.stash[0] <= 100


def test_pieces_are_measured_and_their_exact_bytes_are_the_programs(model: GPT) -> None:
    auto = auto_of(model, Strategy(pp_degree=2, schedule_mode="auto", costs="measured"))
    assert auto.spread is None
    assert sum(auto.pieces.seconds()) > 0
    assert auto.spread is not None
    assert auto.spread >= 0
    # where it would be cut depends on what was measured: these are cuts that don't
    cuts = auto_of(model, Strategy(pp_degree=2, schedule_mode="auto", costs="roofline")).cuts((0, 1), 4)
    costs, edges = auto.exact((0, 1), cuts)
    assert costs.forward == auto.costs((0, 1), cuts).forward
    assert {e.nbytes for e in edges} == {e.nbytes for e in auto.edges(cuts)}
    parameters = sum(p.nbytes for p in model.parameters())
    assert sum(costs.persistent) == 4 * parameters, "a weight, its gradient and two moments"
    assert all(held > 0 for held in (*costs.held_forward[1:], *costs.held_weight))


def test_a_frozen_weight_keeps_no_state() -> None:
    model = GPT(17, ModelConfig(width=16, heads=2, layers=2, sequence=8))
    auto = auto_of(model, Strategy(pp_degree=2, schedule_mode="auto", costs="roofline"))
    before = sum(auto.exact((0, 1), auto.cuts((0, 1), 4))[0].persistent)
    model.head.weight.requires_grad_(False)
    auto = auto_of(model, Strategy(pp_degree=2, schedule_mode="auto", costs="roofline"))
    after = sum(auto.exact((0, 1), auto.cuts((0, 1), 4))[0].persistent)
    assert before - after == 3 * model.head.weight.nbytes
    auto.moments = 0
    plain = sum(auto.exact((0, 1), auto.cuts((0, 1), 4))[0].persistent)
    assert after - plain == 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad)
