"""Tensors that are neither parameters nor buffers, computed with in place."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import TIME, WIDTH
from parity import Deep, dense, eager_outcome, made, pipe_outcome, pipeline
from pipeloom.strategy import Strategy

STRATEGY = Strategy(pp_degree=2, schedule_mode="ZBH1", accumulate_steps=2, costs="roofline")


class Masked(nn.Module):
    """torch fills a boolean mask in, in place, to add it."""

    def __init__(self, samples: int = 2) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mask = torch.ones(TIME, TIME, dtype=torch.bool).triu(1).expand(samples * 2, TIME, TIME)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.attention(x, x, x, attn_mask=self.mask)[0])


class Ramp(nn.Module):
    """A constant in a list, from which each forward makes another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.constants = [torch.arange(float(WIDTH))]

    def forward(self, x: Tensor) -> Tensor:
        ramp = torch.zeros_like(self.constants[0])
        ramp[2:] = self.constants[0][2:]
        return self.last(self.first(x) * ramp.mul_(0.1).to(x))


def test_a_boolean_mask_that_is_an_attribute() -> None:
    case = made(
        lambda: Deep(
            Masked(), F.mse_loss, lambda n: (torch.randn(n, TIME, WIDTH), torch.randn(n, TIME, WIDTH))
        ).double()
    )
    found = pipe_outcome(pipeline(case, STRATEGY, case.batch(4)), case.batch(4))
    assert found.error(eager_outcome(case, case.batch(4), [2, 2])) <= 1e-12


def test_a_tensor_made_from_a_constant_and_changed() -> None:
    case = made(lambda: Deep(Ramp(), F.mse_loss, dense).double())
    found = pipe_outcome(pipeline(case, STRATEGY, case.batch(4)), case.batch(4))
    assert found.error(eager_outcome(case, case.batch(4), [2, 2])) <= 1e-12
    assert torch.equal(case.model.constants[0], torch.arange(float(WIDTH)))
