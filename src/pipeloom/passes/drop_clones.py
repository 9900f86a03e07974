"""drop_clones: copies that change nothing are not made.

Dropout at p 0, or in evaluation, is exported as a copy of its input, and so is what a model clones to be safe from
in-place ops, which the
graph no longer has. A copy with the layout of its source is its source, unless it must be memory of its own: an
output, or
the copy of an input.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from ..program import compat
from ..program.ir import Program, ProgramError, where
from .base import Pass, register_pass


def needless(node: fx.Node, kept: set[fx.Node]) -> bool:
    """Whether a node is a copy that its source can stand for."""
    if node.target is not torch.ops.aten.clone.default or node in kept:
        return False
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.op != "call_function" or source in kept:
        return False
    new, old = compat.fake_values(node), compat.fake_values(source)
    return len(new) == len(old) == 1 and new[0].stride() == old[0].stride() and new[0].dtype == old[0].dtype


@register_pass("drop_clones")
class DropClones(Pass):
    """Replaces each needless copy by what it copies."""

    after = ("random_keys",)

    def apply(self, program: Program) -> None:
        kept = {n for n, _ in program.outputs}
        for node in program.ops():
            if needless(node, kept):
                node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
                program.graph.erase_node(node)

    def check(self, program: Program) -> None:
        super().check(program)
        kept = {n for n, _ in program.outputs}
        left = next((n for n in program.ops() if needless(n, kept)), None)
        if left is not None:
            raise ProgramError(f"{where(left)} still copies its source for nothing")
