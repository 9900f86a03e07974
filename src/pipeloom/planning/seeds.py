"""Orders that a search starts from: every named schedule that fits, as it stands or made for the limit, the same
with their W's placed anew, loops with other warm-ups, and the greedy scheduler's.

All of them come cheap, and one of them is close to the best nearly everywhere; which one depends on costs and
memory. Each is checked: an order that can't run or exceeds a limit is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..schedules import build
from ..schedules.catalogue import CATALOGUE
from ..schedules.generator import Fill, Policy, generate, grouped, merged, own_chunks
from ..schedules.schedule import BACKWARD, BACKWARD_B, BACKWARD_W, Schedule, linear, loop
from ..schedules.weights import UnitCosts, fill
from .anneal import StuckOrder, makespan
from .case import Case, Order, unit
from .greedy import greedy, one_at_a_time, policies

#: the shares of a W by which it may delay the next job
_FITS = (0.5, 0.0, 1.0)
#: making an order in Python takes about as long as timing this many times its jobs
_MAKING = 100
#: making a named schedule for a limit tries some dozens
_LIMITING = 5_000


@dataclass(frozen=True)
class Seed:
    """An order and its makespan. named: it is a schedule of the catalogue as it stands."""

    order: Order
    makespan: float
    named: bool


@dataclass
class Seeds:
    """A case's seeds, best first, and what they cost in jobs timed."""

    found: list[Seed]
    visits: int


def seeds(case: Case, *, visits: int) -> Seeds:
    """The seeds that fit the case's limits, each makespan once. Named schedules and greedy orders are always
    tried; the others as long as their cost stays below `visits` jobs timed. Empty where nothing fits."""
    out: dict[int, Seed] = {}
    tiny = 1e-9 * unit(case)
    spent = 0

    def consider(order: Order, named: bool) -> None:
        try:
            end = makespan(case, order)
        except StuckOrder:
            return
        out.setdefault(round(end / max(tiny, 1e-300)), Seed(order, end, named))

    named = list(_named(case))
    for schedule in named:
        consider(case.encode(schedule), True)
        spent += _MAKING * case.jobs
    consider(one_at_a_time(case), False)
    for policy in policies(case.chunks):
        if order := greedy(case, policy):
            consider(order, False)
        spent += 2 * case.jobs
    if spent < visits:
        for schedule in _named(case, limited=True):
            consider(case.encode(schedule), True)
            named.append(schedule)
            spent += _LIMITING * case.jobs
    for make in [*_refilled(case, named), *_warmed(case)]:
        if spent >= visits:
            break
        spent += _MAKING * case.jobs
        if schedule_or_none := make():
            consider(case.encode(schedule_or_none), False)
    return Seeds(sorted(out.values(), key=lambda seed: seed.makespan), spent)


def _named(case: Case, *, limited: bool = False) -> Iterator[Schedule]:
    """Every schedule of the catalogue with the case's placement, with whole and with split backwards. limited:
    made for the tightest of the stages' limits."""
    options: dict[str, Any] = {}
    if limited:
        held = zip(case.costs.held_forward, case.costs.held_weight, strict=True)
        options = {"memory_limit": float(case.arrays.limit.min()), "acts": [f + w for f, w in held]}
        if math.isinf(options["memory_limit"]):
            return
    for name, entry in CATALOGUE.items():
        if entry.chunks is not None and entry.chunks != case.chunks:
            continue
        for split in (True,) if entry.splits else (False, True):
            try:
                schedule = build(
                    name,
                    stages=case.stages,
                    chunks=case.chunks,
                    micro_batches=case.micro_batches,
                    split_backward=split,
                    ascending=True,
                    unit_costs=_unit_costs(case),
                    **options,
                )
            except ValueError:
                continue  # it doesn't take these numbers, or the limit holds no micro-batch
            if schedule.placement == case.placement:
                if split and not entry.splits:
                    schedule.name += " split"
                if limited:
                    schedule.name += " within the limit"
                yield schedule


def _refilled(case: Case, named: list[Schedule]) -> Iterator[Callable[[], Schedule | None]]:
    """The orders of forwards and backwards of named schedules, with W's where a stage waits or its memory
    needs them."""
    size = len(case.placement) * case.micro_batches
    seen = set()
    for schedule in named:
        orders = []
        for codes in schedule.codes:
            kept = codes[(codes < BACKWARD_W * size) | (codes >= BACKWARD * size)]
            orders.append(np.where(kept >= BACKWARD * size, kept - (BACKWARD - BACKWARD_B) * size, kept))
        key = b"".join(order.tobytes() for order in orders)
        if key in seen:
            continue
        seen.add(key)
        for fit in _FITS:
            yield lambda orders=orders, schedule=schedule, fit=fit: _fill(case, schedule, orders, fit)  # type: ignore[misc]


def _fill(case: Case, schedule: Schedule, orders: list[np.ndarray], fit: float) -> Schedule | None:
    try:
        filled = fill(
            [order.tolist() for order in orders],
            case.placement,
            schedule.coding,
            _slots(case),
            fit,
            UnitCosts(*_unit_costs(case)),
        )
    except RuntimeError:
        return None  # the limit is below what its forwards hold
    return Schedule(f"{schedule.name}, W's refilled", case.placement, case.micro_batches, filled)


def _warmed(case: Case) -> Iterator[Callable[[], Schedule | None]]:
    """Looped orders with warm-ups between interleaved zero bubble's and twice VPP's."""
    stages, chunks, micro_batches = case.stages, case.chunks, case.micro_batches
    if case.placement not in (tuple(linear(stages)), tuple(loop(stages, chunks))):
        return
    count = max(1, micro_batches // stages)
    groups = [micro_batches // count + (i < micro_batches % count) for i in range(count)]
    slots = _slots(case)
    for slope in (1, 2):
        for extra in sorted({0, 1, 2, *(stages * n // 4 for n in (1, 2, 3, 4, 6, 8))}):
            limits = [
                min(slots[s], slope * (stages - s - 1) + (chunks - 1) * groups[0] + 1 + extra)
                for s in range(stages)
            ]
            for fit in _FITS:
                yield lambda limits=limits, fit=fit, name=f"loop, warm-up {slope}·(S−s−1)+{extra}": _warm(  # type: ignore[misc]
                    case, name, groups, limits, slots, fit
                )


def _warm(
    case: Case, name: str, groups: list[int], limits: list[int], slots: list[int], fit: float
) -> Schedule | None:
    queues = [grouped(own, groups) for own in own_chunks(case.placement, case.stages)]
    orders = merged(case.placement, queues, limits, case.micro_batches)
    rule = Fill(slots, fit, UnitCosts(*_unit_costs(case)))
    try:
        return generate(name, Policy(case.placement, orders, rule), case.micro_batches)
    except RuntimeError:
        return None


def _slots(case: Case) -> list[int]:
    """How many forwards of its largest chunk each stage can hold."""
    most = case.micro_batches * case.chunks
    out = []
    for chunks, limit in zip(case.own, case.arrays.limit.tolist(), strict=True):
        held = max(case.costs.held_forward[c] + case.costs.held_weight[c] for c in chunks)
        out.append(most if held <= 0 or limit / held >= most else max(0, int(limit / held)))
    return out


def _unit_costs(case: Case) -> tuple[float, float, float, float]:
    """(F, B, W, transfer) of a typical chunk."""
    costs = case.costs
    f, b, w = (sum(c) / len(c) for c in (costs.forward, costs.backward_b, costs.backward_w))
    delays = case.arrays.delay[~case.arrays.near].tolist()
    comm = sum(delays) / len(delays) if delays else 0.0
    return (f, b, w, comm) if f + b + w > 0 else (1.0, 1.0, 1.0, comm)
