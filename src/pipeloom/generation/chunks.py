"""Step graphs cut into chunk programs, one a stage.

Takes the graphs of a model's step, gives for each the programs of all chunks. The decode graph is cut so that each
chunk reads as many bytes of weights as the others (one token reads all weights once, so that is its time; the head
counts, an embedding's table doesn't); the others are cut between the same parameters. Which chunk owns a leaf of
the cache falls out of dataflow, and a leaf that two chunks would need is an error that names it.

What one chunk hands to the next is the hidden state and little else: masks and rotary tables come from the inputs
alone, and each chunk that needs them makes them for itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.fx as fx

from ..passes.anchors import CutPoints
from ..passes.cuts import choose_cuts, cut_positions, forward_order, replicated
from ..passes.extract import extract
from ..passes.label_chunks import LabelChunks
from ..passes.pieces import parameters_of
from ..planning.partition import PartitionError, Pieces, balanced
from ..program import compat
from ..program.compat import GraphInput, GraphOutput
from ..program.ir import CHUNK, Program, ProgramError, nbytes, where
from ..program.straight import Straight
from .spec import GenerationError
from .step_graph import StepGraph

#: what an op costs beside its weights, as bytes that memory gives in the same time (some microseconds)
_OP_BYTES = 32 * 1024
#: how often sampling reads the logits (sorting for top-p is the dearest)
_SAMPLING_READS = 16
#: what it costs to send one more value, as bytes that memory gives in the same time
_MESSAGE_BYTES = 1024 * 1024
_EMBEDDINGS = frozenset({torch.ops.aten.embedding.default})


@dataclass(frozen=True)
class ChunkProgram:
    """What a chunk does in a step. `call(list of inputs) -> tuple of outputs` consumes its list (boxed).

    inputs: in order; kind "value" names what an earlier chunk made, "cache" a leaf. outputs: in order; kind "value"
    names what later chunks need, "cache" a leaf's new value, "logits" is the last chunk's. receives, sends: names of
    the values that the message from the chunk before, and to the chunk behind, carries. changed: leaves that are
    changed in place.
    """

    call: Callable[[list[Any]], tuple[Any, ...]]
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    receives: tuple[str, ...]
    sends: tuple[str, ...]

    def names(self, kind: str) -> list[str]:
        """Names of the inputs of one kind, in order."""
        return [i.name for i in self.inputs if i.kind == kind]


def place(decode: StepGraph, chunks: int, cuts: str | Sequence[str] | None) -> CutPoints:
    """Labels the decode graph's ops with their chunks; where it was cut. cuts: as in `Strategy.cuts`; None: balanced
    by weights read. Raises GenerationError."""
    program = decode.program
    try:
        if cuts is None and chunks > 1:
            labels = LabelChunks(chunks, positions=_balanced(program, chunks))
        elif chunks > 1:
            free = replicated(program)
            labels = LabelChunks(chunks, positions=choose_cuts(program, chunks, cuts, free))
        else:
            labels = LabelChunks(1, cuts)
        labels.apply(program)
        labels.check(program)
    except ProgramError as error:
        raise GenerationError(str(error)) from error
    return labels.points


def place_like(graph: StepGraph, chunks: int, points: CutPoints) -> None:
    """Labels another graph of the same model as the decode graph was."""
    labels = LabelChunks(chunks, like=points)
    try:
        labels.apply(graph.program)
        labels.check(graph.program)
    except ProgramError as error:
        raise GenerationError(str(error)) from error


def owners(graph: StepGraph) -> dict[str, int]:
    """The chunk of each cache leaf. Raises GenerationError for a leaf that is read or written by two."""
    program = graph.program
    new = {desc.name: node for node, desc in program.outputs if desc.kind in ("cache", "written")}
    live = program.live()
    found: dict[str, int] = {}
    for leaf, desc in program.inputs.items():
        if desc.kind != "cache":
            continue
        made = new.get(desc.name)
        touching = [n for n in leaf.users if n in live]
        if made is not None and made is not leaf:
            touching += [made, *(n for n in made.users if n in live)]
        by_chunk = {n.meta[CHUNK]: n for n in reversed(touching) if CHUNK in n.meta}
        if len(by_chunk) > 1:
            (a, first), (b, second) = sorted(by_chunk.items())[:2]
            raise GenerationError(
                f"{desc.name} is needed by chunks {a} and {b}: by {where(first)}, and by {where(second)}. A part of "
                "the cache must lie on one stage. Cut the model elsewhere (Strategy.cuts), or use fewer stages."
            )
        found[desc.name] = next(iter(by_chunk), 0)
    return found


def cut(graph: StepGraph, chunks: int) -> list[ChunkProgram]:
    """The programs of a labelled graph, by chunk."""
    program = graph.program
    free = replicated(program)
    live = program.live()
    homes = owners(graph)
    ops: list[list[fx.Node]] = [[] for _ in range(chunks)]
    for node in program.ops():
        if node in live and node not in free:
            ops[node.meta[CHUNK]].append(node)
    logits = program.loss
    if logits.meta.get(CHUNK) != chunks - 1:
        raise GenerationError(
            f"the logits are made in chunk {logits.meta.get(CHUNK)} of {chunks}, and nothing that they need is behind "
            "it: use fewer stages"
        )
    needs = [_closure(program, nodes, free) for nodes in ops]
    reads = [[n for n in inputs if n not in program.inputs] for _, inputs in needs]
    made = {n: c for c, nodes in enumerate(ops) for n in nodes}
    crossing = [
        [n for n in made if made[n] <= c and any(n in later for later in reads[c + 1 :])]
        for c in range(chunks)
    ]
    new = {desc.name: node for node, desc in program.outputs if desc.kind == "cache"}
    result = []
    for c, nodes in enumerate(ops):
        extra, inputs = needs[c]
        outputs = [(n, GraphOutput("value", n.name)) for n in crossing[c] if made[n] == c]
        outputs += [
            (node, GraphOutput("cache", leaf))
            for leaf, node in new.items()
            if homes[leaf] == c and node not in program.inputs
        ]
        if c == chunks - 1:
            outputs.append((logits, GraphOutput("logits", "")))
        for node, _ in outputs:
            if len(compat.fake_values(node)) != 1:
                raise GenerationError(f"{where(node)} leaves its chunk, but isn't one tensor: cut elsewhere")
        module = extract(
            program.graph,
            program.graph_module,
            {*nodes, *extra},
            inputs,
            [n for n, _ in outputs],
            name=f"step{c}",
        )
        result.append(
            ChunkProgram(
                Straight(module),
                tuple(program.inputs.get(n, GraphInput("value", n.name)) for n in inputs),
                tuple(desc for _, desc in outputs),
                tuple(n.name for n in crossing[c - 1]) if c else (),
                tuple(n.name for n in crossing[c]),
            )
        )
    return result


def _closure(
    program: Program, nodes: Iterable[fx.Node], free: Collection[fx.Node]
) -> tuple[set[fx.Node], list[fx.Node]]:
    """What a chunk recomputes for its ops, and its inputs in the order of the graph."""
    own = set(nodes)
    extra: set[fx.Node] = set()
    inputs: set[fx.Node] = set()
    todo = [s for n in own for s in n.all_input_nodes]
    while todo:
        node = todo.pop()
        if node in own or node in extra or node in inputs:
            continue
        if node in free or node.op == "get_attr":
            extra.add(node)
            todo += node.all_input_nodes
        else:
            inputs.add(node)
    return extra, [n for n in program.graph.nodes if n in inputs]


def _balanced(program: Program, chunks: int) -> list[int]:
    """Cuts that make the chunk that reads the most weights read as few as possible; a value that crosses costs as much
    as the weights that could be read meanwhile."""
    order = forward_order(program, replicated(program))
    sizes = {d.name: nbytes(n.meta["val"]) for n, d in program.inputs.items() if d.kind == "param"}
    cost = [float(_read(program, node, set(order), sizes)) for node in order]
    cost[-1] += _SAMPLING_READS * nbytes(program.loss.meta["val"])
    whole = _inside_cache(program, order)
    allowed = [i for i in cut_positions(program, order) if i not in whole]
    crossing = _values_crossing(order)
    none = [0.0] * len(order)
    found: list[list[int]] = []
    for most in sorted({crossing[i] for i in allowed}):
        few = [i for i in allowed if crossing[i] <= most]
        with contextlib.suppress(PartitionError):
            found.append(balanced(Pieces(cost, none, none, crossing, none, none, few), chunks))
    if not found:
        raise GenerationError(
            f"the model's step can be cut in {len(allowed)} place(s) that keep each part of the cache on one stage, "
            f"too few for {chunks} stages: lower pp_degree"
        )
    dearest = [_dearest(cost, cuts) for cuts in found]
    worst = [max((crossing[i] for i in cuts), default=0) for cuts in found]
    return min(zip(found, dearest, worst, strict=True), key=lambda f: f[1] + _MESSAGE_BYTES * f[2])[0]


def _values_crossing(order: Sequence[fx.Node]) -> list[int]:
    """At each position, how many values come from before it and are read from it on."""
    index = {n: i for i, n in enumerate(order)}
    change = [0] * (len(order) + 2)
    for i, node in enumerate(order):
        last = max((index[u] for u in node.users if u in index), default=i)
        if last > i:
            change[i + 1] += 1
            change[last + 1] -= 1
    return list(accumulate(change))[: len(order) + 1]


def _dearest(cost: Sequence[float], cuts: Sequence[int]) -> float:
    """Of the chunks between these cuts, what the dearest costs."""
    edges = [0, *cuts, len(cost)]
    return max(sum(cost[a:b]) for a, b in pairwise(edges))


def _read(program: Program, node: fx.Node, placed: set[fx.Node], sizes: dict[str, int]) -> int:
    """Bytes of weights that an op reads for one token, and what it costs to start it."""
    if compat.is_view(node) or not compat.is_op(node):
        return 0
    weights = sum(sizes[name] for name in parameters_of(program, node, placed))
    return _OP_BYTES + (0 if node.target in _EMBEDDINGS else weights)


def _inside_cache(program: Program, order: list[fx.Node]) -> set[int]:
    """Positions between the first op that touches a leaf and the last that reads its new value."""
    index = {n: i for i, n in enumerate(order)}
    new = {desc.name: node for node, desc in program.outputs if desc.kind in ("cache", "written")}
    found: set[int] = set()
    for leaf, desc in program.inputs.items():
        if desc.kind != "cache":
            continue
        made = new.get(desc.name, leaf)
        touched = [index[n] for n in (*leaf.users, made, *made.users) if n in index]
        if touched:
            found.update(range(min(touched) + 1, max(touched) + 1))
    return found
