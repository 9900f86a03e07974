"""A kill while a folder is written leaves the last good one: processes that save again and again are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from pipeloom.local import LocalPipeline, compile_local
from pipeloom.runtime import folders
from pipeloom.strategy import Strategy

KILLS = 5
WIDTH = 64


def compiled(stages: int) -> LocalPipeline:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    return compile_local(
        model,
        F.mse_loss,
        example=(torch.Size([2, WIDTH]), torch.Size([2, WIDTH])),
        strategy=Strategy(pp_degree=stages, costs="roofline"),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9),
    )


def fill(pipe: LocalPipeline, number: int) -> None:
    """State that shows whether all of it is of one save."""
    for stage in pipe.stages:
        stage.steps = number
        for parameter in stage.store.parameters.values():
            parameter.data.fill_(number)
        optimizer = stage.optimizer
        assert optimizer is not None
        for _, parameter in stage.store.trainable():
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, number)


def numbers(pipe: LocalPipeline) -> set[float]:
    found = {float(stage.steps) for stage in pipe.stages}
    for stage in pipe.stages:
        assert stage.optimizer is not None
        tensors = [*stage.store.parameters.values()]
        tensors += [state["momentum_buffer"] for state in stage.optimizer.state.values()]
        for tensor in tensors:
            found |= set(tensor.detach().unique().tolist())
    return found


def save_for_ever(pipe: LocalPipeline, folder: Path) -> NoReturn:
    number = 0
    while True:
        number += 1
        fill(pipe, number)
        pipe.save(folder / "saved")
        pipe.export(folder / "out")
        print(number, flush=True)  # and where nobody reads any more, this ends it


def main(folder: Path) -> None:
    """Forks a process that saves for ever, once a line of standard input, and waits for its end. It says its id, then
    each number that it has saved."""
    pipe = compiled(2)
    for _ in sys.stdin:
        child = os.fork()
        if not child:
            print(os.getpid(), flush=True)
            save_for_ever(pipe, folder)
        os.waitpid(child, 0)
        print("ended", flush=True)


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, __file__, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        yield process


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_whole_folder(tmp_path: Path, saving: subprocess.Popen[str]) -> None:
    loaded = compiled(1)
    assert saving.stdin is not None
    assert saving.stdout is not None
    for kill in range(KILLS):
        saving.stdin.write("\n")
        saving.stdin.flush()
        child, done = (int(saving.stdout.readline()) for _ in range(2))
        time.sleep(0.004 + 0.021 * kill)
        os.kill(child, signal.SIGKILL)
        done = max([done, *map(int, iter(saving.stdout.readline, "ended\n"))])
        loaded.load(tmp_path / "saved")
        assert len(numbers(loaded)) == 1
        assert numbers(loaded) <= {float(done), float(done + 1)}
        out = folders.whole_folder(tmp_path / "out", "model.safetensors.index.json")
        values = {
            v
            for file in out.glob("*.safetensors")
            for t in load_file(file).values()
            for v in t.unique().tolist()
        }
        assert len(values) == 1
        assert values <= {float(done), float(done + 1)}


@pytest.mark.parametrize("last", ["partial written", "old moved", "new moved"])
def test_a_kill_between_renames(last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each state that a kill can leave the folder in, made by ending the save there."""
    pipe = compiled(2)
    fill(pipe, 1)
    pipe.save(tmp_path / "saved")

    class Killed(BaseException):
        pass

    renames = 0
    rename = Path.rename

    def counted(self: Path, target: Path) -> Path:
        nonlocal renames
        renames += self.parent == tmp_path  # others are the checkpoint's own, within its folder
        if (last, renames) in (("partial written", 1), ("old moved", 2)):
            raise Killed
        moved = rename(self, target)
        if (last, renames) == ("new moved", 2):
            raise Killed
        return moved

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", counted)
        fill(pipe, 2)
        with pytest.raises(Killed):
            pipe.save(tmp_path / "saved")
    other = compiled(3)
    other.load(tmp_path / "saved")
    assert numbers(other) == {2.0 if last == "new moved" else 1.0}
    fill(pipe, 3)  # and the next save clears up
    pipe.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    assert numbers(other) == {3.0}
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
