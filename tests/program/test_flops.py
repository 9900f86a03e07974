"""Floating point operations of nodes."""

from __future__ import annotations

import torch

from models import Chain, squares
from oracle import prepared
from pipeloom.program.capture import capture
from pipeloom.program.flops import flops_of


def test_flops_of_products_and_of_nothing() -> None:
    program = capture(Chain(1), squares, example=(torch.randn(4, 8), torch.randn(4, 8)))
    addmm = next(n for n in program.ops() if n.target is torch.ops.aten.addmm.default)
    assert flops_of(addmm) == 2 * 4 * 8 * 8
    assert flops_of(program.loss) == 0
    assert all(flops_of(n) == 0 for n in program.inputs)


def test_flops_of_attention() -> None:
    program = prepared("gpt")[1]
    counted = {str(n.target): flops_of(n) for n in program.ops() if "attention" in str(n.target)}
    forward, backward = sorted(counted.values())
    assert forward == 2 * 2 * (
        4 * 2 * 6 * 6 * 4
    )  # two products over (batch, heads, time, time, width of a head)
    assert backward == 2.5 * forward
