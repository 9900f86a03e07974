"""batch_means: a loss that is a mean over what counts becomes the mean over the whole batch.

A term `sum / count` of the loss, where the count is made from the batch alone (targets that aren't ignored, their class
weights, a mask's sum) or is a number that the user passes in for the whole batch, gets its divisor as an input of its
own. `program.means` says how to compute it before the step begins, see `program.means`. Only terms that reach the loss
linearly are touched: of others the whole batch's mean can't be made from micro-batches.

The count of a mean that isn't made from the batch alone (class weights in a buffer, targets from a teacher) becomes the
weight of its micro-batch, if the mean is the loss itself.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from ..program import compat
from ..program.annotations import is_counted_mean
from ..program.compat import GraphInput, GraphOutput
from ..program.ir import ROLE, OpRole, Program, ProgramError, closure
from ..program.means import Boxed, Means
from ..program.straight import Straight
from .base import Pass, register_pass
from .extract import extract

aten = torch.ops.aten

#: ops that are linear in any of their inputs
_LINEAR = frozenset(
    {
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.neg.default,
        aten.cat.default,
        aten.stack.default,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.mean.default,
        aten.mean.dim,
        aten.clone.default,
        aten._to_copy.default,
    }
)
#: what is done to a count before it divides
_TAIL = frozenset(
    {
        aten._to_copy.default,
        aten.clamp_min.default,
        aten.clamp.default,
        aten.add.Tensor,
        aten.view.default,
        aten.clone.default,
        aten.alias.default,
        aten.detach.default,
    }
)
_SUMS = frozenset({aten.sum.default, aten.sum.dim_IntList})


@register_pass("batch_means")
class BatchMeans(Pass):
    """Gives every mean over what counts its divisor as an input."""

    after = ("random_keys",)

    def apply(self, program: Program) -> None:
        if program.has_weight:
            return  # the user's own weights
        given = from_batch(program)
        found: list[tuple[fx.Node, fx.Node]] = []
        for node in program.ops():
            if node.meta[ROLE] != OpRole.FORWARD or not _divides(node):
                continue
            marked = is_counted_mean(node)
            raw = _raw(node.args[1], given)  # type: ignore[arg-type]
            if raw is None or not (marked or _is_sum(node.args[0])):  # type: ignore[arg-type]
                if marked and node is _value_of(program.loss) and node.args[1] not in given:
                    _weighted(program, node)
                    return
                continue
            if reaches(program.loss, node):
                found.append((node, raw))
        if not found:
            return
        leaves = [n for n, desc in program.inputs.items() if desc.kind == "input"]
        alone = len(found) == 1 and _alone(program, found[0][0]) and _tail(*found[0]) is None
        whole = tuple(raw.op == "placeholder" for _, raw in found)
        used, counts = _made(program, [raw for _, raw in found], leaves)
        tails = tuple(_tail_of(program, node, raw) for node, raw in found)
        # of the quotient: a count may be a whole number, a share of one isn't
        dtypes = tuple(compat.fake_values(node)[0].dtype for node, _ in found)
        program.means = Means(
            Straight(counts),
            tuple(leaves.index(n) for n in used),
            whole,
            tails,
            dtypes,
            alone and not any(whole),
        )
        for number, (node, _) in enumerate(found):
            self._divide(program, node, number, len(leaves) + number)

    def _divide(self, program: Program, node: fx.Node, number: int, index: int) -> None:
        count = node.args[1]
        assert isinstance(count, fx.Node)
        last = next(n for n in reversed(program.graph.nodes) if n.op == "placeholder")
        with program.graph.inserting_after(last):
            divisor = program.graph.placeholder(f"divisor_{number}")
        divisor.meta["val"] = compat.fake_values(count)[0].to(compat.fake_values(node)[0].dtype)
        program.inputs[divisor] = GraphInput("input", str(index))
        for user in _own_users(node, count):
            user.replace_input_with(count, divisor)

    def check(self, program: Program) -> None:
        super().check(program)
        means = program.means
        inputs = sum(desc.kind == "input" for desc in program.inputs.values())
        if means is not None and means.leaves and max(means.leaves) >= inputs - len(means.dtypes):
            raise ProgramError("a count of the loss is made from a divisor")


def _value_of(loss: fx.Node) -> fx.Node:
    """What makes the loss's value, before copies of it."""
    while loss.target in (aten.detach.default, aten.alias.default, aten.clone.default):
        loss = loss.all_input_nodes[0]
    return loss


def from_batch(program: Program) -> set[fx.Node]:
    """Nodes that are made from the batch (and constants) alone, by no random draw."""
    found = {n for n, desc in program.inputs.items() if desc.kind == "input"}
    for node in program.ops():
        if node.op == "get_attr" or all(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _divides(node: fx.Node) -> bool:
    """Whether a node divides one number by another that the graph makes."""
    if node.target is not aten.div.Tensor or not all(isinstance(a, fx.Node) for a in node.args):
        return False
    return all(t.numel() == 1 for a in node.all_input_nodes for t in compat.fake_values(a))


def _raw(count: fx.Node, given: set[fx.Node]) -> fx.Node | None:
    """The count that a divisor is made of, if it is made from the batch: a sum, or a number of the batch itself."""
    node = count
    while node in given:
        if node.op == "placeholder":
            return node if compat.fake_values(node)[0].dim() == 0 else None
        if node.target in _SUMS:
            return node
        if node.target not in _TAIL or len(node.all_input_nodes) != 1:
            return None
        node = node.all_input_nodes[0]
    return None


def _is_sum(node: fx.Node) -> bool:
    """Whether a number is a sum over the batch, or a constant times one."""
    while node.target in (aten.mul.Tensor, aten.neg.default, aten._to_copy.default, aten.view.default):
        if len(node.all_input_nodes) != 1:
            return False
        node = node.all_input_nodes[0]
    if node.target in _SUMS:
        return True
    source = node.args[0] if node.op == "call_function" and not compat.is_op(node) else node
    return isinstance(source, fx.Node) and compat.argument(source, "reduction") == 2


def reaches(loss: fx.Node, node: fx.Node) -> bool:
    """Whether the loss depends on a node, and linearly."""
    needed = closure([loss])
    if node not in needed:
        return False
    depends = {node}
    for user in node.graph.nodes:
        if user not in needed or user is node:
            continue
        mine = [n for n in user.all_input_nodes if n in depends]
        if not mine:
            continue
        linear = user.target in _LINEAR or compat.is_view(user)
        if user.target is aten.mul.Tensor:
            linear = len(mine) == 1 and user.args.count(mine[0]) == 1
        elif user.target is aten.div.Tensor:
            linear = mine == [user.args[0]]
        if not linear:
            return False
        depends.add(user)
    return True


def _alone(program: Program, node: fx.Node) -> bool:
    """Whether nothing else in the loss depends on the batch."""
    batch = {n for n, desc in program.inputs.items() if desc.kind in ("input", "key")}
    seen = {node}
    todo = [program.loss]
    while todo:
        other = todo.pop()
        if other in batch:
            return False
        if other not in seen:
            seen.add(other)
            todo.extend(other.all_input_nodes)
    return True


def _own_users(node: fx.Node, count: fx.Node) -> list[fx.Node]:
    """The division and its derivative, which read the count."""
    number = compat.sequence_number(node)
    return [
        user
        for user in count.users
        if user is node or (compat.is_backward(user) and compat.sequence_number(user) == number)
    ]


def _made(
    program: Program, counts: list[fx.Node], leaves: list[fx.Node]
) -> tuple[list[fx.Node], fx.GraphModule]:
    needed = closure(counts)
    used = [n for n in leaves if n in needed]
    nodes = {n for n in needed if n.op != "placeholder"}
    return used, extract(program.graph, program.graph_module, nodes, used, counts, name="Counts")


def _tail(node: fx.Node, raw: fx.Node) -> list[fx.Node] | None:
    """The ops between a count and the division that change its value."""
    found = []
    count = node.args[1]
    while count is not raw:
        assert isinstance(count, fx.Node)
        found.append(count)
        count = count.all_input_nodes[0]
    keep = (aten._to_copy.default, aten.view.default, aten.clone.default, aten.alias.default)
    return found if any(n.target not in keep for n in found) else None


def _tail_of(program: Program, node: fx.Node, raw: fx.Node) -> Boxed | None:
    nodes = _tail(node, raw)
    if nodes is None:
        return None
    module = extract(program.graph, program.graph_module, nodes, [raw], [node.args[1]], name="Tail")  # type: ignore[list-item]
    return Straight(module)


def _weighted(program: Program, node: fx.Node) -> None:
    """Makes the loss (sum, weight): its mean is taken over the batch after the last micro-batch."""
    total, count = node.args
    assert isinstance(total, fx.Node)
    assert isinstance(count, fx.Node)
    for user in _own_users(node, count):
        if user is not node:
            user.replace_all_uses_with(user.args[0])  # type: ignore[arg-type]
    kind = torch.promote_types(compat.fake_values(count)[0].dtype, torch.float32)
    with program.graph.inserting_after(count):
        weight = program.graph.call_function(aten._to_copy.default, (count,), {"dtype": kind})
    weight.meta = {**count.meta, "val": compat.fake_values(count)[0].to(kind)}
    moved = []
    for value, desc in program.outputs:
        if desc.kind == "output":
            number = int(desc.name)
            value = total if number == 0 else value
            desc = GraphOutput("output", str(number + (number > 0)))
        moved.append((value, desc))
    program.outputs = [*moved, (weight, GraphOutput("output", "1"))]
    program.has_weight = True
