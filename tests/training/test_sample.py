"""Writing text with a trained model."""

from __future__ import annotations

import pytest
import torch

from pipeloom.training.config import ModelConfig
from pipeloom.training.data import Corpus, DataError
from pipeloom.training.model import GPT
from pipeloom.training.sample import write_text

CORPUS = Corpus.of("abcabc" * 30)


def model() -> GPT:
    return GPT(3, ModelConfig(width=12, layers=1, heads=3, sequence=8, dropout=0.5))


def test_the_same_seed_writes_the_same_and_the_window_slides() -> None:
    first = write_text(model(), CORPUS, "abc", 40, seed=1)
    assert len(first) == 40
    assert first == write_text(model(), CORPUS, "abc", 40, seed=1)
    assert first != write_text(model(), CORPUS, "abc", 40, seed=2)


def test_the_model_and_the_caller_s_random_state_stay_as_they_were() -> None:
    made = model()
    before = torch.get_rng_state()
    write_text(made, CORPUS, "a", 3)
    assert made.training
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_that_has_learnt_goes_on_as_it_learnt() -> None:
    made = model().eval()
    optimizer = torch.optim.Adam(made.parameters(), lr=0.05)
    inputs, targets = CORPUS.batch(0, 0, 8, 8)
    for _ in range(40):
        loss = torch.nn.functional.cross_entropy(made(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert write_text(made, CORPUS, "ab", 6, temperature=0.1) == "cabcab"


def test_an_unknown_character_is_told() -> None:
    with pytest.raises(DataError, match="character 'z' does not occur"):
        write_text(model(), CORPUS, "z", 1)
