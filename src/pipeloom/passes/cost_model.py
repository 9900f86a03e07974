"""What an op costs, read off the graph: floating point operations and bytes moved.

Seconds come from a roofline over the two (see `pipeloom.planning.costs`). Good enough to balance cuts before
anything has run; the plan's prediction uses measured times where the strategy asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.fx as fx

from ..program import compat
from ..program.ir import is_getitem, nbytes

#: a CPU core's or an accelerator's ratio matters more than the absolute values: ops a second and bytes a second
FLOPS_PER_SECOND = 5e10
BYTES_PER_SECOND = 1e10
#: what a byte over the wire costs, for choosing where few bytes cross
LINK_BYTES_PER_SECOND = 2e9


def moved_bytes(node: fx.Node) -> float:
    """Bytes that the op reads and writes; nothing for views and getitems."""
    if not compat.is_op(node) or compat.is_view(node):
        return 0.0
    read = sum(nbytes(t) for n in node.all_input_nodes for t in compat.fake_values(n))
    return float(read + sum(nbytes(t) for t in compat.fake_values(node)))


def seconds(flops: float, moved: float) -> float:
    """A roofline: the slower of computing and moving."""
    return max(flops / FLOPS_PER_SECOND, moved / BYTES_PER_SECOND)


def op_seconds(node: fx.Node) -> float:
    if is_getitem(node):
        return 0.0
    return seconds(compat.flops_of(node), moved_bytes(node))


def totals(nodes: Iterable[fx.Node]) -> tuple[float, float]:
    """(floating point operations, bytes moved) of some nodes."""
    flops = moved = 0.0
    for node in nodes:
        flops += compat.flops_of(node)
        moved += moved_bytes(node)
    return flops, moved
