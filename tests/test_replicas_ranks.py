"""Data parallel × pipeline on 2 × 2 real ranks: the numbers of one process, and what happens when a rank is killed."""

from __future__ import annotations

import copy
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import models
import pipeloom
from conftest import Ranks
from parity import Deep, dense, made, text
from pipeloom.local import compile_local
from pipeloom.runtime.errors import PeerError
from pipeloom.strategy import Strategy

STEPS, SAMPLES = 10, 8
PLANS: list[dict[str, Any]] = [
    {"schedule_mode": "1F1B"},
    {"vpp_degree": 2, "schedule_mode": "VPP"},
    {"vpp_degree": 2, "schedule_mode": "ZBV"},
]


def case_of(name: str) -> Deep:
    if name == "norm":
        return made(lambda: Deep(models.Skip(), models.squares, pictures).double())  # type: ignore[no-any-return]
    return made(lambda: Deep(models.TiedEnds(), models.cross_entropy, text).double())  # type: ignore[no-any-return]


def pictures(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(samples, 2, 4, 4)
    return inputs, torch.zeros_like(models.Skip()(inputs))


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-2)


def strategy_of(micro_batches: int, **plan: Any) -> Strategy:
    options = {"costs": "roofline", "max_norm": 0.5, "loss_scale": "dynamic", **plan}
    return Strategy(accumulate_steps=micro_batches, **options)


def shard(batch: tuple[torch.Tensor, ...], index: int, size: int) -> list[torch.Tensor]:
    return [leaf.tensor_split(size)[index] for leaf in batch]


def compiled(rank: int, case: Deep, samples: int, strategy: Strategy, optimizer: Any = adamw) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    example = shard(case.batch(samples), rank // 2, 2)
    return pipeloom.compile(
        case.model, case.loss_fn, example=example, strategy=strategy, optimizer=optimizer, mesh=mesh
    )


def samples_of(name: str, step: int) -> int:
    """Now and then a smaller batch, in shards of 3: micro-batches of 2 and 1. (Batch norm sees how a batch is cut.)"""
    return SAMPLES - 2 if name == "tied" and step % 3 == 0 else SAMPLES


def train(rank: int, _size: int, name: str, plan: dict[str, Any]) -> Any:
    case = case_of(name)
    pipe = compiled(rank, case, SAMPLES, strategy_of(2, pp_degree=2, **plan))
    figures = []
    for seed in range(STEPS):
        batch = case.batch(samples_of(name, seed), seed=seed)
        result = pipe.step(*shard(batch, pipe.replicas.index, 2))
        figures += [float(result.loss).hex(), float(result.grad_norm).hex(), float(result.weight)]
    evaluated = pipe.eval(*shard(case.batch(6, seed=99), pipe.replicas.index, 2)).loss
    figures.append(float(evaluated).hex())
    tensors = {**pipe.store.parameters, **pipe.store.buffers}
    spans = {(s.rank, s.kind, s.chunk) for s in pipe.timeline().spans if s.kind == "reduce"}
    weights = {n: t.detach().flatten().tolist() for n, t in tensors.items()}
    pipe.close()
    return [figures, weights, sorted(spans)]


@pytest.mark.parametrize(("name", "plan"), [("tied", plan) for plan in PLANS] + [("norm", PLANS[2])])
def test_ten_steps_of_adamw_are_those_of_one_process(ranks: Ranks, name: str, plan: dict[str, Any]) -> None:
    answers = ranks(train, 4, name, plan, timeout=150)
    case = case_of(name)
    alone = compile_local(
        case.model,
        case.loss_fn,
        example=case.batch(SAMPLES),
        strategy=strategy_of(4),
        optimizer=adamw,
    )
    figures = []
    for seed in range(STEPS):
        result = alone.step(*case.batch(samples_of(name, seed), seed=seed))
        assert result.grad_norm is not None
        figures += [float(result.loss), float(result.grad_norm), float(result.weight)]
    figures.append(float(alone.eval(*case.batch(6, seed=99)).loss))
    got = [float.fromhex(x) if isinstance(x, str) else x for x in answers[0][0]]
    if name == "norm":  # evaluation is by running statistics, which are those of replica 0's shards
        figures.pop(), got.pop()
    assert got == pytest.approx(figures, rel=1e-7)
    assert all(a[0] == answers[0][0] for a in answers)  # one loss and one norm for all ranks, to the bit
    expected = alone.parameters()
    for rank, (_, weights, spans) in enumerate(answers):
        assert weights == answers[rank % 2][1], "replicas differ"
        for parameter, values in weights.items():
            if parameter in expected:
                wanted = expected[parameter].flatten()
                torch.testing.assert_close(torch.tensor(values).double(), wanted, rtol=1e-6, atol=1e-8)
        chunks = 2 * plan.get("vpp_degree", 1)
        assert {chunk for _, _, chunk in spans} <= set(range(chunks))
        assert {stage for stage, _, _ in spans} == {0, 1}
    if name == "tied":
        tied = [weights["embedding.weight"] for _, weights, _ in answers if "embedding.weight" in weights]
        assert all(copy == tied[0] for copy in tied)


def unseeded(rank: int, _size: int) -> Any:
    case = case_of("tied")
    torch.manual_seed(rank)
    case.model = models.TiedEnds().double()
    pipe = compiled(rank, case, SAMPLES, strategy_of(2, pp_degree=2))
    weights = {n: t.detach().flatten().tolist() for n, t in pipe.store.parameters.items()}
    told = ""
    try:
        pipe.step(*shard(case.batch(SAMPLES), rank // 2, 2), update=rank < 2)
    except (RuntimeError, PeerError) as error:
        told = str(error)
    return [weights, told]


def test_copies_begin_alike_and_replicas_must_step_alike(ranks: Ranks) -> None:
    answers = ranks(unseeded, 4)
    assert answers[0][0] == answers[2][0]
    assert answers[1][0] == answers[3][0]
    assert answers[0][0]["embedding.weight"] == answers[1][0]["head.weight"]
    assert all("were called with different update=" in told for _, told in answers)


def killed(rank: int, _size: int) -> Any:
    case = case_of("tied")
    pipe = compiled(rank, case, SAMPLES, strategy_of(2, pp_degree=2))
    batch = shard(case.batch(SAMPLES), rank // 2, 2)
    pipe.step(*batch)
    began = time.monotonic()
    try:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(20):
            pipe.step(*batch)
    except PeerError as error:
        return [str(error), time.monotonic() - began]
    return ["no error", 0.0]


def test_a_killed_rank_ends_all_replicas_and_is_named(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(killed, 4)
    assert outcomes[2].kind == "died"
    for rank in (0, 1, 3):
        text, seconds = outcomes[rank].value
        assert text.startswith(f"rank {rank}: stopped because rank 2 failed: its process is gone"), text
        assert seconds < 10


def keep(rank: int, _size: int, folder: str) -> Any:
    case = case_of("tied")
    batch = shard(case.batch(SAMPLES), rank // 2, 2)
    pipe = compiled(rank, case, SAMPLES, strategy_of(2, pp_degree=2, vpp_degree=2, schedule_mode="ZBV"))
    pipe.step(*batch)
    pipe.save(folder)
    after = float(pipe.step(*batch).loss)
    pipe.load(folder)
    again = float(pipe.step(*batch).loss)
    missing = ""
    try:
        pipe.load(folder + ".nowhere" * (rank // 2))
    except OSError as error:
        missing = f"{type(error).__name__}: {error}"
    time.sleep(rank // 2)
    pipe.load(folder)
    if rank == 0:  # nobody goes on before all replicas have read: the folder may go
        Path(folder).rename(folder + ".moved")
        Path(folder).write_text("in the way")
    told = ""
    try:
        pipe.save(Path(folder) / "below")
    except OSError as error:
        told = type(error).__name__
    return [after, again, missing, told]


def test_checkpoints_are_replica_0s_and_all_load_them(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks(keep, 4, str(tmp_path / "saved"))
    assert [a[:2] for a in answers] == [answers[0][:2]] * 4
    assert answers[0][0] == answers[0][1]
    assert all(told for *_, told in answers)
    nowhere = f"FileNotFoundError: there is no checkpoint in {tmp_path / 'saved.nowhere'}"
    elsewhere = "OSError: replica 1 could not load the checkpoint"
    assert [missing for *_, missing, _ in answers] == [elsewhere, elsewhere, nowhere, nowhere]
    case = case_of("tied")
    alone = compile_local(
        copy.deepcopy(case.model),
        case.loss_fn,
        example=case.batch(SAMPLES),
        strategy=strategy_of(4, pp_degree=3),
        optimizer=adamw,
    )
    alone.load(tmp_path / "saved.moved")
    assert float(alone.step(*case.batch(SAMPLES)).loss) == pytest.approx(answers[0][0], rel=1e-9)


def without_the_last_layer(rank: int, size: int, folder: str) -> Any:
    case = made(lambda: Deep(models.Chain(3), models.squares, dense))
    shorter = made(lambda: Deep(models.Chain(2), models.squares, dense))
    if rank == 0:
        compile_local(shorter.model, shorter.loss_fn, example=shorter.batch(4), strategy=strategy_of(2)).save(
            folder
        )
    pipe = pipeloom.compile(
        case.model, case.loss_fn, example=case.batch(4), strategy=strategy_of(2, pp_degree=size)
    )
    before = [parameter.clone() for parameter in pipe.store.parameters.values()]
    try:
        pipe.load(folder)
    except (OSError, ValueError) as error:
        same = all(torch.equal(b, p) for b, p in zip(before, pipe.store.parameters.values(), strict=True))
        return [f"{type(error).__name__}: {error}", same, float(pipe.step(*case.batch(4)).loss) > 0]
    return None


def test_a_checkpoint_that_does_not_fit_one_rank_is_refused_by_all(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    assert ranks(without_the_last_layer, 2, str(folder)) == [
        [f"OSError: {folder}: another rank can't load it", True, True],
        [f"ValueError: the checkpoint in {folder} has no 'layers.2.weight', which the model has", True, True],
    ]
