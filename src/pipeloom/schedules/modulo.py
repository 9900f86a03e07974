"""Modulo schedules: one micro-batch's jobs, its building block, repeated at a fixed period.

If a block's jobs keep out of each other's way modulo the period, so do all micro-batches', and memory is what the
block's lifespans say (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"; the idea is software
pipelining's, Lam 1988). Takes a placement and how far apart neighbouring jobs of a block are; gives each stage's
order of F's and B's. W's are placed afterwards (weights.py), in the period's slots that are left for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .generator import Order, own_chunks
from .jobs import Placement


def block(
    placement: Placement, forward: Sequence[int], backward: Sequence[int], period: int
) -> list[list[int]]:
    """[F, B][chunk] -> the slot in which micro-batch 0 runs it, each job taking one slot.

    forward[n], backward[n]: slots from one chunk to the next (for B: to the one before) within the n-th pass over
    the stages; a turn on one stage takes one. A job whose slot is taken, modulo the period, goes into the next free
    one, so a period needs two slots for each chunk of a stage."""
    total, stages = len(placement), max(placement) + 1
    taken: set[tuple[int, int]] = set()
    slots: list[list[int]] = [[0] * total, [0] * total]
    slot = 0
    for kind, chunk in [(0, c) for c in range(total)] + [(1, c) for c in reversed(range(total))]:
        before = chunk - 1 if kind == 0 else chunk + 1
        if 0 <= before < total:
            turn = placement[before] == placement[chunk]
            slot += 1 if turn else (forward, backward)[kind][before // stages]
        elif kind == 1:
            slot += 1
        while (placement[chunk], slot % period) in taken:
            slot += 1
        taken.add((placement[chunk], slot % period))
        slots[kind][chunk] = slot
    return slots


def repeated(
    placement: Placement, slots: Sequence[Sequence[int]], period: int, micro_batches: int
) -> list[Order]:
    """Each stage's F's and B's, as codes, in the order of slot + period · micro-batch."""
    total, stages = len(placement), max(placement) + 1
    numbers = np.arange(micro_batches)
    orders = []
    for own in own_chunks(placement, stages):
        when = np.concatenate([slots[kind][c] + period * numbers for kind in (0, 1) for c in own])
        codes = np.concatenate([(kind * total + c) * micro_batches + numbers for kind in (0, 1) for c in own])
        orders.append(codes[np.argsort(when, kind="stable")].tolist())
    return orders
