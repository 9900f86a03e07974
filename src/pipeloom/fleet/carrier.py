"""One carrier a rank: its scopes, its interceptors, and the event loop that does all I/O of a run.

    carrier = Carrier(graph, bus)
    finish(carrier.work())             # over torch.distributed; `drive` for the ranks of one process

The loop delivers messages, asks the interceptors what could run, runs the task with the highest priority, and
delivers what follows. It decides nothing else. When a task raises, every rank is told (ERR) and raises: no rank
waits for ever.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import torch

from ..runtime.errors import JobError, PeerError, StepError, TransferError, describe
from ..runtime.stepping import Work
from .bus import Bus
from .graph import Graph, GraphError
from .interceptor import Amplifier, Compute, Interceptor, Run, Sink, Source
from .loops import Cond, Start
from .messages import Kind, Message, Value
from .post import Lost
from .scope import Scope
from .task_node import Dependency, NodeType, TaskNode

_INTERCEPTORS: dict[NodeType, type[Interceptor]] = {
    NodeType.COMPUTE: Compute,
    NodeType.AMPLIFIER: Amplifier,
    NodeType.START: Start,
    NodeType.COND: Cond,
    NodeType.SOURCE: Source,
    NodeType.SINK: Sink,
}
_CARRY = (Kind.DATA_IS_READY, Kind.START_LOOP, Kind.STOP_LOOP)
#: lines of a traceback that travel
_LINES = 12
#: characters of it
_MOST_TEXT = 4000


class Event(NamedTuple):
    """A run that is over. start, end: seconds (time.perf_counter). goes_on: of a Cond, what it decided."""

    task: TaskNode
    scope: int
    step: int
    executed: bool
    start: float
    end: float
    goes_on: bool


class TaskError(JobError):
    """A task's program raised. The cause is chained. rank, task, scope; told to every rank."""

    def __init__(self, rank: int, task: TaskNode, scope: int, cause: BaseException) -> None:
        super().__init__(rank, f"{task} in scope {scope}", cause)
        self.task = task
        self.scope = scope


class Carrier:
    """Runs one rank's part of a graph, once.

    root: the root scope (a new one if None). observe: told of each run that is over. grad: whether programs run with
    autograd. Raises GraphError if the graph has more ranks than the bus.
    """

    def __init__(
        self,
        graph: Graph,
        bus: Bus,
        root: Scope | None = None,
        observe: Callable[[Event], None] | None = None,
        grad: bool = False,
    ) -> None:
        if graph.ranks > bus.size:
            raise GraphError(
                f"the graph has tasks on {graph.ranks} ranks, but there are {bus.size}: start as many, or give its "
                "tasks other ranks"
            )
        self.graph = graph
        self.bus = bus
        self.rank = bus.rank
        #: what messages to the user call it
        self._number = bus.ranks[bus.rank]
        self.root = Scope() if root is None else root
        self.scopes: dict[int, Scope] = {}
        tasks = graph.tasks(self.rank)
        self.interceptors: dict[int, Interceptor] = {
            task.task_id: _INTERCEPTORS[task.node_type](task, graph) for task in tasks
        }
        self._observe = observe
        self._grad = grad
        #: when this rank, since its last run, began to wait, and ended; None: it didn't
        self.waited: tuple[float, float] | None = None
        self._here: deque[Message] = deque()
        by_priority = sorted(tasks, key=lambda task: -task.priority)
        self._order = [self.interceptors[task.task_id] for task in by_priority]
        #: how many tasks have still to let go of a scope
        self._users = sum(self._lets_go(task) for task in tasks)
        self._using: dict[int, int] = {}

    def work(self) -> Work[Scope]:
        """One run; the root scope. Raises TaskError, PeerError, TransferError."""
        self.bus.begin()
        try:
            yield from self._loop()
        except PeerError:
            raise  # who failed has told all ranks itself
        except Lost as lost:
            peer = self.bus.ranks[lost.peer]
            raise TransferError(self._number, peer, self.waits_for(), lost.reason) from lost
        except GeneratorExit:
            raise  # another rank of this process failed
        except BaseException as error:
            self._tell(error)
            raise
        return self.root

    @property
    def done(self) -> bool:
        return not self._here and all(interceptor.done for interceptor in self.interceptors.values())

    def scope(self, index: int) -> Scope:
        """A micro-batch's scope; made when it is first asked for."""
        if index not in self.scopes:
            self.scopes[index] = Scope(index, self.root)
            self._using[index] = self._users
        return self.scopes[index]

    def nbytes(self) -> int:
        """Bytes of all scopes but the root."""
        return sum(scope.nbytes for scope in self.scopes.values())

    def waits_for(self) -> str:
        """What this rank is at, in words."""
        open_ = [str(i.node) for i in self.interceptors.values() if not i.done and i.node.task_id >= 0]
        return f"the messages for {', '.join(open_[:3])}" if open_ else "the end of the run"

    def waits_on(self) -> list[int]:
        """The other ranks of which something is missing."""
        tasks = {task for i in self.interceptors.values() if not i.done for task in i.missing()}
        return sorted({self.graph.nodes[task].rank for task in tasks} - {self.rank})

    # ---- the loop

    def _loop(self) -> Work[None]:
        for interceptor in self.interceptors.values():
            if isinstance(interceptor, Source):
                start = Message(Kind.START, interceptor.node.task_id, interceptor.node.task_id)
                self._deliver_all(interceptor.receive(start), interceptor.node)
        while True:
            self._take_all()
            run = self._pick()
            if run is not None:
                yield from self._run(run)
                self.waited = None
            elif self.done:
                return
            else:
                began = perf_counter()
                news = self.bus.news(self.waits_for(), self.waits_on())
                while not news.ready():
                    yield news
                news.wait()
                self.waited = (began if self.waited is None else self.waited[0], perf_counter())

    def _take_all(self) -> None:
        while True:
            while self._here:
                self._receive(self._here.popleft(), {})
            parcel = self.bus.take()
            if parcel is None:
                return
            if parcel.message.kind is Kind.ERR:
                raise _peer_error(self._number, parcel.values, self.waits_for())
            self._receive(parcel.message, parcel.values)

    def _receive(self, message: Message, values: dict[str, Value]) -> None:
        interceptor = self.interceptors[message.destination]
        if values:
            self.scope(message.scope).update(values)
        if message.kind is Kind.STOP_LOOP and self._lets_go_now(interceptor, message):
            self._let_go(message.scope)
        self._deliver_all(interceptor.receive(message), interceptor.node)

    def _pick(self) -> Run | None:
        for interceptor in self._order:
            run = interceptor.offer()
            if run is not None:
                return run
        return None

    def _run(self, run: Run) -> Work[None]:
        task, scope = run.task, self.scope(run.scope)
        scope.step = run.step
        start = perf_counter()
        goes_on = False
        try:
            if run.execute and task.program is not None:
                with torch.set_grad_enabled(self._grad):
                    made = task.program(scope)
                if isinstance(made, Generator):
                    made = yield from made
                if made is not None:
                    scope.update(made)
            if task.cond_var_name is not None:
                goes_on = bool(scope[task.cond_var_name])
            messages = self.interceptors[task.task_id].ran(run, goes_on)
            self._deliver_all(messages, task)
        except StepError:
            raise
        except Exception as error:
            raise TaskError(self._number, task, run.scope, error) from error
        self._drop_sent(task, messages, scope)
        if self._observe is not None:
            self._observe(Event(task, run.scope, run.step, run.execute, start, perf_counter(), goes_on))
        if task.node_type is NodeType.COND:
            if not goes_on:
                self._leave_loop(task, scope)
        elif not self.interceptors[task.task_id].in_loop:
            self._let_go(run.scope)

    def _deliver_all(self, messages: list[Message], task: TaskNode) -> None:
        for message in messages:
            rank = self.graph.nodes[message.destination].rank
            if rank == self.rank:
                self._here.append(message)
            else:
                values = self._carried(message, task)
                if values and message.kind is Kind.DATA_IS_READY:
                    message = replace(message, kind=Kind.DATA_WITH_VARS)
                self.bus.send(rank, message, values)

    def _carried(self, message: Message, task: TaskNode) -> dict[str, Value]:
        link = task.downstream.get(message.destination)
        if link is None or not link.carries or message.kind not in _CARRY:
            return {}
        scope = self.scope(message.scope)
        return {name: scope[name] for name in link.carries}

    def _drop_sent(self, task: TaskNode, messages: list[Message], scope: Scope) -> None:
        for message in messages:
            link = task.downstream.get(message.destination)
            if link is not None and not link.keep and message.kind in _CARRY:
                for name in link.carries:
                    scope.pop(name, None)

    # ---- scopes end

    def _lets_go(self, task: TaskNode) -> bool:
        """Whether the task has to be done with a scope before that is freed: those outside of loops are after their
        run, a Cond when the scope leaves, those of a loop that a Cond elsewhere ends when it says so."""
        if task.node_type in (NodeType.SOURCE, NodeType.SINK):
            return False
        conds = self.graph.loop_of(task.task_id)
        return not conds or any(task.task_id in self.graph.governed(c) for c in conds)

    def _lets_go_now(self, interceptor: Interceptor, message: Message) -> bool:
        """Whether the message says that a scope has left the loop that the task is in."""
        return message.source in interceptor.in_loop

    def _let_go(self, index: int) -> None:
        self.scope(index)  # a scope may leave a loop without having been here
        self._using[index] -= 1
        if not self._using[index]:
            del self.scopes[index], self._using[index]

    def _leave_loop(self, cond: TaskNode, scope: Scope) -> None:
        """Frees what the loop made, but for what goes on with the scope."""
        ways_out = (link for link in cond.downstream.values() if link.dependency is Dependency.STOP_LOOP)
        scope.keep_only({name for link in ways_out for name in link.carries})
        self._let_go(scope.index)

    # ---- errors

    def _tell(self, error: BaseException) -> None:
        """ERR to every rank that can still be reached."""
        cause = error.__cause__ if isinstance(error, TaskError) and error.__cause__ is not None else error
        lines = "".join(traceback.format_exception(cause)).splitlines()[-_LINES:]
        values = {
            "rank": self._number,
            "job": error.job if isinstance(error, JobError) else self.waits_for(),
            "cause": describe(cause),
            "traceback": "\n".join(lines)[-_MOST_TEXT:],
        }
        for peer in range(self.bus.size):
            if peer != self.rank:
                with contextlib.suppress(TransferError):  # it is gone, and will not wait
                    self.bus.send(peer, Message(Kind.ERR, self.rank, peer), values)


def _peer_error(rank: int, told: dict[str, Value], waiting: str) -> PeerError:
    return PeerError(
        rank,
        int(told["rank"]),
        str(told["job"]),
        f"{told['cause']}\n{told['traceback']}\n",
        f"rank {rank} was at: {waiting}",
    )
