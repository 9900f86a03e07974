"""schedule_mode "auto": cuts, placement, chunks a stage and order, chosen together for one model, memory and budget.

    capture → pieces, calibrated → cuts for each placement and V → search → Choice

Runs on one rank before parameters are placed; the others are told. Pieces cost what a roofline says, corrected by
timing a cut into
a few chunks here (one program of each structure, on made-up weights), so that an embedding, a head and a block
each get their own factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from .passes.cuts import cut_positions, forward_order, replicated
from .passes.label_chunks import LabelChunks
from .passes.pieces import pieces_of
from .planner import Planner, placement_name
from .planning import Costs, PlanError
from .planning.choice import Choice
from .planning.partition import Pieces, balanced, improved
from .planning.search import Found, search
from .planning.simulate import simulate
from .program.batch import BatchForm
from .program.ir import Program
from .program.subprogram import ProgramSet
from .runtime.calibrate import BlankStore, time_programs
from .schedules import build
from .schedules.jobs import Edge, Kind
from .schedules.schedule import linear

#: chunks of the cut that calibrates the pieces, at most
PROBES = 12
#: share of the time that is spent before the chunks are known exactly; the rest improves their order
_FIRST = 0.6
#: searches for one limit, if receives that are posted ahead don't fit beside what the first one found
_TRIES = 4
#: schedules by which cuts are judged, by placement
_JUDGES = {"linear": "ZBH1", "loop": "VPP", "v": "ZBV"}


@dataclass
class Proposal:
    """A search's answer with what it stands on."""

    found: Found
    choice: Choice
    costs: Costs
    edges: list[Edge]


class Auto:
    """The search for one planner and one shape of micro-batch."""

    def __init__(self, planner: Planner, leaves: Sequence[torch.Tensor], form: BatchForm) -> None:
        self.planner = planner
        self.stages = planner.strategy.pp_degree
        self.leaves = list(leaves)
        self.program: Program = planner.prepared(leaves, form)
        free = replicated(self.program)
        self.order = forward_order(self.program, free)
        self.allowed = cut_positions(self.program, self.order)
        #: tensors that the optimizer is taken to keep of each trained weight, as Adam's: none has been made yet
        self.moments = 2
        #: by how much two timings of the pieces differed, as a share; None before they are measured
        self.spread: float | None = None
        self._cuts: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._splits: dict[tuple[int, ...], ProgramSet] = {}

    @cached_property
    def modelled(self) -> Pieces:
        """The model's pieces, with a roofline's seconds."""
        return pieces_of(self.program, self.order, self.allowed, self.planner.roofline)

    @cached_property
    def pieces(self) -> Pieces:
        """The model's pieces; seconds measured here where the strategy says so."""
        modelled = self.modelled
        if self.planner.strategy.costs != "measured":
            return modelled
        chunks = min(PROBES, len(self.allowed) + 1)
        cuts = balanced(modelled, chunks)
        programs = self.planner.split(self.program.copy(), LabelChunks(chunks, positions=cuts))
        store = BlankStore(programs, self.planner.device)
        rounds = [time_programs(store, programs, range(chunks), self.leaves, rounds=2) for _ in range(2)]
        times = {s: min(seconds[s] for seconds in rounds) for s in rounds[0]}
        totals = [sum(seconds.values()) for seconds in rounds]
        self.spread = max(totals) / sum(times.values()) - 1 if any(times.values()) else 0.0
        chunk_seconds: dict[Kind, list[float]] = {kind: [] for kind in ("F", "B", "W")}
        for chunk in range(chunks):
            for kind, column in chunk_seconds.items():
                program = programs.programs[kind, chunk]
                column.append(0.0 if program.empty else times[program.structure])
        return modelled.calibrated(cuts, chunk_seconds["F"], chunk_seconds["B"], chunk_seconds["W"])

    def propose(
        self,
        micro_batches: int,
        *,
        memory_limit: float | None = None,
        budget_seconds: float = 10.0,
        chunks_allowed: Sequence[int] = (1, 2, 3, 4),
        seed: int = 0,
    ) -> Proposal:
        """The best plan found within the limit (bytes a rank, held to exactly; None: about what 1F1B needs). Raises
        PlanError("memory") where nothing fits."""
        limit = self.default_limit(micro_batches) if memory_limit is None else memory_limit
        most = max(1, (len(self.allowed) + 1) // self.stages)

        def of(placement: tuple[int, ...]) -> tuple[Costs, list[Edge]]:
            cuts = self.cuts(placement, micro_batches)
            if memory_limit is not None:
                return self.exact(placement, cuts)
            return self.costs(placement, cuts), self.edges(cuts)

        def find(allowed: Sequence[float], seconds: float) -> Found:
            return search(
                self.stages,
                micro_batches,
                lambda placement, _v: of(placement)[0],
                edges_of=lambda placement, _v: of(placement)[1],
                memory_limit=allowed,
                budget_seconds=seconds,
                chunks_allowed=[v for v in chunks_allowed if v <= most] or [1],
                seed=seed,
            )

        found = within(find, limit, self.stages, budget_seconds)
        placement = found.schedule.placement
        cuts = self.cuts(placement, micro_batches)
        choice = Choice.of(found.schedule, cuts, found.makespan, found.bound)
        return Proposal(found, choice, *of(placement))

    def cuts(self, placement: Sequence[int], micro_batches: int) -> tuple[int, ...]:
        """The cuts for a placement: balanced, then moved where that shortens a simulated step of a schedule made
        for it."""
        key = tuple(placement)
        if key not in self._cuts:
            cuts = balanced(self.pieces, len(key))
            judge = self._judge(key, micro_batches)
            if judge is not None:
                cuts, _ = improved(self.pieces, cuts, judge)
            self._cuts[key] = tuple(cuts)
        return self._cuts[key]

    def fix(self, placement: Sequence[int], cuts: Sequence[int]) -> None:
        """Takes a placement's cuts from the user."""
        self._cuts[tuple(placement)] = tuple(cuts)

    def _judge(
        self, placement: tuple[int, ...], micro_batches: int
    ) -> Callable[[Sequence[int]], float] | None:
        chunks = len(placement) // self.stages
        kind = placement_name(placement, self.stages)
        if kind == "v" and chunks != 2:
            return None
        most = min(micro_batches, 4 * self.stages)  # enough to show the shape of a step
        name = _JUDGES[kind]
        options = {"split_backward": True} if name == "VPP" else {}
        schedule = build(name, stages=self.stages, chunks=chunks, micro_batches=most, **options)
        return lambda cuts: simulate(schedule, self.costs(placement, cuts), self.edges(cuts)).makespan

    def costs(self, placement: Sequence[int], cuts: Sequence[int]) -> Costs:
        """What the chunks between these cuts cost, in seconds and bytes."""
        pieces, roofline = self.pieces, self.planner.roofline
        resident = [0.0] * self.stages
        for stage, size in zip(placement, pieces.sums(cuts, pieces.resident), strict=True):
            resident[stage] += size
        inputs, weights = pieces.sums(cuts, pieces.backward_b), pieces.sums(cuts, pieces.backward_w)
        # the first chunk has no input gradient to give: its B is empty and its W is the whole backward
        inputs[0], weights[0] = 0.0, inputs[0] + weights[0]
        return Costs(
            forward=tuple(pieces.sums(cuts, pieces.forward)),
            backward_b=tuple(inputs),
            backward_w=tuple(weights),
            latency=roofline.near.latency,
            bandwidth=roofline.near.bandwidth,
            links=roofline.links(self.stages),
            held_weight=tuple(pieces.sums(cuts, pieces.held)),
            persistent=tuple(resident),
        )

    def exact(self, placement: Sequence[int], cuts: Sequence[int]) -> tuple[Costs, list[Edge]]:
        """The same, and the edges, with bytes as the sub-programs have them: what is kept from F to B, to W, and what
        a job needs meanwhile; `moments` of the optimizer are counted. Splitting a program takes seconds."""
        if tuple(cuts) not in self._splits:
            label = LabelChunks(len(placement), positions=cuts)
            self._splits[tuple(cuts)] = self.planner.split(self.program.copy(), label)
        programs = self._splits[tuple(cuts)]
        modelled = self.costs(placement, cuts)
        costs = replace(
            self.planner.costs(programs, resident_bytes(programs, placement, self.moments)),
            forward=modelled.forward,
            backward_b=modelled.backward_b,
            backward_w=modelled.backward_w,
            backward=(),
        )
        return costs, programs.edges()

    def edges(self, cuts: Sequence[int]) -> list[Edge]:
        """A chain with what crosses each cut (edges that skip chunks are counted at each cut that they cross)."""
        up = [Edge("F", c, c + 1, int(self.pieces.crossing[p])) for c, p in enumerate(cuts)]
        return up + [Edge("B", c + 1, c, int(self.pieces.crossing[p])) for c, p in enumerate(cuts)]

    def default_limit(self, micro_batches: int) -> float:
        """Bytes a rank that 1F1B needs with one chunk a stage, cut in balance."""
        placement = linear(self.stages)
        cuts = balanced(self.pieces, self.stages)
        schedule = build("1F1B", stages=self.stages, micro_batches=micro_batches)
        return max(simulate(schedule, self.costs(placement, cuts), self.edges(cuts)).peak)


def within(
    find: Callable[[Sequence[float], float], Found], limit: float, stages: int, budget_seconds: float
) -> Found:
    """find(bytes a stage, seconds), asked again with less where receives posted ahead, which a search doesn't count,
    would exceed the limit beside the plan that it found."""
    allowed = [limit] * stages
    for _ in range(_TRIES):
        found = find(allowed, budget_seconds)
        over = [max(0.0, p + s - limit) for p, s in zip(found.peak, found.stash, strict=True)]
        if not any(over):
            break
        allowed = [a - o for a, o in zip(allowed, over, strict=True)]
        budget_seconds /= 2
    return found


def resident_bytes(programs: ProgramSet, placement: Sequence[int], moments: int) -> list[int]:
    """What always stays on each stage: its weights and buffers, and of each trained weight a gradient and the
    optimizer's moments."""
    shapes: list[dict[tuple[str, str], int]] = [{} for _ in range(max(placement) + 1)]
    for program in programs.programs.values():
        mine = shapes[placement[program.chunk]]
        for (kind, name), (shape, dtype) in zip(program.inputs, program.shapes, strict=True):
            if kind in ("param", "buffer"):
                mine[kind, name] = math.prod(shape) * dtype.itemsize
    for slot in programs.slots:
        shapes[placement[slot.chunk]]["slot", slot.name] = (
            (1 + moments) * math.prod(slot.shape) * slot.dtype.itemsize
        )
    return [sum(mine.values()) for mine in shapes]


def choose(planner: Planner, leaves: Sequence[torch.Tensor], form: BatchForm, micro_batches: int) -> Choice:
    """What `schedule_mode="auto"` runs: placement, chunks and cuts, with an order for them."""
    strategy = planner.strategy
    auto = Auto(planner, leaves, form)
    limit = None if strategy.memory_bytes is None else float(strategy.memory_bytes)
    seconds = strategy.search_seconds * _FIRST

    def propose() -> Choice:
        return auto.propose(
            micro_batches, memory_limit=limit, budget_seconds=seconds, seed=strategy.seed
        ).choice

    try:
        return propose()
    except PlanError as error:
        if error.check != "memory" or limit is None:
            raise
        auto.moments = 0  # perhaps there are none; `refine` knows
        return propose()


def refine(planner: Planner, programs: ProgramSet, micro_batches: int, persistent: Sequence[int]) -> Choice:
    """The choice with its order searched for again, for what the chosen chunks really cost and hold, within the
    memory that the
    first order took or the strategy's limit."""
    choice, strategy = planner.choice, planner.strategy
    assert choice is not None
    costs, edges, stages = planner.costs(programs, persistent), programs.edges(), strategy.pp_degree
    chosen = choice.schedule(micro_batches)
    assert chosen is not None
    limit = strategy.memory_bytes or max(simulate(chosen, costs, edges).peak)

    def find(allowed: Sequence[float], seconds: float) -> Found:
        return search(
            stages,
            micro_batches,
            lambda _placement, _v: costs,
            edges_of=lambda _placement, _v: edges,
            memory_limit=allowed,
            budget_seconds=seconds,
            chunks_allowed=[choice.chunks // stages],
            placements=[placement_name(choice.placement, stages)],
            seed=strategy.seed,
        )

    seconds = strategy.search_seconds * (1 - _FIRST)
    if strategy.memory_bytes is None:
        found = find([limit] * stages, seconds)
    else:
        found = within(find, limit, stages, seconds)
    return Choice.of(found.schedule, choice.positions, found.makespan, found.bound)
