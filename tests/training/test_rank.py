"""One rank's process: it ends with its launcher, and tells errors in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeloom.training import rank
from pipeloom.training.config import TrainConfig

CHILD = """
import os, sys, time
from pipeloom.training import rank
if sys.argv[1] == "thread":
    sys.platform = "plan9"
rank.die_with_parent(os.getppid())
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline(), flush=True)
child.wait()
"""


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie that nobody has waited for doesn't)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("way", ["kernel", "thread"])
def test_a_rank_ends_when_its_launcher_is_killed(way: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, way], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert alive(child)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        deadline = time.monotonic() + 5
        while alive(child) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive(child)
    finally:
        if alive(child):
            os.kill(child, signal.SIGKILL)


def test_a_rank_whose_launcher_is_gone_already_doesn_t_start() -> None:
    code = "from pipeloom.training import rank; rank.die_with_parent(2**22 + 1); print('lives')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


def order(**train: Any) -> str:
    tables = TrainConfig().to_tables()
    tables["train"].update(train)
    return json.dumps({"tables": tables, "resume": None, "plain": True})


@pytest.mark.parametrize(("number", "told"), [("0", True), ("1", False)])
def test_only_the_first_rank_tells_what_all_find(
    number: str, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", number)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert rank.run(order(text="/no/such.txt")) == 2
    error = capsys.readouterr().err
    assert error == (
        "error: /no/such.txt: can't be read (No such file or directory); check the path\n" if told else ""
    )


def test_a_wrong_number_of_ranks_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert rank.run(order()) == 2
    assert (
        "3 ranks were started for a pipeline of 2 stages: start one rank a stage" in capsys.readouterr().err
    )
