"""How messages travel between the ranks of one pipeline, in two forms behind one small protocol.

`MemoryTransport` connects ranks that live in one process and are stepped one after another (see stepping.py);
`ready()` then says whether the message has been sent. `DistributedTransport` (distributed.py) runs over
torch.distributed, where `ready()` is always true and `wait()` blocks.

A message is addressed by (peer, channel, tag). Channels: "F" for activations, "B" for gradients, "control"
for everything else (losses, weights, norms, tied gradients). Two messages with one address arrive in the
order in which they were sent. All tensors here are contiguous; layout.py maps values with other strides onto
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import TransferError

Channel = Literal["F", "B", "control"]
CHANNELS: tuple[Channel, ...] = ("F", "B", "control")


class Receive(Protocol):
    """A posted receive."""

    @property
    def peer(self) -> int: ...

    def ready(self) -> bool:
        """Whether `wait` would return now. Always true where waiting may block the process."""
        ...

    def wait(self) -> Tensor:
        """The message, contiguous, in the shape and dtype that were posted. May be called again. Raises
        TransferError.
        """
        ...


class Transport(Protocol):
    """One rank's end of the pipeline's connections."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def ranks(self) -> Sequence[int]:
        """What messages to the user call each of these ranks: where there are replicas, they count on from pipeline to
        pipeline."""
        ...

    @property
    def shares_clock(self) -> bool:
        """Whether all ranks read one clock (they live in one process)."""
        ...

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group of this pipeline's ranks, for collectives of torch's own; None in one process. Don't keep it."""
        ...

    def post(
        self, peer: int, channel: Channel, tag: int, shape: Sequence[int], dtype: torch.dtype
    ) -> Receive: ...

    def send(self, peer: int, channel: Channel, tag: int, tensor: Tensor) -> int:
        """Start sending; the send's number. The transport keeps `tensor` alive, and nobody may write to it, until
        `complete` or
        `flush`."""
        ...

    def complete(self, numbers: Sequence[int]) -> None:
        """Let go of sends that are known to be done (a later message of the receiver says so). Raises TransferError."""
        ...

    def flush(self) -> None:
        """Return when every message sent so far is done. Raises TransferError."""
        ...

    def abort(self) -> None:
        """Close the connections at once, so that peers that wait for this rank wake up with an error."""
        ...

    def close(self) -> None: ...


Address = tuple[int, int, Channel, int]


class _MemoryReceive:
    def __init__(self, owner: MemoryTransport, address: Address, shape: tuple[int, ...], dtype: torch.dtype):
        self._owner = owner
        self._address = address
        self._shape = shape
        self._dtype = dtype
        self._value: Tensor | None = None

    @property
    def peer(self) -> int:
        return self._address[0]

    def ready(self) -> bool:
        """A message is taken by the receive that was posted first for its address."""
        return self._value is not None or self._owner.deliver(self._address, self)

    def wait(self) -> Tensor:
        if not self.ready():
            raise self._owner.error(self.peer, self._what(), "the message was never sent")
        assert self._value is not None
        return self._value

    def accept(self, value: Tensor) -> None:
        if tuple(value.shape) != self._shape or value.dtype != self._dtype:
            raise self._owner.error(
                self.peer,
                self._what(),
                f"{tuple(value.shape)} {value.dtype} was sent where {self._shape} {self._dtype} was posted",
            )
        self._value = value

    def _what(self) -> str:
        return f"receive on channel {self._address[2]}, tag {self._address[3]}"

    def __str__(self) -> str:
        return f"{self._what()} from rank {self._owner.ranks[self.peer]}"


class _Mail:
    """What the ranks of one process share: the messages under way and the receives posted, by address."""

    def __init__(self) -> None:
        self.sent: dict[Address, deque[Tensor]] = {}
        self.posted: dict[Address, deque[_MemoryReceive]] = {}


class MemoryTransport:
    """Ranks of one process. Messages are copied when they are sent, as a wire would."""

    shares_clock = True
    process_group = None

    def __init__(self, rank: int, size: int, mail: _Mail, ranks: Sequence[int] | None = None):
        self.rank = rank
        self.size = size
        self.ranks: Sequence[int] = range(size) if ranks is None else ranks
        self._mail = mail

    @staticmethod
    def group(size: int, ranks: Sequence[int] | None = None) -> list[MemoryTransport]:
        """The ends of all ranks of a pipeline of `size` ranks; ranks: what messages call them."""
        mail = _Mail()
        return [MemoryTransport(rank, size, mail, ranks) for rank in range(size)]

    def error(self, peer: int, what: str, reason: str) -> TransferError:
        return TransferError(self.ranks[self.rank], self.ranks[peer], what, reason)

    def post(
        self, peer: int, channel: Channel, tag: int, shape: Sequence[int], dtype: torch.dtype
    ) -> Receive:
        address = (peer, self.rank, channel, tag)
        receive = _MemoryReceive(self, address, tuple(shape), dtype)
        self._mail.posted.setdefault(address, deque()).append(receive)
        return receive

    def send(self, peer: int, channel: Channel, tag: int, tensor: Tensor) -> int:
        address = (self.rank, peer, channel, tag)
        self._mail.sent.setdefault(address, deque()).append(tensor.clone())
        return 0

    def complete(self, numbers: Sequence[int]) -> None:
        """Messages were copied: nothing is held."""

    def deliver(self, address: Address, wanted: _MemoryReceive) -> bool:
        """Hand the messages of an address to its receives, oldest first; whether `wanted` got one."""
        sent = self._mail.sent.get(address)
        posted = self._mail.posted.get(address)
        while sent and posted:
            receive = posted.popleft()
            receive.accept(sent.popleft())
            if receive is wanted:
                return True
        return False

    def flush(self) -> None:
        """Messages were copied: nothing is under way."""

    def abort(self) -> None:
        """Drop what was sent or posted: the step that they belonged to is over."""
        self._mail.sent.clear()
        self._mail.posted.clear()

    def close(self) -> None:
        self.abort()
