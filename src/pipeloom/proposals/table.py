"""The making of a table of plans: candidates, named schedules, searches, and what is said about them.

Takes an Auto (a captured model with its cuts and costs) and a Source; gives the Proposals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..auto import TIGHT, Auto, within
from ..planning import PlanError
from ..planning.candidates import (
    AUTO,
    EVEN,
    Candidate,
    Row,
    chosen,
    named_rows,
    placements,
    recomputing,
    recomputing_rows,
)
from ..planning.plan import Plan
from ..planning.search import Found, search
from ..program.annotations import module_of
from ..report.figures import format_bytes, format_time
from ..strategy import ALL, Strategy, StrategyError
from .found import Proposals
from .source import Source

GIB = 2**30
#: shares of the budget: a search on each placement, more time for the best of them, both once more where chunks are
#: computed again; the rest is for the next GiB
_EACH, _BEST = 0.35, 0.3
_AGAIN = 0.4
#: what the peak of a plan under no limit of the user's may grow by when it is searched for again
_ROOM = 1.05


class Table:
    """The making of one Proposals."""

    def __init__(
        self, auto: Auto, source: Source, micro_batches: int, chunks: Sequence[int], budget: float
    ) -> None:
        self.auto = auto
        self.source = source
        self.strategy = auto.planner.strategy
        self.stages = self.strategy.pp_degree
        self.micro_batches = micro_batches
        self.budget = budget
        self.candidates = self._candidates(chunks)
        self.rows = named_rows(self.candidates, micro_batches)
        self.limit, self.memory = self._limit()

    def proposals(self) -> Proposals:
        """The table, filled."""
        self._search(self.candidates, 1.0)
        best = chosen(self.rows, self.limit)
        if self.strategy.recompute in (None, AUTO) and self._is_tight(best):
            best = self._recompute(best)
        limit = math.inf if best is None else self.limit
        bound = min(c.bound(self.micro_batches, limit) for c in self.candidates)
        why = self._why(best, bound)
        gib = self._next_gib(best)

        def rank(row: Row) -> tuple[bool, bool, float]:
            return (row is not best, not row.fits(self.limit), row.makespan)

        rows = tuple(sorted(self.rows, key=rank))
        return Proposals(
            rows,
            best,
            why,
            bound,
            self.limit,
            self.memory,
            self.source.words(self.auto),
            gib,
            self.micro_batches,
            tuple(self._module_names(row) for row in rows),
            None if best is None else self._runs(best),
        )

    def _candidates(self, chunks: Sequence[int]) -> list[Candidate]:
        if not chunks or any(not isinstance(v, int) or v < 1 for v in chunks):
            raise StrategyError(
                f"chunks={chunks!r}: write whole numbers of at least 1, the chunks a stage to try"
            )
        most = (len(self.auto.allowed) + 1) // self.stages
        able = [found for found in placements(self.stages, chunks) if found[1] <= most]
        if not able:  # let partitioning say why
            able = placements(self.stages, [min(chunks)])[:1]
        out = []
        for name, turns, placement in able:
            cuts = self.auto.cuts(placement, self.micro_batches)
            costs, edges = self.auto.exact(placement, cuts)
            out.append(Candidate(name, turns, placement, cuts, costs, tuple(edges)))
        return out

    def _limit(self) -> tuple[float, str]:
        """Bytes a rank, and where the number comes from."""
        given = self.strategy.memory_bytes
        if given is not None:
            return float(given), f"{format_bytes(given)} a rank"
        if math.isfinite(self.source.memory):
            return (
                self.source.memory,
                f"{format_bytes(self.source.memory)} a rank, all that {self.source.name} has",
            )
        plain = next((row for row in self.rows if row.schedule == "1F1B"), self.rows[0])
        need = max(plain.peak)
        return need, (
            f"{format_bytes(need)} a rank, what {plain.name} on {shape_of(plain.candidate)} needs: no limit was given"
        )

    # ---- searches

    def _search(self, candidates: Sequence[Candidate], share: float) -> None:
        """Auto's row for each candidate, then more time for the best of them."""
        found: list[tuple[Candidate, Found]] = []
        for candidate in candidates:
            try:
                found.append(
                    (candidate, self._hunt([candidate], self.limit, share * _EACH / len(candidates)))
                )
            except PlanError as error:
                if error.check != "memory":
                    raise
        if not found:
            return
        best = min(found, key=lambda pair: pair[1].makespan)
        again = self._hunt([best[0]], self.limit, share * _BEST)
        for candidate, answer in found:
            if candidate is best[0] and again.makespan < answer.makespan:
                answer = again
            plan = Plan.make(answer.schedule, candidate.edges, candidate.costs)
            self.rows.append(Row(AUTO, True, candidate, plan))

    def _is_tight(self, best: Row | None) -> bool:
        """Whether nothing fits, or the limit costs so much time that computing chunks again may cost less."""
        free = min(candidate.bound(self.micro_batches) for candidate in self.candidates)
        return best is None or best.makespan > TIGHT * free

    def _recompute(self, kept: Row | None) -> Row | None:
        """More rows, of plans that fit as some chunks are computed again, and the best of all."""
        every = [self.auto.with_again(candidate) for candidate in self.candidates]
        rows = recomputing_rows(every, self.micro_batches, self.limit)
        self.rows += [row for row in rows if row.candidate.recompute]
        tried = [candidate for candidate in recomputing(every, rows) if candidate.recompute]
        if tried:
            self._search(tried, _AGAIN)
        best = chosen(self.rows, self.limit)
        if kept is not None:
            self.candidates = [*self.candidates, *tried]
        elif best is not None:
            self.candidates = tried
        return best

    def _hunt(self, candidates: Sequence[Candidate], limit: float, share: float) -> Found:
        by_placement = {c.placement: c for c in candidates}
        names = sorted({c.name for c in candidates})

        def find(allowed: Sequence[float], seconds: float) -> Found:
            return search(
                self.stages,
                self.micro_batches,
                lambda placement, _v: by_placement[tuple(placement)].costs,
                edges_of=lambda placement, _v: by_placement[tuple(placement)].edges,
                memory_limit=allowed,
                budget_seconds=seconds,
                chunks_allowed=[c.chunks for c in candidates],
                placements=names,
                seed=self.strategy.seed,
            )

        return within(find, limit, self.stages, self.budget * share)

    def _next_gib(self, best: Row | None) -> str:
        limit = self.limit + GIB
        if best is not None:
            if all(row.fits(self.limit) for row in self.rows):
                return "nothing: every plan here fits already"
            if min(c.bound(self.micro_batches, limit) for c in self.candidates) >= best.makespan * (1 - EVEN):
                return "nothing: no order could be faster"
        rows = list(self.rows)
        try:
            kept = self.candidates if best is None else [c for c in self.candidates if not c.recompute]
            kept = kept or self.candidates
            found = self._hunt(kept, limit, 1 - (_EACH + _BEST) * (1 + _AGAIN))
            candidate = next(c for c in kept if c.placement == found.schedule.placement)
            rows.append(
                Row(AUTO, True, candidate, Plan.make(found.schedule, candidate.edges, candidate.costs))
            )
        except PlanError as error:
            if error.check != "memory":
                raise
        more = chosen(rows, limit)
        if more is None:
            return "nothing would fit either"
        text = f"{more.name} on {shape_of(more.candidate)}"
        if best is None:
            return f"{text} would fit: a step of {format_time(more.step)}"
        gain = 1 - more.makespan / best.makespan
        return f"step {gain:.1%} shorter, with {text}" if gain > EVEN else "nothing"

    # ---- words

    def _why(self, best: Row | None, bound: float) -> str:
        if best is None:
            lean = min(self.rows, key=lambda row: max(row.peak))
            worst = max(range(self.stages), key=lean.peak.__getitem__)
            return (
                f"nothing fits {format_bytes(self.limit)} a rank: the leanest, {lean.name} on "
                f"{shape_of(lean.candidate)}, needs {format_bytes(lean.peak[worst])} on rank {worst}; take more ranks, "
                f"smaller micro-batches{self._advice()}"
            )
        fitting = [row for row in self.rows if row.fits(self.limit)]
        text = f"{best.name} on {shape_of(best.candidate)}: the fastest of {len(fitting)} plans that fit"
        if best.candidate.recompute:
            text += f", though what it computes again is {best.candidate.extra:.1%} more"
        others = [row for row in fitting if (row.schedule == AUTO) != (best.schedule == AUTO)]
        if others:
            second = min(others, key=lambda row: row.makespan)
            gain = second.makespan / best.makespan - 1
            rival = f"the best named one, {second.name}" if best.schedule == AUTO else "what the search found"
            text += f", {gain:.1%} faster than {rival}" if gain > EVEN else f", and as fast as {rival}"
        above = best.makespan / bound - 1 if bound else 0.0
        return f"{text}; {above:.1%} above the lower bound"

    def _advice(self) -> str:
        """What else would make a plan fit."""
        wanted = self.strategy.recompute
        if wanted in (None, AUTO):
            return "; it doesn't even if every chunk is computed again in the backward"
        return "" if wanted == ALL else ', or recompute="auto"'

    def _module_names(self, row: Row) -> tuple[str, ...]:
        names = (module_of(self.auto.order[cut]) for cut in row.candidate.cuts)
        return tuple(name or "the top level" for name in names)

    def _runs(self, best: Row) -> Strategy:
        changes: dict[str, Any] = {"costs": "measured"}
        if self.strategy.memory_limit is not None or math.isfinite(self.source.memory):
            changes["memory_limit"] = int(self.limit)
        elif best.schedule == AUTO:
            changes["memory_limit"] = math.ceil(max(best.peak) * _ROOM)
        if best.candidate.recompute:
            changes["recompute"] = AUTO
        if best.schedule != AUTO:
            changes |= {"schedule_mode": best.schedule, "vpp_degree": best.candidate.chunks}
            changes["split_backward"] = best.split
        return self.strategy.replace(**changes)


def shape_of(candidate: Candidate) -> str:
    if candidate.chunks == 1:
        return "1 chunk a stage"
    return f"{candidate.chunks} chunks a stage ({candidate.name})"
