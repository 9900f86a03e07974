"""Programs cut out of a captured model compute what eager PyTorch computes, whatever the cuts."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from torch import nn

from models import CASES, Case, build, squares
from oracle import Reference, capture_case, cut, eager, leaves_of, prepared, run_programs, worst_error
from pipeloom.footprint import held_bytes
from pipeloom.passes import apply_passes, build_pass, split_programs
from pipeloom.passes.cuts import replicated
from pipeloom.passes.extract import sinkable
from pipeloom.passes.random_keys import key_of
from pipeloom.program.compat import is_op
from pipeloom.program.ir import ProgramError, is_getitem, target_name
from pipeloom.program.subprogram import ProgramSet

KEY = key_of(seed=5, step=1, micro_batch=2)
#: a pass rewrites these once the chunks are known (see test_recompute)
CHECKPOINTED = ("gpt_checkpoint", "gpt_reentrant")
PLAIN = [name for name in CASES if name not in CHECKPOINTED]


@functools.cache
def reference(name: str) -> Reference:
    return eager(prepared(name)[0], KEY)


@functools.cache
def programs_of(name: str, chunks: int) -> ProgramSet:
    return cut(prepared(name)[1], chunks)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", PLAIN)
def test_programs_compute_what_eager_computes(name: str, chunks: int) -> None:
    case, expected, programs = prepared(name)[0], reference(name), programs_of(name, chunks)
    moved = {n for n, b in case.model.named_buffers() if not torch.equal(b, expected.buffers[n])}
    for split in (True, False):
        result = run_programs(programs, case.model, leaves_of(case), KEY, split=split)
        assert torch.equal(result.loss, expected.loss)
        assert worst_error(result.gradients, expected.gradients) <= 1e-10
        assert set(result.buffers) == moved
        for buffer, value in result.buffers.items():
            torch.testing.assert_close(value, expected.buffers[buffer], rtol=1e-12, atol=0)
        assert (result.weight is None) == (expected.weight is None)
        if result.weight is not None:
            assert float(result.weight) == float(expected.weight)


@pytest.mark.parametrize("name", ["skip", "chain_dropout", "batch_norm", "tied"])
def test_programs_with_fused_gradients_compute_the_same(name: str) -> None:
    case, expected = build(name).double(), reference(name)
    program = capture_case(case, fused=True)
    for chunks in (1, 3):
        programs = cut(program, chunks, split=False)
        assert {kind for kind, _ in programs.programs} == {"F", "X"}
        result = run_programs(programs, case.model, leaves_of(case), KEY, split=False)
        assert torch.equal(result.loss, expected.loss)
        assert worst_error(result.gradients, expected.gradients) <= 1e-10


@pytest.mark.parametrize("name", ["gpt_dropout", "tied", "used_twice", "shared_view", "skip", "gains"])
def test_gradients_are_the_same_to_the_bit_for_every_number_of_chunks(name: str) -> None:
    case = prepared(name)[0]
    results = [
        run_programs(programs_of(name, chunks), case.model, leaves_of(case), KEY, split=split)
        for chunks in (1, 2, 3, 4)
        for split in (True, False)
    ]
    for result in results[1:]:
        assert set(result.gradients) == set(results[0].gradients)
        for parameter, gradient in result.gradients.items():
            assert torch.equal(gradient, results[0].gradients[parameter]), parameter


def test_any_order_that_respects_the_edges_gives_the_same_gradients() -> None:
    case = prepared("skip")[0]
    programs = programs_of("skip", 3)
    late_weights = [("F", 0), ("F", 1), ("F", 2), ("B", 2), ("B", 1), ("B", 0), ("W", 0), ("W", 2), ("W", 1)]
    usual = run_programs(programs, case.model, leaves_of(case), KEY)
    late = run_programs(programs, case.model, leaves_of(case), KEY, order=late_weights)
    for parameter, gradient in usual.gradients.items():
        assert torch.equal(gradient, late.gradients[parameter])


def test_micro_batches_add_up_in_the_accumulators() -> None:
    case, programs = prepared("tied")[0], programs_of("tied", 2)
    halves = [run_programs(programs, case.model, leaves_of(case), KEY, tangent=t) for t in (0.25, 0.75)]
    first = run_programs(programs, case.model, leaves_of(case), KEY, tangent=0.25)
    both = run_programs(
        programs, case.model, leaves_of(case), KEY, tangent=0.75, accumulators=first.accumulators
    )
    for name, gradient in both.gradients.items():
        torch.testing.assert_close(
            gradient, halves[0].gradients[name] + halves[1].gradients[name], rtol=1e-12, atol=1e-14
        )
        torch.testing.assert_close(gradient, reference("tied").gradients[name], rtol=1e-12, atol=1e-14)


#: what an op becomes when its result goes straight into an accumulator
_MERGED = {
    "aten.addmm_.default": "aten.mm.default",
    "aten.index_add_.default": "aten.embedding_dense_backward.default",
}


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", ["gpt_dropout", "skip", "outputs", "scaled", "batch_norm", "decay", "tied"])
def test_every_live_op_runs_exactly_once_in_F_B_and_W_and_in_F_and_X(name: str, chunks: int) -> None:
    """Views may be repeated at their users, and what each chunk makes of the batch or of a weight for itself."""
    programs, program = programs_of(name, chunks), prepared(name)[1]
    free = replicated(program)
    repeated = {target_name(n) for n in free} | {"aten.reshape.default", "aten.add_.Tensor"}
    live = program.live()
    wanted = Counter(
        target_name(n)
        for n in program.ops()
        if n in live and is_op(n) and not sinkable(n) and target_name(n) not in repeated
    )
    for kinds in ("FBW", "FX"):
        found: Counter[str] = Counter()
        for (kind, _), sub in programs.programs.items():
            if kind in kinds and not sub.empty:
                names = [target_name(n) for n in sub.graph.graph.nodes if is_op(n) and not sinkable(n)]
                found.update(_MERGED.get(n, n) for n in names if n not in repeated)
        assert found == wanted


@pytest.mark.parametrize("name", ["skip", "three_readers", "outputs", "views", "auxiliary"])
def test_messages_go_up_with_F_and_down_with_B(name: str) -> None:
    programs = programs_of(name, 4)
    for (direction, source, target), names in programs.messages.items():
        assert (source < target) == (direction == "F")
        assert names
        assert len(names) == len(set(names))
    for edge in programs.edges():
        names = programs.messages[edge.direction, edge.source, edge.target]
        assert edge.nbytes == sum(programs.values[n].nbytes for n in names) > 0


def test_a_skip_goes_straight_from_the_first_chunk_to_the_last() -> None:
    messages = cut(prepared("skip")[1], 4, cuts=["down", "middle", "up"]).messages
    assert ("F", 0, 3) in messages
    assert ("B", 3, 1) in messages  # where its gradient meets the other one


def test_value_info_is_what_the_programs_make() -> None:
    for name in ("views", "gpt", "gpt_autocast", "skip"):
        case, programs = prepared(name)[0], programs_of(name, 3)
        result = run_programs(programs, case.model, leaves_of(case), KEY)
        seen = set()
        for scope in result.scopes:
            for value_name, tensor in scope.items():
                info = programs.values[value_name]
                assert (tuple(tensor.shape), tensor.dtype) == (info.shape, info.dtype)
                if (
                    tensor.numel() > 1 and 1 not in tensor.shape
                ):  # the stride of a dimension of size 1 means nothing
                    assert tensor.stride() == info.stride
                assert info.nbytes == tensor.numel() * tensor.element_size()
                seen.add(value_name)
        assert seen == set(programs.values)


def test_storage_groups_the_values_that_share_memory() -> None:
    case, programs = prepared("gpt")[0], programs_of("gpt", 2)
    result = run_programs(programs, case.model, leaves_of(case), KEY)
    for chunk in range(2):
        made = programs.programs["F", chunk].outputs
        groups: dict[int, set[int]] = {}
        for name in made:
            groups.setdefault(programs.values[name].storage, set()).add(
                result.scopes[chunk][name].untyped_storage().data_ptr()
            )
        assert all(len(memory) == 1 for memory in groups.values())


def test_slots_name_parameter_use_and_chunk() -> None:
    programs = programs_of("used_twice", 4)
    shared = [s for s in programs.slots if s.parameter == "shared.weight"]
    assert {(s.index, s.chunk) for s in shared} == {(0, 3), (1, 0)}
    assert len({s.name for s in programs.slots}) == len(programs.slots)
    no_weight_crosses = [n for names in programs.messages.values() for n in names]
    assert all(programs.values[n].shape != (8, 8) for n in no_weight_crosses)


def test_a_turned_weight_that_is_used_in_two_chunks_has_two_slots() -> None:
    programs = programs_of("shared_view", 4)
    assert {(s.index, s.chunk) for s in programs.slots if s.parameter == "weight"} == {(0, 3), (1, 0)}
    assert all(programs.values[n].shape != (8, 8) for names in programs.messages.values() for n in names)


class Thirds(nn.Module):
    """Its backward needs two of three parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.last = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, _ = self.parts(x).chunk(3, -1)
        return self.last(a * b)


def test_a_part_keeps_the_whole_tensor_alive() -> None:
    x = torch.randn(4, 8)
    programs = cut(capture_case(Case(Thirds(), squares, x, torch.randn(4, 8)).double()), 4)
    crossing = [programs.values[name] for name in programs.messages["F", 0, 1]]
    assert [(v.nbytes, v.storage_bytes) for v in crossing] == [(256, 768)] * 2
    assert held_bytes(programs, 1, [0, 0, 1, 1]) == (768, 0, 0), "the parts were made on the same rank"


def test_the_first_chunk_has_no_input_gradient() -> None:
    programs = programs_of("chain", 3)
    assert programs.programs["B", 0].empty
    assert not programs.programs["W", 0].empty
    assert not programs.programs["B", 1].empty


def test_nothing_flows_back_into_a_frozen_prefix() -> None:
    programs = programs_of("frozen_prefix", 4)
    assert all(programs.programs[kind, 0].empty for kind in ("B", "W", "X"))
    assert not any(direction == "B" and target == 0 for direction, _, target in programs.messages)
    assert {s.parameter.split(".")[1] for s in programs.slots} == {"2", "3"}


def test_a_frozen_chunk_has_no_weight_gradients() -> None:
    programs = programs_of("frozen_suffix", 4)
    assert programs.programs["W", 3].empty
    assert not programs.programs["B", 3].empty


def test_an_unused_parameter_has_no_slot() -> None:
    assert not [s for s in programs_of("no_weights", 2).slots if s.parameter.startswith("unused")]


def test_a_chunk_may_have_no_parameter() -> None:
    programs = programs_of("no_weights", 4)
    assert any(not programs.parameters(c) for c in range(4))


def test_parameters_and_buffers_of_a_chunk() -> None:
    programs = programs_of("batch_norm", 3)
    for chunk in range(3):
        owned = {n.split(".")[1] for n in programs.parameters(chunk)}
        assert {n.split(".")[1] for n in programs.buffers(chunk)} <= owned
    assert set(programs.programs["F", 0].buffers) >= {
        "layers.0.1.running_mean",
        "layers.0.1.num_batches_tracked",
    }


def test_a_loss_that_is_a_module_keeps_its_weights_out_of_the_model() -> None:
    programs = programs_of("weighted_loss", 2)
    assert not programs.buffers(1)


class _BufferInTwo(nn.Module):
    """A count that is read by the first layer and written by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x) + self.steps)
        x = self.last(x)
        self.steps.add_(1)
        return x


def test_a_buffer_can_not_be_updated_behind_its_reader() -> None:
    case = Case(_BufferInTwo(), squares, torch.randn(4, 8), torch.randn(4, 8))
    program = capture_case(case)
    with pytest.raises(ProgramError, match="'steps' is read in chunk 0 and updated in chunk 1"):
        cut(program, 2, cuts=["last"])
    automatic = cut(program, 2)
    assert run_programs(automatic, case.model, leaves_of(case), KEY).buffers["steps"] == 1


@pytest.mark.parametrize("name", ["gpt_dropout", "batch_norm", "summed", "weighted_loss", "outputs", "gains"])
def test_evaluation_gives_loss_and_outputs(name: str) -> None:
    case = build(name).double()
    programs = cut(capture_case(case, training=False), 3)
    assert {kind for kind, _ in programs.programs} == {"F"}
    assert programs.draws == 0
    result = run_programs(programs, case.model, leaves_of(case), KEY)
    assert not result.buffers
    case.model.eval()
    with torch.no_grad():
        output, loss = case.output(case.model), case.loss(case.model)
    if isinstance(loss, tuple):
        loss, weight = loss
        assert float(result.weight) == float(weight)
    assert torch.equal(result.loss, loss)
    flat = list(output.values()) if isinstance(output, dict) else [output]
    assert len(result.outputs) == len(flat)
    for made, expected in zip(result.outputs, flat, strict=True):
        torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)


class _Aliases(nn.Module):
    """Outputs that are the input, a weight, a view, and nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {"x": x, "w": self.layer.weight, "y": self.layer(x), "first": x[0], "none": None}


def test_outputs_may_alias_inputs_and_weights() -> None:
    x = torch.randn(4, 8)
    case = Case(_Aliases(), lambda output, target: squares(output["y"], target), x, torch.randn(4, 8))
    result = run_programs(cut(capture_case(case, training=False), 2), case.model, leaves_of(case), KEY)
    assert torch.equal(result.outputs[0], x)
    assert torch.equal(result.outputs[1], case.model.layer.weight)
    assert torch.equal(result.outputs[3], x[0])
    trained = run_programs(cut(capture_case(case), 2), case.model, leaves_of(case), KEY)
    assert worst_error(trained.gradients, eager(case, KEY).gradients) <= 1e-6


def test_a_value_that_would_travel_backwards_is_refused() -> None:
    program = capture_case(build("chain"))
    apply_passes(program, [build_pass("label_chunks", chunks=2)])
    middle = next(n for n in program.ops() if not is_getitem(n) and n.meta.get("chunk_id") == 0)
    middle.meta["chunk_id"] = 1
    with pytest.raises(ProgramError, match="made too late"):
        split_programs(program)
