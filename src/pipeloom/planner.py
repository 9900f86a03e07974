"""The planner: a model, its loss and a Strategy become sub-programs and a Plan.

The one place where passes and planning meet. A Planner captures once for each shape of micro-batch (static capture is
faster than symbolic and has no trouble with sizes 0 and 1), applies the passes that the strategy asks for, and makes
and keeps one plan for each division of a batch. It holds no weights and no process group: what a rank runs is `api`'s
business.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .footprint import held_bytes, sent_bytes
from .passes import Pass, apply_passes, build_pass, split_programs
from .passes.anchors import CutPoints
from .passes.label_chunks import LabelChunks
from .planning import Costs, Plan
from .planning.choice import Choice
from .planning.devices import UNKNOWN, Roofline
from .planning.explicit import check_jobs
from .planning.search import search
from .program.batch import BatchForm, shape_key
from .program.capture import LossFunction, capture_leaves
from .program.ir import Program
from .program.subprogram import ProgramSet, SubProgram
from .schedules import build
from .schedules.catalogue import forward_only
from .schedules.jobs import Edge, Kind
from .schedules.schedule import Schedule, linear, loop
from .strategy import ALL, AUTO, NONE, Strategy

#: captures kept for each of training and evaluation: the whole batch, the last partial one, and room for other lengths
CAPTURES = 16
#: jobs timed in a search for another number of micro-batches than the one that was planned for
_VISITS = 3_000_000
#: plans kept
_PLANS = 64


@dataclass(frozen=True)
class Captured:
    """The sub-programs for one shape, and how to rebuild the model's output from its tensor leaves (evaluation)."""

    programs: ProgramSet
    output_form: Any = None


@dataclass
class Measured:
    """Seconds of sub-programs by structure, as timed on the ranks; `ratio[kind]` scales the roofline for shapes
    not timed. reduce[chunk]: of the sum of its gradients over replicas."""

    seconds: dict[str, float] = field(default_factory=dict)
    ratio: dict[str, float] = field(default_factory=dict)
    reduce: dict[int, float] = field(default_factory=dict)


class Planner:
    """Captures, cuts and plans one model under one strategy.

    device: where the programs will run. roofline: what they cost where nothing has been measured, and what links
    cost. replicas: pipelines that share the batch. Raises what capture, passes, schedules and planning raise; each
    names its part.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        strategy: Strategy,
        device: torch.device,
        roofline: Roofline = UNKNOWN,
        replicas: int = 1,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.strategy = strategy
        self.device = device
        self.roofline = roofline
        self.replicas = replicas
        self.measured = Measured()
        self.points: CutPoints | None = None
        self.choice: Choice | None = None
        #: chunks that are computed again in the backward where that is the planner's business
        self.recompute: tuple[int, ...] = ()
        self._captured: OrderedDict[Any, Captured] = OrderedDict()
        #: with their sub-programs, which the keys name by identity
        self._plans: OrderedDict[Any, tuple[tuple[ProgramSet, ...], Plan]] = OrderedDict()

    # ---- programs

    def captured(self, leaves: Sequence[torch.Tensor], form: BatchForm, *, training: bool) -> Captured:
        """The sub-programs for micro-batches of this shape: from the cache, or captured now."""
        modes = tuple(m.training for m in self.model.modules()) if training else ()
        frozen = tuple(p.requires_grad for p in self.model.parameters()) if training else ()
        key = (training, form.key(), shape_key(leaves), modes, frozen)
        if key in self._captured:
            self._captured.move_to_end(key)
            return self._captured[key]
        program = self._capture(leaves, form, training=training)
        apply_passes(program, self._first_passes(program))
        found = Captured(self.cut(program), program.output_form)
        self._captured[key] = found
        while sum(k[0] == training for k in self._captured) > CAPTURES:
            self._captured.pop(next(k for k in self._captured if k[0] == training))
        return found

    def prepared(self, leaves: Sequence[torch.Tensor], form: BatchForm) -> Program:
        """The training program of this shape, uncut: what a search looks at."""
        program = self._capture(leaves, form, training=True)
        apply_passes(program, self._first_passes(program))
        return program

    def _capture(self, leaves: Sequence[torch.Tensor], form: BatchForm, *, training: bool) -> Program:
        return capture_leaves(
            self.model,
            self.loss_fn,
            list(leaves),
            form,
            training=training,
            autocast=None if self.strategy.autocast is None else getattr(torch, self.strategy.autocast),
            device=self.device,
        )

    def _first_passes(self, program: Program) -> list[Pass]:
        """What comes before labels."""
        passes: list[Pass] = [build_pass(name) for name in ("random_keys", "batch_means", "drop_clones")]
        if program.training and self.strategy.split_backward:
            passes.append(build_pass("split_fused_grads"))
        if program.training:
            passes.append(build_pass("gradient_merge"))
        return passes

    def cut(self, program: Program) -> ProgramSet:
        """Labels and splits a program that is `prepared`. The first one decides the cuts; later ones are cut alike."""
        if self.points is not None:
            label = LabelChunks(self.chunks, like=self.points)
        elif self.choice is not None:
            label = LabelChunks(self.chunks, positions=self.choice.positions)
        else:
            label = LabelChunks(self.chunks, self.strategy.cuts)
        programs = self.split(program, label)
        self.points = self.points or label.points
        return programs

    def split(
        self, program: Program, label: LabelChunks, recompute: Sequence[int] | None = None
    ) -> ProgramSet:
        """The sub-programs of a `prepared` program under these labels. recompute: the chunks that are computed again,
        unless the strategy names some; None: those that were chosen."""
        passes: list[Pass] = [label]
        if program.training:
            passes.append(self._recompute(label.chunks, self.recompute if recompute is None else recompute))
        passes += [build_pass(name) for name in self.strategy.passes]
        apply_passes(program, passes)
        return split_programs(program, split_backward=self.strategy.split_backward)

    def _recompute(self, chunks: int, chosen: Sequence[int]) -> Pass:
        wanted = self.strategy.recompute
        if wanted in (None, NONE, AUTO):
            return build_pass("recompute", chunks=chosen)
        if wanted == ALL:
            return build_pass("recompute", chunks=range(chunks))
        assert wanted is not None
        named = isinstance(wanted, str) or isinstance(wanted[0], str)
        return build_pass("recompute", **{"modules" if named else "chunks": wanted})

    def recomputes(self, chunks: Sequence[int]) -> None:
        """Takes what was chosen to be computed again. Programs of other choices are cut anew."""
        if self.recompute != tuple(chunks):
            self.recompute = tuple(chunks)
            self._captured.clear()
            self._plans.clear()

    # ---- plans

    def schedule(
        self, micro_batches: int, unit_costs: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 0.0)
    ) -> Schedule:
        """The strategy's schedule for M micro-batches, each of F, B and W in ascending order (bit-equality rests
        on it), unless it is the user's own: that is checked, and may run in any order."""
        strategy = self.strategy
        name = strategy.named_schedule
        if strategy.schedule_mode == AUTO:
            return self._chosen(micro_batches, unit_costs)
        if name is None:
            own = strategy.own_schedule(micro_batches)
            check_jobs(own)
            return own
        return build(
            name,
            stages=strategy.pp_degree,
            chunks=strategy.vpp_degree,
            micro_batches=micro_batches,
            split_backward=strategy.split_backward,
            ascending=True,
            unit_costs=unit_costs,
        )

    def _chosen(self, micro_batches: int, unit_costs: tuple[float, float, float, float]) -> Schedule:
        """The order that was chosen; for more micro-batches than it was chosen for, one searched for now, by jobs
        timed and not by
        seconds, so that every rank finds the same."""
        assert self.choice is not None
        chosen = self.choice.schedule(micro_batches)
        if chosen is not None:
            return chosen
        chunks = self.choice.chunks // self.strategy.pp_degree
        f, b, w, comm = unit_costs
        costs = Costs.uniform(self.choice.chunks, f, b, w, comm, held_weight=1.0)
        limit = float(max(map(len, self.choice.jobs)))
        return search(
            self.strategy.pp_degree,
            micro_batches,
            lambda _placement, _v: costs,
            memory_limit=limit,
            visits=_VISITS,
            chunks_allowed=[chunks],
            placements=[placement_name(self.choice.placement, self.strategy.pp_degree)],
        ).schedule

    @property
    def chunks(self) -> int:
        """Chunks of the whole model."""
        return self.choice.chunks if self.choice is not None else self.strategy.chunks

    @property
    def placement(self) -> tuple[int, ...]:
        if self.choice is not None:
            return self.choice.placement
        return self.strategy.own_placement if self.strategy.has_own_schedule else self.schedule(1).placement

    def choose(self, choice: Choice) -> None:
        """Takes what the search chose: placement and cuts before the first capture."""
        self.choice = choice
        self.recomputes(choice.recompute)

    def plan(self, sets: Sequence[ProgramSet], *, training: bool, persistent: Sequence[int] = ()) -> Plan:
        """The plan for micro-batches with these sub-programs, in order. persistent[stage]: bytes that are always
        alive there."""
        key = (training, tuple(id(s) for s in sets), tuple(persistent))
        if key not in self._plans:
            costs = self.costs(sets[0], persistent, self.placement)
            if training:
                schedule = self.schedule(len(sets), self.typical(costs))
            else:
                schedule = forward_only(self.placement, len(sets))
            updating = {p.chunk for s in sets for p in s.programs.values() if p.buffers}
            plan = Plan.make(
                schedule,
                _edges(sets),
                costs,
                memory_limit=self.strategy.memory_bytes,
                ascending_chunks=updating,
            )
            self._plans[key] = (tuple(sets), plan)
            if len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key][1]

    def costs(
        self, programs: ProgramSet, persistent: Sequence[int] = (), placement: Sequence[int] | None = None
    ) -> Costs:
        """What the jobs of these programs cost: measured seconds where they are known, else a roofline; bytes from
        the graphs. placement: where the chunks lie; None: each on a stage of its own."""
        chunks = range(programs.chunks)

        def of(kind: Kind) -> tuple[float, ...]:
            return tuple(self._seconds(programs.programs.get((kind, c))) for c in chunks)

        whole = of("X")
        split = ("B", 0) in programs.programs
        held = [held_bytes(programs, c, placement) for c in chunks]
        workspace: dict[Kind, list[float]] = {
            kind: [float(p.peak_bytes) if (p := programs.programs.get((kind, c))) else 0.0 for c in chunks]
            for kind in ("F", "B", "W", "X")
        }
        resident = list(persistent) or [0] * (max(self.placement) + 1)
        return Costs(
            forward=of("F"),
            backward_b=of("B") if split else tuple(x / 2 for x in whole),
            backward_w=of("W") if split else tuple(x / 2 for x in whole),
            backward=whole,
            latency=self.roofline.near.latency,
            bandwidth=self.roofline.near.bandwidth,
            links=self.roofline.links(len(resident)),
            held_forward=tuple(float(h[0]) for h in held),
            held_weight=tuple(float(h[1]) for h in held),
            held_backward=tuple(float(h[2]) for h in held),
            workspace=workspace,
            sent=sent_bytes(programs),
            persistent=tuple(float(r) for r in resident),
            update=max(resident) / self.roofline.bytes_per_second,
            reduce=tuple(self._reduction(programs, c) for c in chunks),
        )

    def _reduction(self, programs: ProgramSet, chunk: int) -> float:
        """Seconds of the sum of a chunk's gradients over replicas: measured, or of a ring."""
        if self.replicas == 1:
            return 0.0
        if chunk in self.measured.reduce:
            return self.measured.reduce[chunk]
        size = sum(s.dtype.itemsize * math.prod(s.shape) for s in programs.slots if s.chunk == chunk)
        hops, link = 2 * (self.replicas - 1), self.roofline.near
        return hops * (link.latency + size / self.replicas / link.bandwidth) if size else 0.0

    def _seconds(self, program: SubProgram | None) -> float:
        if program is None or program.empty:
            return 0.0
        timed = self.measured.seconds.get(program.structure)
        if timed is not None:
            return timed
        modelled = self.roofline.seconds(program.flops, program.moved)
        return modelled * self.measured.ratio.get(program.kind, 1.0)

    def typical(self, costs: Costs) -> tuple[float, float, float, float]:
        """(F, B, W, transfer) of a typical chunk, by which a schedule places its W's."""
        f, b, w = (sum(c) / len(c) for c in (costs.forward, costs.backward_b, costs.backward_w))
        return (f, b, w, self.roofline.near.latency) if f + b + w else (1.0, 1.0, 1.0, 0.0)

    def learn(self, times: Mapping[str, float], programs: ProgramSet) -> None:
        """Takes measured seconds by structure, the same on every rank, of the programs of one set."""
        self.measured.seconds.update(times)
        for kind in ("F", "B", "W", "X"):
            mine = [p for (k, _), p in programs.programs.items() if k == kind and p.structure in times]
            modelled = sum(self.roofline.seconds(p.flops, p.moved) for p in mine)
            if modelled > 0:
                self.measured.ratio[kind] = sum(times[p.structure] for p in mine) / modelled


def placement_name(placement: Sequence[int], stages: int) -> str:
    """What the search calls a placement."""
    if list(placement) == linear(stages):
        return "linear"
    return "loop" if list(placement) == loop(stages, len(placement) // stages) else "v"


def _edges(sets: Sequence[ProgramSet]) -> list[Edge]:
    """The edges of all micro-batches: an edge that only some shapes have is an edge of the plan (its other
    messages are empty)."""
    found: dict[tuple[str, int, int], Edge] = {}
    distinct = {id(s): s for s in sets}.values()
    for edge in (e for s in distinct for e in s.edges()):
        key = (edge.direction, edge.source, edge.target)
        if key not in found or found[key].nbytes < edge.nbytes:
            found[key] = edge
    return sorted(found.values())


def digest_of(sets: Sequence[ProgramSet]) -> str:
    """A hash of sub-programs, messages and shapes: equal on all ranks that will fit together."""
    parts: list[Any] = []
    for programs in sets:
        parts.append(
            sorted(
                (k, p.structure, [tuple(i) for i in p.inputs], p.outputs)
                for k, p in programs.programs.items()
            )
        )
        parts.append(sorted(programs.messages.items()))
        parts.append(sorted((v.name, v.shape, v.stride, str(v.dtype)) for v in programs.values.values()))
        parts.append([(s.name, s.shape, s.chunk) for s in programs.slots])
    return hashlib.sha256(repr(parts).encode()).hexdigest()
