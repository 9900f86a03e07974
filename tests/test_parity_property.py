"""Any small model, cut anywhere, under any schedule, with any batch: the loss and gradients of eager PyTorch.

hypothesis draws a graph of modules (linear, convolution, norms, attention, lookups, dropout, in-place ops; each reads
one or two earlier results, may share its weights with others, be frozen or checkpointed), cuts, schedule, S, V, M,
what is computed again, and batch sizes.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from parity import Deep, eager_outcome, made, pipe_outcome
from pipeloom.local import compile_local
from pipeloom.schedules.catalogue import CATALOGUE
from pipeloom.strategy import Strategy

WIDTH, TIME = 8, 3


class Mix(nn.Module):
    """One node: op(x, y), both (samples, TIME, WIDTH). Nodes with the same `shared` modules share weights."""

    def __init__(self, op: str, shared: nn.ModuleDict) -> None:
        super().__init__()
        self.op = op
        if op in ("linear", "product"):
            self.linear = shared["linear"]
        elif op == "conv":
            self.conv = shared["conv"]
        elif op == "lookup":
            self.table = shared["table"]
        elif op == "norm":
            self.norm: nn.Module = nn.LayerNorm(WIDTH)
        elif op == "batch":
            self.norm = nn.BatchNorm1d(WIDTH)
        elif op == "group":
            self.norm = nn.GroupNorm(2, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        match self.op:
            case "linear":
                return torch.tanh(self.linear(x)) + y
            case "product":
                return torch.tanh(x @ self.linear.weight) * torch.sigmoid(y)
            case "norm":
                return self.norm(x + y)
            case "conv":
                return torch.tanh(self.conv(x.transpose(1, 2))).transpose(1, 2) - y
            case "batch" | "group":
                return self.norm(x.transpose(1, 2)).transpose(1, 2) + y
            case "attention":
                return torch.tanh(F.scaled_dot_product_attention(x, y, x, is_causal=True)) + y
            case "lookup":
                return torch.tanh(self.table(x.argmax(-1))) * y
            case "dropout":
                return F.dropout(x, 0.3, self.training) - y
            case "turn":
                turned = x.unflatten(-1, (2, WIDTH // 2)).transpose(-1, -2)
                return (turned + y.unflatten(-1, (WIDTH // 2, 2))).flatten(-2)
            case "where":
                return torch.where(x > 0, x, y * 0.5)
            case "number":
                return x / (1 + y.pow(2).mean())
            case "in place":
                z = x.clone()
                z[:, 0] = y[:, -1]
                return z.mul_(0.5)
        raise ValueError(self.op)


OPS = (
    "linear", "product", "norm", "conv", "batch", "group", "attention", "lookup", "dropout", "turn", "where",
    "number", "in place",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Node:
    """op: of OPS. reads: two earlier results, by number. shared: which set of modules. frozen: its weights aren't
    trained. again: inside torch.utils.checkpoint."""

    op: str
    reads: tuple[int, int]
    shared: int
    frozen: bool
    again: bool


class Graph(nn.Module):
    """The output sums what no node reads. checkpointing: None runs checkpointed nodes plainly."""

    def __init__(self, nodes: list[Node]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        pool = [
            nn.ModuleDict(
                {
                    "linear": nn.Linear(WIDTH, WIDTH),
                    "conv": nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
                    "table": nn.Embedding(WIDTH, WIDTH),
                }
            )
            for _ in range(3)
        ]
        self.nodes = nn.ModuleList(Mix(node.op, pool[node.shared]) for node in nodes)
        for node, module in zip(nodes, self.nodes, strict=True):
            if node.frozen:
                module.requires_grad_(False)
        self.plan = nodes
        read = {i for node in nodes for i in node.reads}
        self.ends = sorted({*range(len(nodes) + 1)} - read)
        self.checkpointing: bool | None = True

    def forward(self, x: Tensor) -> Tensor:
        found = [self.first(x)]
        for node, module in zip(self.plan, self.nodes, strict=True):
            inputs = [found[i] for i in node.reads]
            again = node.again and self.checkpointing
            found.append(checkpoint(module, *inputs, use_reentrant=False) if again else module(*inputs))
        return sum((found[i] for i in self.ends[1:]), found[self.ends[0]])


def sequences(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, TIME, WIDTH), torch.randn(samples, TIME, WIDTH)


def squares(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def positives(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, weight): only entries with a positive target count."""
    counts = (target > 0).to(output.dtype)
    return ((output - target) ** 2 * counts).sum(), counts.sum()


def mean_of_positives(output: Tensor, target: Tensor) -> Tensor:
    """The same as a mean, whose weights are found by pipeloom."""
    total, count = positives(output, target)
    return total / count


@dataclasses.dataclass(frozen=True)
class Draw:
    nodes: list[Node]
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
        Node(
            draw(st.sampled_from(OPS)),
            (draw(st.integers(0, i)), draw(st.integers(0, i))),
            draw(st.integers(0, 2)),
            draw(st.sampled_from([False, False, False, True])),
            draw(st.sampled_from([False, False, True])),
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
        recompute=draw(st.sampled_from([None, None, "all", r"nodes\.[012]", [0]])),
        costs="roofline",
        seed=draw(st.integers(0, 3)),
    )
    batches = draw(st.lists(st.integers(1, 7), min_size=1, max_size=2))
    return Draw(nodes, strategy, batches, draw(st.sampled_from([squares, positives, mean_of_positives])))


def judge(drawn: Draw) -> None:
    """Loss, gradients and buffers of each step are those of eager PyTorch, micro-batch by micro-batch."""
    case = made(lambda: Deep(Graph(drawn.nodes), drawn.loss, sequences)).double()
    pipe = compile_local(
        case.model, case.loss_fn, example=case.batch(drawn.batches[0]), strategy=drawn.strategy
    )
    assert pipe.plan.ascending
    eager = copy.deepcopy(case.model)
    oracle = dataclasses.replace(case, loss_fn=positives) if drawn.loss is mean_of_positives else case
    for step, samples in enumerate(drawn.batches):
        batch = case.batch(samples, seed=step)
        sizes = drawn.strategy.micro_batches(samples)
        reference = eager_outcome(oracle, batch, sizes, seed=drawn.strategy.seed, step=step, model=eager)
        outcome = pipe_outcome(pipe, batch)
        unused = outcome.gradients.keys() - reference.gradients.keys()
        assert not any(outcome.gradients.pop(name).any() for name in unused)
        assert outcome.error(reference) <= 1e-10
        found = {n: b for stage in pipe.stages for n, b in stage.store.buffers.items()}
        for name, buffer in eager.named_buffers():
            torch.testing.assert_close(found[name], buffer, rtol=1e-10, atol=1e-12)


def node(op: str, *reads: int, shared: int = 0, frozen: bool = False, again: bool = False) -> Node:
    return Node(op, (reads[0], reads[1]), shared, frozen, again)


#: what random draws have found
FOUND = {
    "a cut inside of the loss, and a micro-batch of one sample that has other ops": Draw(
        [
            node("product", 0, 0, shared=2),
            node("in place", 0, 1, shared=1),
            node("group", 1, 1, frozen=True),
            node("product", 3, 2, shared=1, again=True),
        ],
        Strategy(pp_degree=3, schedule_mode="Eager1F1B", accumulate_steps=4, costs="roofline", seed=2),
        [6, 7],
        positives,
    ),
    "a recomputed value that the backward of another chunk reads, and not its forward": Draw(
        [
            node("turn", 0, 0, frozen=True),
            node("in place", 1, 0, frozen=True),
            node("batch", 2, 1, shared=1),
            node("product", 2, 1, shared=1),
            node("product", 0, 4, shared=1),
        ],
        Strategy(
            pp_degree=2,
            vpp_degree=2,
            schedule_mode="V-Half",
            accumulate_steps=3,
            split_backward=True,
            recompute="all",
            costs="roofline",
            seed=3,
        ),
        [1],
        squares,
    ),
    "an edge on which micro-batches of one sample send nothing": Draw(
        [
            node("group", 0, 0),
            node("linear", 1, 1, shared=2, again=True),
            node("dropout", 1, 2, shared=2),
            node("norm", 1, 1, shared=2),
            node("attention", 0, 1, again=True),
            node("attention", 2, 1, shared=1, again=True),
            node("in place", 5, 0, shared=1, again=True),
            node("conv", 2, 6, shared=2),
        ],
        Strategy(
            pp_degree=3,
            vpp_degree=2,
            schedule_mode="VPP",
            accumulate_steps=4,
            split_backward=True,
            cuts=r"nodes\.\d+",
            recompute="all",
            costs="roofline",
        ),
        [6, 5],
        mean_of_positives,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(name: str) -> None:
    judge(FOUND[name])


OPTIONS: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": True,
}


@pytest.mark.slow
@settings(max_examples=50, derandomize=True, **OPTIONS)
@given(draws())
def test_any_model_under_any_plan_is_eager_pytorch(drawn: Draw) -> None:
    judge(drawn)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(20))
def test_a_thousand_models_are_eager_pytorch(part: int) -> None:
    """Fifty a part, other ones in each."""

    @seed(part)
    @settings(max_examples=50, **OPTIONS)
    @given(draws())
    def fifty(drawn: Draw) -> None:
        judge(drawn)

    fifty()
