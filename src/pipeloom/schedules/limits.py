"""The best schedule of a name within a memory limit.

Takes policies, a limit and what each chunk's activations take; tries the policies at ever lower numbers of chunk
forwards in flight, and on a V placement also the reserve rule (reserve.py) at ever lower limits, and gives the
fastest under the unit costs that fits. The tries don't depend on the limit, which only chooses among them: so more
memory never makes a schedule slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from .generator import Policy, generate, own_chunks
from .jobs import Edge, Kind, chain_edges
from .policies import Request
from .reserve import reserve
from .schedule import BACKWARD, BACKWARD_W, FORWARD, Schedule
from .timing import Stuck, times

#: limits that are tried between the least and what the schedule takes by itself; fewer where a try takes long
_TRIES, _FEW_TRIES, _MANY_JOBS = 24, 8, 50_000
_SLACK = 1e-9


def peaks(schedule: Schedule, acts: Sequence[float]) -> list[float]:
    """The most that each stage holds, in the unit of `acts`: a chunk's activations from F until W (or X)."""
    size = schedule.total_chunks * schedule.micro_batches
    sizes = np.asarray(acts, dtype=np.float64)
    out = []
    for codes in schedule.codes:
        kind, number = np.divmod(codes, size)
        sign = np.where(kind == FORWARD, 1.0, np.where((kind == BACKWARD_W) | (kind == BACKWARD), -1.0, 0.0))
        held = np.cumsum(sign * sizes[number // schedule.micro_batches])
        out.append(float(held.max(initial=0.0)))
    return out


def within(
    name: str,
    policies: Sequence[Callable[[Request], Policy]],
    request: Request,
    limit: float,
    acts: Sequence[float] | None,
) -> Schedule:
    """The fastest that fits. policies: the name's own, and leaner ones on the same placement. limit: of every
    stage. acts[chunk]: activations of one micro-batch; by default 1/V each, so that the limit counts micro-batches
    on one stage. Raises ValueError for a limit that can't hold one micro-batch on every stage, or acts that don't
    fit."""
    full = generate(name, policies[0](request), request.micro_batches)
    sizes = _checked(name, acts, full)
    own = own_chunks(full.placement, full.stages)
    one = [sum(sizes[c] for c in chunks) for chunks in own]
    if not limit >= max(one) - _SLACK:
        stage = one.index(max(one))
        raise ValueError(
            f"{name}: memory_limit={limit:.6g} can't hold one micro-batch on stage {stage}, which takes "
            f"{one[stage]:.6g}: allow at least {max(one):.6g}, or make micro-batches smaller"
        )
    best: tuple[float, Schedule] | None = None
    for schedule in _tries(name, policies, request, full, sizes, one, limit):
        if max(peaks(schedule, sizes)) > limit + _SLACK:
            continue
        try:
            made = _makespan(schedule, request)
        except Stuck:  # a lowered limit can be too low for the order of the queues
            continue
        if best is None or made < best[0] - _SLACK:  # of equals the first, which is the schedule as it is
            best = (made, schedule)
    assert best is not None  # one micro-batch at a time is among the tries, and fits
    return best[1]


def _tries(
    name: str,
    policies: Sequence[Callable[[Request], Policy]],
    request: Request,
    full: Schedule,
    acts: Sequence[float],
    one: Sequence[float],
    limit: float,
) -> Iterator[Schedule]:
    """The schedule as it is, and lower ones, whose nominal limits are no more than `limit`."""
    yield full
    yield _alone(name, request, full)
    least, most = max(one), max(peaks(full, acts))
    turns = request.chunks > 1 and full.placement[request.stages - 1] == full.placement[request.stages]
    for cap in _levels(least, most, min(acts), sum(map(len, full.codes))):
        if cap > limit + _SLACK:
            break
        # a stage's room for chunk forwards, from its chunks' mean
        room = [math.floor(cap * request.chunks / size + _SLACK) if size else 10**9 for size in one]
        for policy in policies:
            try:
                yield generate(name, policy(replace(request, most=tuple(room))), request.micro_batches)
            except RuntimeError:  # so low that the W's can't be placed
                continue
        if turns:
            for alternate in (False, True):
                orders = reserve(
                    full.placement,
                    request.micro_batches,
                    [cap] * request.stages,
                    acts,
                    request.costs,
                    split=bool(request.split),
                    alternate=alternate,
                )
                yield Schedule(name, full.placement, request.micro_batches, orders)


def _levels(least: float, most: float, step: float, jobs: int) -> list[float]:
    """Limits from the least to the most, all multiples of `step` above the least if those are few."""
    if most <= least:
        return [least]
    tries = _FEW_TRIES if jobs > _MANY_JOBS else _TRIES
    if step <= 0 or (most - least) / step > tries:
        step = (most - least) / tries
    return [least + n * step for n in range(math.ceil((most - least) / step - _SLACK) + 1)]


def _alone(name: str, request: Request, full: Schedule) -> Schedule:
    """One micro-batch at a time."""
    total, micro_batches = full.total_chunks, request.micro_batches
    kinds = (1, 2) if request.split else (3,)
    orders = []
    for own in own_chunks(full.placement, full.stages):
        block = [c * micro_batches for c in own]
        block += [(k * total + c) * micro_batches for c in reversed(own) for k in kinds]
        orders.append([code + m for m in range(micro_batches) for code in block])
    return Schedule(name, full.placement, micro_batches, orders)


def _makespan(schedule: Schedule, request: Request) -> float:
    costs = request.costs
    by_kind: dict[Kind, float] = {
        "F": costs.forward,
        "B": costs.backward_b,
        "W": costs.backward_w,
        "X": costs.backward_b + costs.backward_w,
    }

    def delay(edge: Edge) -> float:
        return costs.comm if schedule.placement[edge.source] != schedule.placement[edge.target] else 0.0

    return times(schedule, lambda kind, _: by_kind[kind], chain_edges(schedule.total_chunks), delay).makespan


def _checked(name: str, acts: Sequence[float] | None, full: Schedule) -> list[float]:
    if acts is None:
        return [1 / full.chunks] * full.total_chunks
    sizes = [float(a) for a in acts]
    if len(sizes) != full.total_chunks or not all(math.isfinite(a) and a >= 0 for a in sizes):
        raise ValueError(
            f"{name}: acts must be one finite number ≥ 0 for each of the {full.total_chunks} chunks (got {acts!r})"
        )
    return sizes
