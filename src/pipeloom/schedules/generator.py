"""One generator for all named schedules.

A schedule is a policy. Each stage has two queues that can be written down at once, the order of its forwards
and the order of its backwards. They are merged by a counter: the next forward if one is left and fewer than
`limit` are in flight (forward done, backward not), else the next backward. No clock is needed, so an order
never depends on costs. What then remains is where the backwards for the weights go:

    fuse     B and W are one job, X
    lag n    the W of the backward n places ago follows a B; the last n W's end the list
    hold n   a B's own W follows it, but the first n B's: theirs end the list (Paddle's ZBH1)
    end      all W's end the list
    fill     wherever the stage would wait, or memory needs it (see weights.py)

Schedules that no counter explains give their orders themselves: modulo schedules (modulo.py) and DualPipeV.

The same idea, a counter merge over fixed queues, explains GPipe (Huang et al. 2019), 1F1B (Narayanan et al.
2019), interleaved 1F1B (Narayanan et al. 2021), breadth-first (Lamy-Poirier 2023) and zero-bubble schedules
(Qi et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .jobs import Placement
from .schedule import BACKWARD, BACKWARD_B, BACKWARD_W, Coding, Schedule
from .weights import UnitCosts, fill


@dataclass(frozen=True)
class Fuse:
    """B and W are one job, X."""


@dataclass(frozen=True)
class Lag:
    """The W of the backward `counts[stage]` places ago follows each B."""

    counts: Sequence[int]


@dataclass(frozen=True)
class Hold:
    """The first `counts[stage]` W's wait for the end; every other W follows its B."""

    counts: Sequence[int]


@dataclass(frozen=True)
class AtEnd:
    """Every W waits for the end."""


@dataclass(frozen=True)
class Fill:
    """W's go where the stage would wait. `slots[stage]`: most chunk forwards whose W has not run.
    `fit`: share of a W by which it may delay the next job."""

    slots: Sequence[int]
    fit: float = 0.5
    costs: UnitCosts = field(default_factory=UnitCosts)


WeightRule = Fuse | Lag | Hold | AtEnd | Fill

#: the jobs of one direction in order, as chunk · micro_batches + micro_batch
Queue = list[int]


#: a stage's jobs in order, as codes (see schedule.Coding)
Order = list[int]


@dataclass(frozen=True)
class Policy:
    """placement: chunk → stage. orders[stage]: F's and B's as codes for `made_for` micro-batches. weights: where
    the W's go; None where the orders hold them already. made_for: 0, or a number of micro-batches above the
    schedule's own; those beyond are dropped from the orders, which keeps them safe and never needs more
    memory."""

    placement: Placement
    orders: Sequence[Order]
    weights: WeightRule | None
    made_for: int = 0


def own_chunks(placement: Placement, stages: int) -> list[list[int]]:
    """The chunks of each stage, in ascending order."""
    own: list[list[int]] = [[] for _ in range(stages)]
    for chunk, stage in enumerate(placement):
        own[stage].append(chunk)
    return own


def grouped(chunks: Sequence[int], groups: Sequence[int]) -> tuple[Queue, Queue]:
    """The queues of a stage that takes its micro-batches in groups: a group goes through each of the stage's
    chunks before the next group begins, backwards through the chunks in reverse."""
    micro_batches = sum(groups)
    forward: Queue = []
    backward: Queue = []
    first = 0
    for size in groups:
        for chunk in chunks:
            begin = chunk * micro_batches + first
            forward.extend(range(begin, begin + size))
        for chunk in reversed(chunks):
            begin = chunk * micro_batches + first
            backward.extend(range(begin, begin + size))
        first += size
    return forward, backward


def merge(forward: Queue, backward: Queue, limit: int, shift: int) -> Order:
    """The counter merge: `limit` forwards, then a backward and a forward in turn, then the backwards that are
    left. Backwards come out as their queue's code + `shift`."""
    warm = min(limit, len(forward))
    pairs = len(forward) - warm
    late = [code + shift for code in backward]
    middle = [0] * (2 * pairs)
    middle[0::2] = late[:pairs]
    middle[1::2] = forward[warm:]
    return forward[:warm] + middle + late[pairs:]


def merged(
    placement: Placement, queues: Sequence[tuple[Queue, Queue]], limits: Sequence[int], micro_batches: int
) -> list[Order]:
    """The counter merge on every stage."""
    shift = BACKWARD_B * len(placement) * micro_batches
    return [
        merge(forward, backward, limit, shift)
        for (forward, backward), limit in zip(queues, limits, strict=True)
    ]


def generate(name: str, policy: Policy, micro_batches: int) -> Schedule:
    """The schedule that a policy describes."""
    total = len(policy.placement)
    orders = list(policy.orders)
    if policy.made_for > micro_batches:
        orders = [_drop(order, policy.made_for, micro_batches) for order in orders]
    return Schedule(
        name, policy.placement, micro_batches, _with_weights(policy, orders, total, micro_batches)
    )


def ascending(schedule: Schedule) -> Schedule:
    """The same schedule with each chunk's W's in ascending order of micro-batches: positions stay, only which
    micro-batch a W serves changes. Safe because backwards ascend: when k W's may run, so may the first k."""
    total, micro_batches = schedule.total_chunks, schedule.micro_batches
    low, high = BACKWARD_W * total * micro_batches, BACKWARD * total * micro_batches
    orders = []
    for codes in schedule.codes:
        count = [0] * total
        order = codes.tolist()
        for index, code in enumerate(order):
            if low <= code < high:
                chunk = (code - low) // micro_batches
                order[index] = low + chunk * micro_batches + count[chunk]
                count[chunk] += 1
        orders.append(order)
    return Schedule(schedule.name, schedule.placement, micro_batches, orders)


def _drop(order: list[int], made_for: int, micro_batches: int) -> list[int]:
    """Leaves out the micro-batches from `micro_batches` on, and codes the others anew."""
    return [
        code // made_for * micro_batches + code % made_for
        for code in order
        if code % made_for < micro_batches
    ]


def _with_weights(policy: Policy, orders: list[list[int]], total: int, micro_batches: int) -> list[list[int]]:
    rule = policy.weights
    if rule is None:
        return orders
    if isinstance(rule, Fill):
        return fill(orders, policy.placement, Coding(total, micro_batches), rule.slots, rule.fit, rule.costs)
    out = []
    for stage, order in enumerate(orders):
        backwards = len(order) // 2
        if isinstance(rule, Fuse):
            counts = (0, 0)
        elif isinstance(rule, AtEnd):
            counts = (backwards, 0)
        elif isinstance(rule, Lag):
            counts = (rule.counts[stage], rule.counts[stage])
        else:
            counts = (rule.counts[stage], 0)
        out.append(_trail(order, total * micro_batches, isinstance(rule, Fuse), *counts))
    return out


def _trail(order: list[int], size: int, fused: bool, skip: int, lag: int) -> list[int]:
    """Adds the W's: the first `skip` backwards are not followed by a W; each later one is followed by that of
    the backward `lag` places before it; those that are left end the list, in order."""
    backward = [code for code in order if code >= size]
    if fused:
        return [code + (BACKWARD - BACKWARD_B) * size if code >= size else code for code in order]
    shift = (BACKWARD_W - BACKWARD_B) * size
    out: list[int] = []
    done = 0
    for code in order:
        out.append(code)
        if code >= size:
            if done >= skip:
                out.append(backward[done - lag] + shift)
            done += 1
    left = backward[max(0, done - lag) :] if lag else backward[:skip]
    return out + [code + shift for code in left]
