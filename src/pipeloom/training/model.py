"""A GPT to train: plain modules, nothing that knows of pipelines.

Why so: the compiler must take models as people write them. This one is the usual decoder (GPT-2, Radford et
al. 2019): learned positions, layer norm before attention and before the feed-forward part, GELU, causal
attention through `scaled_dot_product_attention`, a final norm and a head that may share the embedding's
weight.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .config import ModelConfig


class Block(nn.Module):
    """One layer: (batch, time, width) → the same."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.heads, self.dropout = config.heads, config.dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        mixed = self.project(mixed.transpose(1, 2).reshape(batch, time, width))
        x = x + functional.dropout(mixed, self.dropout, self.training)
        grown = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + functional.dropout(grown, self.dropout, self.training)


class GPT(nn.Module):
    """int64 (batch, time ≤ sequence) → logits (batch, time, vocabulary).

    The same seed gives the same weights (torch's own initialisation), and the caller's random state is
    untouched.
    """

    def __init__(self, vocabulary: int, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(vocabulary, config.width)
            self.position = nn.Embedding(config.sequence, config.width)
            self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, vocabulary, bias=False)
        if config.tied:
            nn.init.normal_(
                self.embedding.weight, std=config.width**-0.5, generator=torch.Generator().manual_seed(seed)
            )
            self.head.weight = self.embedding.weight

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embedding(codes) + self.position(torch.arange(codes.shape[1], device=codes.device))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def character_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats a character: logits (batch, time, vocabulary), targets int64 (batch,
    time).
    """
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
