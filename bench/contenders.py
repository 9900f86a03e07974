"""Who is timed: our pipeline, torch.distributed.pipelining's, and what both cores could give without a pipeline.

A contender is made on both ranks in the same order. `step` is a whole training step: forward, backward,
optimizer, gradients back to zero. `backward` leaves the gradients of the whole batch where `gradients` finds
them, and changes no weight.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining as torch_pipelining

import pipeloom
from pipeloom import api
from pipeloom.runtime.executor import Step
from setting import RANKS, Part, Setting, loss_fn

#: our schedule -> torch's class, chunks a stage
TORCH: dict[str, tuple[str, int]] = {
    "FThenB": ("ScheduleGPipe", 1),
    "1F1B": ("Schedule1F1B", 1),
    "VPP": ("ScheduleInterleaved1F1B", 2),
    "ZBV": ("ScheduleZBVZeroBubble", 2),
}


class Contender(Protocol):
    def step(self) -> None: ...

    def loss(self) -> float | None:
        """Of the last step, the mean over the batch; None on a rank that doesn't know it."""
        ...

    def backward(self) -> None: ...

    def gradients(self) -> dict[str, Tensor]:
        """This rank's, by the parameters' names in the GPT."""
        ...

    def zero(self) -> None: ...


class Ours:
    """pipeloom. cuts "equal": as many layers in each chunk, as torch's stages; "automatic": balanced by cost."""

    def __init__(self, setting: Setting, schedule: str, cuts: str, *, recorded: bool = True) -> None:
        chunks = TORCH[schedule][1]
        names = [f"layers.{part.start}" for part in setting.equal_parts(RANKS * chunks)[1:]]
        self.batch = setting.batch()
        self.recorded = recorded
        self.pipe: api.Pipeline = pipeloom.compile(
            setting.model(),
            loss_fn,
            example=self.batch,
            strategy=pipeloom.Strategy(
                pp_degree=RANKS,
                vpp_degree=chunks,
                schedule_mode=schedule,
                accumulate_steps=setting.micro_batches,
                cuts=names if cuts == "equal" else None,
            ),
            optimizer=setting.make_optimizer,
        )
        self._result: Any = None

    def step(self) -> None:
        if self.recorded:
            self._result = self.pipe.step(*self.batch)
            return
        with _NothingRecorded():
            self._result = self.pipe.step(*self.batch)

    def loss(self) -> float | None:
        return float(self._result.loss)

    def backward(self) -> None:
        self._result = self.pipe.step(*self.batch, update=False)

    def gradients(self) -> dict[str, Tensor]:
        return self.pipe.gradients()

    def zero(self) -> None:
        self.pipe.zero_grad()


class _NothingRecorded:
    """The executor without its two clock readings an item and the exchange of figures: only to time what those
    cost. (Names are set through `setattr`: no type checker should take this for something that is meant.)"""

    def __enter__(self) -> None:
        self._kept = (Step.timed, vars(api)["exchange_figures"])
        setattr(Step, "timed", lambda step, _, item: step.do(item))  # noqa: B010
        setattr(api, "exchange_figures", lambda *_: None)  # noqa: B010

    def __exit__(self, *_: object) -> None:
        for owner, name, kept in zip((Step, api), ("timed", "exchange_figures"), self._kept, strict=True):
            setattr(owner, name, kept)


class Torch:
    """torch.distributed.pipelining's schedule of the same kind, with equally many layers in each of its stages."""

    def __init__(self, setting: Setting, schedule: str) -> None:
        name, chunks = TORCH[schedule]
        rank, count = dist.get_rank(), RANKS * chunks
        numbers = [rank]
        if chunks == 2:
            numbers.append(count - 1 - rank if schedule == "ZBV" else rank + RANKS)
        parts, model = setting.equal_parts(count), setting.model()
        self.parts = [Part(model, parts[i], first=i == 0, last=i == count - 1) for i in numbers]
        stages = [
            torch_pipelining.PipelineStage(part, i, count, torch.device("cpu"))
            for part, i in zip(self.parts, numbers, strict=True)
        ]
        made = getattr(torch_pipelining, name)
        self.schedule = made(stages[0] if chunks == 1 else stages, setting.micro_batches, loss_fn=loss_fn)
        self.optimizer = setting.make_optimizer(p for part in self.parts for p in part.parameters())
        tokens, following = setting.batch()
        self._inputs = (tokens,) if 0 in numbers else ()
        self._target = following if count - 1 in numbers else None
        self._losses: list[Tensor] | None = None

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self) -> float | None:
        return float(torch.stack(self._losses).detach().mean()) if self._losses else None

    def backward(self) -> None:
        self._losses = None if self._target is None else []
        self.schedule.step(*self._inputs, target=self._target, losses=self._losses, return_outputs=False)

    def gradients(self) -> dict[str, Tensor]:
        return gradients_of(*self.parts)

    def zero(self) -> None:
        self.optimizer.zero_grad()


class Alone:
    """The whole model on each rank, each with its half of the micro-batches, and no word between them: what the two
    cores really give when both are busy. Its gradients are no contender's (`whole_batch` makes the reference)."""

    def __init__(self, setting: Setting) -> None:
        self.model = setting.model()
        self.optimizer = setting.make_optimizer(self.model.parameters())
        half = setting.micro_batches // RANKS
        self._mine = range(dist.get_rank() * half, (dist.get_rank() + 1) * half)
        self._micro_batches = list(zip(*(t.split(setting.micro_batch) for t in setting.batch()), strict=True))
        self._loss = 0.0

    def step(self) -> None:
        self._run(self._mine)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self) -> float | None:
        """Of this rank's half of the batch, or of the whole after `backward`."""
        return self._loss

    def backward(self) -> None:
        self._run(range(len(self._micro_batches)))

    def gradients(self) -> dict[str, Tensor]:
        return gradients_of(self.model)

    def zero(self) -> None:
        self.optimizer.zero_grad()

    def _run(self, numbers: range) -> None:
        losses = []
        for number in numbers:
            tokens, following = self._micro_batches[number]
            loss = loss_fn(self.model(tokens), following)
            (loss / len(numbers)).backward()
            losses.append(loss.detach())
        self._loss = float(torch.stack(losses).mean())


def gradients_of(*modules: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for m in modules for n, p in m.named_parameters() if p.grad is not None}


def build(setting: Setting, name: str) -> Contender:
    """A contender by its name in the table (see `names`). A collective call of both ranks."""
    kind, _, rest = name.partition(" ")
    if kind == "alone":
        return Alone(setting)
    if kind == "torch":
        return Torch(setting, rest)
    schedule, cuts = rest.split(" ", 1)
    return Ours(setting, schedule, cuts.split()[0], recorded="unrecorded" not in cuts)


def names(pairs: tuple[str, ...]) -> list[str]:
    """All contenders of a run: of each pair torch's, and ours with equal and with automatic cuts; the first
    pair's with equal cuts also without its clocks."""
    listed = ["alone"]
    for schedule in pairs:
        listed += [f"torch {schedule}", f"ours {schedule} equal", f"ours {schedule} automatic"]
    return [*listed, f"ours {pairs[0]} equal unrecorded"]
