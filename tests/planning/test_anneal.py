"""Annealing: never worse, within the limits, the same for the same seed, done in time."""

import random
import time

import pytest

from pipeloom.planning import Costs, lower_bound, simulate
from pipeloom.planning.anneal import StuckOrder, anneal, makespan
from pipeloom.planning.case import Case, Order
from pipeloom.planning.greedy import one_at_a_time
from pipeloom.schedules import build, linear
from search_cases import benchmark_case, random_case, random_order


def test_any_order_becomes_no_worse_and_fits() -> None:
    rng = random.Random(9)
    better = 0
    for _ in range(60):
        case = random_case(rng, limited=True)
        order = random_order(case, rng, moves=10)
        before = makespan(case, order)
        run = anneal(case, order, visits=20_000, seed=1)
        simulation = simulate(case.decode(run.order), case.costs, case.edges)
        assert run.makespan <= before + 1e-9
        assert simulation.makespan == pytest.approx(run.makespan, rel=1e-6, abs=1e-6)
        assert makespan(case, run.order) == pytest.approx(run.makespan)  # raises where it exceeds a limit
        better += run.makespan < before - 1e-6
    assert better > 30


def test_one_micro_batch_at_a_time_becomes_the_bound() -> None:
    case = benchmark_case(3, 6, "v", 2, (1, 1, 1, 0), 2)
    bound = lower_bound(case.placement, 6, case.costs, case.edges, case.memory_limit)
    run = anneal(case, one_at_a_time(case), visits=20_000_000, seed=3, hot=0.5, goal=bound)
    assert run.makespan == pytest.approx(bound)
    assert run.visits < 20_000_000  # stopped there


def test_the_same_seed_and_visits_give_the_same_order() -> None:
    case = benchmark_case(4, 8, "v", 2, (1, 1.1, 0.8, 0.1), 1)
    order = case.encode(build("ZBV", stages=4, chunks=2, micro_batches=8, unit_costs=(1, 1.1, 0.8, 0.1)))
    one, other, third = (anneal(case, order, visits=300_000, seed=seed) for seed in (5, 5, 6))
    assert (one.makespan, one.visits, one.moves) == (other.makespan, other.visits, other.moves)
    assert one.order.entries.tolist() == other.order.entries.tolist()
    assert one.moves != third.moves


def test_a_deadline_ends_it() -> None:
    case = benchmark_case(4, 8, "loop", 2, (1, 1.1, 0.8, 0.1), 1)
    start = time.monotonic()
    run = anneal(case, one_at_a_time(case), visits=10**12, deadline=start + 0.3)
    assert run.late
    assert time.monotonic() - start < 20  # a slice of work is not cut


def test_backwards_join_where_that_is_quicker() -> None:
    costs = Costs.uniform(2, 1, 1, 1, backward=(1.2, 1.2))
    case = Case(linear(2), 4, costs)
    split = case.encode(build("1F1B", stages=2, micro_batches=4, split_backward=True))
    run = anneal(case, split, visits=2_000_000, seed=1)
    kinds = [job.kind for jobs in case.decode(run.order).jobs for job in jobs]
    assert kinds.count("X") >= 4
    assert run.makespan < makespan(case, split) - 2


def test_an_order_that_cannot_run_or_does_not_fit_is_refused() -> None:
    case = benchmark_case(2, 2, "linear", 1, (1, 1, 1, 0), 1)
    good = one_at_a_time(case)
    with pytest.raises(StuckOrder, match="can't run"):
        anneal(case, Order("backwards", good.entries[::-1].copy()), visits=10)
    forwards_first = case.encode(build("FThenB", stages=2, micro_batches=2))
    with pytest.raises(StuckOrder, match="FThenB exceeds the memory limit of stage 0"):
        anneal(benchmark_case(2, 2, "linear", 1, (1, 1, 1, 0), 0.5), forwards_first, visits=10)
