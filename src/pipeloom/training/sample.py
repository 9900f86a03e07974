"""Text from a trained model, written in one process with plain PyTorch.

Takes the model, the corpus whose characters it knows, and a prompt; gives the prompt's continuation, the
same for the same seed. It recomputes the window for each character: simple, and quick enough for a few
hundred of them.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_loader import load

from .data import Corpus
from .model import GPT


def read_weights(model: GPT, checkpoint: Path) -> None:
    """The trained weights of a pipeline's checkpoint, into a plain model of the same sizes."""
    weights = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process.*")
        load(weights, checkpoint_id=checkpoint, no_dist=True)


def write_text(
    model: GPT, corpus: Corpus, prompt: str, length: int, *, temperature: float = 0.8, seed: int = 0
) -> str:
    """`length` characters that follow `prompt` (not empty, of characters that the corpus has), without the
    prompt.

    temperature > 0: the lower, the likelier the characters. Draws from a generator of its own.
    """
    window = model.position.num_embeddings
    generator = torch.Generator().manual_seed(seed)
    codes = corpus.encode(prompt)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(length):
                logits = model(codes[-window:][None])[0, -1]
                chances = torch.softmax(logits.float() / temperature, dim=-1)
                codes = torch.cat([codes, torch.multinomial(chances, 1, generator=generator)])
    finally:
        model.train(training)
    return corpus.decode(codes[len(prompt) :])
