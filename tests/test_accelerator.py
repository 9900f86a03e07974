"""The same steps on an accelerator as on the CPU: `pytest -m gpu` where there is one (two, for the ranks).

Each test also runs on the CPU, in every test run, so that the tests themselves are known to work.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pipeloom
from conftest import Ranks
from pipeloom import Strategy
from pipeloom.local import compile_local
from pipeloom.training.config import ModelConfig
from pipeloom.training.model import GPT, character_loss

GPU = torch.accelerator.current_accelerator()
COUNT = torch.accelerator.device_count() if GPU is not None else 0
NAME = "cuda" if GPU is None else GPU.type


def on(devices: int) -> Any:
    absent = pytest.mark.skipif(devices > COUNT, reason=f"needs {devices} accelerator(s), there are {COUNT}")
    return pytest.mark.parametrize("device", ["cpu", pytest.param(NAME, marks=[pytest.mark.gpu, absent])])


def model() -> GPT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(17, ModelConfig(width=32, heads=2, layers=4, sequence=8, tied=True))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    windows = torch.randint(0, 17, (8, 9), generator=torch.Generator().manual_seed(seed))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def strategy(stages: int, chunks: int, schedule: str) -> Strategy:
    return Strategy(
        pp_degree=stages, vpp_degree=chunks, schedule_mode=schedule, accumulate_steps=4, max_norm=1.0
    )


def plain_losses(steps: int) -> list[float]:
    """Of plain PyTorch on the CPU."""
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        inputs, targets = batch(step)
        loss = character_loss(trained(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@on(1)
@pytest.mark.parametrize(
    ("stages", "chunks", "schedule"), [(2, 1, "1F1B"), (2, 2, "VPP"), (2, 2, "ZBV"), (4, 1, "ZBH1")]
)
def test_stages_of_one_process_train_as_plain_pytorch(
    device: str, stages: int, chunks: int, schedule: str
) -> None:
    pipe = compile_local(
        model(),
        character_loss,
        example=batch(0),
        strategy=strategy(stages, chunks, schedule),
        optimizer={"name": "AdamW", "lr": 1e-2},
        device=device,
    )
    assert {p.device.type for p in pipe.parameters().values()} == {device}
    losses = [float(pipe.step(*batch(step)).loss) for step in range(5)]
    # float32 on two kinds of devices: sums are rounded in other orders
    assert losses == pytest.approx(plain_losses(5), rel=1e-4)
    assert pipe.stages[0].measured is not None


def train(rank: int, size: int, device: str, store: str, schedule: str, chunks: int) -> list[float]:
    if device != "cpu":  # the pool's process groups are Gloo's
        dist.destroy_process_group()
        torch.accelerator.set_device_index(rank)
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, store=dist.FileStore(store, size), rank=rank, world_size=size)
    pipe = pipeloom.compile(
        model(),
        character_loss,
        example=batch(0),
        strategy=strategy(size, chunks, schedule),
        optimizer={"name": "AdamW", "lr": 1e-2},
        device=f"{device}:{rank}" if device != "cpu" else None,
    )
    losses = [float(pipe.step(*batch(step)).loss) for step in range(5)]
    pipe.close()
    return losses


@on(2)
@pytest.mark.parametrize(("schedule", "chunks"), [("1F1B", 1), ("ZBV", 2)])
def test_ranks_train_as_plain_pytorch(
    ranks: Ranks, device: str, schedule: str, chunks: int, tmp_path: Any
) -> None:
    for losses in ranks(train, 2, device, str(tmp_path / "store"), schedule, chunks, timeout=120):
        assert losses == pytest.approx(plain_losses(5), rel=1e-4)
