"""What capture refuses: each message says what is wrong, in which module, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import WIDTH, Chain, squares
from pipeloom.program.capture import CaptureError, capture
from pipeloom.program.checks import ModelError

X, Y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)


class Net(nn.Module):
    """A chain whose middle is `act(self, x)`."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.middle = Middle(act)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class Middle(nn.Module):
    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("average", torch.ones(WIDTH))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, x)


def refused(model: nn.Module, loss: Any = squares, example: Any = (X, Y), **more: Any) -> str:
    with pytest.raises((CaptureError, ModelError, ValueError)) as error:
        capture(model, loss, example=example, **more)
    return str(error.value)


def test_item_and_branches_on_values_name_the_module() -> None:
    message = refused(Net(lambda _, x: x * x.sum().item()))
    line = r"test_capture_refuses\.py, line \d+: message = .*x\.sum\(\)\.item\(\)"
    assert re.match(
        rf"can't capture Net, in module 'middle' \({line}.*\): the value of a tensor is read", message
    )
    assert "Use torch.where or a mask in place of if, .item() and float()" in message
    assert "in module 'middle'" in refused(Net(lambda _, x: x if x.sum() > 0 else -x))
    message = refused(Net(lambda _, x: x[x > 0].sum() + x))
    assert "in module 'middle'" in message
    assert "aten.nonzero.default returns depends on values" in message
    assert "a fixed capacity for each expert" in message


def test_an_error_of_the_model_itself_is_shown() -> None:
    assert re.search(
        r"in module 'middle' .*: RuntimeError: .*reduction dim", refused(Net(lambda _, x: x @ x))
    )


def test_an_error_of_the_loss_is_named_so() -> None:
    message = refused(Chain(1), lambda output, target: F.mse_loss(output, target[:, :2].view(3, 3)))
    assert message.startswith("can't capture Chain, in the loss function (test_capture_refuses.py, line ")


def test_a_buffer_that_is_assigned_anew() -> None:
    def act(self: Any, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return x * self.average

    message = refused(Net(act))
    assert "assigns a new tensor to the buffer 'middle.average'" in message
    assert "buffer.copy_(new)" in message


def test_a_buffer_whose_new_value_needs_a_gradient() -> None:
    def act(self: Any, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(x.mean(0))
        return x

    message = refused(Net(act))
    assert "the buffer 'middle.average' needs a gradient" in message
    assert "buffer.copy_(new.detach())" in message


def test_a_parameter_that_is_changed_in_place() -> None:
    def act(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(min=0.5)
        return x * self.weight

    assert "Net changes parameter 'middle.weight' in place" in refused(Net(act))
    norm = nn.Sequential(nn.Embedding(9, WIDTH, max_norm=1.0), nn.Linear(WIDTH, WIDTH))
    tokens = torch.zeros(4, dtype=torch.int64)
    assert "changes parameter '0.weight' in place" in refused(norm, example=(tokens, Y))
    assert "changes parameter '0.weight' in place" in refused(norm, example=(tokens, Y), training=False)


def test_an_input_that_is_changed_in_place() -> None:
    class Shifts(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.add_(1))

    assert "Shifts changes input 0 in place" in refused(Shifts(1))


def test_a_tensor_kept_from_one_micro_batch_to_the_next() -> None:
    def act(self: Any, x: Tensor) -> Tensor:
        self.last_output = x
        return x

    model = Net(act)
    assert "middle.last_output is assigned in the forward" in refused(model)
    assert not hasattr(model.middle, "last_output")
    model.middle.last_output = X
    assert "middle.last_output is assigned in the forward" in refused(model)
    assert model.middle.last_output is X


def test_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(9, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))
    message = refused(model, example=(torch.zeros(4, dtype=torch.int64), Y))
    assert "gradient of parameter '0.weight' of Sequential is sparse" in message
    assert "sparse=False" in message


def test_a_loss_that_needs_no_gradient() -> None:
    message = refused(Chain(1).requires_grad_(False))
    assert "the loss of Chain needs no gradient" in message
    assert "Unfreeze" in message
    assert capture(Chain(1).requires_grad_(False), squares, example=(X, Y), training=False).output_count == 1


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (
            lambda o, t: o - t,
            r"loss_fn returned a tensor of shape \(4, 8\) and dtype torch.float32.*loss.mean\(\)",
        ),
        (lambda o, _: o.sum().long(), r"dtype torch.int64, where a loss is one floating-point number"),
        (lambda _o, _t: None, r"loss_fn returned NoneType, no loss"),
        (lambda o, _: (o.sum(), o), r"loss_fn returned tuple, no loss.*a pair \(sum, weight\)"),
        (lambda o, _: (o.sum(), {}), r"loss_fn returned tuple, no loss"),
        (lambda o, _: (o.sum(), o.sum()), r"the weight that loss_fn returned needs a gradient.*Detach it"),
    ],
)
def test_what_is_no_loss(loss: Any, says: str) -> None:
    assert re.search(says, refused(Chain(1), loss), re.DOTALL)


def test_a_model_that_returns_no_loss_is_told_of_loss_fn() -> None:
    assert "the model returned a tensor of shape (4, 8)" in refused(Chain(1), None, X)

    class Nothing(Chain):
        def forward(self, x: Tensor) -> str:  # type: ignore[override]
            return f"nothing for {len(x)} samples"

    assert re.search(
        r"the model returned str, no loss.*or pass loss_fn", refused(Nothing(1), None, X), re.DOTALL
    )


def test_a_loss_with_parameters_of_its_own() -> None:
    class Head(nn.Linear):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
            return squares(super().forward(output), target)

    message = refused(Chain(1), Head(WIDTH, WIDTH))
    assert "the loss Head has parameters of its own" in message
    assert "loss_fn=None" in message


def test_a_loss_that_changes_its_buffer() -> None:
    class Counts(nn.Module):
        def __init__(self, anew: bool) -> None:
            super().__init__()
            self.anew = anew
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            if self.anew:
                self.steps = self.steps + 1
            else:
                self.steps.add_(1)
            return squares(output, target) * self.steps

    for anew in (True, False):
        loss = Counts(anew)
        before = loss.steps
        assert "the loss Counts changes its buffer 'steps'" in refused(Chain(1), loss)
        assert loss.steps is before
        assert float(loss.steps) == 0


@pytest.mark.parametrize(
    ("example", "says"),
    [
        (X, "example is a pair (inputs, targets); got Tensor"),
        ((X, Y, Y), "example is a pair (inputs, targets); got tuple of length 3"),
        ((3, None), "the batch holds no tensor"),
    ],
)
def test_bad_examples(example: Any, says: str) -> None:
    assert says in refused(Chain(1), example=example)


@pytest.mark.parametrize(
    ("register", "what"),
    [
        (lambda m: m.register_forward_hook(lambda *_: None), "forward hook"),
        (lambda m: m.register_forward_pre_hook(lambda *_: None), "forward pre-hook"),
        (lambda m: m.register_full_backward_hook(lambda *_: None), "backward hook"),
        (lambda m: m.register_full_backward_pre_hook(lambda *_: None), "backward pre-hook"),
    ],
)
def test_hooks(register: Callable[[nn.Module], Any], what: str) -> None:
    model = Chain(2)
    handle = register(model.layers[1])
    message = refused(model)
    assert f"layers.1 (Linear) has a {what}" in message
    handle.remove()
    capture(model, squares, example=(X, Y))


def test_modules_that_can_not_be_captured() -> None:
    norm = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None))
    assert "1 (BatchNorm1d) has momentum=None" in refused(norm)
    capture(norm, squares, example=(X, Y), training=False)
    lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.1)
    assert "the model (LSTM) has dropout=0.1 between 2 layers" in refused(lstm)
    lazy = nn.Sequential(nn.LazyLinear(WIDTH))
    assert "0.weight has no shape yet" in refused(lazy)
