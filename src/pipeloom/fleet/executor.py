"""Strategy(executor="fleet"): a training step run by task nodes.

The same compiled programs, slots, gradient buffers and update as the list executor, which this one extends; only the
walk differs. A rank's list is cut into what each task does for a micro-batch (unpack what has come, call the program,
pack what goes on), and a carrier runs that in whatever order messages and credits allow. Each task takes micro-batches
in ascending order, so gradients are summed in the list executor's order, and have its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from ..program.subprogram import ProgramSet
from ..runtime.executor import Executor, Step
from ..runtime.parameters import ParameterStore
from ..runtime.static_plan import Message, Reduce, Run, Share
from ..runtime.stepping import Work
from ..runtime.transport import Transport
from ..schedules.jobs import Kind, LoweredJob, Phase
from .bus import Bus
from .carrier import Carrier
from .scope import Scope
from .task_node import Program
from .training import Edge, evaluation_graph, training_graph, variable


@dataclass
class _Part:
    """What a task does for one micro-batch, as items of the plan by index: receives (each with its post), the run,
    sends, and what follows the last micro-batch."""

    receives: list[tuple[int, int]] = field(default_factory=list)
    run: int = -1
    sends: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)


class FleetExecutor(Executor):
    """An Executor whose step is a fleet graph. bus: of this rank. schedule: one of strategy.values.FLEET_SCHEDULES,
    each with one chunk a stage: chunks are stages. Other arguments: Executor's."""

    def __init__(
        self,
        stage: int,
        jobs: Sequence[LoweredJob],
        program_sets: Sequence[ProgramSet],
        placement: Sequence[int],
        store: ParameterStore,
        transport: Transport,
        *,
        bus: Bus,
        schedule: str,
        **options: Any,
    ) -> None:
        super().__init__(stage, jobs, program_sets, placement, store, transport, **options)
        self._bus = bus
        self._step: Step
        self._carrier: Carrier
        self._parts, self._phases = self._cut()
        self._live = 0
        self._peak = 0
        edges = {edge for programs in program_sets for edge, names in programs.messages.items() if names}
        forward: set[Edge] = {(source, target) for way, source, target in edges if way == "F"}
        backward: set[Edge] = {(source, target) for way, source, target in edges if way == "B"}
        count, stages = len(program_sets), len(placement)
        if self._trains:
            self.graph = training_graph(schedule, stages, count, self._program, forward, backward)
        else:
            self.graph = evaluation_graph(stages, count, self._program, forward)

    @property
    def peak_bytes(self) -> int:
        return self._peak

    def _walk(self, step: Step) -> Work[None]:
        step.at = "the fleet's tasks"
        self._step = step
        self._live = self._peak = 0
        self._carrier = Carrier(self.graph, self._bus)
        yield from self._carrier.work()
        self._bus.flush()

    # ---- the list, by task

    def _cut(self) -> tuple[dict[tuple[Kind, int], _Part], list[int]]:
        """The plan's items by (kind, micro-batch) of the job that they belong to, and the step's last jobs."""
        parts: dict[tuple[Kind, int], _Part] = {}
        posts: dict[Any, int] = {}
        phases: list[int] = []
        last: tuple[Kind, int] = ("F", 0)
        backward: Kind = "F"
        for item in self.plan.items:
            if isinstance(item, Run) and item.job.kind in ("B", "X"):
                backward = item.job.kind
        for index, item in enumerate(self.plan.items):
            if isinstance(item, Run):
                last = (item.job.kind, item.job.micro_batch)
                parts.setdefault(last, _Part()).run = index
            elif isinstance(item, Message):
                transfer = item.transfer
                owner = ("F" if transfer.direction == "F" else backward, transfer.micro_batch)
                part = parts.setdefault(owner, _Part())
                if transfer.action == "post":
                    posts[transfer.message] = index
                elif transfer.action == "recv":
                    part.receives.append((posts[transfer.message], index))
                else:
                    part.sends.append(index)
            elif isinstance(item, Share | Reduce):
                parts[last].after.append(index)
            else:
                phases.append(index)
        return parts, phases

    def _program(self, rank: int, name: str) -> Program | None:
        if rank != self.plan.stage:
            return None
        if name == "lr":
            return self._schedule
        if name == "opt":
            return self._finish
        kinds: dict[str, tuple[Kind, ...]] = {"fwd": ("F",), "bwd_b": ("B",), "bwd_w": ("W",)}
        # a backward that is split, but not in time, has both parts in one task
        wanted = kinds.get(name) or tuple(k for k in ("X", "B", "W") if (k, 0) in self._parts)

        def program(scope: Scope) -> Work[None]:
            for kind in wanted:
                yield from self._do(self._parts[kind, scope.index], scope)

        return program

    # ---- what tasks do

    def _do(self, part: _Part, scope: Scope) -> Work[None]:
        """One job of a micro-batch, with what comes before and after it."""
        step, items = self._step, self.plan.items
        for post, index in part.receives:
            item = items[index]
            assert isinstance(item, Message)
            began, ended = self._carrier.waited or (perf_counter(),) * 2
            self._counts(post)
            step.unpack(item, scope.pop(_variable(item)))
            self._counts(index, began, ended)
        began = perf_counter()
        run = items[part.run]
        assert isinstance(run, Run)
        step.compute(run)
        self._counts(part.run, began, perf_counter())
        for index in part.sends:
            item = items[index]
            assert isinstance(item, Message)
            began = perf_counter()
            scope[_variable(item)] = step.pack(item)
            self._counts(index, began, perf_counter())
        for index in part.after:
            yield from step.timed(index, items[index])
            self.recorder.live[index] = self._live

    def _schedule(self, _scope: Scope) -> None:
        """`lr`: the learning rate moves on, for the update that the last step made."""
        if self._updater is not None:
            self._updater.schedule()

    def _finish(self, _scope: Scope) -> Work[None]:
        """`opt`, in the last micro-batch: finalize, and the update."""
        for index in self._phases:
            phase = self.plan.items[index]
            assert isinstance(phase, Phase)
            self._step.at = phase
            yield from self._step.timed(index, phase)
            self.recorder.live[index] = self._live

    def _counts(self, index: int, start: float = 0.0, end: float = 0.0) -> None:
        """Times of an item, and the bytes that it adds or frees; micro-batches share no memory, so an item changes as
        much in any order."""
        plan, recorder = self.plan, self.recorder
        before = plan.live_bytes[index - 1] if index else 0
        self._peak = max(self._peak, self._live + plan.top_bytes[index] - before)
        self._live += plan.live_bytes[index] - before
        recorder.start[index], recorder.end[index], recorder.live[index] = start, end, self._live


def _variable(item: Message) -> str:
    transfer = item.transfer
    return variable(transfer.direction, (transfer.source, transfer.target))
