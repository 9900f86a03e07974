"""The function that a program runs is FX's own, minus the looking-up; what it makes lies as it was predicted."""

from __future__ import annotations

import operator

import torch
import torch.fx as fx
from torch import nn

from pipeloom.program import compat
from pipeloom.program.straight import Straight

aten = torch.ops.aten


@torch.library.custom_op("straight_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def module():
    graph = fx.Graph()
    x, y, total = (graph.placeholder(name) for name in ("x", "y", "total"))
    root = nn.Module()
    root.register_buffer("shift", torch.arange(6.0).view(2, 3))
    shift = graph.get_attr("shift")
    a = graph.call_function(aten.add.Tensor, (x, shift), {"alpha": 2})
    b = graph.call_function(aten.add.Tensor, (a, 1))
    turned = graph.call_function(aten.transpose.int, (b, 0, 1))
    product = graph.call_function(aten.mm.default, (b, graph.call_function(aten.t.default, (y,))))
    flat = graph.call_function(aten.view.default, (product, [-1]))
    swapped = graph.call_function(aten.permute.default, (turned, [1, 0]))
    twice = graph.call_function(torch.ops.straight_test.doubled.default, (swapped,))
    first = graph.call_function(operator.getitem, (graph.call_function(aten.unbind.int, (twice,)), 0))
    floor = graph.call_function(aten.clamp.default, (flat, float("-inf")))
    graph.call_function(aten.add_.Tensor, (total, product))
    graph.output((floor, first))
    return compat.boxed(graph, root, "Small")


def test_it_gives_the_same_bits_and_empties_its_list():
    made = module()
    torch.manual_seed(0)
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    totals = torch.zeros(2, 2), torch.zeros(2, 2)
    expected = made.forward([x, y, totals[0]])
    given = [x, y, totals[1]]
    found = Straight(made)(given)
    assert given == []
    assert len(found) == 2
    assert all(torch.equal(a, b) for a, b in zip((*found, totals[1]), (*expected, totals[0]), strict=True))
    assert totals[1].abs().sum() > 0


def test_no_op_goes_through_pythons_wrapper():
    names = Straight(module()).function.__globals__
    assert {"aten__unbind__int", "aten__mm__default", "straight_test__doubled__default"} <= set(names)
    assert not any(isinstance(value, torch._ops.OpOverload) for value in names.values())


def test_a_number_may_come_first():
    graph = fx.Graph()
    x = graph.placeholder("x")
    shifted = graph.call_function(aten.add.Tensor, (2.5, x))
    graph.output((graph.call_function(aten.add.Tensor, (shifted, 1)),))
    (found,) = Straight(compat.boxed(graph, nn.Module(), "Number"))([torch.ones(2)])
    assert found.tolist() == [4.5, 4.5]


def test_results_lie_where_they_were_predicted():
    """A view and a kernel's raw read both depend on it: `sort` gives dense results, said here to be turned ones."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, 2, device="meta").t()
    pair = graph.call_function(aten.sort.default, (x,))
    pair.meta["val"] = tuple(torch.empty(3, 2, device="meta", dtype=t).t() for t in (torch.float, torch.long))
    values, places = (graph.call_function(operator.getitem, (pair, i)) for i in range(2))
    squared = graph.call_function(aten.cumsum.default, (x, 1))
    squared.meta["val"] = torch.empty(2, 3, device="meta")
    graph.output((values, places, squared))
    found = Straight(compat.boxed(graph, nn.Module(), "Laid"))([torch.randn(3, 2).t().contiguous()])
    assert [t.stride() for t in found] == [(1, 2), (1, 2), (3, 1)]
    x = torch.randn(3, 2).t()
    found = Straight(compat.boxed(graph, nn.Module(), "Laid"))([x])
    assert [t.stride() for t in found] == [(1, 2), (1, 2), (3, 1)]
    assert all(torch.equal(a, b) for a, b in zip(found, (*x.sort(), x.cumsum(1)), strict=True))
