"""Walks one rank's job list.

The list was compiled to a static plan (static_plan.py); a step fills slots, calls programs, posts, waits and
sends, in exactly that order, and decides nothing. `run` is a generator that yields the receive it waits for
(stepping.py), so that the ranks of one process can be stepped in turn; over torch.distributed it never
yields, and waiting blocks.

Follows d9d's shape: jobs are data, transfers are jobs of their own, the executor only runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..program.subprogram import ProgramSet
from ..schedules.jobs import LoweredJob, Phase
from . import tags
from .compile_jobs import compile_jobs
from .completions import MessageId
from .errors import JobError, StepError, TransferError
from .gradients import finalize
from .measure import Recorder
from .parameters import ParameterStore
from .replicas import Alone, Pending, Replicas
from .result import StepResult, in_order
from .static_plan import Item, Message, Reduce, Run, Share, StaticPlan
from .stepping import Work, arrive
from .transport import Receive, Transport
from .update import Updater

Scope = list[Any]


class Executor:
    """One stage's runner for batches of one division into micro-batches.

    jobs: this stage's lowered list. program_sets[m]: the programs of micro-batch m. placement[chunk] ->
    stage. updater: what the "update" phase does; None where the list has none (evaluation). average: False
    makes the loss a sum over micro-batches and leaves gradients unscaled (gradient_merge "sum"). overlap:
    False waits for each send before the next job (enable_send_recv_overlap). lists: the lowered jobs of all
    stages, by which sent tensors are freed as soon as they are known to have arrived. replicas: of this stage; reduced:
    the stage's chunks in the order in which their gradients are summed over them. Executors of one stage (other
    shapes, evaluation) share the store, the transport, the replicas and the updater.
    """

    def __init__(
        self,
        stage: int,
        jobs: Sequence[LoweredJob],
        program_sets: Sequence[ProgramSet],
        placement: Sequence[int],
        store: ParameterStore,
        transport: Transport,
        *,
        updater: Updater | None = None,
        average: bool = True,
        overlap: bool = True,
        lists: Sequence[Sequence[LoweredJob]] = (),
        replicas: Replicas | None = None,
        reduced: Sequence[int] = (),
    ):
        self.plan: StaticPlan = compile_jobs(stage, jobs, program_sets, placement, store, lists, reduced)
        self.recorder = Recorder(self.plan)
        self._programs = program_sets[0]
        self._store = store
        self._transport = transport
        self._replicas: Replicas = replicas or Alone()
        self._updater = updater
        self._average = average
        self._overlap = overlap
        self._trains = any(isinstance(item, Phase) and item.name == "finalize" for item in self.plan.items)
        self._last: StepResult | None = None

    def run(
        self,
        batch: Sequence[Sequence[Any]],
        tangents: Sequence[Tensor],
        keys: Sequence[Tensor],
        *,
        weights: Sequence[float] | None = None,
        total: float | None = None,
        unscale: float = 1.0,
        update: bool = True,
    ) -> Work[StepResult]:
        """One step.

        batch[m]: the flat leaves of micro-batch m. tangents[m]: 0-dim, the seed of the backward, in the
        loss's dtype. keys[m]: 0-dim int64. weights: the micro-batches' weights, where they are known
        beforehand (then the tangents hold weight/total, of all replicas); None: the programs make them, and finalize
        divides by their total. total: of the known weights of all replicas, if there are others. unscale: 1/loss
        scale, if the tangents were multiplied by one. Raises JobError, TransferError; ValueError for a batch that
        doesn't fit the plan.
        """
        self._check(batch, tangents, keys, weights)
        if self._last is not None:
            self._last.settle()
        result = StepResult(self._programs.weight is not None, self._average, weights, len(batch))
        self._last = result
        if total is None:
            total = sum(weights or ())
        step = Step(self, result, batch, tangents, keys, total, unscale, update)
        try:
            if self._trains:
                self._store.begin_step()
            step.expect_shares()
            yield from self._walk(step)
            step.at = "the end of the step"
            yield from step.write_buffers()
            yield from step.share_result()
            self._transport.flush()
        except TransferError as error:
            self._last = None
            raise error.during(self._where(step.at, error)) from error
        except StepError:
            self._last = None
            raise
        except Exception as error:
            self._last = None
            number = self._transport.ranks[self._transport.rank]
            raise JobError(number, _name(step.at), error) from error
        return result

    def _walk(self, step: Step) -> Work[None]:
        """The items of the plan, in order."""
        for index, item in enumerate(self.plan.items):
            step.at = item
            yield from step.timed(index, item)

    @property
    def peak_bytes(self) -> int:
        """Bytes of values at the last step's worst moment, working memory included."""
        return self.plan.peak_bytes

    def _where(self, current: object, error: TransferError) -> str:
        """What failed, in the words of the plan: the transfer, and the job that needed it."""
        if not isinstance(current, Message):
            return f"{_name(current)}, {error.what}"
        place = next(i for i, item in enumerate(self.plan.items) if item is current)
        jobs = [item.job for item in self.plan.items[place:] if isinstance(item, Run)]
        if current.transfer.action != "recv" or not jobs:
            return str(current.transfer)
        return f"{current.transfer}, needed by job {jobs[0]}"

    def _check(
        self,
        batch: Sequence[Sequence[Any]],
        tangents: Sequence[Tensor],
        keys: Sequence[Tensor],
        weights: Sequence[float] | None,
    ) -> None:
        count = self.plan.micro_batches
        given: dict[str, Sequence[Any]] = {"batch": batch, "tangents": tangents, "keys": keys}
        if weights is not None:
            given["weights"] = weights
        for what, values in given.items():
            if len(values) != count:
                raise ValueError(f"{what} has {len(values)} entries for {count} micro-batches")
        if weights is None and self._programs.weight is None:
            raise ValueError("weights are needed: the programs of this loss don't make any")


class Step:
    """The state of one step under way. at: what it is doing, an item of the plan or words."""

    def __init__(
        self,
        executor: Executor,
        result: StepResult,
        batch: Sequence[Sequence[Any]],
        tangents: Sequence[Tensor],
        keys: Sequence[Tensor],
        total: float,
        unscale: float,
        update: bool,
    ):
        plan = executor.plan
        self.executor = executor
        self.at: object = ""
        self.plan = plan
        self.transport = executor._transport
        self.store = executor._store
        self.result = result
        self.total = total
        self.unscale = unscale
        self.update = update
        self.scopes: list[Scope] = [[None] * size for size in plan.scopes]
        for scope, slot, micro_batch, leaf in plan.leaves:
            self.scopes[scope][slot] = batch[micro_batch][leaf]
        for scope, slot, micro_batch in plan.tangents:
            self.scopes[scope][slot] = tangents[micro_batch]
        for scope, slot, micro_batch in plan.keys:
            self.scopes[scope][slot] = keys[micro_batch]
        self.buffers: dict[str, Tensor] = dict(self.store.buffers)
        self.posted: dict[MessageId, list[Receive]] = {}
        self.sent: dict[MessageId, list[int]] = {}
        self.losses: list[Tensor | None] = [None] * plan.micro_batches
        self.weights: list[Tensor | None] = [None] * plan.micro_batches
        self.replicas = executor._replicas
        #: sums over replicas under way: (item of the plan, what to wait for)
        self.reductions: list[tuple[int, Pending]] = []
        self.recorder = executor.recorder
        self.recorder.begin()

    def timed(self, index: int, item: Item) -> Work[None]:
        self.recorder.start[index] = perf_counter()
        if type(item) is Reduce:
            self.reductions += [(index, self.replicas.reduce(f)) for f in self.store.summed(item.chunk)]
        else:
            yield from self.do(item)
        self.recorder.end[index] = perf_counter()

    def do(self, item: Item) -> Work[None]:
        if type(item) is Run:
            self.compute(item)
        elif type(item) is Message:
            action = item.transfer.action
            if action == "recv":
                yield from self.receive(item)
            elif action == "post":
                self.post(item)
            else:
                self.send(item)
        elif type(item) is Share:
            self.share(item)
        elif type(item) is Phase:
            if item.name == "finalize":
                yield from self.finalize()
            elif self.update:
                yield from self.run_update()

    def compute(self, run: Run) -> None:
        scope = self.scopes[run.scope]
        for slot, name in run.buffer_reads:
            scope[slot] = self.buffers[name]
        if run.call is not None:
            arguments = run.template.copy()
            for position, slot in run.fill:
                arguments[position] = scope[slot]
            for slot in run.drops:
                scope[slot] = None
            outputs = run.call(arguments)
            for position, there, slot in run.stores:
                self.scopes[there][slot] = outputs[position]
            for position, name in run.buffer_writes:
                self.buffers[name] = outputs[position]
            for position, what, number in run.collects:
                if what == "loss":
                    self.losses[run.job.micro_batch] = outputs[position]
                elif what == "weight":
                    self.weights[run.job.micro_batch] = outputs[position]
                else:
                    self.result.outputs[run.job.micro_batch][number] = outputs[position]
        for slot, there, slot_there in run.moves:
            self.scopes[there][slot_there] = scope[slot]
        for slot in run.late_drops:
            scope[slot] = None

    def post(self, message: Message) -> None:
        peer = message.transfer.peer
        self.posted[message.transfer.message] = [
            self.transport.post(peer, message.channel, message.tag + i, (wire.count,), wire.dtype)
            for i, wire in enumerate(message.wires)
        ]

    def receive(self, message: Message) -> Work[None]:
        flats = []
        for receive in self.posted.pop(message.transfer.message):
            flats.append((yield from arrive(receive)))  # noqa: PERF401 (no comprehension can yield)
        self.unpack(message, flats)
        for done in message.completes:
            self.transport.complete(self.sent.pop(done, ()))

    def unpack(self, message: Message, flats: Sequence[Tensor]) -> None:
        """What has arrived goes where its readers look for it."""
        scope = self.scopes[message.scope]
        for flat, wire, slot in zip(flats, message.wires, message.slots, strict=True):
            if slot >= 0:
                scope[slot] = wire.unpack(flat)

    def pack(self, message: Message) -> list[Tensor]:
        """What a message carries, ready to be sent; freed here where nobody else reads it."""
        scope = self.scopes[message.scope]
        flats = [wire.pack(scope[slot]) for wire, slot in zip(message.wires, message.slots, strict=True)]
        for slot in message.drops:
            scope[slot] = None
        return flats

    def send(self, message: Message) -> None:
        peer = message.transfer.peer
        self.sent[message.transfer.message] = [
            self.transport.send(peer, message.channel, message.tag + i, flat)
            for i, flat in enumerate(self.pack(message))
        ]
        if not self.executor._overlap:
            self.transport.flush()

    # -- figures of the step

    def expect_shares(self) -> None:
        """Post the receives of losses and weights that other ranks will make."""
        plan, programs = self.plan, self.executor._programs
        losses = weights = None
        if plan.loss_stage != plan.stage:
            losses = self._expect(plan.loss_stage, tags.LOSSES, programs.values[programs.loss].dtype)
        if self.result.weights_unknown and plan.weight_stage is not None and plan.weight_stage != plan.stage:
            assert programs.weight is not None
            weights = self._expect(plan.weight_stage, tags.WEIGHTS, programs.values[programs.weight].dtype)
        self.result.will_have(losses, weights)

    def _expect(self, peer: int, tag: int, dtype: torch.dtype) -> Receive:
        return self.transport.post(peer, "control", tag, (self.plan.micro_batches,), dtype)

    def share(self, share: Share) -> None:
        if share.losses:
            losses = _joined(self.losses, "loss")
            self.result.has_losses(losses)
            self._tell(tags.LOSSES, losses)
        if share.weights and self.result.weights_unknown:
            weights = _joined(self.weights, "weight")
            self.result.has_weights(weights)
            self._tell(tags.WEIGHTS, weights)

    def _tell(self, tag: int, values: Tensor) -> None:
        for peer in range(self.transport.size):
            if peer != self.transport.rank:
                self.transport.send(peer, "control", tag, values)

    # -- the step's last jobs

    def finalize(self) -> Work[None]:
        yield from self.reduce()
        factor: float | Tensor = self.unscale
        if self.result.weights_unknown:
            coming = self.result.weights_arrive_by
            if coming is not None:
                yield from arrive(coming)
            total = in_order(self.result.weights)
            if self.replicas.size > 1:
                total = in_order((yield from arrive(self.replicas.gather(total))))
            if float(total) == 0.0:
                self.result.skipped = True
                self.store.clear()
                self.store.add_carried()
                return
            if self.executor._average:
                factor = (self.unscale / total).to(self.store.device)
        elif not self.total:
            self.result.skipped = True
        yield from finalize(self.store, self.transport, factor)

    def reduce(self) -> Work[None]:
        """Wait for the sums over replicas."""
        for index, reduction in self.reductions:
            yield from arrive(reduction)
            self.recorder.end[index] = max(self.recorder.end[index], reduction.finished)

    def run_update(self) -> Work[None]:
        updater = self.executor._updater
        if updater is None:
            raise ValueError("the job list has an update, but the executor was given no updater")
        yield from updater.run(self.result)

    def write_buffers(self) -> Work[None]:
        """The last versions of the buffers go into the module; after a training step, replica 0's to all replicas."""
        coming = []
        for name in self.plan.written_buffers:
            buffer = self.store.buffers[name].copy_(self.buffers[name])
            if self.executor._trains and self.replicas.size > 1:
                coming.append(self.replicas.broadcast(buffer))
        for receive in coming:
            yield from arrive(receive)

    def share_result(self) -> Work[None]:
        """What the replicas' losses come to, for all of them."""
        if self.replicas.size == 1:
            return
        for coming in (self.result.losses_arrive_by, self.result.weights_arrive_by):
            if coming is not None:
                yield from arrive(coming)
        self.result.parts_from(self.replicas.gather(self.result.part))


def _joined(values: Sequence[Tensor | None], what: str) -> Tensor:
    missing = [str(m) for m, value in enumerate(values) if value is None]
    if missing:
        raise ValueError(f"no {what} was made for micro-batch {', '.join(missing)}")
    return torch.stack([value.reshape(()) for value in values if value is not None])


def _name(item: object) -> str:
    if isinstance(item, Run):
        return str(item.job)
    if isinstance(item, Message):
        return str(item.transfer)
    if isinstance(item, Share):
        return "sharing the losses"
    if isinstance(item, Reduce):
        return f"reducing the gradients of chunk {item.chunk}"
    return str(item) or "the start of the step"
