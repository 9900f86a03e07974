"""Orders for many micro-batches, repeated from orders for few."""

import pytest

from pipeloom.planning import simulate
from pipeloom.planning.anneal import anneal, makespan
from pipeloom.planning.periodic import unroll
from pipeloom.planning.seeds import Seeds
from pipeloom.schedules import build
from search_cases import benchmark_case


@pytest.mark.parametrize(
    ("name", "placement", "chunks"), [("1F1B", "linear", 1), ("ZBV", "v", 2), ("VPP", "loop", 2)]
)
def test_a_named_schedule_repeats_into_itself(name: str, placement: str, chunks: int) -> None:
    few, many = (benchmark_case(3, m, placement, chunks, (1, 1, 1, 0), 2) for m in (9, 33))
    short, long = (
        case.encode(build(name, stages=3, chunks=chunks, micro_batches=case.micro_batches))
        for case in (few, many)
    )
    found = unroll(few, short, many)
    assert found is not None
    assert found[1] <= makespan(many, long) + 1e-6


def test_an_improvement_of_the_ends_is_kept() -> None:
    few, many = (benchmark_case(8, m, "v", 2, (1, 1.1, 0.8, 0.1), 0.75) for m in (24, 96))
    short, long = Seeds(few), Seeds(many)
    for seeds in (short, long):
        seeds.usual()
        seeds.more(10**9)
    better = anneal(few, short.found[0].order, visits=10_000_000, seed=0, hot=0.01)
    found = unroll(few, better.order, many)
    assert found is not None
    order, end = found
    simulation = simulate(many.decode(order), many.costs)
    assert simulation.makespan == pytest.approx(end)
    assert max(simulation.peak) <= 6 + 1e-6
    assert end < long.found[0].makespan - 0.5


def test_limits_that_no_repetition_fits_give_none() -> None:
    few = benchmark_case(2, 6, "linear", 1, (1, 1, 1, 0), 2)
    tight = benchmark_case(2, 10, "linear", 1, (1, 1, 1, 0), 0.5)
    order = few.encode(build("1F1B", stages=2, micro_batches=6))
    assert unroll(few, order, tight) is None
