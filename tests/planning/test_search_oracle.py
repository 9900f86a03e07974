"""The search against an exact solver (CP-SAT) on small cases: never below its optimum, and equal to it."""

from __future__ import annotations

import pytest

from pipeloom.planning.case import Case
from pipeloom.planning.search import search
from search_cases import benchmark_case

cp_model = pytest.importorskip("ortools.sat.python.cp_model")

#: whole units of time in one: costs are multiples of 1/20
SCALE = 20


def optimum(case: Case, below: float, seconds: float) -> tuple[float, bool]:
    """(the shortest makespan that an exact model of the case has, whether that is proven). below: a makespan
    that is known to be possible."""
    model = cp_model.CpModel()
    costs, total, last = case.costs, len(case.placement), case.micro_batches - 1
    horizon = round(below * SCALE)
    length = {
        kind: [round(x * SCALE) for x in given]
        for kind, given in (("F", costs.forward), ("B", costs.backward_b), ("W", costs.backward_w))
    }
    start = {
        (kind, c, m): model.NewIntVar(0, horizon, "")
        for kind in "FBW"
        for c in range(total)
        for m in range(last + 1)
    }

    def after(later: tuple[str, int, int], earlier: tuple[str, int, int], delay: float = 0) -> None:
        kind, c, _ = earlier
        model.Add(start[later] >= start[earlier] + length[kind][c] + round(delay * SCALE))

    for m in range(last + 1):
        for c in range(total):
            after(("B", c, m), ("F", c, m))
            after(("W", c, m), ("B", c, m))
            for kind in "FBW":
                if m:  # micro-batches are alike, so ascending orders lose nothing
                    after((kind, c, m), (kind, c, m - 1))
        for edge in case.edges:
            delay = costs.delay(edge, case.placement)
            after((edge.direction, edge.target, m), (edge.direction, edge.source, m), delay)
    end = model.NewIntVar(0, horizon, "")
    for stage, chunks in enumerate(case.own):
        jobs = [(k, c, m) for k in "FBW" for c in chunks for m in range(last + 1)]
        model.AddNoOverlap(
            [model.NewFixedSizeIntervalVar(start[k, c, m], length[k][c], "") for k, c, m in jobs]
        )
        lives = []
        for c in chunks:
            for m in range(last + 1):
                over = model.NewIntVar(0, horizon, "")
                model.Add(over == start["W", c, m] + length["W"][c])
                life = model.NewIntVar(0, horizon, "")
                lives.append(model.NewIntervalVar(start["F", c, m], life, over, ""))
            model.Add(end >= start["W", c, last] + length["W"][c])
        most = int(case.arrays.limit[stage] * case.chunks)
        model.AddCumulative(lives, [1] * len(lives), most)
    model.Minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    status = solver.Solve(model)
    return solver.BestObjectiveBound() / SCALE, status == cp_model.OPTIMAL


@pytest.mark.parametrize(
    ("stages", "micro_batches", "placement", "chunks", "times"),
    [
        (2, 4, "linear", 1, 1),
        (2, 4, "v", 2, 1),
        (3, 4, "linear", 1, 1),
        (2, 4, "loop", 2, 2),
        (4, 4, "linear", 1, 0.5),
    ],
)
def test_equal_to_the_optimum(
    stages: int, micro_batches: int, placement: str, chunks: int, times: float
) -> None:
    costs = (1, 1.1, 0.8, 0.1)
    case = benchmark_case(stages, micro_batches, placement, chunks, costs, times)
    found = search(
        stages,
        micro_batches,
        lambda _, __: case.costs,
        memory_limit=times * min(stages, micro_batches),
        chunks_allowed=[chunks],
        placements=[placement],
        visits=3_000_000,
    )
    best, proven = optimum(case, found.makespan, seconds=30)
    assert proven
    assert found.makespan == pytest.approx(best)
