"""The kernels agree with the simulator, on any order."""

import random

import numpy as np
import pytest

from pipeloom.planning import Costs, simulate
from pipeloom.planning.anneal import StuckOrder, makespan
from pipeloom.planning.case import Case, Order
from pipeloom.planning.walk import STUCK, blank, finish, fits
from pipeloom.schedules import build, linear
from pipeloom.schedules.timing import Stuck
from search_cases import random_case, random_order


def test_times_are_the_simulators() -> None:
    rng = random.Random(2)
    for _ in range(100):
        case = random_case(rng)
        order = random_order(case, rng)
        times = blank(case)
        end = finish(case.arrays, order.entries, times)
        simulation = simulate(case.decode(order), case.costs, case.edges)
        assert end == pytest.approx(simulation.makespan, rel=1e-6, abs=1e-6)


def test_memory_is_the_simulators_to_the_byte() -> None:
    rng = random.Random(3)
    for _ in range(100):
        case = random_case(rng)
        order = random_order(case, rng)
        peak = simulate(case.decode(order), case.costs, case.edges).peak
        just = Case(case.placement, case.micro_batches, case.costs, case.edges, peak)
        makespan(just, order)
        for stage in range(case.stages):
            less = [p - 0.25 * (s == stage) for s, p in enumerate(peak)]
            with pytest.raises(StuckOrder, match=f"memory limit of stage {stage}"):
                makespan(Case(case.placement, case.micro_batches, case.costs, case.edges, less), order)


def test_orders_that_cannot_run_are_stuck_and_others_are_not() -> None:
    rng = random.Random(4)
    outcomes = set()
    for _ in range(300):
        case = random_case(rng)
        entries = random_order(case, rng, moves=5).entries.copy()
        for stage in range(case.stages):
            first, last = case.arrays.offset[stage : stage + 2]
            i, j = rng.randrange(first, last), rng.randrange(first, last)
            entries[i], entries[j] = entries[j], entries[i]
        order = Order("swapped", entries)
        stuck = finish(case.arrays, entries, blank(case)) == STUCK
        try:
            simulate(case.decode(order), case.costs, case.edges)
            assert not stuck
        except (Stuck, ValueError):
            assert stuck
        outcomes.add(stuck)
    assert outcomes == {True, False}


def test_a_stage_that_holds_a_limit_exactly_fits() -> None:
    costs = Costs.uniform(3, held_weight=0.1)
    schedule = build("1F1B", stages=3, micro_batches=6)
    case = Case(linear(3), 6, costs, None, [0.1 + 0.1 + 0.1, 0.2, 0.1])
    order = case.encode(schedule).entries
    times = blank(case)
    finish(case.arrays, order, times)
    assert all(fits(case.arrays, order, times, s, *case.arrays.offset[s : s + 2]) for s in range(3))


def test_a_circle_of_jobs_that_take_no_time_is_stuck() -> None:
    # stage 0 wants its backward first, which waits for stage 1's, which waits for stage 0's forward
    case = Case(linear(2), 2, Costs.uniform(2, 0, 0, 0))
    f0, f1, b0, b1, w0, w1 = range(6)
    order = np.array([f0, b0, f0, b0, w0, w0, f1, f1, b1, b1, w1, w1])
    assert finish(case.arrays, order, blank(case)) == STUCK
