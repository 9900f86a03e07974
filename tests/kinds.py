"""Kinds of models that users bring, each small and for one difficulty, beyond those of models.py.

KINDS["lstm"]() gives (model, loss function, make), where make(n) is a batch of n samples: (inputs, targets). Ask
`kind`, which fixes the seed. SLOW: those that take seconds to capture.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from parity import Deep, made

WIDTH, WORDS, TIME = 8, 20, 5
Kind = tuple[nn.Module, Any, Callable[[int], Any]]
KINDS: dict[str, Callable[[], Kind]] = {}
SLOW: set[str] = set()


def kind(name: str) -> Deep:
    """A fresh one in float64, in training mode, from a fixed seed."""
    model, loss, make = made(KINDS[name])
    return Deep(model.double().train(), loss, make)


def register(function: Callable[[], Kind]) -> Callable[[], Kind]:
    KINDS[function.__name__] = function
    return function


def slow(function: Callable[[], Kind]) -> Callable[[], Kind]:
    SLOW.add(function.__name__)
    return function


def dense(n: int) -> Any:
    return torch.randn(n, WIDTH), torch.randn(n, WIDTH)


def sequence(n: int) -> Any:
    return torch.randn(n, TIME, WIDTH), torch.randn(n, TIME, WIDTH)


def image(n: int) -> Any:
    return torch.randn(n, 3, 8, 8), torch.randn(n, 3, 8, 8)


def words(n: int) -> Any:
    return torch.randint(0, WORDS, (n, TIME)), torch.randint(0, WORDS, (n, TIME))


class Layers(nn.Module):
    """Four linear layers and a `step` between them."""

    def __init__(self, step: Callable[[Tensor], Tensor] = torch.tanh, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.step = step

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = self.step(layer(x))
        return x


def wrapped(wrap: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    return nn.Sequential(*(m for _ in range(3) for m in (wrap(nn.Linear(WIDTH, WIDTH)), nn.Tanh())))


# ---- recurrent


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.cell = cell(WIDTH, WIDTH, batch_first=True, **options)
        made_of = options.get("proj_size", WIDTH) * (2 if options.get("bidirectional") else 1)
        self.after = nn.Linear(made_of, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.cell(torch.tanh(self.before(x)))[0])


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.out = (
            nn.LSTMCell(WIDTH, WIDTH),
            nn.GRUCell(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], WIDTH)
        for t in range(x.shape[1]):
            h, c = self.lstm(x[:, t], (h, c))
        return self.out(self.gru(h, c))


@slow
@register
def lstm() -> Kind:
    return Recurrent(nn.LSTM), F.mse_loss, sequence


@slow
@register
def gru_both_ways() -> Kind:
    return Recurrent(nn.GRU, num_layers=2, bidirectional=True), F.mse_loss, sequence


@slow
@register
def lstm_with_projection() -> Kind:
    return Recurrent(nn.LSTM, num_layers=2, proj_size=4), F.mse_loss, sequence


@slow
@register
def cells() -> Kind:
    return Cells(), F.mse_loss, lambda n: (torch.randn(n, 3, WIDTH), torch.randn(n, WIDTH))


# ---- attention


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.encoder(x, mask=mask, src_key_padding_mask=padding, is_causal=True)


def padded(n: int) -> Any:
    padding = torch.zeros(n, TIME, dtype=torch.bool)
    padding[::2, -1] = True
    return (torch.randn(n, TIME, WIDTH), padding), torch.randn(n, TIME, WIDTH)


class Translator(nn.Module):
    """Whether the target's mask is causal is for torch to find out."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.Transformer(WIDTH, 2, 1, 1, 16, dropout=0.1, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype)
        return self.towers(source, target, tgt_mask=mask)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True, bias=b, add_bias_kv=b)
            for b in (True, False)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for attention in self.attention:
            y, weights = attention(x, x, x, attn_mask=mask[0], average_attn_weights=False)
            x = x + y + weights.mean()
        return x


class Grouped(nn.Module):
    """Two heads of queries share each head of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, w) for w in (WIDTH, 4, 4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 2)).transpose(1, 2) for p in (self.q, self.k, self.v))
        p = 0.1 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, dropout_p=p)
        return x + self.o(y.transpose(1, 2).flatten(2))


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(2, WIDTH, 4) / 3) for _ in range(2))
        self.out = nn.Parameter(torch.randn(2, 4, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            h = torch.einsum("btd,hde->bthe", x, weight)
            a = torch.einsum("bthe,bshe->bhts", h, h).softmax(-1)
            x = x + torch.einsum("bhts,bshe,hed->btd", a, h, self.out)
        return x


@slow
@register
def encoder_with_masks() -> Kind:
    return Masked(), F.mse_loss, padded


@slow
@register
def two_towers() -> Kind:
    batch = lambda n: ((torch.randn(n, 5, WIDTH), torch.randn(n, 4, WIDTH)), torch.randn(n, 4, WIDTH))  # noqa: E731
    return Translator(), F.mse_loss, batch


@slow
@register
def attention_weights() -> Kind:
    def batch(n: int) -> Any:
        mask = torch.triu(torch.full((TIME, TIME), float("-inf"), dtype=torch.float64), 1)
        return (torch.randn(n, TIME, WIDTH), mask.expand(n, -1, -1).contiguous()), torch.randn(n, TIME, WIDTH)

    return Heads(), F.mse_loss, batch


@slow
@register
def grouped_queries() -> Kind:
    return Grouped(), F.mse_loss, sequence


@slow
@register
def einsums() -> Kind:
    return Einsum(), F.mse_loss, sequence


# ---- weights that are computed


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Adapter(nn.Module):
    """A frozen layer beside two low-rank matrices (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, WIDTH) / 3), nn.Parameter(torch.randn(WIDTH, 2) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + x @ self.down.t() @ self.up.t())


@register
def weight_norm() -> Kind:
    return wrapped(parametrizations.weight_norm), F.mse_loss, dense


@register
def spectral_norm() -> Kind:
    """Its buffers get new values that the step itself doesn't read."""
    return wrapped(parametrizations.spectral_norm), F.mse_loss, dense


@slow
@register
def orthogonal() -> Kind:
    return wrapped(parametrizations.orthogonal), F.mse_loss, dense


@slow
@register
def own_parametrization() -> Kind:
    model = wrapped(lambda layer: layer)
    for layer in list(model)[::2]:
        parametrize.register_parametrization(layer, "weight", Symmetric())
    return model, F.mse_loss, dense


@slow
@register
def low_rank_adapters() -> Kind:
    frozen = nn.Embedding(WORDS, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WORDS).requires_grad_(False)
    model = nn.Sequential(frozen[0], *(Adapter() for _ in range(4)), frozen[1])
    return model, lambda o, t: F.cross_entropy(o.transpose(1, 2), t), words


class Shared(nn.Module):
    """One weight in every chunk, and once more as a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(torch.tanh(self.shared(x))))
        return F.linear(x, self.shared.weight.t())


@register
def shared_by_all_chunks() -> Kind:
    return Shared(), F.mse_loss, dense


@register
def one_module_many_times() -> Kind:
    return nn.Sequential(*([nn.Linear(WIDTH, WIDTH), nn.Tanh()] * 3)), F.mse_loss, dense


@register
def frozen_in_the_middle() -> Kind:
    model = Layers()
    model.layers[1].requires_grad_(False)
    model.layers[2].weight.requires_grad_(False)
    return model, F.mse_loss, dense


# ---- images


@slow
@register
def convolutions() -> Kind:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=4),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(8, 4, 2, 2),
        nn.InstanceNorm2d(4, affine=True),
        nn.LeakyReLU(0.1, inplace=True),
        nn.Conv2d(4, 12, 3, padding=1),
        nn.PixelShuffle(2),
        nn.AvgPool2d(2),
    )
    return model, F.mse_loss, image


@slow
@register
def pools() -> Kind:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
        nn.AdaptiveAvgPool2d(4),
        nn.Conv2d(8, 8, 3, padding="same", dilation=2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.MaxPool2d(2),
        nn.Upsample(scale_factor=2),
        nn.LPPool2d(2, 2),
        nn.AdaptiveMaxPool2d(8),
        nn.ZeroPad2d(1),
        nn.Conv2d(8, 3, 3),
    )
    return model, F.mse_loss, image


class UNet(nn.Module):
    """Convolution, group norm, batch norm; two skips over the bottom."""

    def __init__(self) -> None:
        super().__init__()

        def block(i: int, o: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(i, o, 3, padding=1),
                nn.GroupNorm(2, o),
                nn.SiLU(),
                nn.Conv2d(o, o, 3, padding=1),
                nn.BatchNorm2d(o),
                nn.ReLU(inplace=True),
            )

        self.down1, self.down2, self.bottom = block(3, 4), block(4, 8), block(8, 8)
        self.up2, self.up1, self.out = block(16, 4), block(8, 4), nn.Conv2d(4, 3, 1)
        self.wide2, self.wide1 = nn.ConvTranspose2d(8, 8, 2, 2), nn.ConvTranspose2d(4, 4, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        d = self.up2(torch.cat([self.wide2(c), b], 1))
        return self.out(self.up1(torch.cat([self.wide1(d), a], 1)))


@slow
@register
def u_net() -> Kind:
    return UNet(), F.mse_loss, image


@register
def dropouts() -> Kind:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Dropout2d(0.3),
        nn.AlphaDropout(0.2),
        nn.RReLU(),
        nn.Conv2d(8, 3, 3, padding=1),
        nn.FeatureAlphaDropout(0.2),
        nn.Dropout(0.3),
    )
    return model, F.mse_loss, image


class Folds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(12, WIDTH), nn.Linear(WIDTH, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.into(F.unfold(x, 2, stride=2).transpose(1, 2)))
        return F.fold(self.out(y).transpose(1, 2), (8, 8), 2, stride=2)


@register
def folds() -> Kind:
    return Folds(), F.mse_loss, image


# ---- memory that lies otherwise


class Turned(nn.Module):
    """Group norm and masks over turned memory, whose layout torch predicts wrongly in places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.GroupNorm(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x).transpose(1, 2))
        return self.last(F.dropout(y, 0.3, self.training).transpose(1, 2))


class Next(nn.Module):
    """Convolution over channels, then layers over turned ones (ConvNeXt)."""

    def __init__(self) -> None:
        super().__init__()
        self.depth, self.norm = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.LayerNorm(8)
        self.up, self.down, self.gain = nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.ones(8) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(self.depth(x).permute(0, 2, 3, 1))))) * self.gain
        return x + F.dropout(y.permute(0, 3, 1, 2), 0.1, self.training)


@register
def turned_group_norm() -> Kind:
    return Turned(), F.mse_loss, sequence


@register
def channels_last() -> Kind:
    """Without the input's gradient, torch's group norm over such memory crashes."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.Conv2d(8, 3, 1),
    ).to(memory_format=torch.channels_last)

    def batch(n: int) -> Any:
        return torch.randn(n, 3, 8, 8).contiguous(memory_format=torch.channels_last), torch.randn(n, 3, 8, 8)

    return model, F.mse_loss, batch


@register
def conv_next() -> Kind:
    model = nn.Sequential(nn.Conv2d(3, 8, 2, 2), Next(), Next(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return model, F.mse_loss, lambda n: (torch.randn(n, 3, 8, 8), torch.randn(n, 8))


@register
def inputs_that_are_views() -> Kind:
    return Layers(), F.mse_loss, lambda n: (torch.randn(WIDTH, n).t(), torch.randn(1, WIDTH).expand(n, WIDTH))


# ---- words


class Bag(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, mode=mode)
        self.layers = Layers(layers=2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.bag(tokens))


def bags(n: int) -> Any:
    return torch.randint(0, WORDS, (n, 4)), torch.randn(n, WIDTH)


@register
def bag_of_words() -> Kind:
    return Bag("mean"), F.mse_loss, bags


@register
def largest_of_bag() -> Kind:
    return Bag("max"), F.mse_loss, bags


@register
def embedding_with_padding() -> Kind:
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH, padding_idx=3, scale_grad_by_freq=True), Layers())
    return model, F.mse_loss, lambda n: (words(n)[0], torch.randn(n, TIME, WIDTH))


# ---- values that cross


class Complex(nn.Module):
    """Complex tensors cross every cut, one of them conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.turns = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128) / 4) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(self.into(x), x)
        for turn in self.turns:
            z = torch.fft.ifft(torch.fft.fft(z @ turn).conj())
            z = z * z.abs().sigmoid()
        return self.out(torch.view_as_real(z.conj().resolve_conj()).flatten(1))


class Indices(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            largest, positive = x.topk(3, -1).indices, x > 0.1
            x = x.scatter(1, largest, x.gather(1, largest) * 2) * positive
        return x


class Nothing(Layers):
    """A tensor without elements, and a number, cross every cut."""

    def forward(self, x: Tensor) -> Tensor:
        empty, total = x[:, :0], x.new_zeros(())
        for layer in self.layers:
            x = torch.tanh(layer(torch.cat([x, empty], 1)))
            empty, total = torch.cat([empty, x[:, :0]], 1) * 2, total + x.pow(2).mean()
            x = x / (1 + total)
        return torch.cat([x, empty], 1) + total


class InPlace(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x, out = x.clone(), x.new_zeros(x.shape)
        for i, layer in enumerate(self.layers):
            y = layer(x).tanh_()
            x = x + y
            x[:, i] = 0
            out[:, i] += y[:, 0]
            out += x
            x = out.clone().mul_(0.5)
        return out


class ReadAgain(Layers):
    """Every layer reads the input."""

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y) + x) * x
        return y


Parts = collections.namedtuple("Parts", "first last")


class Tuple(Layers):
    def forward(self, x: Tensor) -> Parts:
        first = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        return Parts(first, self.layers[3](torch.tanh(self.layers[2](first))))


class Several(nn.Module):
    """Arguments by keyword: tensors, a number for all samples, lists of plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(
        self, x: Tensor, *, scale: Tensor, gates: dict[str, list[bool]], shift: Tensor | None = None
    ) -> Any:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x) * scale if gates["on"][i % 2] else layer(x))
        return {"x": x if shift is None else x + shift, "all": [x * 2, (x * 3,)]}


@register
def complex_values() -> Kind:
    return Complex(), F.mse_loss, dense


@register
def indices_and_masks() -> Kind:
    return Indices(), F.mse_loss, dense


@slow
@register
def nothing_and_numbers() -> Kind:
    return Nothing(), F.mse_loss, dense


@slow
@register
def in_place() -> Kind:
    return InPlace(), F.mse_loss, dense


@register
def input_read_again() -> Kind:
    return ReadAgain(), F.mse_loss, dense


@register
def named_tuple() -> Kind:
    return Tuple(), lambda o, t: F.mse_loss(o.first, t) + F.mse_loss(o.last, t), dense


@register
def keywords() -> Kind:
    def batch(n: int) -> Any:
        return {
            "x": torch.randn(n, WIDTH),
            "scale": torch.tensor(0.5),
            "gates": {"on": [True, False]},
        }, torch.randn(n, WIDTH)

    return Several(), lambda o, t: F.mse_loss(o["x"], t) + o["all"][1][0].mean(), batch


# ---- gradients of their own


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * gradient * x


class Hooked(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 2)
        return x


class Penalized(Layers):
    """The loss depends on a derivative by the input."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = super().forward(x)
            (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + gradient.pow(2).sum(-1, keepdim=True)


class Detached(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = torch.tanh(y) - y.detach() * 0.1
        with torch.no_grad():
            z = x * 2
        return x + z


class Transformed(Layers):
    """Derivatives of single samples, by torch.func."""

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.func.vmap(torch.func.grad(lambda v: torch.tanh(self.layers[0](v)).sum()))
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x)) + inner(x)
        return x


@register
def autograd_function() -> Kind:
    return Layers(lambda x: torch.tanh(Cubed.apply(x))), F.mse_loss, dense


@register
def hooks_on_activations() -> Kind:
    return Hooked(), F.mse_loss, dense


@slow
@register
def gradient_penalty() -> Kind:
    return Penalized(), F.mse_loss, dense


@register
def detached() -> Kind:
    return Detached(), F.mse_loss, dense


@register
def functional_transforms() -> Kind:
    return Transformed(), F.mse_loss, dense


@register
def chosen_by_values() -> Kind:
    return Layers(lambda y: torch.where(y > 0, y, y.exp() - 1).clamp(-2, 2)), F.mse_loss, dense


# ---- draws and buffers


class Draws(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gumbel_softmax(layer(x), tau=0.7) + torch.rand_like(x) * 0.1
            x = x + torch.empty_like(x).uniform_(-1, 1) + torch.bernoulli(torch.full_like(x, 0.5))
        return x + torch.normal(0.0, 1.0, x.shape, dtype=x.dtype) + torch.randint(0, 3, x.shape)


class Average(Layers):
    """A moving average that evaluation reads too, and a table that only evaluation reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.rand(WIDTH))
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == 1:
                if self.training:
                    self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
                    self.steps += 1
                x = x - self.average
        return x if self.training else x * self.table * self.scale


class Auto(nn.Module):
    """A variational autoencoder: a draw between two halves, three outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 2 * WIDTH), Layers(layers=2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, spread = self.into(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (spread / 2).exp() if self.training else mean
        return {"x": self.out(z), "mean": mean, "spread": spread}


def evidence(output: dict[str, Tensor], target: Tensor) -> Tensor:
    spread = output["spread"]
    return F.mse_loss(output["x"], target) - 0.01 * (1 + spread - output["mean"] ** 2 - spread.exp()).mean()


@register
def draws() -> Kind:
    return Draws(), F.mse_loss, dense


@register
def moving_average() -> Kind:
    return Average(), F.mse_loss, dense


@register
def variational() -> Kind:
    return Auto(), evidence, dense


# ---- more than layers in a row


class Messages(nn.Module):
    """A graph network: edges by number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = (edges[..., i : i + 1].expand(-1, -1, WIDTH) for i in (0, 1))
        for layer in self.layers:
            x = torch.tanh(torch.zeros_like(x).scatter_add(1, target, layer(x).gather(1, source)) + x)
        return x


class Codes(nn.Module):
    """The nearest of some vectors stands for each sample; gradients go past it."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.codes = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Embedding(6, WIDTH),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.into(x)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(-1))
        loss = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(code.detach(), z)
        return self.out(z + (code - z).detach()), loss


class MadeWeights(nn.Module):
    """One layer makes another's weights, for each sample its own."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.out = nn.Linear(WIDTH, WIDTH * WIDTH + WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.maker(x).split([WIDTH * WIDTH, WIDTH], 1)
        y = torch.bmm(weight.unflatten(1, (WIDTH, WIDTH)), x[:, :, None]).squeeze(-1)
        return self.out(torch.tanh(y + bias))


class Teacher(nn.Module):
    """A second tower that isn't trained and runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher, self.last = Layers(layers=2), Layers(layers=2), nn.Linear(WIDTH, WIDTH)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.teacher(x)
        return 2 - 2 * F.cosine_similarity(self.last(self.student(x)), y, dim=-1)


class Attributes(Layers):
    """Tensors that are plain attributes: constants."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.tril(torch.ones(WIDTH, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(F.linear(x, layer.weight * self.mask, layer.bias))
        return x


@register
def graph_network() -> Kind:
    def batch(n: int) -> Any:
        return (torch.randn(n, 6, WIDTH), torch.randint(0, 6, (n, 10, 2))), torch.randn(n, 6, WIDTH)

    return Messages(), F.mse_loss, batch


@register
def nearest_codes() -> Kind:
    return Codes(), lambda o, t: F.mse_loss(o[0], t) + o[1], dense


@register
def weights_by_a_layer() -> Kind:
    return MadeWeights(), F.mse_loss, dense


@register
def untrained_teacher() -> Kind:
    return Teacher(), lambda o, _: o.mean(), dense


@register
def constant_attributes() -> Kind:
    return Attributes(), F.mse_loss, dense


# ---- two inputs, several losses


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Layers(layers=2)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.tower(a), self.tower(b)


@register
def siamese() -> Kind:
    def contrast(output: tuple[Tensor, Tensor], same: Tensor) -> Tensor:
        distance = (output[0] - output[1]).pow(2).sum(1)
        return (same * distance + (1 - same) * F.relu(1 - distance.sqrt()).pow(2)).mean()

    return (
        Siamese(),
        contrast,
        lambda n: ((torch.randn(n, WIDTH), torch.randn(n, WIDTH)), torch.rand(n).round()),
    )


@register
def losses_with_more_arguments() -> Kind:
    def loss(output: tuple[Tensor, Tensor], target: dict[str, Any]) -> Tensor:
        return F.mse_loss(output[0], target["y"]) * target["by"] + F.l1_loss(output[1], target["more"][0])

    def batch(n: int) -> Any:
        return dense(n), {
            "y": torch.randn(n, WIDTH),
            "by": torch.tensor(0.7),
            "more": (torch.randn(n, WIDTH),),
        }

    return Siamese(), loss, batch


class Experts(nn.Module):
    """Every expert sees every word; a mask says whose answer counts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        parts = (e(x) * ((chosen == k) * weights).sum(-1, keepdim=True) for k, e in enumerate(self.experts))
        return sum(parts, torch.zeros_like(x))


@slow
@register
def experts() -> Kind:
    return Experts(), F.mse_loss, sequence
