"""What is refused when a graph is built, in which words; and what a good one knows."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from fleet_scripts import chain, stream

from pipeloom.fleet import INFINITE, Dependency, Graph, GraphError, NodeType, TaskNode, connect

COMPUTE, AMPLIFIER, START, COND = NodeType.COMPUTE, NodeType.AMPLIFIER, NodeType.START, NodeType.COND
LOOP, STOP = Dependency.LOOP, Dependency.STOP_LOOP


def refused(tasks: list[TaskNode], words: str) -> None:
    with pytest.raises(GraphError, match=re.escape(words)):
        Graph(tasks)


def test_no_tasks() -> None:
    refused([], "the graph has no task")


def test_numbers_of_tasks() -> None:
    refused([TaskNode(0, -1, 1)], "rank and task_id are whole numbers from 0 on")
    refused([TaskNode(-1, 0, 1)], "rank and task_id are whole numbers from 0 on")
    refused([TaskNode(0, 7, 1), TaskNode(1, 7, 1)], "have the same task_id")
    refused([TaskNode(0, 0, 2), TaskNode(0, 1, 3)], "max_run_times is 3, of (Compute, task 0 on rank 0) 2")
    refused([TaskNode(0, 0, 0)], "at least 1")


def test_an_unknown_id() -> None:
    (task,) = chain(COMPUTE)
    task.add_downstream_task(5)
    refused([task], "(Compute, task 0 on rank 0): its downstream task 5 is not in the graph")
    (task,) = chain(COMPUTE)
    task.add_upstream_task(5)
    refused([task], "its upstream task 5 is not in the graph")


def test_one_end_of_an_edge_without_the_other() -> None:
    a, b = chain(COMPUTE, COMPUTE)
    a.add_downstream_task(1)
    refused([a, b], "but that one doesn't have it as upstream")
    a, b = chain(COMPUTE, COMPUTE)
    b.add_upstream_task(0)
    refused([a, b], "but that one doesn't have it as downstream")


def test_ends_that_differ() -> None:
    a, b = chain(COMPUTE, COMPUTE)
    a.add_downstream_task(1, 2)
    b.add_upstream_task(0, 3)
    refused([a, b], "differ: 2 NORMAL here, 3 NORMAL there")


@pytest.mark.parametrize("size", [0, -2])
def test_sizes_that_are_none(size: int) -> None:
    a, b = chain(COMPUTE, COMPUTE)
    connect(a, b, buffer_size=size)
    refused([a, b], f"has size {size}: write a size from 1 on, or -1 for an infinite one")


def test_gates() -> None:
    a, b = chain(COMPUTE, COMPUTE)
    connect(a, b, buffer_size=2, gate=3)
    refused([a, b], "waits for 3 scopes of (Compute, task 0 on rank 0), but the edge's buffer has room for 2")
    a, b = chain(COMPUTE, COMPUTE)
    connect(a, b, buffer_size=INFINITE, gate=4)
    refused([a, b], "is 4; write 1 (none) to max_run_times 3")


def test_amplifiers() -> None:
    refused(chain(AMPLIFIER, run_pre_steps=2, run_at_offset=2), "0 ≤ run_at_offset < run_pre_steps")
    refused(chain(AMPLIFIER, run_pre_steps=0), "run_pre_steps ≥ 1")
    refused(chain(COMPUTE, run_pre_steps=2), "run_pre_steps is an Amplifier's")


def test_a_loop_without_cond() -> None:
    a, b = chain(COMPUTE, COMPUTE)
    connect(a, b)
    connect(b, a)
    refused([a, b], "a loop without Cond: (Compute, task 0 on rank 0) → (Compute, task 1 on rank 0) → back")
    a, b = chain(COMPUTE, COMPUTE)
    connect(a, b)
    connect(b, a, dependency=LOOP)
    refused([a, b], "a loop without Cond")


def loop(change: Callable[[dict[str, TaskNode]], None]) -> list[TaskNode]:
    """Start, Cond, a body and an end, with something changed."""
    names = ("start", "cond", "body", "end", "other")
    kinds = (START, COND, COMPUTE, COMPUTE, COMPUTE)
    tasks = {
        name: TaskNode(0, i, 2, node_type=kind, name=name, cond_var_name="go" if kind is COND else None)
        for i, (name, kind) in enumerate(zip(names, kinds, strict=True))
    }
    connect(tasks["start"], tasks["cond"])
    connect(tasks["cond"], tasks["body"])
    connect(tasks["body"], tasks["cond"], dependency=LOOP)
    connect(tasks["cond"], tasks["end"], dependency=STOP)
    change(tasks)
    return list(tasks.values())


def test_a_good_loop() -> None:
    graph = Graph(loop(lambda _: None))
    assert [graph.loop_of(i) for i in range(5)] == [[], [], [1], [], []]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: setattr(t["cond"], "cond_var_name", None), "a Cond has a cond_var_name"),
        (lambda t: setattr(t["body"], "cond_var_name", "x"), "and no other task does"),
        (lambda t: setattr(t["body"], "continuous", True), "continuous is a Start's"),
        (lambda t: connect(t["other"], t["start"]), "a Start has no upstream"),
        (lambda t: connect(t["start"], t["other"]), "a Start has one downstream, a Cond"),
        (lambda t: connect(t["start"], t["cond"], buffer_size=INFINITE), "can't be infinite"),
        (lambda t: connect(t["other"], t["cond"]), "it has 2 NORMAL and 1 LOOP"),
        (lambda t: connect(t["cond"], t["end"]), "it has 2 NORMAL"),
        (lambda t: connect(t["body"], t["other"], dependency=STOP), "only a Cond's edges do: make it NORMAL"),
        (lambda t: connect(t["body"], t["other"]), "other (Compute, task 4 on rank 0) hangs on the loop"),
        (lambda t: connect(t["other"], t["body"]), "its upstream other (Compute, task 4 on rank 0) is not"),
    ],
)
def test_loops_that_cannot_run(change: Callable[[dict[str, TaskNode]], None], words: str) -> None:
    refused(loop(change), words)


def test_loops_cannot_be_nested() -> None:
    def nest(tasks: dict[str, TaskNode]) -> None:
        inner = TaskNode(0, 5, 2, node_type=COND, name="inner", cond_var_name="go")
        leave = TaskNode(0, 6, 2, name="leave")
        tasks.update(inner=inner, leave=leave)
        connect(tasks["body"], inner)
        connect(inner, tasks["other"])
        connect(tasks["other"], inner, dependency=LOOP)
        connect(inner, leave, dependency=STOP)
        connect(leave, tasks["cond"], dependency=LOOP)

    refused(loop(nest), "inner (Cond, task 5 on rank 0) is inside of another loop")


def test_sources_and_sinks_are_added_where_they_are_needed() -> None:
    a, b = TaskNode(0, 0, 2), TaskNode(1, 1, 2)
    connect(a, b)
    graph = Graph([a, b])
    kinds = {(task.rank, task.node_type) for task in graph.nodes.values()}
    assert kinds == {
        (0, COMPUTE),
        (1, COMPUTE),
        (0, NodeType.SOURCE),
        (1, NodeType.SINK),
    }
    refused([TaskNode(0, 0, 1, node_type=NodeType.SINK)], "Sources and Sinks are added by the graph")


def test_the_tasks_of_a_loop_know_who_ends_it() -> None:
    graph = stream(2, 4, 2, lambda _: 1)
    assert graph.loop_of(2) == [1]  # send of stage 0
    assert graph.loop_of(7) == [1, 6]  # send of stage 1: stage 0's scopes go through it too
    assert graph.governed(1) == graph.governed(6) == []


def test_a_rank_without_a_cond_is_told_by_the_one_that_has_it() -> None:
    start, cond, here, there, end = (
        TaskNode(rank, i, 2, node_type=kind, cond_var_name="go" if kind is COND else None)
        for i, (rank, kind) in enumerate([(0, START), (0, COND), (0, COMPUTE), (1, COMPUTE), (0, COMPUTE)])
    )
    connect(start, cond)
    connect(cond, here)
    connect(here, there)
    connect(there, cond, dependency=LOOP)
    connect(cond, end, dependency=STOP)
    assert Graph([start, cond, here, there, end]).governed(1) == [3]
