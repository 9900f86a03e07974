"""Gradients go into their accumulators in place, by the cheapest op, and inputs are freed at their last use."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from models import WIDTH, Case, squares
from oracle import capture_case, cut, eager, leaves_of, prepared, run_programs, worst_error
from pipeloom.passes.random_keys import key_of
from pipeloom.program.subprogram import ProgramSet

KEY = key_of(0, 0, 0)


def counts(programs: ProgramSet, kind: str = "X", chunk: int = 0) -> Counter[str]:
    graph = programs.programs[kind, chunk].graph.graph  # type: ignore[index]
    return Counter(str(n.target) for n in graph.nodes if n.op == "call_function")


def test_matrix_products_are_added_by_addmm() -> None:
    program = prepared("chain")[1]
    found = counts(cut(program, 1))
    assert found["aten.addmm_.default"] == 4
    assert found["aten.add_.Tensor"] == 4  # the biases
    assert found["aten.mm.default"] == 3  # gradients of inputs


def test_an_embedding_is_added_by_rows() -> None:
    found = counts(cut(prepared("tied")[1], 1))
    assert found["aten.index_add_.default"] == 1
    assert found["aten.embedding_dense_backward.default"] == 0


def test_a_padding_row_or_a_scale_by_frequency_keeps_the_dense_gradient() -> None:
    tokens = torch.tensor([0, 1, 1, 2])
    for options in ({"padding_idx": 0}, {"scale_grad_by_freq": True}):
        model = nn.Sequential(nn.Embedding(5, WIDTH, **options), nn.Linear(WIDTH, WIDTH))
        case = Case(model, squares, tokens, torch.randn(4, WIDTH)).double()
        programs = cut(capture_case(case), 1)
        assert counts(programs)["aten.embedding_dense_backward.default"] == 1
        result = run_programs(programs, model, leaves_of(case), KEY)
        assert worst_error(result.gradients, eager(case, KEY).gradients) <= 1e-10


class _Both(nn.Module):
    """A product whose result is the gradient of one weight and, transposed, of another; and a weight that is used
    turned."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.turned = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.alone = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ (self.plain + self.turned.t())) @ self.alone


def test_a_gradient_of_two_weights_is_added_to_both() -> None:
    case = Case(_Both(), squares, torch.randn(4, WIDTH), torch.randn(4, WIDTH)).double()
    programs = cut(capture_case(case), 1)
    for split in (True, False):
        result = run_programs(programs, case.model, leaves_of(case), KEY, split=split)
        assert worst_error(result.gradients, eager(case, KEY).gradients) <= 1e-10


def test_a_call_consumes_its_list() -> None:
    case, program = prepared("chain")
    forward = cut(program, 1).programs["F", 0]
    parameters = dict(case.model.named_parameters())
    leaves = leaves_of(case)
    given = [
        parameters[i.name].detach() if i.kind == "param" else leaves[int(i.name)] for i in forward.inputs
    ]
    result = forward.call(given)
    assert given == []
    assert len(result) == len(forward.outputs)


def test_constants_travel_with_the_program() -> None:
    programs = cut(prepared("constant")[1], 2)
    constants = [n for n in programs.programs["F", 1].graph.graph.nodes if n.op == "get_attr"]
    assert len(constants) == 1
