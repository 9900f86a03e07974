"""The update job: norm, clip, optimizer, scheduler, zero; and the loss scaler that may skip it.

Each parameter's squared norm is computed by its owner in float64, all ranks get all of them, and each sums
them in model order: the norm, the clipping and the decision to skip are bit-equal on all ranks and for every
number of stages. A finite norm is a finite gradient, so the norm is also the check. Nothing waits for other
ranks unless clipping or a loss scaler needs the norm.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from . import tags
from .parameters import ParameterStore
from .result import StepResult
from .stepping import Work, arrive, start_exchange
from .transport import Transport

#: elements of a large gradient, and of a row of it
_LARGE, _ROW = 1 << 16, 1024


class Scheduler(Protocol):
    """A learning-rate scheduler of torch, or anything stepped like one."""

    def step(self) -> None: ...


class LossScaler:
    """A factor on the loss that keeps small gradients representable in float16 (torch.amp.GradScaler's rule).

    Halves (`backoff`) at a step whose gradients aren't finite, which is skipped; grows by `growth` after
    `interval` good steps in a row. dynamic False: a fixed factor, which still skips.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        dynamic: bool = True,
    ):
        if not scale > 0 or not growth > 1 or not 0 < backoff < 1 or interval < 1:
            raise ValueError(
                f"a loss scaler needs scale > 0, growth > 1, 0 < backoff < 1 and interval ≥ 1, not "
                f"scale={scale}, growth={growth}, backoff={backoff}, interval={interval}"
            )
        self.scale = scale
        self.growth = growth
        self.backoff = backoff
        self.interval = interval
        self.dynamic = dynamic
        self.good_steps = 0

    def update(self, finite: bool) -> None:
        """After a step: whether its gradients were finite, the same on all ranks."""
        if not self.dynamic:
            return
        if not finite:
            self.scale *= self.backoff
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.scale *= self.growth
            self.good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])


class Updater:
    """What a rank does at the end of a step with an update.

    optimizer: None on a rank with nothing to train. max_norm: clip the norm of all gradients to it, as
    torch.nn.utils.clip_grad_norm_ does. schedules_later: leaves the scheduler's step to `schedule`, which the next
    step begins with (the fleet's `lr` task); whoever asks for `optimizer` or `scheduler` finds it done.
    """

    def __init__(
        self,
        store: ParameterStore,
        transport: Transport,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Scheduler | None = None,
        scaler: LossScaler | None = None,
        max_norm: float | None = None,
        schedules_later: bool = False,
    ):
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}: a norm to clip to is a number above 0")
        self.store = store
        self.transport = transport
        #: its learning rate may be a step behind
        self.bare_optimizer = optimizer
        self._scheduler = scheduler
        self._schedules_later = schedules_later
        self._behind = False
        self.scaler = scaler
        self.max_norm = max_norm
        self._counts, self._order = _norm_order(store, transport.size)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        self.schedule()
        return self.bare_optimizer

    @property
    def scheduler(self) -> Scheduler | None:
        self.schedule()
        return self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Scheduler | None) -> None:
        self.schedule()
        self._scheduler = scheduler

    def schedule(self) -> None:
        """The scheduler's step for the last update, unless it is done."""
        if self._behind and self._scheduler is not None:
            self._scheduler.step()
        self._behind = False

    def run(self, result: StepResult) -> Work[None]:
        """A collective call of all ranks. Sets `result.skipped`, and lets it know the norm."""
        if result.skipped:
            return
        mine = self._squared_norms()
        shapes = [(count,) for count in self._counts]
        receives = start_exchange(self.transport, tags.NORMS, mine, shapes)
        parts = [
            mine if rank == self.transport.rank else receives.get(rank, mine.new_empty(0))
            for rank in range(self.transport.size)
        ]
        result.norm_from(parts, self._order.to(mine.device))
        if self.max_norm is not None or self.scaler is not None:
            for receive in receives.values():
                yield from arrive(receive)
            norm = result.grad_norm
            assert norm is not None
            if self.scaler is not None:
                finite = bool(torch.isfinite(norm))
                self.scaler.update(finite)
                if not finite:
                    result.skipped = True
                    self.store.clear()
                    return
            if self.max_norm is not None:
                self.store.scale_gradients(torch.clamp(self.max_norm / (norm + 1e-6), max=1.0))
        if self.bare_optimizer is not None:
            self.bare_optimizer.step()
        self._behind = True
        if not self._schedules_later:
            self.schedule()
        self.store.clear()

    def _squared_norms(self) -> Tensor:
        owned = self.store.owned()
        if not owned:
            return torch.empty(0, dtype=torch.float64, device=self.store.device)
        return torch.stack([gradient_norm(g.view) for g in owned]).square_()


def gradient_norm(gradient: Tensor) -> Tensor:
    """The 2-norm of a contiguous tensor: 0-dim, float64. A large float32 one is summed up row by row in its own
    precision, and the rows in float64: three times as fast as float64 throughout, and right to 1e-6."""
    if gradient.dtype == torch.float32 and gradient.numel() >= _LARGE:
        flat, whole = gradient.view(-1), gradient.numel() // _ROW * _ROW
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
        gradient = torch.cat((rows, flat[whole:]))
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm


def _norm_order(store: ParameterStore, stages: int) -> tuple[list[int], Tensor]:
    """How many parameters each rank owns, and where each parameter, in model order, lies in the ranks' norms
    joined.
    """
    owned: list[list[int]] = [[] for _ in range(stages)]
    for position, name in enumerate(store.order):
        if name in store.trained:
            owned[store.owner[name]].append(position)
    joined = [position for positions in owned for position in positions]
    order = sorted(range(len(joined)), key=joined.__getitem__)
    return [len(positions) for positions in owned], torch.tensor(order, dtype=torch.int64)
