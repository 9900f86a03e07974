"""schedule_mode "auto": the best order found over placements, chunks a stage and orders, with a bound.

    found = search(8, 16, lambda placement, chunks: Costs.per_stage(8, chunks, 1, 1.1, 0.8, 0.1), memory_limit=8)
    found.schedule, found.makespan, found.ratio        # ratio: makespan ÷ a time that no order can beat

Each candidate (a placement and V) gets seeds (seeds.py); the best few anneal (anneal.py), in rounds that
share the budget out: after each, the better third goes on with the same budget (successive halving, Jamieson
and Talwalkar 2016). A candidate whose own bound is no better than what is found is dropped; at the bound of
all candidates the search stops.

The budget is counted in jobs timed ("visits"); one in seconds is turned into visits by the speed of the first
moments, and cut at its end if need be. The same seed and visits give the same answer on every machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ..schedules.jobs import Edge
from ..schedules.schedule import Schedule, linear, loop, vee
from .anneal import Annealed, anneal
from .bounds import lower_bound
from .case import Case, Order, unit
from .costs import Costs
from .errors import PlanError
from .lower import lower
from .periodic import unroll
from .seeds import Seed, Seeds
from .simulate import simulate
from .verify import ascending, verify

Candidate = tuple[int, ...]

PLACEMENTS: Final = ("linear", "loop", "v")

#: annealings that begin, a candidate
_ARMS: Final = 3
#: seeds that are this much slower than the best one are left alone: annealing gains less
_HOPELESS: Final = 1.15
#: of each round's annealings, the share that goes on
_KEEP: Final = 3
#: (hot, cycles) of the rounds
_ROUNDS: Final = ((0.2, 1), (0.1, 1), (0.1, 3))
#: from this many micro-batches a stage on, orders of fewer are improved and repeated: of so many a stage, for the best
#: so many candidates, with this share of the budget
_LONG: Final = 4
_SHORT: Final = (2.0, 2.5, 3.0)
_REPEATED: Final = 2
_REPEATING: Final = 0.25
#: one repetition takes about as long as timing so many times its jobs
_UNROLLING: Final = 5
#: share of the budget for rarer seeds
_SEEDING: Final = 0.3


@dataclass
class Tried:
    """A candidate. bound: of its placement; seeds: how many fitted; seed_makespan: of the best of them, named
    `seed`; makespan: the best in the end; visits: jobs timed. makespan is infinite where nothing fitted."""

    placement: str
    chunks: int
    bound: float
    seeds: int = 0
    seed: str = ""
    seed_makespan: float = math.inf
    makespan: float = math.inf
    visits: int = 0


@dataclass(frozen=True)
class Found:
    """The answer, in the units of the costs.

    bound: no order of any candidate ends earlier; ratio: makespan ÷ bound. peak[stage]: bytes of its jobs;
    stash[stage]: more bytes for receives that are posted ahead, in the lowered plan. seed: the order that the
    annealing began with, and seed_makespan. named: makespan of the best named schedule that fits, infinite if
    none does. visits, moves: jobs timed and moves tried; seconds: without compiling. late: the time ended
    before the visits did, so another machine may find another answer.
    """

    schedule: Schedule
    makespan: float
    bound: float
    ratio: float
    peak: tuple[float, ...]
    stash: tuple[float, ...]
    placement: str
    chunks: int
    seed: str
    seed_makespan: float
    named: float
    tried: tuple[Tried, ...]
    visits: int
    moves: int
    seconds: float
    late: bool


@dataclass
class _Arm:
    """An annealing that goes on from round to round."""

    case: Case
    tried: Tried
    seed: Seed
    order: Order
    makespan: float


def search(
    stages: int,
    micro_batches: int,
    costs_of: Callable[[Candidate, int], Costs],
    *,
    edges_of: Callable[[Candidate, int], Sequence[Edge]] | None = None,
    memory_limit: float | Sequence[float] | None = None,
    budget_seconds: float = 10.0,
    visits: int | None = None,
    chunks_allowed: Sequence[int] = (1, 2, 3, 4),
    placements: Sequence[str] = PLACEMENTS,
    seed: int = 0,
) -> Found:
    """The best schedule found for M micro-batches on S stages.

    costs_of(placement, V), edges_of(placement, V): of each candidate's chunks; edges are a chain by default.
    memory_limit: bytes for all stages or for each, persistent ones included, receives posted ahead not.
    placements: "linear" (V 1), "loop" and "v" (V above 1). visits: the budget in jobs timed, instead of
    seconds. Raises ValueError for bad arguments, PlanError("memory") where no order fits.
    """
    candidates = _candidates(stages, micro_batches, chunks_allowed, placements)
    cases = []
    tried = []
    for name, chunks, placement in candidates:
        edges = None if edges_of is None else edges_of(placement, chunks)
        case = Case(placement, micro_batches, costs_of(placement, chunks), edges, memory_limit)
        cases.append(case)
        bound = lower_bound(placement, micro_batches, case.costs, case.edges, memory_limit)
        tried.append(Tried(name, chunks, bound))
    hunt = _Hunt(cases, tried, seed)
    hunt.warm_up()
    hunt.begin(budget_seconds, visits)
    hunt.plant()
    hunt.repeat()
    hunt.rounds()
    return hunt.found()


def _candidates(
    stages: int, micro_batches: int, chunks_allowed: Sequence[int], placements: Sequence[str]
) -> list[tuple[str, int, Candidate]]:
    if stages < 1 or micro_batches < 1:
        raise ValueError(f"stages and micro_batches must be at least 1 (got {stages}, {micro_batches})")
    unknown = [p for p in placements if p not in PLACEMENTS]
    if unknown or not placements:
        raise ValueError(f"placements are {', '.join(PLACEMENTS)} (got {list(placements)!r})")
    if not chunks_allowed or any(v < 1 for v in chunks_allowed):
        raise ValueError(f"chunks_allowed are whole numbers of at least 1 (got {list(chunks_allowed)!r})")
    out: dict[Candidate, tuple[str, int, Candidate]] = {}
    for name in placements:
        for chunks in sorted(set(chunks_allowed)):
            if name == "linear" and chunks == 1:
                placement = tuple(linear(stages))
            elif name == "loop" and chunks > 1:
                placement = tuple(loop(stages, chunks))
            elif name == "v" and chunks > 1:
                placement = tuple(vee(stages, chunks))
            else:
                continue
            out.setdefault(placement, (name, chunks, placement))
    if not out:
        raise ValueError(
            f"no placement of {list(placements)} takes {list(chunks_allowed)} chunks a stage: linear takes 1, "
            "loop and v take 2 or more"
        )
    return list(out.values())


class _Hunt:
    """The state of one search."""

    def __init__(self, cases: list[Case], tried: list[Tried], seed: int) -> None:
        self.cases = cases
        self.tried = tried
        self.seed = seed
        self.bound = min(t.bound for t in tried)
        self.tiny = 1e-9 * max(self.bound, unit(cases[0]))
        self.arms: list[_Arm] = []
        self.best: _Arm | None = None
        self.named = math.inf
        self.used = self.moves = 0
        self.late = False

    def warm_up(self) -> None:
        """Compiles, or loads what was compiled before, so that no budget pays for it."""
        case = Case((0,), 2, Costs.uniform(1))
        grown = Seeds(case)
        grown.usual()
        anneal(case, grown.found[0].order, visits=1)

    def begin(self, budget_seconds: float, visits: int | None) -> None:
        self.start = time.monotonic()
        self.deadline = math.inf if visits is not None else self.start + budget_seconds
        self.visits = visits

    def plant(self) -> None:
        """The seeds of all candidates, the rarer ones first for those that look best; then, where the budget is in
        seconds, what is left of it in visits."""
        grown = [Seeds(case, self.deadline) for case in self.cases]
        for some in grown:
            some.usual()
        allowance = self.visits if self.visits is not None else int(4e7 * (self.deadline - self.start))
        allowance = int(allowance * _SEEDING)
        order = sorted(
            range(len(grown)), key=lambda n: grown[n].found[0].makespan if grown[n].found else math.inf
        )
        for number in order:
            if allowance > 0 and not self.late:
                before = grown[number].visits
                grown[number].more(allowance // 2)
                allowance -= grown[number].visits - before
                self.late = grown[number].late
        for case, tried, some in zip(self.cases, self.tried, grown, strict=True):
            self._charge(tried, some.visits)
            found = some.found
            tried.seeds = len(found)
            if found:
                tried.seed, tried.seed_makespan = found[0].order.name, found[0].makespan
            self.named = min(self.named, some.named)
            for seed in found[:_ARMS]:
                arm = _Arm(case, tried, seed, seed.order, seed.makespan)
                self.arms.append(arm)
                self._keep(arm)
        if self.best is None:
            raise PlanError("memory", self._too_little())
        if self.visits is None:
            self.visits = self.used + int(self._speed() * max(0.0, self.deadline - time.monotonic()))

    def _speed(self) -> float:
        """Jobs timed a second, by a short annealing."""
        assert self.best is not None
        if self._done():
            return 0.0
        begin = time.perf_counter()
        run = anneal(self.best.case, self.best.order, visits=2_000_000, seed=self.seed)
        return run.visits / max(time.perf_counter() - begin, 1e-9)

    def repeat(self) -> None:
        """For many micro-batches: orders for a few, improved and then repeated (periodic.py)."""
        assert self.visits is not None
        stages, micro_batches = self.cases[0].stages, self.cases[0].micro_batches
        if micro_batches < _LONG * stages or stages == 1:
            return
        likely = {id(arm.case): arm for arm in sorted(self._promising(), key=lambda arm: -arm.makespan)}
        chosen = list(likely.values())[: -_REPEATED - 1 : -1]
        share = int((self.visits - self.used) * _REPEATING) // max(1, len(chosen) * len(_SHORT))
        for long in chosen:
            for depth in _SHORT:
                if self._done() or self.late:
                    return
                self._repeat(long, int(depth * stages), share)

    def _repeat(self, long: _Arm, micro_batches: int, visits: int) -> None:
        case = Case(
            long.case.placement, micro_batches, long.case.costs, long.case.edges, long.case.memory_limit
        )
        grown = Seeds(case, self.deadline)
        grown.usual()
        grown.more(visits // 3)
        self._charge(long.tried, grown.visits)
        self.late = self.late or grown.late
        chosen = grown.found[:_ARMS]
        share = max(0, visits - grown.visits) // max(1, len(chosen))
        tries = share // 2 // (_UNROLLING * long.case.jobs)
        for seed in chosen:
            if self.late or tries < 1:
                return
            run = anneal(
                case, seed.order, visits=share // 2, seed=self.seed, hot=0.01, deadline=self.deadline
            )
            self._spend(long.tried, run)
            self._charge(long.tried, tries * _UNROLLING * long.case.jobs)
            if longer := unroll(case, run.order, long.case, tries):
                arm = _Arm(long.case, long.tried, Seed(*longer), *longer)
                self.arms.append(arm)
                self._keep(arm)

    def rounds(self) -> None:
        """Anneals what is promising, ever fewer orders for ever longer."""
        assert self.visits is not None
        for number, (hot, cycles) in enumerate(_ROUNDS):
            self.arms = sorted(self._promising(), key=lambda arm: arm.makespan)
            if number:
                self.arms = self.arms[: math.ceil(len(self.arms) / _KEEP)]
            share = max(0, self.visits - self.used) // (len(_ROUNDS) - number)
            for index, arm in enumerate(self.arms):
                if self._done() or self.late:
                    return
                run = anneal(
                    arm.case,
                    arm.order,
                    visits=share // len(self.arms),
                    seed=self.seed * 1009 + number * 101 + index,
                    hot=hot,
                    cycles=cycles,
                    goal=arm.tried.bound,
                    deadline=self.deadline,
                )
                self._spend(arm.tried, run)
                arm.order, arm.makespan = run.order, run.makespan
                self._keep(arm)

    def _promising(self) -> list[_Arm]:
        """The annealings that may still beat the best order."""
        best = self._makespan()
        return [
            arm
            for arm in self.arms
            if arm.tried.bound < best - self.tiny and arm.makespan <= best * _HOPELESS
        ]

    def _spend(self, tried: Tried, run: Annealed) -> None:
        self._charge(tried, run.visits)
        self.moves += run.moves
        self.late = self.late or run.late

    def _charge(self, tried: Tried, visits: int) -> None:
        tried.visits += visits
        self.used += visits

    def _keep(self, arm: _Arm) -> None:
        arm.tried.makespan = min(arm.tried.makespan, arm.makespan)
        if self.best is None or arm.makespan < self.best.makespan - self.tiny:
            self.best = _Arm(arm.case, arm.tried, arm.seed, arm.order, arm.makespan)

    def _makespan(self) -> float:
        return math.inf if self.best is None else self.best.makespan

    def _done(self) -> bool:
        return self._makespan() <= self.bound + self.tiny

    def _too_little(self) -> str:
        lines = []
        for case, tried in zip(self.cases, self.tried, strict=True):
            base = [*case.costs.persistent, *[0.0] * case.stages][: case.stages]
            least = [float(x) + b for x, b in zip(case.least(), base, strict=True)]
            worst = max(range(case.stages), key=least.__getitem__)
            lines.append(
                f"{tried.placement}, {tried.chunks} chunks a stage: {least[worst]:,.6g} on stage {worst}"
            )
        return (
            "no order fits the memory limit. One micro-batch alone needs, in the units of the costs: "
            + "; ".join(lines)
            + ": allow more, take smaller micro-batches, more stages, or recompute"
        )

    def found(self) -> Found:
        """The best, verified."""
        best = self.best
        assert best is not None
        case = best.case
        schedule = case.decode(Order("auto", best.order.entries))
        lowered = lower(schedule, case.edges, case.costs)
        verify(lowered)
        simulation = simulate(schedule, case.costs, case.edges)
        if not ascending(schedule):
            raise PlanError("order", "auto: micro-batches don't ascend (a defect of the search)")
        if abs(simulation.makespan - best.makespan) > 1e-6 * max(best.makespan, self.tiny):
            raise PlanError(
                "time",
                f"auto: the search timed {best.makespan:.9g} and the simulator {simulation.makespan:.9g} (a "
                "defect of the search)",
            )
        _check_memory(simulation.peak, case)
        whole = simulate(schedule, case.costs, case.edges, lowered)
        return Found(
            schedule,
            simulation.makespan,
            self.bound,
            simulation.makespan / self.bound if self.bound > 0 else 1.0,
            simulation.peak,
            tuple(a - b for a, b in zip(whole.peak, simulation.peak, strict=True)),
            best.tried.placement,
            best.tried.chunks,
            best.seed.order.name,
            best.seed.makespan,
            self.named,
            tuple(self.tried),
            self.used,
            self.moves,
            time.monotonic() - self.start,
            self.late,
        )


def _check_memory(peak: Sequence[float], case: Case) -> None:
    base = [*case.costs.persistent, *[0.0] * case.stages][: case.stages]
    for stage, (most, limit) in enumerate(zip(peak, case.arrays.limit.tolist(), strict=True)):
        if most - base[stage] > limit:
            raise PlanError(
                "memory",
                f"auto: stage {stage} needs {most:,.6g} bytes and may use {limit + base[stage]:,.6g} (a defect of "
                "the search)",
            )
