"""What a rank holds, what it lets go of, and what `.grad` means."""

from __future__ import annotations

import pytest
import torch
from handmade import Chain, batch, eager, fleet, programs

from pipeloom.program.subprogram import GradientSlot
from pipeloom.runtime.parameters import ParameterStore


def test_other_stages_weights_are_released_and_ones_own_stay_the_same_objects():
    model = Chain(3, tied=True)
    own = dict(model.named_parameters(remove_duplicate=False))
    store = ParameterStore(model, programs(model, 3), (0, 1, 0), 0)
    assert model.w0 is own["w0"]
    assert model.w2 is model.w0
    assert model.w1.is_meta
    assert set(store.parameters) == {"w0", "w2"}
    assert [name for name, _ in store.trainable()] == ["w0"]


def test_ties_survive_release():
    model = Chain(3, tied=True)
    ParameterStore(model, programs(model, 3), (0, 1, 0), 1)
    assert model.w0.is_meta
    assert model.w2 is model.w0
    assert not model.w1.is_meta


def test_a_buffer_of_another_stage_is_released():
    model = Chain(3, counted=True)
    store = ParameterStore(model, programs(model, 3), (0, 1, 0), 0)
    assert model.count.is_meta
    assert store.buffers == {}


def test_one_process_keeps_everything():
    model = Chain(3)
    store = ParameterStore(model, programs(model, 3), (0, 0, 0), 0, release=False)
    assert not any(p.is_meta for p in model.parameters())
    assert store.persistent_bytes() == 3 * 2 * 16 * 8


def test_gradients_are_aligned_views_of_one_flat_buffer_a_chunk():
    model = Chain(2, width=3)  # 72 bytes each: not a multiple of 64
    store = ParameterStore(model, programs(model, 3), (0, 0), 0)
    for parameter in model.parameters():
        assert parameter.grad.data_ptr() % 64 == 0
    store.accumulators["s0"].add_(1)
    assert model.w0.grad.sum() == 9
    store.scale(2.0)
    assert model.w0.grad.sum() == 18
    store.clear()
    assert model.w0.grad.sum() == 0


def test_slots_of_a_shared_parameter_are_apart_and_alone_the_first_is_the_gradient():
    alone = ParameterStore(Chain(3, tied=True), programs(Chain(3, tied=True), 3), (0, 0, 0), 0)
    assert alone.accumulators["s0"].data_ptr() == alone.gradients[0].view.data_ptr()
    assert alone.accumulators["s2"].data_ptr() != alone.accumulators["s0"].data_ptr()
    assert not alone.gradients[0].shared
    shared = ParameterStore(Chain(3, tied=True), programs(Chain(3, tied=True), 3), (0, 0, 1), 0)
    assert shared.accumulators["s0"].data_ptr() != shared.gradients[0].view.data_ptr()
    assert (shared.gradients[0].shared, shared.gradients[0].holders) == (True, [0, 1])


def test_accumulators_may_be_wider_than_the_parameter():
    model = Chain(1).to(torch.bfloat16)
    made = programs(Chain(1), 3)
    made.slots = [GradientSlot("s0", "w0", 0, (4, 4), torch.float32, 0)]
    store = ParameterStore(model, made, (0,), 0)
    assert store.accumulators["s0"].dtype == torch.float32
    assert model.w0.grad.dtype == torch.bfloat16


def test_frozen_parameters_have_no_gradient():
    model = Chain(2, frozen=True)
    ParameterStore(model, programs(model, 3), (0, 0), 0)
    assert model.w0.grad is None
    assert model.w1.grad is not None


def test_names_and_values_that_are_not_there_are_named():
    with pytest.raises(ValueError, match="chunk 2 reads parameter 'w2', which the module doesn't have"):
        ParameterStore(Chain(2), programs(Chain(3), 3), (0, 0, 0), 0)
    with torch.device("meta"):
        empty = Chain(2)
    with pytest.raises(
        ValueError, match=r"'w0' belongs to stage 0 but has no values .*pipeloom.deferred, or"
    ):
        ParameterStore(empty, programs(Chain(2), 3), (0, 1), 0)


ROWS = [3, 2]


@pytest.mark.parametrize("variant", [{}, {"tied": True}, {"weighted": True}])
@pytest.mark.parametrize("placement", [(0, 0, 0), (0, 1, 2)])
def test_steps_without_an_update_add_up_as_backward_does(placement, variant):
    ranks = fleet(placement, ROWS, **variant)
    expected: dict[str, torch.Tensor] = {}
    for step in range(3):
        batches = batch(ROWS, seed=step)
        ranks.step(batches, update=False)
        for name, gradient in eager(placement, batches, **variant)[1].items():
            expected[name] = expected.get(name, 0) + gradient
    for name, gradient in ranks.gradients().items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("how", ["none", "zero", "clear"])
def test_every_way_to_clear_gradients_clears_them(how):
    ranks = fleet((0, 0, 0), ROWS, tied=True)
    ranks.step(batch(ROWS, seed=5), update=False)
    for parameter in ranks.models[0].parameters():
        if how == "none":
            parameter.grad = None
        elif how == "zero":
            parameter.grad.zero_()
    if how == "clear":
        ranks.stores[0].clear()
    batches = batch(ROWS)
    ranks.step(batches, update=False)
    for name, gradient in eager((0, 0, 0), batches, tied=True)[1].items():
        torch.testing.assert_close(dict(ranks.models[0].named_parameters())[name].grad, gradient)


def test_a_gradient_that_the_user_put_there_counts():
    ranks = fleet((0, 0), ROWS)
    ranks.models[0].w0.grad = torch.ones(4, 4, dtype=torch.float64)
    batches = batch(ROWS)
    ranks.step(batches, update=False)
    torch.testing.assert_close(ranks.models[0].w0.grad, eager((0, 0), batches)[1]["w0"] + 1)
