"""Which chunks compute their forward again in the backward, so that a plan fits its memory.

A chunk that is computed again keeps only its inputs from F on; its backward (B, or W where it has no B) runs the
forward once more. Takes what the chunks cost in either way; gives the cheapest set of chunks on each stage whose plan
fits. The trade is that of Chen et al. 2016 (sublinear memory cost); choosing it by stage, since stages run short of
memory one by one under 1F1B, follows AdaPipe (Sun et al. 2024).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from .costs import Costs
from .entries import EntryCoding
from .memory import levels
from .plan import Plan

#: all sets of a stage's chunks are tried up to so many of them; beyond, only the best so many together
_SETS = 8
#: stages that are asked, once all fit, whether they could as well recompute nothing: each costs a plan
_GIVEN_BACK = 8


def mixed(kept: Costs, again: Costs, chunks: Collection[int]) -> Costs:
    """The costs where these chunks are as in `again` and the others as in `kept`."""
    if not chunks:
        return kept

    def pick(first: Sequence[float], second: Sequence[float]) -> tuple[float, ...]:
        pairs = zip(first, second, strict=True)
        return tuple(b if c in chunks else a for c, (a, b) in enumerate(pairs))

    names = (
        "forward",
        "backward_b",
        "backward_w",
        "backward",
        "held_forward",
        "held_weight",
        "held_backward",
    )
    columns = {name: pick(getattr(kept, name), getattr(again, name)) for name in names}
    workspace = {
        kind: tuple((again if c in chunks else kept).workspace_of(kind, c) for c in range(kept.chunks))
        for kind in ("F", "B", "W", "X")
    }
    sent = {
        edge: (again if edge[1] in chunks else kept).sent.get(edge, 0.0)
        for edge in {**kept.sent, **again.sent}
    }
    return replace(kept, **columns, workspace=workspace, sent=sent)  # type: ignore[arg-type]


def added_seconds(kept: Costs, again: Costs, chunks: Collection[int]) -> float:
    """What these chunks take longer for a micro-batch."""
    longer = (
        again.backward_b[c] + again.backward_w[c] - kept.backward_b[c] - kept.backward_w[c] for c in chunks
    )
    return sum(longer)


def least(
    plan_of: Callable[[Costs], Plan], kept: Costs, again: Costs, memory_limit: float
) -> tuple[tuple[int, ...], Plan] | None:
    """(chunks that are computed again, the plan), of the least compute on each stage that fits; None where not even all
    of them do. plan_of: the plan for costs, without a memory limit."""
    plan = plan_of(kept)
    sets = [list(_sets(plan, kept, again, stage)) for stage in range(plan.stages)]
    most = [len(own) - 1 for own in sets]
    at = [0] * plan.stages
    while over := [s for s, peak in enumerate(plan.simulation.peak) if peak > memory_limit]:
        if at == most:
            return None
        if any(at[stage] == most[stage] for stage in over):
            at = list(
                most
            )  # what others keep decides how many receives wait here: perhaps if none keep anything
        for stage in over:
            tried = range(at[stage] + 1, len(sets[stage]))
            fits = (
                n for n in tried if _peak(plan, stage, mixed(kept, again, sets[stage][n])) <= memory_limit
            )
            at[stage] = next(fits, most[stage])
        plan = plan_of(mixed(kept, again, _chosen(sets, at)))
    # a stage may have been short only of room for receives that the other stages' recompute has put off since
    for stage in [s for s, n in enumerate(at) if n][:_GIVEN_BACK]:
        fewer = mixed(kept, again, _chosen(sets, [*at[:stage], 0, *at[stage + 1 :]]))
        smaller = plan_of(fewer)
        if max(smaller.simulation.peak) <= memory_limit:
            at[stage], plan = 0, smaller
    return _chosen(sets, at), plan


def _chosen(sets: Sequence[Sequence[tuple[int, ...]]], at: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(c for stage, n in enumerate(at) for c in sets[stage][n]))


def _sets(plan: Plan, kept: Costs, again: Costs, stage: int) -> Iterator[tuple[int, ...]]:
    """Sets of a stage's chunks, the cheapest first, of equally cheap ones the smallest; all of them last."""
    own = [c for c, on in enumerate(plan.placement) if on == stage]
    if len(own) > _SETS:
        saved = [
            kept.held_forward[c] + kept.held_weight[c] - again.held_forward[c] - again.held_weight[c]
            for c in range(kept.chunks)
        ]
        own.sort(key=lambda c: added_seconds(kept, again, [c]) / max(saved[c], 1e-9))
        found = [tuple(own[:n]) for n in range(len(own) + 1)]
    else:
        found = [s for n in range(len(own) + 1) for s in itertools.combinations(own, n)]
        found.sort(key=lambda s: (added_seconds(kept, again, s), len(s)))
        found.remove(tuple(own))
        found.append(tuple(own))
    yield from found


def _peak(plan: Plan, stage: int, costs: Costs) -> float:
    """A stage's peak if the plan's lists stayed as they are."""
    lowered = plan.lowered
    coding: EntryCoding = lowered.coding
    return levels(lowered.codes, coding, stage, costs).peak
