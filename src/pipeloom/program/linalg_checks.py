"""Checks by which torch.linalg raises on what it can't solve (a singular matrix), as part of the dataflow.

torch traces such a check as an op with an effect and no result, ordered by tokens. Here the checked value passes
through an op of our own, which looks at what the solver said and raises torch's error: so the check lies in the chunk,
and runs before anybody reads the value.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

_LIBRARY: Any = torch.library.Library("pipeloom", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("linalg_checked(Tensor(a) value, Tensor info, str api, bool is_matrix) -> Tensor(a)")
_CHECK = torch.ops.aten._linalg_check_errors.default


def _run(value: Tensor, info: Tensor, api: str, is_matrix: bool) -> Tensor:
    _CHECK(info, api, is_matrix=is_matrix)
    return torch.ops.aten.alias.default(value)  # type: ignore[no-any-return]


def _fake(value: Tensor, _info: Tensor, _api: str, _is_matrix: bool) -> Tensor:
    return torch.ops.aten.alias.default(value)  # type: ignore[no-any-return]


_LIBRARY.impl("linalg_checked", _run, "CompositeExplicitAutograd")
torch.library.register_fake("pipeloom::linalg_checked", _fake, lib=_LIBRARY)


def checked_in_dataflow(graph: fx.Graph) -> None:
    """Replaces each check that is ordered by tokens: the token that it takes stands for the one that it gives."""
    effects = torch.ops.higher_order.with_effects
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not effects or node.args[1] is not _CHECK:
            continue
        token, _, info, api = node.args
        if info.target is not operator.getitem:
            continue
        solver = info.args[0]
        values = [n for n in solver.users if n.target is operator.getitem and n.args[1] == 0]
        for value in values:
            _check(graph, value, solver, info.args[1], api, node.kwargs["is_matrix"])
        for given in list(node.users):  # (token, nothing)
            given.replace_all_uses_with(token)
            graph.erase_node(given)
        graph.erase_node(node)
        if not info.users:
            graph.erase_node(info)


def _check(
    graph: fx.Graph, value: fx.Node, solver: fx.Node, position: int, api: str, is_matrix: bool
) -> None:
    readers = list(value.users)
    with graph.inserting_after(value):
        info = graph.call_function(operator.getitem, (solver, position))
    with graph.inserting_after(info):
        checked = graph.call_function(
            torch.ops.pipeloom.linalg_checked.default, (value, info, api, is_matrix)
        )
    info.meta = {**value.meta, "val": solver.meta["val"][position]}
    checked.meta = {**value.meta, "val": _fake(value.meta["val"], info.meta["val"], api, is_matrix)}
    for reader in readers:
        reader.replace_input_with(value, checked)
