"""Strategy(executor="fleet") gives the list executor's bits: losses, gradients, weights after updates, evaluation."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import models
import pipeloom
from parity import Deep, Outcome, deep, made, pipe_outcome, pipeline
from pipeloom.fleet import TaskError
from pipeloom.local import LocalPipeline
from pipeloom.program.batch import flatten_batch
from pipeloom.runtime.errors import PeerError
from pipeloom.strategy import Strategy

SCHEDULES = ("1F1B", "FThenB", "ZBH1")


@functools.cache
def case_of(model: str) -> Deep:
    return deep(model)


def strategy_of(executor: str, schedule: str = "1F1B", stages: int = 3, **fields: Any) -> Strategy:
    return Strategy(
        pp_degree=stages, schedule_mode=schedule, executor=executor, **{"costs": "roofline", **fields}
    )


def both(model: str, **options: Any) -> tuple[LocalPipeline, LocalPipeline]:
    """The same pipeline twice, by list and by fleet."""
    case = case_of(model)
    made = {name: options.pop(name, None) for name in ("optimizer", "scheduler")}
    return tuple(pipeline(case, strategy_of(e, **options), case.batch(8), **made) for e in ("list", "fleet"))  # type: ignore[return-value]


@functools.cache
def outcome_of(executor: str, model: str, schedule: str, stages: int, micro_batches: int) -> Outcome:
    case = case_of(model)
    strategy = strategy_of(executor, schedule, stages, accumulate_steps=micro_batches)
    return pipe_outcome(pipeline(case, strategy, case.batch(9)), case.batch(9))


@pytest.mark.parametrize(
    ("model", "micro_batches"),
    [("chain", m) for m in range(1, 9)] + [(model, m) for model in ("tied", "skip") for m in (1, 5)],
)
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_and_gradients_have_the_list_executors_bits(
    model: str, schedule: str, stages: int, micro_batches: int
) -> None:
    fleet = outcome_of("fleet", model, schedule, stages, micro_batches)
    assert fleet.differences(outcome_of("list", model, schedule, stages, micro_batches)) == []


@pytest.mark.parametrize("model", ["twice", "dropout"])
@pytest.mark.parametrize("stages", [1, 4])
def test_other_models(model: str, stages: int) -> None:
    fleet = outcome_of("fleet", model, "1F1B", stages, 4)
    assert fleet.differences(outcome_of("list", model, "1F1B", stages, 4)) == []


def test_a_backward_in_two_parts_runs_in_one_task() -> None:
    one, two = both("chain", split_backward=True, accumulate_steps=4)
    batch = case_of("chain").batch(8)
    assert pipe_outcome(two, batch).differences(pipe_outcome(one, batch)) == []
    names = {task.name for task in two.stages[0]._last.graph.nodes.values()}  # type: ignore[union-attr]
    assert names == {"lr", "fwd", "bwd", "opt", "source", "sink"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_goes_the_same_way(schedule: str, tmp_path: Path) -> None:
    """Clipping, momentum, a scheduler; batches of several sizes; steps that add up; evaluation between; a checkpoint
    that the other executor goes on from."""
    options: dict[str, Any] = {
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7),
        "schedule": schedule,
        "accumulate_steps": 4,
        "max_norm": 0.5,
    }
    case = case_of("tied")
    by_list, by_fleet = both("tied", **options)
    for step, samples in enumerate((8, 5, 9, 2)):
        batch = case.batch(samples, seed=step)
        results = [pipe.step(*batch, update=step != 1) for pipe in (by_list, by_fleet)]
        assert torch.equal(results[0].loss, results[1].loss)
        assert step == 1 or torch.equal(results[0].grad_norm, results[1].grad_norm)  # type: ignore[arg-type]
        rates = (
            [pipe.stages[0].scheduler.get_last_lr() for pipe in (by_list, by_fleet)] if step == 2 else [0, 0]
        )
        assert rates[0] == rates[1]
        losses = [pipe.eval(*case.batch(6)).loss for pipe in (by_list, by_fleet)]
        assert torch.equal(*losses)
    by_fleet.save(tmp_path / "a")
    by_list.load(tmp_path / "a")
    for pipe in (by_list, by_fleet):
        pipe.step(*case.batch(8, seed=9))
    weights = [pipe.parameters() for pipe in (by_list, by_fleet)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_outputs_of_an_evaluation_are_the_same() -> None:
    one, two = both("chain", accumulate_steps=3)
    batch = case_of("chain").batch(7)
    assert torch.equal(one.eval(*batch, outputs=True).outputs, two.eval(*batch, outputs=True).outputs)


def test_buffers_that_move_move_alike() -> None:
    case = Deep(made(models.NormChain), models.squares, case_of("chain").make)
    pipes = [
        pipeline(case, strategy_of(e, stages=2, accumulate_steps=4), case.batch(8)) for e in ("list", "fleet")
    ]
    for pipe in pipes:
        pipe.step(*case.batch(8))
    buffers = [{n: b for s in pipe.stages for n, b in s.store.buffers.items()} for pipe in pipes]
    assert all(torch.equal(buffers[0][n], buffers[1][n]) for n in buffers[0])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_step_cost_is_measured_as_for_a_list(schedule: str) -> None:
    one, two = both("chain", schedule=schedule, accumulate_steps=6)
    batch = case_of("chain").batch(12)
    for pipe in (one, two):
        pipe.step(*batch)
    measured = two.measured
    assert measured is not None
    assert measured.step_time > 0
    assert 0 <= measured.bubble_span <= measured.bubble_global < 1
    timelines = [pipe.timeline() for pipe in (one, two)]

    def jobs(number: int) -> list[tuple[int, str, int, int]]:
        spans = timelines[number].spans
        return sorted((s.rank, s.kind, s.chunk, s.micro_batch) for s in spans if s.kind != "wait")

    assert jobs(0) == jobs(1)
    flows = [
        sorted((f.direction, f.source, f.target, f.micro_batch, f.nbytes) for f in t.flows) for t in timelines
    ]
    assert flows[0] == flows[1]
    assert all(f.arrived >= f.sent for f in timelines[1].flows)


def test_the_bytes_alive_follow_the_order_that_was_run() -> None:
    """1F1B keeps S − s activations on stage s, F-then-B all of them."""
    case, batch = case_of("chain"), case_of("chain").batch(16)
    peaks = {}
    for schedule in ("1F1B", "FThenB"):
        pipe = pipeline(case, strategy_of("fleet", schedule, 2, accumulate_steps=8), batch)
        pipe.step(*batch)
        peaks[schedule] = [stage._last.peak_bytes for stage in pipe.stages]  # type: ignore[union-attr]
        for stage in pipe.stages:
            assert stage._last.recorder.live[-1] == 0  # type: ignore[union-attr]
    assert peaks["FThenB"][1] > 4 * peaks["1F1B"][1]
    assert peaks["1F1B"][0] > peaks["1F1B"][1]


def test_never_more_than_s_minus_s_forwards_alive() -> None:
    case, batch = case_of("chain"), case_of("chain").batch(16)
    pipe = pipeline(case, strategy_of("fleet", stages=4, accumulate_steps=8), batch)
    pipe.step(*batch)
    for s in range(4):
        spans = [span for span in pipe.timeline().spans if span.rank == s and span.kind in ("F", "X")]
        moments = [(span.start, 1) if span.kind == "F" else (span.end, -1) for span in spans]
        live = [sum(step for _, step in sorted(moments)[: i + 1]) for i in range(len(moments))]
        assert max(live) == 4 - s


def test_a_task_that_raises_says_which() -> None:
    case = case_of("chain")
    pipe = pipeline(case, strategy_of("fleet", accumulate_steps=3), case.batch(6))
    leaves, form = flatten_batch(*case.batch(6))
    executor = pipe.stages[1]._division(leaves, form, [2, 2, 2], training=True).executor
    executor.plan.items[executor._parts["F", 2].run].call = _broken
    with pytest.raises(
        TaskError, match=r"rank 1: job fwd \(Compute, task 5 on rank 1\) in scope 2 failed: ArithmeticError"
    ):
        pipe.step(*case.batch(6))


def _broken(_args: Any) -> Any:
    raise ArithmeticError("the sky fell")


# ---- on real ranks


def compiled(executor, schedule, stages, micro_batches, **options):
    case = deep("tied")
    return case, pipeloom.compile(
        case.model,
        case.loss_fn,
        example=case.batch(8),
        strategy=strategy_of(executor, schedule, stages, accumulate_steps=micro_batches, **options),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    )


def steps(_rank, size, schedule, micro_batches):
    found = []
    for executor in ("list", "fleet"):
        case, pipe = compiled(executor, schedule, size, micro_batches)
        figures = []
        for step in range(3):
            result = pipe.step(*case.batch(8, seed=step))
            figures += [float(result.loss).hex(), float(result.grad_norm).hex()]
            figures.append(float(pipe.eval(*case.batch(5)).loss).hex())
        pipe.step(*case.batch(8), update=False)
        gradients = {n: [float(v).hex() for v in g.flatten()] for n, g in pipe.gradients().items()}
        flows = pipe.timeline().flows
        found.append([figures, gradients, len(flows), pipe.measured.step_time > 0])
        assert all(flow.sent <= flow.arrived for flow in flows)
        pipe.close()
    return found


@pytest.mark.parametrize(
    ("stages", "schedule", "micro_batches"),
    [
        (2, "1F1B", 4),
        (3, "ZBH1", 6),
        pytest.param(4, "1F1B", 8, marks=pytest.mark.nightly),
        pytest.param(2, "FThenB", 3, marks=pytest.mark.nightly),
    ],
)
def test_gloo_ranks_give_the_list_executors_bits(ranks, stages, schedule, micro_batches):
    for by_list, by_fleet in ranks(steps, stages, schedule, micro_batches, timeout=150):
        assert by_list == by_fleet


def fail(rank, size, how):
    case, pipe = compiled("fleet", "1F1B", size, 4)
    pipe.step(*case.batch(8))
    executor = pipe._last
    run = executor.plan.items[executor._parts["X", 1].run]
    call = run.call

    def broken(_arguments):
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("the sky fell")

    if rank == 1:
        run.call = broken
    began = time.monotonic()
    try:
        pipe.step(*case.batch(8))
    except (TaskError, PeerError) as error:
        took = time.monotonic() - began
        run.call = call
        try:
            pipe.step(*case.batch(8))
        except RuntimeError as again:
            return [type(error).__name__, str(error), took, str(again)]
    return ["no error", "", 0, ""]


def test_a_rank_whose_task_raises_is_named_by_every_rank(ranks):
    for rank, (kind, text, seconds, again) in enumerate(ranks(fail, 3, "raise", timeout=100)):
        assert kind == ("TaskError" if rank == 1 else "PeerError")
        assert text.startswith(f"rank {rank}:")
        assert "bwd (Compute, task 6 on rank 1) in scope 1" in text
        assert "ArithmeticError: the sky fell" in text
        assert seconds < 8
        assert "this pipeline stopped before" in again


def test_a_killed_rank_ends_the_step_of_all(ranks):
    outcomes = ranks.outcomes(fail, 3, "kill", timeout=100)
    assert outcomes[1].kind == "died"
    for rank in (0, 2):
        kind, text, seconds, _ = outcomes[rank].value
        assert kind == "PeerError"
        assert "rank 1 failed: its process is gone" in text
        assert seconds < 8
