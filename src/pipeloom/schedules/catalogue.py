"""The schedules by name. Each function is one policy of the generator; its docstring draws it for four
stages.

In the drawings F, B and W of a chunk take one unit, X (B and W in one) two; a prime marks a stage's second
chunk. S: stages, s: this stage, V: chunks a stage, M: micro-batches, "limit": most chunk forwards in flight
on a stage.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .generator import (
    AtEnd,
    Fill,
    Fuse,
    Hold,
    Lag,
    Policy,
    Queue,
    WeightRule,
    ascending,
    generate,
    grouped,
    own_chunks,
)
from .jobs import Placement
from .schedule import Schedule, loop, vee
from .weights import UnitCosts


@dataclass(frozen=True)
class Request:
    """What `build` was asked for, checked. split: None where the user left it to the schedule."""

    stages: int
    chunks: int
    micro_batches: int
    split: bool | None
    costs: UnitCosts


def fthenb(r: Request) -> Policy:
    """All forwards, then all backwards (GPipe, Huang et al. 2019; with V > 1 breadth first). Limit V·M.

    stage 0  F0 F1 F2 F3 F4 F5 .  .  .  .  .  .  .  .  .  X0--  X1--  X2--  X3--  X4--  X5--
    stage 1  .  F0 F1 F2 F3 F4 F5 .  .  .  .  .  .  X0--  X1--  X2--  X3--  X4--  X5--  .  .
    stage 2  .  .  F0 F1 F2 F3 F4 F5 .  .  .  X0--  X1--  X2--  X3--  X4--  X5--  .  .  .  .
    stage 3  .  .  .  F0 F1 F2 F3 F4 F5 X0--  X1--  X2--  X3--  X4--  X5--  .  .  .  .  .  .
    """
    return _looped(r, [r.micro_batches], [r.chunks * r.micro_batches] * r.stages)


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
    return _looped(r, [r.micro_batches], [2 * (r.stages - s) - 1 for s in range(r.stages)])


def vpp(r: Request) -> Policy:
    """Interleaved 1F1B (Narayanan et al. 2021): micro-batches in groups of S, a chunk at a time. With M no
    multiple of S the groups are of about equal size and never below S (one group if M < S), which keeps every
    M safe. Limit 2(S−s−1) + (V−1)·(first group) + 1; all of them when M = S.

    stage 0  F0  F1  F2  F3  F4  F5  F0' F1' F2' F3' F4' F5' .   .   .   .   X0'--   .   X1'--   . …
    stage 1  .   F0  F1  F2  F3  F4  F5  F0' F1' F2' F3' F4' .   .   X0'--   F5' X1'--   .   X2'-- …
    stage 2  .   .   F0  F1  F2  F3  F4  F5  F0' F1' F2' .   X0'--   F3' X1'--   F4' X2'--   F5' X3'- …
    stage 3  .   .   .   F0  F1  F2  F3  F4  F5  F0' X0'--   F1' X1'--   F2' X2'--   F3' X3'--   F4' …
    """
    groups = _groups(r)
    if r.micro_batches == r.stages:
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
        split=Hold(range(r.stages)),
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
        [2 * (r.stages - s) - 1 for s in range(r.stages)],
        split=Fill([2 * r.stages - 1] * r.stages, costs=r.costs),
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
    return _looped(r, groups, limits, split=Lag(range(r.stages)))


def zbv(r: Request) -> Policy:
    """Zero bubble on a V placement (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"): the
    last chunk is on the first stage, so a backward begins where the forward ended. Made for M+2S
    micro-batches, of which the last 2S are dropped. Limit 2S; no more than 2S chunk forwards whose W has not
    run, which is 1F1B's memory.

    stage 0  F0  F1  F2  F3  F4  F5  .   F0' B0' F1' B1' W0' F2' B2' W1' F3' B3' W2' B0  W3' F4' B4' …
    stage 1  .   F0  F1  F2  F3  F4  F0' F5  F1' B0' W0' F2' B1' W1' F3' B2' W2' B0  W0  F4' B3' W3' …
    stage 2  .   .   F0  F1  F2  F0' F3  F1' F4  F2' B0' W0' F3' B1' W1' F5  B0  W0  F4' B2' W2' B1 …
    stage 3  .   .   .   F0  F0' F1  F1' F2  F2' F3  F3' B0' W0' F4  B0  W0  F4' B1' W1' F5  B1  W1 …
    """
    made_for = r.micro_batches + 2 * r.stages
    limits = [2 * r.stages] * r.stages
    return Policy(
        vee(r.stages),
        [_vee_queues(s, r.stages, made_for) for s in range(r.stages)],
        limits,
        Fill(limits, costs=r.costs),
        made_for,
    )


def _looped(
    r: Request, groups: Sequence[int], limits: Sequence[int], split: WeightRule | None = None
) -> Policy:
    """A policy over the loop placement. split: the rule for W's if backwards are split; by default they fill
    waits within the memory that the fused schedule needs."""
    placement: Placement = loop(r.stages, r.chunks)
    queues = [grouped(own, groups) for own in own_chunks(placement, r.stages)]
    rule: WeightRule = Fuse()
    if r.split:
        rule = split or Fill(limits, costs=r.costs)
    return Policy(placement, queues, limits, rule)


def _groups(r: Request) -> list[int]:
    """max(1, M div S) groups that share M out evenly, larger ones first."""
    count = max(1, r.micro_batches // r.stages)
    return [r.micro_batches // count + (i < r.micro_batches % count) for i in range(count)]


def _vee_queues(stage: int, stages: int, made_for: int) -> tuple[Queue, Queue]:
    """With a and b the stage's two chunks: forwards a^(2(S−s)−1) (ba)^s b^(S−s) (ab)*, backwards b^(S−s)
    (ab)*."""
    a, b = stage, 2 * stages - 1 - stage
    ahead = stages - stage
    forward = [a] * (2 * ahead - 1) + [b, a] * stage + [b] * ahead
    return _numbered(forward, a, b, made_for), _numbered([b] * ahead, a, b, made_for)


def _numbered(begin: list[int], a: int, b: int, made_for: int) -> Queue:
    """The chunks of `begin`, then a and b in turn, with ascending micro-batches for each until both have
    `made_for`."""
    count = {a: 0, b: 0}
    queue: Queue = []
    for chunk in begin + [a, b] * made_for:
        if count[chunk] < made_for:
            queue.append(chunk * made_for + count[chunk])
            count[chunk] += 1
    return queue


@dataclass(frozen=True)
class Entry:
    """A schedule of the catalogue. chunks: how many a stage it takes (None: any). splits: it always splits
    backwards."""

    policy: Callable[[Request], Policy]
    chunks: int | None = None
    splits: bool = False
    otherwise: str = ""


CATALOGUE: Final[dict[str, Entry]] = {
    "FThenB": Entry(fthenb),
    "1F1B": Entry(one_f_one_b, 1, otherwise="use VPP, which is 1F1B with several chunks a stage"),
    "Eager1F1B": Entry(eager_1f1b, 1, otherwise="use VPP"),
    "VPP": Entry(vpp),
    "ZBH1": Entry(zbh1, 1, True, "use InterleavedZeroBubble, or ZBV with two chunks a stage"),
    "ZBH2": Entry(zbh2, 1, True, "use InterleavedZeroBubble, or ZBV with two chunks a stage"),
    "InterleavedZeroBubble": Entry(interleaved_zero_bubble, None, True),
    "ZBV": Entry(zbv, 2, True, "pass chunks=2, or use VPP or InterleavedZeroBubble for another number"),
}

ALIASES: Final[dict[str, str]] = {
    "GPipe": "FThenB",
    "LoopedBFS": "FThenB",
    "Interleaved1F1B": "VPP",
    "ZBVPP": "ZBV",
    "ZBVZeroBubble": "ZBV",
}

#: names that a user may know and that are not built yet
NOT_BUILT: Final = ("DualPipeV", "V-Half", "V-Min")

_OPTIONS: Final = ("split_backward", "ascending", "unit_costs")


def names() -> list[str]:
    """What `build` knows, aliases included."""
    return [*CATALOGUE, *ALIASES]


def canonical_name(name: str) -> str:
    """The catalogue's name for a name or alias in any case. Raises ValueError, with the nearest names, for
    others."""
    known = {_plain(n): n for n in CATALOGUE} | {_plain(a): n for a, n in ALIASES.items()}
    plain = _plain(str(name))
    if plain in known:
        return known[plain]
    if plain in {_plain(n) for n in NOT_BUILT}:
        raise ValueError(f"schedule {name!r} is known but not built yet; there are {', '.join(names())}")
    spelled = {_plain(n): n for n in names()}
    near = difflib.get_close_matches(plain, spelled, n=1)
    hint = f" Did you mean {spelled[near[0]]}?" if near else ""
    raise ValueError(f"there is no schedule {name!r}.{hint} There are {', '.join(names())}")


def build(name: str, *, stages: int, chunks: int = 1, micro_batches: int, **options: Any) -> Schedule:
    """The compute jobs of a named schedule, one ordered list a stage.

    stages: S ≥ 1. chunks: V ≥ 1, chunks a stage. micro_batches: M ≥ 1, any number.
    Options:
      split_backward  True: backwards are two jobs, B and W, instead of X. ZBH1, ZBH2, ZBV and
                      InterleavedZeroBubble always are. Elsewhere W's go where a stage would wait, within the
                      memory that the schedule needs anyway; VPP with M = S puts them at the end of the list,
                      as Paddle does.
      ascending       True: a chunk's W's run in ascending order of micro-batches, which bit-equal gradients
                      need. Only ZBH1 changes: without it, it is Paddle's order, where the first s W's come
                      last.
      unit_costs      (F, B, W, transfer) of a chunk, in any unit, for those that place W's by time: the split
                      forms of FThenB, 1F1B, Eager1F1B and VPP, ZBH2 and ZBV. Default (1, 1, 1, 0).
    Raises ValueError for an unknown name or option, or numbers that the schedule can't take.
    """
    known = canonical_name(name)
    entry = CATALOGUE[known]
    for what, number in (("stages", stages), ("chunks", chunks), ("micro_batches", micro_batches)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{known}: {what} must be a whole number of at least 1 (got {number!r})")
    for option in options:
        if option not in _OPTIONS:
            raise ValueError(f"{known} has no option {option!r}; there are {', '.join(_OPTIONS)}")
    if entry.chunks is not None and chunks != entry.chunks:
        wants = "runs one chunk a stage" if entry.chunks == 1 else f"needs {entry.chunks} chunks a stage"
        raise ValueError(f"{known} {wants} (got chunks={chunks}): {entry.otherwise}")
    split = options.get("split_backward")
    if split not in (None, True, False):
        raise ValueError(f"{known}: split_backward must be True or False (got {split!r})")
    if entry.splits and split is False:
        raise ValueError(
            f"{known} always splits backwards (got split_backward=False): use 1F1B or VPP for whole ones"
        )
    costs = _unit_costs(known, options.get("unit_costs", (1.0, 1.0, 1.0, 0.0)))
    policy = entry.policy(Request(stages, chunks, micro_batches, entry.splits or bool(split), costs))
    schedule = generate(known, policy, micro_batches)
    return ascending(schedule) if options.get("ascending") else schedule


def forward_only(placement: Placement, micro_batches: int) -> Schedule:
    """An evaluation's schedule: each micro-batch's forwards as soon as they can, and no backward. It keeps a
    training schedule's placement. Micro-batches go in groups of S through a stage's chunks, so that loops
    stay busy."""
    stages = max(placement) + 1
    groups = [stages] * (micro_batches // stages)
    if micro_batches % stages:
        groups.append(micro_batches % stages)
    queues = [(grouped(own, groups)[0], Queue()) for own in own_chunks(placement, stages)]
    limits = [len(forward) for forward, _ in queues]
    return generate("ForwardOnly", Policy(placement, queues, limits, Fuse()), micro_batches)


def _unit_costs(name: str, given: Any) -> UnitCosts:
    costs = tuple(given)
    if len(costs) != 4 or any(not c >= 0 for c in costs):
        raise ValueError(
            f"{name}: unit_costs are four numbers ≥ 0, for F, B, W and a transfer (got {given!r})"
        )
    return UnitCosts(*map(float, costs))


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).lower()
