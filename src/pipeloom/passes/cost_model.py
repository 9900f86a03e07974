"""What an op costs, read off the graph: floating point operations and bytes moved.

Seconds come from a roofline over the two (see `pipeloom.planning.devices`). Good enough to balance cuts before
anything has run; the plan's prediction uses measured times where the strategy asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.fx as fx

from ..planning.devices import UNKNOWN, Roofline
from ..program import compat
from ..program.flops import flops_of
from ..program.ir import is_getitem, nbytes


def moved_bytes(node: fx.Node) -> float:
    """Bytes that the op reads and writes; nothing for views and getitems."""
    if not compat.is_op(node) or compat.is_view(node):
        return 0.0
    read = sum(nbytes(t) for n in node.all_input_nodes for t in compat.fake_values(n))
    return float(read + sum(nbytes(t) for t in compat.fake_values(node)))


def op_seconds(node: fx.Node, roofline: Roofline = UNKNOWN) -> float:
    """What the op takes at the rate of its result's dtype."""
    if is_getitem(node):
        return 0.0
    results = compat.fake_values(node)
    dtype = str(results[0].dtype).removeprefix("torch.") if results else "float32"
    return roofline.seconds(flops_of(node), moved_bytes(node), dtype)


def totals(nodes: Iterable[fx.Node]) -> tuple[float, float]:
    """(floating point operations, bytes moved) of some nodes."""
    flops = moved = 0.0
    for node in nodes:
        flops += flops_of(node)
        moved += moved_bytes(node)
    return flops, moved
