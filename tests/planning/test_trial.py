"""What `pipeloom simulate` tries: named schedules and auto, on costs of a stage or of each chunk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeloom.planning.errors import PlanError
from pipeloom.planning.trial import budget_seconds, memory_units, numbers, numbers_of, trial


def test_a_named_schedule_on_costs_of_a_stage() -> None:
    tried = trial("1F1B", numbers("1,1,1"), 4, 8)
    assert tried.simulation.makespan == pytest.approx(33)
    assert tried.bound <= 33
    assert not tried.notes


def test_auto_is_no_worse_than_any_named_schedule_within_its_limit() -> None:
    costs = numbers("1,1.1,0.8", 0.1)
    found = trial("AUTO", costs, 4, 8, memory="1x", budget=0.5)
    assert found.simulation.makespan <= trial("ZBV", costs, 4, 8, chunks=2).simulation.makespan
    assert max(found.simulation.peak) <= 4 + 1e-9
    assert found.bound <= found.simulation.makespan
    assert [name for name, _ in found.notes] == ["found", "memory", "search"]
    one = trial("auto", costs, 4, 8, chunks=1, budget=0.2)
    assert one.schedule.chunks == 1


def test_a_limit_for_a_named_schedule() -> None:
    free, tight = (trial("ZBH2", numbers(), 4, 8, memory=limit) for limit in (None, "4"))
    assert max(free.simulation.peak) > 4 >= max(tight.simulation.peak)


def test_memory_is_a_number_or_times_what_1f1b_needs() -> None:
    assert memory_units(None, 4, 8) is None
    assert memory_units("1x", 4, 8) == 4
    assert memory_units("1.5X", 4, 2) == 3
    assert memory_units("6", 4, 8) == 6
    for wrong in ("x", "-1", "0", "much", "nan", "1xx"):
        with pytest.raises(ValueError, match=f"--memory {wrong}: write a number above 0"):
            memory_units(wrong, 4, 8)


def test_budgets() -> None:
    assert [budget_seconds(b) for b in (3, 0.5, "10s", " 2 min", "7")] == [3, 0.5, 10, 120, 7]
    for wrong in ("", "s", "-1s", "1h", 0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="write seconds above 0"):
            budget_seconds(wrong)


def test_costs_of_each_chunk(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"forward": [1, 1, 1, 3], "backward_b": [1] * 4, "backward_w": [1] * 4}))
    costs = numbers_of(file, 2, comm=0.5)
    assert costs.chunks is not None
    assert costs.chunks.comm == 0.5
    assert costs.chunks.held_weight == (0.5,) * 4
    tried = trial("ZBV", costs, 2, 4)
    assert tried.schedule.chunks == 2
    assert tried.simulation.makespan >= 4 * (1 + 3 + 2 + 2), "stage 0 has the chunks 0 and 3"
    assert trial("auto", costs, 2, 4, budget=0.2).schedule.chunks == 2
    with pytest.raises(ValueError, match="of 4 chunks, which can't be spread evenly over 3 stages"):
        trial("ZBV", costs, 3, 4)
    with pytest.raises(ValueError, match="of 4 chunks, which isn't 4 stages × 2 chunks a stage"):
        trial("ZBV", costs, 4, 4, chunks=2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "write an object with forward, backward_b, backward_w"),
        ('{"forward": [1], "backward_b": [1]}', "write an object with"),
        (
            '{"forward": [1], "backward_b": [1], "backward_w": [1, 2]}',
            "backward_w has 2 numbers, there are 1 chunks",
        ),
        ('{"forward": [1], "backward_b": [1], "backward_w": [-1]}', "must be a finite number ≥ 0"),
        ('{"forward": [1], "backward_b": [1], "backward_w": [1], "comms": 1}', "no field .'comms'"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"{file}: .*{says}"):
        numbers_of(file, 1)


def test_what_auto_refuses() -> None:
    with pytest.raises(ValueError, match="auto chooses whether backwards are split"):
        trial("auto", numbers(), 2, 4, split_backward=True)
    with pytest.raises(PlanError, match="no order fits the memory limit"):
        trial("auto", numbers(), 2, 4, memory="0.1", budget=0.1)
    with pytest.raises(ValueError, match="stages and micro_batches must be at least 1"):
        trial("auto", numbers(), 0, 4, budget=0.1)


def test_a_file_is_run_as_it_is_and_an_unsafe_one_is_told(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    found = trial(str(file), numbers(), 2, 2)
    assert found.schedule.name == "own"
    assert found.simulation.makespan == trial("1F1B", numbers(), 2, 2).simulation.makespan
    file.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    with pytest.raises(ValueError, match=r"own\.csv: .*F1\.1"):
        trial(str(file), numbers(), 2, 2)
    file.write_text("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n")
    with pytest.raises(ValueError, match=r"own\.csv: missing: B0\.1 on stage 0"):
        trial(str(file), numbers(), 2, 2)
