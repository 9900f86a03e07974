"""Bytes of the values alive on a rank, known from the plan alone.

Values that share memory (equal `memory`) are counted once, and freed with the last of them.
"""

from __future__ import annotations

from collections.abc import Hashable

Value = Hashable
Memory = Hashable


class Ledger:
    """Bytes alive, with values that share memory counted once."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        #: the most since `top_since` was last asked
        self._top = 0
        self._memory: dict[Value, Memory] = {}
        self._users: dict[Memory, int] = {}
        self._bytes: dict[Memory, int] = {}

    def add(self, value: Value, memory: Memory, nbytes: int) -> None:
        if value in self._memory:
            return
        self._memory[value] = memory
        self._users[memory] = self._users.get(memory, 0) + 1
        grown = max(nbytes - self._bytes.get(memory, 0), 0)
        self._bytes[memory] = self._bytes.get(memory, 0) + grown
        self.now += grown
        self.during(0)

    def share(self, value: Value, with_: Value) -> None:
        """Another name for the memory of a value that is there; it stays until both are dropped."""
        memory = self._memory.get(with_)
        if memory is not None and value not in self._memory:
            self.add(value, memory, self._bytes[memory])

    def drop(self, value: Value) -> None:
        memory = self._memory.pop(value, None)
        if memory is None:
            return
        self._users[memory] -= 1
        if not self._users[memory]:
            self.now -= self._bytes.pop(memory)
            del self._users[memory]

    def during(self, extra: int) -> None:
        self.peak = max(self.peak, self.now + extra)
        self._top = max(self._top, self.now + extra)

    def top_since(self) -> int:
        """The most bytes at any moment since this was last asked."""
        top, self._top = self._top, self.now
        return top
