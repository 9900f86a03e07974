"""Whole graphs in one process: values, scopes, order, counts, what is in flight, and errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fleet_scripts import events, shuffled, stream
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.fleet import (
    INFINITE,
    Carrier,
    Dependency,
    Graph,
    GraphError,
    NodeType,
    Scope,
    TaskError,
    TaskNode,
    connect,
    connect_bus,
    run_here,
)
from pipeloom.runtime.errors import PeerError
from pipeloom.runtime.stepping import drive
from pipeloom.runtime.transport import MemoryTransport


def fan(times: int = 4) -> Graph:
    """Rank 0 makes x; ranks 1 and 2 each do something to it; rank 0 adds both up and keeps the sums."""

    def make(scope: Scope) -> dict[str, Any]:
        return {"x": torch.full((2,), float(scope.index)), "word": f"scope {scope.index}"}

    def double(scope: Scope) -> None:
        assert scope["word"] == f"scope {scope.index}"
        scope["double"] = scope["x"] * 2

    def square(scope: Scope) -> None:
        scope["square"] = [scope["x"] ** 2, torch.ones(3, dtype=torch.int64)]

    def add(scope: Scope) -> None:
        total = scope["double"] + scope["square"][0] + int(scope["square"][1].sum())
        scope.root.setdefault("sums", []).append(total.tolist())

    a = TaskNode(0, 0, times, make, name="make")
    b = TaskNode(1, 1, times, double, name="double")
    c = TaskNode(2, 2, times, square, name="square")
    d = TaskNode(0, 3, times, add, name="add")
    connect(a, b, carries=("x", "word"))
    connect(a, c, buffer_size=1, carries=("x",))
    connect(b, d, carries=("double",))
    connect(c, d, buffer_size=INFINITE, carries=("square",))
    return Graph([a, b, c, d])


def test_values_go_there_and_come_back() -> None:
    roots = run_here(fan())
    assert roots[0]["sums"] == [[m * 2 + m * m + 3.0] * 2 for m in range(4)]


def test_scopes_are_freed_when_their_last_task_is_done() -> None:
    graph = fan(times=3)
    carriers = [Carrier(graph, connect_bus(t)) for t in MemoryTransport.group(3)]
    drive([carrier.work() for carrier in carriers])
    assert [carrier.scopes for carrier in carriers] == [{}, {}, {}]


def test_what_is_not_kept_leaves_the_sender_when_it_is_sent() -> None:
    left: list[list[str]] = []

    def make(_: Scope) -> dict[str, Any]:
        return {"big": torch.ones(9), "small": 1}

    a = TaskNode(0, 0, 1, make)
    b = TaskNode(1, 1, 1)
    c = TaskNode(0, 2, 1, lambda scope: left.append(sorted(scope)))
    connect(a, b, carries=("big",), keep=False)
    connect(a, c)
    run_here(Graph([a, b, c]))
    assert left == [["small"]]


def test_an_edge_that_carries_what_nobody_made() -> None:
    a, b = TaskNode(0, 0, 1, name="a"), TaskNode(1, 1, 1)
    connect(a, b, carries=("missing",))
    with pytest.raises(TaskError, match=r"rank 0: job a \(Compute.*scope 0 has no variable 'missing'"):
        run_here(Graph([a, b]))


def test_a_root_scope_outlives_the_run_and_is_read_through() -> None:
    roots = [Scope(), Scope()]
    roots[1]["scale"] = 10
    a = TaskNode(0, 0, 3, lambda scope: {"x": scope.index})
    b = TaskNode(1, 1, 3, lambda scope: scope.root.setdefault("seen", []).append(scope["x"] * scope["scale"]))
    connect(a, b, carries=("x",))
    graph = Graph([a, b])
    run_here(graph, roots)
    run_here(graph, roots)
    assert roots[1]["seen"] == [0, 10, 20] * 2


def test_autograd_is_as_the_caller_has_it() -> None:
    seen: list[bool] = []
    graph = Graph([TaskNode(0, 0, 1, lambda _: seen.append(torch.is_grad_enabled()))])
    run_here(graph)
    with torch.no_grad():
        run_here(graph)
    assert seen == [True, False]


def test_priority_decides_between_tasks_that_could_both_run() -> None:
    order: list[str] = []

    def note(name: str) -> Callable[[Scope], None]:
        return lambda scope: order.append(f"{name}{scope.index}")

    first = TaskNode(0, 0, 2, note("a"))
    late = TaskNode(0, 1, 2, note("late"), priority=-1)
    last = TaskNode(0, 2, 2, note("c"))
    connect(first, late)
    connect(first, last)
    run_here(Graph([first, late, last]))
    assert order == ["a0", "a1", "c0", "c1", "late0", "late1"]


def test_more_ranks_than_there_are() -> None:
    (bus,) = (connect_bus(t) for t in MemoryTransport.group(1))
    with pytest.raises(GraphError, match="tasks on 3 ranks, but there are 1"):
        Carrier(fan(), bus)


# ---- loops


def counts(graph: Graph, rank: int) -> Counter[tuple[str, int]]:
    return Counter(
        (e.task.name, e.scope) for e in events(graph)[rank] if e.task.node_type is not NodeType.COND
    )


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize(("stages", "scopes", "batch"), [(1, 5, 2), (2, 5, 2), (2, 4, 4), (3, 7, 3)])
def test_scopes_of_different_lengths(stages: int, scopes: int, batch: int, continuous: bool) -> None:
    def length(scope: int) -> int:
        return 1 + (scope * 7) % 4

    graph = stream(stages, scopes, batch, length, continuous=continuous)
    for rank in range(stages):
        expected = Counter({(name, k): length(k) for name in ("send", "recv") for k in range(scopes)})
        expected.update({(name, k): 1 for name in ("start", "end") for k in range(scopes)})
        assert counts(graph, rank) == expected


@pytest.mark.parametrize("continuous", [False, True])
def test_no_more_scopes_in_the_loop_than_the_buffer_says(continuous: bool) -> None:
    inside = most = 0
    for event in events(stream(2, 9, 3, lambda k: 1 + k % 3, continuous=continuous))[0]:
        inside += (event.task.name == "start") - (event.task.name == "cond" and not event.goes_on)
        most = max(most, inside)
    assert most == 3


def test_a_loop_over_two_ranks_with_one_cond_and_no_start() -> None:
    """x is halved on rank 0 and has 1 added on rank 1 until it is below 3; rank 1 has no Cond of its own."""

    def halve(scope: Scope) -> None:
        scope["x"] = scope["x"] / 2
        scope["waste"] = torch.ones(100)

    def add(scope: Scope) -> None:
        scope["x"] = scope["x"] + 1
        scope["more"] = float(scope["x"]) >= 3

    load = TaskNode(0, 0, 4, lambda scope: {"x": torch.tensor(10.0 * scope.index), "more": True})
    cond = TaskNode(0, 1, 4, node_type=NodeType.COND, cond_var_name="more")
    body = TaskNode(0, 2, 4, halve)
    there = TaskNode(1, 3, 4, add)
    keep = TaskNode(
        0, 4, 4, lambda scope: scope.root.setdefault("found", {}).update({scope.index: dict(scope)})
    )
    connect(load, cond, buffer_size=2)
    connect(cond, body)
    connect(body, there, carries=("x",))
    connect(there, cond, dependency=Dependency.LOOP, carries=("x", "more"))
    connect(cond, keep, dependency=Dependency.STOP_LOOP, carries=("x",))
    graph = Graph([load, cond, body, there, keep])
    carriers = [Carrier(graph, connect_bus(t)) for t in MemoryTransport.group(2)]
    root, _ = drive([carrier.work() for carrier in carriers])

    def expected(x: float) -> float:
        while True:
            x = x / 2 + 1
            if x < 3:
                return x

    # only what the way out carries is left of a scope
    assert root["found"] == {k: {"x": torch.tensor(expected(10.0 * k))} for k in range(4)}
    assert [carrier.scopes for carrier in carriers] == [{}, {}]


def test_what_the_loop_made_is_freed_when_a_scope_leaves() -> None:
    sizes: list[int] = []
    carriers: list[Carrier] = []

    def grow(scope: Scope) -> None:
        scope["cache"] = {"k": torch.zeros(10 * (scope.step + 1)), "v": [torch.zeros(4)]}
        scope["more"] = scope.step < scope.index
        sizes.append(carriers[0].nbytes())

    start = TaskNode(0, 0, 3, lambda _: {"more": True}, NodeType.START)
    cond = TaskNode(0, 1, 3, node_type=NodeType.COND, cond_var_name="more")
    body = TaskNode(0, 2, 3, grow)
    end = TaskNode(0, 3, 3)
    connect(start, cond, buffer_size=3)
    connect(cond, body)
    connect(body, cond, dependency=Dependency.LOOP)
    connect(cond, end, dependency=Dependency.STOP_LOOP)
    (bus,) = (connect_bus(t) for t in MemoryTransport.group(1))
    carriers.append(Carrier(Graph([start, cond, body, end]), bus))
    drive([carriers[0].work()])
    one, two, three = (4 * (10 * n + 4) for n in (1, 2, 3))
    # scope 0 leaves after its first step, scope 1 after its second
    assert sizes == [one, one, 2 * one, two + one, two, three]
    assert carriers[0].nbytes() == 0


# ---- random graphs


@st.composite
def acyclic(draw: st.DrawFn) -> Graph:
    """Tasks on some ranks, edges upwards only, buffers of any size."""
    count = draw(st.integers(1, 8))
    times = draw(st.integers(1, 6))
    ranks = draw(st.integers(1, 3))
    tasks = []
    for number in range(count):
        steps = draw(st.integers(1, times))
        amplifies = draw(st.booleans()) and steps > 1
        tasks.append(
            TaskNode(
                0 if number == 0 else draw(st.integers(0, ranks - 1)),
                number,
                times,
                node_type=NodeType.AMPLIFIER if amplifies else NodeType.COMPUTE,
                run_pre_steps=steps if amplifies else 1,
                run_at_offset=draw(st.integers(0, steps - 1)) if amplifies else 0,
                priority=draw(st.integers(-1, 1)),
            )
        )
    for below in range(1, count):
        for above in draw(st.sets(st.integers(0, below - 1), max_size=3)):
            connect(tasks[above], tasks[below], buffer_size=draw(st.sampled_from([1, 2, 3, INFINITE])))
    return Graph(tasks)


@settings(deadline=None)  # other work on the machine may stop a run for longer than that
@given(acyclic(), st.integers(0, 1000))
def test_random_graphs_run_to_their_end_with_every_scope_once_and_in_order(graph: Graph, seed: int) -> None:
    ran = shuffled(graph, seed)
    for task in graph.nodes.values():
        if task.task_id >= 0:
            own = [e for e in ran[task.rank] if e.task is task]
            assert [e.scope for e in own] == list(range(graph.max_run_times))
            executed = [e.scope for e in own if e.executed]
            assert executed == list(range(task.run_at_offset, graph.max_run_times, task.run_pre_steps))


@given(
    st.integers(1, 3),
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 1000),
)
def test_random_loops_run_to_their_end(
    stages: int, lengths: list[int], batch: int, buffer: int, continuous: bool, seed: int
) -> None:
    graph = stream(stages, len(lengths), batch, lengths.__getitem__, continuous=continuous, buffer=buffer)
    for ran in shuffled(graph, seed):
        sent = [(e.scope, e.step) for e in ran if e.task.name == "send"]
        assert sorted(sent) == [(k, step) for k, n in enumerate(lengths) for step in range(n)]
        assert sorted(e.scope for e in ran if e.task.name == "end") == list(range(len(lengths)))
        if not continuous:
            for start in range(0, len(lengths), batch):
                own = [(step, k) for k, step in sent if start <= k < start + batch]
                assert own == sorted(own)


# ---- errors


def test_an_error_in_a_task_is_told_to_every_rank() -> None:
    def fail(scope: Scope) -> None:
        if scope.index == 1:
            raise ArithmeticError("the sky fell")

    a, b, c = TaskNode(0, 0, 3), TaskNode(1, 1, 3, fail, name="bad"), TaskNode(2, 2, 3)
    connect(a, b)
    connect(b, c)
    graph = Graph([a, b, c])
    works = [Carrier(graph, connect_bus(t)).work() for t in MemoryTransport.group(3)]
    errors: dict[int, BaseException] = {}
    for _ in range(10):
        for rank, work in enumerate(works):
            if rank not in errors:
                try:
                    next(work)
                except (TaskError, PeerError) as error:
                    errors[rank] = error
    assert isinstance(errors[1], TaskError)
    assert str(errors[1]) == (
        "rank 1: job bad (Compute, task 1 on rank 1) in scope 1 failed: ArithmeticError: the sky fell"
    )
    for rank in (0, 2):
        text = str(errors[rank])
        assert isinstance(errors[rank], PeerError)
        assert text.startswith(f"rank {rank}: stopped because rank 1 failed in job bad (Compute, task 1")
        assert "in scope 1: ArithmeticError: the sky fell" in text
        assert 'raise ArithmeticError("the sky fell")' in text  # the traceback's end
        assert f"rank {rank} was at:" in text


def test_what_is_left_of_a_failed_run_is_not_taken_for_the_next() -> None:
    transports = MemoryTransport.group(2)
    buses = [connect_bus(t) for t in transports]
    a, b = TaskNode(0, 0, 3, lambda scope: {"x": scope.index}), TaskNode(1, 1, 3)
    connect(a, b, carries=("x",))
    for _ in range(2):
        roots = drive([Carrier(Graph([a, b]), bus).work() for bus in buses])
        assert len(roots) == 2
