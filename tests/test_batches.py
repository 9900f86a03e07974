"""Batches of every size: uneven micro-batches, few samples, other lengths, weights of one's own, steps that add up,
evaluation. Judged by eager PyTorch on the whole batch, in float64."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import models
from oracle import worst_error
from parity import Deep, Outcome, deep, eager_outcome, pipe_outcome, pipeline, text
from pipeloom.local import LocalPipeline
from pipeloom.strategy import Strategy

BOUND = 1e-10

#: (schedule, S, V)
PLANS = (("1F1B", 1, 1), ("1F1B", 3, 1), ("VPP", 2, 2), ("ZBV", 2, 2))


@functools.cache
def case_of(model: str) -> Deep:
    return deep(model).double()


@functools.cache
def weighted() -> Deep:
    """The loss is (sum, number of tokens that count), which the batch spreads unevenly over the micro-batches."""
    case = case_of("tied")

    def make(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = text(samples)
        for i in range(samples):
            targets[i, : i % 6] = 0  # padding; the third quarter of the batch has none that counts
        targets[samples // 2 : samples // 2 + samples // 4] = 0
        return tokens, targets

    return Deep(case.model, models.summed, make)


def strategy_of(plan: tuple[str, int, int], **fields: object) -> Strategy:
    schedule, stages, chunks = plan
    return Strategy(schedule_mode=schedule, pp_degree=stages, vpp_degree=chunks, costs="roofline", **fields)


def whole(case: Deep, batch: tuple[torch.Tensor, torch.Tensor]) -> Outcome:
    """Eager PyTorch on the whole batch at once."""
    return eager_outcome(case, batch, [len(batch[0])])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", ["chain", "tied"])
def test_uneven_micro_batches_are_weighted_by_their_samples(model: str, plan: tuple[str, int, int]) -> None:
    case = case_of(model)
    pipe = pipeline(case, strategy_of(plan, accumulate_steps=4), case.batch(8))
    for samples, sizes in (
        (10, [3, 3, 2, 2]),
        (3, [1, 1, 1]),
        (1, [1]),
        (8, [2, 2, 2, 2]),
        (7, [2, 2, 2, 1]),
    ):
        batch = case.batch(samples)
        pipe.zero_grad()
        result = pipe.step(*batch, update=False)
        outcome = Outcome(result.loss, pipe.gradients(), result.losses)
        unit = 1 if model == "chain" else models.TIME  # a mean over words is weighted by its words
        assert result.weights.tolist() == [unit * size for size in sizes]
        assert float(result.weight) == unit * samples
        assert outcome.error(whole(case, batch)) <= BOUND, f"batch of {samples}"


def trained(pipe: LocalPipeline, sizes: tuple[int, ...], case: Deep) -> dict[str, torch.Tensor]:
    for step, samples in enumerate(sizes):
        pipe.step(*case.batch(samples, seed=step))
    return pipe.parameters()


@pytest.mark.parametrize("plan", PLANS[1:])
def test_a_last_partial_batch(plan: tuple[str, int, int]) -> None:
    case = case_of("chain")
    sizes = (8, 8, 5)
    model = copy.deepcopy(case.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, samples in enumerate(sizes):
        inputs, targets = case.batch(samples, seed=step)
        optimizer.zero_grad()
        case.loss_fn(model(inputs), targets).backward()
        optimizer.step()
    fields = {"micro_batch_size": 4}
    pipes = [
        pipeline(case, strategy_of(p, **fields), case.batch(8), lambda n: torch.optim.SGD(n, lr=0.1))
        for p in (PLANS[0], plan)
    ]
    alone, piped = (trained(pipe, sizes, case) for pipe in pipes)
    assert [n for n in alone if not torch.equal(alone[n], piped[n])] == []
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(piped[name], parameter.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("plan", PLANS)
def test_other_sequence_lengths(plan: tuple[str, int, int]) -> None:
    case = case_of("tied")
    pipe = pipeline(case, strategy_of(plan, accumulate_steps=2), case.batch(4))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        batches = [text(4, time) for time in (5, 5, 9, 1)]
    for batch in batches:
        assert pipe_outcome(pipe, batch).error(whole(case, batch)) <= BOUND, tuple(batch[0].shape)


@pytest.mark.parametrize("plan", PLANS)
def test_a_loss_with_weights_of_its_own(plan: tuple[str, int, int]) -> None:
    case = weighted()
    pipe = pipeline(case, strategy_of(plan, accumulate_steps=4), case.batch(8))
    for samples in (8, 5):
        batch = case.batch(samples)
        pipe.zero_grad()
        result = pipe.step(*batch, update=False)
        counted = int((batch[1] != 0).sum())
        assert float(result.weight) == counted
        assert samples != 8 or 0.0 in result.weights.tolist()
        outcome = Outcome(result.loss, pipe.gradients(), result.losses)
        assert outcome.error(whole(case, batch)) <= BOUND, f"batch of {samples}"


def test_weights_of_its_own_are_bit_equal_for_every_plan() -> None:
    case = weighted()
    outcomes = []
    for plan in PLANS:
        pipe = pipeline(case, strategy_of(plan, accumulate_steps=4), case.batch(8))
        outcomes.append(pipe_outcome(pipe, case.batch(8)))
    assert [outcome.differences(outcomes[0]) for outcome in outcomes] == [[]] * len(PLANS)


@pytest.mark.parametrize("plan", PLANS[:3])
def test_a_batch_in_which_nothing_counts_is_skipped(plan: tuple[str, int, int]) -> None:
    case = weighted()
    pipe = pipeline(
        case, strategy_of(plan, accumulate_steps=2), case.batch(4), lambda n: torch.optim.SGD(n, lr=0.1)
    )
    before = {n: p.clone() for n, p in pipe.parameters().items()}
    tokens, targets = case.batch(4)
    result = pipe.step(tokens, torch.zeros_like(targets))
    assert result.skipped
    assert float(result.weight) == 0
    assert all(torch.equal(p, before[n]) for n, p in pipe.parameters().items())
    assert not pipe.step(tokens, targets).skipped
    assert not all(torch.equal(p, before[n]) for n, p in pipe.parameters().items())


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", ["chain", "weighted"])
def test_gradient_merge_sum(model: str, plan: tuple[str, int, int]) -> None:
    case = weighted() if model == "weighted" else case_of(model)
    strategy = strategy_of(plan, accumulate_steps=4, gradient_merge="sum")
    batch = case.batch(10)
    outcome = pipe_outcome(pipeline(case, strategy, batch), batch)
    reference = eager_outcome(case, batch, [3, 3, 2, 2], average=False)
    assert outcome.error(reference) <= BOUND


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", ["tied", "weighted"])
def test_steps_without_an_update_add_up(model: str, plan: tuple[str, int, int]) -> None:
    case = weighted() if model == "weighted" else case_of(model)
    pipe = pipeline(case, strategy_of(plan, accumulate_steps=2), case.batch(4))
    first, second = case.batch(4, seed=1), case.batch(4, seed=2)
    alone = [pipe_outcome(pipe, batch) for batch in (first, second)]
    pipe.zero_grad()
    assert all(not g.any() for g in pipe.gradients().values())
    pipe.step(*first, update=False)
    pipe.step(*second, update=False)
    both = pipe.gradients()
    assert both
    for name, gradient in both.items():
        assert torch.equal(gradient, alone[0].gradients[name] + alone[1].gradients[name]), name


def test_accumulated_steps_are_updated_at_once_and_then_cleared() -> None:
    case = case_of("tied")
    model = copy.deepcopy(case.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipe = pipeline(
        case,
        strategy_of(PLANS[2], accumulate_steps=2, max_norm=0.5),
        case.batch(4),
        lambda n: torch.optim.SGD(n, lr=0.1),
    )
    for round_ in range(2):
        optimizer.zero_grad()
        for seed, update in ((1, False), (2, True)):
            inputs, targets = case.batch(4, seed=10 * round_ + seed)
            case.loss_fn(model(inputs), targets).backward()
            result = pipe.step(inputs, targets, update=update)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert float(norm) > 0.5
        assert result.grad_norm is not None
        assert float(result.grad_norm) == pytest.approx(float(norm), rel=1e-10)
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(pipe.parameters()[name], parameter.detach(), rtol=1e-10, atol=1e-12)
    assert all(not g.any() for g in pipe.gradients().values())


def test_gradients_that_the_user_took_away_count_as_zero() -> None:
    case = case_of("chain")
    pipe = pipeline(case, strategy_of(PLANS[2], accumulate_steps=2), case.batch(4))
    alone = pipe_outcome(pipe, case.batch(4))
    for stage in pipe.stages:
        for parameter in stage.model.parameters():
            parameter.grad = None
    pipe.step(*case.batch(4), update=False)
    found = pipe.gradients()
    assert [n for n, g in alone.gradients.items() if not torch.equal(found[n], g)] == []


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", ["tied", "weighted", "batch_norm"])
def test_evaluation_between_steps(model: str, plan: tuple[str, int, int]) -> None:
    case: Deep | models.Case
    if model == "batch_norm":
        built = models.build("batch_norm", 8).double()
        case = Deep(built.model, built.loss_fn, lambda n: (torch.randn(n, 8), torch.randn(n, 8)))
    else:
        case = weighted() if model == "weighted" else case_of(model)
    pipe = pipeline(
        case, strategy_of(plan, micro_batch_size=3), case.batch(6), lambda n: torch.optim.SGD(n, lr=0.1)
    )
    twin = pipeline(
        case, strategy_of(plan, micro_batch_size=3), case.batch(6), lambda n: torch.optim.SGD(n, lr=0.1)
    )
    eager = copy.deepcopy(case.model).eval()
    for step, samples in enumerate((5, 6, 1)):
        inputs, targets = case.batch(samples, seed=step)
        load(eager, pipe)
        with torch.no_grad():
            expected = eager(inputs)
            loss = case.loss_fn(expected, targets)
            loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        result = pipe.eval(inputs, targets, outputs=True)
        assert float(result.loss) == pytest.approx(float(loss), rel=BOUND)
        torch.testing.assert_close(result.outputs, expected, rtol=BOUND, atol=1e-12)
        assert pipe.eval(inputs, targets).outputs is None
        for each in (pipe, twin):
            each.step(*case.batch(6, seed=step))
    assert all(torch.equal(p, twin.parameters()[n]) for n, p in pipe.parameters().items())
    assert all(stage.model.training for stage in pipe.stages)


def load(model: torch.nn.Module, pipe: LocalPipeline) -> None:
    """All stages' parameters and buffers into one model."""
    state = dict(model.state_dict(keep_vars=True))
    with torch.no_grad():
        for stage in pipe.stages:
            for name, tensor in (*stage.store.parameters.items(), *stage.store.buffers.items()):
                state[name].copy_(tensor)


def test_the_loss_is_the_same_on_every_stage() -> None:
    case = weighted()
    pipe = pipeline(case, strategy_of(("VPP", 3, 2), accumulate_steps=3), case.batch(7))
    batch = case.batch(7)
    results = pipe.each(lambda stage: stage.step_work(*batch, update=False))
    assert len(results) == 3
    for result in results:
        assert torch.equal(result.loss, results[0].loss)
        assert torch.equal(result.weight, results[0].weight)
    evaluations = pipe.each(lambda stage: stage.eval_work(*batch))
    assert all(torch.equal(e.loss, evaluations[0].loss) for e in evaluations)


def test_the_measure_sees_a_wrong_gradient() -> None:
    """The judge itself: one entry off by a millionth is far beyond the bound."""
    right = whole(case_of("chain"), case_of("chain").batch(4))
    wrong = {n: g.clone() for n, g in right.gradients.items()}
    next(iter(wrong.values())).view(-1)[0] += 1e-6
    assert worst_error(wrong, right.gradients) > BOUND
