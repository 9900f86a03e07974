"""Places the backwards for the weights (W) in an order of forwards and backwards (F, B).

Takes one F/B order a stage and gives the same orders with each B's W put in, first in first out: where the
next job is late enough, where memory blocks the next forward, or when the stage has nothing else left. That is
decided in planned time, so a policy's costs matter here, and here alone. When a job's inputs come doesn't depend on
the W's before it on its own stage, so one pass with a worklist does, linear in jobs. Follows the W heuristics of
zero-bubble pipelines (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    most this share of itself. Raises RuntimeError if the orders can't run.

    A stage sees that an input is on its way once the job that makes it has started; before, it doesn't wait for it.
    """
    total, micro_batches = coding.total, coding.micro_batches
    size = total * micro_batches
    shift = BACKWARD_W * size
    hop_forward = [0.0] + [costs.comm * (placement[c] != placement[c - 1]) for c in range(1, total)]
    hop_backward = [costs.comm * (placement[c] != placement[c + 1]) for c in range(total - 1)] + [0.0]
    last_backward = 2 * size - micro_batches  # from here on a B needs its own F alone
    weight = costs.backward_w
    patience = weight * (1 - fit)

    begin = [-1.0] * (2 * size)  # of each F and B, −1: not known yet
    end = [-1.0] * (2 * size)
    waiters: dict[int, int] = {}  # job that is not known yet -> the stage that needs it
    walks = [_Walk(stage, order, slots[stage]) for stage, order in enumerate(orders)]
    runnable = list(reversed(walks))
    while runnable:
        walk = runnable.pop()
        stage, order, room, out, weights = walk.stage, walk.order, walk.slots, walk.out, walk.weights
        at, now, held, served = walk.at, walk.now, walk.held, walk.served
        while at < len(order):
            code = order[at]
            forward = code < size
            if forward and held >= room:
                if served == len(weights):
                    break  # no W will ever make room
                out.append(weights[served] + shift)
                served += 1
                held -= 1
                now += weight
                continue
            # its input from another chunk: which job, how long it travels
            if forward:
                ready = 0.0
                source = code - micro_batches
                hop = hop_forward[code // micro_batches]
            else:
                ready = end[code - size]
                source = code + micro_batches if code < last_backward else -1
                hop = hop_backward[(code - size) // micro_batches]
                if ready < 0:
                    break  # an order with a B before its F
            if source >= 0:
                made = end[source]
                if made < 0:
                    waiters[source] = stage
                    break
                if made + hop > ready:
                    ready = made + hop
            if ready > now:
                if served < len(weights):
                    started = begin[source] if source >= 0 else 0.0
                    seen = started < now or (
                        started == now and placement[source % size // micro_batches] < stage
                    )
                    if not seen or now + patience <= ready:
                        out.append(weights[served] + shift)
                        served += 1
                        held -= 1
                        now += weight
                        continue
                now = ready
            out.append(code)
            begin[code] = now
            if forward:
                now += costs.forward
                held += 1
            else:
                now += costs.backward_b
                weights.append(code - size)
            end[code] = now
            at += 1
            waiter = waiters.pop(code, -1)
            if waiter >= 0:
                runnable.append(walks[waiter])
        walk.at, walk.now, walk.held, walk.served = at, now, held, served
    left = sum(len(walk.order) - walk.at for walk in walks)
    if left:
        raise RuntimeError(f"the order of forwards and backwards can't run: {left} jobs never become ready")
    return [walk.out + [code + shift for code in walk.weights[walk.served :]] for walk in walks]


@dataclass
class _Walk:
    """How far a stage's order has been walked. weights: the B's that have run, as codes without their kind; the first
    `served` of them have had their W. held: chunk forwards whose W has not run."""

    stage: int
    order: Sequence[int]
    slots: int
    at: int = 0
    now: float = 0.0
    held: int = 0
    served: int = 0
    weights: list[int] = field(default_factory=list)
    out: list[int] = field(default_factory=list)
