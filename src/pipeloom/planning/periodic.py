"""Makes orders for many micro-batches from an order for few, by repeating its middle.

A long step is a warm-up, a unit that repeats, and a drain; annealing them at their full length would have to
find each repetition anew. Takes a short order with its times; the jobs of `count` micro-batches from `first` on
are repeated, each time `period` later, and everything after them moves back by as much. Each stage then runs
its jobs in the order of these times. Data edges join jobs of one micro-batch, which move together, so the
order can run whatever the period is; too short a period only costs memory. (A modulo schedule, as in software
pipelining, Lam 1988, whose unit was found by search.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from .anneal import StuckOrder, makespan
from .case import JOINED, Case, Floats, Ints, Order
from .walk import blank, finish


def unroll(few: Case, order: Order, many: Case, tries: int = 2_000) -> tuple[Order, float] | None:
    """The fastest repetition of an order of `few` that fits the limits of `many`, the same case with more
    micro-batches, and its makespan. None where none fits. tries: repetitions looked at, spread evenly over those
    that there are."""
    starts, kinds = _table(few, order)
    units = list(_units(few, starts, many.micro_batches))
    best: tuple[Order, float] | None = None
    seen: set[bytes] = set()
    for first, count, period in units[:: max(1, math.ceil(len(units) / max(1, tries)))]:
        longer = _repeat(many, starts, kinds, first, count, period, f"{order.name}, repeated")
        key = longer.entries.tobytes()
        if key in seen:
            continue
        seen.add(key)
        try:
            end = makespan(many, longer)
        except StuckOrder:
            continue
        if best is None or end < best[1]:
            best = (longer, end)
    return best


def _table(case: Case, order: Order) -> tuple[Floats, Ints]:
    """The start of each F, B and W, [3·C, M], and its entry."""
    times = blank(case)
    finish(case.arrays, order.entries, times)
    total = len(case.placement)
    starts = np.zeros((3 * total, case.micro_batches))
    kinds = np.zeros((3 * total, case.micro_batches), dtype=np.int64)
    plain = np.where(order.entries >= JOINED * total, order.entries - total, order.entries)
    starts[plain, times.number] = times.start
    kinds[plain, times.number] = order.entries
    return starts, kinds


def _units(few: Case, starts: Floats, micro_batches: int) -> Iterator[tuple[int, int, float]]:
    """(first, count, period) of the units to try: counts that fill up the micro-batches exactly, anywhere in the
    order, as far apart as the work needs or as they are."""
    missing = micro_batches - few.micro_batches
    busiest = float(few.arrays.work.max()) / few.micro_batches
    for count in range(1, min(missing, few.micro_batches - 1, 2 * few.stages) + 1):
        if missing % count:
            continue
        for first in range(few.micro_batches - count):
            apart = starts[:, first + count] - starts[:, first]
            for period in {count * busiest, float(np.median(apart)), float(apart.max()), float(apart.mean())}:
                yield first, count, period


def _repeat(
    many: Case, starts: Floats, kinds: Ints, first: int, count: int, period: float, name: str
) -> Order:
    few = starts.shape[1]
    again = (many.micro_batches - few) // count
    number = np.arange(many.micro_batches)
    turn = np.clip((number - first) // count, 0, again)
    like = number - turn * count
    keys = starts[:, like] + turn * period
    entries = kinds[:, like]
    parts = []
    total = len(many.placement)
    for chunks in many.own:
        rows = [kind * total + chunk for kind in range(3) for chunk in chunks]
        by_time = np.argsort(keys[rows].ravel(), kind="stable")
        parts.append(entries[rows].ravel()[by_time])
    return Order(name, np.concatenate(parts))
