"""recompute: activations that aren't kept from forward to backward, but computed again.

What is computed again lies in regions: those of `torch.utils.checkpoint` in the user's model, modules, or whole chunks
(`Strategy.recompute`). The backward must not read a value from inside a region: it reads clones that are made from the
region's inputs, just before their first use, in the chunk and at the place of the original. Values that leave the
region, or the chunk, are kept. Draws are keyed, so a mask that is drawn again is the same mask; new versions of buffers
are not made again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch.fx as fx

from ..program import compat
from ..program.annotations import checkpoint_region, module_of
from ..program.ir import CHUNK, ROLE, OpRole, Program, ProgramError, is_getitem
from .base import Pass, register_pass

#: a region's name: of a checkpoint, a module or a chunk
Region = int | str | tuple[str, int]


@register_pass("recompute")
class Recompute(Pass):
    """Replaces the backward's reads of values inside a region by clones.

    Options: modules: a regular expression that matches names of modules in full, or a list of names; chunks: numbers
    of chunks, each one region as a whole.
    """

    after = ("random_keys", "split_fused_grads", "gradient_merge", "label_chunks")

    def __init__(self, modules: str | Sequence[str] = (), chunks: Sequence[int] = ()) -> None:
        text = modules if isinstance(modules, str) else "|".join(re.escape(name) for name in modules)
        self.modules = modules
        self.expression = re.compile(text) if text else None
        self.chunks = frozenset(chunks)
        self._within: dict[str, str | None] = {}

    def region_of(self, node: fx.Node) -> Region | None:
        """The region of an op; a getitem is where its producer is."""
        source = node.args[0] if is_getitem(node) else node
        assert isinstance(source, fx.Node)
        chunk = source.meta.get(CHUNK)
        if chunk in self.chunks:
            return ("chunk", chunk)
        module = self._module(module_of(source))
        return checkpoint_region(source) if module is None else module

    def _module(self, name: str) -> str | None:
        """The outermost module around an op that is computed again."""
        if self.expression is None:
            return None
        if name not in self._within:
            parts = name.split(".")
            paths = (".".join(parts[:k]) for k in range(1, len(parts) + 1))
            self._within[name] = next((path for path in paths if self.expression.fullmatch(path)), None)
        return self._within[name]

    def apply(self, program: Program) -> None:
        kept = {n for n, _ in program.outputs}
        order = {n: i for i, n in enumerate(program.graph.nodes)}
        clones: dict[fx.Node, fx.Node] = {}
        known: dict[fx.Node, bool] = {}

        def again(node: fx.Node) -> bool:
            if node not in known:
                known[node] = node not in kept and self._stays(node)
            return known[node]

        wrong = next((c for c in sorted(self.chunks) if c >= program.chunks), None)
        if wrong is not None:
            raise ProgramError(
                f"recompute names chunk {wrong}, but there are {program.chunks}, numbered from 0"
            )
        if self.expression is not None:
            self._check_names({module_of(node) for node in program.ops()})
        for node in [n for n in program.ops() if n.meta[ROLE] == OpRole.BACKWARD]:
            for source in list(node.all_input_nodes):
                if again(source):
                    missing: set[fx.Node] = set()
                    todo = [source]
                    while todo:
                        found = todo.pop()
                        if found not in missing and found not in clones and again(found):
                            missing.add(found)
                            todo += found.all_input_nodes
                    for found in sorted(missing, key=order.__getitem__):
                        clones[found] = _clone(program, found, node, clones)
                    node.replace_input_with(source, clones[source])

    def _stays(self, node: fx.Node) -> bool:
        """Whether a forward op is inside a region and read by nothing in the forward outside of it, nor by the backward
        of another chunk, which runs before that of its own."""
        if node.op != "call_function" or node.meta[ROLE] != OpRole.FORWARD or CHUNK not in node.meta:
            return False
        region = self.region_of(node)
        if region is None:
            return False
        for user in node.users:
            if user.op == "output":
                return False
            if user.op != "call_function" or is_getitem(user):
                continue
            if user.meta.get(CHUNK, node.meta[CHUNK]) != node.meta[CHUNK]:
                return False
            if user.meta[ROLE] == OpRole.FORWARD and self.region_of(user) != region:
                return False
        return True

    def _check_names(self, names: set[str]) -> None:
        found = {self._module(name) for name in names} - {None}
        wanted = [self.modules] if isinstance(self.modules, str) else self.modules
        for name in wanted:
            if not found or (name is not self.modules and name not in found):
                some = ", ".join(sorted(n for n in names if n)[:8])
                raise ProgramError(
                    f"recompute names {name!r}, but no module of that name runs an op in the forward. Some that do: "
                    f"{some}"
                )

    def check(self, program: Program) -> None:
        super().check(program)
        for node in program.ops():
            if node.meta[ROLE] == OpRole.FORWARD and any(
                n.meta.get(ROLE) == OpRole.BACKWARD and n.op == "call_function" for n in node.all_input_nodes
            ):
                raise ProgramError(f"the forward op {node.name} reads a value of the backward")


def _clone(program: Program, node: fx.Node, before: fx.Node, clones: dict[fx.Node, fx.Node]) -> fx.Node:
    with program.graph.inserting_before(before):
        copy = program.graph.node_copy(node, lambda n: clones.get(n, n))
    copy.meta = dict(node.meta)
    copy.meta[ROLE] = OpRole.BACKWARD
    compat.mark_backward(copy)
    return copy
