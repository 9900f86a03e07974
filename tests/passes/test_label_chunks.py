"""Labels: forward ops by the cuts, everything else by dataflow."""

from __future__ import annotations

import pytest
import torch

from models import build
from oracle import capture_case, prepared
from pipeloom.passes import apply_passes, build_pass
from pipeloom.passes.cuts import replicated
from pipeloom.program.annotations import module_of
from pipeloom.program.ir import CHUNK, ROLE, OpRole, Program, ProgramError, is_getitem


def label(program: Program, chunks: int, **options: object) -> Program:
    apply_passes(program, [build_pass("label_chunks", chunks=chunks, **options)])
    return program


def chunks_of(program: Program, module: str, role: OpRole = OpRole.FORWARD) -> set[int]:
    return {
        n.meta[CHUNK]
        for n in program.ops()
        if CHUNK in n.meta
        and n.meta[ROLE] == role
        and (module_of(n) == module or module_of(n).startswith(module + "."))
    }


def test_module_names_begin_chunks() -> None:
    program = label(prepared("chain")[1], 3, cuts=["layers.1", "layers.3"])
    assert [chunks_of(program, f"layers.{i}") for i in range(4)] == [{0}, {1}, {1}, {2}]
    assert program.chunks == 3


def test_the_backward_of_a_module_is_in_its_chunk() -> None:
    program = label(prepared("gpt")[1], 2, cuts=["layers.1"])
    assert chunks_of(program, "layers.0", OpRole.BACKWARD) == {0}
    assert chunks_of(program, "layers.1", OpRole.BACKWARD) == {1}


def test_a_skips_gradients_meet_in_the_earlier_of_their_chunks() -> None:
    """The sum inherits the label of one of its operands' forward ops, which may be the wrong one."""
    program = label(prepared("three_readers")[1], 4, cuts=["layers.0", "layers.1", "layers.2"])
    sums = [
        n
        for n in program.ops()
        if n.target is torch.ops.aten.add.Tensor and n.meta[ROLE] == OpRole.BACKWARD and n in program.live()
    ]
    assert len(sums) >= 3
    for node in sums:
        assert node.meta[CHUNK] == min(n.meta[CHUNK] for n in node.all_input_nodes)


@pytest.mark.parametrize("name", ["gpt_dropout", "skip", "views", "outputs", "three_readers", "batch_norm"])
def test_labels_follow_the_flow(name: str) -> None:
    program = label(prepared(name)[1], 4)
    free = replicated(program)
    for node in program.live():
        if node.op != "call_function" or node in free:
            assert CHUNK not in node.meta
            continue
        assert node.meta[CHUNK] in range(4)
        if is_getitem(node):
            assert node.meta[CHUNK] == node.args[0].meta[CHUNK]
        for source in node.all_input_nodes:
            if CHUNK in source.meta and source.meta[ROLE] == node.meta[ROLE]:
                up = node.meta[ROLE] == OpRole.FORWARD
                assert (
                    (source.meta[CHUNK] <= node.meta[CHUNK])
                    if up
                    else (source.meta[CHUNK] >= node.meta[CHUNK])
                )
    assert {n.meta[CHUNK] for n in program.ops() if CHUNK in n.meta} == set(range(4))


def test_what_is_made_of_the_batch_alone_belongs_to_no_chunk() -> None:
    program = label(prepared("gpt")[1], 2)
    positions = [n for n in program.ops() if "arange" in str(n.target)]
    assert positions
    assert all(CHUNK not in n.meta for n in positions)


def test_labels_can_be_written_anew() -> None:
    program = prepared("chain")[1]
    label(program, 4)
    label(program, 1)
    assert {n.meta[CHUNK] for n in program.ops() if CHUNK in n.meta} == {0}


def test_the_check_finds_a_wrong_label_and_names_both_ends() -> None:
    program = capture_case(build("chain"))
    labels = build_pass("label_chunks", chunks=2)
    apply_passes(program, [labels])
    last = next(
        n for n in reversed(program.ops()) if n.meta[ROLE] == OpRole.FORWARD and n.meta.get(CHUNK) == 1
    )
    last.meta[CHUNK] = 0
    with pytest.raises(
        ProgramError, match=rf"\({last.name}, in module .* is labelled chunk 0, but reads \w+ of chunk 1"
    ):
        labels.check(program)
    del last.meta[CHUNK]
    with pytest.raises(ProgramError, match=rf"no chunk could be found for .*\({last.name}, "):
        labels.check(program)
