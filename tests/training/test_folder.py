"""A run's folder: made once, read whole, cut back on resume."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pipeloom.training.config import ConfigError, TrainConfig
from pipeloom.training.folder import Latest, RunFolder, replace_file


def new(tmp_path: Path) -> RunFolder:
    return RunFolder.create(TrainConfig(out=str(tmp_path / "runs")))


def saved(folder: RunFolder, *steps: int, keep: int = 2) -> None:
    for step in steps:
        folder.checkpoint(step).mkdir()
        folder.publish(step, "digest", keep)


def test_a_new_folder_holds_its_config_and_is_never_shared(tmp_path: Path) -> None:
    first, second = new(tmp_path), new(tmp_path)
    assert first.path != second.path
    assert TrainConfig.from_tables(first.tables()) == TrainConfig(out=str(tmp_path / "runs"))


def test_a_folder_that_can_t_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match=r"runs.* choose another --out"):
        new(tmp_path)


def test_publishing_moves_latest_and_prunes(tmp_path: Path) -> None:
    folder = new(tmp_path)
    saved(folder, 100, 200, 300)
    assert folder.latest() == Latest("step-000300", 300, "digest")
    assert sorted(path.name for path in folder.path.glob("step-*")) == ["step-000200", "step-000300"]


def test_latest_is_the_old_one_or_the_new_one_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new(tmp_path)
    saved(folder, 100)
    folder.checkpoint(200).mkdir()

    def die(_descriptor: int) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(OSError, match="power cut"):
        folder.publish(200, "digest", 2)
    assert folder.latest().step == 100


def test_rewind_drops_what_a_resumed_run_writes_again(tmp_path: Path) -> None:
    folder = new(tmp_path)
    saved(folder, 2)
    for step in (1, 2, 3, 4):
        folder.append({"step": step, "loss": 0.5})
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # the writer died here
    folder.checkpoint(4).mkdir()
    folder.rewind(2)
    rows = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert [path.name for path in folder.path.glob("step-*")] == ["step-000002"]
    folder.append({"step": 3})
    assert len((folder.path / "metrics.jsonl").read_text().splitlines()) == 3


def test_what_is_no_run_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a run folder: config.json can't be read"):
        RunFolder(tmp_path).tables()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json: not valid JSON"):
        RunFolder(tmp_path).tables()
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config.json: holds no tables"):
        RunFolder(tmp_path).tables()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no checkpoint yet"),
        ("{", "LATEST: can't be understood"),
        ('{"checkpoint": "a"}', "LATEST: can't be understood"),
        ('{"checkpoint": "a", "step": 1, "text": ""}', "names 'a', which is no folder"),
        ('{"checkpoint": "../runs", "step": 1, "text": ""}', "names '../runs', which is no folder"),
    ],
)
def test_a_latest_that_leads_nowhere_is_told(tmp_path: Path, text: str | None, message: str) -> None:
    folder = new(tmp_path)
    if text is not None:
        (folder.path / "LATEST").write_text(text)
    with pytest.raises(ConfigError, match=message):
        folder.latest()


def test_replace_file_leaves_no_draft(tmp_path: Path) -> None:
    file = tmp_path / "a"
    replace_file(file, "one")
    replace_file(file, "two")
    assert file.read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
