"""Where the model is cut: positions in the order of its forward ops.

A user's cut points (module names, a regex over them, or counts of layers) become positions, and so does the automatic
choice: dynamic programming that makes the dearest chunk as cheap as possible, then lets as few bytes cross as it can.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.fx as fx

from ..planning.partition import PartitionError, balanced
from ..program import compat
from ..program.annotations import module_of
from ..program.ir import ROLE, OpRole, Program, ProgramError, is_getitem
from .pieces import pieces_of

_LAYOUT = re.compile(r"\d+([-,|]\d+)*")
_CASTS = frozenset({torch.ops.aten._to_copy.default})


def replicated(program: Program) -> set[fx.Node]:
    """Ops that belong to no chunk, since each chunk that needs one recomputes it: values made from the batch,
    constants and buffers that don't change (masks, rotary tables), and views and casts of a parameter."""
    updated = {name for _, name in program.buffer_updates()}
    cheap: set[fx.Node] = set()
    weights: set[fx.Node] = set()
    for node, desc in program.inputs.items():
        if desc.kind in ("input", "key") or (desc.kind == "buffer" and desc.name not in updated):
            cheap.add(node)
        elif desc.kind == "param":
            weights.add(node)
    found: set[fx.Node] = set()
    kept = {n for n, desc in program.outputs if desc.kind != "output"}
    for node in program.ops():
        sources = node.all_input_nodes
        if node in kept:
            continue
        if all(s in cheap for s in sources):
            cheap.add(node)
            found.add(node)
        elif all(s in weights for s in sources) and (compat.is_view(node) or node.target in _CASTS):
            weights.add(node)
            found.add(node)
    return found


def forward_order(program: Program, free: set[fx.Node]) -> list[fx.Node]:
    """The live forward ops that belong to chunks, in program order: what cuts are positions in."""
    live = program.live()
    return [n for n in program.ops() if n.meta[ROLE] == OpRole.FORWARD and n in live and n not in free]


def choose_cuts(
    program: Program, chunks: int, cuts: str | Sequence[str] | None, free: set[fx.Node]
) -> list[int]:
    """chunks − 1 ascending positions: chunk k holds ops [cut k−1, cut k) of `forward_order`.

    cuts: None (anywhere, balanced by cost), a regex that matches whole module names (balanced among the places where a
    match begins), a list of chunks − 1 module names at which a new chunk begins, or a layout like "6-6-9-3": how many
    elements of the model's longest list of blocks each chunk has. Raises ProgramError when there aren't enough.
    """
    order = forward_order(program, free)
    names = [module_of(n) for n in order]
    if isinstance(cuts, str) and _LAYOUT.fullmatch(cuts):
        return _layout(order, names, cuts, chunks)
    if chunks == 1:
        if cuts and not isinstance(cuts, str):
            raise ProgramError(
                f"cuts names {len(cuts)} module(s), but there is one chunk: nothing is cut (raise pp_degree or "
                "vpp_degree)"
            )
        return []
    if cuts is None:
        allowed = cut_positions(program, order)
        if len(allowed) < chunks - 1:
            raise ProgramError(
                f"the model has {len(order)} forward ops with {len(allowed)} places to cut, which is too few "
                f"for {chunks} chunks (what reads and updates one buffer stays together); lower pp_degree or vpp_degree"
            )
        return balanced_cuts(program, order, chunks, allowed)
    if isinstance(cuts, str):
        whole = _inside_state(program, order)
        return balanced_cuts(program, order, chunks, _matches(names, cuts, chunks, whole))
    return _named(names, list(cuts), chunks)


def cut_positions(program: Program, order: list[fx.Node]) -> list[int]:
    """Where a chunk may begin: anywhere but between an op and its items, or inside what reads and updates one
    buffer."""
    whole = _inside_state(program, order)
    return [i for i in range(1, len(order)) if not is_getitem(order[i]) and i not in whole]


def _inside_state(program: Program, order: list[fx.Node]) -> set[int]:
    """Positions between the first reader of a buffer and its update: a cut there would send the buffer's next
    value backwards."""
    index = {n: i for i, n in enumerate(order)}
    buffers = {desc.name: node for node, desc in program.inputs.items() if desc.kind == "buffer"}
    found: set[int] = set()
    for update, name in program.buffer_updates():
        touched = [index[n] for n in (update, *buffers[name].users) if n in index]
        if touched:
            found.update(range(min(touched) + 1, max(touched) + 1))
    return found


def _matches(names: list[str], pattern: str, chunks: int, whole: set[int]) -> list[int]:
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ProgramError(f"cuts={pattern!r} is no regular expression: {error}") from error
    firsts: dict[str, int] = {}
    for i, name in enumerate(names):
        parts = name.split(".")
        for k in range(1, len(parts) + 1):
            prefix = ".".join(parts[:k])
            if regex.fullmatch(prefix):
                firsts.setdefault(prefix, i)
    found = sorted({i for i in firsts.values() if i > 0 and i not in whole})
    if len(found) < chunks - 1:
        some = ", ".join(list(firsts)[:5]) or "no module that runs an op"
        raise ProgramError(
            f"cuts={pattern!r} gives {len(found)} places to cut ({some}), but {chunks} chunks need "
            f"{chunks - 1}; loosen the expression or lower pp_degree or vpp_degree"
        )
    return found


def _named(names: list[str], cuts: list[str], chunks: int) -> list[int]:
    if len(cuts) != chunks - 1:
        raise ProgramError(
            f"cuts names {len(cuts)} module(s), but {chunks} chunks need {chunks - 1} (one where each later "
            "chunk begins)"
        )
    positions: list[int] = []
    for cut in cuts:
        at = next((i for i, n in enumerate(names) if n == cut or n.startswith(cut + ".")), None)
        if at is None:
            known = ", ".join(list(dict.fromkeys(n for n in names if n))[:8])
            raise ProgramError(
                f"cuts names {cut!r}, but no module of that name runs an op in the forward. Some that do: {known}"
            )
        if at == 0 or (positions and at <= positions[-1]):
            raise ProgramError(
                f"the cut at {cut!r} leaves the chunk before it empty: name modules in the order in which they "
                "first run"
            )
        positions.append(at)
    return positions


def _layout(order: list[fx.Node], names: list[str], text: str, chunks: int) -> list[int]:
    counts = [int(part) for part in re.split(r"[-,|]", text)]
    if len(counts) != chunks:
        raise ProgramError(
            f"cuts={text!r} gives {len(counts)} counts of layers, but there are {chunks} chunks"
        )
    path, layers = _blocks(order, names)
    if not layers:
        raise ProgramError(
            f"cuts={text!r} counts layers, but the model has no ModuleList, Sequential or ModuleDict of repeated "
            "blocks: name the modules at which chunks begin"
        )
    if sum(counts) != len(layers):
        raise ProgramError(
            f"cuts={text!r} counts {sum(counts)} layers, but {path or 'the model'!r} has {len(layers)}: make the "
            "counts add up to that"
        )
    begins = [min(where) for where in layers.values()]
    begins.append(max(max(where) for where in layers.values()) + 1)
    positions = [begins[number] for number in list(accumulate(counts))[:-1]]
    for chunk, (a, b) in enumerate(zip([0, *positions], [*positions, len(order)], strict=True)):
        if a >= b:
            raise ProgramError(
                f"cuts={text!r} leaves chunk {chunk} without an op: only the first chunk (what comes before "
                f"{path}) and the last one (what comes after it) can do with no layer, if the model has such parts"
            )
    return positions


def _blocks(order: list[fx.Node], names: list[str]) -> tuple[str, dict[str, list[int]]]:
    """The list of repeated blocks that runs the most ops: its path, and each block's positions, in the order in
    which they first run. Numbered children (ModuleList, Sequential) are a list if two of them do the same; named ones
    (ModuleDict) if most of them do, since a block's own parts are named too."""
    children: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i, name in enumerate(names):
        parts = name.split(".") if name else []
        for depth, child in enumerate(parts):
            children[".".join(parts[:depth])][child].append(i)
    best: tuple[str, dict[str, list[int]]] = ("", {})
    most = 0
    for path, blocks in children.items():
        alike = Counter(tuple(order[i].target for i in where) for where in blocks.values())
        same = max(alike.values())
        numbered = all(child.isdigit() for child in blocks)
        ops = sum(map(len, blocks.values()))
        if same >= 2 and (numbered or 2 * same > len(blocks)) and ops > most:
            best, most = (path, dict(blocks)), ops
    return best


def balanced_cuts(program: Program, order: list[fx.Node], chunks: int, allowed: list[int]) -> list[int]:
    """The chunks − 1 of the allowed positions that make the dearest chunk cheapest and let the fewest bytes cross
    (`planning.partition`)."""
    try:
        return balanced(pieces_of(program, order, allowed), chunks)
    except PartitionError as error:
        raise ProgramError(str(error)) from error
