"""pipeloom.plan: a table of plans for a model, without ranks; and the command that prints it."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from pipeloom import Proposals, Strategy, plan
from pipeloom.cli import main
from pipeloom.local import compile_local
from pipeloom.planning import simulate
from pipeloom.planning.candidates import EVEN, chosen
from pipeloom.planning.devices import Device, DeviceError, Link, device_named
from pipeloom.planning.exchange import read_csv
from pipeloom.report.figures import format_bytes
from pipeloom.report.proposals import firsts, show_proposals
from pipeloom.strategy import StrategyError
from pipeloom.training.config import ModelConfig
from pipeloom.training.model import GPT, character_loss

CONFIG = ModelConfig(width=32, heads=2, layers=3, sequence=16)
#: slow enough that this model's ops, and not a link's latency, make the step
SLOW = Device("slow", {"float32": 1e9}, math.inf, 1e9, Link(1e-5, 1e9), Link(1e-5, 1e9))


def example(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    windows = torch.empty(samples, 16, dtype=torch.int64, device="meta")
    return windows, windows


def gpt() -> GPT:
    with torch.device("meta"):
        return GPT(20, CONFIG)


def proposals(**options: Any) -> Proposals:
    given = {
        "example": example(),
        "ranks": 2,
        "micro_batches": 8,
        "budget": 0.5,
        "device": SLOW,
        "chunks": (1, 2),
    }
    return plan(gpt(), character_loss, **{**given, **options})


@pytest.fixture(scope="module")
def found() -> Proposals:
    return proposals(memory="1GB")


def test_rows_are_plans_that_stand_on_their_own(found: Proposals) -> None:
    names = {row.name for row in found.rows}
    assert names >= {"FThenB", "1F1B", "ZBH1", "VPP", "VPP split", "ZBV", "V-Min", "DualPipeV", "auto"}
    assert len({row.plan.digest() for row in found.rows if row.schedule != "auto"}) == sum(
        row.schedule != "auto" for row in found.rows
    ), "a plan is listed under two names"
    for row in found.rows:
        assert row.plan.micro_batches == 8
        again = simulate(row.plan.simulation.schedule, row.candidate.costs, row.plan.edges)
        assert row.makespan >= again.makespan * (1 - 1e-9)
        assert row.makespan >= row.candidate.bound(8) * (1 - 1e-9) >= found.bound * (1 - 2e-9)
        assert row.step >= row.makespan
    assert sum(row.schedule == "auto" for row in found.rows) == 3


def test_the_best_is_the_fastest_that_fits(found: Proposals) -> None:
    assert found.best is found.rows[0] is chosen(found.rows, 1e9)
    assert found.best.makespan <= min(row.makespan for row in found.rows) * (1 + EVEN)
    assert f"the fastest of {len(found.rows)} plans that fit" in found.why
    assert "roofline of slow: a model, steps within a factor of" in found.costs
    assert found.next_gib == "nothing: every plan here fits already"
    assert found.timeline().title == f"predicted {found.best.name}"
    fastest = min(found.rows, key=lambda row: row.makespan)
    lean = chosen(found.rows, min(max(row.peak) for row in found.rows))
    assert lean is not None
    assert lean.makespan >= fastest.makespan


def test_cuts_of_the_strategy_are_kept_and_rows_are_what_compile_runs() -> None:
    """With the same cuts the table's bytes are those of the compiled pipeline's own plan."""
    strategy = Strategy(pp_degree=2, cuts="1-2", accumulate_steps=8)
    given = proposals(strategy=strategy, ranks=None, micro_batches=None, chunks=(1,))
    assert set(given.modules) == {("layers.1.norm1",)}
    row = next(row for row in given.rows if row.name == "ZBH1")
    tokens = torch.zeros(8, 16, dtype=torch.int64)
    local = compile_local(
        GPT(20, CONFIG),
        character_loss,
        example=(tokens, tokens),
        strategy=strategy.replace(schedule_mode="ZBH1", costs="roofline"),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named]),
    )
    assert local.plan.edges == row.plan.edges
    assert local.plan.simulation.peak == pytest.approx(row.peak, rel=0.02)


def test_json_holds_every_row(found: Proposals) -> None:
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["chosen"] == 0
    assert len(data["rows"]) == len(found.rows)
    assert data["memory_limit"] == 10**9
    for row in data["rows"]:
        assert len(row["peak_bytes"]) == 2
        assert row["above_bound"] >= -1e-9
        assert len(row["cuts"]) == len(row["chunks_begin_at"]) == len(row["placement"]) - 1
        assert row["sent_bytes"] > 0
    assert Strategy.from_dict(data["strategy"]) == found.strategy


def test_the_table_marks_the_chosen_one_and_what_does_not_fit(found: Proposals) -> None:
    file = io.StringIO()
    console = Console(width=80, file=file)
    limit = sorted(max(row.peak) for row in found.rows)[len(found.rows) // 2]
    best = chosen(found.rows, limit)
    show_proposals(
        found.rows, best, found.bound, limit, [("Why", "[red]x[/red]")], every=True, console=console
    )
    text = file.getvalue()
    lines = [line for line in text.splitlines() if line.startswith(("▸", "✗", "  "))]
    # once in the table of plans, once in that of peaks
    assert sum(line.startswith("✗") for line in lines) == 2 * sum(not row.fits(limit) for row in found.rows)
    assert best is not None
    assert best.name in next(line for line in lines if line.startswith("▸"))
    assert "[red]x[/red]" in text, "notes are text, not markup"
    assert max(map(len, text.splitlines())) <= 80
    assert len({row.name for row in found.rows}) == len(firsts(found.rows))


def test_a_limit_is_kept_and_a_gib_more_is_priced(found: Proposals) -> None:
    lean = min(max(row.peak) for row in found.rows)
    tight = proposals(memory=int(lean * 1.05))
    assert tight.best is not None
    assert max(tight.best.peak) <= tight.memory_limit == int(lean * 1.05)
    assert [row.fits(tight.memory_limit) for row in tight.rows] == sorted(
        (row.fits(tight.memory_limit) for row in tight.rows), reverse=True
    )
    assert "shorter, with" in tight.next_gib or tight.next_gib.startswith("nothing")
    assert tight.strategy is not None
    assert tight.strategy.memory_limit == int(lean * 1.05)
    none = proposals(memory=1000, chunks=(1,))
    assert none.best is None
    assert none.strategy is None
    assert f"nothing fits {format_bytes(1000)} a rank: the leanest," in none.why
    assert "would fit: a step of" in none.next_gib
    assert none.to_json()["chosen"] is None
    with pytest.raises(ValueError, match="nothing fits"):
        none.timeline()


def test_recompute_is_in_the_table_where_it_helps(found: Proposals) -> None:
    """Of a limit that 1F1B exceeds: rows with chunks that are computed again, what that costs, and how to run it."""
    assert all(row.candidate.recompute == () for row in found.rows)
    options = {"ranks": 3, "chunks": (1,), "example": example(8)}
    strategy = Strategy(recompute="all", schedule_mode="auto")
    lean = next(row for row in proposals(**options, strategy=strategy).rows if row.name == "1F1B")
    tight = proposals(**options, memory=int(max(lean.peak) * 1.1))
    rows = [row for row in tight.rows if row.candidate.recompute]
    assert rows
    assert all(row.fits(tight.memory_limit) for row in rows)
    plain = next(row for row in tight.rows if row.name == "1F1B" and not row.candidate.recompute)
    assert not plain.fits(tight.memory_limit)
    best = tight.best
    assert best is not None
    assert best.candidate.recompute
    assert best.candidate.extra > 0
    assert sum(best.candidate.costs.backward) > sum(plain.candidate.costs.backward)
    assert tight.strategy is not None
    assert (tight.strategy.recompute, tight.strategy.memory_limit) == ("auto", int(tight.memory_limit))
    data = tight.to_json()
    assert data["rows"][0]["recompute"] == list(best.candidate.recompute)
    file = io.StringIO()
    show_proposals(
        tight.rows, best, tight.bound, tight.memory_limit, [], console=Console(width=80, file=file)
    )
    assert f"{len(best.candidate.recompute)}/3" in file.getvalue()
    assert max(map(len, file.getvalue().splitlines())) <= 80
    never = proposals(**options, memory=int(max(lean.peak) * 1.1), strategy=Strategy(recompute="none"))
    assert all(row.candidate.recompute == () for row in never.rows)


def test_without_a_limit_plans_keep_to_what_1f1b_needs() -> None:
    plain = proposals(chunks=(1,))
    row = next(row for row in plain.rows if row.name == "1F1B")
    assert plain.memory_limit == max(row.peak)
    assert "what 1F1B on 1 chunk a stage needs: no limit was given" in plain.memory
    assert plain.best is not None
    assert max(plain.best.peak) <= plain.memory_limit


def test_measured_here_for_a_model_without_weights() -> None:
    here = proposals(device=None, chunks=(1,))
    assert here.best is not None
    assert "measured here on cpu with" in here.costs
    assert "two rounds" in here.costs


def test_own_seconds_of_chunks_are_shared_out(tmp_path: Path) -> None:
    """Twice the seconds, twice the step: exactly, as nothing else counts but latency, which is none here."""
    own = {"forward": [1, 2], "backward_b": [0, 2], "backward_w": [2, 1], "latency": 0, "bandwidth": 1e15}
    file = tmp_path / "own.json"
    file.write_text(json.dumps(own))
    once = proposals(device=str(file), chunks=(1,))
    assert str(file) in once.costs
    row = next(row for row in once.rows if row.name == "1F1B")
    assert sum(row.candidate.costs.forward) == pytest.approx(3)
    assert sum(row.candidate.costs.backward) == pytest.approx(5)
    twice = proposals(
        device={**own, "forward": [2, 4], "backward_b": [0, 4], "backward_w": [4, 2]}, chunks=(1,)
    )
    again = next(row for row in twice.rows if row.name == "1F1B")
    assert again.makespan == pytest.approx(2 * row.makespan)


def test_a_named_device_limits_memory_and_far_links_cost() -> None:
    far = Device("far", {"float32": 1e9}, 1e9, 1e9, Link(0.0, 1e15), Link(1.0, 1e15), node=1)
    there = proposals(device=far, chunks=(1,))
    assert there.memory_limit == 1e9
    assert there.memory.endswith("all that far has")
    assert all(row.makespan > 2.0 for row in there.rows), "a message between nodes takes a second"
    assert proposals(device="H100", chunks=(1,)).memory_limit == device_named("h100").memory


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"device": "h1000"}, DeviceError, "Did you mean h100"),
        ({"device": "/no/such.json"}, DeviceError, "/no/such.json: can't be read"),
        ({"device": {"forward": [1]}}, DeviceError, "forward, backward_b and backward_w are lists"),
        ({"device": {"forward": [1], "bakward": [1]}}, DeviceError, "no field 'bakward'"),
        (
            {"device": {"forward": [1, -1], "backward_b": [0, 1], "backward_w": [1, 1]}},
            DeviceError,
            "finite numbers of at least 0",
        ),
        ({"budget": "soon"}, ValueError, "budget='soon': write seconds above 0"),
        ({"budget": 0}, ValueError, "budget=0: write seconds above 0"),
        ({"memory": "much"}, StrategyError, "memory_limit='much'"),
        ({"ranks": 0}, StrategyError, "pp_degree=0"),
        (
            {"micro_batches": 9},
            StrategyError,
            "9 micro-batches were asked for, but the example has 8 samples",
        ),
        ({"chunks": ()}, StrategyError, r"chunks=\(\): write whole numbers"),
        ({"ranks": 500, "micro_batches": 2, "chunks": (1,)}, ValueError, "too few for 500 chunks"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        proposals(**options)


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["pipeloom", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, out, err

    return call


def test_the_command_plans_a_training_run(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    config, page, trace, data = (tmp_path / name for name in ("run.toml", "p.html", "t.json", "d.json"))
    config.write_text(
        "[model]\nwidth = 32\nheads = 2\nlayers = 2\nsequence = 16\ntied = true\n[train]\nbatch_size = 8\n"
    )
    options = f"--config {config} --ranks 2 --micro-batches 4 --budget 0.2s --device cpu --all --json {data}"
    code, out, err = run("plan", *options.split(), "--timeline", str(page), "--trace", str(trace))
    assert code == 0, err
    assert "▸" in out
    assert json.loads(data.read_text())["micro_batches"] == 4
    assert "predicted" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


def test_the_command_writes_torch_s_csv(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """Or says why not: what a search by the clock finds best may cut a small model inside of a layer, so that values
    skip a chunk."""
    config, table = tmp_path / "run.toml", tmp_path / "plan.csv"
    config.write_text(
        "[model]\nwidth = 32\nheads = 2\nlayers = 2\nsequence = 16\n[train]\nbatch_size = 8\n"
        '[strategy]\ncuts = ["layers.1"]\n'
    )
    options = f"--config {config} --ranks 2 --micro-batches 4 --budget 0.2s --device cpu --csv {table}"
    code, out, err = run("plan", *options.split())
    assert "▸" in out
    if code:
        assert code == 2
        assert "neighbouring chunks only" in err
        assert not table.exists()
    else:
        found = read_csv(table)
        assert (found.stages, found.micro_batches) == (2, 4)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--device h1000 --ranks 2", "no figures of a device 'h1000'. Did you mean h100?"),
        ("--ranks 2 --micro-batches 32", "32 micro-batches were asked for, but the example has 16 samples"),
        ("--ranks 2 --memory 3XB", "memory_limit='3XB'"),
        ("--ranks 2 --budget x", "budget='x'"),
        ("--config /no/such.toml", "/no/such.toml: can't be read"),
    ],
)
def test_the_command_refuses_in_one_line(
    run: Callable[..., tuple[int, str, str]], arguments: str, says: str
) -> None:
    code, out, err = run("plan", *arguments.split())
    assert code == 2
    assert says in err
    assert err.count("\n") == 1
    assert not out
