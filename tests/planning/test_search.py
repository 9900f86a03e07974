"""The search: never worse than any named schedule, within the limits, honest about bound, seed and budget."""

import math
import random
import time

import pytest

from pipeloom.planning import Costs, PlanError, ascending, lower, lower_bound, simulate, verify
from pipeloom.planning.search import Found, search
from pipeloom.schedules import Edge, build, chain_edges, linear, loop, vee
from search_cases import random_case


def uniform(
    stages: int, micro_batches: int, costs: tuple[float, ...], times: float, **options: object
) -> Found:
    return search(
        stages,
        micro_batches,
        lambda _, chunks: Costs.per_stage(stages, chunks, *costs),
        memory_limit=times * min(stages, micro_batches),
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("costs", "times", "best_known"),
    [
        ((1, 1.1, 0.8, 0.1), 1, 0.113),
        ((1, 1.1, 0.8, 0.1), 2, 0.0434),
        ((1, 1, 1, 0), 1, None),
        ((1, 1, 1, 0.1), 0.5, None),
    ],
)
def test_four_stages_eight_micro_batches(
    costs: tuple[float, ...], times: float, best_known: float | None
) -> None:
    found = uniform(4, 8, costs, times, visits=10_000_000)
    assert found.makespan <= found.named + 1e-9
    assert found.makespan == simulate(found.schedule, Costs.per_stage(4, found.chunks, *costs)).makespan
    assert found.ratio == found.makespan / found.bound > 1 - 1e-9
    assert max(found.peak) <= 4 * times + 1e-6
    assert ascending(found.schedule)
    verify(lower(found.schedule, chain_edges(4 * found.chunks), Costs.per_stage(4, found.chunks, *costs)))
    if best_known is not None:
        assert 1 - 8 * sum(costs[:3]) / found.makespan <= best_known
    assert [(t.placement, t.chunks) for t in found.tried] == [
        ("linear", 1), ("loop", 2), ("loop", 3), ("loop", 4), ("v", 2), ("v", 3), ("v", 4)
    ]  # fmt: skip
    assert found.bound == min(t.bound for t in found.tried)
    assert found.makespan == pytest.approx(min(t.makespan for t in found.tried))
    assert found.visits == pytest.approx(sum(t.visits for t in found.tried))


def test_no_named_schedule_at_any_limit_is_better() -> None:
    for times in (0.5, 1.0, 2.0):
        found = uniform(3, 5, (1, 1.2, 0.7, 0.05), times, visits=3_000_000)
        for name, chunks in (
            ("1F1B", 1),
            ("ZBH1", 1),
            ("VPP", 2),
            ("VPP", 4),
            ("ZBV", 2),
            ("V-Half", 2),
            ("V-Min", 2),
        ):
            costs = (*(c / chunks for c in (1, 1.2, 0.7)), 0.05)
            schedule = build(
                name, stages=3, chunks=chunks, micro_batches=5, unit_costs=costs, memory_limit=3 * times
            )
            made = simulate(schedule, Costs.per_stage(3, chunks, 1, 1.2, 0.7, 0.05)).makespan
            assert found.makespan <= made + 1e-9


def test_the_same_seed_and_visits_give_the_same_plan() -> None:
    one, other = (uniform(4, 6, (1, 1.1, 0.8, 0.1), 1, visits=4_000_000, seed=7) for _ in range(2))
    assert one.schedule == other.schedule
    assert (one.visits, one.moves, one.seed) == (other.visits, other.moves, other.seed)
    assert not one.late


def test_it_stops_at_the_bound() -> None:
    found = uniform(4, 8, (1, 1.1, 0.8, 0.1), 2, visits=10**12)
    assert found.ratio == pytest.approx(1)
    assert found.visits < 10**8


def test_it_stops_in_time() -> None:
    uniform(2, 2, (1, 1, 1, 0), 1, visits=1)  # compiled, and the clock starts after that
    begin = time.monotonic()
    found = uniform(8, 16, (1, 1.1, 0.8, 0.1), 0.5, budget_seconds=2.0)
    assert time.monotonic() - begin < 20  # seeds are not cut, and other work shares the machine
    assert found.ratio > 1
    assert found.makespan <= found.named


def test_uneven_costs_skipping_edges_and_memory_of_all_kinds() -> None:
    rng = random.Random(10)
    for _ in range(8):
        case = random_case(rng, limited=True)
        found = search(
            case.stages,
            case.micro_batches,
            lambda _, __, costs=case.costs: costs,
            edges_of=lambda _, __, edges=case.edges: edges,
            memory_limit=case.memory_limit,
            chunks_allowed=[case.chunks],
            placements=[
                "linear"
                if case.chunks == 1
                else "v"
                if case.placement == tuple(vee(case.stages, case.chunks))
                else "loop"
            ],
            visits=300_000,
        )
        simulation = simulate(found.schedule, case.costs, case.edges)
        assert simulation.makespan == found.makespan
        assert isinstance(case.memory_limit, list)
        assert all(
            p <= limit * (1 + 1e-9) for p, limit in zip(simulation.peak, case.memory_limit, strict=True)
        )
        assert found.makespan >= found.bound - 1e-9
        assert all(more >= 0 for more in found.stash)


def test_many_micro_batches_are_repeated_from_few() -> None:
    found = uniform(4, 48, (1, 1.1, 0.8, 0.1), 0.75, visits=30_000_000, chunks_allowed=[2], placements=["v"])
    assert found.makespan <= found.named
    assert found.ratio < 1.05


def test_the_bound_is_the_least_over_what_is_allowed() -> None:
    found = uniform(4, 4, (1, 1, 1, 0.1), 1, visits=1, chunks_allowed=[1, 2], placements=["linear", "loop"])
    bounds = [
        lower_bound(p, 4, Costs.per_stage(4, v, 1, 1, 1, 0.1), memory_limit=4)
        for p, v in ((linear(4), 1), (loop(4, 2), 2))
    ]
    assert found.bound == min(bounds)
    assert found.placement in ("linear", "loop")


def test_too_little_memory_says_the_least() -> None:
    with pytest.raises(PlanError, match=r"no order fits.*linear, 1 chunks a stage: 7 on stage 1.*allow more"):
        search(
            2, 4, lambda _, v: Costs.uniform(2 * v, held_weight=3 / v, persistent=(2, 4)), memory_limit=5,
            chunks_allowed=[1, 2],
        )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": 0}, "at least 1"),
        ({"placements": ["ring"]}, "placements are linear, loop, v"),
        ({"placements": []}, "placements are"),
        ({"chunks_allowed": [0]}, "chunks_allowed are whole numbers"),
        ({"placements": ["v"], "chunks_allowed": [1]}, "linear takes 1"),
        ({"memory_limit": [1, 2, 3]}, "3 memory limits for 2 stages"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    given = {"stages": 2, "micro_batches": 2, "costs_of": lambda _, v: Costs.uniform(2 * v)} | arguments
    with pytest.raises(ValueError, match=message):
        search(**given)  # type: ignore[arg-type]


def test_one_stage_needs_no_pipeline() -> None:
    found = search(1, 3, lambda _, v: Costs.per_stage(1, v, 1, 1, 1, 0.5), visits=10**6)
    assert found.makespan == pytest.approx(9)
    assert found.ratio == pytest.approx(1)
    assert not math.isinf(found.named)


def test_a_skip_edge_is_obeyed() -> None:
    edges = [*chain_edges(3), Edge("F", 0, 2), Edge("B", 2, 0)]
    found = search(
        3,
        3,
        lambda _, __: Costs.uniform(3, comm=2),
        edges_of=lambda _, __: edges,
        chunks_allowed=[1],
        visits=10**6,
    )
    assert found.makespan == simulate(found.schedule, Costs.uniform(3, comm=2), edges).makespan
