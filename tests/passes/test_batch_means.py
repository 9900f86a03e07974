"""Means over what counts: the whole batch's loss and gradients, however the counting words are spread over
micro-batches; judged by eager PyTorch on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parity import Deep, eager_outcome, made, pipe_outcome, pipeline
from pipeloom.program.capture import capture
from pipeloom.strategy import Strategy

WIDTH, WORDS, TIME, IGNORED = 8, 20, 5, -100
SAMPLES, SIZES = 6, [2, 2, 2]
PLANS = (("1F1B", 1, 1), ("1F1B", 2, 1), ("ZBV", 2, 2))


class Tagger(nn.Module):
    """Word scores, class scores and a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.word, self.label = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.words(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.word(x).transpose(1, 2), self.label(x.mean(1)), x.pow(2).mean()


class Weighted(nn.Module):
    """The loss is a part of the model, and its class weights a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tagger = Tagger()
        self.loss = nn.CrossEntropyLoss(weight=torch.rand(WORDS) + 0.1)

    def forward(self, tokens: Tensor, words: Tensor) -> Tensor:
        return self.loss(self.tagger(tokens)[0], words)


def batch(samples: int) -> Any:
    words = torch.randint(0, WORDS, (samples, TIME))
    for i in range(samples):
        words[i, :i] = IGNORED
    words[2:4] = IGNORED  # nothing counts in the second micro-batch
    counted = (words != IGNORED).sum()
    target = {"words": words, "label": torch.randint(0, 3, (samples,)), "counted": counted}
    return torch.randint(0, WORDS, (samples, TIME)), target


def word_loss(o: Any, t: Any, **options: Any) -> Tensor:
    return F.cross_entropy(o[0], t["words"], **options)


def kept(t: Any) -> Tensor:
    return (t["words"] != IGNORED).to(torch.float64)


def each(o: Any, t: Any) -> Tensor:
    return F.cross_entropy(o[0], t["words"].clamp(min=0), reduction="none")


LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    "ignored": word_loss,
    "smoothed": lambda o, t: word_loss(o, t, label_smoothing=0.1),
    "likelihood": lambda o, t: 2 * F.nll_loss(o[0].log_softmax(1), t["words"]),
    "class weights": lambda o, t: word_loss(o, t, weight=torch.linspace(0.1, 2, WORDS, dtype=torch.float64)),
    "masked": lambda o, t: (each(o, t) * kept(t)).sum() / kept(t).sum(),
    "masked by whole numbers": lambda o, t: (each(o, t) * kept(t)).sum() / kept(t).long().sum() + o[2],
    "masked, at least one": lambda o, t: (each(o, t) * kept(t)).sum() / kept(t).sum().clamp(min=1),
    "with a part of its own": lambda o, t: word_loss(o, t) + 0.1 * o[2],
    "three": lambda o, t: (
        word_loss(o, t)
        + 0.5 * F.cross_entropy(o[1], t["label"], weight=torch.tensor([1, 2, 0.5], dtype=torch.float64))
        + 0.1 * o[2]
    ),
    "number given": lambda o, t: word_loss(o, t, reduction="sum") / t["counted"],
}


def plan(schedule: str, stages: int, chunks: int, **fields: Any) -> Strategy:
    return Strategy(
        schedule_mode=schedule,
        pp_degree=stages,
        vpp_degree=chunks,
        costs="roofline",
        accumulate_steps=3,
        **fields,
    )


@pytest.mark.parametrize("name", LOSSES)
def test_a_mean_is_the_whole_batchs(name: str) -> None:
    case = made(lambda: Deep(Tagger(), LOSSES[name], batch)).double()
    data = case.batch(SAMPLES)
    reference = eager_outcome(case, data, [SAMPLES])
    for each_plan in PLANS:
        pipe = pipeline(case, plan(*each_plan), data)
        outcome = pipe_outcome(pipe, data)
        outcome.gradients = {n: g for n, g in outcome.gradients.items() if n in reference.gradients}
        assert outcome.error(reference) <= 1e-10, each_plan
        assert float(pipe.eval(*data).loss) == pytest.approx(float(reference.loss), rel=1e-10)


def test_class_weights_in_a_buffer_and_targets_inside_the_model() -> None:
    def tokens(samples: int) -> Any:
        x, t = batch(samples)
        return (x, t["words"]), None

    case = made(lambda: Deep(Weighted(), None, tokens)).double()
    data = case.batch(SAMPLES)
    reference = eager_outcome(case, data, [SAMPLES])
    for each_plan in PLANS:
        pipe = pipeline(case, plan(*each_plan), data)
        outcome = pipe_outcome(pipe, data)
        outcome.gradients = {n: g for n, g in outcome.gradients.items() if n in reference.gradients}
        assert outcome.error(reference) <= 1e-10, each_plan
        assert float(pipe.eval(*data).loss) == pytest.approx(float(reference.loss), rel=1e-10)


def test_the_weights_of_micro_batches_are_their_words() -> None:
    case = made(lambda: Deep(Tagger(), word_loss, batch)).double()
    data = case.batch(SAMPLES)
    pipe = pipeline(case, plan("1F1B", 2, 1), data)
    result = pipe.step(*data, update=False)
    assert result.weights.tolist() == [9.0, 0.0, 1.0]
    nothing = {**data[1], "words": torch.full_like(data[1]["words"], IGNORED)}
    assert pipe.step(data[0], nothing, update=True).skipped


def test_summed_gradients_keep_each_micro_batchs_own_mean() -> None:
    case = made(lambda: Deep(Tagger(), LOSSES["with a part of its own"], batch)).double()
    inputs, targets = case.batch(SAMPLES)
    targets["words"] = targets["words"].clamp(min=0)
    targets["words"][0, 1:] = IGNORED
    data = (inputs, targets)
    reference = eager_outcome(case, data, SIZES, average=False)
    outcome = pipe_outcome(pipeline(case, plan("ZBV", 2, 2, gradient_merge="sum"), data), data)
    outcome.gradients = {n: g for n, g in outcome.gradients.items() if n in reference.gradients}
    assert outcome.error(reference) <= 1e-10


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: word_loss(o, t).exp(),  # no mean of the whole batch can be made of its parts
        lambda o, t: word_loss(o, t) * word_loss(o, t),
        lambda o, t: (o[2] * t["label"].to(torch.float64)).sum() / 7,  # a constant
    ],
)
def test_other_losses_are_left_alone(loss: Any) -> None:
    case = made(lambda: Deep(Tagger(), loss, batch)).double()
    data = case.batch(SAMPLES)
    pipe = pipeline(case, plan("1F1B", 1, 1), data)
    leaves = (data[0][:2], {k: v[:2] if v.dim() else v for k, v in data[1].items()})
    program = capture(case.model, loss, example=leaves)
    assert program.means is None
    assert pipe.step(*data, update=False).weights.tolist() == [2, 2, 2]
