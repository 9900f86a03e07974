"""Any small model, cut anywhere, under any schedule, with any batch: the loss and gradients of eager PyTorch.

hypothesis draws a graph of modules (each reads one or two earlier results, and may be one that ran before), cuts,
schedule, S, V, M and batch sizes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from parity import Deep, dense, eager_outcome, made, pipe_outcome
from pipeloom.local import compile_local
from pipeloom.schedules.catalogue import CATALOGUE
from pipeloom.strategy import Strategy

WIDTH = 8


class Mix(nn.Module):
    """One node: op(x, y). Nodes of the same `weights` share them."""

    def __init__(self, op: str, weights: nn.Linear) -> None:
        super().__init__()
        self.op = op
        if op in ("linear", "product"):
            self.weights = weights
        if op == "norm":
            self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        match self.op:
            case "linear":
                return torch.tanh(self.weights(x)) + y
            case "product":
                return torch.tanh(x @ self.weights.weight) * torch.sigmoid(y)
            case "norm":
                return self.norm(x + y)
            case "dropout":
                return F.dropout(x, 0.3, self.training) - y
            case "turn":
                return (x.view(-1, 2, WIDTH // 2).transpose(1, 2) + y.view(-1, WIDTH // 2, 2)).reshape(
                    -1, WIDTH
                )
            case "where":
                return torch.where(x > 0, x, y * 0.5)
        raise ValueError(self.op)


OPS = ("linear", "product", "norm", "dropout", "turn", "where")


class Graph(nn.Module):
    """nodes: (op, first input, second input, weights), inputs and weights by number, each below the node's own. The
    output sums what no node reads."""

    def __init__(self, nodes: list[tuple[str, int, int, int]]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        pool = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        self.nodes = nn.ModuleList(Mix(op, pool[w]) for op, _, _, w in nodes)
        self.reads = [(a, b) for _, a, b, _ in nodes]
        self.ends = sorted({*range(len(nodes) + 1)} - {i for pair in self.reads for i in pair})

    def forward(self, x: Tensor) -> Tensor:
        found = [self.first(x)]
        for node, (a, b) in zip(self.nodes, self.reads, strict=True):
            found.append(node(found[a], found[b]))
        return (
            sum(found[i] for i in self.ends[1:]) + found[self.ends[0]]
            if len(self.ends) > 1
            else found[self.ends[0]]
        )


def squares(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def positives(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, weight): only entries with a positive target count."""
    counts = (target > 0).to(output.dtype)
    return ((output - target) ** 2 * counts).sum(), counts.sum()


@dataclasses.dataclass(frozen=True)
class Draw:
    nodes: list[tuple[str, int, int, int]]
    strategy: Strategy
    batches: list[int]
    loss: Any


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    schedule = draw(st.sampled_from(sorted(CATALOGUE)))
    chunks = CATALOGUE[schedule].chunks or draw(st.integers(1, 2))
    stages = draw(st.integers(1, 3))
    count = draw(st.integers(max(4, stages * chunks), 9))
    nodes = [
        (
            draw(st.sampled_from(OPS)),
            draw(st.integers(0, i)),
            draw(st.integers(0, i)),
            draw(st.integers(0, 2)),
        )
        for i in range(count)
    ]
    places = draw(
        st.sets(st.integers(0, count - 1), min_size=stages * chunks - 1, max_size=stages * chunks - 1)
    )
    named = [f"nodes.{i}" for i in sorted(places)]
    strategy = Strategy(
        schedule_mode=schedule,
        pp_degree=stages,
        vpp_degree=chunks,
        split_backward=CATALOGUE[schedule].splits or draw(st.booleans()),
        accumulate_steps=draw(st.integers(1, 5)),
        cuts=draw(st.sampled_from([None, r"nodes\.\d+", named])),
        costs="roofline",
        seed=draw(st.integers(0, 3)),
    )
    batches = draw(st.lists(st.integers(1, 7), min_size=1, max_size=2))
    return Draw(nodes, strategy, batches, draw(st.sampled_from([squares, positives])))


@pytest.mark.slow
@settings(
    max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
@given(draws())
def test_any_model_under_any_plan_is_eager_pytorch(drawn: Draw) -> None:
    case = made(lambda: Deep(Graph(drawn.nodes), drawn.loss, dense)).double()
    pipe = compile_local(
        case.model, case.loss_fn, example=case.batch(drawn.batches[0]), strategy=drawn.strategy
    )
    assert pipe.plan.ascending
    for step, samples in enumerate(drawn.batches):
        batch = case.batch(samples, seed=step)
        sizes = drawn.strategy.micro_batches(samples)
        reference = eager_outcome(case, batch, sizes, seed=drawn.strategy.seed, step=step)
        assert pipe_outcome(pipe, batch).error(reference) <= 1e-10
