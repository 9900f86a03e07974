"""Bytes: what a value holds, and what a sub-program needs at its worst moment.

Fake tensors keep aliasing: values that share memory share a storage, which is counted once. Exact on the CPU to
the allocator's rounding (design notes: estimated 63.09 MB, measured 63.09).
"""

from __future__ import annotations

from collections.abc import Collection

import torch.fx as fx

from ..program import compat


def storages(node: fx.Node) -> dict[int, int]:
    """{storage: bytes} of what a node returns."""
    return {compat.storage_key(t): t.untyped_storage().nbytes() for t in compat.fake_values(node)}


def peak_bytes(graph: fx.Graph, owned: Collection[str]) -> int:
    """The most bytes that a boxed graph holds at once, beyond what its inputs hold before it begins.

    owned: names of the inputs that the graph's caller has given up, so that they are freed at their last use.
    """
    nodes = list(graph.nodes)
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        for read in (node, *node.all_input_nodes):
            last[read] = i
    references: dict[int, int] = {}
    sizes: dict[int, int] = {}
    outside: set[int] = set()
    live = peak = 0
    for i, node in enumerate(nodes):
        if node.op == "output":
            break
        for key, size in storages(node).items():
            if node.op == "placeholder" and node.name not in owned:
                outside.add(key)
            if key in outside:
                continue
            if not references.get(key):
                if node.op != "placeholder":
                    live += size
                references[key] = 0
                sizes[key] = size
            references[key] += 1
        peak = max(peak, live)
        for read in {node, *node.all_input_nodes}:
            if last[read] != i:
                continue
            for key in storages(read):
                if key in references and key not in outside and references[key]:
                    references[key] -= 1
                    if not references[key]:
                        live -= sizes[key]
    return peak
