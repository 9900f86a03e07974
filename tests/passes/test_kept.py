"""What waits between B and W: never more than without the minimum cut, and the right ops move."""

from __future__ import annotations

import importlib

import pytest
import torch

from oracle import cut, prepared
from pipeloom.program.flops import flops_of
from pipeloom.program.subprogram import ProgramSet


def waiting(programs: ProgramSet, chunk: int) -> int:
    """Bytes that W reads and that nobody else keeps: each storage once, parameters and the batch aside."""
    read = {i.name for i in programs.programs["W", chunk].inputs if i.kind == "value"}
    return sum({programs.values[n].storage: programs.values[n].nbytes for n in read}.values())


def without_moving(monkeypatch: pytest.MonkeyPatch, name: str) -> ProgramSet:
    splitter = importlib.import_module("pipeloom.passes.split_programs")
    with monkeypatch.context() as patch:
        patch.setattr(splitter, "cheapest_boundary", lambda first, *_: first)
        return cut(prepared(name)[1], 3)


@pytest.mark.parametrize("name", ["gpt", "skip", "scaled", "batch_norm", "outputs", "chain", "gpt_autocast"])
def test_no_more_waits_than_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = without_moving(monkeypatch, name)
    programs = cut(prepared(name)[1], 3)
    for chunk in (1, 2):
        assert waiting(programs, chunk) <= waiting(plain, chunk)
    if name in ("gpt", "scaled"):
        assert sum(waiting(programs, c) for c in (1, 2)) < sum(waiting(plain, c) for c in (1, 2))


def targets(programs: ProgramSet, kind: str, chunk: int) -> list[str]:
    return [str(n.target) for n in programs.programs[kind, chunk].graph.graph.nodes]  # type: ignore[index]


def test_the_vectors_of_a_layer_norm_are_made_in_B() -> None:
    programs = cut(prepared("gpt")[1], 2, cuts=["layers.1"])
    norms = "aten.native_layer_norm_backward.default"
    # two of the layer and the last one: for the input, and for the weight
    assert targets(programs, "B", 1).count(norms) == 6
    assert norms not in targets(programs, "W", 1)


def test_products_stay_in_W() -> None:
    programs = cut(prepared("gpt")[1], 2, cuts=["layers.1"])
    weights = [s for s in programs.slots if s.chunk == 1 and len(s.shape) == 2]
    assert targets(programs, "W", 1).count("aten.addmm_.default") == len(weights) == 5
    plain_products = [n for n in programs.programs["B", 1].graph.graph.nodes if flops_of(n) > 0]
    assert len(plain_products) == 6  # one a product of the forward, and the attention's own


def test_a_moved_gradient_that_is_a_view_reaches_W() -> None:
    """x * scale: the scale's gradient is a view of a sum; the sum is what B hands on."""
    programs = cut(prepared("scaled")[1], 3)
    for chunk in (1, 2):
        made = set(programs.programs["B", chunk].outputs)
        vectors = [n for n in made if programs.values[n].nbytes == 8 * 8]
        assert vectors
        assert torch.float64 in {programs.values[n].dtype for n in vectors}
