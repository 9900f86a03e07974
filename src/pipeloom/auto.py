"""schedule_mode "auto": cuts, placement, chunks a stage and order, chosen together for one model, memory and budget.

    capture → pieces, calibrated → cuts for each placement and V → search → Choice

Runs on one rank before parameters are placed; the others are told. Pieces cost what a roofline says, corrected by
timing a cut into a few chunks here (one program of each structure, on made-up weights), so that an embedding, a head
and a block each get their own factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch

from .footprint import resident_bytes
from .passes.cuts import cut_positions, forward_order, replicated
from .passes.label_chunks import LabelChunks
from .passes.pieces import pieces_of
from .planner import Planner, placement_name
from .planning import Costs, PlanError
from .planning.candidates import EVEN, Candidate, recomputing, recomputing_rows
from .planning.choice import Choice
from .planning.partition import Pieces, balanced, improved
from .planning.plan import Plan
from .planning.recompute import least
from .planning.search import Found, search
from .planning.simulate import simulate
from .program.batch import BatchForm
from .program.ir import Program
from .program.subprogram import ProgramSet
from .runtime.calibrate import BlankStore, time_programs
from .schedules import build
from .schedules.jobs import Edge, Kind
from .schedules.schedule import linear

T = TypeVar("T")

#: chunks of the cut that calibrates the pieces, at most
PROBES = 12
#: share of the time that is spent before the chunks are known exactly; the rest improves their order
_FIRST = 0.6
#: shares of a budget for searches under one limit: a short one shows what receives posted ahead take beside an order,
#: then the search itself, and two more if they take more beside what that one found
_SHARES = (0.15, 0.65, 0.12, 0.08)
#: where the best order within a limit takes longer than this times what none at all could beat without a limit, orders
#: that compute chunks again are searched for too, in this share of the budget
TIGHT, _AGAIN = 1.05, 0.25
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
        self._splits: dict[tuple[tuple[int, ...], bool], ProgramSet] = {}

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
        first, second = rounds
        times = {s: min(t, second.get(s, t)) for s, t in first.items()}
        totals = [sum(seconds.values()) for seconds in rounds]
        self.spread = max(totals) / sum(times.values()) - 1 if any(times.values()) else 0.0
        chunk_seconds: dict[Kind, list[float]] = {kind: [] for kind in ("F", "B", "W")}
        for chunk in range(chunks):
            for kind, column in chunk_seconds.items():
                program = programs.programs[kind, chunk]
                expected = self.planner.roofline.seconds(program.flops, program.moved)
                column.append(0.0 if program.empty else times.get(program.structure, expected))
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
        allowed_chunks = [v for v in chunks_allowed if v <= most] or [1]
        exact: dict[tuple[int, ...], Candidate] = {}

        def of(placement: tuple[int, ...], chunks: int) -> Candidate:
            if placement not in exact:
                cuts = self.cuts(placement, micro_batches)
                if memory_limit is not None:
                    costs, edges = self.exact(placement, cuts)
                else:
                    costs, edges = self.costs(placement, cuts), self.edges(cuts)
                name = placement_name(placement, self.stages)
                exact[placement] = Candidate(name, chunks, placement, cuts, costs, tuple(edges))
            return exact[placement]

        def hunt(seconds: float) -> Proposal:
            def find(allowed: Sequence[float], seconds: float) -> Found:
                return search(
                    self.stages,
                    micro_batches,
                    lambda placement, chunks: of(placement, chunks).costs,
                    edges_of=lambda placement, chunks: of(placement, chunks).edges,
                    memory_limit=allowed,
                    budget_seconds=seconds,
                    chunks_allowed=allowed_chunks,
                    seed=seed,
                )

            found = within(find, limit, self.stages, seconds)
            best = exact[found.schedule.placement]
            choice = Choice.of(found.schedule, best.cuts, found.makespan, found.bound, best.recompute)
            return Proposal(found, choice, best.costs, list(best.edges))

        if not self.planner.strategy.chooses_recompute:
            return hunt(budget_seconds)
        kept = fitting(lambda: hunt(budget_seconds * (1 - _AGAIN)))
        if kept is not None:
            free = min(candidate.bound(micro_batches) for candidate in exact.values())
            if kept.found.makespan <= free * TIGHT:
                return kept
        every = [self.with_again(candidate) for candidate in exact.values()]
        tried = recomputing(every, recomputing_rows(every, micro_batches, limit))
        exact.update({candidate.placement: candidate for candidate in tried})
        if kept is None:
            return hunt(budget_seconds * _AGAIN)
        again = fitting(lambda: hunt(budget_seconds * _AGAIN)) if any(c.recompute for c in tried) else None
        return kept if again is None else faster(kept, again, lambda proposal: proposal.found.makespan)

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
        programs = self.programs(cuts)
        modelled = self.costs(placement, cuts)
        costs = replace(
            self.planner.costs(programs, resident_bytes(programs, placement, self.moments), placement),
            forward=modelled.forward,
            backward_b=modelled.backward_b,
            backward_w=modelled.backward_w,
            backward=(),
        )
        return costs, programs.edges()

    def programs(self, cuts: Sequence[int], *, again: bool = False) -> ProgramSet:
        """The sub-programs between these cuts; again: with every chunk computed again in the backward."""
        key = (tuple(cuts), again)
        if key not in self._splits:
            chunks = len(cuts) + 1
            label = LabelChunks(chunks, positions=list(cuts))
            self._splits[key] = self.planner.split(
                self.program.copy(), label, recompute=range(chunks) if again else ()
            )
        return self._splits[key]

    def with_again(self, candidate: Candidate) -> Candidate:
        """The candidate with what its chunks would cost if they were computed again."""
        cuts = candidate.cuts
        again = costs_again(
            self.planner,
            candidate.costs,
            self.programs(cuts),
            self.programs(cuts, again=True),
            candidate.placement,
        )
        return replace(candidate, again=again)

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


def fitting(find: Callable[[], T]) -> T | None:
    """What is found; None where nothing fits the memory."""
    try:
        return find()
    except PlanError as error:
        if error.check != "memory":
            raise
    return None


def faster(kept: T, again: T, makespan: Callable[[T], float]) -> T:
    """Of two, the second only where it is really faster."""
    return again if makespan(again) < makespan(kept) * (1 - EVEN) else kept


def within(
    find: Callable[[Sequence[float], float], Found], limit: float, stages: int, budget_seconds: float
) -> Found:
    """find(bytes a stage, seconds), within the budget, asked with less where receives posted ahead, which a search
    doesn't count, would exceed the limit beside the plan that it found."""
    allowed = [limit] * stages
    if math.isinf(limit):
        return find(allowed, budget_seconds)
    best: Found | None = None
    for share in _SHARES:
        found = find(allowed, budget_seconds * share)
        over = [max(0.0, p + s - limit) for p, s in zip(found.peak, found.stash, strict=True)]
        allowed = [a - o for a, o in zip(allowed, over, strict=True)]
        if any(over):
            continue
        if best is None or found.makespan < best.makespan:
            best = found
        if share != _SHARES[0] or found.ratio <= 1 + 1e-9:
            break
    return found if best is None else best


def costs_again(
    planner: Planner, kept: Costs, programs: ProgramSet, again: ProgramSet, placement: Sequence[int]
) -> Costs:
    """What chunks cost that are computed again: bytes of their programs `again`; seconds of `programs`, as in `kept`,
    and for what a backward does more, the share of the forward's that a roofline gives it."""
    roofline = planner.roofline

    def modelled(found: ProgramSet, kind: Kind, chunk: int) -> float:
        program = found.programs.get((kind, chunk))
        return 0.0 if program is None else roofline.seconds(program.flops, program.moved)

    def longer(kind: Kind, column: Sequence[float]) -> tuple[float, ...]:
        out = []
        for c, seconds in enumerate(column):
            forward = modelled(programs, "F", c)
            more = modelled(again, kind, c) - modelled(programs, kind, c)
            out.append(seconds + kept.forward[c] * max(0.0, more) / forward if forward else seconds)
        return tuple(out)

    whole = longer("X", kept.backward)
    split = ("B", 0) in again.programs
    half = tuple(x / 2 for x in whole)
    return replace(
        planner.costs(again, [int(p) for p in kept.persistent], placement),
        forward=kept.forward,
        backward_b=longer("B", kept.backward_b) if split else half,
        backward_w=longer("W", kept.backward_w) if split else half,
        backward=whole,
    )


def choose(auto: Auto, micro_batches: int) -> Choice:
    """What `schedule_mode="auto"` runs: placement, chunks, cuts and what is computed again, with an order for them."""
    strategy = auto.planner.strategy
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


def refine(auto: Auto, programs: ProgramSet, micro_batches: int, persistent: Sequence[int]) -> Choice:
    """The choice with its order searched for again, for what the chosen chunks really cost and hold, within the memory
    that the first order took or the strategy's limit; what is computed again is chosen anew. programs: those of the
    choice."""
    planner, stages = auto.planner, auto.stages
    choice, strategy = planner.choice, planner.strategy
    assert choice is not None
    placement, edges = choice.placement, programs.edges()
    name = placement_name(placement, stages)
    costs = planner.costs(programs, persistent, placement)

    def hunt(costs: Costs, recompute: Sequence[int]) -> Choice:
        def find(allowed: Sequence[float], seconds: float) -> Found:
            return search(
                stages,
                micro_batches,
                lambda _placement, _v: costs,
                edges_of=lambda _placement, _v: edges,
                memory_limit=allowed,
                budget_seconds=seconds,
                chunks_allowed=[choice.chunks // stages],
                placements=[name],
                seed=strategy.seed,
            )

        seconds = strategy.search_seconds * (1 - _FIRST) / (2 if choice.recompute else 1)
        if strategy.memory_bytes is None:
            chosen = choice.schedule(micro_batches)
            assert chosen is not None
            found = find([max(simulate(chosen, costs, edges).peak)] * stages, seconds)
        else:
            found = within(find, float(strategy.memory_bytes), stages, seconds)
        return Choice.of(found.schedule, choice.positions, found.makespan, found.bound, recompute)

    if choice.recompute:
        costs = planner.costs(auto.programs(choice.positions), persistent, placement)
    kept = fitting(lambda: hunt(costs, ()))
    if kept is not None and not choice.recompute:
        return kept
    if not strategy.chooses_recompute:
        return hunt(costs, ())  # which says what doesn't fit
    bare = Candidate(name, choice.chunks // stages, placement, choice.positions, costs, tuple(edges))
    candidate = auto.with_again(bare)
    assert strategy.memory_bytes is not None
    (best,) = recomputing([candidate], recomputing_rows([candidate], micro_batches, strategy.memory_bytes))
    if kept is None:
        return hunt(best.costs, best.recompute)
    again = fitting(lambda: hunt(best.costs, best.recompute))
    return kept if again is None else faster(kept, again, lambda found: found.makespan)


def recompute_to_fit(
    auto: Auto, programs: ProgramSet, micro_batches: int, persistent: Sequence[int]
) -> tuple[int, ...]:
    """The chunks that are computed again so that the strategy's schedule fits its limit, on each stage those of least
    compute; all of them where not even that is enough (which the plan then says). programs: with none."""
    planner, limit = auto.planner, auto.planner.strategy.memory_bytes
    assert limit is not None
    placement, edges = planner.placement, programs.edges()
    kept = planner.costs(programs, persistent, placement)

    def plan_of(costs: Costs) -> Plan:
        return Plan.make(planner.schedule(micro_batches, planner.typical(costs)), edges, costs)

    if max(plan_of(kept).simulation.peak) <= limit:
        return ()
    label = LabelChunks(planner.chunks, like=planner.points)
    again = planner.split(auto.program.copy(), label, recompute=range(planner.chunks))
    found = least(plan_of, kept, costs_again(planner, kept, programs, again, placement), limit)
    return tuple(range(planner.chunks)) if found is None else found[0]
