"""Clipping, scaling and skipping, against torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from handmade import batch, eager, fleet

from pipeloom.runtime.update import LossScaler, Updater, gradient_norm

ROWS = [3, 2]
PLACEMENTS = [(0, 0, 0), (0, 1, 2), (0, 1, 0)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("max_norm", [0.01, 1e3])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_clipping_is_torchs(placement, max_norm):
    ranks = fleet(placement, ROWS, optimizer=sgd, max_norm=max_norm, tied=True)
    batches = batch(ROWS)
    results = ranks.step(batches)
    _, _, model = eager(placement, batches, tied=True)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    sgd(model.parameters()).step()
    for store in ranks.stores:
        for gradient in store.gradients:
            expected = model.get_parameter(gradient.name)
            torch.testing.assert_close(gradient.parameter, expected, rtol=1e-12, atol=1e-13)
    assert {float(r.grad_norm) for r in results} == {float(results[0].grad_norm)}
    assert float(results[0].grad_norm) == pytest.approx(float(norm.detach()), rel=1e-12)


def test_the_norm_is_there_without_clipping_and_not_without_an_update():
    ranks = fleet((0, 1, 2), ROWS, optimizer=sgd)
    batches = batch(ROWS)
    assert ranks.step(batches, update=False)[0].grad_norm is None
    for store in ranks.stores:
        store.clear()
    gradients = eager((0, 1, 2), batches)[1].values()
    expected = math.sqrt(sum(float((g**2).sum()) for g in gradients))
    assert float(ranks.step(batches)[0].grad_norm) == pytest.approx(expected, rel=1e-12)


def test_a_step_with_infinite_gradients_is_skipped_on_all_ranks_and_halves_the_scale():
    ranks = fleet((0, 1, 2), ROWS, optimizer=sgd, scaler=LossScaler)
    before = {g.name: g.parameter.detach().clone() for s in ranks.stores for g in s.gradients}
    bad = batch(ROWS)
    bad[0][1][0, 0] = math.inf
    results = ranks.step(bad, unscale=1.0)
    assert [r.skipped for r in results] == [True] * 3
    assert [u.scaler.scale for u in ranks.updaters] == [2.0**15] * 3
    for store in ranks.stores:
        for gradient in store.gradients:
            assert torch.equal(gradient.parameter, before[gradient.name])
            assert gradient.view.abs().sum() == 0
    results = ranks.step(batch(ROWS))
    assert [r.skipped for r in results] == [False] * 3
    assert [u.scaler.good_steps for u in ranks.updaters] == [1] * 3


def test_unscaling_takes_the_loss_scale_out_of_the_gradients():
    plain, scaled = fleet((0, 1, 2), ROWS), fleet((0, 1, 2), ROWS)
    batches = batch(ROWS)
    plain.step(batches, update=False)
    scaled.step(batches, update=False, unscale=2.0**-10)
    for name, gradient in plain.gradients().items():
        assert torch.equal(scaled.gradients()[name], gradient * 2.0**-10)


def test_the_scaler_grows_after_an_interval_of_good_steps():
    scaler = LossScaler(8.0, interval=3)
    for _ in range(2):
        scaler.update(finite=True)
    again = LossScaler(interval=3)
    again.load_state_dict(scaler.state_dict())
    again.update(finite=True)
    assert (again.scale, again.good_steps) == (16.0, 0)
    fixed = LossScaler(8.0, dynamic=False)
    fixed.update(finite=False)
    assert fixed.scale == 8.0


def test_bad_figures_are_refused():
    with pytest.raises(ValueError, match=r"backoff=1\.5"):
        LossScaler(backoff=1.5)
    ranks = fleet((0,), ROWS)
    with pytest.raises(ValueError, match="max_norm is 0"):
        Updater(ranks.stores[0], ranks.updaters[0].transport, max_norm=0)


def test_the_scheduler_steps_with_the_optimizer():
    ranks = fleet(
        (0, 1), ROWS, optimizer=sgd, scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)
    )
    ranks.step(batch(ROWS), update=False)
    ranks.step(batch(ROWS))
    assert [u.optimizer.param_groups[0]["lr"] for u in ranks.updaters] == [0.05, 0.05]


def test_a_scheduler_that_steps_later_is_up_to_date_for_whoever_asks():
    ranks = fleet((0, 1), ROWS, optimizer=sgd)
    stages = list(ranks.updaters)
    for updater in stages:
        updater.scheduler = torch.optim.lr_scheduler.ExponentialLR(updater.optimizer, 0.5)
        updater._schedules_later = True
    ranks.step(batch(ROWS))
    assert [u.bare_optimizer.param_groups[0]["lr"] for u in stages] == [0.1, 0.1]
    assert stages[0].optimizer.param_groups[0]["lr"] == 0.05
    stages[1].schedule()
    stages[1].schedule()
    assert stages[1].scheduler.get_last_lr() == [0.05]


@pytest.mark.parametrize("shape", [(), (0,), (300, 7), (257, 300), (1 << 18,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_of_a_large_gradient_is_right(shape, dtype):
    torch.manual_seed(0)
    wild = torch.randn(shape, dtype=dtype) * 10.0 ** torch.randint(-6, 3, shape)
    for gradient in (wild, torch.full(shape, 0.1, dtype=dtype)):
        norm = gradient_norm(gradient)
        assert norm.dtype == torch.float64
        assert float(norm) == pytest.approx(float(gradient.double().norm()), rel=1e-6)


def test_one_infinite_element_of_a_large_gradient_is_seen():
    for value in (math.inf, math.nan):
        for place in (0, -1):
            gradient = torch.zeros(1 << 17 | 5)
            gradient[place] = value
            assert not torch.isfinite(gradient_norm(gradient))
