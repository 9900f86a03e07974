"""Passes: named rewrites of a Program, applied in an order, each of which proves its output.

    @register_pass("my_pass")
    class MyPass(Pass):
        after = ("random_keys",)
        def __init__(self, limit: int = 3) -> None: ...
        def apply(self, program: Program) -> None: ...
        def check(self, program: Program) -> None: ...      # raises ProgramError

    apply_passes(program, [build_pass("my_pass", limit=2)])

The idea, a registry with checked options and stated conflicts, is that of PaddlePaddle's distributed passes.
"""

from __future__ import annotations

import difflib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from ..program.ir import Program, ProgramError


class Pass(ABC):
    """One rewrite. `after`: passes that must not come later; `conflicts`: passes that can't be in the same list."""

    name: ClassVar[str] = ""
    after: ClassVar[tuple[str, ...]] = ()
    conflicts: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def apply(self, program: Program) -> None:
        """Rewrites the program in place."""

    def check(self, program: Program) -> None:
        """Raises ProgramError unless the program is what this pass promises."""
        program.graph.lint()


_REGISTRY: dict[str, type[Pass]] = {}
P = TypeVar("P", bound=type[Pass])


def register_pass(name: str) -> Callable[[P], P]:
    """Class decorator: makes a pass known under `name`. A name can be taken once."""

    def register(cls: P) -> P:
        if name in _REGISTRY and _REGISTRY[name] is not cls:
            raise ValueError(
                f"a pass named {name!r} exists already ({_REGISTRY[name].__module__}); choose another name"
            )
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return register


def registered_passes() -> list[str]:
    """The names of all passes that are known now, sorted."""
    return sorted(_REGISTRY)


def build_pass(name: str, **options: Any) -> Pass:
    """The pass of that name with its options checked. Raises ValueError for an unknown name or option."""
    cls = _REGISTRY.get(name)
    if cls is None:
        close = difflib.get_close_matches(name, _REGISTRY, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"there is no pass {name!r}{hint} Known: {', '.join(registered_passes())}. Register your own with "
            "@register_pass."
        )
    known = list(inspect.signature(cls).parameters)
    for option in options:
        if option not in known:
            allowed = ", ".join(known) or "it has none"
            raise ValueError(f"pass {name!r} has no option {option!r} (options: {allowed})")
    try:
        return cls(**options)
    except TypeError as error:
        raise ValueError(f"pass {name!r}: {error}") from error


def check_order(passes: Sequence[Pass]) -> None:
    """Raises ValueError where two passes conflict, one comes twice, or one comes before what it must follow."""
    names = [p.name for p in passes]
    for i, p in enumerate(passes):
        if names.index(p.name) != i:
            raise ValueError(f"pass {p.name!r} is listed twice")
        for other in p.conflicts:
            if other in names:
                raise ValueError(f"passes {p.name!r} and {other!r} can't be used together; remove one")
        for other in p.after:
            if other in names[i + 1 :]:
                raise ValueError(f"pass {p.name!r} must come after {other!r}: order them so")


def apply_passes(program: Program, passes: Sequence[Pass]) -> None:
    """Applies the passes in order; each checks its own output. A ProgramError names the pass."""
    check_order(passes)
    for p in passes:
        try:
            p.apply(program)
            p.check(program)
        except ProgramError as error:
            raise ProgramError(f"pass {p.name!r}: {error}") from error
    program.graph_module.recompile()
