"""When two sub-programs are the same code on the same shapes: then one of them is compiled, and one is measured."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.fx as fx

from ..program import compat


def structure_of(graph_module: fx.GraphModule) -> str:
    """A hash of ops, arguments, shapes, strides and dtypes; names of values don't count. Constants count by content."""
    index: dict[fx.Node, int] = {}
    parts: list[Any] = []

    def argument(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", index[value])
        if isinstance(value, (list, tuple)):
            return tuple(argument(v) for v in value)
        if isinstance(value, dict):
            return tuple(sorted((k, argument(v)) for k, v in value.items()))
        return repr(value)

    for node in graph_module.graph.nodes:
        index[node] = len(index)
        target = str(node.target) if node.op in ("call_function", "get_attr") else ""
        if node.op == "get_attr":
            target += _content(getattr(graph_module, str(node.target)))
        shapes = tuple(
            (tuple(t.shape), t.stride(), str(t.dtype), str(t.device)) for t in compat.fake_values(node)
        )
        parts.append((node.op, target, argument(node.args), argument(node.kwargs), shapes))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _content(constant: torch.Tensor) -> str:
    raw = constant.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{constant.dtype}{tuple(constant.shape)}{hashlib.sha256(raw).hexdigest()}"
