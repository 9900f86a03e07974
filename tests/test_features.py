"""Models with difficulties of their own, cut and piped: bit-equal to one stage, and right by eager PyTorch in
float64."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import models
from parity import Deep, Outcome, dense, eager_outcome, made, pipe_outcome, pipeline
from pipeloom.local import LocalPipeline
from pipeloom.program.batch import flatten_batch, split_batch
from pipeloom.strategy import Strategy

WIDTH = models.WIDTH

#: (schedule, S, V)
PLANS = (("1F1B", 3, 1), ("VPP", 2, 2), ("ZBV", 2, 2), ("ZBH1", 4, 1))
SAMPLES, SIZES = 6, [2, 2, 2]


def strategy_of(plan: tuple[str, int, int] = ("1F1B", 1, 1), **fields: object) -> Strategy:
    schedule, stages, chunks = plan
    return Strategy(
        schedule_mode=schedule,
        pp_degree=stages,
        vpp_degree=chunks,
        costs="roofline",
        accumulate_steps=3,
        **fields,
    )


@functools.cache
def case_of(name: str) -> models.Case:
    return models.build(name, SAMPLES).double()


@functools.cache
def one_stage(name: str) -> Outcome:
    case = case_of(name)
    return pipe_outcome(pipeline(case, strategy_of(), case.example), (case.inputs, case.targets))


FEATURES = [
    name
    for name in models.CASES
    # autocast is float32's; a weight of its own is in test_batches
    if "autocast" not in name and name not in ("summed", "chain", "tied")
]


@pytest.mark.parametrize("name", FEATURES)
def test_every_plan_is_bit_equal_to_one_stage(name: str) -> None:
    case = case_of(name)
    for plan in PLANS:
        pipe = pipeline(case, strategy_of(plan), case.example)
        outcome = pipe_outcome(pipe, (case.inputs, case.targets))
        assert not outcome.differences(one_stage(name)), plan


@pytest.mark.parametrize("name", FEATURES)
def test_one_stage_is_eager_pytorch(name: str) -> None:
    outcome = one_stage(name)
    fresh = models.build(name, SAMPLES).double()  # some losses read the model itself, so no copy will do
    # a mean over class weights is the whole batch's
    sizes = [SAMPLES] if name == "weighted_loss" else SIZES
    reference = eager_outcome(fresh, (fresh.inputs, fresh.targets), sizes, model=fresh.model)
    frozen = {n for n, p in fresh.model.named_parameters() if n not in reference.gradients}
    outcome.gradients = {n: g for n, g in outcome.gradients.items() if n not in frozen or g.any()}
    assert outcome.error(reference) <= 1e-10


@pytest.mark.parametrize("name", ["gpt_autocast", "gpt_autocast_tied"])
def test_autocast(name: str) -> None:
    case = models.build(name, 8)
    batch = (case.inputs, case.targets)
    reference = eager_outcome(case, batch, [2, 2, 2, 2], autocast=torch.bfloat16)
    plans = (("1F1B", 1, 1), *PLANS)
    outcomes = []
    for plan in plans:
        strategy = strategy_of(plan, autocast="bfloat16").replace(accumulate_steps=4)
        outcomes.append(pipe_outcome(pipeline(case, strategy, case.example), batch))
    assert torch.equal(outcomes[0].losses, reference.losses)
    # shares of a quarter are exact in bfloat16, so that its rounding is the same in both
    assert outcomes[0].error(reference) <= 1e-5
    assert [o.differences(outcomes[0]) for o in outcomes] == [[]] * len(plans)
    plain = pipeline(case, strategy_of().replace(accumulate_steps=4), case.example)
    assert not torch.equal(pipe_outcome(plain, batch).losses, reference.losses), "autocast changed nothing"


def gradient_edges(pipe: LocalPipeline) -> set[tuple[int, int]]:
    return {(e.source, e.target) for e in pipe.plan.edges if e.direction == "B"}


@pytest.mark.parametrize("split", [False, True])
def test_nothing_is_sent_back_into_a_frozen_prefix(split: bool) -> None:
    case = models.build("frozen_prefix", SAMPLES)  # layers 0 and 1 of 4
    cuts = ["layers.1", "layers.2", "layers.3"]
    pipe = pipeline(case, strategy_of(("1F1B", 4, 1), cuts=cuts, split_backward=split), case.example)
    assert gradient_edges(pipe) == {(3, 2)}
    outcome = pipe_outcome(pipe, (case.inputs, case.targets))
    assert {name.split(".")[1] for name in outcome.gradients} == {"2", "3"}
    assert pipe.stages[0].updater.optimizer is None


@pytest.mark.parametrize("split", [False, True])
def test_gradients_go_through_a_frozen_suffix(split: bool) -> None:
    case = models.build("frozen_suffix", SAMPLES)  # layers 2 and 3 of 4
    cuts = ["layers.1", "layers.2", "layers.3"]
    made_for: list[int] = []

    def optimizer(named: object) -> torch.optim.Optimizer:
        pairs = list(named)  # type: ignore[call-overload]
        made_for.append(len(pairs))
        return torch.optim.SGD(pairs, lr=0.1)

    strategy = strategy_of(("1F1B", 4, 1), cuts=cuts, split_backward=split, max_norm=1.0)
    pipe = pipeline(case, strategy, case.example, optimizer)
    assert gradient_edges(pipe) == {(3, 2), (2, 1), (1, 0)}
    assert made_for == [2, 2], "the two stages with nothing to train get no optimizer"
    assert not pipe.step(case.inputs, case.targets).skipped


@pytest.mark.parametrize("name", ["batch_norm", "skip"])
@pytest.mark.parametrize("plan", PLANS)
def test_batch_norm_statistics_are_those_of_micro_batches_in_order(
    name: str, plan: tuple[str, int, int]
) -> None:
    case = models.build(name, SAMPLES).double()
    batch = (case.inputs, case.targets)
    before = {n: b.clone() for n, b in case.model.named_buffers()}
    pipe = pipeline(case, strategy_of(plan), case.example)
    assert_buffers(pipe, before)
    pipe.eval(*batch)
    assert_buffers(pipe, before)
    eager = copy.deepcopy(case.model)
    for _ in range(2):
        pipe.step(*batch, update=False)
        eager_outcome(case, batch, SIZES, model=eager)
    expected = dict(eager.named_buffers())
    assert int(expected[next(n for n in expected if n.endswith("num_batches_tracked"))]) == 6
    assert_buffers(pipe, expected)
    pipe.eval(*batch)
    assert_buffers(pipe, expected)
    assert all(torch.equal(b, before[n]) for n, b in case.model.named_buffers()), "the user's own model"


def assert_buffers(pipe: LocalPipeline, expected: dict[str, Tensor]) -> None:
    found = {n: b for stage in pipe.stages for n, b in stage.store.buffers.items()}
    assert set(found) == set(expected)
    for name, buffer in expected.items():
        torch.testing.assert_close(found[name], buffer, rtol=1e-12, atol=1e-14)


class Sensitive(nn.Module):
    """The gradient of `tiny` is 5e37 times as large as others: under a large loss scale it alone overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = nn.Parameter(torch.full((WIDTH,), 2e-38))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = (x * 5e37) * self.tiny
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("plan", PLANS[:3])
def test_a_gradient_that_overflows_on_one_stage_makes_all_skip(plan: tuple[str, int, int]) -> None:
    case = made(lambda: Deep(Sensitive(), F.mse_loss, dense))
    pipe = pipeline(
        case,
        strategy_of(plan, loss_scale="dynamic"),
        case.batch(SAMPLES),
        lambda named: torch.optim.SGD(named, lr=1e-3),
    )
    before = {n: p.clone() for n, p in pipe.parameters().items()}
    skipped = 0
    for _ in range(40):
        results = pipe.each(lambda stage: stage.step_work(*case.batch(SAMPLES)))
        assert len({bool(r.skipped) for r in results}) == 1
        if not results[0].skipped:
            break
        skipped += 1
        assert all(torch.equal(p, before[n]) for n, p in pipe.parameters().items())
        assert {stage.updater.scaler.scale for stage in pipe.stages} == {2.0**16 / 2**skipped}
    assert skipped > 0
    assert all(not torch.equal(p, before[n]) for n, p in pipe.parameters().items() if "layers" in n)


def test_a_loss_scale_leaves_nothing_behind() -> None:
    """A power of two: it cancels exactly, in gradients and in the norm."""
    case = made(lambda: Deep(models.Chain(), F.mse_loss, dense))
    outcomes, norms = [], []
    for fields in ({}, {"loss_scale": 1024.0}, {"loss_scale": "dynamic"}):
        strategy = strategy_of(PLANS[1], max_norm=0.1, **fields)
        make = lambda named: torch.optim.SGD(named, lr=0.1)  # noqa: E731
        pipe = pipeline(case, strategy, case.batch(SAMPLES), make)
        outcomes.append(pipe_outcome(pipe, case.batch(SAMPLES)))
        pipe.zero_grad()
        norms.append(pipe.step(*case.batch(SAMPLES)).grad_norm)
        outcomes[-1].gradients |= {f"weight {n}": p.clone() for n, p in pipe.parameters().items()}
    assert [o.differences(outcomes[0]) for o in outcomes] == [[], [], []]
    assert float(norms[0]) > 0.1
    assert norms[0] == norms[1] == norms[2]


def test_outputs_of_every_form_come_back_from_evaluation() -> None:
    case = case_of("outputs")
    eager = copy.deepcopy(case.model).eval()
    expected = eager(case.inputs)
    for plan in PLANS:
        result = pipeline(case, strategy_of(plan), case.example).eval(case.inputs, case.targets, outputs=True)
        assert set(result.outputs) == {"state", "gate"}
        for name, tensor in expected.items():
            torch.testing.assert_close(result.outputs[name], tensor.detach(), rtol=1e-12, atol=1e-14)


class Turned(nn.Module):
    """Hands on a transposed tensor, and which entries to take and to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x)
        return torch.tanh(y.t()), y.argsort(dim=-1), y > 0


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, turned: Tensor, order: Tensor, keep: Tensor) -> Tensor:
        return self.linear(torch.where(keep, (turned * 2).t().gather(1, order), 0.1))


class Crossing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Turned(), Reader()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(*self.first(x))


def test_integers_booleans_and_transposed_tensors_cross_a_cut() -> None:
    case = made(lambda: Deep(Crossing(), F.mse_loss, dense)).double()
    batch = case.batch(SAMPLES)
    pipe = pipeline(case, strategy_of(("1F1B", 2, 1), cuts=["last"]), batch)
    leaves, form = flatten_batch(*batch)
    programs = pipe.stages[0].planner.captured(split_batch(leaves, SIZES)[0], form, training=True).programs
    sent = [programs.values[v] for v in programs.messages["F", 0, 1]]
    assert {value.dtype for value in sent} == {torch.float64, torch.int64, torch.bool}
    assert {value.stride for value in sent} == {(WIDTH, 1), (1, WIDTH)}
    assert pipe_outcome(pipe, batch).error(eager_outcome(case, batch, SIZES)) <= 1e-10
