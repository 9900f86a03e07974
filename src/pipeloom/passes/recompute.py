"""recompute: honours `torch.utils.checkpoint` of the user's model.

Inside a checkpoint region the backward must not read values of the forward: it reads clones that are computed
again from the region's inputs, just before their first use, in the chunk and at the place of the original.
Values that leave the region, or the chunk, are kept. Draws are keyed, so a recomputed mask is the same mask;
mutation outputs are not recomputed.
"""

from __future__ import annotations

import torch.fx as fx

from ..program import compat
from ..program.ir import CHUNK, ROLE, OpRole, Program, ProgramError, is_getitem
from .base import Pass, register_pass


def region_of(node: fx.Node) -> int | None:
    """The checkpoint region of an op; a getitem is where its producer is."""
    return compat.checkpoint_region(node.args[0] if is_getitem(node) else node)  # type: ignore[arg-type]


@register_pass("recompute")
class Recompute(Pass):
    """Replaces the backward's reads of values inside a checkpoint region by clones."""

    after = ("random_keys", "split_fused_grads", "gradient_merge", "label_chunks")

    def apply(self, program: Program) -> None:
        kept = {n for n, _ in program.outputs}
        clones: dict[fx.Node, fx.Node] = {}

        def again(node: fx.Node) -> bool:
            region = (
                None if node.op != "call_function" or node.meta[ROLE] != OpRole.FORWARD else region_of(node)
            )
            if region is None or node in kept or CHUNK not in node.meta:
                return False
            for user in node.users:
                if user.op == "output":
                    return False
                if user.meta[ROLE] == OpRole.FORWARD and user.op == "call_function":
                    leaves = (
                        region_of(user) != region
                        or user.meta.get(CHUNK, node.meta[CHUNK]) != node.meta[CHUNK]
                    )
                    if leaves and not is_getitem(user):
                        return False
            return True

        def clone(node: fx.Node, before: fx.Node) -> fx.Node:
            if not again(node):
                return node
            if node not in clones:
                sources = {n: clone(n, before) for n in node.all_input_nodes}
                with program.graph.inserting_before(before):
                    copy = program.graph.node_copy(node, lambda n: sources[n])
                copy.meta = dict(node.meta)
                copy.meta[ROLE] = OpRole.BACKWARD
                copy.meta["custom"] = {
                    k: v for k, v in (node.meta.get("custom") or {}).items() if k != "pipeloom_checkpoint"
                }
                compat.mark_backward(copy)
                clones[node] = copy
            return clones[node]

        for node in [n for n in program.ops() if n.meta[ROLE] == OpRole.BACKWARD]:
            for source in list(node.all_input_nodes):
                if again(source):
                    node.replace_input_with(source, clone(source, node))

    def check(self, program: Program) -> None:
        super().check(program)
        for node in program.ops():
            if node.meta[ROLE] == OpRole.FORWARD and any(
                n.meta.get(ROLE) == OpRole.BACKWARD and n.op == "call_function" for n in node.all_input_nodes
            ):
                raise ProgramError(f"the forward op {node.name} reads a value of the backward")
