"""The message bus: one rank's end of the control plane, and of the data plane under it, in two forms.

`MemoryBus` connects the ranks of one process, which are stepped in turn: it listens when somebody asks for news.
`DistributedBus` is for real ranks: a thread a peer listens, because Gloo can only be waited for, never asked; and puts
what comes into one inbox, where the thread that runs the tasks waits. Threads end by a handshake: STOP is answered by
STOP.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.distributed import DEFAULT_TIMEOUT, DistributedTransport
from ..runtime.errors import TransferError, describe
from ..runtime.stepping import Work, finish
from ..runtime.transport import MemoryTransport, Receive, Transport
from .messages import Message, Parcel, Value
from .post import Lost, Post

#: a rank may be silent for as long as its user likes; what is waited for in a run has a time-out of its own
_FOR_EVER = timedelta(days=1000)
_GOODBYE_SECONDS = 5.0


class Bus(Protocol):
    """One rank's end, for the thread that runs the tasks."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def ranks(self) -> Sequence[int]:
        """What messages to the user call each of these ranks."""
        ...

    def begin(self) -> int:
        """The number of the run that now begins: each rank counts alike, so that what is left over from one run is
        not taken for the next."""
        ...

    def send(self, peer: int, message: Message, values: Mapping[str, Value]) -> None:
        """Starts to send; waits for nothing. Nobody may write to the tensors until they have arrived. Raises
        TransferError, ValueError for a value that can't travel."""
        ...

    def take(self) -> Parcel | None:
        """The next message of this run, its tensors arrived; None: there is none yet. Raises Lost where a peer's
        connection broke."""
        ...

    def news(self, what: str, peers: Sequence[int]) -> Receive:
        """What to wait for when there is nothing else to do. what: says in an error what is missing; peers: the ranks
        from which it should come. Raises Lost if one of them has left."""
        ...

    def flush(self) -> None:
        """Returns when all that was sent has arrived."""
        ...

    def close(self) -> None:
        """Says goodbye to all peers, and waits a moment for theirs. Afterwards nothing can be sent."""
        ...

    def abort(self) -> None:
        """`close` that waits for nobody."""
        ...


class _News:
    """What a rank waits for that has nothing to do."""

    def __init__(self, bus: MemoryBus | DistributedBus, what: str, peers: Sequence[int]) -> None:
        self._bus = bus
        self._what = what
        self._peers = peers

    @property
    def peer(self) -> int:
        return self._peers[0] if self._peers else self._bus.rank

    def ready(self) -> bool:
        return self._bus.has_news(self._peers)

    def wait(self) -> Tensor:
        self._bus.await_news(self._what, self._peers)
        return torch.empty(0)

    def __str__(self) -> str:
        return self._what


class MemoryBus(Post):
    """The ranks of one process: `MemoryTransport.group` connects them."""

    def __init__(self, transport: MemoryTransport) -> None:
        super().__init__(transport, transport)
        self._listening: dict[int, tuple[Work[None], Receive | None]] = {
            peer: (self.listen(peer), None) for peer in self.peers
        }
        self._arrived: deque[Parcel] = deque()

    def deliver(self, parcel: Parcel) -> None:
        self._arrived.append(parcel)

    def take(self) -> Parcel | None:
        if self._early and (parcel := self.from_early()) is not None:
            return parcel
        self._listen()
        while self._arrived:
            parcel = self.of_this_run(self._arrived.popleft())
            if parcel is not None:
                return parcel
        return None

    def news(self, what: str, peers: Sequence[int]) -> Receive:
        self.check_here(peers)
        return _News(self, what, peers)

    def has_news(self, peers: Sequence[int]) -> bool:
        self._listen()
        return bool(self._arrived) or any(peer in self._left for peer in peers)

    def await_news(self, what: str, peers: Sequence[int]) -> None:
        """It is there: nobody waits before it is."""

    def close(self) -> None:
        self.goodbyes()

    def abort(self) -> None:
        self.goodbyes()

    def _listen(self) -> None:
        """Goes on with every peer from whom something has come."""
        for peer, (work, waiting) in list(self._listening.items()):
            while waiting is None or waiting.ready():
                try:
                    waiting = next(work)
                except StopIteration:
                    del self._listening[peer]
                    break
                self._listening[peer] = (work, waiting)


class DistributedBus(Post):
    """Over torch.distributed: control frames on a Gloo group of their own, tensors on the pipeline's transport.
    timeout: seconds that a rank with nothing to do waits for a message."""

    def __init__(self, control: Transport, data: Transport, timeout: float = DEFAULT_TIMEOUT) -> None:
        super().__init__(control, data)
        self._timeout = timeout
        #: None: a peer has left
        self._inbox: queue.SimpleQueue[Parcel | Lost | None] = queue.SimpleQueue()
        #: taken from the inbox by who waited for it
        self._waited: list[Parcel | Lost | None] = []
        self._hearing = len(self.peers)
        self._closing = False
        self._threads = [
            threading.Thread(
                target=self._hear, args=(peer,), name=f"rank {self.rank} hears rank {peer}", daemon=True
            )
            for peer in self.peers
        ]
        for thread in self._threads:
            thread.start()
        _open.add(self)

    def deliver(self, parcel: Parcel) -> None:
        self._inbox.put(parcel)

    def take(self) -> Parcel | None:
        if self._early and (parcel := self.from_early()) is not None:
            return parcel
        while True:
            try:
                found = self._waited.pop() if self._waited else self._inbox.get_nowait()
            except queue.Empty:
                return None
            if isinstance(found, Lost):
                raise found
            parcel = None if found is None else self.of_this_run(found)
            if parcel is not None:
                return parcel

    def news(self, what: str, peers: Sequence[int]) -> Receive:
        self.check_here(peers)
        return _News(self, what, peers)

    def check_here(self, peers: Sequence[int]) -> None:
        gone = [peer for peer in peers if peer in self._left]
        if self._inbox.empty():  # what a peer sent before it left is in the inbox before the word that it has
            super().check_here(gone)

    def has_news(self, peers: Sequence[int]) -> bool:  # noqa: ARG002
        """Waiting is what tells."""
        return True

    def await_news(self, what: str, peers: Sequence[int]) -> None:
        """Blocks until something has come. Raises TransferError after the time-out."""
        try:
            self._waited.append(self._inbox.get(timeout=self._timeout))
        except queue.Empty:
            first, *others = [self.ranks[peer] for peer in peers or [self.rank]]
            reason = f"nothing came for {self._timeout:g} s (the time-out)"
            raise TransferError(
                self.ranks[self.rank], first, what, reason, timed_out=True, others=others
            ) from None

    def close(self) -> None:
        self.abort()
        for thread in self._threads:
            thread.join(_GOODBYE_SECONDS)
        _open.discard(self)

    def abort(self) -> None:
        self._closing = True
        self.goodbyes()
        if not self._hearing:
            self._hang_up()

    def _hear(self, peer: int) -> None:
        """What a thread does. Whatever happens here, the thread that runs the tasks must hear of it."""
        try:
            finish(self.listen(peer))
            self._inbox.put(None)
        except TransferError as error:
            self._lose(peer, error.reason)
        except BaseException as error:
            self._lose(peer, f"{describe(error)}\n{traceback.format_exc()}")
        with self._lock:
            self._hearing -= 1
            last = not self._hearing
        if last and self._closing:
            self._hang_up()

    def _lose(self, peer: int, reason: str) -> None:
        self._left.setdefault(peer, reason)
        self._inbox.put(Lost(self.ranks[self.rank], peer, reason))

    def _hang_up(self) -> None:
        """Nobody listens any more: the control plane can go."""
        with contextlib.suppress(TransferError):
            self._control.close()


_open: weakref.WeakSet[DistributedBus] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that waits in Gloo while the interpreter shuts down can bring the process down."""
    for bus in list(_open):
        bus.close()


def connect_bus(transport: Transport, timeout: float = DEFAULT_TIMEOUT) -> MemoryBus | DistributedBus:
    """The bus of the ranks that a transport connects. A collective call of all of them.

    timeout: seconds that a run may wait for a message."""
    if isinstance(transport, MemoryTransport):
        return MemoryBus(transport)
    group: Any = transport.process_group
    ranks = dist.get_process_group_ranks(group)
    control = dist.new_group(
        ranks,
        backend="gloo",
        timeout=_FOR_EVER,
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    names = transport.ranks
    frames = DistributedTransport(control, timeout=_FOR_EVER.total_seconds(), ranks=names)
    return DistributedBus(frames, transport, timeout)
