"""A generation step as a Program: what one token, or one prompt, does to a model.

Takes a model and its GenerationSpec, gives graphs whose sizes are inputs: q (new ids), past (positions in the cache)
and batch. There are two, since an exported range can't hold q = 1 and more at once: the prompt graph (q ≥ 2, an empty
cache) and the decode graph (q = 1, any past; prompts of one token run it with past 0). Nothing runs, and the weights
needn't be here. Non-strict `torch.export` keeps changes in place as they are, so that a static cache isn't copied.

Every size in the graph is rebuilt from the three inputs: else some cache leaf would be read for its size by
chunks that don't own it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.export import Dim

from ..program import compat
from ..program.annotations import annotated_modules
from ..program.compat import GraphInput, GraphOutput
from ..program.ir import ROLE, OpRole, Program, where
from ..program.twins import twins
from .spec import GenerationError, GenerationSpec

#: inputs of kind "input" that are sizes: plain whole numbers when the graph is called
SIZES = ("batch", "q", "past")
#: sizes of the example that is traced: unequal, and neither 0 nor 1
_BATCH, _Q, _PAST = 3, 7, 5


@dataclass(frozen=True)
class StepGraph:
    """The graph of a step. leaves: names of the cache's leaves, in order. constants: tensors that the graph itself
    holds, by name (their kind is "buffer"). consts: names of the scope's constants. needs: a size's least value."""

    program: Program
    leaves: tuple[str, ...]
    consts: tuple[str, ...]
    constants: Mapping[str, Tensor]


class _Step(nn.Module):
    """What is traced; parameters and buffers keep their names behind "model."."""

    def __init__(self, model: nn.Module, spec: GenerationSpec) -> None:
        super().__init__()
        self.model = model
        self.spec = spec
        self.grown: list[str] = []

    def forward(self, ids: Tensor, start: Tensor, cache: Any, consts: Any) -> tuple[Tensor, ...]:
        logits, new = self.spec.step(self.model, ids, start, cache, consts)
        if not isinstance(logits, Tensor) or logits.dim() != 2:
            shape = (
                f"a tensor of shape {tuple(logits.shape)}"
                if isinstance(logits, Tensor)
                else type(logits).__name__
            )
            raise GenerationError(
                f"step returned {shape}, where the last position's logits (batch, vocabulary) belong"
            )
        if self.spec.grow_dim is None:
            return (logits,)
        named, form = compat.named_leaves(new, "cache")
        if form != compat.named_leaves(cache, "cache")[1]:
            raise GenerationError(
                "step returned a cache of another form than it was given: return the same pytree"
            )
        for name, leaf in named:
            if not isinstance(leaf, Tensor):
                raise GenerationError(
                    f"step returned {type(leaf).__name__} as {name}, where a tensor belongs"
                )
        return (logits, *(leaf for _, leaf in named))


def capture_step(
    model: nn.Module,
    spec: GenerationSpec,
    *,
    prompt: bool,
    several: bool = False,
    device: torch.device | None = None,
) -> StepGraph:
    """The graph of one step. prompt: q is at least 2 and the cache empty; else q is 1. several: of any batch of at
    least 2 rows, else of one row. Raises GenerationError for a step that can't be traced."""
    compat.check_torch_version()
    device = device or torch.device("cpu")
    mode = compat.sized_mode()
    example = _Example(spec, device, prompt=prompt, several=several)
    root = _Step(model, spec)
    names = {id(m): n for n, m in model.named_modules()}
    try:
        with twins(root, mode, device, training=False), annotated_modules(model, names):
            exported = compat.export_step(
                root, example.args, example.sizes(), mode, masks=spec.masks or several
            )
    except GenerationError:
        raise
    except Exception as error:
        at = "; ".join(getattr(error, "__notes__", [])) or "in the spec's step"
        raise GenerationError(
            f"can't capture a step of {type(model).__name__}, {at}: {type(error).__name__}: "
            f"{_beginning(error)}\nThe step must be traceable: no .item(), no branch or shape that depends on "
            "the values of a tensor or on how many positions there are."
        ) from error
    program = _described(exported, example, first_names(model))
    constants = {name: t for name, t in exported.constants.items() if isinstance(t, Tensor)}
    return StepGraph(program, tuple(example.leaves), tuple(example.consts), constants)


class _Example:
    """The arguments that a step is traced with. They are real: of fakes, sizes can't be made symbols."""

    def __init__(self, spec: GenerationSpec, device: torch.device, *, prompt: bool, several: bool) -> None:
        most = spec.window or spec.max_len
        batch = _BATCH if several else 1
        self.spec, self.prompt, self.several = spec, prompt, several
        q = min(_Q, most or _Q) if prompt else 1
        self.past = 0 if prompt or spec.grow_dim is None else min(_PAST, (most or _PAST) - 1)
        self.leaves = [name for name, _ in spec.new_cache(batch, device)]
        cache = spec.init_cache(batch, device, spec.dtype) if spec.init_cache is not None else None
        consts = None
        if spec.scope_inputs is not None:
            consts = spec.scope_inputs(torch.full((batch,), q + self.past, dtype=torch.int64, device=device))
        ids = torch.zeros((batch, q), dtype=torch.int64, device=device)
        start = torch.zeros((), dtype=torch.int64, device=device)
        self.args = (ids, start, compat.map_tensors(self._filled, cache), consts)
        self.consts = [name for name, leaf in compat.named_leaves(consts, "consts")[0] if leaf is not None]

    def _filled(self, leaf: Tensor) -> Tensor:
        """A cache leaf with `past` positions."""
        if self.spec.grow_dim is None:
            return leaf
        shape = list(leaf.shape)
        shape[self.spec.grow_dim] = self.past
        return leaf.new_zeros(shape)

    def sizes(self) -> tuple[Any, ...]:
        """Which dimensions are symbols, as torch.export takes it."""
        most = self.spec.max_len
        batch = {0: Dim("batch", min=2)} if self.several else {}
        q = {1: Dim("q", min=2, max=self.spec.window or most)} if self.prompt else {}
        past = {}
        if not self.prompt and self.spec.grow_dim is not None:
            past = {self.spec.grow_dim: Dim("past", min=0, max=most and most - 1)}
        _, _, cache, consts = self.args
        return (
            {**batch, **q},
            None,
            compat.map_tensors(lambda _: {**batch, **past}, cache),
            compat.map_tensors(lambda _: dict(batch), consts),
        )

    def inputs(self) -> list[GraphInput]:
        """The inputs of the graph, in order: a leaf of the arguments each. Where there is no tensor nobody reads it."""
        named = [
            leaf
            for name, tree in zip(("ids", "start", "cache", "consts"), self.args, strict=True)
            for leaf in compat.named_leaves(tree, name)[0]
        ]
        kinds = ["cache" if name.startswith("cache") else "input" for name, _ in named]
        return [
            GraphInput("none" if leaf is None else kind, name)
            for kind, (name, leaf) in zip(kinds, named, strict=True)
        ]


def first_names(model: nn.Module) -> dict[str, str]:
    """Each parameter's and buffer's name → the first name of the same tensor (tied weights)."""
    first: dict[int, str] = {}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {n: first.setdefault(id(t), n) for n, t in tensors}


def _described(
    exported: torch.export.ExportedProgram, example: _Example, first: Mapping[str, str]
) -> Program:
    names = example.inputs()
    inputs: dict[fx.Node, GraphInput] = {}
    for node, desc in compat.graph_inputs(exported):
        if desc.kind == "input":
            inputs[node] = names[int(desc.name)]
        else:
            name = desc.name.removeprefix("model.")
            inputs[node] = GraphInput(desc.kind, first.get(name, name))
    output = next(n for n in exported.graph.nodes if n.op == "output")
    logits, *grown = output.args[0]
    outputs = [(logits, GraphOutput("output", "0"))]
    outputs += [(node, GraphOutput("cache", name)) for node, name in zip(grown, example.leaves, strict=False)]
    program = Program(exported.graph_module, inputs, outputs, training=False)
    _sizes_from_inputs(program, example)
    _keep_changes(program)
    return program


def _sizes_from_inputs(program: Program, example: _Example) -> None:
    """Makes the three sizes inputs of the graph and computes every other size from them."""
    graph = program.graph
    by_name = {desc.name: node for node, desc in program.inputs.items() if desc.kind in ("input", "cache")}
    shape = by_name["ids"].meta["val"].shape
    values: list[Any] = [*shape, 0]
    if example.leaves and example.spec.grow_dim is not None:
        values[2] = by_name[example.leaves[0]].meta["val"].shape[example.spec.grow_dim]
    last = next(n for n in reversed(graph.nodes) if n.op == "placeholder")
    symbols: dict[Any, fx.Node] = {}
    at = last
    for name, value in zip(SIZES, values, strict=True):
        with graph.inserting_after(at):
            at = graph.placeholder(f"size_{name}")
        at.meta["val"] = value
        program.inputs[at] = GraphInput("input", name)
        expression = compat.size_of(value)
        if not isinstance(expression, int):
            symbols[expression] = at
    written: dict[Any, Any] = {}
    for node in list(graph.nodes):
        if not compat.is_size(node) or not node.users:
            continue
        expression = compat.size_of(node.meta["val"])
        unknown: set[Any] = getattr(expression, "free_symbols", set()) - set(symbols)
        if unknown:
            raise GenerationError(
                f"the size {expression} depends on the values of a tensor, at {where(node)}: the step must make "
                "tensors of sizes that follow from its inputs' sizes"
            )
        if expression not in written:
            written[expression] = _written(program, node, expression, symbols)
        node.replace_all_uses_with(written[expression])
    graph.lint()


def _written(program: Program, node: fx.Node, expression: Any, symbols: dict[Any, fx.Node]) -> Any:
    """Ops for a size, right behind the placeholders, where all later ops can read them."""
    graph = program.graph
    if isinstance(expression, int) or expression.is_Integer:
        return int(expression)
    if expression in symbols:
        return symbols[expression]
    first = next(n for n in graph.nodes if n.op != "placeholder")
    before = set(graph.nodes)
    with graph.inserting_before(first):
        result = compat.write_size(graph, expression, symbols)
    for new in set(graph.nodes) - before:
        new.meta["val"] = node.meta["val"]
        new.meta[ROLE] = OpRole.FORWARD
    return result


def _keep_changes(program: Program) -> None:
    """What changes a tensor in place is an output, so that it isn't dead: a cache leaf's change by its name. Raises
    GenerationError where a change is seen through another name than its own result."""
    live = program.live()
    owner = {compat.storage_key(t): desc for n, desc in program.inputs.items() for t in compat.fake_values(n)}
    read = {compat.storage_key(t) for n in live for t in compat.fake_values(n)}
    for node in program.ops():
        if not compat.mutates(node):
            continue
        for tensor in compat.changed(node):
            key = compat.storage_key(tensor)
            desc = owner.get(key)
            if desc is not None and desc.kind != "cache":
                raise GenerationError(
                    f"the step changes {desc.kind} {desc.name!r} in place, at {where(node)}: only its cache may change"
                )
            if desc is not None:
                program.outputs.append((node, GraphOutput("written", desc.name)))
            elif node not in live and key in read:
                raise GenerationError(
                    f"the step changes a tensor in place through a view of it, at {where(node)}: write it out of place"
                )


def _beginning(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return "\n".join(lines[:3])
