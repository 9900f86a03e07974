"""For tests: graphs without programs, one state machine alone, and what a run of all ranks did."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from pipeloom.fleet import (
    INFINITE,
    Carrier,
    Dependency,
    Event,
    Graph,
    NodeType,
    TaskNode,
    connect,
    connect_bus,
    run_here,
)
from pipeloom.fleet.interceptor import Interceptor, Run
from pipeloom.fleet.messages import Kind, Message
from pipeloom.fleet.scope import Scope
from pipeloom.runtime.transport import MemoryTransport, Receive


def chain(*types: NodeType, times: int = 3, **fields: object) -> list[TaskNode]:
    """Tasks 0, 1, … on rank 0, not connected; fields go to the last one."""
    tasks = [TaskNode(0, number, times, node_type=kind) for number, kind in enumerate(types[:-1])]
    return [*tasks, TaskNode(0, len(types) - 1, times, node_type=types[-1], **fields)]  # type: ignore[arg-type]


class Script:
    """One interceptor, spoken to by hand: `tell` gives the messages that it answers, `run` those that follow from what
    it offers."""

    def __init__(self, interceptor: Interceptor) -> None:
        self.interceptor = interceptor

    def tell(self, kind: Kind, source: int, scope: int, **numbers: int) -> list[str]:
        own = self.interceptor.node.task_id
        return words(self.interceptor.receive(Message(kind, source, own, scope, **numbers)))

    def ready(self, source: int, scope: int, **numbers: int) -> list[str]:
        return self.tell(Kind.DATA_IS_READY, source, scope, **numbers)

    def credit(self, source: int, scope: int = 0) -> list[str]:
        return self.tell(Kind.DATA_IS_USELESS, source, scope)

    @property
    def offered(self) -> tuple[int, int] | None:
        """(scope, step) of what it could run."""
        run = self.interceptor.offer()
        return None if run is None else (run.scope, run.step)

    def run(self, goes_on: bool = False) -> list[str]:
        run = self.interceptor.offer()
        assert run is not None, "nothing can run"
        return words(self.interceptor.ran(run, goes_on))

    def offer(self) -> Run:
        run = self.interceptor.offer()
        assert run is not None
        return run


def words(messages: Sequence[Message]) -> list[str]:
    return [
        f"{m.kind.name} {m.destination} {m.scope}" + (f" @{m.gen_step}" if m.gen_step else "")
        for m in messages
    ]


def stream(
    stages: int,
    scopes: int,
    batch: int,
    length: Callable[[int], int],
    *,
    continuous: bool = False,
    buffer: int = 0,
) -> Graph:
    """The graph of generation: scope k takes length(k) turns. buffer: from send to recv; 0: stages − s."""

    def start(scope: Scope) -> None:
        scope["more"] = True

    def recv(scope: Scope) -> None:
        scope["more"] = scope.step + 1 < length(scope.index)

    tasks: dict[tuple[str, int], TaskNode] = {}
    for s in range(stages):
        for number, name in enumerate(("start", "cond", "send", "recv", "end")):
            tasks[name, s] = TaskNode(
                s,
                s * 5 + number,
                scopes,
                {"start": start, "recv": recv}.get(name),
                {"start": NodeType.START, "cond": NodeType.COND}.get(name, NodeType.COMPUTE),
                name,
                cond_var_name="more" if name == "cond" else None,
                continuous=continuous and name == "start",
            )
    for s in range(stages):
        connect(tasks["start", s], tasks["cond", s], buffer_size=batch)
        connect(tasks["cond", s], tasks["send", s], buffer_size=INFINITE)
        connect(tasks["send", s], tasks["recv", s], buffer_size=buffer or stages - s)
        connect(tasks["recv", s], tasks["cond", s], buffer_size=INFINITE, dependency=Dependency.LOOP)
        connect(tasks["cond", s], tasks["end", s], buffer_size=INFINITE, dependency=Dependency.STOP_LOOP)
        if s + 1 < stages:
            connect(tasks["send", s], tasks["send", s + 1])
            connect(tasks["recv", stages - 1], tasks["recv", s], buffer_size=INFINITE)
    return Graph(tasks.values())


def events(graph: Graph) -> list[list[Event]]:
    """What each rank ran, in its order."""
    ran: list[list[Event]] = [[] for _ in range(graph.ranks)]
    run_here(graph, observe=lambda event: ran[event.task.rank].append(event))
    return ran


def shuffled(graph: Graph, seed: int) -> list[list[Event]]:
    """The same of a run in which the rank that goes on is drawn at random: some hurry, some straggle."""
    ran: list[list[Event]] = [[] for _ in range(graph.ranks)]
    works = [
        Carrier(graph, connect_bus(t), observe=lambda e: ran[e.task.rank].append(e)).work()
        for t in MemoryTransport.group(graph.ranks)
    ]
    rng = random.Random(seed)
    waiting: dict[int, Receive] = {}
    left = set(range(graph.ranks))
    while left:
        able = [rank for rank in sorted(left) if rank not in waiting or waiting[rank].ready()]
        assert able, "no rank can go on"
        rank = rng.choice(able)
        try:
            waiting[rank] = next(works[rank])
        except StopIteration:
            left.discard(rank)
    return ran
