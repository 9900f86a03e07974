"""What a value looks like on the wire.

A value has a shape and strides; the programs on both sides were captured with them, and a view op in the
receiver's program may rely on them. Transports move contiguous tensors. So each value is sent as a flat
tensor:

- dense memory in any order of dimensions, expanded (stride 0) or overlapping: the memory that the value spans
  is sent as it lies, without a copy, and the strides are put back over what arrives;
- memory with gaps (a slice of something larger): the elements are copied together, and copied apart again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..program.subprogram import ValueInfo


@dataclass(frozen=True)
class Wire:
    """How one value travels. `count`: number of elements sent, as a tensor of shape (count,)."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    count: int
    #: the shape of the elements copied together, where the memory has gaps; else None
    gathered: tuple[int, ...] | None

    @staticmethod
    def of(value: ValueInfo) -> Wire:
        shape, stride = tuple(value.shape), tuple(value.stride)
        if 0 in shape:
            return Wire(shape, stride, value.dtype, 0, None)
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        distinct = tuple(1 if step == 0 else size for size, step in zip(shape, stride, strict=True))
        if extent <= prod(distinct) or _overlaps(shape, stride):
            return Wire(shape, stride, value.dtype, extent, None)
        return Wire(shape, stride, value.dtype, prod(distinct), distinct)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def span_bytes(self) -> int:
        """Bytes that the value takes where it arrives, gaps included."""
        if not self.count:
            return 0
        return (
            1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        ) * self.dtype.itemsize

    def pack(self, tensor: Tensor) -> Tensor:
        """A flat contiguous tensor of `count` elements: a view of `tensor` where that is possible."""
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            raise ValueError(
                f"a value of shape {tuple(tensor.shape)}, {tensor.dtype} came out of a program that was "
                f"captured with {self.shape}, {self.dtype}"
            )
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if self.gathered is not None:
            return self._narrow(tensor).contiguous().view(-1)
        if tensor.stride() != self.stride:
            tensor = self._restride(tensor)
        return tensor.as_strided((self.count,), (1,), tensor.storage_offset())

    def unpack(self, flat: Tensor) -> Tensor:
        """The value, with exactly the captured strides, from what `pack` made (its memory is reused)."""
        if self.count == 0:
            return flat.new_empty(self.shape).as_strided(self.shape, self.stride)
        if self.gathered is not None:
            spread = torch.empty_strided(self.gathered, self.stride, dtype=self.dtype, device=flat.device)
            flat = spread.copy_(flat.view(self.gathered))
        return flat.as_strided(self.shape, self.stride)

    def _narrow(self, tensor: Tensor) -> Tensor:
        """One element of each expanded dimension."""
        for dim, (size, step) in enumerate(zip(self.shape, self.stride, strict=True)):
            if step == 0 and size > 1:
                tensor = tensor.narrow(dim, 0, 1)
        return tensor

    def _restride(self, tensor: Tensor) -> Tensor:
        """The same values under the captured strides (a kernel may lay its result out otherwise)."""
        base = torch.empty((self.count,), dtype=self.dtype, device=tensor.device)
        if self.count:
            part = self._narrow(tensor)
            base.as_strided(part.shape, self.stride).copy_(part)
        return base.as_strided(self.shape, self.stride)


def _overlaps(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether two indices (other than along expanded dimensions) may name one element."""
    reach = 0
    for step, size in sorted(
        (step, size) for size, step in zip(shape, stride, strict=True) if step and size > 1
    ):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False
