"""What is timed: one GPT, one batch, one optimizer, the same for every contender.

`Setting` is plain data that travels to the ranks; everything made from it is made from the seed, so that all
contenders on all ranks start from equal weights and see equal samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeloom.training.config import ModelConfig
from pipeloom.training.model import GPT, character_loss

RANKS = 2
loss_fn = character_loss


@dataclass(frozen=True, kw_only=True)
class Setting:
    """width d, layers, sequence length, samples in a micro-batch, micro-batches a step. pairs: schedules by our
    name."""

    width: int = 512
    layers: int = 8
    heads: int = 8
    sequence: int = 256
    vocabulary: int = 8192
    micro_batch: int = 2
    micro_batches: int = 8
    optimizer: Literal["sgd", "adamw"] = "sgd"
    pairs: tuple[str, ...] = ("1F1B", "VPP", "ZBV")
    seed: int = 0

    @property
    def batch_size(self) -> int:
        return self.micro_batch * self.micro_batches

    def model(self) -> GPT:
        sizes = ModelConfig(
            width=self.width, layers=self.layers, heads=self.heads, sequence=self.sequence, dropout=0.0
        )
        return GPT(self.vocabulary, sizes, self.seed)

    def batch(self) -> tuple[Tensor, Tensor]:
        """(tokens, next tokens): int64, shape (batch_size, sequence) each."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = (self.batch_size, self.sequence)
        tokens, following = (torch.randint(0, self.vocabulary, shape, generator=generator) for _ in range(2))
        return tokens, following

    def make_optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """parameters: nn.Parameters or (name, parameter) pairs. A small rate: the work counts, not the learning."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=1e-5)
        return torch.optim.SGD(parameters, lr=1e-3)

    def equal_parts(self, parts: int) -> list[range]:
        """Which layers each part has, where all parts have equally many; the embedding goes with the first part
        and the head with the last."""
        if self.layers % parts:
            raise ValueError(
                f"{self.layers} layers don't divide into {parts} equal parts: choose a multiple of {parts}"
            )
        size = self.layers // parts
        return [range(i * size, (i + 1) * size) for i in range(parts)]


class Part(nn.Module):
    """Some layers of a GPT, with its embeddings if it is the first part and its head if it is the last: what
    torch.distributed.pipelining calls a stage module. Its parameters have the names that they have in the GPT."""

    def __init__(self, model: GPT, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.first, self.last = first, last
        if first:
            self.embedding, self.position = model.embedding, model.position
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in layers})
        if last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.embedding(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers.values():
            x = layer(x)
        if self.last:
            x = self.head(self.norm(x))
        return x
