"""The few words that ranks exchange around the pipeline: a number's maximum, a text of the first rank.

Why so: whether to stop and where to write must be the same on every rank, and must neither wait behind the
pipeline's messages nor be mistaken for them. So they go through a process group of their own, on the CPU,
whatever the pipeline's device. One rank needs no group at all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from .config import ConfigError


class Ranks:
    """All ranks of a run. Making one is collective, and so is each of its methods. Needs torch.distributed
    to be initialised where there are several."""

    def __init__(self) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo") if several else None
        self.rank = dist.get_rank() if several else 0
        self.size = dist.get_world_size() if several else 1

    def maximum(self, number: int) -> int:
        """The greatest of all ranks' numbers."""
        if self._group is None:
            return number
        shared = torch.tensor([number])
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group)
        return int(shared)

    def from_first(self, make: Callable[[], str]) -> str:
        """What `make` returns on the first rank, where alone it is called. If it raises ConfigError, every
        rank does.
        """
        text, failed = "", False
        if self.rank == 0:
            try:
                text = make()
            except ConfigError as error:
                text, failed = str(error), True
        failed = bool(self.maximum(int(failed)))
        if self._group is not None:
            raw = bytearray(text.encode())
            raw.extend(bytes(self.maximum(len(raw)) - len(raw)))
            if raw:
                shared = torch.frombuffer(raw, dtype=torch.uint8)
                dist.broadcast(shared, 0, group=self._group)
            text = raw.decode()
        if failed:
            raise ConfigError(text)
        return text
