"""Which token comes next, without a model."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pipeloom.generation import Limits
from pipeloom.generation.extra import MissingExtra
from pipeloom.generation.request import Request
from pipeloom.generation.sampling import Row

LOGITS = torch.tensor([[0.0, 3.0, 2.9, -1.0]])


def row(**limits: object) -> Row:
    return Row(Request(0, (1, 2), Limits.of(limits, "test")), None, torch.device("cpu"))


def test_the_likeliest_token() -> None:
    assert row().next(LOGITS) == (1, "")
    assert row().next(LOGITS.to(torch.bfloat16)) == (1, "")
    assert row(ends=[1]).next(LOGITS) == (1, "end")
    assert row(max_new_tokens=1).next(LOGITS) == (1, "length")


def test_draws_are_torch_s_own() -> None:
    drawn = row(temperature=0.5, seed=3, max_new_tokens=50)
    torch.manual_seed(3)
    for _ in range(49):
        expected = int(torch.multinomial(torch.softmax(LOGITS / 0.5, -1), 1))
        assert drawn.next(LOGITS) == (expected, "")


def test_nobody_else_s_draws_count() -> None:
    one, other = row(temperature=1.0, seed=3), row(temperature=1.0, seed=3)
    state = torch.get_rng_state()
    first = [one.next(LOGITS)[0] for _ in range(20)]
    torch.rand(5)
    assert [other.next(LOGITS)[0] for _ in range(20)] == first
    torch.set_rng_state(state)


def test_penalties_look_at_prompt_and_new_tokens() -> None:
    pytest.importorskip("transformers")
    penalized = row(repetition_penalty=10.0)
    assert row().next(torch.tensor([[0.5, 3.0, 2.9, -1.0]]))[0] == 1
    assert penalized.next(torch.tensor([[0.5, 3.0, 2.9, -1.0]]))[0] == 0  # 1 and 2 stand in the prompt
    assert penalized.next(torch.tensor([[1.0, -9.0, -9.0, 0.5]]))[0] == 3  # and 0 came since


def test_top_k_and_top_p() -> None:
    pytest.importorskip("transformers")
    flat = torch.tensor([[2.0, 1.9, 1.8, 1.7]])
    few = row(temperature=5.0, top_k=2, max_new_tokens=60)
    assert {few.next(flat)[0] for _ in range(50)} == {0, 1}
    few = row(temperature=5.0, top_p=0.3, max_new_tokens=60)
    assert {few.next(flat)[0] for _ in range(50)} == {0, 1}


def test_without_transformers_plain_draws_go_on() -> None:
    code = """
import sys
sys.modules["transformers"] = None
import torch
from pipeloom.generation import Limits, compile_local, recomputing
from pipeloom.generation.extra import MissingExtra
from pipeloom import Strategy
model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 9))
gen = compile_local(model, recomputing(), Strategy(pp_degree=2))
assert len(gen.generate([[1, 2]], max_new_tokens=3, temperature=0.9)[0].tokens) == 3
try:
    gen.generate([[1, 2]], max_new_tokens=3, temperature=0.9, top_p=0.9)
except MissingExtra as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "top_p needs transformers, which isn't installed" in done.stdout
    assert "pip install 'pipeloom[transformers]'" in done.stdout


def test_a_missing_extra_is_bad_input() -> None:
    assert issubclass(MissingExtra, ValueError)
