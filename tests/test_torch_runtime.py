"""torch.distributed.pipelining's own runtime runs our plans, as CSV, on two real ranks: right losses and gradients."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeloom.planning import Costs, Plan
from pipeloom.schedules import build, chain_edges

CHUNKS, WIDTH, WORDS, SAMPLES, MICRO_BATCHES = 4, 8, 11, 2, 5


class Part(nn.Module):
    """A quarter of a model: an embedding before the first (so that chunk 0 has no input gradient), a head after the
    last."""

    def __init__(self, chunk: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(chunk)
        self.embedding = nn.Embedding(WORDS, WIDTH) if chunk == 0 else nn.Identity()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS) if chunk == CHUNKS - 1 else nn.Identity()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.linear(self.embedding(x))))  # type: ignore[no-any-return]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    whole = torch.randint(0, WORDS, (SAMPLES * MICRO_BATCHES, 4), generator=generator)
    return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


def plan_of(name: str, splits: bool) -> Plan:
    schedule = build(
        name, stages=2, chunks=2, micro_batches=MICRO_BATCHES, split_backward=True if splits else None
    )
    return Plan.make(schedule, chain_edges(CHUNKS, 64), Costs.uniform(CHUNKS, 1.0, 1.1, 0.8, 0.1))


def run_by_torch(rank: int, _size: int, name: str, splits: bool) -> dict[str, Any]:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    plan = plan_of(name, splits)
    own = [chunk for chunk, stage in enumerate(plan.placement) if stage == rank]
    parts = {chunk: Part(chunk) for chunk in own}
    stages = [PipelineStage(part, chunk, CHUNKS, torch.device("cpu")) for chunk, part in parts.items()]
    runtime = _PipelineScheduleRuntime(stages, MICRO_BATCHES, loss_fn=loss_of)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.csv"
        file.write_text(plan.to_csv())
        runtime._load_csv(str(file), format="compute_comms")
    inputs, targets = batch()
    losses: list[Tensor] | None = [] if CHUNKS - 1 in own else None
    runtime.step(
        *((inputs,) if 0 in own else ()), target=targets if losses is not None else None, losses=losses
    )
    gradients = {
        f"{chunk}.{n}": p.grad.tolist() for chunk, part in parts.items() for n, p in part.named_parameters()
    }
    return {"gradients": gradients, "losses": [float(loss) for loss in losses or ()]}


@pytest.mark.parametrize(
    ("name", "splits"), [("ZBV", True), ("VPP", True), ("VPP", False), ("V-Half", True), ("LoopedBFS", True)]
)
def test_torch_runs_our_plan_with_right_gradients(ranks: Any, name: str, splits: bool) -> None:
    found = ranks(run_by_torch, 2, name, splits)
    model = nn.Sequential(*(Part(chunk) for chunk in range(CHUNKS)))
    losses = []
    for x, y in zip(*(t.split(SAMPLES) for t in batch()), strict=True):
        loss = loss_of(model(x), y)
        (loss / MICRO_BATCHES).backward()
        losses.append(loss.item())
    expected = {n: p.grad for n, p in model.named_parameters()}
    gradients = {**found[0]["gradients"], **found[1]["gradients"]}
    assert gradients.keys() == expected.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(torch.tensor(gradient), expected[parameter], rtol=1e-5, atol=1e-7)
    holder = plan_of(name, splits).placement[-1]
    assert found[holder]["losses"] == pytest.approx(losses, rel=1e-5)
