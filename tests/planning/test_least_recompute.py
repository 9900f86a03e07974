"""The least recompute that makes a plan fit: against every set of chunks, and as rows of a table."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain, combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeloom.planning import Costs, Plan
from pipeloom.planning.candidates import Candidate, named_rows, recomputing_rows
from pipeloom.planning.recompute import least, mixed
from pipeloom.schedules import build
from pipeloom.schedules.jobs import Edge, chain_edges
from pipeloom.schedules.schedule import linear, loop

M = 6


def edges(chunks: int, nbytes: int = 1) -> list[Edge]:
    return [edge._replace(nbytes=nbytes) for edge in chain_edges(chunks)]


def both(seconds: list[float], held: list[float]) -> tuple[Costs, Costs]:
    """Costs of chunks whose F takes `seconds` and keeps `held` bytes; again: one byte is kept, F runs twice."""
    b, w = (tuple(share * s for s in seconds) for share in (1.2, 0.8))
    ones = (1.0,) * len(held)
    kept = Costs(
        tuple(seconds),
        b,
        w,
        held_forward=tuple(held),
        held_weight=ones,
        workspace={"B": ones},
        persistent=(5.0,) * 2,
    )
    more = tuple(x + y for x, y in zip(b, seconds, strict=True))
    again = Costs(
        tuple(seconds),
        more,
        w,
        held_forward=ones,
        held_backward=ones,
        workspace={"B": tuple(held)},
        persistent=(5.0,) * 2,
        sent={("F", 0, 1): 3.0},
    )
    return kept, again


def plan_of(costs: Costs) -> Plan:
    schedule = build(
        "1F1B" if costs.chunks == 2 else "VPP", stages=2, chunks=costs.chunks // 2, micro_batches=M
    )
    return Plan.make(schedule, edges(costs.chunks), costs)


def fits(kept: Costs, again: Costs, chunks: Collection[int], limit: float) -> bool:
    return max(plan_of(mixed(kept, again, chunks)).simulation.peak) <= limit


numbers = st.lists(st.integers(1, 9).map(float), min_size=4, max_size=4)


@settings(max_examples=40, deadline=None, derandomize=True)
@example([1.0] * 4, [1.0, 2.0, 2.0, 4.0], 18)
@example([2.0, 6.0, 8.0, 8.0], [4.0, 2.0, 8.0, 9.0], 23)
@example([7.0, 8.0, 7.0, 7.0], [7.0, 4.0, 7.0, 6.0], 18)
@given(numbers, numbers, st.integers(8, 60))
def test_no_cheaper_set_of_chunks_fits(seconds: list[float], held: list[float], limit: int) -> None:
    kept, again = both(seconds, held)
    every = [set(s) for s in chain.from_iterable(combinations(range(4), n) for n in range(5))]
    possible = [s for s in every if fits(kept, again, s, limit)]
    found = least(plan_of, kept, again, limit)
    if found is None:
        assert not fits(kept, again, range(4), limit)
        return
    chunks, plan = found
    assert fits(kept, again, chunks, limit)
    assert max(plan.simulation.peak) <= limit
    assert plan.costs == mixed(kept, again, chunks)
    for stage in (0, 1):
        own = [c for c in chunks if c % 2 == stage]
        if len(own) == 1:
            rest = set(chunks) - set(own)
            assert rest not in possible, "the stage needed none"


def test_mixed_takes_each_chunk_from_its_own_side() -> None:
    kept, again = both([1, 2, 3, 4], [5, 6, 7, 8])
    costs = mixed(kept, again, [0, 2])
    assert costs.held_forward == (1, 6, 1, 8)
    assert costs.backward_b == (
        again.backward_b[0],
        kept.backward_b[1],
        again.backward_b[2],
        kept.backward_b[3],
    )
    assert costs.backward == tuple(b + w for b, w in zip(costs.backward_b, costs.backward_w, strict=True))
    assert [costs.workspace_of("B", c) for c in range(4)] == [5, 1, 7, 1]
    assert costs.sent["F", 0, 1] == 3
    assert mixed(kept, again, [1]).sent["F", 0, 1] == 0
    assert mixed(kept, again, []) is kept


def test_many_chunks_a_stage_are_taken_by_what_they_save() -> None:
    """Ten chunks a stage: those go first that save the most for a second."""
    seconds, held = [1.0] * 20, [float(1 + c // 2) for c in range(20)]
    kept, again = both(seconds, held)
    most = max(plan_of(kept).simulation.peak)
    found = least(plan_of, kept, again, 0.8 * most)
    assert found is not None
    chunks, plan = found
    assert max(plan.simulation.peak) <= 0.8 * most
    for stage in (0, 1):
        own = [c for c in chunks if c % 2 == stage]
        assert own == list(range(20 - 2 * len(own) + stage, 20, 2)), "the largest of the stage"


def test_rows_with_recompute_fit_and_say_what_they_add() -> None:
    seconds, held = [1.0, 1.0], [8.0, 8.0]
    kept, again = both(seconds, held)
    candidate = Candidate("linear", 1, tuple(linear(2)), (), kept, tuple(edges(2)), again)
    plain = {row.name: row for row in named_rows([candidate], M)}
    limit = max(plain["1F1B"].peak) - 1
    rows = {row.name: row for row in recomputing_rows([candidate], M, limit)}
    assert rows.keys() >= {"1F1B", "1F1B split", "ZBH1"}
    assert all(row.fits(limit) for row in rows.values())
    row = rows["1F1B"]
    assert row.candidate.recompute == (0,), "the first stage holds two micro-batches, the last one"
    assert row.candidate.extra == pytest.approx(1 / 6)
    assert row.to_json(1.0, limit)["recompute"] == [0]
    assert row.makespan > plain["1F1B"].makespan
    roomy = recomputing_rows([candidate], M, 1e9)
    assert {r.candidate.recompute for r in roomy} == {()}
    assert recomputing_rows([candidate], M, 6) == []


def test_a_placement_with_two_chunks_a_stage() -> None:
    kept, again = both([1.0, 1.0, 2.0, 2.0], [8.0, 4.0, 8.0, 4.0])
    candidate = Candidate("loop", 2, tuple(loop(2, 2)), (), kept, tuple(edges(4)), again)
    vpp = next(row for row in named_rows([candidate], M) if row.name == "VPP")
    row = next(r for r in recomputing_rows([candidate], M, max(vpp.peak) - 1) if r.name == "VPP")
    assert row.candidate.recompute == (0,), "its second runs too, but the first costs half of it"
