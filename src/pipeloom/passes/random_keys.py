"""random_keys: every random draw becomes a pure function of (seed, step, micro-batch, place in the program).

A dropout mask must not depend on how the model is cut, on the order of jobs, or on recomputation. So each op that draws
random numbers is replaced by a keyed twin, `twin(key, index, …)`, which seeds the default generator from the
two and calls the op. It is an ordinary dataflow node: splitting, dead-code removal and recomputation need
nothing special. `index` counts the draws of the whole captured program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx as fx

from ..program import compat
from ..program.compat import GraphInput
from ..program.flops import costs_like
from ..program.ir import Program, ProgramError, where
from .base import Pass, register_pass

_MASK = (1 << 64) - 1
_LIBRARY: Any = torch.library.Library("pipeloom", "FRAGMENT")  # type: ignore[no-untyped-call]
_TWINS: dict[Any, Any] = {}


def mix(*numbers: int) -> int:
    """A 64-bit hash of integers (splitmix64's finaliser, folded over the numbers)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = ((state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9) & _MASK
        state ^= state >> 27
        state = (state * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def key_of(seed: int, step: int, micro_batch: int) -> torch.Tensor:
    """The key of one micro-batch's draws: 0-dim int64, on the CPU. micro_batch counts over all data-parallel
    replicas."""
    return torch.tensor(mix(seed, step, micro_batch) >> 1)  # 63 bits: fits a signed integer


def seed_draw(key: int, index: int, device: torch.device) -> None:
    """Seeds the default generator of a device for one draw."""
    seed = mix(key, index)
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        module = getattr(torch, device.type)
        at = device.index if device.index is not None else module.current_device()
        module.default_generators[at].manual_seed(seed)


@contextmanager
def preserved_generators(device: torch.device) -> Iterator[None]:
    """Puts the caller's random state back when it closes."""
    cpu = torch.default_generator.get_state()
    module = None if device.type == "cpu" else getattr(torch, device.type)
    other = None if module is None else module.get_rng_state(device)
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu)
        if module is not None:
            module.set_rng_state(other, device)


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers. Fused attention at dropout 0 doesn't."""
    if not compat.is_op(node) or torch.Tag.nondeterministic_seeded not in node.target.tags:  # type: ignore[union-attr]
        return False
    for position, argument in enumerate(compat.schema_of(node).arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = (
                node.args[position]
                if position < len(node.args)
                else node.kwargs.get(argument.name, argument.default_value)
            )
            return bool(given != 0)
    return True


def twin_of(op: Any) -> Any:
    """The keyed twin of an op: `twin(Tensor key, int index, *the op's own arguments)`."""
    if op in _TWINS:
        return _TWINS[op]
    name = op.name().removeprefix("aten::").replace("::", "_").replace(".", "_")
    signature = compat.signature_of(op)
    rest = signature[signature.index("(") + 1 :]
    separator = "" if rest.startswith(")") else ", "
    _LIBRARY.define(f"{name}(Tensor key, int index{separator}{rest}")

    def run(key: torch.Tensor, index: int, *args: Any, **kwargs: Any) -> Any:
        device = next((a.device for a in args if isinstance(a, torch.Tensor)), None) or torch.device(
            kwargs.get("device") or "cpu"
        )
        seed_draw(int(key), index, device)
        return op(*args, **kwargs)

    def fake(_key: torch.Tensor, _index: int, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pipeloom::{name}", _positional(fake), lib=_LIBRARY)
    _TWINS[op] = getattr(torch.ops.pipeloom, name).default
    costs_like(_TWINS[op], op, added=2)
    return _TWINS[op]


def _positional(fake: Callable[..., Any]) -> Callable[..., Any]:
    return lambda key, index, *args, **kwargs: fake(key, index, *args, **kwargs)


@register_pass("random_keys")
class RandomKeys(Pass):
    """Replaces every op that draws by its keyed twin and numbers the draws in program order."""

    def apply(self, program: Program) -> None:
        found = [n for n in program.ops() if draws(n)]
        if not found:
            return
        for node in found:
            if node.kwargs.get("generator") is not None:
                raise ProgramError(
                    f"{where(node)} draws from a generator of its own, which can't be keyed by micro-batch. "
                    "Drop generator=: every draw is keyed by (seed, step, micro-batch) already."
                )
            if compat.mutates(node):
                raise ProgramError(
                    f"{where(node)} draws in place, which can't be keyed; use the functional form"
                )
        last = next(n for n in reversed(program.graph.nodes) if n.op == "placeholder")
        with program.graph.inserting_after(last):
            key = program.graph.placeholder("random_key")
        key.meta["val"] = torch.zeros((), dtype=torch.int64)
        program.inputs[key] = GraphInput("key", "")
        for index, node in enumerate(found):
            node.target = twin_of(node.target)
            node.args = (key, index, *node.args)
        program.draws = len(found)

    def check(self, program: Program) -> None:
        super().check(program)
        left = [n for n in program.ops() if draws(n) and n.target not in _TWINS.values()]
        if left:
            raise ProgramError(f"{where(left[0])} still draws without a key")
