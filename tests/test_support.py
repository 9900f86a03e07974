"""docs/support.md says what is refused, and with which words: each of its messages is provoked here and compared.

A row of the page is a heading, the message as a quotation, and what to do. REFUSED has a function for each heading.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import WIDTH, Chain
from pipeloom.local import compile_local
from pipeloom.strategy import Strategy

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
X, Y = torch.ones(4, WIDTH), torch.ones(4, WIDTH)
REFUSED: dict[str, Callable[[], Any]] = {}


def row(title: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        REFUSED[title] = function
        return function

    return register


def compiled(model: nn.Module, loss: Any = F.mse_loss, example: Any = (X, Y), **fields: Any) -> Any:
    options = {k: fields.pop(k) for k in ("optimizer", "scheduler") if k in fields}
    strategy = Strategy(**{"pp_degree": 2, "accumulate_steps": 2, "costs": "roofline", **fields})
    return compile_local(model, loss, example=example, strategy=strategy, **options)


class Net(nn.Module):
    """A layer, what `act` makes of it, a layer."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), Middle(act), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class Middle(nn.Module):
    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("average", torch.ones(WIDTH))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, x)


@row("A value of a tensor decides what runs")
def _() -> Any:
    return compiled(Net(lambda _, x: x if x.sum() > 0 else -x))


@row("A shape depends on values")
def _() -> Any:
    return compiled(Net(lambda _, x: x[x[:, 0] > 0].sum() + x))


@row("A router whose shapes depend on values")
def _() -> Any:
    def route(self: Any, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        (rows,) = torch.where(x[:, 0] > 0)
        return out.index_add(0, rows, x[rows] * self.scale)

    return compiled(Net(route))


@row("CTC loss of targets in one row")
def _() -> Any:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        lengths = torch.full((len(output),), 1)
        return F.ctc_loss(output.log_softmax(-1)[None], target.flatten(), lengths, lengths)

    return compiled(Net(lambda _, x: x), loss, (X, torch.ones(4, 1, dtype=torch.int64)))


@row("An autograd.Function that leaves torch")
def _() -> Any:
    class Outside(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return torch.from_numpy(x.detach().numpy() * 2)

        @staticmethod
        def backward(_ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    return compiled(Net(lambda _, x: Outside.apply(x)))


@row("A constant is changed in place")
def _() -> Any:
    seen = torch.zeros(WIDTH)

    def act(_self: Any, x: Tensor) -> Tensor:
        seen.add_(1)
        return x * seen

    return compiled(Net(act))


@row("A buffer is assigned")
def _() -> Any:
    def act(self: Any, x: Tensor) -> Tensor:
        self.average = self.average * 0.9 + x.detach().mean(0) * 0.1
        return x * self.average

    return compiled(Net(act))


@row("A buffer's new value needs a gradient")
def _() -> Any:
    def act(self: Any, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(x.mean(0))
        return x

    return compiled(Net(act))


@row("A module keeps a tensor from one micro-batch for the next")
def _() -> Any:
    def act(self: Any, x: Tensor) -> Tensor:
        self.last = x
        return x

    return compiled(Net(act))


@row("A module counts")
def _() -> Any:
    def act(self: Any, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return x / self.calls

    return compiled(Net(act))


@row("A draw that isn't torch's")
def _() -> Any:
    return compiled(Net(lambda _, x: x if random.random() < 0.5 else -x))


@row("A parameter is changed in the forward")
def _() -> Any:
    model = nn.Sequential(nn.Embedding(9, WIDTH, max_norm=1.0), nn.Linear(WIDTH, WIDTH))
    return compiled(model, example=(torch.zeros(4, dtype=torch.int64), Y))


@row("An input is changed in the forward")
def _() -> Any:
    class Shifts(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.add_(1))

    return compiled(Shifts())


@row("Sparse gradients")
def _() -> Any:
    model = nn.Sequential(nn.Embedding(9, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))
    return compiled(model, example=(torch.zeros(4, dtype=torch.int64), Y))


@row("A sparse buffer")
def _() -> Any:
    model = Chain()
    model.register_buffer("edges", torch.eye(WIDTH).to_sparse())
    return compiled(model)


@row("A sparse or nested input")
def _() -> Any:
    return compiled(Chain(), example=(X.to_sparse(), Y))


@row("Module hooks")
def _() -> Any:
    model = Chain()
    model.layers[1].register_forward_hook(lambda *_: None)
    return compiled(model)


@row("Hooks of a parameter")
def _() -> Any:
    model = Chain()
    model.layers[1].weight.register_hook(lambda gradient: gradient)
    return compiled(model)


@row("BatchNorm with a cumulative average")
def _() -> Any:
    return compiled(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)))


@row("Dropout inside a recurrent module")
def _() -> Any:
    return compiled(nn.LSTM(WIDTH, WIDTH, 2, dropout=0.1))


@row("A lazy module")
def _() -> Any:
    return compiled(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(WIDTH)))


@row("A compiled or wrapped model")
def _() -> Any:
    return compiled(torch.compile(Chain()))


@row("A TorchScript module")
def _() -> Any:
    with pytest.warns(DeprecationWarning, match="jit"):
        script = torch.jit.script(nn.Linear(WIDTH, WIDTH))
    return compiled(nn.Sequential(nn.Linear(WIDTH, WIDTH), script))


@row("A generator of one's own")
def _() -> Any:
    generator = torch.Generator()
    return compiled(Net(lambda _, x: x + torch.rand(x.shape, generator=generator)))


@row("Nothing to train")
def _() -> Any:
    return compiled(Chain().requires_grad_(False))


@row("A loss that isn't one number")
def _() -> Any:
    return compiled(Chain(), lambda o, t: o - t)


@row("A model that returns no loss, and no loss_fn")
def _() -> Any:
    return compiled(Chain(), None, X)


@row("A weight that needs a gradient")
def _() -> Any:
    return compiled(Chain(), lambda o, _: (o.sum(), o.sum()))


@row("A loss with parameters")
def _() -> Any:
    class Head(nn.Linear):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
            return F.mse_loss(super().forward(output), target)

    return compiled(Chain(), Head(WIDTH, WIDTH))


@row("A loss that changes its buffers")
def _() -> Any:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.steps.add_(1)
            return F.mse_loss(output, target)

    return compiled(Chain(), Counts())


@row("A buffer shared by chunks")
def _() -> Any:
    class Shares(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x - self.average)
            x = self.layers[1](x)
            self.average.copy_(x.detach().mean(0))
            return x

    return compiled(Shares(), cuts=["layers.1"])


@row("Autocast around the call")
def _() -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return compiled(Chain())


@row("An optimizer with a closure")
def _() -> Any:
    return compiled(Chain(), optimizer="LBFGS")


@row("A scheduler that needs a figure")
def _() -> Any:
    return compiled(Chain(), optimizer="SGD", scheduler="ReduceLROnPlateau")


@row("Tensors of other batch sizes")
def _() -> Any:
    return compiled(Chain()).step(X, Y[:3])


@row("A batch that contradicts the strategy")
def _() -> Any:
    return compiled(Chain(), micro_batch_size=2).step(X.repeat(2, 1), Y.repeat(2, 1))


@row("An empty batch")
def _() -> Any:
    return compiled(Chain()).step(X[:0], Y[:0])


@row("More chunks than the model has ops")
def _() -> Any:
    return compiled(Chain(2), pp_degree=8)


@row("A cut at an unknown module")
def _() -> Any:
    return compiled(Chain(), cuts=["layers.9"])


@row("Recompute of an unknown module")
def _() -> Any:
    return compiled(Chain(), recompute=["layers.9"])


@row("No plan within the memory limit")
def _() -> Any:
    return compiled(Chain(), memory_limit=100)


def message_of(provoke: Callable[[], Any]) -> str:
    """The words in which something is refused, in one line; the numbers of this file's lines as N."""
    with pytest.raises((ValueError, RuntimeError)) as error:
        provoke()
    text = re.sub(r"(test_support\.py, line) \d+", r"\1 N", str(error.value))
    return re.sub(r"\s+", " ", text).strip()


def rows_of(page: str) -> dict[str, str]:
    """Heading -> quoted message of each row, in one line."""
    found = re.findall(r"^### (.+?)\n\n((?:> .*\n)+)", page, re.MULTILINE)
    return {title: re.sub(r"\s+", " ", quote.replace("\n> ", " ")[2:]).strip() for title, quote in found}


@pytest.mark.parametrize("title", REFUSED)
def test_it_is_refused_in_the_words_of_the_page(title: str) -> None:
    assert message_of(REFUSED[title]) == rows_of(PAGE.read_text())[title]


def test_every_row_of_the_page_has_a_test() -> None:
    assert list(rows_of(PAGE.read_text())) == list(REFUSED)
