"""Walking lists in planned time: waits of sends and receives, worked out by hand."""

import pytest

from pipeloom.planning import Costs, Lowered
from pipeloom.planning.replay import Hang, replay
from pipeloom.planning.words import parse
from pipeloom.schedules import Edge, Span

LATE_POST = Lowered(
    "mine",
    (0, 1, 1),
    1,
    (Edge("F", 0, 2, 8),),
    (
        tuple(map(parse, ["F0.0", "send F0>2.0 to stage 1"])),
        tuple(map(parse, ["F1.0", "post F0>2.0 from stage 0", "recv F0>2.0 from stage 0", "F2.0"])),
    ),
    forward_only=True,
)
COSTS = Costs((1.0, 5.0, 2.0), (1.0,) * 3, (1.0,) * 3, comm=0.5)


def test_a_send_waits_for_its_post():
    walked = replay(LATE_POST, COSTS)
    assert walked.clock == [5.0, 7.5]  # the post comes when F1.0 has ended, then the message travels
    assert walked.start == [[0.0], [0.0, 5.5]]
    assert walked.waits == [Span(0, "wait", 0, 0, 1.0, 5.0), Span(1, "wait", 2, 0, 5.0, 5.5)]
    assert [(f.sent, f.arrived, f.nbytes) for f in walked.flows] == [(5.0, 5.5, 8)]


def test_a_buffered_send_does_not_wait():
    walked = replay(LATE_POST, COSTS, rendezvous=False)
    assert walked.clock == [1.0, 7.0]
    assert walked.waits == []
    assert [(f.sent, f.arrived) for f in walked.flows] == [(1.0, 1.5)]


def test_a_hang_says_who_waits_for_whom():
    jobs = (
        tuple(map(parse, ["recv F1>2.0 from stage 1", "F0.0", "send F0>1.0 to stage 1"])),
        tuple(map(parse, ["recv F0>1.0 from stage 0", "F1.0", "send F1>2.0 to stage 0"])),
    )
    lists = Lowered("mine", (0, 1, 0), 1, (Edge("F", 0, 1), Edge("F", 1, 2)), jobs, forward_only=True)
    with pytest.raises(Hang, match=r"stages \[0, 1\] wait for each other") as caught:
        replay(lists, Costs.uniform(3), rendezvous=False)
    assert caught.value.waits == {0: (0, 1), 1: (0, 0)}
