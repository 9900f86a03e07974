"""Policies of the linear and the loop placement: each function is one named schedule, which its docstring draws
for four stages.

In the drawings F, B and W of a chunk take one unit, X (B and W in one) two; a prime marks a stage's second
chunk. S: stages, s: this stage, V: chunks a stage, M: micro-batches, "limit": most chunk forwards in flight
on a stage. A Request may lower a limit (`most`), where memory does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .generator import AtEnd, Fill, Fuse, Hold, Lag, Policy, Queue, WeightRule, grouped, merged, own_chunks
from .jobs import Placement
from .schedule import loop
from .weights import UnitCosts


@dataclass(frozen=True)
class Request:
    """What `build` was asked for, checked. split: None where the user left it to the schedule. most[stage]: chunk
    forwards that memory has room for, at least V; empty: any number."""

    stages: int
    chunks: int
    micro_batches: int
    split: bool | None
    costs: UnitCosts = field(default_factory=UnitCosts)
    most: tuple[int, ...] = ()

    def within(self, limits: Sequence[int]) -> list[int]:
        """The limits, each no more than memory has room for."""
        return [min(pair) for pair in zip(limits, self.most, strict=True)] if self.most else list(limits)


def fthenb(r: Request) -> Policy:
    """All forwards, then all backwards (GPipe, Huang et al. 2019). Limit V·M; where memory holds fewer, in rounds.

    stage 0  F0 F1 F2 F3 F4 F5 .  .  .  .  .  .  .  .  .  X0--  X1--  X2--  X3--  X4--  X5--
    stage 1  .  F0 F1 F2 F3 F4 F5 .  .  .  .  .  .  X0--  X1--  X2--  X3--  X4--  X5--  .  .
    stage 2  .  .  F0 F1 F2 F3 F4 F5 .  .  .  X0--  X1--  X2--  X3--  X4--  X5--  .  .  .  .
    stage 3  .  .  .  F0 F1 F2 F3 F4 F5 X0--  X1--  X2--  X3--  X4--  X5--  .  .  .  .  .  .
    """
    return _rounds(r)


def looped_bfs(r: Request) -> Policy:
    """Breadth first (Lamy-Poirier 2023): FThenB with several chunks a stage, where every micro-batch goes through a
    chunk before the next chunk begins. Limit V·M; where memory holds fewer, in rounds.

    stage 0  F0  F1  F2  F3  F4  F5  F0' F1' F2' F3' F4' F5' .   .   .   .   .   .   .   .   .   X0'- …
    stage 1  .   F0  F1  F2  F3  F4  F5  F0' F1' F2' F3' F4' F5' .   .   .   .   .   .   X0'--   X1'- …
    stage 2  .   .   F0  F1  F2  F3  F4  F5  F0' F1' F2' F3' F4' F5' .   .   .   X0'--   X1'--   X2'- …
    stage 3  .   .   .   F0  F1  F2  F3  F4  F5  F0' F1' F2' F3' F4' F5' X0'--   X1'--   X2'--   X3'- …
    """
    return _rounds(r)


def one_f_one_b(r: Request) -> Policy:
    """S−s forwards, then a backward and a forward in turn (PipeDream-Flush, Narayanan et al. 2021). Limit
    S−s.

    stage 0  F0 F1 F2 F3 .  .  .  .  .  .  X0--  F4 X1--  F5 X2--  .  X3--  .  X4--  .  X5--
    stage 1  .  F0 F1 F2 .  .  .  .  X0--  F3 X1--  F4 X2--  F5 X3--  .  X4--  .  X5--  .  .
    stage 2  .  .  F0 F1 .  .  X0--  F2 X1--  F3 X2--  F4 X3--  F5 X4--  .  X5--  .  .  .  .
    stage 3  .  .  .  F0 X0--  F1 X1--  F2 X2--  F3 X3--  F4 X4--  F5 X5--  .  .  .  .  .  .
    """
    return _looped(r, [r.micro_batches], [r.stages - s for s in range(r.stages)])


def eager_1f1b(r: Request) -> Policy:
    """1F1B with about twice the warm-up, which hides transfers behind forwards. Limit 2(S−s)−1.

    stage 0  F0 F1 F2 F3 F4 F5 .  .  .  .  X0--  .  X1--  .  X2--  .  X3--  .  X4--  .  X5--
    stage 1  .  F0 F1 F2 F3 F4 .  .  X0--  F5 X1--  .  X2--  .  X3--  .  X4--  .  X5--  .  .
    stage 2  .  .  F0 F1 F2 .  X0--  F3 X1--  F4 X2--  F5 X3--  .  X4--  .  X5--  .  .  .  .
    stage 3  .  .  .  F0 X0--  F1 X1--  F2 X2--  F3 X3--  F4 X4--  F5 X5--  .  .  .  .  .  .
    """
    return _looped(r, [r.micro_batches], _eager(r))


def vpp(r: Request) -> Policy:
    """Interleaved 1F1B (Narayanan et al. 2021): micro-batches in groups of S, a chunk at a time. With M no
    multiple of S the groups are of about equal size and never below S (one group if M < S), which keeps every
    M safe; they are smaller where memory needs it. Limit 2(S−s−1) + (V−1)·(first group) + 1; all of them when
    M = S.

    stage 0  F0  F1  F2  F3  F4  F5  F0' F1' F2' F3' F4' F5' .   .   .   .   X0'--   .   X1'--   . …
    stage 1  .   F0  F1  F2  F3  F4  F5  F0' F1' F2' F3' F4' .   .   X0'--   F5' X1'--   .   X2'-- …
    stage 2  .   .   F0  F1  F2  F3  F4  F5  F0' F1' F2' .   X0'--   F3' X1'--   F4' X2'--   F5' X3'- …
    stage 3  .   .   .   F0  F1  F2  F3  F4  F5  F0' X0'--   F1' X1'--   F2' X2'--   F3' X3'--   F4' …
    """
    groups = _groups(r)
    if r.micro_batches == r.stages and not r.most:
        limits = [r.chunks * r.micro_batches] * r.stages
        return _looped(r, groups, limits, split=AtEnd())
    return _looped(
        r, groups, [2 * (r.stages - s - 1) + (r.chunks - 1) * groups[0] + 1 for s in range(r.stages)]
    )


def zbh1(r: Request) -> Policy:
    """Zero bubble in 1F1B's memory (Qi et al. 2023): the first s W's wait until the end. Limit S−s.

    stage 0  F0 F1 F2 F3 .  .  .  B0 W0 F4 B1 W1 F5 B2 W2 B3 W3 B4 W4 B5 W5
    stage 1  .  F0 F1 F2 .  .  B0 F3 B1 W1 F4 B2 W2 F5 B3 W3 B4 W4 B5 W5 W0
    stage 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 W2 F4 B3 W3 F5 B4 W4 B5 W5 W0 W1
    stage 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 W3 F4 B4 W4 F5 B5 W5 W0 W1 W2
    """
    return _looped(
        r,
        [r.micro_batches],
        [r.stages - s for s in range(r.stages)],
        split=_filling(r, r.most) if r.most else Hold(range(r.stages)),
    )


def zbh2(r: Request) -> Policy:
    """Zero bubble in up to twice 1F1B's memory (Qi et al. 2023): warm-up as Eager1F1B, W's where a stage
    would wait. Limit 2(S−s)−1; no more than 2S−1 forwards whose W has not run.

    stage 0  F0 F1 F2 F3 F4 F5 .  B0 W0 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5 .  .
    stage 1  .  F0 F1 F2 F3 F4 B0 F5 B1 W0 B2 W1 B3 W2 B4 W3 B5 W4 W5 .  .
    stage 2  .  .  F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 W0 B4 W1 B5 W2 W3 W4 W5 .
    stage 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 W0 W1 W2 W3 W4 W5
    """
    return _looped(
        r,
        [r.micro_batches],
        _eager(r),
        split=_filling(r, [2 * r.stages - 1] * r.stages),
    )


def interleaved_zero_bubble(r: Request) -> Policy:
    """VPP's order with a shorter warm-up and split backwards; a W runs s backwards late (as in torch's
    ScheduleInterleavedZeroBubble). Limit (S−s−1) + (V−1)·(first group) + 1.

    stage 0  F0  F1  F2  F3  F4  F5  F0' F1' F2' F3' .   .   .   B0' W0' F4' B1' W1' F5' B2' W2' B3' …
    stage 1  .   F0  F1  F2  F3  F4  F5  F0' F1' F2' .   .   B0' F3' B1' W0' F4' B2' W1' F5' B3' W2' …
    stage 2  .   .   F0  F1  F2  F3  F4  F5  F0' F1' .   B0' F2' B1' F3' B2' W0' F4' B3' W1' F5' B4' …
    stage 3  .   .   .   F0  F1  F2  F3  F4  F5  F0' B0' F1' B1' F2' B2' F3' B3' W0' F4' B4' W1' F5' …
    """
    groups = _groups(r)
    limits = [(r.stages - s - 1) + (r.chunks - 1) * groups[0] + 1 for s in range(r.stages)]
    return _looped(r, groups, limits, split=_filling(r, r.most) if r.most else Lag(range(r.stages)))


def _looped(
    r: Request, groups: Sequence[int], limits: Sequence[int], split: WeightRule | None = None
) -> Policy:
    """A policy over the loop placement. split: the rule for W's if backwards are split; by default they fill
    waits within the memory that the fused schedule needs."""
    placement: Placement = loop(r.stages, r.chunks)
    queues = [grouped(own, groups) for own in own_chunks(placement, r.stages)]
    within = r.within(limits)
    rule: WeightRule = Fuse()
    if r.split:
        rule = split or _filling(r, within)
    return Policy(placement, merged(placement, queues, within, r.micro_batches), rule)


def _eager(r: Request) -> list[int]:
    """2(S−s)−1; where memory holds fewer than 2S−1, as many above 1F1B's S−s on each stage as it holds above S."""
    extra = [max(0, most - r.stages) for most in r.most] or [r.stages] * r.stages
    ahead = [r.stages - s for s in range(r.stages)]
    return [min(2 * one - 1, one + more) for one, more in zip(ahead, extra, strict=True)]


def _rounds(r: Request) -> Policy:
    """As many micro-batches as memory holds go up and come down, then the next ones."""
    size = min([r.micro_batches, *(most // r.chunks for most in r.most)])
    groups = [size] * (r.micro_batches // size)
    if r.micro_batches % size:
        groups.append(r.micro_batches % size)
    placement: Placement = loop(r.stages, r.chunks)
    shift = len(placement) * r.micro_batches
    orders = []
    for own in own_chunks(placement, r.stages):
        forward, backward = grouped(own, groups)
        order: Queue = []
        at = 0
        for group in groups:
            end = at + group * r.chunks
            order += forward[at:end]
            order += [code + shift for code in backward[at:end]]
            at = end
        orders.append(order)
    slots = [groups[0] * r.chunks] * r.stages
    return Policy(placement, orders, _filling(r, slots) if r.split else Fuse())


def _filling(r: Request, slots: Sequence[int]) -> Fill:
    return Fill(r.within(slots), costs=r.costs)


def _groups(r: Request) -> list[int]:
    """max(1, M div S) groups that share M out evenly, larger ones first; more of them, and smaller, where memory
    has no room for a group's forwards of all chunks but the last, and one of that."""
    count = max(1, r.micro_batches // r.stages)
    if r.most and r.chunks > 1:
        size = max(1, (min(r.most) - 1) // (r.chunks - 1))
        count = max(count, -(-r.micro_batches // size))
    return [r.micro_batches // count + (i < r.micro_batches % count) for i in range(count)]
