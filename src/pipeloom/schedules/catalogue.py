"""The schedules by name: what each takes, how it is built, and within how much memory.

The policies themselves, each drawn in its docstring, are in policies.py and vshape.py.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from . import policies, vshape
from .generator import Fuse, Policy, Queue, ascending, generate, grouped, merged, own_chunks
from .jobs import Placement
from .limits import within
from .policies import Request
from .schedule import Schedule
from .weights import UnitCosts


@dataclass(frozen=True)
class Entry:
    """A schedule of the catalogue. chunks: how many a stage it takes (None: any). splits: it always splits
    backwards. leaner: policies on the same placement that a memory limit may choose instead."""

    policy: Callable[[Request], Policy]
    chunks: int | None = None
    splits: bool = False
    otherwise: str = ""
    leaner: tuple[Callable[[Request], Policy], ...] = ()


_TWO: Final = "pass chunks=2, or use VPP or InterleavedZeroBubble for another number"

CATALOGUE: Final[dict[str, Entry]] = {
    "FThenB": Entry(policies.fthenb),
    "1F1B": Entry(policies.one_f_one_b, 1, otherwise="use VPP, which is 1F1B with several chunks a stage"),
    "Eager1F1B": Entry(policies.eager_1f1b, 1, otherwise="use VPP"),
    "VPP": Entry(policies.vpp),
    "LoopedBFS": Entry(policies.looped_bfs),
    "ZBH1": Entry(policies.zbh1, 1, True, "use InterleavedZeroBubble, or ZBV with two chunks a stage"),
    "ZBH2": Entry(policies.zbh2, 1, True, "use InterleavedZeroBubble, or ZBV with two chunks a stage"),
    "InterleavedZeroBubble": Entry(policies.interleaved_zero_bubble, None, True),
    "ZBV": Entry(vshape.zbv, 2, True, _TWO, (vshape.v_half, vshape.v_min)),
    "V-Half": Entry(vshape.v_half, 2, True, _TWO, (vshape.v_min,)),
    "V-Min": Entry(vshape.v_min, 2, True, _TWO),
    "DualPipeV": Entry(vshape.dualpipev, 2, True, _TWO, (vshape.zbv, vshape.v_half, vshape.v_min)),
}

ALIASES: Final[dict[str, str]] = {
    "GPipe": "FThenB",
    "BFS": "LoopedBFS",
    "Interleaved1F1B": "VPP",
    "ZBVPP": "ZBV",
    "ZBVZeroBubble": "ZBV",
}

_OPTIONS: Final = ("split_backward", "ascending", "unit_costs", "memory_limit", "acts")


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
    spelled = {_plain(n): n for n in names()}
    near = difflib.get_close_matches(plain, spelled, n=1)
    hint = f" Did you mean {spelled[near[0]]}?" if near else ""
    raise ValueError(f"there is no schedule {name!r}.{hint} There are {', '.join(names())}")


def build(name: str, *, stages: int, chunks: int = 1, micro_batches: int, **options: Any) -> Schedule:
    """The compute jobs of a named schedule, one ordered list a stage.

    stages: S ≥ 1. chunks: V ≥ 1, chunks a stage. micro_batches: M ≥ 1, any number.
    Options:
      split_backward  True: backwards are two jobs, B and W, instead of X. ZBH1, ZBH2, InterleavedZeroBubble and
                      all on a V placement always are. Elsewhere W's go where a stage would wait, within the
                      memory that the schedule needs anyway; VPP with M = S puts them at the end of the list,
                      as Paddle does.
      ascending       True: a chunk's W's run in ascending order of micro-batches, which bit-equal gradients
                      need. Only ZBH1 changes: without it, it is Paddle's order, where the first s W's come
                      last.
      unit_costs      (F, B, W, transfer) of a chunk, in any unit, for those that place W's by time: the split
                      forms of FThenB, LoopedBFS, 1F1B, Eager1F1B and VPP, and ZBH2, ZBV, V-Half and V-Min; and for
                      the choice within a memory limit. Default (1, 1, 1, 0).
      memory_limit    the most that a stage may hold, in micro-batches on one stage (1F1B's peak is min(S, M)). Any
                      limit that holds one micro-batch will do, and more never makes the schedule slower.
                      Activations count from F until W (or X).
      acts            what one micro-batch's activations take in each chunk, in the unit of memory_limit; by default
                      1/V each.
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
    request = Request(stages, chunks, micro_batches, entry.splits or bool(split), costs)
    limit, acts = options.get("memory_limit"), options.get("acts")
    if limit is None and acts is not None:
        raise ValueError(f"{known}: acts are what memory_limit counts: give both, or neither")
    if limit is None:
        schedule = generate(known, entry.policy(request), micro_batches)
    elif isinstance(limit, int | float) and not math.isnan(limit):
        schedule = within(known, [entry.policy, *entry.leaner], request, limit, acts)
    else:
        raise ValueError(
            f"{known}: memory_limit must be a number of micro-batches on one stage (got {limit!r})"
        )
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
    orders = merged(placement, queues, [len(forward) for forward, _ in queues], micro_batches)
    return generate("ForwardOnly", Policy(placement, orders, Fuse()), micro_batches)


def _unit_costs(name: str, given: Any) -> UnitCosts:
    costs = tuple(given)
    if len(costs) != 4 or any(not 0 <= c < math.inf for c in costs):
        raise ValueError(
            f"{name}: unit_costs are four numbers ≥ 0, for F, B, W and a transfer (got {given!r})"
        )
    return UnitCosts(*map(float, costs))


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).lower()
