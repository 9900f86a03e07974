"""A graph of task nodes, checked when it is built: what can't run is refused before anything is sent.

Takes the tasks of all ranks; adds a Source and a Sink on each rank that needs one. Gives each rank its tasks, and
says which tasks lie inside of which loop.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import networkx as nx

from .task_node import INFINITE, Dependency, Link, NodeType, TaskNode


class GraphError(ValueError):
    """A graph that can't run: says which task, what is wrong with it, and what to do."""


class Graph:
    """The tasks of all ranks. Raises GraphError.

    nodes: by task id, the added Sources and Sinks among them (their ids are negative). ranks: how many there are, so
    1 + the highest. max_run_times: scopes of a run. The tasks are copied: changing one afterwards changes nothing.
    """

    def __init__(self, tasks: Iterable[TaskNode]) -> None:
        given = list(tasks)
        self._check_tasks(given)
        copies = {task.task_id: _copied(task) for task in given}
        self.max_run_times = given[0].max_run_times
        self.ranks = 1 + max(task.rank for task in given)
        for task in copies.values():
            _check_edges(task, copies)
        for task in copies.values():
            _check_type(task, copies)
        self._bodies = {
            task.task_id: _body(task, copies) for task in copies.values() if task.node_type is NodeType.COND
        }
        self._check_loops(copies)
        self._add_ends(copies)
        self.nodes: Mapping[int, TaskNode] = MappingProxyType(copies)

    def tasks(self, rank: int) -> list[TaskNode]:
        """The tasks of a rank, its Source and Sink among them, in the order in which they were given."""
        return [task for task in self.nodes.values() if task.rank == rank]

    def loop_of(self, task_id: int) -> list[int]:
        """The Conds through whose loops the task's scopes go, ascending; for a task outside of loops, none."""
        return sorted(cond for cond, body in self._bodies.items() if task_id in body)

    def governed(self, cond: int) -> list[int]:
        """Tasks of this Cond's loop whose rank has no Cond of that loop: it tells them when a scope has left."""
        return sorted(t for t in self._bodies[cond] if not self._decides_itself(t))

    def edges(self) -> list[tuple[TaskNode, TaskNode, Link]]:
        """(above, below, the upper end) of all edges."""
        return [
            (task, self.nodes[below], link)
            for task in self.nodes.values()
            for below, link in task.downstream.items()
        ]

    def _decides_itself(self, task_id: int) -> bool:
        """Whether a Cond on the task's rank has the task in its loop."""
        rank = self.nodes[task_id].rank
        return any(task_id in body and self.nodes[c].rank == rank for c, body in self._bodies.items())

    # ---- checks

    def _check_tasks(self, tasks: list[TaskNode]) -> None:
        if not tasks:
            raise GraphError("the graph has no task: give at least one")
        seen: dict[int, TaskNode] = {}
        for task in tasks:
            if task.rank < 0 or task.task_id < 0:
                raise GraphError(f"{task}: rank and task_id are whole numbers from 0 on")
            if task.task_id in seen:
                raise GraphError(
                    f"{task} and {seen[task.task_id]} have the same task_id: give each its own, across all ranks"
                )
            if task.max_run_times < 1 or task.max_run_times != tasks[0].max_run_times:
                raise GraphError(
                    f"{task}: max_run_times is {task.max_run_times}, of {tasks[0]} {tasks[0].max_run_times}: all tasks "
                    "of a graph run the same number of scopes, at least 1"
                )
            seen[task.task_id] = task

    def _check_loops(self, tasks: Mapping[int, TaskNode]) -> None:
        plain: nx.DiGraph = nx.DiGraph()
        for task in tasks.values():
            for below, link in task.downstream.items():
                if link.dependency is not Dependency.LOOP:
                    plain.add_edge(task.task_id, below)
        try:
            cycle = nx.find_cycle(plain)
        except nx.NetworkXNoCycle:
            cycle = []
        if cycle:
            way = " → ".join(str(tasks[a]) for a, _ in cycle)
            raise GraphError(
                f"a loop without Cond: {way} → back; let the edge that closes it have dependency LOOP, and end in a "
                "Cond"
            )
        inside = {t for body in self._bodies.values() for t in body}
        for task_id in sorted(inside):
            for above in tasks[task_id].upstream:
                if above not in inside and tasks[above].node_type is not NodeType.COND:
                    raise GraphError(
                        f"{tasks[task_id]} is inside of a loop, but its upstream {tasks[above]} is not: what comes "
                        "once can't go into every turn; let it pass through the Cond"
                    )
        for cond in self._bodies:
            if cond in inside:
                raise GraphError(f"{tasks[cond]} is inside of another loop: loops can't be nested")

    def _add_ends(self, tasks: dict[int, TaskNode]) -> None:
        for rank in range(self.ranks):
            own = [task for task in tasks.values() if task.rank == rank]
            source = TaskNode(
                rank, -2 * rank - 1, self.max_run_times, node_type=NodeType.SOURCE, name="source"
            )
            sink = TaskNode(rank, -2 * rank - 2, self.max_run_times, node_type=NodeType.SINK, name="sink")
            for task in own:
                if not task.upstream:
                    source.add_downstream_task(task.task_id, 1)
                    task.add_upstream_task(source.task_id, 1)
                if not task.downstream:
                    task.add_downstream_task(sink.task_id)
                    sink.add_upstream_task(task.task_id)
            tasks.update({end.task_id: end for end in (source, sink) if end.downstream or end.upstream})


def _copied(task: TaskNode) -> TaskNode:
    twin = copy.copy(task)
    twin.upstream, twin.downstream = dict(task.upstream), dict(task.downstream)
    return twin


def _check_edges(task: TaskNode, tasks: Mapping[int, TaskNode]) -> None:
    for way, links in (("downstream", task.downstream), ("upstream", task.upstream)):
        for other_id, link in links.items():
            if other_id not in tasks:
                close = difflib.get_close_matches(str(other_id), [str(t) for t in tasks], 1, 0.0)
                raise GraphError(
                    f"{task}: its {way} task {other_id} is not in the graph; add it, or name another one (such as "
                    f"{close[0]})"
                )
            other = tasks[other_id]
            back = (other.upstream if way == "downstream" else other.downstream).get(task.task_id)
            opposite = "upstream" if way == "downstream" else "downstream"
            if back is None:
                raise GraphError(
                    f"{task} has {other} as {way}, but that one doesn't have it as {opposite}: both ends of an edge "
                    "are written down (`connect` writes both)"
                )
            if back.buffer_size != link.buffer_size or back.dependency is not link.dependency:
                raise GraphError(
                    f"the ends of the edge between {task} and {other} differ: {link.buffer_size} "
                    f"{link.dependency.name} here, {back.buffer_size} {back.dependency.name} there"
                )
            if link.buffer_size == 0 or link.buffer_size < INFINITE:
                raise GraphError(
                    f"the buffer of the edge between {task} and {other} has size {link.buffer_size}: write a size "
                    f"from 1 on, or {INFINITE} for an infinite one"
                )
            if not 1 <= link.gate <= task.max_run_times:
                raise GraphError(
                    f"{task}: the gate of its edge from {other} is {link.gate}; write 1 (none) to max_run_times "
                    f"{task.max_run_times}"
                )
            if INFINITE < link.buffer_size < link.gate:
                raise GraphError(
                    f"{task} waits for {link.gate} scopes of {other}, but the edge's buffer has room for "
                    f"{link.buffer_size}: make it {link.gate}, or infinite ({INFINITE})"
                )


def _check_type(task: TaskNode, tasks: Mapping[int, TaskNode]) -> None:
    kind = task.node_type
    if kind in (NodeType.SOURCE, NodeType.SINK):
        raise GraphError(f"{task}: Sources and Sinks are added by the graph; use Compute")
    if task.run_pre_steps < 1 or not 0 <= task.run_at_offset < task.run_pre_steps:
        raise GraphError(
            f"{task}: run_pre_steps is {task.run_pre_steps} and run_at_offset {task.run_at_offset}; write "
            "run_pre_steps ≥ 1 and 0 ≤ run_at_offset < run_pre_steps"
        )
    if kind is not NodeType.AMPLIFIER and task.run_pre_steps > 1:
        raise GraphError(f"{task}: run_pre_steps is an Amplifier's; make it one, or leave it 1")
    if kind is not NodeType.START and task.continuous:
        raise GraphError(f"{task}: continuous is a Start's; make it one, or leave it False")
    if (task.cond_var_name is not None) != (kind is NodeType.COND):
        raise GraphError(f"{task}: a Cond has a cond_var_name, and no other task does")
    for below_id, link in task.downstream.items():
        below = tasks[below_id]
        if link.dependency is Dependency.LOOP and below.node_type is not NodeType.COND:
            raise GraphError(f"a loop without Cond: {task} goes back to {below}; a LOOP edge ends in a Cond")
        if link.dependency is Dependency.STOP_LOOP and kind is not NodeType.COND:
            raise GraphError(f"{task} → {below} leaves a loop, but only a Cond's edges do: make it NORMAL")
    if kind is NodeType.START:
        _check_start(task, tasks)
    if kind is NodeType.COND:
        _check_cond(task)


def _check_start(task: TaskNode, tasks: Mapping[int, TaskNode]) -> None:
    links = list(task.downstream.values())
    if task.upstream:
        raise GraphError(f"{task}: a Start has no upstream; its scopes come from the Source")
    if len(links) != 1 or tasks[links[0].task_id].node_type is not NodeType.COND:
        raise GraphError(
            f"{task}: a Start has one downstream, a Cond; the edge's buffer is the number of scopes in the loop"
        )
    if links[0].buffer_size == INFINITE:
        raise GraphError(f"{task}: the buffer to its Cond is the size of a batch, and can't be infinite")


def _check_cond(task: TaskNode) -> None:
    above = [link.dependency for link in task.upstream.values()]
    below = [link.dependency for link in task.downstream.values()]
    if above.count(Dependency.NORMAL) != 1 or Dependency.LOOP not in above:
        raise GraphError(
            f"{task}: a Cond has one NORMAL upstream (by which scopes come in) and at least one LOOP upstream (by "
            f"which they come back); it has {_counted(above)}"
        )
    if Dependency.NORMAL not in below or Dependency.STOP_LOOP not in below:
        raise GraphError(
            f"{task}: a Cond has at least one NORMAL downstream (the loop) and one STOP_LOOP downstream (the way "
            f"out); it has {_counted(below)}"
        )


def _counted(dependencies: list[Dependency]) -> str:
    kinds = [f"{dependencies.count(d)} {d.name}" for d in Dependency if d in dependencies]
    return " and ".join(kinds) or "none"


def _body(cond: TaskNode, tasks: Mapping[int, TaskNode]) -> set[int]:
    """The tasks that a Cond's scopes go through: from its NORMAL downstreams on, by NORMAL edges."""
    found: set[int] = set()
    coming = [b for b, link in cond.downstream.items() if link.dependency is Dependency.NORMAL]
    while coming:
        task_id = coming.pop()
        if task_id in found or task_id == cond.task_id:
            continue
        found.add(task_id)
        coming += [b for b, link in tasks[task_id].downstream.items() if link.dependency is Dependency.NORMAL]
    leaving = sorted(t for t in found if not tasks[t].downstream)
    if leaving:
        raise GraphError(
            f"{tasks[leaving[0]]} hangs on the loop of {cond} without a way back: what is inside of a loop leads "
            "back to a Cond by LOOP; what follows the loop hangs on the Cond by STOP_LOOP"
        )
    return found
