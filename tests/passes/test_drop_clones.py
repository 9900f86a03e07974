"""Copies that change nothing go; copies that are memory of their own stay."""

from __future__ import annotations

import torch
from torch import nn

from pipeloom.passes import apply_passes, build_pass
from pipeloom.program import capture


class Copies(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.first(x.clone()))
        return self.second(h.t().clone(memory_format=torch.contiguous_format).t()).sum()


def clones(program):
    return [n for n in program.ops() if n.target is torch.ops.aten.clone.default]


def test_a_dropout_that_drops_nothing_costs_no_copy_and_a_change_of_layout_stays():
    program = capture(Copies(0.0), example=torch.randn(4, 8))
    before = len(clones(program))
    apply_passes(program, [build_pass("drop_clones")])
    left = clones(program)
    assert len(left) < before
    for node in left:
        source = node.args[0]
        assert source.op == "placeholder" or source.meta["val"].stride() != node.meta["val"].stride()


def test_outputs_of_an_evaluation_keep_memory_of_their_own():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    program = capture(
        model, lambda output, _target: output.sum(), example=(torch.randn(4, 8), None), training=False
    )
    outputs = [n for n, desc in program.outputs if desc.kind == "output"]
    apply_passes(program, [build_pass("drop_clones")])
    assert [n for n, desc in program.outputs if desc.kind == "output"] == outputs
    storages = [n.meta["val"].untyped_storage()._cdata for n in outputs]
    assert len(set(storages)) == len(storages)
