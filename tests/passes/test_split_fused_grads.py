"""Ops that make input and weight gradients at once become two, with the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from models import Case, build
from oracle import capture_case, cut, eager, leaves_of, run_programs, worst_error
from pipeloom.passes import apply_passes, build_pass
from pipeloom.passes.random_keys import key_of
from pipeloom.passes.split_fused_grads import mask_position, used_outputs
from pipeloom.program.capture import capture
from pipeloom.program.ir import Program, ProgramError


def fused(program: Program) -> list[tuple[str, list[int]]]:
    return sorted((str(n.target), used_outputs(n)) for n in program.ops() if mask_position(n) is not None)


def both(program: Program) -> list[str]:
    return [name for name, used in fused(program) if 0 in used and used != [0]]


def test_each_norm_and_convolution_is_split() -> None:
    case = build("skip")
    program = capture(case.model, case.loss_fn, example=case.example)
    before, together = len(fused(program)), both(program)
    assert {name.split(".")[1] for name in together} == {
        "convolution_backward",
        "native_group_norm_backward",
        "native_batch_norm_backward",
    }
    apply_passes(program, [build_pass("split_fused_grads")])
    assert both(program) == []
    assert len(fused(program)) == before + len(together)


def test_masks_ask_for_exactly_what_is_used() -> None:
    for name in ("skip", "gpt"):
        for node in capture_case(build(name)).ops():
            position = mask_position(node)
            if position is not None:
                mask = node.args[position]
                assert all(mask[i] for i in used_outputs(node))
                assert [v is not None for v in node.meta["val"]] == list(mask)


def test_an_op_whose_input_needs_no_gradient_is_left_whole() -> None:
    case = build("skip")
    program = capture(case.model, case.loss_fn, example=case.example)
    first = [n for n in program.ops() if "convolution_backward" in str(n.target)][-1]
    assert 0 not in used_outputs(first)
    apply_passes(program, [build_pass("split_fused_grads")])
    assert first in program.ops()


def test_a_second_run_changes_nothing() -> None:
    program = capture_case(build("gpt"))
    before = [str(n.target) for n in program.ops()]
    apply_passes(program, [build_pass("split_fused_grads")])
    assert [str(n.target) for n in program.ops()] == before


@pytest.mark.parametrize(
    "layer", [nn.LayerNorm(8), nn.GroupNorm(2, 6), nn.InstanceNorm1d(6, affine=True), nn.Conv1d(6, 6, 3)]
)
def test_gradients_are_the_same(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Conv1d(6, 6, 1), layer, nn.Conv1d(6, 6, 1))
    case = Case(model, lambda output, _: F.softplus(output).mean(), torch.randn(3, 6, 8), None).double()
    key = key_of(0, 0, 0)
    result = run_programs(cut(capture_case(case), 2), model, leaves_of(case), key)
    assert worst_error(result.gradients, eager(case, key).gradients) <= 1e-10


def test_the_check_names_what_is_left() -> None:
    case = build("gpt")
    program = capture(case.model, case.loss_fn, example=case.example)
    with pytest.raises(
        ProgramError, match=r"native_layer_norm_backward.*still computes input and weight gradients"
    ):
        build_pass("split_fused_grads").check(program)
