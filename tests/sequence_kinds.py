"""More kinds of models, all of sequences: speech, sets, states, rotations, spectra."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kinds import Kind, register
from models import TIME, WIDTH, WORDS


def sequences(n: int) -> Any:
    return torch.randn(n, TIME, WIDTH), torch.randn(n, TIME, WIDTH)


class Speech(nn.Module):
    """Convolution and a recurrent layer over time, classes at each moment."""

    def __init__(self) -> None:
        super().__init__()
        self.hear = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.follow = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.classes = nn.Linear(2 * WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        heard = F.gelu(self.hear(x.mT).mT)
        return self.classes(self.follow(heard)[0]).log_softmax(-1)


def spoken(n: int) -> Any:
    """Targets in rows, whose longest differs from micro-batch to micro-batch; some can't be aligned."""
    lengths = torch.arange(n) % 4
    heard = torch.where(torch.arange(n) == 4, 1, TIME)
    return torch.randn(n, TIME, WIDTH), (torch.randint(1, 6, (n, 3)), heard, lengths)


@register
def speech() -> Kind:
    def loss(output: Tensor, target: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.ctc_loss(output.transpose(0, 1), *target, zero_infinity=True)

    return Speech(), loss, spoken


class Sets(nn.Module):
    """Learned points look at a set, and the set at them: of two attentions, only the second drops."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(1, 3, WIDTH))
        self.gather = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.spread = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=0.1)
        self.norm, self.pair = nn.LayerNorm(WIDTH), nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        points = self.gather(self.points.expand(len(x), -1, -1), x, x, need_weights=False)[0]
        return self.pair(self.norm(x + self.spread(x, points, points)[0]), x)


@register
def sets() -> Kind:
    return Sets(), F.mse_loss, sequences


class Scan(nn.Module):
    """A state that is read and written at every moment, by gates that the input makes (Mamba)."""

    def __init__(self, states: int = 3) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.near = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)
        self.gates = nn.Linear(WIDTH, 1 + 2 * states)
        self.decay, self.skip = (
            nn.Parameter(torch.randn(WIDTH, states) * 0.1),
            nn.Parameter(torch.ones(WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.enter(x).chunk(2, -1)
        inner = F.silu(self.near(inner.mT)[..., : x.shape[1]].mT)
        step, write, read = self.gates(inner).split([1, *2 * [self.decay.shape[1]]], -1)
        step = F.softplus(step)
        state, found = x.new_zeros(len(x), *self.decay.shape), []
        for t in range(x.shape[1]):
            kept = torch.exp(-step[:, t, :, None] * self.decay.exp())
            state = state * kept + step[:, t, :, None] * write[:, t, None] * inner[:, t, :, None]
            found.append((state * read[:, t, None]).sum(-1))
        return x + self.leave((torch.stack(found, 1) + inner * self.skip) * F.silu(gate))


@register
def selective_scan() -> Kind:
    return nn.Sequential(Scan(), Scan(), Scan()), F.mse_loss, sequences


class Rotary(nn.Module):
    """Queries and keys turned by complex numbers in a buffer; the embedding's transpose makes the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(4))
        angles = torch.outer(torch.arange(TIME), 0.1 ** torch.arange(WIDTH // 4))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.turns.to(pairs.dtype)).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            heads = layer(norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            query, key, value = heads.unbind(0)
            found = F.scaled_dot_product_attention(
                self.turned(query), self.turned(key), value, is_causal=True
            )
            x = x + found.transpose(1, 2).flatten(-2)
        return self.norms[-1](x) @ self.words.weight.t()


@register
def rotary() -> Kind:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    return Rotary(), loss, lambda n: (torch.randint(WORDS, (n, TIME)), torch.randint(WORDS, (n, TIME)))


class Spectrum(nn.Module):
    """Complex weights on the low frequencies (a Fourier operator)."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.far = nn.ParameterList(torch.randn(WIDTH, WIDTH, 2, 2) * 0.2 for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for near, far in zip(self.near, self.far, strict=True):
            waves = torch.fft.rfft(x, dim=1)
            kept = torch.zeros_like(waves)
            kept[:, :2] = torch.einsum("bki,iok->bko", waves[:, :2], torch.view_as_complex(far))
            x = F.gelu(torch.fft.irfft(kept, n=x.shape[1], dim=1) + near(x))
        return x


@register
def spectra() -> Kind:
    return Spectrum(), F.mse_loss, sequences
