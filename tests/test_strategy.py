"""Every message of Strategy, one by one, and the values that it makes of good options."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.strategy import Strategy, StrategyError

# (fields, words of the message in order): one row for each way to be wrong.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"pp_degre": 2}, "no field 'pp_degre': did you mean pp_degree?"),
    ({"zzz": 2}, "no field 'zzz': the fields are pp_degree, vpp_degree"),
    ({"pp_degree": 0}, "pp_degree=0: write a whole number of at least 1"),
    ({"pp_degree": True}, "pp_degree=True: write a whole number"),
    ({"pp_degree": "2"}, "pp_degree='2': write a whole number"),
    ({"vpp_degree": 0}, "vpp_degree=0: write a whole number"),
    ({"vpp_degree": 1.5}, "vpp_degree=1.5: write a whole number"),
    ({"split_backward": 1}, "split_backward=1: write True or False"),
    ({"schedule_mode": None}, "schedule_mode: there is no schedule None"),
    (
        {"schedule_mode": "1F1C"},
        "schedule_mode: there is no schedule '1F1C'. Did you mean 1F1B\\? There are FThenB",
    ),
    ({"schedule_mode": "zzz"}, "there is no schedule 'zzz'. There are FThenB, 1F1B"),
    (
        {"schedule_mode": "Auto", "vpp_degree": 2},
        r'schedule_mode "auto" chooses vpp_degree itself, but vpp_degree=2',
    ),
    ({"schedule_mode": "auto", "cuts": ["a"]}, r'schedule_mode "auto" chooses cuts itself'),
    ({"schedule_mode": "auto", "placement": "loop"}, r'schedule_mode "auto" chooses placement itself'),
    ({"search_seconds": 0}, r"search_seconds=0: write a number of seconds above 0"),
    (
        {"schedule_mode": "DualPipeV"},
        "DualPipeV runs 2 chunks a stage, but vpp_degree is 1: set vpp_degree=2",
    ),
    ({"schedule_mode": "V-Half"}, "V-Half runs 2 chunks a stage, but vpp_degree is 1"),
    ({"schedule_mode": "V-Min", "vpp_degree": 3}, "V-Min runs 2 chunks a stage, but vpp_degree is 3"),
    ({"vpp_degree": 2}, "1F1B runs 1 chunk a stage, but vpp_degree is 2: set vpp_degree=1, or .*VPP"),
    ({"schedule_mode": "Eager1F1B", "vpp_degree": 3}, "Eager1F1B runs 1 chunk .* vpp_degree is 3"),
    ({"schedule_mode": "ZBH1", "vpp_degree": 2}, "ZBH1 runs 1 chunk a stage, but vpp_degree is 2.*ZBV"),
    ({"schedule_mode": "ZBH2", "vpp_degree": 2}, "ZBH2 runs 1 chunk a stage, but vpp_degree is 2.*ZBV"),
    ({"schedule_mode": "ZBV"}, "ZBV runs 2 chunks a stage, but vpp_degree is 1: set vpp_degree=2.*ZBH1"),
    ({"cuts": ""}, "cuts is an empty text: leave it None"),
    (
        {"pp_degree": 2, "cuts": "3-3-3"},
        "cuts='3-3-3' gives 3 counts of layers, but pp_degree 2 × vpp_degree 1 = 2 chunks: write a count",
    ),
    ({"cuts": "layers.("}, r"cuts='layers.\(' is not a regular expression"),
    ({"cuts": 3}, "cuts=3: give module names in a list"),
    ({"cuts": ["a", 3]}, "cuts=.*: give module names in a list"),
    ({"pp_degree": 3, "cuts": ["a", "a"]}, "cuts names 'a' twice"),
    ({"pp_degree": 3, "cuts": ["a"]}, "cuts has 1 names, but pp_degree 3 × vpp_degree 1 = 3 chunks need 2"),
    ({"cuts": ["a"]}, "cuts has 1 names, but pp_degree 1 × vpp_degree 1 = 1 chunk need 0"),
    ({"placement": "spiral"}, 'placement=\'spiral\': write "linear", "loop", "v"'),
    ({"placement": 3}, 'placement=3: write "linear"'),
    ({"placement": ["a"]}, r"placement=\['a'\]: write \"linear\""),
    (
        {"schedule_mode": "VPP", "vpp_degree": 2, "placement": "linear"},
        '"linear" has one chunk a stage, but vpp_degree is 2',
    ),
    (
        {"pp_degree": 2, "placement": [0]},
        "placement lists 1 stages, but pp_degree 2 × vpp_degree 1 make 2 chunks",
    ),
    ({"pp_degree": 2, "placement": [0, 2]}, "placement names stage 2, but the stages are 0 to 1"),
    ({"pp_degree": 2, "placement": [-1, 0]}, "placement names stage -1"),
    (
        {"pp_degree": 2, "placement": [1, 0]},
        r"placement=\(1, 0\) contradicts schedule_mode 1F1B, .* \[0, 1\]",
    ),
    (
        {"pp_degree": 2, "vpp_degree": 2, "schedule_mode": "ZBV", "placement": "loop"},
        r"placement='loop' contradicts schedule_mode ZBV, whose chunks lie on stages \[0, 1, 1, 0\]",
    ),
    (
        {"pp_degree": 2, "vpp_degree": 2, "schedule_mode": "VPP", "placement": "v"},
        r"placement='v' contradicts schedule_mode VPP, whose chunks lie on stages \[0, 1, 0, 1\]",
    ),
    ({"accumulate_steps": 0}, "accumulate_steps=0: write a whole number of at least 1"),
    ({"micro_batch_size": 0}, "micro_batch_size=0: write a whole number of at least 1"),
    ({"micro_batch_size": 2.0}, "micro_batch_size=2.0: write a whole number"),
    ({"gradient_merge": "mean"}, 'gradient_merge=\'mean\': write "average" or "sum"'),
    ({"memory_limit": 0}, "memory_limit=0: write a number of bytes above 0"),
    ({"memory_limit": "16 gigs"}, "memory_limit='16 gigs': write .*\"16GiB\""),
    ({"memory_limit": "0GB"}, "memory_limit='0GB'"),
    ({"memory_limit": "1iB"}, "memory_limit='1iB'"),
    ({"memory_limit": 1.5}, "memory_limit=1.5"),
    ({"max_norm": 0}, "max_norm=0: write a norm above 0, or None"),
    ({"max_norm": float("nan")}, "max_norm=nan"),
    ({"max_norm": "1"}, "max_norm='1'"),
    ({"autocast": "float8"}, 'autocast=\'float8\': write "bfloat16" or "float16", or None'),
    ({"loss_scale": 0}, 'loss_scale=0: write a factor above 0, "dynamic", or None'),
    ({"loss_scale": float("inf")}, "loss_scale=inf"),
    ({"loss_scale": "static"}, "loss_scale='static'"),
    ({"recompute": ""}, "recompute='': give module names in a list"),
    ({"recompute": True}, "recompute=True: give module names in a list"),
    ({"recompute": "("}, r"recompute='\(' is not a regular expression"),
    (
        {"recompute": [0, 1]},
        "recompute names chunk 1, but pp_degree 1 × vpp_degree 1 make 1 chunk: number them",
    ),
    ({"seed": -1}, "seed=-1: write a whole number from 0"),
    ({"seed": 2**63}, "seed=9223372036854775808"),
    ({"enable_send_recv_overlap": None}, "enable_send_recv_overlap=None: write True or False"),
    ({"executor": "ray"}, 'executor=\'ray\': write "list" or "fleet"'),
    (
        {"executor": "fleet", "schedule_mode": "VPP", "vpp_degree": 2},
        "has no graph for schedule_mode 'VPP': choose 1F1B",
    ),
    (
        {"executor": "fleet", "schedule_mode": "auto"},
        "has no graph for schedule_mode 'auto': choose 1F1B, FThenB, ZBH1",
    ),
    (
        {"executor": "fleet", "enable_send_recv_overlap": False},
        "whose tasks never wait for a send: leave it True",
    ),
    (
        {"executor": "fleet", "schedule_mode": "ZBH1", "memory_limit": "1GB"},
        'executor "fleet" may put off more W jobs than that order does',
    ),
    ({"compile_backend": "inductor"}, "compile_backend='inductor' .* is not built yet: use \"eager\""),
    ({"compile_backend": "gcc"}, "compile_backend='gcc': write \"eager\""),
    ({"costs": "guessed"}, 'costs=\'guessed\': write "measured" or "roofline"'),
    ({"profile": 3}, r"profile=3: write \(first step, last step\)"),
    ({"profile": (1, 2, 3)}, r"profile=\(1, 2, 3\): write \(first step"),
    ({"profile": ("a", "b")}, "profile=.*: write"),
    ({"profile": (3, 2)}, r"profile=\(3, 2\): the first step is at least 0 and the last one not before it"),
    ({"profile": (-1, 2)}, r"profile=\(-1, 2\): the first step is at least 0"),
    ({"passes": "mine"}, "passes='mine': give the names of registered passes in a list"),
    ({"passes": ["a", "a"]}, r"passes=\['a', 'a'\] names a pass twice"),
]


@pytest.mark.parametrize(
    ("fields", "message"), BAD, ids=[f"{i}-{'-'.join(f)}" for i, (f, _) in enumerate(BAD)]
)
def test_each_bad_value_has_its_own_message(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        Strategy(**fields)
    with pytest.raises(StrategyError, match=f"^run.toml: .*{message}"):
        Strategy.from_dict(fields, where="run.toml")


def test_a_value_without_a_name_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"keyword arguments only, like pp_degree=2 \(got 2"):
        Strategy(2)  # type: ignore[misc]


def test_the_default_is_one_stage_and_one_micro_batch() -> None:
    strategy = Strategy()
    assert (strategy.chunks, strategy.micro_batches(7), strategy.split_backward) == (1, [7], False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "own", "chunks"),
    [
        ("GPipe", "FThenB", 1),
        ("fthenb", "FThenB", 3),
        ("BFS", "LoopedBFS", 2),
        ("1f1b", "1F1B", 1),
        ("eager1f1b", "Eager1F1B", 1),
        ("Interleaved1F1B", "VPP", 3),
        ("vpp", "VPP", 1),
        ("zbh1", "ZBH1", 1),
        ("ZBH2", "ZBH2", 1),
        ("InterleavedZeroBubble", "InterleavedZeroBubble", 2),
        ("ZBVZeroBubble", "ZBV", 2),
        ("ZBVPP", "ZBV", 2),
        ("v-half", "V-Half", 2),
        ("VMin", "V-Min", 2),
        ("dualpipev", "DualPipeV", 2),
    ],
)
def test_names_of_torch_and_paddle_are_aliases(given: str, own: str, chunks: int) -> None:
    assert Strategy(pp_degree=2, vpp_degree=chunks, schedule_mode=given).schedule_mode == own


def test_zero_bubble_schedules_imply_the_split() -> None:
    assert Strategy(schedule_mode="ZBH1").split_backward
    assert Strategy(vpp_degree=3, schedule_mode="InterleavedZeroBubble").split_backward
    zbv = Strategy(pp_degree=1, vpp_degree=2, schedule_mode="ZBV")
    assert zbv.split_backward
    assert not zbv.replace(schedule_mode="VPP").split_backward
    assert zbv.replace(schedule_mode="VPP", split_backward=True).split_backward
    assert zbv.replace(seed=3).split_backward
    assert Strategy(split_backward=True).replace(schedule_mode="FThenB").split_backward


@pytest.mark.parametrize(
    ("mode", "chunks", "placement"),
    [
        ("1F1B", 1, "linear"),
        ("1F1B", 1, "Loop"),
        ("1F1B", 1, [0, 1, 2]),
        ("VPP", 2, "loop"),
        ("VPP", 2, [0, 1, 2, 0, 1, 2]),
        ("ZBV", 2, "V"),
        ("ZBV", 2, (0, 1, 2, 2, 1, 0)),
    ],
)
def test_a_placement_that_is_the_schedule_s_own_is_accepted(mode: str, chunks: int, placement: Any) -> None:
    made = Strategy(pp_degree=3, vpp_degree=chunks, schedule_mode=mode, placement=placement).placement
    assert made == (placement.lower() if isinstance(placement, str) else tuple(placement))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16GiB", 16 * 2**30),
        ("500MB", 500_000_000),
        ("1.5 KiB", 1536),
        ("7B", 7),
        ("2TB", 2 * 10**12),
        (123, 123),
        (None, None),
    ],
)
def test_memory_limit_is_kept_in_bytes(text: Any, number: int | None) -> None:
    assert Strategy(memory_limit=text).memory_bytes == number


def test_a_dtype_is_taken_by_its_name() -> None:
    class BFloat16:
        def __str__(self) -> str:
            return "torch.bfloat16"

    assert Strategy(autocast=BFloat16()).autocast == "bfloat16"


def test_cuts_are_names_or_an_expression() -> None:
    assert Strategy(pp_degree=3, cuts=["layers.1", "layers.2"]).cuts == ("layers.1", "layers.2")
    assert Strategy(pp_degree=3, cuts=r"layers\.\d+").cuts == r"layers\.\d+"
    assert Strategy(cuts=[]).cuts == ()


# ---- micro-batches


@pytest.mark.parametrize(
    ("fields", "batch", "sizes"),
    [
        ({}, 5, [5]),
        ({"accumulate_steps": 4}, 10, [3, 3, 2, 2]),
        ({"accumulate_steps": 4}, 8, [2, 2, 2, 2]),
        ({"accumulate_steps": 4}, 3, [1, 1, 1]),
        ({"micro_batch_size": 4}, 10, [4, 4, 2]),
        ({"micro_batch_size": 4}, 8, [4, 4]),
        ({"micro_batch_size": 4}, 3, [3]),
        ({"micro_batch_size": 2, "accumulate_steps": 4}, 8, [2, 2, 2, 2]),
    ],
)
def test_sizes_of_micro_batches(fields: dict[str, Any], batch: int, sizes: list[int]) -> None:
    assert Strategy(**fields).micro_batches(batch) == sizes


def test_sizes_that_disagree_show_the_arithmetic() -> None:
    with pytest.raises(
        StrategyError, match="micro_batch_size 3 × accumulate_steps 4 = 12 samples, but the batch has 10"
    ):
        Strategy(micro_batch_size=3, accumulate_steps=4).micro_batches(10)


@pytest.mark.parametrize("fields", [{}, {"accumulate_steps": 2}, {"micro_batch_size": 2}])
def test_an_empty_batch_is_an_error(fields: dict[str, Any]) -> None:
    with pytest.raises(StrategyError, match="the batch has 0 samples"):
        Strategy(**fields).micro_batches(0)


@settings(deadline=None)  # the first example imports torch
@given(batch=st.integers(1, 200), steps=st.integers(1, 50))
def test_sizes_are_those_of_tensor_split(batch: int, steps: int) -> None:
    torch = pytest.importorskip("torch")
    sizes = [len(part) for part in torch.arange(batch).tensor_split(min(steps, batch))]
    assert Strategy(accumulate_steps=steps).micro_batches(batch) == sizes


# ---- in and out


def test_toml_and_keywords_make_the_same(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        "[strategy]\npp_degree = 2\nvpp_degree = 2\nschedule_mode = 'ZBVZeroBubble'\naccumulate_steps = 8\n"
        "cuts = ['a', 'b', 'c']\nplacement = [0, 1, 1, 0]\nmemory_limit = '1GiB'\nprofile = [2, 4]\n"
        "passes = ['mine']\n[train]\nsteps = 3\n"
    )
    strategy = Strategy(
        pp_degree=2,
        vpp_degree=2,
        schedule_mode="ZBV",
        accumulate_steps=8,
        cuts=["a", "b", "c"],
        placement=[0, 1, 1, 0],
        memory_limit=2**30,
        profile=(2, 4),
        passes=("mine",),
    )
    assert Strategy.from_toml(file) == strategy
    assert Strategy.from_dict(json.loads(json.dumps(strategy.to_dict()))) == strategy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[strategy]\nseed = -1\n", r"run.toml \[strategy\]: seed=-1"),
        ("[strategy]\nsed = 1\n", r"run.toml \[strategy\]: Strategy has no field 'sed': did you mean seed"),
        ("[strategy\n", "run.toml: not valid TOML"),
        ("[train]\n", r"run.toml: has no \[strategy\] table"),
        ("strategy = 3\n", r"run.toml: has no \[strategy\] table"),
    ],
)
def test_messages_name_the_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(StrategyError, match=message):
        Strategy.from_toml(file)


def test_a_file_that_can_t_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        StrategyError, match=re.escape(f"{tmp_path / 'none.toml'}: can't be read (No such file")
    ):
        Strategy.from_toml(tmp_path / "none.toml")


def test_no_torch_is_imported() -> None:
    code = "import sys, pipeloom.strategy as s; s.Strategy(pp_degree=2); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
