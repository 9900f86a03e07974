"""The registry of passes: names, options, order, conflicts, and a pass of the user's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from models import build
from pipeloom.passes import Pass, apply_passes, base, build_pass, register_pass, registered_passes
from pipeloom.program.capture import capture
from pipeloom.program.ir import Program, ProgramError

BUILT_IN = [
    "batch_means",
    "drop_clones",
    "gradient_merge",
    "label_chunks",
    "random_keys",
    "recompute",
    "split_fused_grads",
]


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """Passes that a test registers are forgotten afterwards."""
    before = dict(base._REGISTRY)
    yield
    base._REGISTRY.clear()
    base._REGISTRY.update(before)


def test_the_built_in_passes_are_registered() -> None:
    assert registered_passes() == BUILT_IN
    assert all(build_pass(name).name == name for name in BUILT_IN)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ValueError, match="there is no pass 'gradient_merg'; did you mean 'gradient_merge'"
    ) as error:
        build_pass("gradient_merg")
    assert "label_chunks, random_keys" in str(error.value)


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'label_chunks' has no option 'chunk' \(options: chunks, cuts, "):
        build_pass("label_chunks", chunk=2)
    with pytest.raises(ValueError, match=r"'random_keys' has no option 'seed' \(options: it has none\)"):
        build_pass("random_keys", seed=2)


def test_a_missing_option_is_refused() -> None:
    @register_pass("needs_limit")
    class NeedsLimit(Pass):
        def __init__(self, limit: int) -> None:
            self.limit = limit

        def apply(self, program: Program) -> None: ...

    assert build_pass("needs_limit", limit=3).limit == 3  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"pass 'needs_limit'.*limit"):
        build_pass("needs_limit")


@pytest.fixture(scope="module")
def program() -> Program:
    case = build("chain_dropout")
    return capture(case.model, case.loss_fn, example=case.example)


def test_order_and_repetition_are_checked_before_anything_is_applied(program: Program) -> None:
    merge, keys = build_pass("gradient_merge"), build_pass("random_keys")
    with pytest.raises(ValueError, match="'gradient_merge' must come after 'random_keys'"):
        apply_passes(program, [merge, keys])
    with pytest.raises(ValueError, match="'random_keys' is listed twice"):
        apply_passes(program, [keys, keys])
    assert program.draws == 0
    assert not program.slots()


def test_conflicting_passes_are_refused(program: Program) -> None:
    @register_pass("no_keys")
    class NoKeys(Pass):
        conflicts = ("random_keys",)

        def apply(self, program: Program) -> None: ...

    with pytest.raises(ValueError, match="'no_keys' and 'random_keys' can't be used together"):
        apply_passes(program, [build_pass("random_keys"), NoKeys()])
    apply_passes(program, [NoKeys()])


def test_a_name_can_be_taken_once() -> None:
    with pytest.raises(
        ValueError, match=r"a pass named 'recompute' exists already \(pipeloom\.passes\.recompute\)"
    ):

        @register_pass("recompute")
        class Mine(Pass):
            def apply(self, program: Program) -> None: ...


def test_a_pass_of_the_users_own_runs_and_its_check_names_it(program: Program) -> None:
    @register_pass("count_ops")
    class CountOps(Pass):
        """Counts the ops; promises at most `limit`."""

        def __init__(self, limit: int = 10_000) -> None:
            self.limit, self.count = limit, 0

        def apply(self, program: Program) -> None:
            self.count = len(program.ops())

        def check(self, program: Program) -> None:
            super().check(program)
            if self.count > self.limit:
                raise ProgramError(f"{self.count} ops")

    counting = build_pass("count_ops")
    apply_passes(program, [counting])
    assert counting.count == len(program.ops())  # type: ignore[attr-defined]
    with pytest.raises(ProgramError, match=r"pass 'count_ops': \d+ ops"):
        apply_passes(program, [build_pass("count_ops", limit=1)])


def test_the_default_check_finds_a_broken_graph() -> None:
    @register_pass("breaks")
    class Breaks(Pass):
        def apply(self, program: Program) -> None:
            first, last = program.ops()[0], program.ops()[-1]
            first.args = (last, *first.args[1:])

    case = build("chain")
    fresh = capture(case.model, case.loss_fn, example=case.example)
    with pytest.raises(RuntimeError, match="before it has been defined"):
        apply_passes(fresh, [Breaks()])
