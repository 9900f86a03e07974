"""Small language models with random weights for the generation tests, and what plain PyTorch makes of them.

model = llama()                     # of transformers; gpt2() too
model = Cached()                    # a module of one's own with a growing cache; `CACHED` is its spec
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom import Strategy
from pipeloom.generation import GenerationSpec, LocalGenerator
from pipeloom.generation.cutting import Cutting, Graphs, weights_of

WORDS = 61


def llama(layers: int = 3, seed: int = 0) -> Any:
    hub = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = hub.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.4,
    )
    return hub.LlamaForCausalLM(config).eval()


def gpt2(layers: int = 2, seed: int = 0) -> Any:
    hub = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = hub.GPT2Config(
        vocab_size=WORDS,
        n_positions=64,
        n_embd=32,
        n_layer=layers,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.4,
    )
    return hub.GPT2LMHeadModel(config).eval()


def by_hub(model: Any, ids: list[int], new: int, seed: int | None = None, **options: Any) -> list[int]:
    """The new tokens of transformers' own generate."""
    if seed is not None:
        torch.manual_seed(seed)
    given = torch.tensor([ids])
    defaults = {"do_sample": seed is not None, "pad_token_id": 0, "top_k": 0}
    made = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=new, **{**defaults, **options}
    )
    return list(made[0, len(ids) :].tolist())


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(
        self, x: Tensor, mask: Tensor, past: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, q, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, q, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, q, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)))), (key, value)


class Cached(nn.Module):
    """A decoder with learned positions, a tied head and a growing cache. shared: the last layer attends over the first
    one's keys and values."""

    def __init__(self, layers: int = 3, width: int = 16, heads: int = 2, *, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.heads, self.width, self.shared = heads, width, shared
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(40, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight
        for weight in (p for n, p in self.named_parameters() if n.startswith("layers") and p.dim() == 2):
            nn.init.normal_(weight, std=0.7)

    def forward(self, ids: Tensor, start: Tensor, cache: Any) -> tuple[Tensor, Any]:
        q, past = ids.shape[1], cache[0][0].shape[2]
        places = torch.arange(q, device=ids.device) + start
        mask = torch.arange(past + q)[None] <= (torch.arange(q) + past)[:, None]
        x = self.words(ids) + self.places(places)
        new = []
        for number, layer in enumerate(self.layers):
            last = self.shared and number == len(self.layers) - 1
            x, held = layer(x, mask, cache[0] if last else cache[number])
            new.append(cache[number] if last else held)
        return self.head(self.norm(x)), new


def new_cache(layers: int, width: int, heads: int) -> Any:
    def make(batch: int, device: torch.device, dtype: torch.dtype) -> Any:
        shape = (batch, heads, 0, width // heads)
        return [
            tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)) for _ in range(layers)
        ]

    return make


def cached_step(model: Any, ids: Tensor, start: Tensor, cache: Any, _consts: Any) -> tuple[Tensor, Any]:
    logits, new = model(ids, start, cache)
    return logits[:, -1], new


CACHED = GenerationSpec(cached_step, new_cache(3, 16, 2), grow_dim=2, max_len=40)


def greedily(model: Cached, ids: list[int], new: int) -> list[int]:
    """The likeliest tokens by plain PyTorch, without a graph: every step runs all ids."""
    found: list[int] = []
    empty = new_cache(len(model.layers), model.width, model.heads)(1, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        for _ in range(new):
            logits, _ = model(torch.tensor([[*ids, *found]]), torch.tensor(0), empty)
            found.append(int(logits[0, -1].argmax()))
    return found


class Static(nn.Module):
    """Layers that keep what they saw in buffers of fixed size, changed in place."""

    def __init__(self, layers: int = 2, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Tensor, start: Tensor, cache: list[Tensor]) -> Tensor:
        at = torch.arange(ids.shape[1]) + start
        x = self.words(ids)
        for layer, seen in zip(self.layers, cache, strict=True):
            seen.index_copy_(1, at, x)
            reached = (torch.arange(seen.shape[1])[None] <= at[:, None]).to(x.dtype)
            x = torch.tanh(layer(x + reached @ seen))
        return self.head(x)


def static_step(model: Any, ids: Tensor, start: Tensor, cache: Any, _consts: Any) -> tuple[Tensor, Any]:
    return model(ids, start, cache)[:, -1], None


STATIC = GenerationSpec(
    static_step,
    lambda batch, device, dtype: [torch.zeros(batch, 24, 8, dtype=dtype, device=device) for _ in range(2)],
    max_len=24,
)


def cut_for(model: nn.Module, spec: GenerationSpec, *stages: int) -> dict[int, LocalGenerator]:
    """Generators by their number of stages. The graphs, which take longest, are captured once for all."""
    graphs = Graphs(model, spec, torch.device("cpu"))
    found = {}
    for count in stages:
        cutting = Cutting(graphs, Strategy(pp_degree=count))
        found[count] = LocalGenerator([cutting.stage(i, weights_of(model)) for i in range(count)], None)
    return found
