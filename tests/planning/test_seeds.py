"""Seeds: every named schedule that fits is among them, and nothing that doesn't."""

import pytest

from pipeloom.planning import Costs, simulate
from pipeloom.planning.case import Case
from pipeloom.planning.seeds import Seed, Seeds
from pipeloom.schedules import build, linear
from pipeloom.schedules.catalogue import CATALOGUE
from search_cases import benchmark_case


def grown(case: Case) -> list[Seed]:
    seeds = Seeds(case)
    seeds.usual()
    seeds.more(10**9)
    return seeds.found


@pytest.mark.parametrize(("placement", "chunks"), [("linear", 1), ("loop", 2), ("v", 2)])
@pytest.mark.parametrize("times", [0.5, 1, 2])
def test_none_is_slower_than_a_named_schedule_that_fits(placement: str, chunks: int, times: float) -> None:
    case = benchmark_case(4, 7, placement, chunks, (1, 1.1, 0.8, 0.1), times)
    found = grown(case)
    assert found == sorted(found, key=lambda seed: seed.makespan)
    limit = times * 4
    beaten = 0
    for name, entry in CATALOGUE.items():
        if entry.chunks not in (None, chunks):
            continue
        f, b, w, comm = 1 / chunks, 1.1 / chunks, 0.8 / chunks, 0.1
        schedule = build(
            name, stages=4, chunks=chunks, micro_batches=7, unit_costs=(f, b, w, comm), memory_limit=limit
        )
        if schedule.placement == case.placement:
            assert found[0].makespan <= simulate(schedule, case.costs).makespan + 1e-6
            beaten += 1
    assert beaten >= 2


def test_all_fit_and_run() -> None:
    case = benchmark_case(4, 6, "v", 2, (1, 1.1, 0.8, 0.1), 0.75)
    seeds = Seeds(case)
    seeds.usual()
    seeds.more(10**9)
    assert len(seeds.found) > 10
    assert any(seed.makespan == seeds.named for seed in seeds.found)
    for seed in seeds.found:
        simulation = simulate(case.decode(seed.order), case.costs)
        assert simulation.makespan == pytest.approx(seed.makespan)
        assert max(simulation.peak) <= 3 + 1e-6


def test_what_takes_long_is_left_out_of_a_small_budget() -> None:
    case = benchmark_case(4, 8, "loop", 2, (1, 1.1, 0.8, 0.1), 1)
    seeds = Seeds(case)
    seeds.usual()
    few, cost = len(seeds.found), seeds.visits
    assert "InterleavedZeroBubble" in {seed.order.name for seed in seeds.found}
    seeds.more(1)
    assert (len(seeds.found), seeds.visits) == (few, cost)
    seeds.more(1000 * case.jobs)
    assert cost < seeds.visits <= cost + 1000 * case.jobs
    seeds.more(10**9)
    assert len(seeds.found) > few
    assert not seeds.late


def test_a_deadline_that_has_passed_leaves_one_order() -> None:
    seeds = Seeds(benchmark_case(4, 8, "loop", 2, (1, 1.1, 0.8, 0.1), 1), deadline=0.0)
    seeds.usual()
    assert seeds.late
    assert seeds.found[-1].order.name == "one micro-batch at a time"


def test_the_least_memory_leaves_one_micro_batch_at_a_time_and_less_leaves_nothing() -> None:
    costs = Costs.uniform(2, held_weight=3, persistent=(10, 0))
    assert grown(Case(linear(2), 3, costs, None, [13, 3]))
    assert not grown(Case(linear(2), 3, costs, None, [12.9, 3]))
