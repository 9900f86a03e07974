"""Each state machine by a script of messages, without processes: what goes in, what comes out."""

from __future__ import annotations

import pytest
from fleet_scripts import Script, chain

from pipeloom.fleet import INFINITE, Graph, NodeType, TaskNode, connect
from pipeloom.fleet.interceptor import Amplifier, Compute, ProtocolError, Sink, Source
from pipeloom.fleet.messages import Kind

COMPUTE, AMPLIFIER = NodeType.COMPUTE, NodeType.AMPLIFIER
SOURCE, SINK = -1, -2


def middle(buffer: int = 2, times: int = 3, gate: int = 1) -> Script:
    """Task 1 of 0 → 1 → 2."""
    a, b, c = chain(COMPUTE, COMPUTE, COMPUTE, times=times)
    connect(a, b, buffer_size=buffer, gate=gate)
    connect(b, c, buffer_size=buffer)
    graph = Graph([a, b, c])
    return Script(Compute(graph.nodes[1], graph))


def test_source_gives_the_next_scope_for_each_credit() -> None:
    a, b = chain(COMPUTE, COMPUTE, times=2)
    graph = Graph([a, b])
    source = Script(Source(graph.nodes[SOURCE], graph))
    assert source.tell(Kind.START, SOURCE, -1) == ["DATA_IS_READY 0 0", "DATA_IS_READY 1 0"]
    assert source.credit(0) == ["DATA_IS_READY 0 1"]
    assert not source.interceptor.done
    assert source.credit(1) == ["DATA_IS_READY 1 1"]
    assert source.interceptor.done
    assert source.credit(0) == []
    with pytest.raises(ProtocolError, match="DATA_IS_USELESS 0→-1"):
        source.credit(0)


def test_sink_gives_credits_back_and_is_done_after_all_scopes_of_all_upstreams() -> None:
    graph = Graph(chain(COMPUTE, COMPUTE, times=2))
    sink = Script(Sink(graph.nodes[SINK], graph))
    assert [sink.ready(0, 0), sink.ready(0, 1)] == [["DATA_IS_USELESS 0 0"], ["DATA_IS_USELESS 0 1"]]
    assert not sink.interceptor.done
    sink.ready(1, 0)
    sink.ready(1, 1)
    assert sink.interceptor.done


def test_compute_runs_when_it_is_ready_and_hands_on_and_gives_back() -> None:
    task = middle()
    assert task.offered is None
    assert task.ready(0, 0) == []
    assert task.offered == (0, 0)
    assert task.run() == ["DATA_IS_READY 2 0", "DATA_IS_USELESS 0 0"]
    assert task.offered is None


def test_compute_waits_for_room_below() -> None:
    task = middle(buffer=2)
    for scope in range(3):
        task.ready(0, scope)
    task.run()
    task.run()
    assert task.offered is None
    task.credit(2)
    assert task.offered == (2, 0)
    task.run()
    assert task.interceptor.done


def test_compute_takes_the_lowest_scope() -> None:
    task = middle()
    task.ready(0, 2)
    task.ready(0, 1)
    assert task.offered == (1, 0)


def test_compute_waits_for_all_upstreams() -> None:
    a, b, c = chain(COMPUTE, COMPUTE, COMPUTE)
    connect(a, c)
    connect(b, c)
    graph = Graph([a, b, c])
    task = Script(Compute(graph.nodes[2], graph))
    task.ready(0, 0)
    task.ready(0, 1)
    assert task.offered is None
    task.ready(1, 1)
    assert task.offered == (1, 0)
    assert task.run() == [f"DATA_IS_READY {SINK} 1", "DATA_IS_USELESS 0 1", "DATA_IS_USELESS 1 1"]
    assert task.offered is None


def test_a_gate_opens_when_enough_scopes_have_come() -> None:
    task = middle(gate=3, buffer=3)
    task.ready(0, 0)
    task.ready(0, 1)
    assert task.offered is None
    task.ready(0, 2)
    assert [task.run()[0] for _ in range(3)] == [f"DATA_IS_READY 2 {m}" for m in range(3)]


def test_nothing_goes_back_on_an_infinite_edge() -> None:
    task = middle(buffer=INFINITE)
    for scope in range(3):
        task.ready(0, scope)
    assert [task.run() for _ in range(3)] == [[f"DATA_IS_READY 2 {scope}"] for scope in range(3)]


def test_the_same_scope_twice_is_refused() -> None:
    task = middle()
    task.ready(0, 0)
    with pytest.raises(ProtocolError, match="can't take DATA_IS_READY 0→1 scope 0"):
        task.ready(0, 0)
    with pytest.raises(ProtocolError, match="2→1"):
        task.ready(2, 1)


@pytest.mark.parametrize(("offset", "runs"), [(0, [0, 3]), (2, [2, 5])])
def test_an_amplifier_runs_one_in_n_and_messages_flow_in_all(offset: int, runs: list[int]) -> None:
    (task,) = chain(AMPLIFIER, times=6, run_pre_steps=3, run_at_offset=offset)
    graph = Graph([task])
    amplifier = Script(Amplifier(graph.nodes[0], graph))
    ran = []
    for scope in range(6):
        amplifier.ready(SOURCE, scope)
        if amplifier.offer().execute:
            ran.append(scope)
        assert amplifier.run() == [f"DATA_IS_READY {SINK} {scope}", f"DATA_IS_USELESS {SOURCE} {scope}"]
        amplifier.credit(SINK)
    assert ran == runs
    assert amplifier.interceptor.done


def test_changing_a_task_after_the_graph_was_built_changes_nothing() -> None:
    (task,) = chain(COMPUTE)
    graph = Graph([task])
    task.add_downstream_task(9)
    assert list(graph.nodes[0].downstream) == [SINK]
    assert isinstance(task, TaskNode)
