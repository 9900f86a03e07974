"""The model as a row of pieces, read off its joint graph: what partitioning works on.

A piece is a forward op that belongs to a chunk, with the backward ops that are its derivative. Seconds come from
the op cost model,
bytes from the fake tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx as fx

from ..planning.devices import UNKNOWN, Roofline
from ..planning.partition import Pieces
from ..program import compat
from ..program.ir import ROLE, OpRole, Program, nbytes
from .cost_model import op_seconds

#: bytes that stay for a byte of weight: itself, its gradient, and an Adam-like optimizer's two moments
RESIDENT = 4


def pieces_of(
    program: Program, order: Sequence[fx.Node], allowed: Sequence[int], roofline: Roofline = UNKNOWN
) -> Pieces:
    """The pieces of a program whose forward ops, in order, are `order`. allowed: positions where a chunk may begin.
    roofline: of the device that will run them."""
    index = {n: i for i, n in enumerate(order)}
    by_number: dict[int, int] = {}
    for i, node in enumerate(order):
        number = compat.sequence_number(node)
        if number is not None:
            by_number.setdefault(number, i)
    inputs = [0.0] * len(order)
    weights = [0.0] * len(order)
    held = [0.0] * len(order)
    live = program.live()
    backward = [n for n in program.ops() if n.meta[ROLE] == OpRole.BACKWARD and n in live]
    earliest = _earliest(backward, by_number)
    kept: set[int] = set()
    for node in backward:
        at = by_number.get(_number(node))
        if at is not None:
            side = inputs if earliest[node] < at else weights
            side[at] += op_seconds(node, roofline)
        for source in node.all_input_nodes:
            if source in index:
                for tensor in compat.fake_values(source):
                    storage = compat.storage_key(tensor)
                    if storage not in kept:
                        kept.add(storage)
                        held[index[source]] += nbytes(tensor)
    resident = [0.0] * len(order)
    seen: set[str] = set()
    sizes = {d.name: nbytes(compat.fake_values(n)[0]) for n, d in program.inputs.items() if d.kind == "param"}
    placed = set(order)
    for i, node in enumerate(order):
        for name in parameters_of(program, node, placed) - seen:
            seen.add(name)
            resident[i] += RESIDENT * sizes[name]
    return Pieces(
        [op_seconds(n, roofline) for n in order],
        inputs,
        weights,
        crossing_bytes(order),
        held,
        resident,
        list(allowed),
        1 / roofline.near.bandwidth,
    )


def _number(node: fx.Node) -> int:
    number = compat.sequence_number(node)
    return -1 if number is None else number


def _earliest(backward: Sequence[fx.Node], by_number: dict[int, int]) -> dict[fx.Node, int]:
    """For each backward op, the earliest piece whose gradient needs it: an op that feeds no earlier piece than its
    own makes a
    weight's gradient."""
    found: dict[fx.Node, int] = {}
    for node in reversed(backward):
        own = by_number.get(_number(node), len(by_number))
        found[node] = min([own, *(found[u] for u in node.users if u in found)])
    return found


def crossing_bytes(order: Sequence[fx.Node]) -> list[int]:
    """bytes[i]: what forward ops before position i make and forward ops from i on read."""
    index = {n: i for i, n in enumerate(order)}
    change = [0] * (len(order) + 2)
    for i, node in enumerate(order):
        last = max((index[u] for u in node.users if u in index), default=i)
        size = sum(nbytes(t) for t in compat.fake_values(node))
        if last > i:
            change[i + 1] += size
            change[last + 1] -= size
    total = 0
    result = []
    for i in range(len(order) + 1):
        total += change[i]
        result.append(total)
    return result


def parameters_of(program: Program, node: fx.Node, placed: set[fx.Node]) -> set[str]:
    """The parameters that an op reads: itself, or through views and casts that belong to no chunk."""
    return _read(program, node, placed, ("param",))


def state_of(program: Program, node: fx.Node, placed: set[fx.Node]) -> set[str]:
    """The parameters and buffers that an op reads."""
    return _read(program, node, placed, ("param", "buffer"))


def _read(program: Program, node: fx.Node, placed: set[fx.Node], kinds: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    todo = list(node.all_input_nodes)
    while todo:
        source = todo.pop()
        desc = program.inputs.get(source)
        if desc is not None and desc.kind in kinds:
            found.add(desc.name)
        elif source.op == "call_function" and source not in placed:
            todo.extend(source.all_input_nodes)
    return found
