"""What is kept between B and W: moves ops of W into B where that makes it smaller.

A layer norm's weight gradient needs two activation-sized tensors and makes a vector: done in B, the vector is
all that waits for W. Which ops to move is a minimum cut: ops that compute a lot (matrix products, convolutions)
stay in W, which is there to fill bubbles.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import networkx as nx
import torch.fx as fx

from ..program import compat
from ..program.flops import flops_of
from ..program.ir import is_getitem


def cheapest_boundary(
    first: set[fx.Node],
    backward: set[fx.Node],
    gradients: Collection[fx.Node],
    needs_of: Callable[[fx.Node], Iterable[fx.Node]],
) -> set[fx.Node]:
    """The ops of B: `first` (what input gradients need) and those of the rest that are better done with them.

    The cut's capacity is the bytes of each storage that W would read; parameters and the batch are there anyway
    and cost nothing.
    """
    rest = backward - first
    if not rest:
        return first
    graph: nx.DiGraph[object] = nx.DiGraph()
    source, sink = "B", "W"
    graph.add_node(source)
    graph.add_node(sink)
    sizes: dict[object, int] = {}

    def out(node: fx.Node) -> object:
        """Where a value is held: views hold their base's storage."""
        storages = tuple(sorted({compat.storage_key(t) for t in compat.fake_values(node)}))
        key = ("held", storages)
        sizes[key] = sum(
            {compat.storage_key(t): t.untyped_storage().nbytes() for t in compat.fake_values(node)}.values()
        )
        return key

    for node in rest:
        pinned = flops_of(node) > 0 or not compat.fake_values(node)
        if pinned:
            graph.add_edge(("op", node), sink)  # no capacity: infinite
        for need in needs_of(node):
            if need.op == "placeholder":
                continue
            held = out(need)
            graph.add_edge((held, "in"), (held, "out"), capacity=sizes[held])
            graph.add_edge((held, "out"), ("op", node))
            if need in rest:
                graph.add_edge(("op", need), (held, "in"))
                graph.add_edge(("op", node), ("op", need))  # an op of B needs its inputs in B
            else:
                graph.add_edge(source, (held, "in"))
        if node in gradients:
            held = out(node)
            graph.add_edge((held, "in"), (held, "out"), capacity=sizes[held])
            graph.add_edge(("op", node), (held, "in"))
            graph.add_edge((held, "out"), sink)
    if graph.out_degree(source) == 0:
        return first
    try:
        _, (side, _) = nx.minimum_cut(graph, source, sink)
    except nx.NetworkXUnbounded:
        return first
    moved = {n for n in rest if ("op", n) in side}
    moved |= {u for n in moved for u in n.users if is_getitem(u) and u in rest}
    # an item follows its producer, and an op moves only with all that it needs
    changed = True
    while changed:
        changed = False
        for node in list(moved):
            stuck = any(n in rest and n not in moved for n in needs_of(node))
            if stuck or (is_getitem(node) and node.args[0] not in moved):
                moved.discard(node)
                changed = True
    return first | moved
