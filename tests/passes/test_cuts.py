"""Where the model is cut: by name, by expression, or balanced by cost."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from models import Case, build, squares
from oracle import capture_case, prepared
from pipeloom.passes.cost_model import op_seconds
from pipeloom.passes.cuts import (
    balanced_cuts,
    choose_cuts,
    forward_order,
    replicated,
)
from pipeloom.passes.pieces import crossing_bytes, pieces_of
from pipeloom.program.annotations import module_of
from pipeloom.program.ir import Program, ProgramError


def modules_at(program: Program, chunks: int, cuts: object) -> list[str]:
    """The module of the first op of each chunk but the first."""
    free = replicated(program)
    order = forward_order(program, free)
    positions = choose_cuts(program, chunks, cuts, free)  # type: ignore[arg-type]
    assert positions == sorted(set(positions))
    return [module_of(order[p]) for p in positions]


def test_names_begin_chunks() -> None:
    program = prepared("gpt")[1]
    assert modules_at(program, 3, ["layers.1", "head"]) == ["layers.1.norm1", "head"]


def test_an_expression_gives_places_to_choose_from() -> None:
    program = prepared("gpt")[1]
    assert modules_at(program, 3, r"layers\.\d+|head") == ["layers.1.norm1", "head"]
    assert modules_at(program, 2, r"layers\.1") == ["layers.1.norm1"]


def test_one_chunk_is_not_cut() -> None:
    program = prepared("chain")[1]
    assert modules_at(program, 1, None) == []
    assert modules_at(program, 1, r"layers\.\d+") == []


@pytest.mark.parametrize(
    ("chunks", "cuts", "says"),
    [
        (1, ["layers.1"], r"cuts names 1 module\(s\), but there is one chunk"),
        (3, ["layers.1"], r"cuts names 1 module\(s\), but 3 chunks need 2"),
        (
            2,
            ["layer.1"],
            r"no module of that name runs an op in the forward\. Some that do: layers\.0, dropout, layers\.1",
        ),
        (3, ["layers.2", "layers.1"], r"the cut at 'layers\.1' leaves the chunk before it empty"),
        (3, ["layers.1", "layers.1"], r"the cut at 'layers\.1' leaves the chunk before it empty"),
        (2, ["layers.0"], r"the cut at 'layers\.0' leaves the chunk before it empty"),
        (3, r"layers\.[12", r"is no regular expression"),
        (4, r"layers\.1", r"gives 1 places to cut \(layers\.1\), but 4 chunks need 3"),
        (2, r"nothing", r"gives 0 places to cut \(no module that runs an op\), but 2 chunks need 1"),
        (500, None, r"too few for 500 chunks.*lower pp_degree or vpp_degree"),
    ],
)
def test_cuts_that_can_not_be_made(chunks: int, cuts: object, says: str) -> None:
    with pytest.raises(ProgramError, match=says):
        modules_at(prepared("chain")[1], chunks, cuts)


def test_a_layout_counts_layers() -> None:
    """Of the model's list of blocks; what comes before the first goes to the first chunk, what follows to the last."""
    program = prepared("gpt")[1]
    assert modules_at(program, 2, "1-1") == ["layers.1.norm1"]
    assert modules_at(program, 3, "1,1,0") == ["layers.1.norm1", "norm"]
    assert modules_at(program, 3, "0|1|1") == ["layers.0.norm1", "layers.1.norm1"]
    assert modules_at(program, 1, "2") == []


def test_a_layout_counts_named_blocks_too() -> None:
    """A ModuleDict of blocks that are alike; a block's own parts, which are named as well, are no list of layers."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = {f"b{i}": nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for i in range(3)}
            self.stack = nn.ModuleDict(block)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.stack.values():
                x = block(x)
            return x

    program = capture_case(Case(Named(), squares, torch.Size([2, 4]), torch.Size([2, 4])))
    assert modules_at(program, 2, "1-2") == ["stack.b1.0"]


@pytest.mark.parametrize(
    ("model", "chunks", "cuts", "says"),
    [
        ("gpt", 3, "1-1", "gives 2 counts of layers, but there are 3 chunks"),
        ("gpt", 2, "1-2", "counts 3 layers, but 'layers' has 2: make the counts add up"),
        ("gpt", 3, "1-0-1", "leaves chunk 1 without an op: only the first chunk"),
    ],
)
def test_layouts_that_do_not_fit(model: str, chunks: int, cuts: str, says: str) -> None:
    with pytest.raises(ProgramError, match=says):
        modules_at(prepared(model)[1], chunks, cuts)


def test_a_layout_needs_repeated_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    program = capture_case(Case(model, squares, torch.Size([2, 4]), torch.Size([2, 4])))
    with pytest.raises(
        ProgramError, match="counts layers, but the model has no ModuleList, Sequential or ModuleDict"
    ):
        modules_at(program, 2, "1-1")


def test_automatic_cuts_balance_the_cost() -> None:
    """Layers of very different width: equal numbers of layers would be far from equal costs."""
    widths = [512, 512, 512, 32, 32, 32, 32, 32, 32]
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
    case = Case(model, squares, torch.Size([64, 512]), torch.Size([64, 32]))
    program = capture_case(case)
    free = replicated(program)
    order = forward_order(program, free)
    costs = pieces_of(program, order, []).seconds()
    (position,) = choose_cuts(program, 2, None, free)
    best = min(max(sum(costs[:p]), sum(costs[p:])) for p in range(1, len(order)))
    assert max(sum(costs[:position]), sum(costs[position:])) <= best * 1.1
    assert module_of(order[position]) == "1"


def test_among_equals_the_fewest_bytes_cross() -> None:
    """Narrow waists between wide layers: each automatic cut is at a waist."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 8)) for _ in range(4)))
    case = Case(model, squares, torch.Size([64, 8]), torch.Size([64, 8]))
    program = capture_case(case)
    free = replicated(program)
    order = forward_order(program, free)
    bytes_at = crossing_bytes(order)
    for chunks in (2, 4):
        positions = choose_cuts(program, chunks, None, free)
        assert [bytes_at[p] for p in positions] == [64 * 8 * 4] * (chunks - 1)


def test_bytes_over_a_cut_count_skips() -> None:
    program = prepared("skip")[1]
    order = forward_order(program, replicated(program))
    bytes_at = crossing_bytes(order)
    assert bytes_at[0] == bytes_at[len(order)] == 0
    skip = 4 * 4 * 6 * 6 * 8  # (4, 4, 6, 6) in float64: the first layer's output, until it is read again
    middle = next(i for i, n in enumerate(order) if module_of(n) == "middle")
    last = next(i for i, n in enumerate(order) if module_of(n) == "last")
    assert all(b >= skip for b in bytes_at[middle : last - 1])


def test_costs_include_the_backward() -> None:
    program = prepared("chain")[1]
    order = forward_order(program, replicated(program))
    costs = pieces_of(program, order, []).seconds()
    product = next(i for i, n in enumerate(order) if n.target is torch.ops.aten.addmm.default)
    assert costs[product] > 1.5 * op_seconds(order[product])
    backward = sum(op_seconds(n) for n in program.live() if n.op == "call_function")
    assert sum(costs) <= backward * (1 + 1e-9)


def test_many_places_are_thinned_out_but_the_choice_stays_good() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(60)))
    program = capture_case(Case(model, squares, torch.Size([4, 8]), torch.Size([4, 8])))
    order = forward_order(program, replicated(program))
    positions = balanced_cuts(program, order, 4, list(range(1, len(order))))
    costs = pieces_of(program, order, []).seconds()
    parts = [sum(costs[a:b]) for a, b in zip([0, *positions], [*positions, len(order)], strict=True)]
    assert max(parts) <= 1.15 * sum(costs) / 4


def test_batch_statistics_stay_in_one_chunk() -> None:
    case = build("batch_norm")
    program = capture_case(case)
    free = replicated(program)
    order = forward_order(program, free)
    positions = choose_cuts(program, 5, None, free)
    homes: dict[str, set[int]] = {}
    for i, node in enumerate(order):
        if "batch_norm" in str(node.target) or "num_batches" in str(node.all_input_nodes):
            homes.setdefault(module_of(node), set()).add(sum(p <= i for p in positions))
    assert homes
    assert all(len(chunks) == 1 for chunks in homes.values())
