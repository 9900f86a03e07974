"""Values whose strides torch predicts wrongly: the same masks for every cut, and views that work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parity import Deep, eager_outcome, made, pipe_outcome, pipeline
from pipeloom.program import compat
from pipeloom.program.capture import capture
from pipeloom.strategy import Strategy

WIDTH, TIME = 8, 3


class Turned(nn.Module):
    """Batch norm over transposed memory; then a mask is drawn over it, and it is seen as a matrix. No biases, whose
    gradients a norm makes 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(TIME, WIDTH, bias=False)
        self.norm, self.again = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x).transpose(1, 2))
        y = self.last(F.dropout(y, 0.5, self.training))
        return self.again(y.transpose(1, 2)).transpose(1, 2)


def batch(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, TIME, WIDTH), torch.randn(samples, WIDTH, WIDTH)


def test_batch_norm_is_predicted_as_it_is() -> None:
    x = torch.randn(2, TIME, WIDTH).transpose(1, 2)
    program = capture(Turned(), F.mse_loss, example=batch(2))
    norm = next(n for n in program.ops() if "batch_norm" in str(n.target))
    real = F.batch_norm(x, torch.zeros(WIDTH), torch.ones(WIDTH), training=True)
    assert compat.fake_values(norm)[0].stride() == real.stride() == (TIME * WIDTH, TIME, 1)


@pytest.mark.parametrize(("schedule", "stages", "chunks"), [("1F1B", 1, 1), ("1F1B", 4, 1), ("ZBV", 2, 2)])
def test_masks_over_turned_memory_are_eager_pytorchs(schedule: str, stages: int, chunks: int) -> None:
    case = made(lambda: Deep(Turned(), F.mse_loss, batch)).double()
    strategy = Strategy(
        schedule_mode=schedule, pp_degree=stages, vpp_degree=chunks, costs="roofline", accumulate_steps=2
    )
    data = case.batch(4)
    outcome = pipe_outcome(pipeline(case, strategy, data), data)
    assert outcome.error(eager_outcome(case, data, [2, 2])) <= 1e-10
