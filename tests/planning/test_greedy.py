"""The greedy scheduler: orders for any limit that holds one micro-batch."""

import random

import pytest

from pipeloom.planning import simulate
from pipeloom.planning.anneal import makespan
from pipeloom.planning.greedy import ALTERNATE, DEEP, GreedyPolicy, greedy, one_at_a_time, policies
from search_cases import benchmark_case, random_case


def test_the_policies_are_all_different() -> None:
    assert len(set(policies(2))) == 72
    assert len({p.name for p in policies(1)}) == 24


@pytest.mark.parametrize(
    ("placement", "chunks"), [("linear", 1), ("loop", 2), ("v", 2), ("loop", 4), ("v", 3)]
)
def test_every_policy_fits_every_limit(placement: str, chunks: int) -> None:
    for times in (0.25, 0.5, 1, 2):
        case = benchmark_case(4, 6, placement, chunks, (1, 1.1, 0.8, 0.1), times)
        for policy in policies(chunks):
            order = greedy(case, policy)
            assert order is not None
            assert makespan(case, order) >= 6 * 2.9


def test_alternating_with_one_chunk_is_one_forward_one_backward() -> None:
    case = benchmark_case(2, 4, "linear", 1, (1, 1, 1, 0), 1)
    order = greedy(case, GreedyPolicy(ALTERNATE, 0, 0, DEEP))
    assert order is not None
    jobs = [[str(job) for job in stage if job.kind != "W"] for stage in case.decode(order).jobs]
    assert jobs[1] == ["F1.0", "B1.0", "F1.1", "B1.1", "F1.2", "B1.2", "F1.3", "B1.3"]


def test_one_micro_batch_at_a_time_takes_what_the_case_says_is_the_least() -> None:
    rng = random.Random(8)
    for _ in range(80):
        case = random_case(rng)
        order = one_at_a_time(case)
        makespan(case, order)
        base = [*case.costs.persistent, *[0.0] * case.stages]
        peak = simulate(case.decode(order), case.costs, case.edges).peak
        assert peak == pytest.approx([x + b for x, b in zip(case.least(), base, strict=False)])
