"""Times of a schedule under uneven costs and delays."""

from pipeloom.schedules import Edge, Schedule, chain_edges
from pipeloom.schedules.timing import times


def test_uneven_costs_and_delays_by_hand():
    cost = {("F", 0): 1, ("F", 1): 3, ("B", 0): 2, ("B", 1): 4, ("W", 0): 1, ("W", 1): 1}
    jobs = [
        ["F0.0", "F0.1", "B0.0", "W0.0", "B0.1", "W0.1"],
        ["F1.0", "B1.0", "W1.0", "F1.1", "B1.1", "W1.1"],
    ]
    schedule = Schedule.from_jobs("mine", [0, 1], 2, jobs)
    when = times(
        schedule, lambda k, c: cost.get((k, c), 0), chain_edges(2), lambda e: 10 if e.direction == "F" else 20
    )
    assert when.start == [[0, 1, 38, 40, 46, 48], [11, 14, 18, 19, 22, 26]]
    assert when.end == [[1, 2, 40, 41, 48, 49], [14, 18, 19, 22, 26, 27]]
    assert when.makespan == 49


def test_several_stages_may_wait_for_one_job():
    """Stages 1 and 2 both need chunk 0's forward, 2 by a skip."""
    schedule = Schedule.from_jobs("mine", [0, 1, 2], 1, [["F0.0"], ["F1.0"], ["F2.0"]])
    when = times(schedule, lambda *_: 1, [Edge("F", 0, 1), Edge("F", 0, 2)], lambda _: 0)
    assert when.start == [[0], [1], [1]]


def test_chunks_without_an_edge_do_not_wait():
    schedule = Schedule.from_jobs("mine", [0, 1], 1, [["F0.0", "X0.0"], ["F1.0", "X1.0"]])
    assert times(schedule, lambda *_: 1, [], lambda _: 0).start == [[0, 1], [0, 1]]
