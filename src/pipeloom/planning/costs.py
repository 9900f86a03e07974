"""What jobs cost: durations, transfers, bytes.

A Costs is what the simulator, the lowering, the bounds and the memory check know of a model. Durations are
seconds, or any unit that `unit` names; bytes are bytes, or units of one micro-batch's activations of one
stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..schedules.jobs import KINDS, Direction, Edge, Kind, Placement

Numbers = tuple[float, ...]


def roofline(flops: float, moved: float, flops_per_second: float, bytes_per_second: float) -> float:
    """Seconds that a program takes at least: its arithmetic or its bytes moved, whichever is slower."""
    return max(flops / flops_per_second, moved / bytes_per_second)


@dataclass(frozen=True)
class Costs:
    """Costs of each chunk (index: chunk), link and stage.

    forward, backward_b, backward_w: durations of F, B, W. backward: of X; left out, B + W.
    comm: duration of any transfer between two stages; left out, latency + bytes / bandwidth of the link,
    where links[(sender, receiver)] = (latency, bandwidth) goes before the uniform two.

    Bytes of one micro-batch in one chunk:
      held_forward   from F until B
      held_weight    from F until W
      held_backward  from B until W
      workspace      needed at the worst moment of a job beyond what was alive before it, results included, and less
                     what it frees before; one number a chunk, or {kind: one number a chunk}
      sent           {(direction, source, target): bytes} of an edge's message that nothing but the message keeps
                     alive: from its producer until it is known to have arrived, or within a stage until its consumer
    X is B and W at once. persistent[stage]: bytes that are always alive.

    finalize, update: durations of the two jobs that end a step on every stage. reduce[chunk]: of the reduction of a
    chunk's gradients over data-parallel replicas, which runs beside other jobs from the chunk's last W on, one at a
    time on a stage; finalize waits for a stage's.
    exclusive_links: a link from one stage to another carries one message at a time, for bytes / bandwidth (or comm);
    otherwise messages don't slow each other.
    """

    forward: Numbers
    backward_b: Numbers
    backward_w: Numbers
    backward: Numbers = ()
    comm: float | None = None
    latency: float = 0.0
    bandwidth: float = math.inf
    links: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    held_forward: Numbers = ()
    held_weight: Numbers = ()
    held_backward: Numbers = ()
    workspace: Mapping[Kind, Sequence[float]] | Sequence[float] = ()
    sent: Mapping[tuple[Direction, int, int], float] = field(default_factory=dict)
    persistent: Numbers = ()
    finalize: float = 0.0
    update: float = 0.0
    unit: str = "s"
    reduce: Numbers = ()
    exclusive_links: bool = False

    def __post_init__(self) -> None:
        chunks = len(self.forward)
        whole = [b + w for b, w in zip(self.backward_b, self.backward_w, strict=False)]
        self._set("backward", self.backward or whole)
        for name in ("forward", "backward_b", "backward_w", "backward"):
            self._set(name, _checked(name, getattr(self, name), chunks))
        for name in ("held_forward", "held_weight", "held_backward", "reduce"):
            self._set(name, _checked(name, getattr(self, name) or (0.0,) * chunks, chunks))
        work = self.workspace or (0.0,) * chunks
        by_kind = work if isinstance(work, Mapping) else dict.fromkeys(KINDS, work)
        self._set(
            "workspace",
            {k: _checked(f"workspace of {k}", by_kind.get(k) or (0.0,) * chunks, chunks) for k in KINDS},
        )
        self._set("persistent", _checked("persistent", self.persistent, len(self.persistent)))
        _checked("sent", tuple(self.sent.values()), len(self.sent))
        for name in ("latency", "finalize", "update"):
            _checked(name, (getattr(self, name),), 1)
        if self.comm is not None:
            _checked("comm", (self.comm,), 1)
        for latency, bandwidth in [(self.latency, self.bandwidth), *self.links.values()]:
            if not (latency >= 0 and bandwidth > 0):
                raise ValueError(
                    f"a link needs a latency ≥ 0 and a bandwidth > 0 (got {latency}, {bandwidth})"
                )

    @classmethod
    def uniform(
        cls,
        chunks: int,
        f: float = 1.0,
        b: float = 1.0,
        w: float = 1.0,
        comm: float = 0.0,
        *,
        held_forward: float = 0.0,
        held_weight: float = 0.0,
        workspace: float = 0.0,
        **others: Any,
    ) -> Costs:
        """The same for each of `chunks` chunks (counted through the model)."""
        return cls(
            (f,) * chunks,
            (b,) * chunks,
            (w,) * chunks,
            comm=comm,
            held_forward=(held_forward,) * chunks,
            held_weight=(held_weight,) * chunks,
            workspace=(workspace,) * chunks,
            **others,
        )

    @classmethod
    def per_stage(
        cls, stages: int, chunks: int = 1, f: float = 1.0, b: float = 1.0, w: float = 1.0, comm: float = 0.0
    ) -> Costs:
        """f, b, w are a stage's; each of its `chunks` costs its share. Memory is in units of one
        micro-batch's activations of one stage, held from F until W."""
        return cls.uniform(
            stages * chunks, f / chunks, b / chunks, w / chunks, comm, held_weight=1 / chunks, unit="units"
        )

    @property
    def chunks(self) -> int:
        """Chunks of the whole model."""
        return len(self.forward)

    def duration(self, kind: Kind, chunk: int) -> float:
        by_kind = {"F": self.forward, "B": self.backward_b, "W": self.backward_w, "X": self.backward}
        return by_kind[kind][chunk]

    def delay(self, edge: Edge, placement: Placement) -> float:
        """How long a message of an edge travels; 0 within a stage."""
        sender, receiver = placement[edge.source], placement[edge.target]
        if sender == receiver:
            return 0.0
        if self.comm is not None:
            return self.comm
        latency, bandwidth = self.links.get((sender, receiver), (self.latency, self.bandwidth))
        return latency + edge.nbytes / bandwidth

    def occupancy(self, edge: Edge, placement: Placement) -> float:
        """How long a message of an edge keeps its link from others, if links are exclusive."""
        sender, receiver = placement[edge.source], placement[edge.target]
        if sender == receiver or self.comm is not None:
            return self.delay(edge, placement)
        _, bandwidth = self.links.get((sender, receiver), (self.latency, self.bandwidth))
        return edge.nbytes / bandwidth

    def workspace_of(self, kind: Kind, chunk: int) -> float:
        assert isinstance(self.workspace, Mapping)  # __post_init__ made it so
        return self.workspace[kind][chunk]

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        data["links"] = [[*link, *values] for link, values in self.links.items()]
        data["sent"] = [[*edge, size] for edge, size in self.sent.items()]
        data["bandwidth"] = None if math.isinf(self.bandwidth) else self.bandwidth
        assert isinstance(self.workspace, Mapping)
        data["workspace"] = {kind: list(values) for kind, values in self.workspace.items()}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in data.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Costs:
        """Raises ValueError for unknown fields and bad numbers."""
        unknown = set(data) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"costs have no field {sorted(unknown)}")
        values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in data.items()}
        values["links"] = {(int(s), int(r)): (float(x), float(y)) for s, r, x, y in data.get("links", ())}
        values["sent"] = {(d, int(s), int(t)): float(size) for d, s, t, size in data.get("sent", ())}
        if values.get("bandwidth") is None:
            values["bandwidth"] = math.inf
        return cls(**values)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)


def _checked(name: str, values: Sequence[float], count: int) -> Numbers:
    if len(values) != count:
        raise ValueError(f"costs: {name} has {len(values)} numbers, there are {count} chunks")
    for index, value in enumerate(values):
        if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
            raise ValueError(f"costs: {name}[{index}] must be a finite number ≥ 0 (got {value!r})")
    return tuple(values)
