"""Opening the model that a command names, on one rank: its structure, its tokenizer, and a way to its weights."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import nn

from ..generation import GenerationSpec, Words
from ..generation.cutting import ReadWeights
from ..generation.smollm2 import fetched
from ..generation.transformers import hub_spec, open_folder
from .characters import open_run
from .order import SMOLLM2, OrderError


class Opened(NamedTuple):
    """model: without weights, which `weights` reads by name."""

    model: nn.Module
    spec: GenerationSpec
    words: Words
    weights: ReadWeights


def open_model(name: str) -> Opened:
    """`name`: SMOLLM2, a run folder of `pipeloom train`, or a folder of transformers. Raises OrderError for a folder
    that is neither, and whatever says why it can't be opened."""
    folder = fetched() if name == SMOLLM2 else Path(name)
    if (folder / "LATEST").is_file():
        return Opened(*open_run(folder))
    if not (folder / "config.json").is_file():
        raise OrderError(
            f"--model {folder}: has neither a checkpoint of `pipeloom train` (LATEST) nor a model of transformers "
            "(config.json)"
        )
    model, words, weights = open_folder(folder)
    return Opened(model, hub_spec(model), words, weights)
