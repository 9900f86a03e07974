"""Where the values of one micro-batch live while it goes through the tasks of a rank.

A rank has one root scope, for what outlives a micro-batch (weights, results), and one scope a micro-batch. A name that
a scope doesn't have is looked up in the root.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor


class Scope(MutableMapping[str, Any]):
    """Variables by name. index: of the micro-batch; −1: the root. step: how often it has been through the loop that
    it is in."""

    __slots__ = ("_values", "index", "root", "step")

    def __init__(self, index: int = -1, root: Scope | None = None) -> None:
        self.index = index
        self.step = 0
        self.root: Scope = self if root is None else root
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name in self._values:
            return self._values[name]
        if self.root is not self and name in self.root:
            return self.root[name]
        own = ", ".join(sorted(self._values)) or "nothing"
        where = "the root scope" if self.root is self else f"scope {self.index}"
        raise KeyError(f"{where} has no variable {name!r}; it has {own}")

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def keep_only(self, names: Collection[str]) -> None:
        """Frees all variables but these."""
        for name in [n for n in self._values if n not in names]:
            del self._values[name]

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that this scope's tensors lie in, memory that several share counted once. Looks into
        lists, tuples and dicts."""
        storages = {}
        for tensor in _tensors(self._values.values()):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
