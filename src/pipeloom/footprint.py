"""Bytes that programs keep: between the jobs of a chunk, for messages under way, and always."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .program.subprogram import ProgramSet
from .runtime.layout import Wire
from .schedules.jobs import Direction, Kind


def held_bytes(
    programs: ProgramSet, chunk: int, placement: Sequence[int] | None = None
) -> tuple[int, int, int]:
    """Bytes that one micro-batch keeps in a chunk: from F until B, from F until W, and from B until W. A value from
    another stage has memory of its own, where the sender's may share it with others."""
    received = {
        name
        for (_, source, target), names in programs.messages.items()
        if target == chunk and (placement is None or placement[source] != placement[target])
        for name in names
    }

    def size_of(names: set[str]) -> int:
        own = sum(Wire.of(programs.values[name]).span_bytes for name in names & received)
        return own + _bytes(programs, names - received)

    def reads(kind: Kind) -> set[str]:
        program = programs.programs.get((kind, chunk))
        return set() if program is None else {i.name for i in program.inputs if i.kind == "value"}

    backward = {
        name
        for (d, _, target), names in programs.messages.items()
        if d == "B" and target == chunk
        for name in names
    }
    made = programs.programs.get(("B", chunk))
    between = reads("W") & set(made.outputs if made else ())
    if made is None:
        return size_of(reads("X") - backward), 0, 0
    until_w = reads("W") - between - backward
    until_b = reads("B") - until_w - backward
    return (
        size_of(until_b),
        size_of(until_w),
        size_of(between | (reads("W") & backward)),
    )


def sent_bytes(programs: ProgramSet) -> dict[tuple[Direction, int, int], float]:
    """Bytes of each edge's message that its sender doesn't keep for its own later jobs: memory that no later job reads,
    and copies of values with gaps."""
    kept: dict[int, set[int]] = {}
    for (kind, chunk), program in programs.programs.items():
        if kind != "F":
            reads = {programs.values[i.name].storage for i in program.inputs if i.kind == "value"}
            kept.setdefault(chunk, set()).update(reads)
    sent = {}
    for edge, names in programs.messages.items():
        wires = {name: Wire.of(programs.values[name]) for name in names}
        copied = {name for name, wire in wires.items() if wire.gathered is not None}
        alone = {n for n in names if programs.values[n].storage not in kept.get(edge[1], ())} - copied
        sent[edge] = float(sum(wires[name].nbytes for name in copied) + _bytes(programs, alone))
    return sent


def _bytes(programs: ProgramSet, names: set[str]) -> int:
    storages: dict[int, int] = {}
    for name in names:
        value = programs.values[name]
        storages[value.storage] = max(storages.get(value.storage, 0), value.storage_bytes)
    return sum(storages.values())


def resident_bytes(programs: ProgramSet, placement: Sequence[int], moments: int) -> list[int]:
    """What always stays on each stage: its weights and buffers, and of each trained weight a gradient and the
    optimizer's moments."""
    shapes: list[dict[tuple[str, str], int]] = [{} for _ in range(max(placement) + 1)]
    for program in programs.programs.values():
        mine = shapes[placement[program.chunk]]
        for (kind, name), (shape, dtype) in zip(program.inputs, program.shapes, strict=True):
            if kind in ("param", "buffer"):
                mine[kind, name] = math.prod(shape) * dtype.itemsize
    for slot in programs.slots:
        shapes[placement[slot.chunk]]["slot", slot.name] = (
            (1 + moments) * math.prod(slot.shape) * slot.dtype.itemsize
        )
    return [sum(mine.values()) for mine in shapes]
