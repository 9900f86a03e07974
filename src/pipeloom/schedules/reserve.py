"""A schedule for any memory limit that holds one micro-batch: jobs as they become ready, with a reserve.

Takes a placement, what each chunk's activations take, and each stage's limit; gives each stage's order. Events are
run in time: a free stage takes a backward that is ready, else a forward that is, else a W. A forward of a chunk
starts only if what is held, plus its own activations, plus those of every deeper chunk of the stage that holds
nothing, is within the limit: so the most advanced micro-batch always finds room on its way, and nothing gets
stuck. Follows the list schedules of zero-bubble pipelines (Qi et al. 2023); the reserve is ours.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from .generator import Order, own_chunks
from .jobs import Placement
from .schedule import BACKWARD, BACKWARD_B, BACKWARD_W, FORWARD
from .weights import UnitCosts

#: limits and activations are sums of fractions
_SLACK = 1e-9


def reserve(
    placement: Placement,
    micro_batches: int,
    limits: Sequence[float],
    acts: Sequence[float],
    costs: UnitCosts,
    *,
    split: bool = True,
    alternate: bool = False,
) -> list[Order]:
    """Each stage's jobs as codes. limits[stage], acts[chunk]: in one unit; acts are held from F until W (or X).
    alternate: after a backward a forward goes first. Raises RuntimeError if a limit can't hold one micro-batch."""
    return _Run(placement, micro_batches, limits, acts, costs, split, alternate).orders()


class _Run:
    def __init__(
        self,
        placement: Placement,
        micro_batches: int,
        limits: Sequence[float],
        acts: Sequence[float],
        costs: UnitCosts,
        split: bool,
        alternate: bool,
    ) -> None:
        self.placement, self.micro_batches, self.acts, self.costs = placement, micro_batches, acts, costs
        self.split, self.alternate = split, alternate
        total, stages = len(placement), max(placement) + 1
        self.limits = [limit + _SLACK for limit in limits]
        self.own = own_chunks(placement, stages)
        # by chunk: ends of the forwards and backwards that have run, and how many micro-batches are held
        self.forward: list[list[float]] = [[] for _ in range(total)]
        self.backward: list[list[float]] = [[] for _ in range(total)]
        self.held = [0] * total
        # by stage
        self.memory = [0.0] * stages
        self.weights: list[Order] = [[] for _ in range(stages)]  # W's that may run
        self.served = [0] * stages
        self.free = [0.0] * stages
        self.after_backward = [False] * stages
        self.out: list[Order] = [[] for _ in range(stages)]
        self.events = [(0.0, stage) for stage in range(stages)]

    def orders(self) -> list[Order]:
        heapq.heapify(self.events)
        while self.events:
            now, stage = heapq.heappop(self.events)
            if self.free[stage] <= now:
                self._step(now, stage)
        jobs = (3 if self.split else 2) * len(self.placement) * self.micro_batches
        left = jobs - sum(map(len, self.out))
        if left:
            raise RuntimeError(f"{left} jobs find no room: a limit can't hold one micro-batch")
        return self.out

    def _step(self, now: float, stage: int) -> None:
        """One job of a free stage, or an event for when one can start."""
        backward, forward = -1, -1
        later = float("inf")
        blocked = False
        for chunk in self.own[stage]:  # ascending, so that the deepest that is ready wins
            ready = self._backward_ready(chunk)
            if ready <= now:
                backward = chunk
            else:
                later = min(later, ready)
            ready = self._forward_ready(chunk)
            if ready == float("inf"):
                continue
            if not self._has_room(stage, chunk):
                blocked = blocked or ready <= now
            elif ready <= now:
                forward = chunk
            else:
                later = min(later, ready)
        if forward >= 0 and (backward < 0 or (self.alternate and self.after_backward[stage])):
            self._run_forward(now, stage, forward)
        elif backward >= 0:
            self._run_backward(now, stage, backward)
        elif self.served[stage] < len(self.weights[stage]) and (
            blocked or now + self.costs.backward_w / 2 <= later
        ):
            self._run_weight(now, stage)
        elif later < float("inf"):
            heapq.heappush(self.events, (later, stage))

    def _forward_ready(self, chunk: int) -> float:
        number = len(self.forward[chunk])
        if number == self.micro_batches:
            return float("inf")
        if chunk == 0:
            return 0.0
        return self._arrives(self.forward, chunk - 1, chunk, number)

    def _backward_ready(self, chunk: int) -> float:
        number = len(self.backward[chunk])
        if number >= len(self.forward[chunk]):
            return float("inf")
        if chunk == len(self.placement) - 1:
            return self.forward[chunk][number]
        return self._arrives(self.backward, chunk + 1, chunk, number)

    def _arrives(self, ends: list[list[float]], source: int, target: int, number: int) -> float:
        if number >= len(ends[source]):
            return float("inf")
        return ends[source][number] + self._hop(source, target)

    def _hop(self, source: int, target: int) -> float:
        return self.costs.comm if self.placement[source] != self.placement[target] else 0.0

    def _has_room(self, stage: int, chunk: int) -> bool:
        need = self.memory[stage] + self.acts[chunk]
        for deeper in self.own[stage]:
            if deeper > chunk and self.held[deeper] == 0 and len(self.forward[deeper]) < self.micro_batches:
                need += self.acts[deeper]
        return need <= self.limits[stage]

    def _run_forward(self, now: float, stage: int, chunk: int) -> None:
        self.memory[stage] += self.acts[chunk]
        self.held[chunk] += 1
        self.after_backward[stage] = False
        number = len(self.forward[chunk])
        self._append(stage, FORWARD, chunk, number)
        end = now + self.costs.forward
        self.forward[chunk].append(end)
        self._ends(stage, end, chunk, chunk + 1)

    def _run_backward(self, now: float, stage: int, chunk: int) -> None:
        self.after_backward[stage] = True
        number = len(self.backward[chunk])
        end = now + self.costs.backward_b
        if self.split:
            self._append(stage, BACKWARD_B, chunk, number)
            self.weights[stage].append(chunk * self.micro_batches + number)
        else:
            self._append(stage, BACKWARD, chunk, number)
            self._release(stage, chunk)
            end += self.costs.backward_w
        self.backward[chunk].append(end)
        self._ends(stage, end, chunk, chunk - 1)

    def _run_weight(self, now: float, stage: int) -> None:
        chunk, number = divmod(self.weights[stage][self.served[stage]], self.micro_batches)
        self.served[stage] += 1
        self._append(stage, BACKWARD_W, chunk, number)
        self._release(stage, chunk)
        self._ends(stage, now + self.costs.backward_w, chunk, chunk)

    def _release(self, stage: int, chunk: int) -> None:
        self.held[chunk] -= 1
        self.memory[stage] -= self.acts[chunk]

    def _append(self, stage: int, kind: int, chunk: int, number: int) -> None:
        self.out[stage].append((kind * len(self.placement) + chunk) * self.micro_batches + number)

    def _ends(self, stage: int, end: float, chunk: int, target: int) -> None:
        """The stage goes on at `end`, and so may the stage of the chunk that waits for this job."""
        self.free[stage] = end
        heapq.heappush(self.events, (end, stage))
        if 0 <= target < len(self.placement) and self.placement[target] != stage:
            heapq.heappush(self.events, (end + self._hop(chunk, target), self.placement[target]))
