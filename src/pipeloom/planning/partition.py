"""Where to cut: a model as a row of pieces, and the positions between them that make the best chunks.

Takes what each piece costs and how many bytes cross between two of them; gives ascending positions. Two steps:
dynamic programming
makes the dearest stage as cheap as it can be and then lets as few bytes cross as it can; a boundary search then
moves one cut at a time
where that shortens the simulated step. Partition matters more than the order of jobs: 32 layers with an embedding
and a head
worth 2.5 layers, S 8, M 32: 1F1B 685 uniform, 553 by dynamic programming, 550 after the search (docs/schedules).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

#: positions that dynamic programming looks at; more are thinned to those where little crosses
MOST_POINTS = 160
#: chunks within this share of the cheapest dearest chunk are as good as it
TOLERANCE = 0.02


class PartitionError(ValueError):
    """There is no way to cut so; says what stands in the way."""


@dataclass(frozen=True)
class Pieces:
    """A model cut as finely as it can be. n pieces (forward ops), n + 1 positions, position i before piece i.

    forward, backward_b, backward_w: seconds of each piece. crossing[i]: bytes of an activation over position i
    (its gradient is as
    large). held: bytes that a micro-batch keeps of each piece until its backward. resident: bytes of weights,
    gradients and
    optimizer state that a piece is the first to need. allowed: positions where a chunk may begin, ascending,
    without 0 and n.
    seconds_per_byte: of a link.
    """

    forward: Sequence[float]
    backward_b: Sequence[float]
    backward_w: Sequence[float]
    crossing: Sequence[float]
    held: Sequence[float]
    resident: Sequence[float]
    allowed: Sequence[int]
    seconds_per_byte: float = 0.0

    def __len__(self) -> int:
        return len(self.forward)

    def sums(self, cuts: Sequence[int], values: Sequence[float]) -> list[float]:
        """One of the per-piece values, summed over each chunk."""
        prefix = list(accumulate(values, initial=0.0))
        edges = [0, *cuts, len(self)]
        return [prefix[b] - prefix[a] for a, b in pairwise(edges)]

    def seconds(self) -> list[float]:
        return [f + b + w for f, b, w in zip(self.forward, self.backward_b, self.backward_w, strict=True)]

    def calibrated(
        self,
        cuts: Sequence[int],
        forward: Sequence[float],
        backward_b: Sequence[float],
        backward_w: Sequence[float],
    ) -> Pieces:
        """The pieces with their seconds scaled so that the chunks between `cuts` take what they were found to take.
        The first chunk's B is empty and its W the whole backward: it is shared out as these pieces have it, since
        later cuts may need both."""
        took = {"forward": list(forward), "backward_b": list(backward_b), "backward_w": list(backward_w)}
        edges = list(pairwise([0, *cuts, len(self)]))
        first = edges[0][1]
        inputs, weights = sum(self.backward_b[:first]), sum(self.backward_w[:first])
        share = inputs / (inputs + weights) if inputs + weights else 0.0
        whole = backward_b[0] + backward_w[0]
        took["backward_b"][0], took["backward_w"][0] = whole * share, whole * (1 - share)
        scaled: dict[str, Any] = {}
        for name, seconds in took.items():
            column = list(getattr(self, name))
            for (a, b), taken in zip(edges, seconds, strict=True):
                total = sum(column[a:b])
                for i in range(a, b):
                    column[i] = column[i] * taken / total if total else taken / (b - a)
            scaled[name] = column
        return replace(self, **scaled)


def balanced(
    pieces: Pieces, chunks: int, *, limit: Callable[[int, float, float], bool] | None = None
) -> list[int]:
    """chunks − 1 positions that make the dearest chunk (its pieces, and what it sends) cheapest; among those within
    two per cent of the best, the ones over which the fewest bytes cross.

    limit(chunk, held, resident) says whether a chunk with so many bytes is allowed. Raises PartitionError where
    there are too few
    positions, or none within the limit.
    """
    if len(pieces.allowed) < chunks - 1:
        raise PartitionError(
            f"the model can be cut in {len(pieces.allowed)} place(s), which is too few for {chunks} chunks; "
            "lower pp_degree or vpp_degree"
        )
    prefix = list(accumulate(pieces.seconds(), initial=0.0))
    held = list(accumulate(pieces.held, initial=0.0))
    resident = list(accumulate(pieces.resident, initial=0.0))
    points = [0, *_thinned(pieces, prefix, chunks), len(pieces)]
    n = len(points)
    infinity = float("inf")

    def cost(k: int, a: int, b: int) -> float:
        """Of chunk k (from 0) over points a to b."""
        first, last = points[a], points[b]
        if limit is not None and not limit(k, held[last] - held[first], resident[last] - resident[first]):
            return infinity
        link = 2 * pieces.crossing[last] * pieces.seconds_per_byte if b < n - 1 else 0.0
        return prefix[last] - prefix[first] + link

    costs = [
        [[cost(k, a, b) for a in range(b)] for b in range(n)]
        for k in range(chunks if limit is not None else 1)
    ]

    def at(k: int, a: int, b: int) -> float:
        return costs[k if limit is not None else 0][b][a]

    best = [[infinity] * n for _ in range(chunks + 1)]
    best[0][0] = 0.0
    for k in range(1, chunks + 1):
        for b in range(k, n):
            best[k][b] = min(
                (max(best[k - 1][a], at(k - 1, a, b)) for a in range(k - 1, b)), default=infinity
            )
    dearest = best[chunks][n - 1]
    if dearest == infinity:
        raise PartitionError(
            f"no way to cut the model into {chunks} chunks keeps every chunk within the memory limit: raise "
            "it, use more stages, or fewer "
            "samples in a micro-batch"
        )
    fewest = [[infinity] * n for _ in range(chunks + 1)]
    origin = [[-1] * n for _ in range(chunks + 1)]
    fewest[0][0] = 0.0
    for k in range(1, chunks + 1):
        for b in range(k, n):
            crossing = pieces.crossing[points[b]] if b < n - 1 else 0.0
            for a in range(k - 1, b):
                if (
                    at(k - 1, a, b) <= dearest * (1 + TOLERANCE)
                    and fewest[k - 1][a] + crossing < fewest[k][b]
                ):
                    fewest[k][b], origin[k][b] = fewest[k - 1][a] + crossing, a
    cuts: list[int] = []
    b = n - 1
    for k in range(chunks, 1, -1):
        b = origin[k][b]
        cuts.append(points[b])
    return cuts[::-1]


def improved(
    pieces: Pieces,
    cuts: Sequence[int],
    makespan: Callable[[Sequence[int]], float],
    *,
    rounds: int = 3,
    reach: int = 4,
) -> tuple[list[int], float]:
    """Moves one cut at a time, by up to `reach` allowed positions where little crosses, wherever that shortens
    makespan(cuts), a
    simulated step that knows placement and order. Returns the cuts and their makespan; never worse than it was
    given."""
    found, best = list(cuts), makespan(cuts)
    points = [p for p in pieces.allowed if _is_low(pieces, p)] or list(pieces.allowed)
    for _ in range(rounds):
        before = best
        for i in range(len(found)):
            low = found[i - 1] if i else 0
            high = found[i + 1] if i + 1 < len(found) else len(pieces)
            below = [p for p in points if low < p < found[i]][-reach:]
            above = [p for p in points if found[i] < p < high][:reach]
            for p in (*reversed(below), *above):
                trial = [*found[:i], p, *found[i + 1 :]]
                length = makespan(trial)
                if length < best * (1 - 1e-9):
                    found, best = trial, length
        if best >= before:
            break
    return found, best


def _is_low(pieces: Pieces, position: int) -> bool:
    """Whether no more bytes cross here than right before and right after."""
    if position == 1:
        return True
    here, following = pieces.crossing[position], min(position + 1, len(pieces))
    return here <= pieces.crossing[position - 1] and here <= pieces.crossing[following]


def _thinned(pieces: Pieces, prefix: list[float], chunks: int) -> list[int]:
    """At most MOST_POINTS positions (or twice the chunks): those where little crosses, spread over the model's cost."""
    most = max(MOST_POINTS, 2 * chunks)
    allowed = list(pieces.allowed)
    if len(allowed) <= most:
        return allowed
    total = prefix[-1] or 1.0
    bins: dict[int, int] = {}
    for p in allowed:
        slot = min(int(prefix[p] / total * most), most - 1)
        if slot not in bins or pieces.crossing[p] < pieces.crossing[bins[slot]]:
            bins[slot] = p
    kept = sorted(set(bins.values()))
    if len(kept) < chunks - 1:
        step = len(allowed) / most
        kept = sorted({*kept, *(allowed[int(i * step)] for i in range(most))})
    return kept
