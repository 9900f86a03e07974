"""Orders that a search starts from: every named schedule that fits, as it stands or made for the limit, the same
with their W's placed anew, loops with other warm-ups, and the greedy scheduler's.

All of them come cheap, and one of them is close to the best nearly everywhere; which one depends on costs and
memory. Each is checked: an order that can't run or exceeds a limit is left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

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


class Seed(NamedTuple):
    """An order and its makespan."""

    order: Order
    makespan: float


class Seeds:
    """The seeds of a case that fit its limits, each makespan once. named: the shortest of a named schedule; visits:
    what they cost, in jobs timed; late: whether the deadline left some out."""

    def __init__(self, case: Case, deadline: float = math.inf) -> None:
        self.case = case
        self.deadline = deadline
        self.named = math.inf
        self.visits = 0
        self.late = False
        self._tiny = max(1e-9 * unit(case), 1e-300)
        self._by_time: dict[int, Seed] = {}
        self._named: list[Schedule] = []
        self._fitting: set[str] = set()

    @property
    def found(self) -> list[Seed]:
        """Best first."""
        return sorted(self._by_time.values(), key=lambda seed: seed.makespan)

    def usual(self) -> None:
        """Named schedules as they stand, one micro-batch at a time, and the greedy orders."""
        case = self.case
        self._consider(one_at_a_time(case))
        for schedule in _named(case, {}):
            self._named.append(schedule)
            if self._consider(case.encode(schedule), named=True):
                self._fitting.add(schedule.name)
            self.visits += _MAKING * case.jobs
            if self._over():
                return
        for policy in policies(case.chunks):
            if order := greedy(case, policy):
                self._consider(order)
            self.visits += (3 + case.stages // 16) * case.jobs
            if self._over():
                return

    def more(self, visits: int) -> None:
        """Named schedules made for the limit where they don't fit as they stand, then orders with their W's placed
        anew and with other warm-ups, for no more than `visits` jobs timed."""
        case, upto = self.case, self.visits + visits
        limiting, making = _LIMITING * case.jobs, _MAKING * case.jobs
        limited = self._limited()
        while self.visits + limiting <= upto and not self._over():
            schedule = next(limited, None)
            if schedule is None:
                break
            self.visits += limiting
            self._named.append(schedule)
            self._consider(case.encode(schedule), named=True)
        for make in [*_refilled(case, self._named), *_warmed(case)]:
            if self.visits + making > upto or self._over():
                return
            self.visits += making
            if made := make():
                self._consider(case.encode(made))

    def _limited(self) -> Iterator[Schedule]:
        held = zip(self.case.costs.held_forward, self.case.costs.held_weight, strict=True)
        limit = float(self.case.arrays.limit.min())
        if math.isfinite(limit):
            options = {"memory_limit": limit, "acts": [f + w for f, w in held]}
            for schedule in _named(self.case, options, besides=self._fitting):
                schedule.name += " within the limit"
                yield schedule

    def _over(self) -> bool:
        self.late = self.late or time.monotonic() > self.deadline
        return self.late

    def _consider(self, order: Order, *, named: bool = False) -> bool:
        try:
            end = makespan(self.case, order)
        except StuckOrder:
            return False
        self._by_time.setdefault(round(end / self._tiny), Seed(order, end))
        if named:
            self.named = min(self.named, end)
        return True


def _named(case: Case, options: dict[str, Any], besides: Collection[str] = ()) -> Iterator[Schedule]:
    """Every schedule of the catalogue with the case's placement, with whole and with split backwards, but those in
    `besides`. options: of `build`."""
    for name, entry in CATALOGUE.items():
        if entry.chunks is not None and entry.chunks != case.chunks:
            continue
        for split in (True,) if entry.splits else (False, True):
            called = name if entry.splits or not split else f"{name} split"
            if called in besides:
                continue
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
                schedule.name = called
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
