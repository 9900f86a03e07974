"""Anchors: cutting a second capture of a model (another shape, or evaluation) where the first was cut.

Parameters lie on ranks by then, so the cuts must fall between the same parameters. Where the forward is the
same list of ops the positions carry over; where it isn't (evaluation has no dropout), each cut goes between the
last op that reads a parameter of an earlier chunk and the first that reads one of a later chunk, where the
fewest bytes cross.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.fx as fx

from ..program.ir import Program, ProgramError, is_getitem, target_name
from .pieces import crossing_bytes, parameters_of


@dataclass(frozen=True)
class CutPoints:
    """Where a program was cut. ops: targets of its forward ops; positions: see `cuts.choose_cuts`; homes:
    parameter -> the chunks that read it."""

    ops: tuple[str, ...]
    positions: tuple[int, ...]
    homes: Mapping[str, frozenset[int]]

    @staticmethod
    def of(
        program: Program, order: list[fx.Node], positions: list[int], labels: Mapping[fx.Node, int]
    ) -> CutPoints:
        homes: dict[str, set[int]] = {}
        for node in order:
            for name in parameters_of(program, node, set(order)):
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
        chunks = _homes(parameters_of(program, node, placed), like)
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


def _homes(parameters: set[str], like: CutPoints) -> frozenset[int]:
    """The chunks in which an op that reads all of these parameters can have been."""
    known = [like.homes[name] for name in parameters if name in like.homes]
    return frozenset.intersection(*known) if known else frozenset()
