"""The GPT that `pipeloom train` trains, as generation needs it: characters for words, weights from a checkpoint.

The model has no cache, and positions for one window only: it is run by recomputing the last window of the text, so a
text may grow without end. What it writes is what `training.sample.write_text` writes for the same seed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load

from ..generation import GenerationError, GenerationSpec, recomputing
from ..generation.cutting import ReadWeights
from ..training.config import TrainConfig
from ..training.data import Corpus, DataError
from ..training.folder import RunFolder
from ..training.model import GPT


class CharacterWords:
    """A corpus's characters; a token is one of them."""

    ends: frozenset[int] = frozenset()

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus

    def encode(self, text: str) -> list[int]:
        try:
            return self._corpus.encode(text).tolist()
        except DataError as error:
            raise GenerationError(f"the prompt {text!r}: {error}") from None

    def decode(self, ids: Sequence[int]) -> str:
        return self._corpus.decode(torch.tensor(list(ids), dtype=torch.int64))

    def writer(self) -> _CharacterWriter:
        return _CharacterWriter(self)

    def stops(self, strings: Sequence[str]) -> Callable[[Tensor, Any], Tensor]:
        wanted = [self._corpus.encode(text) for text in strings]

        def ends_in_one(ids: Tensor, scores: Any) -> Tensor:
            del scores
            last = ids[0]
            found = any(
                len(last) >= len(w) and torch.equal(last[len(last) - len(w) :].cpu(), w) for w in wanted
            )
            return torch.tensor([found])

        return ends_in_one


class _CharacterWriter:
    def __init__(self, words: CharacterWords) -> None:
        self._words = words

    def put(self, token: int) -> str:
        return self._words.decode([token])

    def end(self) -> str:
        return ""


def open_run(folder: Path) -> tuple[nn.Module, GenerationSpec, CharacterWords, ReadWeights]:
    """A run's model without its weights, how it is run, its characters, and what reads its latest checkpoint. Raises
    ConfigError for a folder that isn't a run's, DataError for a text that isn't there any more."""
    run = RunFolder(folder)
    config = TrainConfig.from_tables(run.tables())
    latest = run.latest()
    corpus = Corpus.load(config.text)
    if latest.text != corpus.digest:
        raise DataError(
            f"{folder}: was trained on another text than {config.text or 'the documentation of this Python'}, whose "
            "characters are its vocabulary; give it back the text it had"
        )
    model = GPT(len(corpus.vocabulary), config.model).eval()
    shapes = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}
    words = CharacterWords(corpus)
    return (
        model,
        recomputing(window=config.model.sequence),
        words,
        _reader(folder / latest.checkpoint, shapes),
    )


def _reader(checkpoint: Path, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> ReadWeights:
    def read(names: Sequence[str]) -> Mapping[str, Tensor]:
        found = {f"model.{name}": torch.empty(*shapes[name][:1], dtype=shapes[name][1]) for name in names}
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*assuming the intent is to load in a single process.*"
            )
            load(found, checkpoint_id=checkpoint, no_dist=True)
        return {name.removeprefix("model."): tensor for name, tensor in found.items()}

    return read
