"""split_fused_grads: an op that computes input and weight gradients at once becomes two ops.

`convolution_backward`, `native_layer_norm_backward`, `native_group_norm_backward`, `native_batch_norm_backward`
and every other op with an `output_mask` return both; left whole, the weight gradient would have to be made in
backward_b. Run only where the schedule splits B from W: one fused op is cheaper than two.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from ..program import compat
from ..program.ir import Program, ProgramError, is_getitem, where
from .base import Pass, register_pass


def mask_position(node: fx.Node) -> int | None:
    """Where the op takes its `output_mask`, if it has one."""
    if not compat.is_op(node):
        return None
    for position, argument in enumerate(compat.schema_of(node).arguments):
        if argument.name == "output_mask":
            return position
    return None


def _needs_input_gradient(node: fx.Node) -> bool:
    """Whether the op must make the input's gradient too: without it, torch's kernel for group norm over channels that
    lie last reads memory that isn't there."""
    if node.target is not torch.ops.aten.native_group_norm_backward.default:
        return False
    return any(not t.is_contiguous() for t in compat.fake_values(node.args[1]))  # type: ignore[arg-type]


def used_outputs(node: fx.Node) -> list[int]:
    return sorted(int(u.args[1]) for u in node.users if is_getitem(u))  # type: ignore[arg-type]


@register_pass("split_fused_grads")
class SplitFusedGrads(Pass):
    """Output 0, the gradient for the input, is computed by one copy of the op; the others by a second."""

    after = ("random_keys",)

    def apply(self, program: Program) -> None:
        for node in list(program.graph.nodes):
            position = mask_position(node)
            if position is None:
                continue
            used = used_outputs(node)
            if 0 not in used or used == [0]:
                continue
            mask = [bool(m) for m in node.args[position]]
            halves = ([i == 0 for i in range(len(mask))], [i != 0 and m for i, m in enumerate(mask)])
            halves[1][0] = _needs_input_gradient(node)
            copies = []
            for half in halves:
                with program.graph.inserting_before(node):
                    copy = program.graph.node_copy(node)
                args = list(copy.args)
                args[position] = half
                copy.args = tuple(args)
                value = node.meta["val"]
                copy.meta["val"] = type(value)(v if h else None for v, h in zip(value, half, strict=True))
                copies.append(copy)
            for user in list(node.users):
                which = copies[0] if user.args[1] == 0 else copies[1]
                with program.graph.inserting_before(user):
                    item = program.graph.call_function(operator.getitem, (which, user.args[1]))
                item.meta = dict(user.meta)
                user.replace_all_uses_with(item)
                program.replace(user, item)
                program.graph.erase_node(user)
            program.graph.erase_node(node)

    def check(self, program: Program) -> None:
        super().check(program)
        for node in program.ops():
            if mask_position(node) is not None and 0 in (used := used_outputs(node)) and used != [0]:
                raise ProgramError(f"{where(node)} still computes input and weight gradients at once")
