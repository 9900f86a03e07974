"""The corpus: what is held out, and batches that depend on (seed, step) alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeloom.training.data import Corpus, DataError


def corpus(length: int = 1000) -> Corpus:
    return Corpus.of("".join(chr(97 + i * i % 23) for i in range(length)))


def test_the_last_tenth_is_held_out() -> None:
    made = Corpus.of("abcdefghijklmnopqrstu")  # 21 characters: two are held out
    assert made.decode(made.train) == "abcdefghijklmnopqrs"
    assert made.decode(made.held_out) == "tu"
    assert made.vocabulary == "abcdefghijklmnopqrstu"


def test_the_default_text_is_python_s_own_documentation() -> None:
    made = Corpus.load()
    assert len(made.train) > 300_000
    assert len(made.held_out) == (len(made.train) + len(made.held_out)) // 10
    assert "statement" in made.decode(made.train)


def test_batches_depend_on_seed_and_step_alone() -> None:
    made = corpus()
    first = made.batch(3, 5, 4, 16)
    torch.manual_seed(99)
    made.batch(3, 6, 4, 16)
    again = made.batch(3, 5, 4, 16)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], made.batch(3, 6, 4, 16)[0])
    assert not torch.equal(first[0], made.batch(4, 5, 4, 16)[0])


def test_drawing_a_batch_leaves_the_caller_s_random_state() -> None:
    made = corpus()
    before = torch.get_rng_state()
    made.batch(0, 0, 4, 16)
    assert torch.equal(before, torch.get_rng_state())


def test_targets_are_one_character_on_and_come_from_the_training_part() -> None:
    made = corpus()
    inputs, targets = made.batch(0, 0, 8, 16)
    assert inputs.shape == targets.shape == (8, 16)
    assert inputs.dtype == torch.int64
    text = made.decode(made.train)
    for row, target in zip(inputs, targets, strict=True):
        assert made.decode(row) + made.decode(target[-1:]) in text
        assert torch.equal(row[1:], target[:-1])


def test_every_window_can_be_drawn() -> None:
    made = corpus(20)  # 18 to train on: windows of 16 and a target begin at 0 or 1
    starts = {made.decode(made.batch(0, step, 1, 16)[0][0]) for step in range(50)}
    text = made.decode(made.train)
    assert starts == {text[0:16], text[1:17]}


@pytest.mark.parametrize(
    ("count", "size", "shapes"), [(2, 2, [2, 2]), (9, 2, [2, 2, 2]), (1, 50, [6]), (1, 4, [4])]
)
def test_held_out_batches_are_whole_and_spread(count: int, size: int, shapes: list[int]) -> None:
    made = corpus()  # 100 held out: six windows of 16 and a target
    batches = made.held_out_batches(count, size, 16)
    assert [len(inputs) for inputs, _ in batches] == shapes
    text = made.decode(made.held_out)
    rows = [made.decode(row) + made.decode(t[-1:]) for x, y in batches for row, t in zip(x, y, strict=True)]
    assert rows[0] == text[:17]
    assert rows[-1] == text[-17:]
    assert all(row in text for row in rows)


def test_a_text_that_is_too_short_is_told_before_training() -> None:
    corpus(200).check(16)
    with pytest.raises(
        DataError, match=r"held-out part of the text has 10 characters, .* sequence 16 needs 17"
    ):
        corpus(100).check(16)


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("grüße", encoding="utf-8")
    assert Corpus.load(str(file)).vocabulary == "egrßü"
    file.write_bytes(b"abc\xff")
    with pytest.raises(DataError, match=r"a.txt: not UTF-8 text \(byte 3\)"):
        Corpus.load(str(file))
    file.write_text("")
    with pytest.raises(DataError, match=r"a.txt: the text is empty"):
        Corpus.load(str(file))
    with pytest.raises(DataError, match=r"b.txt: can't be read \(No such file"):
        Corpus.load(str(tmp_path / "b.txt"))


def test_encode_and_decode() -> None:
    made = Corpus.of("hello world")
    assert made.decode(made.encode("hold")) == "hold"
    with pytest.raises(DataError, match="character 'a' does not occur"):
        made.encode("halo")
