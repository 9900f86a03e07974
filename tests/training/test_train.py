"""`pipeloom train` as a user runs it: real ranks, signals, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

TINY = [
    *(
        "--width",
        "12",
        "--layers",
        "2",
        "--heads",
        "2",
        "--sequence",
        "16",
        "--batch-size",
        "4",
        "--warmup",
        "2",
    ),
    *("--micro-batches", "2", "--dropout", "0.2", "--eval-every", "10", "--save-every", "20", "--plain"),
]
STEPS = 55
WHOLE = [*TINY, "--schedule", "ZBV", "--chunks", "2", "--steps", str(STEPS), "--sample", "20"]
COMMAND = [sys.executable, "-c", "from pipeloom.cli import main; main()", "train"]


def environment() -> dict[str, str]:
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in hidden} | {
        "OMP_NUM_THREADS": "1"
    }


def train(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, check=False, env=environment(), timeout=200
    )


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], Any], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def metrics(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def only_run(out: Path) -> Path:
    (run,) = out.iterdir()
    return run


class Started:
    """A run in the background, once its first step is behind it."""

    def __init__(self, out: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "--out", str(out), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
        )
        self.ranks: list[int] = []
        started = wait_until(lambda: self.process.poll() is not None or self._stepped(out), 150)
        assert started, "no step was made in time"
        assert self.process.poll() is None, self.process.stdout and self.process.stdout.read()
        self.ranks = children(self.process.pid)

    @staticmethod
    def _stepped(out: Path) -> bool:
        return out.exists() and any(metrics(run) for run in out.iterdir())

    def clean_up(self) -> None:
        for pid in [self.process.pid, *self.ranks]:
            if running(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    runs: list[Started] = []

    def begin(*arguments: str) -> Started:
        runs.append(Started(tmp_path / "runs", *arguments))
        return runs[-1]

    yield begin
    for run in runs:
        run.clean_up()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run that was left alone: its folder, and what it printed."""
    out = tmp_path_factory.mktemp("unbroken")
    done = train(*WHOLE, "--out", str(out))
    assert done.returncode == 0, done.stderr
    return only_run(out), done


def test_a_run_leaves_what_it_promises(unbroken: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = unbroken
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if row["held_out"] is not None] == [10, 20, 30, 40, 50, STEPS]
    assert all(len(row["busy"]) == 2 and row["tokens_per_second"] > 0 for row in rows)
    assert json.loads((folder / "LATEST").read_text())["step"] == STEPS
    assert len((folder / "sample.txt").read_text()) == 64 + 20 + 1
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    page = (folder / "timeline.html").read_text()
    assert "predicted" in page
    assert "measured" in page
    for words in ("held-out loss", "before", "after", "Bubble, global", "predicted", "measured", str(folder)):
        assert words in done.stdout, words
    assert done.stderr == ""


@pytest.fixture
def stopped(start: Callable[..., Started]) -> Callable[..., str]:
    """A run that got a signal: what it printed."""

    def stop(number: signal.Signals, *arguments: str) -> str:
        run = start(*arguments)
        run.process.send_signal(number)
        output, _ = run.process.communicate(timeout=60)
        assert run.process.returncode == 130, output
        assert wait_until(lambda: not any(map(running, run.ranks)), 5)
        return str(output)

    return stop


def test_a_stopped_run_goes_on_with_the_losses_of_an_unbroken_one(
    tmp_path: Path,
    stopped: Callable[..., str],
    unbroken: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    output = stopped(signal.SIGINT, *WHOLE)
    folder = only_run(tmp_path / "runs")
    last = metrics(folder)[-1]["step"]
    assert last < STEPS, "it ended before it was stopped"
    assert f"stopped after step {last}; go on with: pipeloom train --resume {folder}" in output
    assert json.loads((folder / "LATEST").read_text())["step"] == last

    resumed = train("--resume", str(folder))
    assert resumed.returncode == 0, resumed.stderr
    for name in ("step", "loss", "held_out", "lr"):
        got, expected = metrics(folder), metrics(unbroken[0])
        assert [row[name] for row in got] == [row[name] for row in expected], name


def test_sigterm_stops_a_run_like_ctrl_c(tmp_path: Path, stopped: Callable[..., str]) -> None:
    output = stopped(signal.SIGTERM, *TINY, "--steps", "100000")
    last = metrics(only_run(tmp_path / "runs"))[-1]["step"]
    assert f"stopped after step {last};" in output


def test_no_rank_outlives_a_killed_launcher(start: Callable[..., Started]) -> None:
    run = start(*TINY, "--steps", "100000")
    assert len(run.ranks) == 2
    run.process.kill()
    run.process.wait()
    assert wait_until(lambda: not any(map(running, run.ranks)), 10)


def test_a_killed_rank_ends_the_run(start: Callable[..., Started]) -> None:
    run = start(*TINY, "--steps", "100000")
    os.kill(run.ranks[0], signal.SIGKILL)
    output, _ = run.process.communicate(timeout=60)
    assert run.process.returncode == 1, output
    assert not any(map(running, run.ranks))


def test_what_can_t_be_run_is_told_once(tmp_path: Path) -> None:
    done = train("--text", str(tmp_path / "none.txt"))
    assert done.returncode == 2
    assert (
        done.stderr
        == f"error: {tmp_path / 'none.txt'}: can't be read (No such file or directory); check the path\n"
    )
