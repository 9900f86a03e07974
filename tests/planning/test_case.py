"""Orders as arrays: there and back, and what a case refuses."""

import random

import pytest

from pipeloom.planning import Costs, ascending
from pipeloom.planning.case import Case
from pipeloom.schedules import Schedule, build, linear, vee
from search_cases import random_case, random_order


@pytest.mark.parametrize(
    ("name", "chunks"), [("1F1B", 1), ("ZBH1", 1), ("VPP", 2), ("InterleavedZeroBubble", 3)]
)
def test_a_named_schedule_comes_back_as_it_was(name: str, chunks: int) -> None:
    schedule = build(name, stages=3, chunks=chunks, micro_batches=5, ascending=True)
    joining = Costs.uniform(3 * chunks, backward=(1.5,) * 3 * chunks)
    case = Case(schedule.placement, 5, joining)
    assert case.decode(case.encode(schedule)) == schedule


def test_whole_backwards_are_split_where_joining_saves_nothing() -> None:
    schedule = build("1F1B", stages=2, micro_batches=2)
    case = Case(schedule.placement, 2, Costs.uniform(2))
    jobs = case.decode(case.encode(schedule)).jobs
    assert [str(job) for job in jobs[1]] == ["F1.0", "B1.0", "W1.0", "F1.1", "B1.1", "W1.1"]


def test_random_orders_come_back_with_ascending_micro_batches() -> None:
    rng = random.Random(1)
    for _ in range(50):
        case = random_case(rng)
        order = random_order(case, rng)
        schedule = case.decode(order)
        assert ascending(schedule)
        assert case.decode(case.encode(schedule)) == schedule


def test_micro_batches_out_of_order_are_put_in_order() -> None:
    jobs = [["F0.1", "F0.0", "B0.1", "W0.1", "B0.0", "W0.0"]]
    case = Case([0], 2, Costs.uniform(1))
    decoded = case.decode(case.encode(Schedule.from_jobs("mine", [0], 2, jobs)))
    assert [str(job) for job in decoded.jobs[0]] == ["F0.0", "F0.1", "B0.0", "W0.0", "B0.1", "W0.1"]


def test_costs_limits_and_schedules_must_fit() -> None:
    with pytest.raises(ValueError, match="costs are of 3 chunks and the placement is of 2"):
        Case(linear(2), 1, Costs.uniform(3))
    with pytest.raises(ValueError, match="3 memory limits for 2 stages"):
        Case(linear(2), 1, Costs.uniform(2), None, [1, 2, 3])
    with pytest.raises(ValueError, match="another placement"):
        Case(vee(2), 2, Costs.uniform(4)).encode(build("VPP", stages=2, chunks=2, micro_batches=2))


def test_the_least_memory_is_one_micro_batch_in_all_chunks() -> None:
    case = Case(vee(2), 4, Costs.uniform(4, held_forward=1, held_weight=2, workspace=5))
    assert case.least().tolist() == [11.0, 11.0]  # 6 alive, and 5 more while the second chunk's B runs
    kept = Costs.uniform(2, held_weight=1, held_backward=(2, 2), backward=(1.5, 1.5))
    assert Case(linear(2), 4, kept).alone(0) == (3.0, 1.0)  # B keeps 2 for its W, X doesn't
