"""A job list, compiled once into a StaticPlan.

Takes one stage's lowered jobs and one ProgramSet a micro-batch. Liveness is exact: it follows the order of the whole
list, so any schedule frees as early as its order allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..program.subprogram import Input, InputKind, ProgramSet, SubProgram
from ..schedules.jobs import Direction, Job, LoweredJob, Transfer
from .completions import MessageId, completions
from .layout import Wire
from .ledger import Ledger
from .parameters import ParameterStore
from .static_plan import Item, Message, Reduce, Run, Share, StaticPlan
from .tags import ValueTags

_Key = tuple[InputKind, str]


def compile_jobs(
    stage: int,
    jobs: Sequence[LoweredJob],
    program_sets: Sequence[ProgramSet],
    placement: Sequence[int],
    store: ParameterStore,
    lists: Sequence[Sequence[LoweredJob]] = (),
    reduced: Sequence[int] = (),
) -> StaticPlan:
    """lists: the jobs of all stages, which tell when a send is done; without them, at the end of the step. reduced: the
    chunks whose gradients are summed over replicas, in the order in which all replicas do so. Raises ValueError,
    naming the job, where the list and the programs don't fit together."""
    done = completions(stage, lists) if lists else {}
    return _Compiler(stage, jobs, program_sets, placement, store, done).plan(reduced)


def last_backwards(jobs: Sequence[LoweredJob]) -> list[int]:
    """The chunks of a list in the order of their last W's."""
    last = {
        job.chunk: place for place, job in enumerate(jobs) if isinstance(job, Job) and job.kind in ("W", "X")
    }
    return sorted(last, key=last.__getitem__)


class _Compiler:
    def __init__(
        self,
        stage: int,
        jobs: Sequence[LoweredJob],
        program_sets: Sequence[ProgramSet],
        placement: Sequence[int],
        store: ParameterStore,
        completes: Mapping[MessageId, list[MessageId]],
    ):
        self.stage = stage
        self.completes = completes
        self.sets = program_sets
        self.placement = placement
        self.store = store
        self.tags = ValueTags(program_sets)
        self.jobs = [job for job in jobs if not self._idle(job)]
        self.scope_of: dict[tuple[int, int], int] = {}
        self.slots: list[dict[_Key, int]] = []
        #: (scope, key) -> index of the last job that reads it
        self.last_use: dict[tuple[int, _Key], int] = {}
        #: values that the jobs so far have made or received
        self.made: set[tuple[int, str]] = set()
        #: by program set: (direction, source) -> (target, values) of the messages that stay on this stage
        self.local: dict[int, dict[tuple[Direction, int], list[tuple[int, list[str]]]]] = {}
        for programs in program_sets:
            edges = self.local.setdefault(id(programs), {})
            if not edges:
                for (way, source, target), names in programs.messages.items():
                    if placement[target] == stage:
                        edges.setdefault((way, source), []).append((target, names))
        self._find_uses()

    # -- pass 1: who reads what, last

    def _idle(self, job: LoweredJob) -> bool:
        """A transfer that carries no value for its micro-batch."""
        return isinstance(job, Transfer) and not self._names(job)

    def _names(self, transfer: Transfer) -> list[str]:
        edge = (transfer.direction, transfer.source, transfer.target)
        return self._set(transfer, transfer.micro_batch).messages.get(edge, [])

    def _set(self, job: Job | Transfer, micro_batch: int) -> ProgramSet:
        if not 0 <= micro_batch < len(self.sets):
            raise ValueError(
                f"stage {self.stage}: {job} is beyond the {len(self.sets)} micro-batches of this step"
            )
        return self.sets[micro_batch]

    def _program(self, job: Job) -> SubProgram:
        program = self._set(job, job.micro_batch).programs.get((job.kind, job.chunk))
        if program is None:
            raise ValueError(f"stage {self.stage}: there is no program for job {job}")
        return program

    def _scope(self, chunk: int, micro_batch: int) -> int:
        key = (chunk, micro_batch)
        if key not in self.scope_of:
            self.scope_of[key] = len(self.slots)
            self.slots.append({})
        return self.scope_of[key]

    def _find_uses(self) -> None:
        for index, job in enumerate(self.jobs):
            if isinstance(job, Job):
                scope = self._scope(job.chunk, job.micro_batch)
                for entry in self._program(job).inputs:
                    if entry.kind not in ("param", "acc"):
                        self.last_use[scope, _key(entry)] = index
                for _, names in self._local_edges(job):
                    for name in names:
                        self.last_use[scope, ("value", name)] = index
            elif isinstance(job, Transfer) and job.action == "send":
                scope = self._scope(job.source, job.micro_batch)
                for name in self._names(job):
                    self.last_use[scope, ("value", name)] = index

    def _local_edges(self, job: Job) -> list[tuple[int, list[str]]]:
        """(target chunk, values) of the messages that this job's chunk hands to chunks of the same stage."""
        direction: Direction = "F" if job.kind == "F" else "B"
        if job.kind == "W":
            return []
        return self.local[id(self._set(job, job.micro_batch))].get((direction, job.chunk), [])

    def _slot(self, scope: int, key: _Key) -> int:
        return self.slots[scope].setdefault(key, len(self.slots[scope]))

    # -- pass 2: what to do

    def plan(self, reduced: Sequence[int]) -> StaticPlan:
        items: list[Item] = []
        ledger = Ledger()
        live: list[int] = []
        top: list[int] = []
        share_after, weight_stage = self._shares()
        reduce_after = self._reduces(reduced)
        for index, job in enumerate(self.jobs):
            if isinstance(job, Job):
                items.append(self._run(index, job, ledger))
            elif isinstance(job, Transfer):
                items.append(self._message(index, job, ledger))
            else:
                items.append(job)
            live.append(ledger.now)
            top.append(ledger.top_since())
            extras: list[Item] = [*reduce_after.get(index, ())]
            if index in share_after:
                extras.append(share_after[index])
            items += extras
            live += [ledger.now] * len(extras)
            top += [ledger.now] * len(extras)
        leaves: list[tuple[int, int, int, int]] = []
        tangents: list[tuple[int, int, int]] = []
        keys: list[tuple[int, int, int]] = []
        for (_, micro_batch), scope in self.scope_of.items():
            for (kind, name), slot in self.slots[scope].items():
                if kind == "input":
                    leaves.append((scope, slot, micro_batch, int(name)))
                elif kind == "tangent":
                    tangents.append((scope, slot, micro_batch))
                elif kind == "key":
                    keys.append((scope, slot, micro_batch))
        written = {name for item in items if isinstance(item, Run) for _, name in item.buffer_writes}
        return StaticPlan(
            stage=self.stage,
            micro_batches=len(self.sets),
            items=items,
            scopes=[len(slots) for slots in self.slots],
            leaves=leaves,
            tangents=tangents,
            keys=keys,
            live_bytes=live,
            top_bytes=top,
            peak_bytes=ledger.peak,
            loss_stage=self.placement[self.sets[0].loss_chunk],
            weight_stage=weight_stage,
            written_buffers=sorted(written),
        )

    def _shares(self) -> tuple[dict[int, Share], int | None]:
        """After which job the losses and weights are complete here. Those that one rank makes are sent
        together, so that all ranks know their order."""
        programs = self.sets[0]
        made = {"loss": programs.loss_chunk}
        weight_stage = None
        if programs.weight is not None:
            made["weight"] = programs.weight_chunk
            weight_stage = self.placement[programs.weight_chunk]
        mine = {what for what, chunk in made.items() if self.placement[chunk] == self.stage}
        chunks = {made[what] for what in mine}
        last = [
            i for i, j in enumerate(self.jobs) if isinstance(j, Job) and j.kind == "F" and j.chunk in chunks
        ]
        if not last:
            return {}, weight_stage
        return {last[-1]: Share("loss" in mine, "weight" in mine)}, weight_stage

    def _reduces(self, chunks: Sequence[int]) -> dict[int, list[Item]]:
        """After which job each chunk's reduction begins: no earlier than those before it."""
        found: dict[int, list[Item]] = {}
        place = -1
        for chunk in chunks:
            last = [
                i
                for i, job in enumerate(self.jobs)
                if isinstance(job, Job) and job.chunk == chunk and job.kind in ("W", "X")
            ]
            place = max(place, last[-1])
            found.setdefault(place, []).append(Reduce(chunk))
        return found

    def _run(self, index: int, job: Job, ledger: Ledger) -> Run:
        program = self._program(job)
        scope = self._scope(job.chunk, job.micro_batch)
        programs = self.sets[job.micro_batch]
        run = Run(job, scope, None if program.empty else program.call)
        local = self._local_edges(job)
        dropped: list[_Key] = []
        handed = {name for _, names in local for name in names}
        for position, entry in enumerate(program.inputs):
            run.template.append(self._constant(job, entry))
            if entry.kind in ("param", "acc"):
                continue
            key = _key(entry)
            if entry.kind == "value" and (scope, entry.name) not in self.made:
                raise ValueError(
                    f"stage {self.stage}: job {job} needs {entry.name!r}, which no earlier job "
                    "of the list makes or receives"
                )
            slot = self._slot(scope, key)
            run.fill.append((position, slot))
            if entry.kind == "buffer" and job.kind == "F":
                run.buffer_reads.append((slot, entry.name))
            later = self.last_use[scope, key] > index or (entry.kind == "value" and entry.name in handed)
            if not later and slot not in run.drops:
                run.drops.append(slot)
                dropped.append(key)
        ledger.during(program.peak_bytes)
        for key in dropped:
            ledger.drop((scope, key))
        position_of = {name: position for position, name in enumerate(program.outputs)}
        for name, position in position_of.items():
            key = ("value", name)
            self._collect(run, job, programs, name, position)
            if self.last_use.get((scope, key), -1) > index:
                run.stores.append((position, scope, self._slot(scope, key)))
                self.made.add((scope, name))
                ledger.add(
                    (scope, key),
                    (job.chunk, job.micro_batch, programs.values[name].storage),
                    programs.values[name].storage_bytes,
                )
        for target, names in local:
            there = self._scope(target, job.micro_batch)
            for name in names:
                key = ("value", name)
                if self.last_use.get((there, key), -1) <= index:
                    continue
                slot = self._slot(there, key)
                self.made.add((there, name))
                ledger.add(
                    (there, key),
                    (job.chunk, job.micro_batch, programs.values[name].storage),
                    programs.values[name].storage_bytes,
                )
                if name in position_of:
                    run.stores.append((position_of[name], there, slot))
                elif (scope, name) in self.made:
                    run.moves.append((self._slot(scope, key), there, slot))
                else:
                    raise ValueError(
                        f"stage {self.stage}: job {job} hands on {name!r}, which nobody has made before it"
                    )
        for name in sorted(handed - position_of.keys()):
            key = ("value", name)
            if self.last_use[scope, key] == index:
                run.late_drops.append(self._slot(scope, key))
                ledger.drop((scope, key))
        if job.kind == "F":
            run.buffer_writes = [(position_of[value], name) for name, value in program.buffers.items()]
        return run

    def _constant(self, job: Job, entry: Input) -> Any:
        """What is the same at every step: a weight or an accumulator; None where a slot fills the position."""
        bound: Mapping[str, Tensor]
        if entry.kind == "param":
            bound = self.store.parameters
        elif entry.kind == "acc":
            bound = self.store.accumulators
        else:
            return None
        if entry.name not in bound:
            raise ValueError(
                f"stage {self.stage}: job {job} needs {entry.kind} {entry.name!r}, which this "
                "stage doesn't hold"
            )
        return bound[entry.name]

    def _collect(self, run: Run, job: Job, programs: ProgramSet, name: str, position: int) -> None:
        if job.kind != "F":
            return
        if name == programs.loss and job.chunk == programs.loss_chunk:
            run.collects.append((position, "loss", 0))
        if name == programs.weight and job.chunk == programs.weight_chunk:
            run.collects.append((position, "weight", 0))
        for number, (output, chunk) in enumerate(zip(programs.outputs, programs.output_chunks, strict=True)):
            if output == name and chunk == job.chunk:
                run.collects.append((position, "output", number))

    def _under_way(
        self, message: Message, number: int, value: tuple[int, _Key], name: str, ledger: Ledger
    ) -> None:
        """What is sent stays until it is known to have arrived; a copy, where its memory has gaps."""
        sent, wire = ("sent", message.transfer.message, name), message.wires[number]
        if not self.completes:  # nothing tells when: the transport's business
            return
        if wire.gathered is not None:
            ledger.add(sent, sent, wire.nbytes)
        else:
            ledger.share(sent, value)

    def _message(self, index: int, job: Transfer, ledger: Ledger) -> Message:
        programs = self.sets[job.micro_batch]
        names = self._names(job)
        sending = job.action == "send"
        scope = self._scope(job.source if sending else job.target, job.micro_batch)
        message = Message(
            transfer=job,
            scope=scope,
            channel=job.direction,
            tag=self.tags.of((job.direction, job.source, job.target), job.micro_batch),
            wires=[Wire.of(programs.values[name]) for name in names],
            slots=[],
        )
        if job.action == "recv":
            message.completes = self.completes.get(job.message, [])
            for done in message.completes:
                # some shapes send nothing on an edge
                for name in self.sets[done[3]].messages.get(done[:3], ()):
                    ledger.drop(("sent", done, name))
        for name in names:
            key: _Key = ("value", name)
            if sending:
                if (scope, name) not in self.made:
                    raise ValueError(
                        f"stage {self.stage}: {job} sends {name!r}, which nobody has made before it"
                    )
                message.slots.append(self._slot(scope, key))
                self._under_way(message, len(message.slots) - 1, (scope, key), name, ledger)
                if self.last_use[scope, key] == index:
                    message.drops.append(self._slot(scope, key))
                    ledger.drop((scope, key))
            elif (scope, key) in self.last_use:
                message.slots.append(self._slot(scope, key))
                if job.action == "recv":
                    self.made.add((scope, name))
                else:
                    ledger.add(
                        (scope, key),
                        (job.target, job.micro_batch, name),
                        message.wires[len(message.slots) - 1].span_bytes,
                    )
            else:
                message.slots.append(-1)
        return message


def _key(entry: Input) -> _Key:
    return (entry.kind, entry.name)
