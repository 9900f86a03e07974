"""A run's options: tables in, a checked TrainConfig out, every message."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeloom.strategy import Strategy, StrategyError
from pipeloom.training.config import ConfigError, TrainConfig, merge_tables, read_tables

BAD: list[tuple[dict[str, Any], str]] = [
    ({"trains": {}}, r"\[trains\] is not a table of a run: there are \[train\], \[model\] and \[strategy\]"),
    ({"model": 3}, r"model=3 is not a table: write \[model\]"),
    ({"train": {"stepz": 3}}, r"\[train\] has no field 'stepz': did you mean steps\?"),
    ({"train": {"model": 3}}, r"\[train\] has no field 'model'"),
    ({"train": {"qqq": 3}}, r"\[train\] has no field 'qqq': the fields are steps, minutes"),
    ({"model": {"with": 3}}, r"\[model\] has no field 'with': did you mean width\?"),
    ({"train": {"steps": 0}}, r"\[train\] steps=0: write a whole number of at least 1"),
    ({"train": {"batch_size": 1.5}}, r"\[train\] batch_size=1.5: write a whole number"),
    ({"train": {"eval_every": 0}}, r"\[train\] eval_every=0"),
    ({"train": {"eval_batches": True}}, r"\[train\] eval_batches=True"),
    ({"train": {"save_every": -1}}, r"\[train\] save_every=-1"),
    ({"train": {"keep": 0}}, r"\[train\] keep=0"),
    ({"train": {"warmup": -1}}, r"\[train\] warmup=-1: write a whole number of at least 0"),
    ({"train": {"sample": "x"}}, r"\[train\] sample='x'"),
    ({"train": {"seed": -1}}, r"\[train\] seed=-1: write a whole number of at least 0"),
    ({"train": {"seed": 2**32}}, r"\[train\] seed=4294967296: write a whole number below 2\*\*32"),
    ({"train": {"minutes": 0}}, r"\[train\] minutes=0: write a number above 0, or leave it out"),
    ({"train": {"lr": 0}}, r"\[train\] lr=0: write a number above 0"),
    ({"train": {"lr": math.inf}}, r"\[train\] lr=inf"),
    ({"train": {"lr": math.nan}}, r"\[train\] lr=nan"),
    ({"train": {"final_lr": 1.1}}, r"\[train\] final_lr=1.1: write a number from 0 to 1"),
    ({"train": {"weight_decay": -1}}, r"\[train\] weight_decay=-1: write a number of at least 0"),
    ({"train": {"betas": [0.9]}}, r"\[train\] betas=\[0.9\]: write two numbers"),
    ({"train": {"betas": [0.9, 1.0]}}, r"\[train\] betas=\[0.9, 1.0\]: write two numbers"),
    ({"train": {"text": 3}}, r"\[train\] text=3: write a path"),
    ({"train": {"out": None}}, r"\[train\] out=None: write a path"),
    ({"model": {"layers": 0}}, r"\[model\] layers=0: write a whole number of at least 1"),
    ({"model": {"width": 10, "heads": 3}}, r"\[model\] heads=3 doesn't divide width=10"),
    ({"model": {"dropout": 1.0}}, r"\[model\] dropout=1.0: write a number below 1"),
    ({"model": {"tied": 1}}, r"\[model\] tied=1: write true or false"),
    ({"strategy": {"seed": -1}}, r"\[strategy\]: seed=-1"),
    (
        {"strategy": {"micro_batch_size": 3, "accumulate_steps": 4}},
        "micro_batch_size 3 × accumulate_steps 4 = 12 samples, but the batch has 16",
    ),
]


@pytest.mark.parametrize(("tables", "message"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_each_bad_value_has_its_own_message(tables: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, StrategyError), match=f"^run.toml: .*{message}"):
        TrainConfig.from_tables(tables, where="run.toml")


def test_the_default_run_has_two_stages_and_four_micro_batches() -> None:
    assert TrainConfig.from_tables({}) == TrainConfig()
    strategy = TrainConfig().strategy
    assert (strategy.pp_degree, strategy.schedule_mode, strategy.micro_batches(16)) == (2, "1F1B", [4] * 4)


def test_what_strategy_leaves_out_follows_the_run() -> None:
    config = TrainConfig.from_tables({"train": {"seed": 7}, "strategy": {"micro_batch_size": 8}})
    assert config.strategy == Strategy(pp_degree=2, micro_batch_size=8, max_norm=1.0, seed=7)


def test_tables_go_in_and_out() -> None:
    tables = {
        "train": {"steps": 3, "betas": [0.8, 0.9], "text": "a.txt"},
        "model": {"width": 12, "heads": 2},
        "strategy": {"vpp_degree": 2, "schedule_mode": "ZBV"},
    }
    config = TrainConfig.from_tables(tables)
    assert (config.steps, config.betas, config.model.width, config.strategy.schedule_mode) == (
        3,
        (0.8, 0.9),
        12,
        "ZBV",
    )
    assert TrainConfig.from_tables(json.loads(json.dumps(config.to_tables()))) == config


def test_options_lie_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nsteps = 3\nlr = 0.1\n")
    merged = merge_tables(read_tables(file), {"train": {"steps": 5}, "model": {"layers": 2}})
    config = TrainConfig.from_tables(merged)
    assert (config.steps, config.lr, config.model.layers) == (5, 0.1, 2)


def test_files_that_can_t_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.toml: can't be read \(No such file"):
        read_tables(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[train\n")
    with pytest.raises(ConfigError, match=r"bad.toml: not valid TOML"):
        read_tables(tmp_path / "bad.toml")


def test_the_learning_rate_rises_and_falls() -> None:
    config = TrainConfig(steps=100, warmup=10, final_lr=0.1)
    shares = [config.lr_share(step) for step in range(101)]
    assert shares[0] == pytest.approx(0.1)
    assert shares[9] == shares[10] == 1.0
    assert shares[:10] == sorted(shares[:10])
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert shares[100] == pytest.approx(0.1)
    assert TrainConfig(steps=5, warmup=0).lr_share(0) == 1.0


def test_no_torch_is_imported() -> None:
    code = "import sys, pipeloom.training.config as c; c.TrainConfig(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
