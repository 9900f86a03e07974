"""Data parallel × pipeline is one process on the whole batch: all ranks in this process, over memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import models
from oracle import worst_error
from parity import Deep, dense, made, text
from pipeloom.local import LocalPipeline, compile_local
from pipeloom.report.trace import REDUCE, chrome_trace
from pipeloom.runtime.agreement import DisagreementError
from pipeloom.runtime.static_plan import Message, Reduce, Run
from pipeloom.runtime.stepping import drive
from pipeloom.strategy import Strategy

TOLERANCE = 1e-10


def token_sums(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, number of tokens that count), the weight made by the programs."""
    flat = targets.reshape(-1)
    losses = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), flat, reduction="none", ignore_index=-100)
    return losses.sum(), (flat != -100).sum() + 0 * logits.sum().detach().long()


def ragged(samples: int) -> tuple[Tensor, Tensor]:
    """Targets of which the first samples ignore nearly all."""
    tokens, targets = text(samples)
    targets[: samples // 2, 1:] = -100
    return tokens, targets


CASES: dict[str, Callable[[], Deep]] = {
    "chain": lambda: Deep(models.Chain(), F.mse_loss, dense),
    "tied": lambda: Deep(models.TiedEnds(), models.cross_entropy, text),
    "dropout": lambda: Deep(models.Chain(dropout=0.5), F.mse_loss, dense),
    "weighted": lambda: Deep(models.TiedEnds(), token_sums, ragged),
    "ignored": lambda: Deep(models.TiedEnds(), models.cross_entropy, ragged),
}


@functools.cache
def case_of(name: str) -> Deep:
    case: Deep = made(CASES[name])
    return case.double()


def compiled(name: str, samples: int, replicas: int, optimizer: Any = None, **fields: Any) -> LocalPipeline:
    case = case_of(name)
    fields = {"costs": "roofline", **fields}
    return compile_local(
        case.model,
        case.loss_fn,
        example=case.batch(samples),
        strategy=Strategy(**fields),
        optimizer=optimizer,
        replicas=replicas,
    )


PLANS = [
    {"pp_degree": 2},
    {"pp_degree": 1},
    {"pp_degree": 2, "vpp_degree": 2, "schedule_mode": "VPP"},
    {"pp_degree": 2, "vpp_degree": 2, "schedule_mode": "ZBV"},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_one_process_on_the_whole_batch(name: str, plan: dict[str, Any]) -> None:
    alone = compiled(name, 8, 1, accumulate_steps=4, pp_degree=1)
    spread = compiled(name, 8, 2, accumulate_steps=2, **plan)
    for seed in (1, 2):  # the second adds up with the first
        batch = case_of(name).batch(8, seed=seed)
        results = [pipe.step(*batch, update=False) for pipe in (alone, spread)]
        assert float(results[1].loss) == pytest.approx(float(results[0].loss), rel=TOLERANCE)
        assert float(results[1].weight) == float(results[0].weight)
        assert worst_error(spread.gradients(), alone.gradients()) < TOLERANCE
    alike(spread)


@pytest.mark.parametrize(
    "plan",
    [{"executor": "fleet"}, {"schedule_mode": "auto", "search_seconds": 0.5}, {"costs": "measured"}],
    ids=str,
)
def test_every_way_to_plan_and_run_takes_replicas(plan: dict[str, Any]) -> None:
    alone = compiled("tied", 8, 1, accumulate_steps=4, pp_degree=1)
    spread = compiled("tied", 8, 2, accumulate_steps=2, pp_degree=2, **plan)
    batch = case_of("tied").batch(8)
    results = [pipe.step(*batch, update=False) for pipe in (alone, spread)]
    assert float(results[1].loss) == pytest.approx(float(results[0].loss), rel=TOLERANCE)
    assert worst_error(spread.gradients(), alone.gradients()) < TOLERANCE
    assert any(spread.plan.costs.reduce)
    alike(spread)


def alike(pipe: LocalPipeline) -> None:
    """Replicas hold the same gradients and weights, to the bit."""
    count = len(pipe.first)
    for stage in pipe.stages:
        first = pipe.stages[stage.stage]
        for name, gradient in stage.gradients().items():
            assert torch.equal(gradient, first.gradients()[name]), name
        for name, parameter in stage.store.parameters.items():
            assert torch.equal(parameter, first.store.parameters[name]), name
    assert len(pipe.stages) % count == 0


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-2)


@pytest.mark.parametrize("plan", PLANS[2:], ids=str)
def test_ten_steps_with_clipping_end_in_the_same_weights(plan: dict[str, Any]) -> None:
    options = {"max_norm": 0.5, "loss_scale": "dynamic"}
    alone = compiled("tied", 12, 1, adamw, accumulate_steps=6, pp_degree=1, **options)
    spread = compiled("tied", 12, 3, adamw, accumulate_steps=2, **plan, **options)
    for seed in range(10):
        batch = case_of("tied").batch(12, seed=seed)
        results = [pipe.step(*batch) for pipe in (alone, spread)]
        assert results[1].grad_norm is not None
        assert float(results[1].grad_norm) == pytest.approx(float(results[0].grad_norm), rel=1e-8)
    alike(spread)
    expected = alone.parameters()
    for name, parameter in spread.parameters().items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"pp_degree": 2, "vpp_degree": 2, "schedule_mode": "VPP"}, {"pp_degree": 1}),
        ({"pp_degree": 2, "vpp_degree": 2, "schedule_mode": "ZBV"}, {"pp_degree": 3}),
        ({"pp_degree": 2, "vpp_degree": 2, "schedule_mode": "ZBV"}, {"pp_degree": 2, "replicas": 2}),
        ({"pp_degree": 2, "replicas": 2}, {"pp_degree": 2, "cuts": ["layers.0"]}),
        ({"pp_degree": 1, "replicas": 4}, {"pp_degree": 2, "vpp_degree": 2, "schedule_mode": "ZBV"}),
    ],
    ids=str,
)
def test_checkpoints_go_from_any_cut_to_any_other(
    before: dict[str, Any], after: dict[str, Any], tmp_path: Path
) -> None:
    def pipe_of(replicas: int = 1, **plan: Any) -> LocalPipeline:
        return compiled("tied", 8, replicas, adamw, accumulate_steps=4 // replicas, max_norm=0.5, **plan)

    saved, loaded = pipe_of(**before), pipe_of(**after)
    for seed in range(3):
        saved.step(*case_of("tied").batch(8, seed=seed))
    saved.save(tmp_path / "saved")
    loaded.step(*case_of("tied").batch(8, seed=99))
    loaded.load(tmp_path / "saved")
    for seed in range(3, 8):
        batch = case_of("tied").batch(8, seed=seed)
        expected, got = (pipe.step(*batch).loss for pipe in (saved, loaded))
        assert float(got) == pytest.approx(float(expected), rel=1e-9)
    alike(loaded)


def test_shards_of_different_sizes_count_by_their_samples() -> None:
    alone = compiled("dropout", 6, 1, accumulate_steps=3, pp_degree=1)
    spread = compiled("dropout", 6, 2, micro_batch_size=2, pp_degree=2)
    inputs, targets = case_of("dropout").batch(6)
    shards = [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])]  # 2 micro-batches, and 1
    results = spread.each(lambda stage: stage.step_work(*shards[stage.replicas.index], update=False))
    expected = alone.step(inputs, targets, update=False)
    assert {float(r.loss) for r in results} == {float(results[0].loss)}
    assert float(results[0].loss) == pytest.approx(float(expected.loss), rel=TOLERANCE)
    assert worst_error(spread.gradients(), alone.gradients()) < TOLERANCE


def test_evaluation_is_of_the_whole_batch_and_draws_alike() -> None:
    alone = compiled("ignored", 8, 1, accumulate_steps=4, pp_degree=1)
    spread = compiled("ignored", 8, 2, accumulate_steps=2, pp_degree=2)
    batch = case_of("ignored").batch(8)
    expected, got = (pipe.eval(*batch, outputs=True) for pipe in (alone, spread))
    assert float(got.loss) == pytest.approx(float(expected.loss), rel=TOLERANCE)
    assert float(got.weight) == float(expected.weight)
    torch.testing.assert_close(got.outputs, expected.outputs)


def test_buffers_are_replica_0s_after_a_step() -> None:
    case = Deep(made(models.Skip).double(), models.squares, pictures)
    spread = compile_local(
        case.model,
        case.loss_fn,
        example=case.batch(8),
        strategy=Strategy(pp_degree=2, accumulate_steps=2, costs="roofline"),
        replicas=2,
    )
    first = compile_local(
        case.model,
        case.loss_fn,
        example=case.batch(4),
        strategy=Strategy(pp_degree=1, accumulate_steps=2, costs="roofline"),
    )
    inputs, targets = case.batch(8)
    spread.step(inputs, targets)
    first.step(inputs[:4], targets[:4])
    expected = first.stages[0].store.buffers
    assert any(name.endswith("running_mean") for name in expected)
    for stage in spread.stages:
        for name, buffer in stage.store.buffers.items():
            torch.testing.assert_close(buffer, expected[name])


def pictures(samples: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(samples, 2, 4, 4)
    return inputs, torch.zeros_like(models.Skip()(inputs))


def test_gradients_are_summed_as_soon_as_a_chunks_last_w_is_done() -> None:
    spread = compiled("tied", 8, 2, pp_degree=2, vpp_degree=2, schedule_mode="VPP", accumulate_steps=2)
    spread.step(*case_of("tied").batch(8))
    for stage in spread.first:
        assert stage._last is not None
        items = stage._last.plan.items
        for place, item in enumerate(items):
            if isinstance(item, Reduce):
                backwards = [
                    i
                    for i, other in enumerate(items)
                    if isinstance(other, Run) and other.job[:2] == ("X", item.chunk)
                ]
                assert place == backwards[-1] + 1
        order = [item.chunk for item in items if isinstance(item, Reduce)]
        assert order == sorted(order, reverse=True)
        assert isinstance(items[-3], Run | Message | Reduce)
        later = [i for i in items[items.index(Reduce(order[0])) :] if isinstance(i, Run)]
        assert len(order) == 1 or later  # the first sum runs beside jobs


def test_sums_are_in_the_plan_and_in_both_timelines() -> None:
    spread = compiled("tied", 8, 2, pp_degree=2, accumulate_steps=2)
    spread.step(*case_of("tied").batch(8))
    assert "gradients summed over replicas in" in spread.plan.describe()
    for timeline in (spread.plan.timeline(), spread.timeline()):
        sums = [span for span in timeline.spans if span.kind == "reduce"]
        assert sorted((span.rank, span.chunk) for span in sums) == [(0, 0), (1, 1)]
        finalized = {span.rank: span.end for span in timeline.spans if span.kind == "finalize"}
        assert all(span.start < span.end <= finalized[span.rank] for span in sums)
        trace = chrome_trace([timeline])["traceEvents"]
        assert {e["tid"] for e in trace if e.get("cat") == "reduce"} == {REDUCE}
    alone = compiled("tied", 8, 1, pp_degree=2, accumulate_steps=2)
    assert "replicas" not in alone.plan.describe()


def test_what_replicas_must_agree_on() -> None:
    spread = compiled("tied", 8, 2, pp_degree=2, accumulate_steps=2)
    batch = case_of("tied").batch(4)
    with pytest.raises(DisagreementError, match=r"replicas 0 and 1 were called with different update="):
        spread.each(lambda stage: stage.step_work(*batch, update=stage.replicas.index == 0))
    with pytest.raises(ValueError, match="a batch of 1 samples can't be shared out among 2 replicas"):
        spread.step(*case_of("tied").batch(1))
    stages = compiled("tied", 8, 2, pp_degree=1, accumulate_steps=2).stages
    works = [stage.prepare(*case_of("tied").batch(4 + 2 * stage.replicas.index)) for stage in stages]
    with pytest.raises(
        DisagreementError, match=r"replicas 0 and 1 don't have the same program:(.*\n){3}All replicas"
    ):
        drive(works)
