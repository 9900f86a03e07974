"""Plans for a training run, before it is started: what `pipeloom plan` shows.

Takes a TrainConfig; builds its GPT without weights and asks `pipeloom.plan`. Of the text only the number of its
characters counts.
"""

from __future__ import annotations

from typing import Any

import torch

from ..proposals import Proposals, plan
from .config import TrainConfig
from .data import Corpus
from .model import GPT, character_loss


def propose(run: TrainConfig, **options: Any) -> Proposals:
    """The plans of a run. options: as `pipeloom.plan` takes them (ranks, memory, micro_batches, budget, device)."""
    corpus = Corpus.load(run.text)
    with torch.device("meta"):
        model = GPT(len(corpus.vocabulary), run.model)
        windows = torch.empty(run.batch_size, run.model.sequence, dtype=torch.int64)
    return plan(model, character_loss, example=(windows, windows), strategy=run.strategy, **options)
