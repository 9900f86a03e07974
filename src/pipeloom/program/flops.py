"""Floating point operations of a graph's nodes, by the table of `torch.utils.flop_counter` and what it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from .compat import is_op


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_a: Any, **_k: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward_flops(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_a: Any, **_k: Any
) -> int:
    shapes = (gradient.shape, query.shape, key.shape, value.shape)
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


#: what torch's table of floating point operations lacks
_MORE_FLOPS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


def costs_like(twin: Any, op: Any, added: int) -> None:
    """Says that `twin` takes as many operations as `op`, whose arguments follow after `added` of its own."""
    count = flop_registry.get(op.overloadpacket)
    if count is not None:
        _MORE_FLOPS[twin.overloadpacket] = lambda *args, **kwargs: count(*args[added:], **kwargs)


def flops_of(node: fx.Node) -> float:
    """Floating point operations of a node, by torch's own table; 0 for ops that it doesn't count."""
    if not is_op(node):
        return 0.0
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    count = flop_registry.get(packet) or _MORE_FLOPS.get(packet)
    if count is None:
        return 0.0

    def fake(a: Any) -> Any:
        return a.meta.get("val") if isinstance(a, fx.Node) else a

    args = fx.map_arg(node.args, fake)
    kwargs = fx.map_arg(node.kwargs, fake)
    try:
        return float(count(*args, **kwargs, out_val=node.meta.get("val")))
    except (AssertionError, TypeError, ValueError, IndexError):
        return 0.0  # the table knows the op, not this form of it: its bytes still count
