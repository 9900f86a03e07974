"""The graphs of training: 1F1B, F-then-B and ZB-H1 out of credits, gates and priorities.

    rank s        lr ──▶ fwd ──(S − s)──▶ bwd ──▶ opt
    between       fwd of stage s ──▶ fwd of stage s + 1          bwd of stage s + 1 ──▶ bwd of stage s

The buffer from fwd to bwd alone bounds the forwards that are alive, and makes 1F1B of an eager graph: stage s may be
S − s micro-batches ahead of its own backward. FThenB gates bwd on all M forwards instead. ZBH1 splits bwd into bwd_b,
which the stage below waits for, and bwd_w, which runs when nothing else can; the buffer of max(1, s) between them keeps
what waits for its bwd_w from piling up. Task ids are rank·n + the place in the rank's list, as in Paddle's fleet
executor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from ..strategy.values import FLEET_SCHEDULES
from .graph import Graph
from .task_node import NodeType, Program, TaskNode, connect

#: of the tasks that could run on a rank: what ends a micro-batch goes before what begins one
_PRIORITY: Final = {"lr": 4, "opt": 4, "bwd": 3, "bwd_b": 3, "fwd": 2, "bwd_w": 1}

#: (stage above, stage below)
Edge = tuple[int, int]
ProgramOf = Callable[[int, str], Program | None]


def variable(direction: str, edge: Edge) -> str:
    """The name under which an edge's values travel."""
    return f"{direction}{edge[0]}>{edge[1]}"


def training_graph(
    schedule: str,
    stages: int,
    micro_batches: int,
    program: ProgramOf,
    forward: Collection[Edge] | None = None,
    backward: Collection[Edge] | None = None,
) -> Graph:
    """The graph of a training step. program(rank, task name): what the task does, None where it is another rank's.
    forward, backward: the edges between stages; None: of a plain chain. An edge over k stages has room for k + 1
    scopes, so that its two ends may be as far from each other as on the way through all of them."""
    if schedule not in FLEET_SCHEDULES:
        raise ValueError(f"there is no fleet graph for {schedule!r}: {', '.join(FLEET_SCHEDULES)}")
    forward = [(s, s + 1) for s in range(stages - 1)] if forward is None else forward
    backward = [(s + 1, s) for s in range(stages - 1)] if backward is None else backward
    last, names = "bwd", ["lr", "fwd", "bwd", "opt"]
    if schedule == "ZBH1":
        last, names = "bwd_b", ["lr", "fwd", "bwd_b", "bwd_w", "opt"]
    tasks: list[dict[str, TaskNode]] = []
    for s in range(stages):
        own = {
            name: _task(s, s * len(names) + number, micro_batches, name, program)
            for number, name in enumerate(names)
        }
        ahead = micro_batches if schedule == "FThenB" else stages - s
        connect(own["lr"], own["fwd"])
        connect(own["fwd"], own[last], buffer_size=ahead, gate=ahead if schedule == "FThenB" else 1)
        if schedule == "ZBH1":
            connect(own["bwd_b"], own["bwd_w"], buffer_size=max(1, s))
            connect(own["bwd_w"], own["opt"])
        else:
            connect(own["bwd"], own["opt"])
        tasks.append(own)
    _connect_stages(tasks, "fwd", "F", forward)
    _connect_stages(tasks, last, "B", backward)
    return Graph(task for own in tasks for task in own.values())


def evaluation_graph(
    stages: int, micro_batches: int, program: ProgramOf, forward: Collection[Edge] | None = None
) -> Graph:
    """Forwards alone."""
    forward = [(s, s + 1) for s in range(stages - 1)] if forward is None else forward
    tasks = [{"fwd": _task(s, s, micro_batches, "fwd", program)} for s in range(stages)]
    _connect_stages(tasks, "fwd", "F", forward)
    return Graph(own["fwd"] for own in tasks)


def _task(rank: int, task_id: int, micro_batches: int, name: str, program: ProgramOf) -> TaskNode:
    """lr and opt run once a step: in the first scope, and in the last."""
    once = name in ("lr", "opt")
    return TaskNode(
        rank,
        task_id,
        micro_batches,
        program(rank, name),
        NodeType.AMPLIFIER if once else NodeType.COMPUTE,
        name,
        run_pre_steps=micro_batches if once else 1,
        run_at_offset=micro_batches - 1 if name == "opt" else 0,
        priority=_PRIORITY[name],
    )


def _connect_stages(
    tasks: list[dict[str, TaskNode]], name: str, direction: str, edges: Collection[Edge]
) -> None:
    for edge in sorted(edges):
        above, below = edge
        connect(
            tasks[above][name],
            tasks[below][name],
            buffer_size=abs(above - below) + 1,
            carries=(variable(direction, edge),),
            keep=False,
        )
