"""A run of one rank, in this process: time limits, resuming, what is refused."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from pipeloom.training import rank
from pipeloom.training.config import TrainConfig

TINY: dict[str, dict[str, Any]] = {
    "train": {"batch_size": 4, "warmup": 2, "sample": 0, "save_every": 2},
    "model": {"width": 12, "layers": 1, "heads": 2, "sequence": 16, "dropout": 0.2},
    "strategy": {"pp_degree": 1, "accumulate_steps": 2},
}


def train(out: Path, resume: Path | None = None, tied: bool = False, **options: Any) -> int:
    tables = {
        **TINY,
        "train": {**TINY["train"], "out": str(out), **options},
        "model": {**TINY["model"], "tied": tied},
    }
    config = TrainConfig.from_tables(tables).to_tables()
    return rank.run(json.dumps({"tables": config, "resume": resume and str(resume), "plain": True}))


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def only_run(out: Path) -> Path:
    (run,) = out.iterdir()
    return run


def test_a_time_limit_ends_a_run_well(tmp_path: Path) -> None:
    assert train(tmp_path, steps=100000, minutes=0.005) == 0
    folder = only_run(tmp_path)
    assert json.loads((folder / "LATEST").read_text())["step"] == metrics(folder)[-1]["step"] < 100000
    assert (folder / "timeline.html").exists()


@pytest.mark.parametrize("tied", [False, True])
def test_a_run_cut_short_goes_on_as_if_it_had_not_been(tmp_path: Path, tied: bool) -> None:
    assert train(tmp_path / "whole", steps=6, tied=tied) == 0
    assert train(tmp_path / "cut", steps=6, minutes=1e-9, tied=tied) == 0
    folder = only_run(tmp_path / "cut")
    assert [row["step"] for row in metrics(folder)] == [1]
    assert train(tmp_path / "cut", folder, steps=6, sample=5, tied=tied) == 0
    for name in ("step", "loss", "held_out", "lr"):
        whole = [row[name] for row in metrics(only_run(tmp_path / "whole"))]
        assert [row[name] for row in metrics(folder)] == whole, name
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-000004", "step-000006"]
    assert len((folder / "sample.txt").read_text()) == 64 + 5 + 1


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, steps=2) == 0
    before = metrics(only_run(tmp_path))
    assert train(tmp_path, only_run(tmp_path), steps=2) == 0
    assert metrics(only_run(tmp_path)) == before
    assert "all 2 steps are done" in capsys.readouterr().out


def test_another_text_is_no_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "runs", steps=1) == 0
    (tmp_path / "other.txt").write_text("abc" * 1000)
    code = train(tmp_path / "runs", only_run(tmp_path / "runs"), steps=1, text=str(tmp_path / "other.txt"))
    assert code == 2
    assert "was trained on another text; give the same --text as then" in capsys.readouterr().err


def test_signal_handlers_come_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert train(tmp_path, steps=1) == 0
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
