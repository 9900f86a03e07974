"""Times the programs of all stages at once, and shares the seconds: every rank plans with the same ones.

Ranks of one machine share its memory and more, so they are timed together, as they will run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import perf_counter

from torch import Tensor

from ..program.subprogram import ProgramSet
from . import agreement
from .calibrate import time_programs
from .parameters import ParameterStore
from .replicas import Replicas, tell
from .stepping import Work, arrive
from .transport import Transport


def time_together(
    store: ParameterStore,
    programs: ProgramSet,
    chunks: Sequence[int],
    leaves: Sequence[Tensor],
    transport: Transport,
    replicas: Replicas,
    preserved: Callable[[], AbstractContextManager[None]],
) -> Work[tuple[dict[str, float], dict[int, float]]]:
    """({structure: seconds} of all stages' programs, {chunk: seconds} of the sums of its gradients over replicas).

    chunks: of this stage. leaves: those of one micro-batch. What several ranks timed counts by its mean. A collective
    call of the pipeline and its replicas. preserved: keeps the caller's random state while programs draw.
    """
    yield from agreement.gather(transport, [0.0])  # they begin together
    with preserved():
        times = time_programs(store, programs, chunks, leaves)
    structures = sorted({p.structure for p in programs.programs.values() if not p.empty})
    reductions = yield from _time_reductions(store, chunks, replicas)
    mine = [times.get(s, float("nan")) for s in structures]
    mine += [reductions.get(c, float("nan")) for c in range(programs.chunks)]
    rows = yield from agreement.gather(transport, mine)
    rows = json.loads((yield from tell(replicas, json.dumps(rows))))
    found = [[x for x in column if x == x] for column in zip(*rows, strict=True)]
    seconds = [sum(column) / len(column) if column else None for column in found]
    known = {s: t for s, t in zip(structures, seconds, strict=False) if t is not None}
    late = enumerate(seconds[len(structures) :])
    return known, {chunk: t for chunk, t in late if t is not None}


def _time_reductions(
    store: ParameterStore, chunks: Sequence[int], replicas: Replicas
) -> Work[dict[int, float]]:
    """Seconds of the sum of each chunk's (zero) gradients over replicas; the second of two."""
    times: dict[int, float] = {}
    for chunk in chunks if replicas.size > 1 else ():
        for flat in store.summed(chunk):
            yield from arrive(replicas.reduce(flat))
        begin = perf_counter()
        for flat in store.summed(chunk):
            yield from arrive(replicas.reduce(flat))
        times[chunk] = perf_counter() - begin
    return times
