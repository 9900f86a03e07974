"""gradient_merge: gives every use of a parameter a slot of its own, in which its gradient is summed over the
micro-batches.

A parameter that is used twice (a shared module, tied weights) arrives with one gradient, the sum of its uses.
That sum would be made in one chunk, and a weight-sized tensor would cross the cut with every micro-batch. So
the final additions are undone: each operand becomes a slot, and the slots are summed once, after the last
micro-batch, in the order of the captured program whatever the cuts. That order makes the result the same to the
bit for every number of stages and chunks.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from ..program import compat
from ..program.compat import GraphOutput
from ..program.ir import ROLE, OpRole, Program, ProgramError
from .base import Pass, register_pass

aten = torch.ops.aten


@register_pass("gradient_merge")
class GradientMerge(Pass):
    """Replaces each gradient output of a parameter by one "slot" output a use, named "parameter#index"."""

    after = ("random_keys", "split_fused_grads")

    def apply(self, program: Program) -> None:
        parameters = {desc.name: node for node, desc in program.inputs.items() if desc.kind == "param"}
        uses: dict[str, list[fx.Node]] = {}
        rest = []
        for node, desc in program.outputs:
            if desc.kind == "gradient" and desc.name.startswith("param:"):
                name = desc.name.removeprefix("param:")
                node = _outer_sum(program, node)
                uses.setdefault(name, []).extend(operands(node, parameters[name]))
            else:
                rest.append((node, desc))
        program.outputs = rest
        order = {n: i for i, n in enumerate(program.graph.nodes)}
        for name, nodes in uses.items():
            for index, node in enumerate(sorted(nodes, key=order.__getitem__)):
                made = _copied(program, node) if node.op == "placeholder" else node
                program.outputs.append((made, GraphOutput("slot", f"{name}#{index}")))
        output = next(n for n in program.graph.nodes if n.op == "output")
        output.args = ([n for n, _ in program.outputs],)

    def check(self, program: Program) -> None:
        super().check(program)
        names = [desc.name for _, desc in program.outputs if desc.kind == "slot"]
        if len(names) != len(set(names)) or program.gradients():
            raise ProgramError("a parameter's gradient has no slot, or two slots share a name")


def _copied(program: Program, seed: fx.Node) -> fx.Node:
    """An op that makes a gradient which is the seed of the backward itself (a 0-dim parameter that is a term of
    the loss), so that it can belong to a chunk."""
    last = next(n for n in reversed(program.graph.nodes) if n.op == "placeholder")
    with program.graph.inserting_after(last):
        node = program.graph.call_function(aten.clone.default, (seed,))
    node.meta = {"val": seed.meta["val"].clone(), ROLE: OpRole.BACKWARD}
    compat.mark_backward(node)
    return node


def _outer_sum(program: Program, gradient: fx.Node) -> fx.Node:
    """A view of a sum (the transpose of a weight that was turned once and used twice) as the sum of views,
    equal to the bit."""
    if not compat.is_view(gradient) or len(gradient.all_input_nodes) != 1:
        return gradient
    total = gradient.all_input_nodes[0]
    parts = total.all_input_nodes
    if (
        total.target is not aten.add.Tensor
        or total.kwargs
        or len(parts) != 2
        or set(total.users) != {gradient}
    ):
        return gradient
    if any(t.shape != total.meta["val"].shape for p in parts for t in compat.fake_values(p)):
        return gradient
    views = []
    for part in parts:
        with program.graph.inserting_before(gradient):
            view = program.graph.node_copy(gradient, lambda _, part=part: part)  # type: ignore[misc]
        view.meta = {**gradient.meta, "val": compat.evaluated(view)}
        views.append(view)
    with program.graph.inserting_before(gradient):
        outer = program.graph.node_copy(total, dict(zip(parts, views, strict=True)).__getitem__)
    outer.meta = {**total.meta, "val": gradient.meta["val"].clone()}
    return outer


def operands(gradient: fx.Node, parameter: fx.Node) -> list[fx.Node]:
    """The parts of a gradient that is a sum of gradients, in order; the gradient itself where it is no such sum."""
    if gradient.target is not aten.add.Tensor or len(gradient.users) > 1 or gradient.kwargs:
        return [gradient]
    parts = list(gradient.args)
    shape = tuple(compat.fake_values(parameter)[0].shape)
    for part in parts:
        if not isinstance(part, fx.Node) or not compat.is_backward(part):
            return [gradient]
        values = compat.fake_values(part)
        if (
            len(values) != 1
            or tuple(values[0].shape) != shape
            or values[0].dtype != compat.fake_values(gradient)[0].dtype
        ):
            return [gradient]
    return [leaf for part in parts for leaf in operands(part, parameter)]  # type: ignore[arg-type]
