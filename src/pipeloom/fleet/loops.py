"""The state machines at the ends of a loop: Start lets scopes in, Cond sends them round or out.

A *batch* is the scopes that go through a loop together: they take their steps in one order, (step, scope), on all
ranks. Batch-wise, a Start lets generation_batch_size scopes in, and the next ones when all of those have left; the last
batch may be short. Continuously, each scope is a batch of its own, and one comes in for each that leaves. Scopes of
different batches don't wait for each other.

    Start ──(buffer: scopes in the loop)──▶ Cond ──NORMAL──▶ … the loop's tasks … ──LOOP──▶ Cond
                                             └────STOP_LOOP──▶ what follows
"""

from __future__ import annotations

from dataclasses import replace

from .graph import Graph
from .interceptor import Interceptor, Run, Turn
from .messages import Kind, Message
from .task_node import Dependency, TaskNode


class Start(Interceptor):
    """Runs its program for each scope of a batch, then announces the batch to its Cond. A credit comes back when a
    scope leaves the loop."""

    def __init__(self, node: TaskNode, graph: Graph) -> None:
        super().__init__(node, graph)
        (self._cond,) = node.downstream
        self._size = 1 if node.continuous else node.downstream[self._cond].buffer_size
        self._ready: dict[int, Message] = {}
        #: scopes of the batch that is being made up
        self._batch: list[Message] = []
        self.runs = 0

    def arrived(self, message: Message) -> list[Message]:
        self._ready[message.scope] = message
        return []

    def offer(self) -> Run | None:
        """Batch-wise, a batch is made up when the last one has left."""
        if not self._ready:
            return None
        open_ = self._held[self._cond]
        room = open_ == 0 if not self.node.continuous else self.has_room()
        return Run(self.node, min(self._ready), 0) if room else None

    def ran(self, run: Run, goes_on: bool = False) -> list[Message]:  # noqa: ARG002
        message = self._ready.pop(run.scope)
        self.runs += 1
        self._batch.append(message)
        sent = self.give_back(message)
        if len(self._batch) == self._size or self.runs == self.times:
            first, count = self._batch[0].scope, len(self._batch)
            for waiting in self._batch:
                announced = replace(waiting, start_micro_step=first, num_micro_step=count)
                sent += self.hand_on(Kind.DATA_IS_READY, announced, Dependency.NORMAL)
            self._batch = []
        return sent

    @property
    def done(self) -> bool:
        return self.runs == self.times


class Cond(Interceptor):
    """Evaluates the condition of a scope that comes in or back. True: the scope goes round (START_LOOP), as soon as
    all lower scopes of its batch that are still in the loop have got as far. False: it leaves (STOP_LOOP)."""

    def __init__(self, node: TaskNode, graph: Graph) -> None:
        super().__init__(node, graph)
        self._loops = [a for a, link in node.upstream.items() if link.dependency is Dependency.LOOP]
        self._governed = graph.governed(node.task_id)
        #: by turn: which of the LOOP edges it has come back by
        self._back: dict[Turn, set[int]] = {}
        #: to be evaluated, in order of arrival
        self._asked: dict[Turn, Message] = {}
        #: evaluated, and to go round
        self._waiting: dict[Turn, Message] = {}
        #: the step that each scope in the loop has set out for, by batch
        self._live: dict[int, dict[int, int]] = {}
        self.stopped = 0

    def arrived(self, message: Message) -> list[Message]:
        if message.source not in self._loops:
            if message.start_micro_step < 0:  # no Start above: a batch of its own
                message = replace(message, start_micro_step=message.scope, num_micro_step=1)
            message = replace(message, gen_step=0)
            start, count = message.start_micro_step, message.num_micro_step
            self._live.setdefault(start, dict.fromkeys(range(start, start + count), -1))
            self._asked[Turn(0, message.scope)] = message
            return []
        turn = Turn(message.gen_step + 1, message.scope)
        come = self._back.setdefault(turn, set())
        come.add(message.source)
        if len(come) == len(self._loops):
            del self._back[turn]
            self._asked[turn] = replace(message, gen_step=turn.step)
        return []

    def credited(self, message: Message) -> list[Message]:  # noqa: ARG002
        return self._released()

    def offer(self) -> Run | None:
        if not self._asked or not self.has_room(Dependency.STOP_LOOP):
            return None
        turn = next(iter(self._asked))
        return Run(self.node, turn.scope, turn.step)

    def ran(self, run: Run, goes_on: bool = False) -> list[Message]:
        turn = Turn(run.step, run.scope)
        message = self._asked.pop(turn)
        sent = self.give_back(message, Dependency.LOOP) if run.step else []
        if goes_on:
            self._waiting[turn] = message
        else:
            live = self._live[message.start_micro_step]
            del live[run.scope]
            if not live:
                del self._live[message.start_micro_step]
            self.stopped += 1
            sent += self.hand_on(Kind.STOP_LOOP, message, Dependency.STOP_LOOP)
            sent += [self.message(Kind.STOP_LOOP, task, message) for task in self._governed]
            sent += self.give_back(message, Dependency.NORMAL)
        return sent + self._released()

    def missing(self) -> list[int]:
        return super().missing() + ([] if self._asked else self._loops)

    @property
    def done(self) -> bool:
        return self.stopped == self.times

    def _released(self) -> list[Message]:
        """START_LOOP for what waits and may go, lowest turn first."""
        sent: list[Message] = []
        for turn in sorted(self._waiting):
            message = self._waiting[turn]
            live = self._live[message.start_micro_step]
            if not self.has_room(Dependency.NORMAL):
                break
            if all(step >= turn.step for scope, step in live.items() if scope < turn.scope):
                live[turn.scope] = turn.step
                del self._waiting[turn]
                sent += self.hand_on(Kind.START_LOOP, message, Dependency.NORMAL)
        return sent
