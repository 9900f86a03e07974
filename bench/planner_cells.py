"""A cell of the planner's benchmark: one number of stages, of micro-batches, one set of costs, one memory limit.

Measures every named schedule, torch's schedules and the search under the same simulator. A unit of memory is one
micro-batch's activations on one stage; limits are multiples of 1F1B's peak, min(S, M) units.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from pipeloom.planning import Costs, lower, simulate
from pipeloom.planning.search import search
from pipeloom.schedules import Schedule, build, chain_edges
from pipeloom.schedules.catalogue import CATALOGUE
from pipeloom.schedules.timing import Stuck
from torch_orders import TORCH, torch_schedule

CHUNKS: Final = (1, 2, 3, 4)
STAGES: Final = (4, 8, 16)
#: micro-batches a stage
DEPTHS: Final = (1, 2, 4)
#: F, B, W of a stage; a transfer
COSTS: Final = {
    "1/1/1": (1.0, 1.0, 1.0, 0.0),
    "1/1/1, comm 0.1": (1.0, 1.0, 1.0, 0.1),
    "1/1.1/0.8, comm 0.1": (1.0, 1.1, 0.8, 0.1),
}
LIMITS: Final = (0.5, 1.0, 2.0)
#: room for rounding, in units of memory
SLACK: Final = 1e-6


class Cell(NamedTuple):
    """memory: times 1F1B's peak."""

    stages: int
    micro_batches: int
    costs: str
    memory: float

    @property
    def limit(self) -> float:
        """In units of memory."""
        return self.memory * min(self.stages, self.micro_batches)

    def costs_of(self, chunks: int) -> Costs:
        return Costs.per_stage(self.stages, chunks, *COSTS[self.costs])

    @property
    def work(self) -> float:
        """Of one stage."""
        return self.micro_batches * sum(COSTS[self.costs][:3])


def all_cells() -> list[Cell]:
    return [
        Cell(stages, stages * depth, costs, memory)
        for memory in LIMITS
        for costs in COSTS
        for stages in STAGES
        for depth in DEPTHS
    ]


@dataclass
class Result:
    """named, torch: makespans by name, of the best number of chunks that fits; where ours don't fit as they stand,
    made for the limit. auto: makespan. bound: of all placements and V up to 4. posted: the most receives that auto's
    plan has posted on a stage at once."""

    cell: Cell
    bound: float
    auto: float
    plan: str
    seed: str
    named: dict[str, float]
    torch: dict[str, float]
    peak: float
    posted: int
    visits: int
    seconds: float
    late: bool


def measure(cell: Cell, budget: float) -> Result:
    """Everything about a cell. budget: seconds for the search."""
    found = search(
        cell.stages,
        cell.micro_batches,
        lambda _, chunks: cell.costs_of(chunks),
        memory_limit=cell.limit,
        budget_seconds=budget,
        chunks_allowed=CHUNKS,
    )
    return Result(
        cell,
        found.bound,
        found.makespan,
        f"{found.placement} V {found.chunks}",
        found.seed,
        _least(_named(cell)),
        _least(_torch(cell)),
        max(found.peak),
        _posted(found.schedule, cell.costs_of(found.chunks)),
        found.visits,
        found.seconds,
        found.late,
    )


def _posted(schedule: Schedule, costs: Costs) -> int:
    """The most receives that a stage of the lowered plan has posted at once."""
    lowered = lower(schedule, chain_edges(schedule.total_chunks, 1), costs)
    counting = Costs.uniform(schedule.total_chunks)  # jobs hold nothing, a message one byte
    return round(max(simulate(schedule, counting, lowered=lowered).peak))


def _least(made: Iterator[tuple[str, float]]) -> dict[str, float]:
    best: dict[str, float] = {}
    for name, makespan in made:
        best[name] = min(makespan, best.get(name, makespan))
    return best


def _named(cell: Cell) -> Iterator[tuple[str, float]]:
    f, b, w, comm = COSTS[cell.costs]
    for name, entry in CATALOGUE.items():
        for chunks in CHUNKS if entry.chunks is None else (entry.chunks,):
            for split in (True,) if entry.splits else (False, True):
                for limit in ({}, {"memory_limit": cell.limit}):
                    try:
                        schedule = build(
                            name,
                            stages=cell.stages,
                            chunks=chunks,
                            micro_batches=cell.micro_batches,
                            split_backward=split,
                            unit_costs=(f / chunks, b / chunks, w / chunks, comm),
                            **limit,
                        )
                    except ValueError:
                        break
                    simulation = simulate(schedule, cell.costs_of(chunks))
                    if max(simulation.peak) <= cell.limit + SLACK:
                        yield name, simulation.makespan
                        break


def _torch(cell: Cell) -> Iterator[tuple[str, float]]:
    for name, only in TORCH.items():
        for chunks in CHUNKS if only is None else (only,):
            schedule = torch_schedule(name, cell.stages, chunks, cell.micro_batches)
            if schedule is None:
                continue
            try:
                simulation = simulate(schedule, cell.costs_of(chunks))
            except Stuck:
                continue
            if max(simulation.peak) <= cell.limit + SLACK:
                yield name, simulation.makespan


def save(path: Path, result: Result, budget: float) -> None:
    """Adds a line to the file of finished cells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"budget": budget, **asdict(result), "cell": list(result.cell)}) + "\n")


def load(path: Path, budget: float) -> dict[Cell, Result]:
    """The finished cells that had this budget."""
    if not path.exists():
        return {}
    out = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        data: dict[str, Any] = json.loads(line)
        if data.pop("budget") == budget:
            result = Result(**{**data, "cell": Cell(*data["cell"])})
            out[result.cell] = result
    return out
