"""torch.utils.checkpoint in the user's model is honoured: less is kept, and the numbers are the same."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models import Case, NormChain, build, squares
from oracle import Reference, capture_case, cut, eager, leaves_of, prepared, run_programs, worst_error
from pipeloom.passes import build_pass
from pipeloom.passes.random_keys import key_of
from pipeloom.program import compat
from pipeloom.program.annotations import checkpoint_region
from pipeloom.program.subprogram import ProgramSet

KEY = key_of(2, 3, 1)


@functools.cache
def programs_of(
    name: str, chunks: int, recompute: bool = True, cuts: tuple[str, ...] | None = None
) -> ProgramSet:
    if not recompute or name == "gpt_dropout":  # nothing rewrites the graph: the shared capture will do
        more = [build_pass("recompute")] if recompute else []
        return cut(prepared(name)[1], chunks, more=more, cuts=cuts)
    return cut(capture_case(build(name).double()), chunks, more=[build_pass("recompute")], cuts=cuts)


@functools.cache
def reference() -> Reference:
    return eager(build("gpt_dropout").double(), KEY)


def kept_bytes(programs: ProgramSet, chunk: int = 0) -> int:
    """Bytes that F leaves behind for the backward of its chunk, each storage once."""
    storages = {
        programs.values[n].storage: programs.values[n].nbytes for n in programs.programs["F", chunk].outputs
    }
    return sum(storages.values())


@pytest.mark.parametrize(
    ("name", "chunks", "cuts"),
    [
        ("gpt_checkpoint", 1, None),
        ("gpt_reentrant", 1, None),
        ("gpt_checkpoint", 3, None),
        ("gpt_reentrant", 2, ("layers.1",)),
        ("gpt_checkpoint", 3, ("layers.0.up", "layers.1.up")),  # inside of checkpoint regions
    ],
)
def test_gradients_and_masks_are_those_without_checkpoint(
    name: str, chunks: int, cuts: tuple[str, ...]
) -> None:
    case, programs = build(name).double(), programs_of(name, chunks, cuts=cuts)
    for split in (True, False):
        result = run_programs(programs, case.model, leaves_of(case), KEY, split=split)
        assert torch.equal(result.loss, reference().loss)
        assert worst_error(result.gradients, reference().gradients) <= 1e-10


@pytest.mark.parametrize("name", ["gpt_checkpoint", "gpt_reentrant"])
def test_less_is_kept_between_forward_and_backward(name: str) -> None:
    plain = kept_bytes(programs_of("gpt_dropout", 1))
    assert kept_bytes(programs_of(name, 1, recompute=False)) == plain
    assert kept_bytes(programs_of(name, 1)) < 0.5 * plain


def test_a_model_without_checkpoint_is_left_alone() -> None:
    with_pass, without = programs_of("gpt_dropout", 1), programs_of("gpt_dropout", 1, recompute=False)
    assert {k: p.structure for k, p in with_pass.programs.items()} == {
        k: p.structure for k, p in without.programs.items()
    }


def test_each_region_is_marked_and_each_op_run_at_most_twice() -> None:
    program = capture_case(build("gpt_checkpoint"))
    regions = {checkpoint_region(n) for n in program.ops() if not compat.is_backward(n)}
    assert None in regions
    assert len(regions) == 3  # one a layer
    activations = [n for n in program.ops() if n.target is torch.ops.aten.gelu.default]
    assert len(activations) == 2
    cut(program, 1, more=[build_pass("recompute")])
    assert len([n for n in program.ops() if n.target is torch.ops.aten.gelu.default]) == 4


class _CheckpointedNorms(NormChain):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_batch_statistics_move_once() -> None:
    """Eager checkpoint moves them a second time when it recomputes; a program doesn't."""
    case = Case(_CheckpointedNorms(2), squares, torch.randn(4, 8), torch.randn(4, 8)).double()
    plain = Case(NormChain(2), squares, case.inputs, case.targets).double()
    plain.model.load_state_dict(case.model.state_dict())
    programs = cut(capture_case(case), 2, more=[build_pass("recompute")])
    result, expected = run_programs(programs, case.model, leaves_of(case), KEY), eager(plain, KEY)
    assert torch.equal(result.loss, expected.loss)
    assert worst_error(result.gradients, expected.gradients) <= 1e-10
    for name, value in result.buffers.items():
        assert torch.equal(value, expected.buffers[name])
    assert all(not p.buffers for (kind, _), p in programs.programs.items() if kind != "F")
