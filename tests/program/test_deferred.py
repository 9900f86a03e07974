"""A model without memory begins with the numbers of a plain seeded build, to the bit, for any of its tensors alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import models
from pipeloom.program.deferred import DeferredError, deferred, tape_of


class Odd(nn.Module):
    """What constructors do: Python numbers, generators and seeds of their own, copies, branches on values."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(7, 5)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.b = nn.Linear(5, 5)
        self.c = nn.Embedding(9, 5, padding_idx=2)
        for name in "de":  # seeded alike: equal
            torch.manual_seed(3)
            setattr(self, name, nn.Linear(5, 5))
        self.rates = [x.item() for x in torch.linspace(0, 0.1, 4)] + torch.linspace(0, 0.1, 4).tolist()
        self.numbers = torch.arange(3).numpy()
        generator = torch.Generator().manual_seed(8)
        self.f = nn.Parameter(torch.empty(6, 3))
        nn.init.normal_(self.f, generator=generator)
        self.g = nn.Parameter(torch.empty(6, 6))
        nn.init.orthogonal_(self.g, generator=generator)
        self.h = nn.Parameter(nn.init.sparse_(torch.empty(6, 6), 0.5))
        self.i = nn.Parameter(nn.init.trunc_normal_(torch.empty(40, 6), std=0.02))
        self.register_buffer(
            "inverse", 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)), persistent=False
        )
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)).bool())
        self.register_buffer("table", torch.from_numpy(np.eye(3)) * torch.ones(3, dtype=torch.float64))
        self.tied = nn.Linear(5, 9, bias=False)
        self.tied.weight = self.c.weight
        self.norm = nn.BatchNorm1d(4)
        self.attention = nn.MultiheadAttention(8, 2)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.convolution = nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 2))
        self.lstm = nn.LSTM(4, 5)
        with torch.no_grad():
            self.a.weight[1:3, ::2].normal_()
            self.a.bias.copy_(torch.tensor([1.0, 2, 3, 4, 5]))
            self.branch = 1 if self.a.weight.sum() > 0 else 2
            self.d.weight.data = torch.randn(5, 5) * self.e.weight
        self.apply(self.init)
        self.half = nn.Linear(3, 3).bfloat16()

    def init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.weight.device.type != "meta":
            nn.init.normal_(module.weight, std=0.02)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "odd": Odd,
    "gpt": models.GPT,
    "tied": models.TiedEnds,
    "skip": models.Skip,
}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


@pytest.fixture
def unchanged() -> Iterator[None]:
    """The caller's random state."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())


def plain(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_a_plain_seeded_build(name: str) -> None:
    model, expected = deferred(MODELS[name], seed=5), tensors_of(plain(MODELS[name], 5))
    tape = tape_of(model)
    assert tape is not None
    tensors = tensors_of(model)
    assert tensors.keys() == expected.keys()
    assert all(
        t.is_meta and (t.shape, t.dtype) == (expected[n].shape, expected[n].dtype) for n, t in tensors.items()
    )
    together = tape.values(list(tensors.values()))
    for (key, tensor), value in zip(tensors.items(), together, strict=True):
        alone = tape.values([tensor])[0]
        for got in (value, alone):
            assert torch.equal(got, expected[key].detach()), key
            assert got.stride() == expected[key].stride()


@pytest.mark.usefixtures("unchanged")
def test_what_a_constructor_reads_is_what_it_would_have_read() -> None:
    model, expected = deferred(Odd, seed=5), plain(Odd, 5)
    for name in ("rates", "branch"):
        assert getattr(model, name) == getattr(expected, name)
    assert model.numbers.tolist() == [0, 1, 2]
    assert deferred(Odd, seed=6).branch in (1, 2)
    assert tape_of(expected) is None
    assert model.tied.weight is model.c.weight


def test_another_seed_gives_other_values() -> None:
    one, other = (deferred(models.GPT, seed=s) for s in (1, 2))
    values = [tape_of(m).values([m.head.weight])[0] for m in (one, other)]  # type: ignore[union-attr]
    assert not torch.equal(*values)


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """The bytes of real tensors that random numbers were drawn into."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[int] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in op.tags:
            assert not result.is_meta
            self.drawn.append(result.nbytes)
        return result


def test_ops_that_a_tensor_does_not_need_are_not_run() -> None:
    model = deferred(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))))
    tape = tape_of(model)
    assert tape is not None
    for tensor, drawn in ((model[0].weight, [64 * 64 * 4]), (model[1].bias, [64 * 64 * 4, 256] * 2)):
        with Counting() as counting:
            tape.values([tensor])
        assert counting.drawn == drawn  # nothing of the layers after it


def test_what_cannot_be_written_down_is_refused() -> None:
    outside = torch.zeros(3)
    with pytest.raises(
        DeferredError, match=r"aten.normal_.default writes into a tensor that wasn't made by torch"
    ):
        deferred(lambda: nn.ParameterList([outside.normal_()]))
    with pytest.raises(TypeError, match=r"makes an nn\.Module; it returned int"):
        deferred(lambda: 3)  # type: ignore[arg-type, return-value]
    tape = tape_of(deferred(lambda: nn.Linear(2, 2)))
    assert tape is not None
    with pytest.raises(KeyError, match=r"no tensor like this one of shape \(2, 3\)"):
        tape.values([torch.empty(2, 3, device="meta")])


def test_a_constructor_that_fails_leaves_generators_where_they_were() -> None:
    generator = torch.Generator().manual_seed(4)
    before = generator.get_state()

    def make() -> nn.Module:
        torch.empty(3).normal_(generator=generator)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        deferred(make)
    assert torch.equal(generator.get_state(), before)
    assert torch.empty(2).normal_().device.type == "cpu"
    assert not torch.empty(2).is_meta
