"""What the planner counts of values that cross: gaps, copies, and memory that the sender keeps anyway."""

from __future__ import annotations

import torch

from pipeloom.footprint import held_bytes, sent_bytes
from pipeloom.program.subprogram import Input, ProgramSet, SubProgram, ValueInfo


def value(name: str, shape: tuple[int, ...], stride: tuple[int, ...], storage: int, nbytes: int) -> ValueInfo:
    return ValueInfo(name, shape, stride, torch.float32, storage, nbytes, nbytes)


def program(kind: str, chunk: int, reads: list[str]) -> SubProgram:
    return SubProgram(kind, chunk, tuple, [Input("value", name) for name in reads], [])  # type: ignore[arg-type]


def two_chunks(kept: list[str]) -> ProgramSet:
    """Chunk 0 sends `plain`, and `left` and `right`, the halves of the columns of one 8 × 4 matrix; its backward reads
    `kept`. Chunk 1's backward reads all three."""
    values = [
        value("plain", (5,), (1,), 0, 20),
        value("left", (8, 2), (4, 1), 1, 128),
        value("right", (8, 2), (4, 1), 1, 128),
    ]
    names = [v.name for v in values]
    return ProgramSet(
        chunks=2,
        programs={
            ("F", 0): program("F", 0, []),
            ("X", 0): program("X", 0, kept),
            ("F", 1): program("F", 1, names),
            ("X", 1): program("X", 1, names),
        },
        values={v.name: v for v in values},
        messages={("F", 0, 1): names},
        slots=[],
        loss="plain",
        loss_chunk=1,
    )


def test_received_values_have_memory_of_their_own_gaps_included() -> None:
    programs = two_chunks([])
    span = 4 * (1 + 7 * 4 + 1)
    assert held_bytes(programs, 1) == (20 + 2 * span, 0, 0)
    assert held_bytes(programs, 1, [0, 1]) == (20 + 2 * span, 0, 0)
    assert held_bytes(programs, 1, [0, 0]) == (20 + 128, 0, 0)


def test_what_only_a_message_keeps_alive() -> None:
    copies = 2 * 4 * 16
    assert sent_bytes(two_chunks([])) == {("F", 0, 1): 20 + copies}
    assert sent_bytes(two_chunks(["plain"])) == {("F", 0, 1): copies}
