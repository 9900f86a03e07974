"""Where W's go when they fill waits."""

import pytest

from pipeloom.schedules import build
from pipeloom.schedules.schedule import Coding
from pipeloom.schedules.weights import UnitCosts, fill


def stage(schedule, number):
    return " ".join(str(job) for job in schedule.jobs[number])


def placed(weight, fit):
    """Stage 0 of two ends B0.0 at 4.5 and has the gradient of B1.1, which runs from 4.25 to 5.25, at 5.5: it
    waits for one unit."""
    coding = Coding(2, 2)
    f0, f1, b0, b1 = (k * 4 + c * 2 for k in (0, 1) for c in (0, 1))
    orders = [[f0, f0 + 1, b0, b0 + 1], [f1, b1, f1 + 1, b1 + 1]]
    out = fill(orders, [0, 1], coding, [2, 2], fit, UnitCosts(1, 1, weight, 0.25))
    return " ".join(str(coding.decode(code)) for code in out[0])


@pytest.mark.parametrize(
    ("weight", "fit", "order"),
    [
        (1.0, 0.0, "F0.0 F0.1 B0.0 W0.0 B0.1 W0.1"),  # fits exactly
        (1.5, 0.0, "F0.0 F0.1 B0.0 B0.1 W0.0 W0.1"),  # too long
        (2.0, 0.5, "F0.0 F0.1 B0.0 W0.0 B0.1 W0.1"),  # may delay the next job by half of itself
        (2.1, 0.5, "F0.0 F0.1 B0.0 B0.1 W0.0 W0.1"),
    ],
)
def test_a_w_goes_where_the_next_job_is_late_enough(weight, fit, order):
    assert placed(weight, fit) == order


def test_memory_forces_a_w():
    """One slot: no second forward before the first micro-batch's W, though it would fit in time."""
    coding = Coding(1, 2)
    out = fill([[0, 2, 1, 3]], [0], coding, [1], 0.0, UnitCosts())
    assert [str(coding.decode(code)) for code in out[0]] == ["F0.0", "B0.0", "W0.0", "F0.1", "B0.1", "W0.1"]


def test_an_order_that_cannot_run_is_an_error():
    coding = Coding(1, 1)
    with pytest.raises(RuntimeError, match="2 jobs never become ready"):
        fill([[1, 0]], [0], coding, [1], 0.0, UnitCosts())


def test_weights_of_a_stage_come_first_in_first_out():
    schedule = build("ZBH2", stages=2, micro_batches=4)
    assert [j.micro_batch for j in schedule.jobs[0] if j.kind == "W"] == [0, 1, 2, 3]
    assert stage(schedule, 1).startswith("F1.0 B1.0 F1.1 B1.1")
