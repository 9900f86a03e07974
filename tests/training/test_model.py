"""The GPT: sizes, seeds, causality, tied ends."""

from __future__ import annotations

import math

import pytest
import torch

from pipeloom.training.config import ModelConfig
from pipeloom.training.model import GPT, character_loss

SMALL = ModelConfig(width=12, layers=2, heads=3, sequence=8)


def test_the_same_seed_gives_the_same_weights_and_leaves_the_caller_s_random_state() -> None:
    before = torch.get_rng_state()
    first, again, other = GPT(11, SMALL, seed=1), GPT(11, SMALL, seed=1), GPT(11, SMALL, seed=2)
    assert torch.equal(before, torch.get_rng_state())
    for (name, a), (_, b), (_, c) in zip(
        first.named_parameters(), again.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert "norm" in name or not torch.equal(a, c), name


@pytest.mark.parametrize("tied", [False, True])
def test_a_fresh_model_knows_little_and_claims_little(tied: bool) -> None:
    codes = torch.randint(0, 50, (8, 8), generator=torch.Generator().manual_seed(0))
    loss = character_loss(
        GPT(50, ModelConfig(width=12, layers=2, heads=3, sequence=8, tied=tied))(codes), codes
    )
    assert loss.item() == pytest.approx(math.log(50), rel=0.25)


def test_a_character_sees_only_those_before_it() -> None:
    model = GPT(11, SMALL).eval()
    codes = torch.zeros(1, 8, dtype=torch.int64)
    changed = codes.clone()
    changed[0, 5] = 7
    assert torch.allclose(model(codes)[0, :5], model(changed)[0, :5])
    assert not torch.allclose(model(codes)[0, 5:], model(changed)[0, 5:])


def test_shorter_sequences_work() -> None:
    assert GPT(11, SMALL)(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 11)


def test_tied_ends_share_one_weight() -> None:
    tied = GPT(11, ModelConfig(width=12, layers=1, heads=3, sequence=8, tied=True))
    assert tied.head.weight is tied.embedding.weight


def test_dropout_is_for_training_only() -> None:
    model = GPT(11, ModelConfig(width=12, layers=1, heads=3, sequence=8, dropout=0.5))
    codes = torch.zeros(2, 8, dtype=torch.int64)
    assert not torch.equal(model(codes), model(codes))
    model.eval()
    assert torch.equal(model(codes), model(codes))
