"""One schedule tried on given costs, no model needed: what `pipeloom simulate` prints.

    trial("ZBV", numbers("1,1.1,0.8", comm=0.1), 8, 32, chunks=2).simulation.makespan
    trial("auto", numbers(), 8, 32, memory="1x", budget="30s").bound

Takes a name of the catalogue, "auto" or a CSV file of torch.distributed.pipelining, and costs of a stage or of each
chunk. Memory is in units of one micro-batch's activations of one stage, so that 1F1B's peak is min(S, M).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

from ..schedules import build
from ..schedules.schedule import Schedule
from ..schedules.timing import Stuck
from .bounds import lower_bound
from .costs import Costs
from .errors import PlanError
from .exchange import read_csv
from .explicit import check_jobs
from .search import search
from .simulate import Simulation, simulate

AUTO: Final = "auto"
_CHUNKS: Final = (1, 2, 3, 4)
_COLUMNS: Final = ("forward", "backward_b", "backward_w")


@dataclass(frozen=True)
class Numbers:
    """Costs in any unit: (F, B, W, transfer) of a stage, of which a chunk costs its share; or of each chunk."""

    stage: tuple[float, float, float, float]
    chunks: Costs | None = None

    def costs(self, stages: int, chunks: int) -> Costs:
        """Of each of a stage's `chunks`. Raises ValueError where the chunks' own costs are of another number."""
        if self.chunks is None:
            return Costs.per_stage(stages, chunks, *self.stage)
        if self.chunks.chunks != stages * chunks:
            raise ValueError(
                f"the costs are of {self.chunks.chunks} chunks, which isn't {stages} stages × {chunks} chunks a stage"
            )
        return self.chunks

    def each(self, stages: int) -> int | None:
        """Chunks a stage that these are costs of; None: any number."""
        if self.chunks is None:
            return None
        if self.chunks.chunks % stages:
            raise ValueError(
                f"the costs are of {self.chunks.chunks} chunks, which can't be spread evenly over {stages} stages"
            )
        return self.chunks.chunks // stages


@dataclass(frozen=True)
class Trial:
    """A simulated schedule and the bound on its makespan: of its placement, or of all that auto could choose from.
    notes: what a search found out, (name, text)."""

    schedule: Schedule
    simulation: Simulation
    bound: float
    notes: tuple[tuple[str, str], ...] = ()


def numbers(costs: str = "1,1,1", comm: float = 0.0) -> Numbers:
    """F, B and W of a stage as text, and a transfer. Raises ValueError."""
    parts = costs.split(",")
    values = [float(part) if _NUMBER.fullmatch(part) else -1.0 for part in parts]
    if len(values) != 3 or min(values) < 0:
        raise ValueError(
            f"--costs {costs}: write three numbers of at least 0, for F, B and W, like 1,1.1,0.8"
        )
    if not comm >= 0:
        raise ValueError(f"--comm {comm}: write a number of at least 0")
    return Numbers((values[0], values[1], values[2], comm))


def numbers_of(path: str | PathLike[str], stages: int, comm: float = 0.0) -> Numbers:
    """The costs of each chunk from a JSON file: {"forward": […], "backward_b": […], "backward_w": […]} and other
    fields of Costs. Where it says nothing of what chunks hold, each holds its share of a stage's unit; nothing of
    transfers: they take `comm`. Raises ValueError naming the file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: can't be read ({error.strerror}); check the path") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, Mapping) or not all(isinstance(data.get(c), list) and data[c] for c in _COLUMNS):
        raise ValueError(
            f"{path}: write an object with {', '.join(_COLUMNS)}, each a list with a number a chunk"
        )
    whole: dict[str, Any] = {"unit": "units", **data}
    chunks = len(whole["forward"])
    if not any(name in whole for name in ("comm", "latency", "bandwidth", "links")):
        whole["comm"] = comm
    if not any(name in whole for name in ("held_forward", "held_weight", "held_backward")):
        whole["held_weight"] = [max(1, stages) / chunks] * chunks
    try:
        costs = Costs.from_json(whole)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    typical = [sum(column) / max(1, stages) for column in (costs.forward, costs.backward_b, costs.backward_w)]
    return Numbers((typical[0], typical[1], typical[2], costs.comm or costs.latency), costs)


def memory_units(memory: str | None, stages: int, micro_batches: int) -> float | None:
    """Micro-batches' activations of a stage: a number, or with an x times what 1F1B needs. Raises ValueError."""
    if memory is None:
        return None
    text = memory.strip().lower()
    if not _NUMBER.fullmatch(text.removesuffix("x")) or not float(text.removesuffix("x")) > 0:
        raise ValueError(
            f"--memory {memory}: write a number above 0 of micro-batches' activations of one stage, or times what "
            "1F1B needs, like 1x"
        )
    units = float(text.removesuffix("x"))
    return units * min(stages, micro_batches) if text.endswith("x") else units


def budget_seconds(budget: float | str) -> float:
    """A number of seconds, or text like "30s" or "2min". Raises ValueError."""
    seconds = budget
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|)\s*", budget)
        seconds = math.nan if match is None else float(match[1]) * (60 if match[2] == "min" else 1)
    if not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
        raise ValueError(f'budget={budget!r}: write seconds above 0, like 10, "30s" or "2min"')
    return float(seconds)


def trial(
    schedule: str,
    costs: Numbers,
    stages: int,
    micro_batches: int,
    *,
    chunks: int | None = None,
    split_backward: bool | None = None,
    memory: str | None = None,
    budget: float | str = 10.0,
) -> Trial:
    """The schedule under these costs: a name, "auto", or a file whose name ends in .csv. Raises ValueError,
    PlanError("memory") where nothing fits.

    chunks: a stage; None: one, or what auto finds best of 1 to 4, or as many as the costs or the file are of.
    memory: "1x" or "6" (see `memory_units`); None: as much as a named schedule wants, and 1x for auto.
    budget: of auto's search, see `budget_seconds`.
    """
    turns = chunks if chunks is not None else costs.each(stages) if stages >= 1 else 1
    if schedule.lower() == AUTO:
        if split_backward is not None:
            raise ValueError("auto chooses whether backwards are split: leave --split-backward out")
        return _auto(costs, stages, micro_batches, turns, memory or "1x", budget_seconds(budget))
    if schedule.lower().endswith(".csv"):
        if split_backward is not None or memory is not None:
            raise ValueError(f"{schedule} is run as it is: leave --split-backward and --memory out")
        return _from_file(schedule, costs, stages, micro_batches, chunks)
    turns = 1 if turns is None else turns
    options: dict[str, Any] = {} if split_backward is None else {"split_backward": split_backward}
    limit = memory_units(memory, stages, micro_batches)
    if limit is not None:
        options["memory_limit"] = limit
    share = [number / max(1, turns) for number in costs.stage[:3]]
    made = build(
        schedule,
        stages=stages,
        chunks=turns,
        micro_batches=micro_batches,
        unit_costs=(*share, costs.stage[3]),
        **options,
    )
    per_chunk = costs.costs(stages, turns)
    return Trial(made, simulate(made, per_chunk), lower_bound(made.placement, micro_batches, per_chunk))


def _from_file(path: str, costs: Numbers, stages: int, micro_batches: int, chunks: int | None) -> Trial:
    made = read_csv(path, Path(path).stem)
    if (made.stages, made.micro_batches) != (stages, micro_batches):
        raise ValueError(
            f"{path} is a schedule for --stages {made.stages} --micro-batches {made.micro_batches}, not for "
            f"{stages} and {micro_batches}"
        )
    turns, rest = divmod(made.total_chunks, stages)
    if rest or chunks not in (None, turns):
        each = (
            f"{made.total_chunks} chunks on {stages} stages"
            if rest
            else f"{turns} chunk{'s' * (turns > 1)} a stage"
        )
        raise ValueError(
            f"{path} has {each}: " + ("give each stage as many" if rest else f"write --chunks {turns}")
        )
    per_chunk = costs.costs(stages, turns)
    try:
        check_jobs(made)
        simulation = simulate(made, per_chunk)
    except (PlanError, Stuck) as error:
        raise ValueError(f"{path}: {error}") from None
    return Trial(made, simulation, lower_bound(made.placement, micro_batches, per_chunk))


def _auto(
    costs: Numbers, stages: int, micro_batches: int, chunks: int | None, memory: str, seconds: float
) -> Trial:
    def costs_of(_placement: Sequence[int], turns: int) -> Costs:
        return costs.costs(stages, turns)

    limit = memory_units(memory, stages, micro_batches)
    found = search(
        stages,
        micro_batches,
        costs_of,
        memory_limit=limit,
        budget_seconds=seconds,
        chunks_allowed=_CHUNKS if chunks is None else (chunks,),
    )
    notes = (
        (
            "found",
            f"{found.placement}, {found.chunks} chunk{'s' * (found.chunks > 1)} a stage, from {found.seed}",
        ),
        ("memory", f"limit {limit:.4g}; receives posted ahead take {max(found.stash):.4g} more"),
        ("search", f"{found.seconds:.1f} s, {found.moves:,} moves"),
    )
    simulation = simulate(found.schedule, costs_of((), found.chunks))
    return Trial(found.schedule, simulation, found.bound, notes)


_NUMBER: Final = re.compile(r"\s*\d*\.?\d+(e[+-]?\d+)?\s*", re.IGNORECASE)
