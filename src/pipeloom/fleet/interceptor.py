"""The state machines of task nodes: messages in, messages and runs out. No I/O, no clock, no values.

A carrier hands an interceptor each message for its task (`receive`), asks what it could run (`offer`), runs that, and
says so (`ran`). What comes back are messages to be delivered. So each of them can be tested by a script of messages,
without a process.

Credits bound what is in flight: an edge with a buffer of n lets the task above be n scopes ahead; each run below gives
one credit back (DATA_IS_USELESS). On infinite edges nothing is counted and nothing is sent back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .graph import Graph
from .messages import Kind, Message
from .task_node import INFINITE, Dependency, Link, NodeType, TaskNode

#: messages that bring a scope
_READY = (Kind.DATA_IS_READY, Kind.DATA_WITH_VARS, Kind.START_LOOP, Kind.STOP_LOOP)


class Turn(NamedTuple):
    """A scope on one of its ways through a task; ordered as a loop runs them. step: 0 outside of loops."""

    step: int
    scope: int


class ProtocolError(RuntimeError):
    """A message that doesn't fit the state of its task: the graphs of two ranks differ."""


@dataclass(frozen=True, slots=True)
class Run:
    """One scope to run. execute: False where the program is left out and only messages flow. step: the scope's
    gen_step."""

    task: TaskNode
    scope: int
    step: int
    execute: bool = True


class Interceptor:
    """What all of them have. done: nothing more will be run in this step. in_loop: the Conds whose loops the task is
    in."""

    def __init__(self, node: TaskNode, graph: Graph) -> None:
        self.node = node
        self.times = graph.max_run_times
        self.in_loop = graph.loop_of(node.task_id)
        #: the finite edges below: (task, size, dependency), and how many scopes each holds
        self._bounds = [
            (below, link.buffer_size, link.dependency)
            for below, link in node.downstream.items()
            if link.buffer_size != INFINITE
        ]
        self._held = {below: 0 for below, _, _ in self._bounds}
        #: the finite edges above, which get a credit for each run
        self._owed = [
            (above, link.dependency) for above, link in node.upstream.items() if link.buffer_size != INFINITE
        ]

    def receive(self, message: Message) -> list[Message]:
        """Takes a message for this task; what it answers at once. Raises ProtocolError."""
        if message.kind is Kind.DATA_IS_USELESS:
            if not self._held.get(message.source):
                raise self._unexpected(message)
            self._held[message.source] -= 1
            return self.credited(message)
        if message.kind in _READY and message.source in self.node.upstream:
            return self.arrived(message)
        raise self._unexpected(message)

    def offer(self) -> Run | None:
        """What could run now; None: nothing. Asking changes nothing."""
        return None

    def ran(self, run: Run, goes_on: bool = False) -> list[Message]:  # noqa: ARG002
        """The messages that follow from an offered run, now done. goes_on: what a Cond's condition was."""
        raise ProtocolError(f"{self.node} runs nothing")

    @property
    def done(self) -> bool:
        raise NotImplementedError

    def missing(self) -> list[int]:
        """The tasks that this one waits for."""
        return [below for below, size, _ in self._bounds if self._held[below] >= size]

    # ---- for subclasses

    def credited(self, message: Message) -> list[Message]:  # noqa: ARG002
        """A credit came back; already counted."""
        return []

    def arrived(self, message: Message) -> list[Message]:
        """A scope came from above."""
        raise NotImplementedError

    def has_room(self, *dependencies: Dependency) -> bool:
        """Whether every finite buffer below, on edges of these dependencies (none given: of any), has room."""
        for below, size, dependency in self._bounds:
            if self._held[below] >= size and (not dependencies or dependency in dependencies):
                return False
        return True

    def hand_on(self, kind: Kind, like: Message, *dependencies: Dependency) -> list[Message]:
        """Messages to the edges of these dependencies, each of which takes a credit."""
        sent = []
        for below, link in self.node.downstream.items():
            if link.dependency in dependencies:
                if below in self._held:
                    self._held[below] += 1
                sent.append(self.message(kind, below, like))
        return sent

    def give_back(self, like: Message, *dependencies: Dependency) -> list[Message]:
        """Credits to the finite edges above of these dependencies (none given: of any)."""
        return [
            self.message(Kind.DATA_IS_USELESS, above, like)
            for above, dependency in self._owed
            if not dependencies or dependency in dependencies
        ]

    def message(self, kind: Kind, destination: int, like: Message) -> Message:
        return Message(
            kind,
            self.node.task_id,
            destination,
            like.scope,
            like.gen_step,
            like.start_micro_step,
            like.num_micro_step,
        )

    def _unexpected(self, message: Message) -> ProtocolError:
        return ProtocolError(
            f"{self.node} can't take {message}: the ranks' graphs differ, or a message came twice"
        )


class Compute(Interceptor):
    """Runs the lowest scope that is ready from all upstreams while every finite out-buffer has room.

    In a loop: of the scopes that go through it together (a batch, see `loops.Start`), the one with the smallest open
    step runs first, in scope order; between batches, the one that has been ready for longest.
    """

    def __init__(self, node: TaskNode, graph: Graph) -> None:
        super().__init__(node, graph)
        #: by upstream task: the turns that have come and not been run, each with its message and a number that counts
        #: arrivals
        self._ready: dict[int, dict[Turn, tuple[int, Message]]] = {above: {} for above in node.upstream}
        self._come = dict.fromkeys(node.upstream, 0)
        self._arrivals = 0
        self.runs = 0
        self._gates = {above: link.gate for above, link in node.upstream.items() if link.gate > 1}
        self._conds = [a for a in node.upstream if graph.nodes[a].node_type is NodeType.COND]
        self._governors = [c for c in self.in_loop if node.task_id in graph.governed(c)]
        self._stopped = 0

    def receive(self, message: Message) -> list[Message]:
        if message.kind is Kind.STOP_LOOP and message.source in self._governors:
            self._stopped += 1
            return []
        return super().receive(message)

    def arrived(self, message: Message) -> list[Message]:
        turn = Turn(message.gen_step if self.in_loop else 0, message.scope)
        ready = self._ready[message.source]
        if turn in ready:
            raise self._unexpected(message)
        self._arrivals += 1
        ready[turn] = (self._arrivals, message)
        self._come[message.source] += 1
        return []

    def offer(self) -> Run | None:
        if not self.has_room() or any(self._come[above] < gate for above, gate in self._gates.items()):
            return None
        turn = self._next_in_loop() if self.in_loop else min(self._complete(), default=None)
        return None if turn is None else self._run(turn)

    def ran(self, run: Run, goes_on: bool = False) -> list[Message]:  # noqa: ARG002
        turn = Turn(run.step if self.in_loop else 0, run.scope)
        taken = [ready.pop(turn)[1] for ready in self._ready.values()]
        self.runs += 1
        message = taken[0]
        below = self.hand_on(Kind.DATA_IS_READY, message, Dependency.NORMAL, Dependency.LOOP)
        return below + self.give_back(message)

    @property
    def done(self) -> bool:
        if not self.in_loop:
            return self.runs == self.times
        return self._stopped == self.times * len(self._governors)

    def missing(self) -> list[int]:
        return super().missing() + [above for above, ready in self._ready.items() if not ready]

    def _run(self, turn: Turn) -> Run:
        _, message = next(iter(self._ready.values()))[turn]
        return Run(self.node, turn.scope, message.gen_step)

    def _complete(self) -> list[Turn]:
        """The turns that have come from all upstreams."""
        first, *others = self._ready.values()
        return [turn for turn in first if all(turn in ready for ready in others)]

    def _next_in_loop(self) -> Turn | None:
        """Of each batch the smallest open turn; of those the one that has been ready for longest."""
        complete = self._complete()
        least: dict[int, Turn] = {}
        # a Cond announces the turns that are open; elsewhere, those that could run are all that is known
        known = [t for cond in self._conds for t in self._ready[cond]] or complete
        for turn in known:
            batch = self._batch(turn)
            least[batch] = min(turn, least.get(batch, turn))
        able = [turn for turn in least.values() if turn in complete]
        return min(able, key=self._since, default=None)

    def _batch(self, turn: Turn) -> int:
        message = next(ready[turn][1] for ready in self._ready.values() if turn in ready)
        return message.start_micro_step

    def _since(self, turn: Turn) -> int:
        return max(ready[turn][0] for ready in self._ready.values())


class Amplifier(Compute):
    """Its program runs only in the runs k with k mod run_pre_steps = run_at_offset; messages flow in all of them."""

    def _run(self, turn: Turn) -> Run:
        run = super()._run(turn)
        if self.runs % self.node.run_pre_steps == self.node.run_at_offset:
            return run
        return Run(run.task, run.scope, run.step, execute=False)


class Source(Interceptor):
    """START → scope 0 to each downstream; each credit back → the next scope, until there have been as many as a run
    has."""

    def __init__(self, node: TaskNode, graph: Graph) -> None:
        super().__init__(node, graph)
        self._next = dict.fromkeys(node.downstream, 0)

    def receive(self, message: Message) -> list[Message]:
        if message.kind is Kind.START:
            return [self._scope_to(below) for below in self.node.downstream]
        return super().receive(message)

    def credited(self, message: Message) -> list[Message]:
        return [self._scope_to(message.source)] if self._next[message.source] < self.times else []

    @property
    def done(self) -> bool:
        return all(count == self.times for count in self._next.values())

    def _scope_to(self, below: int) -> Message:
        scope = self._next[below]
        self._next[below] += 1
        self._held[below] += 1
        return Message(Kind.DATA_IS_READY, self.node.task_id, below, scope)


class Sink(Interceptor):
    """Gives credits back; done when every upstream has sent all scopes."""

    def __init__(self, node: TaskNode, graph: Graph) -> None:
        super().__init__(node, graph)
        self._come = dict.fromkeys(node.upstream, 0)

    def arrived(self, message: Message) -> list[Message]:
        self._come[message.source] += 1
        link: Link = self.node.upstream[message.source]
        if link.buffer_size == INFINITE:
            return []
        return [self.message(Kind.DATA_IS_USELESS, message.source, message)]

    @property
    def done(self) -> bool:
        return all(count == self.times for count in self._come.values())
