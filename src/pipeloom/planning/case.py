"""One problem of the search: a placement, its costs and its memory limits, as arrays.

A stage's order is kept as entries, kind · total + chunk, without micro-batches: the micro-batch of an entry is
the number of equal entries before it. So F's, B's and W's of a chunk always ascend, which loses nothing
(micro-batches are alike) and is what bit-equal gradients need. A fourth kind, JOINED, is a W that runs as one
job, X, with its B when it directly follows it, and is a plain W elsewhere: moving entries about never makes an
order ill-formed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..schedules.generator import own_chunks
from ..schedules.jobs import Edge, Placement, chain_edges
from ..schedules.schedule import BACKWARD, BACKWARD_B, BACKWARD_W, Schedule
from .costs import Costs

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

#: the kind of an entry that is one job with the B before it; F, B and W are numbered as in a Schedule
JOINED = 3


class Arrays(NamedTuple):
    """What the kernels read. C chunks, S stages; an entry is kind · C + chunk.

    stage_of[C]; own[own_from[s]:own_from[s+1]]: the chunks of stage s, ascending; offset[S+1]: where each
    stage's part of an order begins; duration[4·C] by entry, of JOINED
    what it adds to its B; least[3·C]: of F, B and the cheaper W; work[S]: their sum on each stage. Inputs of
    F's and B's by entry, source[into[e]:into[e+1]] with delay, near where it is on the same stage; whoever
    needs them on other stages, target[out[e]:out[e+1]]. Bytes: add[4·C] while the job runs, keep[4·C] once it
    has ended, join_add[C], join_keep[C] of an X; limit[S] beyond what is always alive.
    """

    stages: int
    total: int
    micro_batches: int
    stage_of: Ints
    own: Ints
    own_from: Ints
    offset: Ints
    duration: Floats
    least: Floats
    work: Floats
    into: Ints
    source: Ints
    delay: Floats
    near: Flags
    out: Ints
    target: Ints
    add: Floats
    keep: Floats
    join_add: Floats
    join_keep: Floats
    limit: Floats


class Order(NamedTuple):
    """An order of all stages: entries[offset[s]:offset[s+1]] is stage s's. name: where it came from."""

    name: str
    entries: Ints


class Case:
    """A placement with its costs, its edges (a chain by default) and its limits: bytes for all stages or for
    each, None without one. Raises ValueError for costs of another number of chunks."""

    def __init__(
        self,
        placement: Placement,
        micro_batches: int,
        costs: Costs,
        edges: Sequence[Edge] | None = None,
        memory_limit: float | Sequence[float] | None = None,
    ) -> None:
        total, stages = len(placement), max(placement) + 1
        if costs.chunks != total:
            raise ValueError(
                f"the costs are of {costs.chunks} chunks and the placement is of {total}: give costs for each "
                "of its chunks"
            )
        self.placement = tuple(placement)
        self.stages = stages
        self.chunks = total // stages
        self.micro_batches = micro_batches
        self.costs = costs
        self.edges = chain_edges(total) if edges is None else list(edges)
        self.memory_limit = memory_limit
        self.own = own_chunks(placement, stages)
        #: whether a B and its W are quicker as one job
        self.joins = any(
            x < b + w for x, b, w in zip(costs.backward, costs.backward_b, costs.backward_w, strict=True)
        )
        self.arrays = self._arrays()

    @property
    def jobs(self) -> int:
        """F's, B's and W's in all."""
        return 3 * len(self.placement) * self.micro_batches

    def _arrays(self) -> Arrays:
        costs, total = self.costs, len(self.placement)
        counts = [3 * len(chunks) * self.micro_batches for chunks in self.own]
        # a circle of jobs that take no time would look as if it could run
        tiny = 1e-9 * unit(self)
        forward, backward_b, whole = (
            np.maximum(given, tiny) for given in (costs.forward, costs.backward_b, costs.backward)
        )
        into, source, delay, near = [0], [], [], []
        readers: list[list[int]] = [[] for _ in range(2 * total)]
        for first, direction in ((0, "F"), (total, "B")):
            for chunk in range(total):
                for edge in self.edges:
                    if (edge.direction, edge.target) == (direction, chunk):
                        source.append(first + edge.source)
                        delay.append(costs.delay(edge, self.placement))
                        near.append(self.placement[edge.source] == self.placement[chunk])
                        if not near[-1]:
                            readers[first + edge.source].append(first + chunk)
                into.append(len(source))
        hf, hw, hb = (np.array(held) for held in (costs.held_forward, costs.held_weight, costs.held_backward))
        work = {kind: np.array([costs.workspace_of(kind, c) for c in range(total)]) for kind in "FBWX"}  # type: ignore[arg-type]
        # as in memory.py: a B frees what was kept for it as it goes
        rise_b = np.where(work["B"] > 0, np.maximum(hb - hf, work["B"]), hb)
        joined = whole - backward_b
        weights = np.array(costs.backward_w)
        least = np.concatenate([forward, backward_b, np.minimum(weights, joined)])
        busy = [
            self.micro_batches * sum(float(least[k * total + c]) for k in range(3) for c in chunks)
            for chunks in self.own
        ]
        return Arrays(
            self.stages,
            total,
            self.micro_batches,
            np.array(self.placement, dtype=np.int64),
            np.array([chunk for chunks in self.own for chunk in chunks], dtype=np.int64),
            np.array([0, *np.cumsum([len(chunks) for chunks in self.own])], dtype=np.int64),
            np.array([0, *np.cumsum(counts)], dtype=np.int64),
            np.concatenate([forward, backward_b, weights, joined]),
            least,
            np.array(busy),
            np.array(into, dtype=np.int64),
            np.array(source, dtype=np.int64),
            np.array(delay, dtype=np.float64),
            np.array(near, dtype=np.bool_),
            np.array([0, *np.cumsum([len(r) for r in readers])], dtype=np.int64),
            np.array([entry for r in readers for entry in r], dtype=np.int64),
            np.concatenate([np.maximum(hf + hw, work["F"]), rise_b, work["W"], work["W"]]),
            np.concatenate([hf + hw, hb - hf, -hw - hb, -hw - hb]),
            work["X"],
            -hf - hw,
            self._limits(),
        )

    def _limits(self) -> Floats:
        if self.memory_limit is None:
            return np.full(self.stages, np.inf)
        given = self.memory_limit
        limits = [given] * self.stages if isinstance(given, int | float) else list(given)
        if len(limits) != self.stages:
            raise ValueError(f"there are {len(limits)} memory limits for {self.stages} stages")
        base = [*self.costs.persistent, *[0.0] * self.stages][: self.stages]
        # sums of fractions of a micro-batch round; a limit that is met exactly must hold
        return np.array([(limit - b) * (1 + 1e-9) + 1e-9 * b for limit, b in zip(limits, base, strict=True)])

    def least(self) -> Floats:
        """Bytes beyond what is always alive that each stage needs at least: one micro-batch through all its
        chunks, its backwards all joined or all split."""
        return np.array([min(needs) for needs in map(self.alone, range(self.stages))])

    def alone(self, stage: int) -> tuple[float, float]:
        """Bytes that one micro-batch takes on a stage with split backwards, and with joined ones (infinite where
        the case doesn't join)."""
        arrays, total = self.arrays, len(self.placement)
        most = alive = 0.0
        for chunk in self.own[stage]:
            most = max(most, alive + float(arrays.add[chunk]))
            alive += float(arrays.keep[chunk])
        split, joined, left = most, most if self.joins else math.inf, alive
        for chunk in reversed(self.own[stage]):
            for entry in (total + chunk, 2 * total + chunk):
                split = max(split, alive + float(arrays.add[entry]))
                alive += float(arrays.keep[entry])
            joined = max(joined, left + float(arrays.join_add[chunk]))
            left += float(arrays.join_keep[chunk])
        return split, joined

    def encode(self, schedule: Schedule) -> Order:
        """A schedule of this placement and number of micro-batches as an order. Raises ValueError for
        another."""
        if schedule.placement != self.placement or schedule.micro_batches != self.micro_batches:
            raise ValueError(f"{schedule!r} has another placement or number of micro-batches than the case")
        total, micro_batches = len(self.placement), self.micro_batches
        weights = JOINED if self.joins else BACKWARD_W
        entries: list[int] = []
        for codes in schedule.codes:
            for entry in (codes // micro_batches).tolist():
                kind, chunk = divmod(entry, total)
                if kind == BACKWARD:
                    entries += [BACKWARD_B * total + chunk, weights * total + chunk]
                else:
                    entries.append(entry)
        return Order(schedule.name, np.array(entries, dtype=np.int64))

    def decode(self, order: Order) -> Schedule:
        """The schedule of an order, with X's where entries are joined."""
        total, micro_batches = len(self.placement), self.micro_batches
        stages = []
        for stage in range(self.stages):
            count = [0] * (3 * total)
            codes: list[int] = []
            for entry in order.entries[self.arrays.offset[stage] : self.arrays.offset[stage + 1]].tolist():
                kind, chunk = divmod(entry, total)
                plain = BACKWARD_W if kind == JOINED else kind
                micro_batch = count[plain * total + chunk]
                count[plain * total + chunk] += 1
                before = (BACKWARD_B * total + chunk) * micro_batches + micro_batch
                if kind == JOINED and codes and codes[-1] == before:
                    codes[-1] = (BACKWARD * total + chunk) * micro_batches + micro_batch
                else:
                    codes.append((plain * total + chunk) * micro_batches + micro_batch)
            stages.append(codes)
        return Schedule(order.name, self.placement, micro_batches, stages)


def unit(case: Case) -> float:
    """The duration of a typical forward of a chunk, the scale of a search's steps."""
    durations = [x for x in case.costs.forward if x > 0] or [x for x in case.costs.backward if x > 0]
    return math.fsum(durations) / len(durations) if durations else 1.0
