"""Equal layers share one program; anything that differs doesn't."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models import GPT, Case, build, cross_entropy
from oracle import capture_case, cut, prepared
from pipeloom.passes.structure import structure_of
from pipeloom.program.subprogram import ProgramSet


def distinct(programs: ProgramSet) -> int:
    return len({p.structure for p in programs.programs.values() if not p.empty})


def test_equal_layers_share_code() -> None:
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    case = Case(GPT(layers=4), cross_entropy, tokens, tokens)
    programs = cut(capture_case(case), 6, cuts=["layers.0", "layers.1", "layers.2", "layers.3", "norm"])
    for kind in "FBWX":
        twins = [programs.programs[kind, c] for c in (1, 2, 3, 4)]  # type: ignore[index]
        assert len({p.structure for p in twins}) == 1
        assert all(p.graph is twins[0].graph for p in twins)
        assert len({tuple(p.outputs) for p in twins if p.outputs}) == (
            0 if kind in "WX" and not twins[0].outputs else 4
        )
    assert (
        distinct(programs) == 3 * 4 - 2
    )  # embedding, layer, head; the embedding has no B, and its W is its X


def test_other_shapes_and_constants_are_other_structures() -> None:
    def forward(width: int, scale: float) -> str:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(width, width)

            def forward(self, x: Tensor) -> Tensor:
                return self.layer(x) * scale

        case = Case(Net(), lambda o, _: o.sum(), torch.zeros(2, width), None)
        return cut(capture_case(case), 1).programs["F", 0].structure

    assert forward(4, 2.0) == forward(4, 2.0)
    assert len({forward(4, 2.0), forward(4, 3.0), forward(5, 2.0)}) == 3


def test_a_structure_does_not_depend_on_names() -> None:
    programs = cut(prepared("chain")[1], 4, cuts=["layers.1", "layers.2", "layers.3"])
    first, second = (programs.programs["F", c] for c in (1, 2))
    assert first.structure == second.structure == structure_of(first.graph)
    assert first.outputs != second.outputs
    assert [i.name for i in first.inputs] != [i.name for i in second.inputs]


def test_constants_count_by_content() -> None:
    """Every rank captures for itself, and must come to the same structures."""

    def structures(scale: float) -> list[str]:
        weights = torch.full((8,), scale)
        case = build("chain")
        case.loss_fn = lambda output, target: ((output - target) * weights).square().mean()
        programs = cut(capture_case(case), 2, cuts=["layers.2"])
        return [programs.programs["F", c].structure for c in (0, 1)]

    assert structures(2.0) == structures(2.0)
    assert structures(2.0)[0] == structures(3.0)[0]
    assert structures(2.0)[1] != structures(3.0)[1]
