"""Data-parallel replicas: ranks that hold the same stage of a model, each in a pipeline with a shard of the batch.

What they do together, each of them in the same order (collectives are matched by their order alone):

    gather      a few numbers of each: samples and micro-batches of a step, total weights, losses
    reduce      a chunk's flat gradients, summed in place beside later jobs, once the chunk's last W is done
    broadcast   replica 0's values: the weights that training begins with, and buffers at the end of a step

Each starts at once and gives something to wait for. The sum of `reduce` has the same bits on every replica, so that
whatever follows from it (norm, clipping, the loss scaler's decision, the update) is the same without a further word.
Buckets that are reduced while the backward goes on: PyTorch DDP (Li et al., 2020); here a bucket is a chunk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic, perf_counter
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from . import tags
from .errors import TransferError, describe
from .stepping import Work, arrive, start_exchange
from .transport import MemoryTransport, Receive, Transport


class Pending(Receive, Protocol):
    """A collective under way. `wait` gives its result; finished: perf_counter when the result was there."""

    @property
    def finished(self) -> float: ...


class Replicas(Protocol):
    """One rank's end of what it shares with its replicas. index: which replica this is, of `size`."""

    @property
    def index(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, tensor: Tensor) -> Pending:
        """Every replica's tensor: shape (size, *tensor.shape). Shape and dtype are the same on all."""
        ...

    def reduce(self, tensor: Tensor) -> Pending:
        """The sum over replicas, into `tensor`, which nobody may touch until then. Contiguous."""
        ...

    def broadcast(self, tensor: Tensor) -> Pending:
        """Replica 0's values, into `tensor`."""
        ...

    def abort(self) -> None:
        """Close the connections at once."""
        ...

    def close(self) -> None: ...


def tell(replicas: Replicas, text: str) -> Work[str]:
    """Replica 0's text, on every replica of this stage."""
    if replicas.size == 1:
        return text
    data = text.encode()
    lengths = yield from arrive(replicas.gather(torch.tensor([len(data)])))
    told = torch.zeros(int(lengths[0, 0]), dtype=torch.uint8)
    if replicas.index == 0:
        told = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    told = yield from arrive(replicas.broadcast(told))
    return bytes(told.tolist()).decode()


class _Done:
    """A collective of one."""

    peer = 0

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self.finished = perf_counter()

    def ready(self) -> bool:
        return True

    def wait(self) -> Tensor:
        return self._value


class Alone:
    """The only replica."""

    index = 0
    size = 1

    def gather(self, tensor: Tensor) -> Pending:
        return _Done(tensor[None])

    def reduce(self, tensor: Tensor) -> Pending:
        return _Done(tensor)

    def broadcast(self, tensor: Tensor) -> Pending:
        return _Done(tensor)

    def abort(self) -> None:
        """There are no connections."""

    def close(self) -> None:
        """There are no connections."""


class _MemoryPending:
    """A collective of replicas in one process: every replica's tensor, sent to all."""

    def __init__(
        self, transport: Transport, what: str, tensor: Tensor, receives: dict[int, Receive], total: bool
    ) -> None:
        self._transport = transport
        self._what = what
        self._tensor = tensor
        self._receives = receives
        self._total = total
        self._value: Tensor | None = None
        self.finished = 0.0

    @property
    def peer(self) -> int:
        return next((r.peer for r in self._receives.values() if not r.ready()), self._transport.rank)

    def ready(self) -> bool:
        return self._value is not None or all(r.ready() for r in self._receives.values())

    def wait(self) -> Tensor:
        if self._value is None:
            mine = self._transport.rank
            parts = [
                self._tensor if r == mine else self._receives[r].wait() for r in range(self._transport.size)
            ]
            self._value = torch.stack(parts)
            if self._total:
                self._value = self._tensor.copy_(in_turn(self._value))
            self.finished = perf_counter()
        return self._value

    def __str__(self) -> str:
        return f"{self._what} with the other replicas of its stage"


def in_turn(parts: Tensor) -> Tensor:
    """The sum along dimension 0, from the first to the last."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class MemoryReplicas:
    """Replicas in one process. transport: this replica's end of a group of all replicas of its stage."""

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport
        self.index = transport.rank
        self.size = transport.size

    @staticmethod
    def group(size: int, numbers: Sequence[int]) -> list[Replicas]:
        """The ends of all replicas of a stage; numbers: what messages call their ranks."""
        if size == 1:
            return [Alone()]
        return [MemoryReplicas(transport) for transport in MemoryTransport.group(size, numbers)]

    def gather(self, tensor: Tensor) -> Pending:
        return self._start("gathering", tags.GATHER, tensor, total=False)

    def reduce(self, tensor: Tensor) -> Pending:
        return self._start("reducing gradients", tags.REDUCE, tensor, total=True)

    def broadcast(self, tensor: Tensor) -> Pending:
        receives: dict[int, Receive] = {}
        if self.index:
            receives[0] = self._transport.post(0, "control", tags.BROADCAST, tensor.shape, tensor.dtype)
            return _MemoryBroadcast(tensor, receives[0])
        for peer in range(1, self.size):
            self._transport.send(peer, "control", tags.BROADCAST, tensor)
        return _Done(tensor)

    def abort(self) -> None:
        self._transport.abort()

    def close(self) -> None:
        self._transport.close()

    def _start(self, what: str, tag: int, tensor: Tensor, *, total: bool) -> Pending:
        receives = start_exchange(self._transport, tag, tensor, [tuple(tensor.shape)] * self.size)
        return _MemoryPending(self._transport, what, tensor, receives, total)


class _MemoryBroadcast:
    def __init__(self, tensor: Tensor, receive: Receive) -> None:
        self._tensor = tensor
        self._receive = receive
        self.finished = 0.0

    @property
    def peer(self) -> int:
        return self._receive.peer

    def ready(self) -> bool:
        return self._receive.ready()

    def wait(self) -> Tensor:
        if not self.finished:
            self._tensor.copy_(self._receive.wait())
            self.finished = perf_counter()
        return self._tensor

    def __str__(self) -> str:
        return "a broadcast from replica 0 of its stage"


class _DistributedPending:
    def __init__(
        self, owner: DistributedReplicas, number: int, what: str, result: Callable[[], Tensor]
    ) -> None:
        self._owner = owner
        self._number: int | None = number
        self._what = what
        self._result = result
        self.finished = 0.0

    @property
    def peer(self) -> int:
        return self._owner.index

    def ready(self) -> bool:
        return True

    def wait(self) -> Tensor:
        if self._number is not None:
            self.finished = self._owner.wait(self._number, self._what)
            self._number = None
            value = self._result()
            self._result = lambda: value
        return self._result()

    def __str__(self) -> str:
        return f"{self._what} with the other replicas of its stage"


class DistributedReplicas:
    """Replicas over a process group that holds exactly the ranks of one stage, in replica order.

    Owns the group, as DistributedTransport does its own, and keeps each Work for the same reason. numbers: what errors
    call the group's ranks. device: where the backend wants its tensors. timeout: seconds that one wait may take.
    """

    def __init__(
        self, group: dist.ProcessGroup, numbers: Sequence[int], device: torch.device, timeout: float
    ) -> None:
        self.index = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group: dist.ProcessGroup | None = group
        self._numbers = tuple(numbers)
        self._device = device
        self._timeout = timeout
        self._works: dict[int, dist.Work] = {}
        self._done: dict[int, float] = {}
        self._started = 0

    def gather(self, tensor: Tensor) -> Pending:
        mine = tensor.to(self._device)
        parts = [torch.empty_like(mine) for _ in range(self.size)]

        def result() -> Tensor:
            return torch.stack(parts).to(tensor.device)

        return self._start("gathering", lambda g: dist.all_gather(parts, mine, g, async_op=True), result)

    def reduce(self, tensor: Tensor) -> Pending:
        return self._start(
            "reducing gradients", lambda g: dist.all_reduce(tensor, group=g, async_op=True), lambda: tensor
        )

    def broadcast(self, tensor: Tensor) -> Pending:
        there = tensor.to(self._device).contiguous()
        data = there.view(-1).view(torch.uint8)  # whatever the dtype: not every backend knows them all

        def result() -> Tensor:
            return tensor if there is tensor else tensor.copy_(there)

        if not data.numel():
            return _Done(tensor)
        return self._start(
            "a broadcast", lambda g: dist.broadcast(data, group=g, group_src=0, async_op=True), result
        )

    def wait(self, number: int, what: str) -> float:
        """Wait for one collective; when its result was there. Raises TransferError."""
        work = self._works.pop(number, None)
        if work is None:
            raise self._error(what, "the connections were closed")
        began = monotonic()
        try:
            work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            late = monotonic() - began >= 0.9 * self._timeout
            reason = f"nothing moved for {self._timeout:g} s (the time-out)" if late else describe(error)
            raise self._error(what, reason, late) from error
        finally:
            del work  # or a traceback would keep the sockets open
        return self._done.pop(number, perf_counter())

    def abort(self) -> None:
        self._works.clear()
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError, ValueError):  # already destroyed
                dist.destroy_process_group(group)

    def close(self) -> None:
        self.abort()

    def _start(
        self,
        what: str,
        begin: Callable[[dist.ProcessGroup], dist.Work | None],
        result: Callable[[], Tensor],
    ) -> Pending:
        if self._group is None:
            raise self._error(what, "the connections were closed")
        try:
            work = begin(self._group)
        except RuntimeError as error:
            raise self._error(what, describe(error)) from error
        assert work is not None
        self._started += 1
        number = self._started
        self._works[number] = work
        work.get_future().add_done_callback(lambda _: self._done.__setitem__(number, perf_counter()))
        return _DistributedPending(self, number, what, result)

    def _error(self, what: str, reason: str, timed_out: bool = False) -> TransferError:
        mine = self._numbers[self.index]
        others = [n for n in self._numbers if n != mine]
        return TransferError(mine, others[0], f"{what} over replicas", reason, timed_out, others[1:])
