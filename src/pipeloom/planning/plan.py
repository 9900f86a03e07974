"""A plan: everything that a rank needs to know about a step before it runs one.

A schedule, lowered and verified, with what it is predicted to cost. Every rank makes or reads the same plan;
`digest` is what they compare. JSON in and out through plain dicts; a plan that is read is verified again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..schedules.draw import draw
from ..schedules.jobs import Edge, LoweredJob
from ..schedules.schedule import Schedule
from ..schedules.timeline import StepFigures, Timeline
from ..schedules.timing import Stuck
from .costs import Costs
from .entries import PHASES, CodedLists, EntryCoding
from .errors import PlanError
from .exchange import to_csv
from .lower import Lowered, lower, recognised
from .simulate import Simulation, simulate
from .verify import ascending, check_model, verify
from .words import pack, parse, unpack

_FORMAT = 1
_COLUMNS = 28
#: entries of a plan that are written as text
_MOST_TEXT = 200_000


@dataclass(frozen=True)
class Plan:
    """A verified step. lowered: the lists and what they were made for. memory_limit: bytes, for all stages or
    for each. simulation: what the lists are predicted to cost under `costs`. Make one with `Plan.make`."""

    lowered: Lowered
    costs: Costs
    memory_limit: float | tuple[float, ...] | None
    simulation: Simulation

    @classmethod
    def make(
        cls,
        schedule: Schedule,
        edges: Iterable[Edge],
        costs: Costs,
        *,
        memory_limit: float | Sequence[float] | None = None,
        ascending_chunks: Collection[int] = (),
    ) -> Plan:
        """Lowers, verifies and simulates. ascending_chunks: chunks that update buffers. Raises PlanError for
        what can't be run safely or within the limit, ValueError for edges or costs that don't fit the
        schedule."""
        try:
            lowered = lower(schedule, edges, costs)
        except Stuck as stuck:
            raise PlanError("cycle", f"{schedule.name} can't run in this order: {stuck}") from None
        return cls.of(lowered, costs, memory_limit, ascending_chunks)

    @classmethod
    def of(
        cls,
        lowered: Lowered,
        costs: Costs,
        memory_limit: float | Sequence[float] | None = None,
        ascending_chunks: Collection[int] = (),
    ) -> Plan:
        """The plan for lists from anywhere: verifies and simulates them."""
        check_model(lowered)
        known = lowered if lowered.certificate is not None else recognised(lowered, costs)
        verify(known, costs=costs, memory_limit=memory_limit, ascending_chunks=ascending_chunks)
        limit = tuple(memory_limit) if isinstance(memory_limit, Sequence) else memory_limit
        return cls(known, costs, limit, simulate(known.schedule(), costs, lowered=known))

    @property
    def schedule(self) -> str:
        """The schedule's name."""
        return self.lowered.name

    @property
    def placement(self) -> tuple[int, ...]:
        return self.lowered.placement

    @property
    def stages(self) -> int:
        return self.lowered.stages

    @property
    def chunks(self) -> int:
        """Chunks a stage."""
        return len(self.placement) // self.stages

    @property
    def micro_batches(self) -> int:
        return self.lowered.micro_batches

    @property
    def edges(self) -> tuple[Edge, ...]:
        return self.lowered.edges

    @property
    def jobs(self) -> Sequence[Sequence[LoweredJob]]:
        """jobs[stage]: the list that the stage's rank walks."""
        return self.lowered.jobs

    @property
    def ascending(self) -> bool:
        """Whether gradients are bit-equal to any other such plan's; otherwise they are equal to rounding."""
        return ascending(self.simulation.schedule)

    @property
    def predicted(self) -> StepFigures:
        return self.simulation.figures

    def timeline(self) -> Timeline:
        """The predicted step."""
        return self.simulation.timeline(f"predicted {self.schedule}")

    def digest(self) -> str:
        """A hash of what all ranks must agree on: placement, edges and lists, and not of what they are
        thought to cost."""
        lowered = self.lowered
        agreed = [lowered.placement, lowered.micro_batches, lowered.forward_only, lowered.edges]
        digest = hashlib.sha256(json.dumps(agreed, separators=(",", ":")).encode())
        for codes in lowered.codes:
            digest.update(len(codes).to_bytes(8, "little"))
            digest.update(codes.astype("<i8").tobytes())
        return digest.hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Plain values. jobs: lists of text; of a plan with very many entries, packed codes instead."""
        lowered = self.lowered
        if sum(map(len, lowered.codes)) <= _MOST_TEXT:
            lists: dict[str, Any] = {"jobs": [[str(job) for job in jobs] for jobs in lowered.jobs]}
        else:
            lists = {"codes": [pack(codes) for codes in lowered.codes]}
        return {
            "format": _FORMAT,
            "schedule": lowered.name,
            "placement": list(lowered.placement),
            "micro_batches": lowered.micro_batches,
            "forward_only": lowered.forward_only,
            "edges": [list(edge) for edge in lowered.edges],
            **lists,
            "costs": self.costs.to_json(),
            "memory_limit": list(self.memory_limit)
            if isinstance(self.memory_limit, tuple)
            else self.memory_limit,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, ascending_chunks: Collection[int] = ()) -> Plan:
        """Reads, verifies and simulates. Raises ValueError (or its PlanError) that says what is wrong."""
        if not isinstance(data, Mapping) or data.get("format") != _FORMAT:
            raise ValueError(f"not a plan of format {_FORMAT}: write it with Plan.to_json")
        try:
            placement = tuple(int(stage) for stage in data["placement"])
            edges = tuple(Edge(str(d), int(s), int(t), int(n)) for d, s, t, n in data["edges"])  # type: ignore[arg-type]
            coding = EntryCoding(placement, int(data["micro_batches"]), edges)
            lowered = Lowered(
                str(data["schedule"]),
                placement,
                coding.micro_batches,
                edges,
                _lists(data, coding),
                bool(data["forward_only"]),
            )
            limit, costs = data["memory_limit"], Costs.from_json(data["costs"])
        except KeyError as missing:
            raise ValueError(f"the plan has no field {missing}") from None
        except TypeError as error:
            raise ValueError(f"the plan can't be read: {error}") from error
        return cls.of(lowered, costs, limit, ascending_chunks)

    def to_csv(self) -> str:
        """The plan for torch.distributed.pipelining's runtime (see exchange.py). Raises PlanError where torch can't run
        it."""
        return to_csv(self.lowered)

    def show(self) -> None:
        """Prints the plan: a drawing in units of time, and a table of stages."""
        print(self.describe())

    def describe(self) -> str:
        """What `show` prints."""
        figures, unit = self.predicted, self.costs.unit
        lines = [
            f"{self.schedule}: {self.stages} stages × {self.chunks} chunks, {self.micro_batches} "
            "micro-batches",
            "",
            draw(self.simulation.schedule, columns=_COLUMNS),
            "",
            f"predicted step {figures.step_time:.4g} {unit}, bubble {figures.bubble_global:.1%} of the "
            f"step, {figures.bubble_span:.1%} of the longest span",
            f"{'stage':>5}  {'busy':>5}  {'peak':>9}  {'jobs':>5}  {'sends':>5}  chunks",
        ]
        for stage in range(self.stages):
            own = [str(c) for c, on in enumerate(self.placement) if on == stage]
            sends = self.lowered.coding.sends(self.lowered.codes[stage])
            lines.append(
                f"{stage:>5}  {figures.busy[stage]:>5.0%}  {_bytes(self.simulation.peak[stage], unit):>9}  "
                f"{len(self.simulation.start[stage]):>5}  {sends:>5}  {' '.join(own)}"
            )
        if any(self.costs.reduce):
            lines.append(self._reductions())
        if not self.ascending:
            lines.append(
                "micro-batches of a chunk run out of order: gradients are equal to other plans' to rounding only"
            )
        return "\n".join(lines)

    def _reductions(self) -> str:
        """The line about sums over replicas, of the stage where most of them stick out."""
        unit, simulation = self.costs.unit, self.simulation
        spans = [span for span in simulation.others if span.kind == "reduce"]
        late = {
            s: max([0.0, *(x.end - simulation.clock[s] for x in spans if x.rank == s)])
            for s in range(self.stages)
        }
        stage = max(late, key=late.__getitem__)
        total = sum(span.end - span.start for span in spans if span.rank == stage)
        return (
            f"gradients summed over replicas in {total:.4g} {unit} on stage {stage}, of which {late[stage]:.4g} {unit} "
            "after its last job"
        )


def _lists(data: Mapping[str, Any], coding: EntryCoding) -> Sequence[Sequence[LoweredJob]]:
    if "codes" not in data:
        return tuple(tuple(parse(text) for text in jobs) for jobs in data["jobs"])
    most = coding.transfers_end + len(PHASES)  # of entries, if each came once
    return CodedLists([unpack(text, most) for text in data["codes"]], coding)


def _bytes(size: float, unit: str) -> str:
    if unit != "s":
        return f"{size:.4g}"
    for name in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.4g} {name}"
        size /= 1000
    return f"{size:.4g} GB"
