"""CTC loss with fixed shapes: torch's own, whatever its options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import WIDTH
from parity import Deep, eager_outcome, made, pipe_outcome, pipeline
from pipeloom.program.capture import capture
from pipeloom.strategy import Strategy

SAMPLES, CLASSES, LENGTH = 4, 5, 3


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))).log_softmax(-1).transpose(0, 1)


def batch(n: int) -> Any:
    return torch.randn(n, 6, WIDTH), torch.randint(1, CLASSES, (n, LENGTH))


def lengths(target: Tensor) -> tuple[Tensor, Tensor]:
    return torch.full((len(target),), 6), 1 + torch.arange(len(target)) % (LENGTH - 1)


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: F.ctc_loss(o, t, *lengths(t)),
        lambda o, t: F.ctc_loss(o, t, *lengths(t), reduction="sum"),
        lambda o, t: F.ctc_loss(o, t, *lengths(t), reduction="none").square().mean(),
        lambda o, t: nn.CTCLoss(zero_infinity=True)(o, t, (1, 6), (LENGTH, LENGTH)),
        lambda o, t: F.ctc_loss(o, t - 1, *lengths(t), blank=CLASSES - 1),
        lambda o, t: torch.ctc_loss(o, t, *lengths(t), 0, 1),
    ],
    ids=["mean", "sum", "none", "one not aligned", "another blank", "torch's"],
)
def test_loss_and_gradients_are_torchs(loss: Any) -> None:
    case = made(lambda: Deep(Classes(), loss, batch).double())
    strategy = Strategy(pp_degree=2, accumulate_steps=2, costs="roofline")
    found = pipe_outcome(pipeline(case, strategy, case.batch(SAMPLES)), case.batch(SAMPLES))
    assert found.error(eager_outcome(case, case.batch(SAMPLES), [2, 2])) <= 1e-12


def test_half_precision_is_computed_in_float32() -> None:
    model = Classes().bfloat16()
    inputs, targets = batch(SAMPLES)
    program = capture(model, lambda o, t: F.ctc_loss(o, t, *lengths(t)), example=(inputs.bfloat16(), targets))
    assert program.loss.meta["val"].dtype == torch.float32
