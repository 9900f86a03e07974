"""Text to learn from: a character-level corpus, and batches that are a pure function of (seed, step).

Why so: a run that is stopped and resumed must see the batches that an unbroken run would have seen, on every
rank, without a loader's state in the checkpoint. A batch is windows of the text at offsets that
are drawn anew from (seed, step).

The default text is what ships with Python itself: the documentation topics of `pydoc_data.topics`, English
prose with code (0.46 million characters, 103 different ones, on Python 3.11), in the order of their names.
The last tenth of the characters is held out and never drawn for training.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

#: every HELD_OUT-th part of the text, counted from its end, is held out
HELD_OUT = 10


class DataError(ValueError):
    """The text can't be read or is too short."""


@dataclass(frozen=True)
class Corpus:
    """A text as characters. vocabulary: its characters, sorted. train, held_out: int64 codes, one a
    character. digest: tells this text from others.
    """

    vocabulary: str
    train: Tensor
    held_out: Tensor
    digest: str

    @staticmethod
    def of(text: str) -> Corpus:
        """A corpus of `text`: the last tenth (rounded down) is held out. Raises DataError for no text."""
        if not text:
            raise DataError("the text is empty: give a file with at least some thousand characters")
        vocabulary = "".join(sorted(set(text)))
        index = {character: code for code, character in enumerate(vocabulary)}
        codes = torch.tensor([index[character] for character in text], dtype=torch.int64)
        border = len(codes) - len(codes) // HELD_OUT
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return Corpus(vocabulary, codes[:border], codes[border:], digest)

    @staticmethod
    def load(path: str | None = None) -> Corpus:
        """The corpus of a UTF-8 text file, or of Python's documentation topics if `path` is None."""
        if path is None:
            from pydoc_data.topics import topics

            return Corpus.of("\n".join(topics[name] for name in sorted(topics)))
        try:
            return Corpus.of(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"{path}: can't be read ({error.strerror}); check the path") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 text (byte {error.start}); convert it first") from None
        except DataError as error:
            raise DataError(f"{path}: {error}") from None

    def check(self, sequence: int) -> None:
        """Raises DataError where a part of the text is too short for a window of `sequence` characters and
        its target.
        """
        for name, part in (("training", self.train), ("held-out", self.held_out)):
            if len(part) < sequence + 1:
                raise DataError(
                    f"the {name} part of the text has {len(part)} characters, but a window of sequence "
                    f"{sequence} needs "
                    f"{sequence + 1}: give a longer text (the last {HELD_OUT}th is held out) or a shorter "
                    "sequence"
                )

    def batch(self, seed: int, step: int, batch_size: int, sequence: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a training step, int64, both (batch_size, sequence); targets are one
        character on.
        """
        # Not torch.Generator, which looks at 32 bits of its seed: distinct pairs must give distinct batches.
        draw = random.Random(f"{seed} {step}")
        offsets = [draw.randrange(len(self.train) - sequence) for _ in range(batch_size)]
        return _windows(self.train, torch.tensor(offsets), sequence)

    def held_out_batches(self, count: int, batch_size: int, sequence: int) -> list[tuple[Tensor, Tensor]]:
        """At most `count` fixed batches spread evenly over the held-out text, as `batch` gives them.

        The windows don't overlap; a short text gives fewer batches, and at least one.
        """
        last = len(self.held_out) - sequence - 1
        windows = min(count * batch_size, max(1, last // sequence + 1))
        if windows > batch_size:
            windows -= windows % batch_size  # whole batches only: one shape, one captured program
        offsets = torch.linspace(0, last, windows, dtype=torch.float64).long()
        return [_windows(self.held_out, part, sequence) for part in torch.split(offsets, batch_size)]

    def decode(self, codes: Tensor) -> str:
        """The text of a 1-dimensional tensor of codes."""
        return "".join(self.vocabulary[code] for code in codes.tolist())

    def encode(self, text: str) -> Tensor:
        """Codes of `text`, int64 (length,). Raises DataError for a character that the corpus doesn't have."""
        codes = [self.vocabulary.find(character) for character in text]
        if -1 in codes:
            raise DataError(
                f"character {text[codes.index(-1)]!r} does not occur in the text that was trained on"
            )
        return torch.tensor(codes, dtype=torch.int64)


def _windows(codes: Tensor, offsets: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
    window = codes[offsets[:, None] + torch.arange(sequence + 1)]
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()
