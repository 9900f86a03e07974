"""Estimated bytes against bytes that were measured while the program ran."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models import GPT, Case, Chain, cross_entropy, squares
from oracle import capture_case, cut, leaves_of, run_programs
from pipeloom.passes.random_keys import key_of
from pipeloom.program.subprogram import ProgramSet


class Watch(TorchDispatchMode):
    """Bytes of the storages that ops have made, or that were given to it, and that some tensor still holds."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.held: dict[int, tuple[int, list[weakref.ref[Tensor]]]] = {}
        self.outside: set[int] = set()
        for tensor in given:
            self.hold(tensor)
        self.before = self.peak = self.live()

    def hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.outside:
            self.held.setdefault(storage.data_ptr(), (storage.nbytes(), []))[1].append(weakref.ref(tensor))

    def live(self) -> int:
        self.held = {k: v for k, v in self.held.items() if any(t() is not None for t in v[1])}
        return sum(size for size, _ in self.held.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.live()
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.hold(tensor)
        self.peak = max(self.peak, self.live())
        return result


def measured(programs: ProgramSet, case: Case, kind: str) -> tuple[int, int]:
    """(bytes of the values that are given up to a program, the most bytes while it runs), parameters and batch
    aside."""
    key = key_of(0, 0, 0)
    order = {"F": [], "X": [("F", 0)], "W": [("F", 0)]}[kind]
    scope = dict(
        run_programs(programs, case.model, leaves_of(case), key, order=[*order] or [("F", 0)]).scopes[0]
    )
    program = programs.programs[kind, 0]  # type: ignore[index]
    parameters, leaves = dict(case.model.named_parameters()), leaves_of(case)
    slots = {s.name: torch.zeros(s.shape, dtype=s.dtype) for s in programs.slots}
    outside = [*parameters.values(), *leaves, *slots.values()]
    named = {"param": parameters, "acc": slots, "value": scope, "tangent": {"": torch.ones(())}}
    given = [
        leaves[int(i.name)] if i.kind == "input" else named[i.kind][i.name].detach() for i in program.inputs
    ]
    mine = [g for g, i in zip(given, program.inputs, strict=True) if i.kind == "value"]
    watch = Watch(mine)
    watch.outside = {t.untyped_storage().data_ptr() for t in outside}
    scope.clear()
    named.clear()
    del mine
    with torch.no_grad(), watch:
        result = program.call(given)
    del result
    return watch.before, watch.peak


def cases() -> dict[str, Case]:
    chain = Chain(3, width=256)
    gpt = GPT(2, width=64, heads=2)
    tokens = torch.randint(0, 11, (16, 6))
    return {
        "chain": Case(chain, squares, torch.randn(512, 256), torch.randn(512, 256)),
        "gpt": Case(gpt, cross_entropy, tokens, tokens),
    }


@pytest.mark.parametrize("name", ["chain", "gpt"])
def test_the_estimate_is_what_is_measured(name: str) -> None:
    case = cases()[name]
    programs = cut(capture_case(case), 1)
    for kind in ("F", "X"):
        before, peak = measured(programs, case, kind)
        assert before > 0 or kind == "F"
        assert peak > before
        estimate = programs.programs[kind, 0].peak_bytes  # type: ignore[index]
        assert before + estimate == pytest.approx(peak, rel=0.01), kind
