"""Places the backwards for the weights (W) in an order of forwards and backwards (F, B).

Takes one F/B order a stage and gives the same orders with each B's W put in, first in first out: where the
next job is late enough, where memory blocks the next forward, or when the stage has nothing else left. The
events are run in time, so a policy's costs matter here, and here alone. Follows the W heuristics of
zero-bubble pipelines (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from .jobs import Placement
from .schedule import BACKWARD_W, Coding


@dataclass(frozen=True)
class UnitCosts:
    """Durations of a chunk's F, B and W, and of a transfer between stages, in any unit."""

    forward: float = 1.0
    backward_b: float = 1.0
    backward_w: float = 1.0
    comm: float = 0.0


def fill(
    orders: Sequence[Sequence[int]],
    placement: Placement,
    coding: Coding,
    slots: Sequence[int],
    fit: float,
    costs: UnitCosts,
) -> list[list[int]]:
    """The orders with every W placed. slots[stage]: most chunk forwards whose W has not run; it must be no
    less than the orders' own number of forwards in flight. fit: a W is placed if it delays the next job by at
    most this share of itself. Raises RuntimeError if the orders can't run."""
    total, micro_batches = coding.total, coding.micro_batches
    size = total * micro_batches
    stages = len(orders)
    shift = BACKWARD_W * size
    hop_forward = [0.0] + [costs.comm * (placement[c] != placement[c - 1]) for c in range(1, total)]
    hop_backward = [costs.comm * (placement[c] != placement[c + 1]) for c in range(total - 1)] + [0.0]

    end = [-1.0] * (2 * size)  # end of each F and B, −1: not started
    place = [0] * stages  # next job of each stage's order
    free = [0.0] * stages
    held = [0] * stages
    waiting: list[list[int]] = [[] for _ in range(stages)]  # codes (without kind) of B's whose W has not run
    served = [0] * stages
    out: list[list[int]] = [[] for _ in range(stages)]
    left = sum(map(len, orders))
    events = [(0.0, stage) for stage in range(stages)]

    while events:
        now, stage = heapq.heappop(events)
        if free[stage] > now:
            continue
        order, at = orders[stage], place[stage]
        ready = -1.0  # when the next job can start, −1: not known yet
        blocked = False
        code = order[at] if at < len(order) else -1
        if code >= 0:
            ready = _ready(code, size, micro_batches, end, hop_forward, hop_backward)
            blocked = code < size and held[stage] >= slots[stage]
            if 0 <= ready <= now and not blocked:
                place[stage] += 1
                left -= 1
                out[stage].append(code)
                forward = code < size
                chunk = code % size // micro_batches
                finish = now + (costs.forward if forward else costs.backward_b)
                end[code] = free[stage] = finish
                heapq.heappush(events, (finish, stage))
                if forward:
                    held[stage] += 1
                    nearby = chunk + 1
                else:
                    waiting[stage].append(code - size)
                    nearby = chunk - 1
                if 0 <= nearby < total and placement[nearby] != stage:
                    heapq.heappush(events, (finish + costs.comm, placement[nearby]))
                continue
        if served[stage] < len(waiting[stage]):
            late = now + costs.backward_w * (1 - fit)
            if blocked or code < 0 or ready < 0 or late <= ready:
                out[stage].append(waiting[stage][served[stage]] + shift)
                served[stage] += 1
                held[stage] -= 1
                free[stage] = now + costs.backward_w
                heapq.heappush(events, (free[stage], stage))
                continue
        if ready > now:
            heapq.heappush(events, (ready, stage))
    if left:
        raise RuntimeError(f"the order of forwards and backwards can't run: {left} jobs never become ready")
    return out


def _ready(
    code: int,
    size: int,
    micro_batches: int,
    end: list[float],
    hop_forward: list[float],
    hop_backward: list[float],
) -> float:
    """When the inputs of an F or B are there, −1 if that is not known yet."""
    if code < size:
        if code < micro_batches:
            return 0.0
        before = end[code - micro_batches]
        return before + hop_forward[code // micro_batches] if before >= 0 else -1.0
    own = end[code - size]
    if own < 0 or code >= 2 * size - micro_batches:
        return own
    behind = end[code + micro_batches]
    if behind < 0:
        return -1.0
    return max(own, behind + hop_backward[(code - size) // micro_batches])
