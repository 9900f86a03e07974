"""Cases for the tests of the search: random problems, and random orders that can run."""

from __future__ import annotations

import random

import numpy as np

from pipeloom.planning import Costs
from pipeloom.planning.anneal import StuckOrder, makespan
from pipeloom.planning.case import JOINED, Case, Order
from pipeloom.planning.greedy import GreedyPolicy, greedy, one_at_a_time
from pipeloom.schedules import Edge, chain_edges, linear, loop, vee


def benchmark_case(
    stages: int, micro_batches: int, placement: str, chunks: int, costs: tuple[float, ...], times: float
) -> Case:
    """A uniform case at a multiple of 1F1B's memory. costs: F, B, W of a stage, transfer."""
    where = {"linear": linear, "loop": lambda s: loop(s, chunks), "v": lambda s: vee(s, chunks)}[placement]
    limit = times * min(stages, micro_batches)
    return Case(where(stages), micro_batches, Costs.per_stage(stages, chunks, *costs), None, limit)


def random_case(rng: random.Random, *, limited: bool = False) -> Case:
    """Any placement, uneven costs (zeros among them), edges that skip chunks, X's that may be cheaper than B and W,
    memory of all kinds."""
    stages, chunks, micro_batches = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 6)
    total = stages * chunks
    placement = vee(stages, chunks) if rng.random() < 0.5 else loop(stages, chunks)

    def some(*values: float) -> tuple[float, ...]:
        return tuple(rng.choice(values) for _ in range(total))

    backward_b, backward_w = some(0, 1, 1.5, 2), some(0, 0.5, 1)
    saves = rng.choice((0.0, 0.25))
    edges = chain_edges(total, 8)
    for _ in range(rng.randint(0, 2) if total > 2 else 0):
        source = rng.randrange(total - 2)
        target = rng.randrange(source + 2, total)
        edges += [Edge("F", source, target, 8), Edge("B", target, source, 8)]
    costs = Costs(
        forward=some(0, 1, 1, 2),
        backward_b=backward_b,
        backward_w=backward_w,
        backward=tuple((b + w) * (1 - saves) for b, w in zip(backward_b, backward_w, strict=True)),
        latency=rng.choice((0.0, 0.1)),
        bandwidth=rng.choice((10.0, 1e9)),
        held_forward=some(0, 1),
        held_weight=some(1, 2),
        held_backward=some(0, 0.5),
        workspace=some(0, 3),
        persistent=tuple(rng.choice((0.0, 5.0)) for _ in range(stages)),
    )
    case = Case(placement, micro_batches, costs, list(dict.fromkeys(edges)))
    if limited:
        base = [*costs.persistent, *[0.0] * stages]
        limits = [float(x) * rng.choice((1, 1.5, 3)) + base[s] for s, x in enumerate(case.least())]
        case = Case(placement, micro_batches, costs, case.edges, limits)
    return case


def random_order(case: Case, rng: random.Random, moves: int = 60) -> Order:
    """An order that can run and fits, far from any policy's, with joined W's where the case joins them."""
    order = greedy(case, GreedyPolicy(rng.randrange(2), 0.0, rng.choice((0.0, 0.99)), rng.randrange(3)))
    entries = (order or one_at_a_time(case)).entries
    try:
        makespan(case, Order("greedy", entries))
    except StuckOrder:  # B's and W's own bytes can defeat the greedy scheduler at the tightest limits
        entries = one_at_a_time(case).entries
    total = len(case.placement)
    for _ in range(moves):
        changed = entries.copy()
        stage = rng.randrange(case.stages)
        first, last = case.arrays.offset[stage : stage + 2]
        i, j = rng.randrange(first, last), rng.randrange(first, last)
        entry = changed[i]
        changed = np.insert(np.delete(changed, i), j, entry)
        if case.joins and entry >= 2 * total and rng.random() < 0.5:
            changed[j] = entry + total if entry < JOINED * total else entry - total
        try:
            makespan(case, Order("random", changed))
        except StuckOrder:
            continue
        entries = changed
    return Order("random", entries)
