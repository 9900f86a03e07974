"""Small models for the whole test suite, each with a loss and a batch.

    case = build("tied")                   # a fresh model from a fixed seed, in training mode
    case.loss(case.model)                  # what eager PyTorch computes for the whole batch
    case.double()                          # the same in float64

Each is there for one difficulty that a pipeline compiler meets; the docstrings say which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, TIME = 11, 8, 6


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def squares(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


class Chain(nn.Module):
    """Linear and GELU, alternating: what every schedule is first tried on."""

    def __init__(self, layers: int = 4, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(F.gelu(layer(x)))
        return x


class Block(nn.Module):
    """A decoder layer; `attention_dropout` goes through the fused attention op."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, time, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(batch, time, width)), self.p, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.p, self.training)


class GPT(nn.Module):
    """Embeddings, decoder layers, a norm and a head. `checkpointing`: None, or use_reentrant of each layer's
    checkpoint."""

    def __init__(
        self,
        layers: int = 2,
        width: int = WIDTH,
        heads: int = 2,
        dropout: float = 0.0,
        tied: bool = False,
        checkpointing: bool | None = None,
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(TIME, width)
        self.layers = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.checkpointing = checkpointing
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = (
                layer(x)
                if self.checkpointing is None
                else checkpoint(layer, x, use_reentrant=self.checkpointing)
            )
        return self.head(self.norm(x))


class TiedEnds(nn.Module):
    """The embedding's weight is the head's too: one parameter in the first and the last chunk."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class Skip(nn.Module):
    """A U-Net in small: the first convolution's output is read by the last chunk. Group and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 8, 3, padding=1, stride=2)
        self.norm1 = nn.GroupNorm(2, 8)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.first(x))
        b = F.relu(self.norm1(self.down(a)))
        c = F.relu(self.norm2(self.middle(b))) + b
        return self.last(torch.cat([F.relu(self.up(c)), a], 1)).mean((2, 3))


class UsedTwice(nn.Module):
    """One module runs at the beginning and again at the end: its weight has a use in two chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.shared(x)


class SharedView(nn.Module):
    """`weight.t()` is taken once and used in the first and the last layer: the gradients meet before the transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        turned = self.weight.t()
        x = torch.tanh(x @ turned)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x @ turned


class Frozen(Chain):
    """A chain with a frozen prefix (which then has no backward), or a frozen suffix (which has no weights to train)."""

    def __init__(self, prefix: int = 0, suffix: int = 0) -> None:
        super().__init__()
        for layer in [*self.layers[:prefix], *self.layers[len(self.layers) - suffix :]]:
            layer.requires_grad_(False)


class NormChain(nn.Module):
    """Linear, BatchNorm and an in-place ReLU: buffers that change with each micro-batch."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Scaled(nn.Module):
    """Layer scale: `x * scale`, whose gradient is a sum and then a view."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(WIDTH) + 0.5) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = x + layer(torch.tanh(x) * scale) * scale
        return x


@dataclass
class Hidden:
    """What one module hands to the next in `Outputs`."""

    state: Tensor
    gates: dict[str, Tensor]


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Hidden) -> Hidden:
        gate = torch.sigmoid(self.gate(hidden.state))
        return Hidden(torch.tanh(self.state(hidden.state)) * gate, {**hidden.gates, "last": gate})


class Outputs(nn.Module):
    """Modules that pass dataclasses and dicts of several tensors, and values read three chunks later."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Gated() for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = Hidden(x, {"first": x * 2})
        for layer in self.layers:
            hidden = layer(hidden)
        return {"state": hidden.state + hidden.gates["first"], "gate": hidden.gates["last"]}


class Arguments(nn.Module):
    """None, bool, int and string arguments beside tensors, some in nested containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(
        self,
        pair: tuple[Tensor, dict[str, Any]],
        mask: Tensor | None = None,
        *,
        twice: bool = False,
        times: int = 1,
        how: str = "tanh",
    ) -> Tensor:
        x, more = pair
        if mask is not None:
            x = x * mask
        for layer in self.layers:
            x = getattr(torch, how)(layer(x)) * times
        return x + more["shift"] * (2 if twice else 1)


class Views(nn.Module):
    """Transposed, narrowed and expanded tensors, and an int tensor made from an activation, cross every cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        order = x.new_zeros((), dtype=torch.int64)
        wide = x
        for layer in self.layers:
            order = layer(x).argsort(dim=-1) + order
            y = layer(x).transpose(0, 1)  # (width, batch)
            wide = y[: WIDTH // 2].mean(0, keepdim=True).expand(WIDTH, -1)
            x = torch.tanh((y + wide).t().contiguous().view(-1, WIDTH)).gather(1, order % WIDTH)
        return x + wide.t()


class ThreeReaders(nn.Module):
    """One value that is read by three later layers, whichever chunks they are in."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        base = self.first(x)
        x = base
        for layer in self.layers:
            x = torch.tanh(layer(x)) * base
        return x


class Auxiliary(nn.Module):
    """A second loss that is made by the first layers and reaches the end as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share = F.softmax(self.router(x), dim=-1)
        balance = (share.mean(0) ** 2).sum() * WIDTH
        x = x * share
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x, balance


class NoWeights(nn.Module):
    """Long stretches without a parameter: with four chunks, some have none. One parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(4):
            x = torch.sin(x) * torch.exp(-(x**2)) + torch.cumsum(x, dim=-1) / WIDTH
        return self.last(x)


class Gains(nn.Module):
    """A 0-dim parameter that enters the loss as it is, so that its gradient is the seed of the backward itself;
    and an offset that has the same gradient as a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.offset = nn.Parameter(torch.randn(WIDTH))
        self.log_variance = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) + self.offset)
        return F.mse_loss(x, target) * torch.exp(-self.log_variance) + self.log_variance


@dataclass
class Case:
    """A model in training mode, its loss function (None: the model returns its loss) and a batch."""

    model: nn.Module
    loss_fn: Any
    inputs: Any
    targets: Any
    autocast: torch.dtype | None = None

    @property
    def example(self) -> Any:
        return self.inputs if self.loss_fn is None else (self.inputs, self.targets)

    def output(self, model: nn.Module) -> Any:
        """The model's own output for the batch."""
        if isinstance(self.inputs, dict):
            return model(**self.inputs)
        return model(*self.inputs) if isinstance(self.inputs, tuple) else model(self.inputs)

    def loss(self, model: nn.Module) -> Any:
        """The loss of the batch, or the pair (sum, weight) where the loss function returns one."""
        with torch.autocast("cpu", dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            output = self.output(model)
            return output if self.loss_fn is None else self.loss_fn(output, self.targets)

    def double(self) -> Case:
        """This case in float64 (the model is converted in place)."""

        def doubled(tensor: Any) -> Any:
            return tensor.double() if isinstance(tensor, Tensor) and tensor.is_floating_point() else tensor

        self.model.double()
        if isinstance(self.loss_fn, nn.Module):
            self.loss_fn.double()
        self.inputs = torch.utils._pytree.tree_map(doubled, self.inputs)
        self.targets = torch.utils._pytree.tree_map(doubled, self.targets)
        return self


def _dense(model: nn.Module, samples: int, loss: Any = squares) -> Case:
    return Case(model, loss, torch.randn(samples, WIDTH), torch.randn(samples, WIDTH))


def _text(model: nn.Module, samples: int, loss: Any = cross_entropy, **more: Any) -> Case:
    tokens = torch.randint(0, WORDS, (samples, TIME + 1))
    return Case(model, loss, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), **more)


def _arguments(samples: int) -> Case:
    x, shift, mask = (torch.randn(samples, WIDTH) for _ in range(3))
    pair = (x, {"shift": shift, "unused": None})
    inputs = {"pair": pair, "mask": mask, "twice": True, "times": 2, "how": "sin"}
    return Case(Arguments(), squares, inputs, torch.randn(samples, WIDTH))


def summed(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(sum over the tokens that count, how many count): word 0 is padding."""
    loss = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=0, reduction="sum"
    )
    return loss, (targets != 0).sum()


def two_outputs(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output["state"], target) + output["gate"].mean()


def with_balance(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output[0], target) + 0.1 * output[1]


def _decay(samples: int) -> Case:
    """The loss function reads every parameter of the model: a weight decay term that spans all chunks."""
    model = Chain(3)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + 0.01 * sum((p**2).sum() for p in model.parameters())

    return _dense(model, samples, loss)


def _constant(samples: int) -> Case:
    """The loss function closes over a tensor, which the graph holds as a constant."""
    scale = torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (((output - target) ** 2) * scale.to(output.dtype)).mean()

    return _dense(Chain(3), samples, loss)


class WordLoss(nn.CrossEntropyLoss):
    """Cross entropy over the last dimension, whichever the others are."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input.reshape(-1, input.shape[-1]), target.reshape(-1))


#: name -> samples in the batch -> Case. Ask `build`, which fixes the seed.
CASES: dict[str, Callable[[int], Case]] = {
    "chain": lambda n: _dense(Chain(), n),
    "chain_dropout": lambda n: _dense(Chain(dropout=0.2), n),
    "gpt": lambda n: _text(GPT(), n),
    "gpt_dropout": lambda n: _text(GPT(dropout=0.2), n),
    "gpt_tied": lambda n: _text(GPT(1, tied=True), n),
    "gpt_autocast": lambda n: _text(GPT(1), n, autocast=torch.bfloat16),
    "gpt_autocast_tied": lambda n: _text(GPT(1, tied=True), n, autocast=torch.bfloat16),
    "gpt_checkpoint": lambda n: _text(GPT(dropout=0.2, checkpointing=False), n),
    "gpt_reentrant": lambda n: _text(GPT(dropout=0.2, checkpointing=True), n),
    "tied": lambda n: _text(TiedEnds(), n),
    "skip": lambda n: Case(Skip(), F.cross_entropy, torch.randn(n, 2, 6, 6), torch.randint(0, 3, (n,))),
    "used_twice": lambda n: _dense(UsedTwice(), n),
    "shared_view": lambda n: _dense(SharedView(), n),
    "frozen_prefix": lambda n: _dense(Frozen(prefix=2), n),
    "frozen_suffix": lambda n: _dense(Frozen(suffix=2), n),
    "batch_norm": lambda n: _dense(NormChain(), n),
    "scaled": lambda n: _dense(Scaled(), n),
    "outputs": lambda n: _dense(Outputs(), n, two_outputs),
    "arguments": lambda n: _arguments(n),
    "views": lambda n: _dense(Views(), n),
    "three_readers": lambda n: _dense(ThreeReaders(), n),
    "auxiliary": lambda n: _dense(Auxiliary(), n, with_balance),
    "no_weights": lambda n: _dense(NoWeights(), n),
    "gains": lambda n: Case(Gains(), None, (torch.randn(n, WIDTH), torch.randn(n, WIDTH)), None),
    "decay": _decay,
    "constant": _constant,
    "summed": lambda n: _text(TiedEnds(), n, summed),
    "weighted_loss": lambda n: _text(TiedEnds(), n, WordLoss(weight=torch.rand(WORDS) + 0.5)),
}


def build(name: str, samples: int = 4, seed: int = 0) -> Case:
    """A fresh case; the same seed gives the same weights and batch, and the caller's random state is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        case = CASES[name](samples)
    case.model.train()
    return case
