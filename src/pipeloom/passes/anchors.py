"""Anchors: cutting a second capture of a model (another shape, or evaluation) where the first was cut.

Parameters and buffers lie on ranks by then, and one rank is expected to make the losses, so the cuts must fall between
the same ones. Where the forward is the same list of ops the positions carry over; where it isn't (evaluation has no
dropout, a batch of one other views), each cut goes between the last op that belongs to an earlier chunk, by a parameter
or buffer that it reads or because it makes the loss, and the first that belongs to a later one, where the fewest bytes
cross.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.fx as fx

from ..program.ir import Program, ProgramError, is_getitem, target_name
from .pieces import crossing_bytes, state_of


@dataclass(frozen=True)
class CutPoints:
    """Where a program was cut. ops: targets of its forward ops; positions: see `cuts.choose_cuts`; homes:
    parameter or buffer -> the chunks that read it; likewise for what makes the loss and its weight."""

    ops: tuple[str, ...]
    positions: tuple[int, ...]
    homes: Mapping[str, frozenset[int]]

    @staticmethod
    def of(
        program: Program, order: list[fx.Node], positions: list[int], labels: Mapping[fx.Node, int]
    ) -> CutPoints:
        homes: dict[str, set[int]] = {}
        placed = set(order)
        for node in order:
            for name in _belongings(program, node, placed):
                homes.setdefault(name, set()).add(labels[node])
        return CutPoints(
            tuple(target_name(n) for n in order),
            tuple(positions),
            {name: frozenset(chunks) for name, chunks in homes.items()},
        )


def anchored_cuts(program: Program, order: list[fx.Node], like: CutPoints) -> list[int]:
    """Positions in `order` that cut this program where `like` says. Raises ProgramError where the parameters
    run in another order than they did."""
    if tuple(target_name(n) for n in order) == like.ops:
        return list(like.positions)
    placed = set(order)
    home: list[int | None] = []
    reached = 0
    for node in order:
        chunks = _homes(_belongings(program, node, placed), like)
        # a parameter with several homes is used again further on: in the nearest of them that isn't behind
        ahead = [c for c in chunks if c >= reached] if len(chunks) > 1 else chunks
        home.append(min(ahead, default=None))
        reached = max(reached, home[-1] or 0)
    bytes_at = crossing_bytes(order)
    positions: list[int] = []
    for k in range(1, len(like.positions) + 1):
        low = max([i + 1 for i, h in enumerate(home) if h is not None and h < k] + positions[-1:] + [0])
        high = min([i for i, h in enumerate(home) if h is not None and h >= k], default=len(order))
        if low > high:
            raise ProgramError(
                f"this capture runs the parameters of chunk {k} before those of the chunk ahead of it: the "
                "model runs its modules in another order than in the example that it was compiled with. "
                "Compile it again with such an example."
            )
        allowed = [
            p for p in range(low, high + 1) if p == len(order) or p == 0 or not is_getitem(order[p])
        ] or [high]
        positions.append(min(allowed, key=lambda p: (bytes_at[p], -p)))
    return positions


def _belongings(program: Program, node: fx.Node, placed: set[fx.Node]) -> set[str]:
    """What ties an op to a chunk: the parameters and buffers that it reads, and the loss or weight that it makes."""
    figures = range(1 + program.has_weight)
    made = {
        f"output {desc.name}"
        for output, desc in program.outputs
        if output is node and desc.kind == "output" and int(desc.name) in figures
    }
    return state_of(program, node, placed) | made


def _homes(state: set[str], like: CutPoints) -> frozenset[int]:
    """The chunks in which an op that reads all of these parameters and buffers can have been."""
    known = [like.homes[name] for name in state if name in like.homes]
    return frozenset.intersection(*known) if known else frozenset()
