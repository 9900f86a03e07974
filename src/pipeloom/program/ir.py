"""Program: a model and its loss as one joint forward/backward graph, each op with a role and a chunk.

    program = capture(model, loss_fn, example=(inputs, targets))
    print(program)

prints one op a line: its role, its chunk (once labelled), name, op, shape, dtype and the module that ran it.
The graph is torch.fx's; passes (see `pipeloom.passes`) read and rewrite it. The labels are those of
PaddlePaddle's static programs: `op_role` and `chunk_id`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
import torch.fx as fx

from . import compat
from .annotations import module_of
from .compat import GraphInput, GraphOutput
from .means import Means


class OpRole(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"


class ProgramError(RuntimeError):
    """A program that isn't what a pass needs; the message names the op and its module."""


ROLE = "op_role"
CHUNK = "chunk_id"


@dataclass
class Program:
    """The joint graph with its inputs and outputs described.

    inputs: placeholder -> GraphInput · outputs: (node, GraphOutput), only those that exist · has_weight: the
    loss function returned (sum, weight) · output_count: tensor leaves of the model's own output (evaluation).
    output_form: (tree, leaves), how the model's output is put together; None stands for a tensor leaf
    (evaluation).
    aliases: name of a parameter -> the first name of the same Parameter (a tied weight).
    draws: number of random draws, once `random_keys` has numbered them.
    means: the loss's means over what counts, once `batch_means` has found them.
    """

    graph_module: fx.GraphModule
    inputs: dict[fx.Node, GraphInput]
    outputs: list[tuple[fx.Node, GraphOutput]]
    training: bool
    aliases: dict[str, str] = field(default_factory=dict)
    has_weight: bool = False
    output_count: int = 0
    output_form: Any = None
    draws: int = 0
    means: Means | None = None
    chunks: int = 1

    def __post_init__(self) -> None:
        for node in self.graph.nodes:
            if node.op in ("call_function", "get_attr"):
                node.meta[ROLE] = OpRole.BACKWARD if compat.is_backward(node) else OpRole.FORWARD

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph

    @property
    def loss(self) -> fx.Node:
        """The node that is the micro-batch's loss."""
        return self._output("0")

    @property
    def weight(self) -> fx.Node | None:
        """The node that is the micro-batch's weight, where the loss function returned (sum, weight)."""
        return self._output("1") if self.has_weight else None

    @property
    def model_outputs(self) -> list[fx.Node]:
        """The tensor leaves of the model's own output (evaluation programs only)."""
        first = 1 + self.has_weight
        return [self._output(str(first + i)) for i in range(self.output_count)]

    def _output(self, index: str) -> fx.Node:
        for node, desc in self.outputs:
            if desc.kind == "output" and desc.name == index:
                return node
        raise ProgramError(f"the program has no output {index}")

    def copy(self) -> Program:
        """A program of its own nodes, so that it can be labelled and rewritten in another way. Constants are shared."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        result = graph.graph_copy(self.graph, copies)
        graph.output(result)
        return dataclasses.replace(
            self,
            graph_module=compat.lazy_module(self.graph_module, graph),
            inputs={copies[n]: desc for n, desc in self.inputs.items()},
            outputs=[(copies[n], desc) for n, desc in self.outputs],
            aliases=dict(self.aliases),
        )

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Says that `new` stands for `old` among the outputs (a pass that rewrites an output must)."""
        self.outputs = [(new if n is old else n, desc) for n, desc in self.outputs]

    def slots(self) -> list[tuple[fx.Node, str, int]]:
        """(gradient of one use, parameter name, index of the use), once gradient_merge has made them."""
        found = []
        for node, desc in self.outputs:
            if desc.kind == "slot":
                name, _, index = desc.name.rpartition("#")
                found.append((node, name, int(index)))
        return found

    def gradients(self) -> list[tuple[fx.Node, str]]:
        """(gradient, parameter name) for every parameter that has one, in the order of the parameters."""
        found = []
        for node, desc in self.outputs:
            if desc.kind == "gradient" and desc.name.startswith("param:"):
                found.append((node, desc.name.removeprefix("param:")))
        return found

    def buffer_updates(self) -> list[tuple[fx.Node, str]]:
        return [(n, desc.name) for n, desc in self.outputs if desc.kind == "buffer"]

    def ops(self) -> list[fx.Node]:
        """All nodes but placeholders and the output, in program order."""
        return [n for n in self.graph.nodes if n.op in ("call_function", "get_attr")]

    def live(self) -> set[fx.Node]:
        """The nodes that some output needs."""
        return closure(n for n, _ in self.outputs)

    def __str__(self) -> str:
        lines = [f"Program: {len(self.ops())} ops, {self.chunks} chunk{'s' * (self.chunks != 1)}"]
        for node, desc in self.inputs.items():
            lines.append(f"  {desc.kind:<9}   {node.name} = {desc.name or '-'}  {_shape(node)}")
        for node in self.ops():
            role = str(node.meta[ROLE])
            chunk = node.meta.get(CHUNK, "-")
            where = module_of(node)
            args = ", ".join(a.name for a in node.all_input_nodes)
            at = f"  # {where}" if where else ""
            lines.append(
                f"  {role:<9}{chunk:>2} {node.name} = {target_name(node)}({args})  {_shape(node)}{at}"
            )
        returned = ", ".join(f"{desc.kind} {desc.name}: {n.name}" for n, desc in self.outputs)
        lines.append(f"  return {returned}")
        return "\n".join(lines)


def target_name(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"constant {node.target}"
    return "getitem" if node.target is operator.getitem else str(node.target)


def _shape(node: fx.Node) -> str:
    values = compat.fake_values(node)
    if not values:
        return str(node.meta.get("val", ""))
    return " ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in values)


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def closure(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and everything that they are computed from."""
    seen: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return seen


def nbytes(value: Any) -> int:
    """Bytes of a fake tensor's own elements (0 for anything that isn't a tensor); as in the example where a size is a
    symbol."""
    if not isinstance(value, torch.Tensor):
        return 0
    return compat.size_hint(value.numel()) * value.element_size()


def where(node: fx.Node) -> str:
    """An op as an error message names it: op, its name in the program, its module, its neighbours."""
    module = module_of(node)
    sources = ", ".join(n.name for n in node.all_input_nodes) or "no inputs"
    users = ", ".join(n.name for n in node.users) or "nobody"
    return (
        f"{target_name(node)} ({node.name}, in module {module or 'the top level'!r}; made from {sources}; "
        f"used by {users})"
    )
