"""What a forward does outside of torch: draws of Python's or numpy's generators, and counting in attributes.

A program holds torch's ops alone. A branch on `random.random()` would be taken once and for ever, and a counter would
stand still, without a word. Tracing runs a forward more than once, so both can be seen: `Outside` looks at the
generators and at each module's plain attributes after every run, says what changed, and puts everything back.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from .checks import ModelError

_OWN = set(nn.Module().__dict__)
_PLAIN = (bool, int, float, str, type(None))
_MANY = (list, dict, set)


class Outside:
    """modules: (name, module) pairs. `begin` before each forward, `end` after it, `check` after all of them."""

    def __init__(self, model: nn.Module, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self.model = type(model).__name__
        self.modules = modules
        self.before = self._attributes()
        self.runs: list[dict[tuple[str, str], Any]] = []
        self.drew = ""

    def begin(self) -> None:
        self._states = random.getstate(), np.random.get_state(legacy=False)

    def end(self) -> None:
        python, numpy = self._states
        if random.getstate() != python:
            self.drew = "Python's random module"
            random.setstate(python)
        now: Any = np.random.get_state(legacy=False)
        if repr(now) != repr(numpy):
            self.drew = "numpy"
            np.random.set_state(numpy)
        self.runs.append(self._attributes())

    def put_back(self) -> None:
        """Numbers and the like that the runs have changed."""
        for name, module in self.modules:
            for attribute in list(module.__dict__):
                old = self.before.get((name, attribute))
                value = module.__dict__[attribute]
                if attribute in _OWN or not isinstance(value, (*_PLAIN, list)):
                    continue
                if isinstance(value, list):
                    if isinstance(old, _Length) and len(value) > old.count:
                        del value[old.count :]
                elif (name, attribute) in self.before and not isinstance(old, _Length):
                    module.__dict__[attribute] = old

    def check(self) -> None:
        """Raises ModelError for what a program would lose."""
        if self.drew:
            raise ModelError(
                f"the forward of {self.model} draws from {self.drew}: one draw would be kept for ever. Draw with torch "
                "(torch.rand) and choose with torch.where: such draws are keyed by micro-batch."
            )
        if len(self.runs) < 2:
            return
        former, latter = self.runs[-2:]
        for (name, attribute), value in latter.items():
            if former.get((name, attribute), value) != value:
                raise ModelError(
                    f"{name}.{attribute} changes with every forward: a program would keep what it was. Make it a "
                    "buffer and write into it in place, or change it outside of the forward and compile again."
                )

    def _attributes(self) -> dict[tuple[str, str], Any]:
        found: dict[tuple[str, str], Any] = {}
        for name, module in self.modules:
            for attribute, value in module.__dict__.items():
                if attribute in _OWN:
                    continue
                if isinstance(value, _PLAIN):
                    found[name, attribute] = value
                elif isinstance(value, _MANY):
                    found[name, attribute] = _Length(len(value))
        return found


class _Length:
    """How many a list, dict or set had."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Length) and other.count == self.count

    def __hash__(self) -> int:
        return hash(self.count)
