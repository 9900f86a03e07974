"""Cuts a set of ops out of a Program as a boxed graph of its own, with gradients added in place into accumulators.

Where the gradient is a matrix product, the accumulator takes it by `addmm_` (no second copy, and faster than adding
afterwards); an embedding's by `index_add_`; everything else by `add_`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
import torch.fx as fx
from torch import nn

from ..program import compat
from ..program.ir import is_getitem

aten = torch.ops.aten


def extract(
    graph: fx.Graph,
    owner: nn.Module,
    nodes: Collection[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    slots: Sequence[tuple[fx.Node, torch.dtype]] = (),
    name: str = "SubProgram",
) -> fx.GraphModule:
    """A GraphModule that takes [inputs…, one accumulator for each slot] in one list and returns the outputs as a tuple.

    nodes: the ops to copy, in the order of `graph`. slots: gradients to add into accumulators of the given dtypes.
    owner: the module that holds the constants (get_attr) of `graph`.
    """
    wanted = set(nodes)
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = new.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    targets: dict[fx.Node, list[fx.Node]] = {}
    for i, (gradient, dtype) in enumerate(slots):
        accumulator = new.placeholder(f"acc_{i}")
        like = compat.fake_values(gradient)[0]
        accumulator.meta["val"] = like if like.dtype == dtype else like.to(dtype)
        targets.setdefault(gradient, []).append(accumulator)
    merged = _merges(targets, wanted, copies, outputs)
    root = nn.Module()
    for node in graph.nodes:
        if node not in wanted or node in copies:
            continue
        if node.op == "get_attr":
            setattr(root, str(node.target), getattr(owner, str(node.target)))
        if node in merged:
            _merge(new, node, merged[node], copies)
            continue
        copies[node] = new.node_copy(node, lambda n: copies[n])
        if node in targets:
            _add(new, copies[node], targets.pop(node))
    for gradient in [g for g in targets if g in copies and g not in merged]:
        _add(new, copies[gradient], targets.pop(gradient))
    new.output(tuple(copies[o] for o in outputs))
    for node in reversed(list(new.nodes)):
        if node.op == "call_function" and not node.users and not compat.mutates(node):
            new.erase_node(node)
    new.lint()
    return compat.boxed(new, root, name)


#: how an op's result is added: ("mm", accumulator, transposed), ("embedding", accumulator, False) or None (skipped)
_Merge = tuple[str, fx.Node, bool] | None


def _merges(
    targets: dict[fx.Node, list[fx.Node]],
    wanted: set[fx.Node],
    copies: dict[fx.Node, fx.Node],
    outputs: Iterable[fx.Node],
) -> dict[fx.Node, _Merge]:
    """The ops whose result goes straight into an accumulator, with the transposes between that needn't run."""
    exported = set(outputs)
    merged: dict[fx.Node, _Merge] = {}

    def alone(node: fx.Node, below: fx.Node | None) -> bool:
        inside = [u for u in node.users if u in wanted and u is not below]
        other = below is not None and node in targets  # a gradient itself, and its transpose another
        return node in wanted and node not in copies and node not in exported and not inside and not other

    for gradient, accumulators in targets.items():
        if len(accumulators) != 1:
            continue
        accumulator = accumulators[0]
        node, below, transposed, chain = gradient, None, False, []
        while alone(node, below) and _transposes(node):
            chain.append(node)
            node, below, transposed = node.all_input_nodes[0], node, not transposed
        if not alone(node, below) or accumulator.meta["val"].dtype != compat.fake_values(node)[0].dtype:
            continue
        if node.target is aten.mm.default:
            merged[node] = ("mm", accumulator, transposed)
        elif node.target is aten.embedding_dense_backward.default and not chain and _every_row_counts(node):
            merged[node] = ("embedding", accumulator, False)
        else:
            continue
        merged.update((n, None) for n in chain)
    return merged


def _every_row_counts(node: fx.Node) -> bool:
    """Whether an embedding's gradient is the plain sum of its rows: no padding row, no scaling by frequency."""
    _, _, _, padding, by_frequency = node.args
    return isinstance(padding, int) and padding < 0 and not by_frequency


def _transposes(node: fx.Node) -> bool:
    return node.target is aten.t.default or (
        node.target is aten.permute.default and node.args[1] in ([1, 0], (1, 0))
    )


def _merge(graph: fx.Graph, node: fx.Node, how: _Merge, copies: dict[fx.Node, fx.Node]) -> None:
    if how is None:
        return
    kind, accumulator, transposed = how
    first, second = (copies[n] for n in node.args[:2])  # type: ignore[index]
    if kind == "mm":
        target = graph.call_function(aten.t.default, (accumulator,)) if transposed else accumulator
        graph.call_function(aten.addmm_.default, (target, first, second))
        return
    width = compat.fake_values(node)[0].shape[-1]
    rows = graph.call_function(aten.reshape.default, (second, [-1]))
    values = graph.call_function(aten.reshape.default, (first, [-1, width]))
    graph.call_function(aten.index_add_.default, (accumulator, 0, rows, values))


def _add(graph: fx.Graph, gradient: fx.Node, accumulators: Iterable[fx.Node]) -> None:
    for accumulator in accumulators:
        graph.call_function(aten.add_.Tensor, (accumulator, gradient))


def sinkable(node: fx.Node) -> bool:
    """A view, or an item of a view that returns several: recomputed where it is used, so that only its base is kept."""
    if is_getitem(node):
        return compat.is_view(node.args[0])  # type: ignore[arg-type]
    return compat.is_view(node)
