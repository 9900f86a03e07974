"""A task: a program, the rank it runs on, and the edges by which it gets scopes and hands them on.

Every rank describes the whole graph; only the programs of its own tasks are called there. An edge has a buffer: the
task above may be that many scopes ahead of the task below. Buffers alone make 1F1B (see `training_graph`).

Fields and calls have the names of Paddle's fleet executor.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from .scope import Scope

#: of a buffer: as many as there are
INFINITE: Final = -1


class NodeType(enum.Enum):
    """COMPUTE runs its program for each scope. AMPLIFIER runs it in one of every run_pre_steps. START opens a loop
    batch by batch, COND decides whether a scope goes through the loop again. SOURCE and SINK are added by the graph."""

    COMPUTE = "Compute"
    AMPLIFIER = "Amplifier"
    START = "Start"
    COND = "Cond"
    SOURCE = "Source"
    SINK = "Sink"


class Dependency(enum.Enum):
    """NORMAL: once for each scope (inside of a loop, for each scope and step). LOOP: back to the Cond. STOP_LOOP: out
    of the loop."""

    NORMAL = "NORMAL"
    LOOP = "LOOP"
    STOP_LOOP = "STOP_LOOP"


#: What a task does in one scope. What it returns: None; a dict, whose entries go into the scope; or a generator that
#: yields the receives that it waits for (`runtime.stepping.Work`), which is run to its end.
Program: TypeAlias = Callable[[Scope], Any]


@dataclass(frozen=True, slots=True)
class Link:
    """One end of an edge: the other task, and how the two depend on each other.

    buffer_size: scopes that the task above may be ahead; INFINITE: any number. carries: names of the variables that
    go with a scope to another rank (inside of a rank tasks share the scope). keep: False takes them out of the
    sender's scope when they are sent. gate: the task below runs nothing before this many scopes have come."""

    task_id: int
    buffer_size: int
    dependency: Dependency
    carries: tuple[str, ...] = ()
    keep: bool = True
    gate: int = 1


@dataclass(eq=False)
class TaskNode:
    """One task of a fleet graph.

    rank, task_id: whole numbers from 0; a task id is unique in the graph. max_run_times: scopes (micro-batches) of a
    run, the same for all tasks of a graph. program: what it does in a scope; None: nothing, its messages flow. name:
    for messages and traces. run_pre_steps, run_at_offset: an Amplifier's program runs in the runs k (counted from 0)
    with k mod run_pre_steps = run_at_offset. cond_var_name: the variable of the scope by which a Cond decides.
    continuous: a Start opens the next scope as soon as one has left the loop, instead of batch by batch. priority:
    of the tasks of a rank that could run, the one with the highest does, the earlier one in the graph among equals.
    """

    rank: int
    task_id: int
    max_run_times: int
    program: Program | None = None
    node_type: NodeType = NodeType.COMPUTE
    name: str = ""
    run_pre_steps: int = 1
    run_at_offset: int = 0
    cond_var_name: str | None = None
    continuous: bool = False
    priority: int = 0
    upstream: dict[int, Link] = field(default_factory=dict, init=False)
    downstream: dict[int, Link] = field(default_factory=dict, init=False)

    def add_upstream_task(
        self,
        task_id: int,
        buffer_size: int = 2,
        dependency: Dependency = Dependency.NORMAL,
        *,
        gate: int = 1,
    ) -> None:
        """The edge's lower end. The task `task_id` needs the upper end, with the same size and dependency."""
        self.upstream[task_id] = Link(task_id, buffer_size, dependency, gate=gate)

    def add_downstream_task(
        self,
        task_id: int,
        buffer_size: int = 2,
        dependency: Dependency = Dependency.NORMAL,
        *,
        carries: tuple[str, ...] = (),
        keep: bool = True,
    ) -> None:
        """The edge's upper end. The task `task_id` needs the lower end, with the same size and dependency."""
        self.downstream[task_id] = Link(task_id, buffer_size, dependency, tuple(carries), keep)

    def __str__(self) -> str:
        name = f"{self.name} " if self.name else ""
        return f"{name}({self.node_type.value}, task {self.task_id} on rank {self.rank})"


def connect(
    above: TaskNode,
    below: TaskNode,
    *,
    buffer_size: int = 2,
    dependency: Dependency = Dependency.NORMAL,
    carries: tuple[str, ...] = (),
    keep: bool = True,
    gate: int = 1,
) -> None:
    """Both ends of an edge."""
    above.add_downstream_task(below.task_id, buffer_size, dependency, carries=carries, keep=keep)
    below.add_upstream_task(above.task_id, buffer_size, dependency, gate=gate)
