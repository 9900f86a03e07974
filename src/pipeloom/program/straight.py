"""What runs of a program: the function of its graph, as straight Python.

FX's own code finds an op through four attributes and calls it through a Python method, which costs about a microsecond
an op: a tenth of the step of a small model. Here each op's entry into the dispatcher has a name of its own.

And what kernels make is put where it was predicted to lie. A program is captured from predictions, and for memory that
is turned or has its channels last, some kernels lay their results out otherwise: a view that was captured then fails,
or a kernel that was told of other strides reads the wrong elements, even past the end of its memory.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from . import compat

Strides = tuple[int, ...] | None


class Straight:
    """The function of a boxed module: takes one list and empties it, gives a tuple. Written when it is first called."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        found: tuple[Any, ...] = self.function(self._module, inputs)
        return found

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        graph = laid_out(self._module.graph)
        methods = {op: method for op, method in _METHODS.items() if _of_tensors(graph, op)}
        source, names = compat.boxed_source(graph)

        def bind(match: re.Match[str]) -> str:
            namespace, packet, overload = match.groups()
            op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
            name = f"{namespace}__{packet}__{overload}"
            names[name] = methods.get(op) or compat.dispatched(op)
            return f"{name}("

        return compat.function_of(_OP_CALL.sub(bind, source), names)


_OP_CALL = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


def _view(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A view, or a copy where sizes were symbols and a kernel laid its result out otherwise than was predicted."""
    try:
        return tensor.view(shape)
    except RuntimeError:
        return tensor.reshape(shape)


#: by far the commonest ops of a transformer: torch's own methods read their arguments faster than an op's schema does
_METHODS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.view.default: _view,
    torch.ops.aten.t.default: Tensor.t,
    torch.ops.aten.transpose.int: Tensor.transpose,
    torch.ops.aten.permute.default: Tensor.permute,
    torch.ops.aten.add.Tensor: Tensor.add,
    torch.ops.aten.mm.default: Tensor.mm,
}


def _of_tensors(graph: fx.Graph, op: Any) -> bool:
    """Whether all calls of an op have a tensor first: numbers, which may stand there too, have no such methods."""
    return all(isinstance(node.args[0], fx.Node) for node in graph.find_nodes(op="call_function", target=op))


# ---- where results lie

#: ops whose results lie as predicted, whatever they read
_RELIABLE = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.sum.dim_IntList,
        torch.ops.aten.embedding.default,
    }
)
_COPIES = frozenset({torch.ops.aten.clone.default, torch.ops.aten._to_copy.default})


def laid_out(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph, with a step behind each op whose result may lie otherwise than was predicted."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in list(copy.nodes):
        if _lies_as_predicted(node):
            continue
        value = node.meta.get("val")
        several = isinstance(value, tuple | list)
        strides = tuple(_strides(v) for v in (value if several else [value]))
        if all(s is None for s in strides):
            continue
        step, wanted = (_all_laid, strides) if several else (_laid, strides[0])
        with copy.inserting_after(node):
            laid = copy.call_function(step, (node, wanted))
        laid.meta["val"] = value
        node.replace_all_uses_with(laid, delete_user_cb=lambda user, laid=laid: user is not laid)
    return copy


def _lies_as_predicted(node: fx.Node) -> bool:
    """Whether that is sure of what an op makes. Pointwise ops keep the layout of inputs that all have one."""
    op = node.target
    if not compat.is_op(node) or compat.is_view(node) or compat.mutates(node) or op in _RELIABLE:
        return True
    if torch.Tag.pointwise not in op.tags and op not in _COPIES:  # type: ignore[union-attr]
        return False
    made = [(v.dim(), v.stride()) for v in compat.fake_values(node)]
    read = [(v.dim(), v.stride()) for n in node.all_input_nodes for v in compat.fake_values(n) if v.dim()]
    return all(layout == made[0] for layout in (*made, *read)) if made else True


def _strides(value: Any) -> Strides:
    """Of a tensor whose layout can differ: two dimensions or more, all of known size."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return None
    strides = tuple(value.stride())
    return strides if all(isinstance(s, int) for s in (*strides, *value.shape)) else None


def _laid(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    if tensor.stride() == strides:
        return tensor
    sizes = zip(tensor.shape, tensor.stride(), strides, strict=True)
    if all(size < 2 or a == b for size, a, b in sizes) or not tensor.numel():
        return tensor.as_strided(tensor.shape, strides)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _all_laid(tensors: Sequence[Any], strides: Sequence[Strides]) -> Sequence[Any]:
    for tensor, wanted in zip(tensors, strides, strict=True):
        if wanted is not None and tensor is not None and tensor.stride() != wanted:
            return [
                t if s is None or t is None else _laid(t, s) for t, s in zip(tensors, strides, strict=True)
            ]
    return tensors
