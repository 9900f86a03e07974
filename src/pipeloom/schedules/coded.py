"""Lists kept as integers: small and quick to walk when they have millions of items, decoded when looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, overload

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.int64]

T = TypeVar("T")


class CodedList(Sequence[T]):
    """The items that `decode` makes of `codes`. Equal to any sequence of the same items."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, codes: Codes, decode: Callable[[int], T]) -> None:
        self.codes = codes
        self._decode = decode

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> CodedList[T]: ...
    def __getitem__(self, index: int | slice) -> T | CodedList[T]:
        if isinstance(index, slice):
            return CodedList(self.codes[index], self._decode)
        return self._decode(int(self.codes[index]))

    def __iter__(self) -> Iterator[T]:
        return map(self._decode, self.codes.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __repr__(self) -> str:
        return f"[{' '.join(map(str, self))}]"
