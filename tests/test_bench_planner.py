"""The planner's benchmark: its parts, on a case that is small."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCH = str(Path(__file__).parent.parent / "bench")


@pytest.fixture(scope="module", autouse=True)
def bench():
    """The benchmark's modules can be imported, here and in the processes that it starts."""
    sys.path.insert(0, BENCH)
    yield
    sys.path.remove(BENCH)


def load(name):
    return importlib.import_module(name)


@pytest.mark.slow
def test_torchs_orders_are_whole_and_what_they_should_be():
    from pipeloom.planning import lower, verify
    from pipeloom.planning.costs import Costs
    from pipeloom.schedules import build, chain_edges

    orders = load("torch_orders")
    for name, only in orders.TORCH.items():
        chunks = only or 2
        schedule = orders.torch_schedule(name, 2, chunks, 4)
        assert schedule is not None
        verify(lower(schedule, chain_edges(2 * chunks), Costs.uniform(2 * chunks)))
    ours = build("InterleavedZeroBubble", stages=4, chunks=2, micro_batches=8)
    theirs = orders.torch_schedule("InterleavedZeroBubble", 4, 2, 8)
    assert theirs.jobs == ours.jobs
    assert orders.torch_schedule("DualPipeV", 4, 2, 4) is None  # torch wants M ≥ 2S


def test_a_cell_is_measured_kept_and_printed(tmp_path):
    cells, planner = load("planner_cells"), load("planner")
    cell = cells.Cell(2, 4, "1/1/1, comm 0.1", 1.0)
    result = cells.measure(cell, 2.0)
    assert result.bound <= result.auto + 1e-9
    assert result.auto <= min([*result.named.values(), *result.torch.values()]) + 1e-9
    assert {"1F1B", "ZBH1", "ZBV", "FThenB"} <= set(result.named)
    assert "ZBVZeroBubble" in result.torch
    assert "LoopedBFS" not in result.torch  # holds all micro-batches
    assert result.peak <= 2 + 1e-6
    kept = tmp_path / "runs" / "cells.jsonl"
    cells.save(kept, result, 2.0)
    assert cells.load(kept, 2.0) == {cell: result}
    assert cells.load(kept, 30) == {}
    text = planner.quality([result], 2.0)
    assert f"**{result.auto / result.bound:.4f}**" in text
    assert "worse than one of our named schedules in 0, than one of torch's in 0" in text


def test_there_are_81_cells_and_a_name_for_each_size(capsys):
    planner = load("planner")
    parser = planner._parser()
    everything = planner.chosen("all", parser)
    assert len(everything) == len(set(everything)) == 81
    assert len(planner.chosen("4x8,16x64", parser)) == 18
    assert planner.chosen("none", parser) == []
    with pytest.raises(SystemExit):
        planner.chosen("5x5", parser)
    assert "5x5: there are all, none, 16x16" in capsys.readouterr().err


@pytest.mark.slow
def test_planning_times_have_a_row_a_schedule_and_stop_waiting(monkeypatch):
    planner = load("planner")
    monkeypatch.setattr(planner, "LARGE", ((2, 2, 4),))
    assert "VPP, S 2, V 2, M 4" in planner.planning_times(60)
    assert "more than 0" in planner.planning_times(0)
