"""The losses of torch.nn.functional: of a whole batch, whatever the cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import WIDTH
from parity import Deep, eager_outcome, made, pipe_outcome, pipeline
from pipeloom.local import compile_local
from pipeloom.strategy import Strategy

CLASSES, SAMPLES = 5, 6
WEIGHTS = torch.tensor([0.5, 1.0, 1.5, 0.7, 1.2], dtype=torch.float64)
ZBV = Strategy(pp_degree=2, vpp_degree=2, schedule_mode="ZBV", accumulate_steps=3, costs="roofline")

Loss = Callable[[Tensor, Tensor], Tensor]


def labels_in_front(classes: Tensor) -> Tensor:
    """One label a sample, −1 behind it, and one more that isn't read."""
    return F.pad(F.pad(classes[:, None], (0, CLASSES - 2), value=-1), (0, 1), value=0)


def focal(output: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(output, target, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def dice(output: Tensor, target: Tensor) -> Tensor:
    p, t = output.sigmoid(), target.sigmoid()
    return (1 - (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)).mean()


#: targets like the outputs
REAL: dict[str, Loss] = {
    "smooth_l1": F.smooth_l1_loss,
    "huber": lambda o, t: F.huber_loss(o, t, delta=0.5),
    "poisson": lambda o, t: F.poisson_nll_loss(o, t.abs(), full=True),
    "gaussian": lambda o, t: F.gaussian_nll_loss(o, t, F.softplus(o) + 0.1),
    "gaussian, one variance": lambda o, t: F.gaussian_nll_loss(o, t, 0.3, full=True),
    "kl": lambda o, t: F.kl_div(o.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
    "multilabel soft margin": lambda o, t: F.multilabel_soft_margin_loss(o, t.sigmoid(), weight=WEIGHTS),
    "binary cross entropy": lambda o, t: F.binary_cross_entropy_with_logits(
        o, t.sigmoid(), weight=WEIGHTS, pos_weight=WEIGHTS
    ),
    "soft margin": lambda o, t: F.soft_margin_loss(o, t.sign()),
    "hinge": lambda o, t: F.hinge_embedding_loss(o, t.sign()),
    "triplet": lambda o, t: F.triplet_margin_loss(o, t, t.flip(1)),
    "cosine": lambda o, t: F.cosine_embedding_loss(o, t, t[:, 0].sign()),
    "ranking": lambda o, t: F.margin_ranking_loss(o, t, t.sign()),
    "soft targets": lambda o, t: F.cross_entropy(o, t.softmax(-1), weight=WEIGHTS, label_smoothing=0.1),
    "dice": dice,
    "masked": lambda o, t: ((o - t).abs() * (t > 0)).sum() / (t > 0).sum(),
}
#: targets are classes
CLASSED: dict[str, Loss] = {
    "multi margin": lambda o, t: F.multi_margin_loss(o, t, weight=WEIGHTS),
    "multilabel margin": lambda o, t: F.multilabel_margin_loss(o, labels_in_front(t)),
    "class weights, smooth": lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS, label_smoothing=0.1),
    "ignored class, smooth": lambda o, t: F.cross_entropy(o, t, ignore_index=1, label_smoothing=0.1),
    "nll": lambda o, t: F.nll_loss(o.log_softmax(-1), t, weight=WEIGHTS, ignore_index=2),
    "focal": focal,
    "two means": lambda o, t: F.cross_entropy(o, t, ignore_index=1) + F.cross_entropy(-o, t, weight=WEIGHTS),
}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
    )


def real(n: int) -> Any:
    return torch.randn(n, WIDTH), torch.randn(n, CLASSES)


def classed(n: int) -> Any:
    return torch.randn(n, WIDTH), torch.randint(CLASSES, (n,))


@pytest.mark.parametrize("name", [*REAL, *CLASSED])
def test_a_loss_is_that_of_the_whole_batch(name: str) -> None:
    loss, make = (REAL[name], real) if name in REAL else (CLASSED[name], classed)
    case = made(lambda: Deep(network(), loss, make).double())
    batch = case.batch(SAMPLES)
    found = pipe_outcome(pipeline(case, ZBV, batch), batch)
    assert found.error(eager_outcome(case, batch, [SAMPLES])) <= 1e-12


def test_a_negative_variance_is_refused_by_the_step() -> None:
    case = made(lambda: Deep(network(), lambda o, t: F.gaussian_nll_loss(o, t, o), real))
    strategy = Strategy(pp_degree=2, accumulate_steps=3, costs="roofline")
    pipe = compile_local(case.model, case.loss_fn, example=case.batch(SAMPLES), strategy=strategy)
    with pytest.raises(RuntimeError, match=r"job F1\.0 .*gaussian_nll_loss: a variance is negative"):
        pipe.step(*case.batch(SAMPLES))
