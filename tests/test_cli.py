"""The commands as a user types them: what they print, write and refuse."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from pipeloom import schedules
from pipeloom.cli import main
from pipeloom.schedules.catalogue import CATALOGUE

SMALL_ZBV = "--stages 4 --chunks 2 --micro-batches 6 --schedule ZBV"


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def pipeloom(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command, run in this process."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["pipeloom", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return Done(end.value.code, out, err)

    return run


def test_version_and_help(pipeloom: Callable[..., Done]) -> None:
    done = pipeloom("--version")
    assert (done.returncode, done.stdout) == (0, f"pipeloom {importlib.metadata.version('pipeloom')}\n")
    done = pipeloom("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("train", "plan", "simulate", "schedules"))
    assert "--resume" in pipeloom("train", "--help").stdout


def test_without_a_command_the_help_is_shown(pipeloom: Callable[..., Done]) -> None:
    done = pipeloom()
    assert done.returncode == 2
    assert "Usage" in done.stdout + done.stderr


def test_simulate_writes_the_schedule_and_its_figures(pipeloom: Callable[..., Done], tmp_path: Path) -> None:
    file = tmp_path / "z.json"
    done = pipeloom(
        *f"simulate {SMALL_ZBV} --costs 1,1.1,0.8 --comm 0.1 --json {file}".split(),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert report["placement"] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [len(jobs) for jobs in report["jobs"]] == [2 * 3 * 6] * 4
    assert report["jobs"][0][0] == "F0.0"
    work = 6 * (1 + 1.1 + 0.8)
    assert report["bubble_global"] == pytest.approx(1 - work / report["makespan"])
    assert report["bubble_span"] <= report["bubble_global"]
    assert work < report["lower_bound"] <= report["makespan"] < 2 * work
    assert len(report["peak"]) == 4
    assert f"{report['makespan']:.6g}" in done.stdout


def test_simulate_knows_the_textbook_bubble(pipeloom: Callable[..., Done]) -> None:
    done = pipeloom("simulate", "--stages", "4", "--micro-batches", "8", "--costs", "1,1,1", "--json", "-")
    report = json.loads(done.stdout)
    assert report["makespan"] == pytest.approx((8 + 3) * 3)  # (M + S − 1)(F + B + W)
    assert report["bubble_global"] == pytest.approx(3 / 11)
    assert report["peak"] == [4, 3, 2, 1]


def test_costs_place_the_weight_jobs(pipeloom: Callable[..., Done]) -> None:
    """The costs are those that the schedule is made for, not only those that it is measured by."""
    even = pipeloom(*f"simulate {SMALL_ZBV} --json -".split())
    cheap = pipeloom(*f"simulate {SMALL_ZBV} --costs 1,1,0.1 --json -".split())
    assert json.loads(cheap.stdout)["jobs"] != json.loads(even.stdout)["jobs"]


def test_simulate_writes_torch_s_csv(pipeloom: Callable[..., Done], tmp_path: Path) -> None:
    file = tmp_path / "plan.csv"
    done = pipeloom(*f"simulate --stages 2 --micro-batches 1 --comm 0.1 --csv {file}".split())
    assert done.returncode == 0, done.stderr
    assert file.read_text() == (
        "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD\n"
    )
    again = pipeloom(*f"simulate --stages 2 --micro-batches 1 --comm 0.1 --schedule {file}".split())
    assert again.returncode == 0, again.stderr
    assert "makespan       6.2 " in again.stdout
    for wrong, says in (
        (
            f"--stages 3 --micro-batches 1 --schedule {file}",
            "is a schedule for --stages 2 --micro-batches 1, not",
        ),
        (
            f"--stages 2 --micro-batches 1 --chunks 2 --schedule {file}",
            "has 1 chunk a stage: write --chunks 1",
        ),
        (
            f"--stages 2 --micro-batches 1 --memory 1x --schedule {file}",
            "leave --split-backward and --memory out",
        ),
        (f"--stages 2 --micro-batches 1 --schedule {tmp_path}/no.csv", "no.csv: can't be read"),
    ):
        done = pipeloom("simulate", *wrong.split())
        assert done.returncode == 2
        assert says in done.stderr
    done = pipeloom(*f"simulate --stages 2 --micro-batches 1 --csv {tmp_path / 'no' / 'plan.csv'}".split())
    assert done.returncode == 2
    assert "can't be written (No such file or directory)" in done.stderr


def test_simulate_searches(pipeloom: Callable[..., Done], tmp_path: Path) -> None:
    page, trace = tmp_path / "p.html", tmp_path / "t.json"
    arguments = (
        "simulate --stages 4 --micro-batches 8 --costs 1,1.1,0.8 --comm 0.1 --schedule auto --memory 1x"
    )
    done = pipeloom(*arguments.split(), "--budget", "0.3s", "--timeline", str(page), "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    assert "found" in done.stdout
    assert "chunk" in done.stdout
    assert "predicted auto" in page.read_text()
    assert json.loads(trace.read_text())["otherData"]["producer"] == "pipeloom"
    done = pipeloom(*arguments.split(), "--budget", "0.3s", "--json", "-")
    report = json.loads(done.stdout)
    assert report["lower_bound"] <= report["makespan"]
    assert max(report["peak"]) <= 4


def test_simulate_draws_a_schedule_beside_another(pipeloom: Callable[..., Done], tmp_path: Path) -> None:
    page = tmp_path / "two.html"
    arguments = ["simulate", "--stages", "4", "--micro-batches", "8", "--schedule", "1F1B", "--beside"]
    done = pipeloom(*arguments, "ZBV:2", "--timeline", str(page))
    assert done.returncode == 0, done.stderr
    assert "predicted 1F1B" in page.read_text()
    assert "predicted ZBV" in page.read_text()
    done = pipeloom(*arguments, "ZBV:2")
    assert done.returncode == 2
    assert "give --timeline or --trace" in done.stderr


def test_simulate_takes_costs_of_each_chunk(pipeloom: Callable[..., Done], tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"forward": [1, 2], "backward_b": [1, 2], "backward_w": [1, 2]}))
    done = pipeloom(*f"simulate --stages 2 --micro-batches 1 --costs-file {file} --json -".split())
    assert json.loads(done.stdout)["makespan"] == pytest.approx(9)


@pytest.mark.parametrize("schedule", ["1F1B", "auto"])
def test_simulate_imports_no_torch(schedule: str) -> None:
    code = (
        "import sys; sys.argv = ['pipeloom', 'simulate', '--stages', '2', '--micro-batches', '4', '--budget', '0.1', "
        f"'--schedule', '{schedule}']\n"
        "from pipeloom.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: sys.exit(end.code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_schedules_are_listed_and_drawn(pipeloom: Callable[..., Done]) -> None:
    done = pipeloom("schedules")
    assert done.returncode == 0
    for name in schedules.names():
        assert name in done.stdout
    assert done.stdout.count("stage 3") == len(CATALOGUE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("simulate --stages 3", "Missing option '--micro-batches'"),
        ("simulate --stages x --micro-batches 3", "'--stages'"),
        ("simulate --stages 0 --micro-batches 3", "stages must be a whole number of at least 1 (got 0)"),
        ("simulate --stages 2 --chunks 0 --micro-batches 3 --schedule VPP", "chunks must be a whole number"),
        ("simulate --stages 2 --micro-batches 3 --schedule ZBV", "ZBV needs 2 chunks a stage (got chunks=1)"),
        ("simulate --stages 2 --micro-batches 3 --schedule 1F1C", "Did you mean 1F1B"),
        (
            "simulate --stages 2 --micro-batches 3 --costs 1,2",
            "--costs 1,2: write three numbers of at least 0",
        ),
        ("simulate --stages 2 --micro-batches 3 --costs 1,2,x", "--costs 1,2,x: write three numbers"),
        ("simulate --stages 2 --micro-batches 3 --costs 1,2,-1", "--costs 1,2,-1: write three numbers"),
        ("simulate --stages 2 --micro-batches 3 --costs 1,2,nan", "--costs 1,2,nan: write three numbers"),
        ("simulate --stages 2 --micro-batches 3 --comm -1", "--comm -1.0: write a number of at least 0"),
        ("simulate --stages 2 --micro-batches 3 --comm nan", "--comm nan: write a number of at least 0"),
        ("simulate --stages 2 --micro-batches 3 --json /no/such/folder/x", "can't be written (No such file"),
        (
            "simulate --stages 2 --micro-batches 3 --trace /no/such/folder/x",
            "--trace /no/such/folder/x: can't be",
        ),
        ("simulate --stages 2 --micro-batches 3 --costs 1,1,1 --costs-file x", "give one of them"),
        (
            "simulate --stages 2 --micro-batches 3 --costs-file /no/such",
            "/no/such: can't be read (No such file",
        ),
        (
            "simulate --stages 2 --micro-batches 3 --schedule auto --memory huge",
            "--memory huge: write a number",
        ),
        (
            "simulate --stages 2 --micro-batches 3 --schedule auto --memory .1",
            "no order fits the memory limit",
        ),
        (
            "simulate --stages 2 --micro-batches 3 --schedule auto --budget long",
            "budget='long': write seconds",
        ),
        ("train --schedule ZBV", "runs 2 chunks a stage, but vpp_degree is 1"),
        ("train --schedule ZBV", "vpp_degree is --chunks"),
        ("train --steps 0", "[train] steps=0: write a whole number of at least 1"),
        ("train --width 10 --heads 3", "[model] heads=3 doesn't divide width=10"),
        ("train --config /no/such.toml", "/no/such.toml: can't be read (No such file"),
        ("train --resume /no/such", "/no/such: not a run folder"),
        ("train --text /no/such.txt --stages 1", "/no/such.txt: can't be read (No such file"),
        (
            "train --micro-batches 3 --micro-batch-size 4",
            "4 × accumulate_steps 3 = 12 samples, but the batch has 16",
        ),
        ("train --bogus", "No such option: --bogus"),
        ("trian", "No such command 'trian'"),
    ],
)
def test_bad_input_is_told_in_one_line_with_exit_code_2(
    pipeloom: Callable[..., Done], arguments: str, message: str
) -> None:
    done = pipeloom(*arguments.split())
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_message_about_a_file_names_it(pipeloom: Callable[..., Done], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[strategy]\npp_degre = 2\n")
    done = pipeloom("train", "--config", str(file))
    assert done.returncode == 2
    assert f"{file}: [strategy]: Strategy has no field 'pp_degre': did you mean pp_degree?" in done.stderr
