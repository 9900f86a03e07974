"""Frames and tensors, out and in, between one rank and its peers: what both kinds of bus share.

A message is a frame (messages.py) on the control plane; its tensors follow on the data plane. The receiver posts the
receives of tensors in the order in which frames come, which is the order in which they were sent: so a data plane whose
channels have no tags (NCCL) will do. A frame also says how many frames its sender has taken from us; by that, what
was sent is known to have arrived, and is let go. Until then it stays alive.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..runtime import tags
from ..runtime.errors import StepError, TransferError
from ..runtime.stepping import Work, arrive
from ..runtime.transport import Receive, Transport
from .messages import FRAME, Kind, Layout, Message, Parcel, Value, decode, encode, layouts, values_of


class Lost(StepError):
    """A peer's connection broke, or it has left. peer: its rank."""

    def __init__(self, rank: int, peer: int, reason: str) -> None:
        super().__init__(f"rank {rank}: rank {peer} is gone: {reason}")
        self.peer = peer
        self.reason = reason


class Post:
    """One rank's end. control: carries frames; data: carries tensors, and may be the same. Sending and listening may
    be done by different threads."""

    def __init__(self, control: Transport, data: Transport) -> None:
        self.rank = control.rank
        self.size = control.size
        self.ranks: Sequence[int] = data.ranks
        self.peers = [peer for peer in range(self.size) if peer != self.rank]
        self._control = control
        self._data = data
        self._lock = threading.Lock()
        self._run = 0
        #: by peer: frames sent and not known to have arrived, each with the numbers of its sends (control, data)
        self._sent: dict[int, deque[tuple[list[int], list[int]]]] = {p: deque() for p in self.peers}
        self._let_go = dict.fromkeys(self.peers, 0)
        self._taken = dict.fromkeys(self.peers, 0)
        #: peers to whom nothing can be sent any more, and why
        self._left: dict[int, str] = {}
        #: messages of later runs
        self._early: deque[Parcel] = deque()

    def begin(self) -> int:
        self._run += 1
        return self._run

    def send(self, peer: int, message: Message, values: Mapping[str, Value]) -> None:
        with self._lock:
            if peer in self._left:
                if message.kind is Kind.DATA_IS_USELESS:
                    return  # it was done before it left, and needs no credit
                raise TransferError(self.ranks[self.rank], self.ranks[peer], str(message), self._left[peer])
            frame, rest, tensors = encode(message, values, self._run, self._taken[peer])
            frames = [frame] if rest is None else [frame, rest]
            control = [self._control.send(peer, "control", tags.FRAMES, f) for f in frames]
            data = [self._data.send(peer, "F", tags.PARCELS, t) for t in tensors if t.numel()]
            self._sent[peer].append((control, data))

    def flush(self) -> None:
        self._control.flush()
        self._data.flush()

    def listen(self, peer: int) -> Work[None]:
        """Takes what a peer sends, until it leaves."""
        while True:
            announced = decode((yield from self._arrive(peer, FRAME)))
            text = announced.text
            if announced.missing:
                text += (yield from self._arrive(peer, announced.missing)).numpy().tobytes()
            coming = layouts(text)
            posted = [self._post_tensor(peer, layout) for layout in coming]
            arrived: list[Tensor] = []
            for layout, receive in zip(coming, posted, strict=True):
                empty = torch.empty(0, dtype=layout.dtype)
                arrived.append(empty if receive is None else (yield from arrive(receive)))
            self._acknowledged(peer, announced.acknowledged)
            self._taken[peer] += 1
            if announced.message.kind is Kind.STOP:
                self._goodbye(peer, "it has left: its end was closed")
                return
            self.deliver(Parcel(announced.message, values_of(text, arrived), announced.run, peer))

    # ---- for subclasses

    def deliver(self, parcel: Parcel) -> None:
        """Something has come."""
        raise NotImplementedError

    def of_this_run(self, parcel: Parcel) -> Parcel | None:
        """The parcel, if it belongs to this run; one of an earlier run is dropped, one of a later run kept."""
        if parcel.run < self._run:
            return None
        if parcel.run > self._run and parcel.message.kind is not Kind.ERR:
            self._early.append(parcel)
            return None
        return parcel

    def from_early(self) -> Parcel | None:
        """A message of this run that came before it began."""
        for _ in range(len(self._early)):
            parcel = self.of_this_run(self._early.popleft())
            if parcel is not None:
                return parcel
        return None

    def check_here(self, peers: Sequence[int]) -> None:
        """Raises Lost if one of them has left."""
        for peer in peers:
            if peer in self._left:
                raise Lost(self.ranks[self.rank], peer, self._left[peer])

    def goodbyes(self) -> None:
        """STOP to every peer to whom something can still be sent."""
        for peer in self.peers:
            self._goodbye(peer, "this rank has closed its end")

    # ---- parts

    def _arrive(self, peer: int, nbytes: int) -> Work[Tensor]:
        return (yield from arrive(self._control.post(peer, "control", tags.FRAMES, (nbytes,), torch.uint8)))

    def _post_tensor(self, peer: int, layout: Layout) -> Receive | None:
        """Empty tensors aren't sent."""
        count = torch.Size(layout.shape).numel()
        return self._data.post(peer, "F", tags.PARCELS, (count,), layout.dtype) if count else None

    def _acknowledged(self, peer: int, count: int) -> None:
        """Lets go of the frames that a peer has taken."""
        done = []
        with self._lock:
            while self._let_go[peer] < count:
                done.append(self._sent[peer].popleft())
                self._let_go[peer] += 1
        for control, data in done:
            self._control.complete(control)
            self._data.complete(data)

    def _goodbye(self, peer: int, reason: str) -> None:
        if peer in self._left:
            return
        with contextlib.suppress(TransferError, ValueError):  # it is gone, or the process group is
            self.send(peer, Message(Kind.STOP, self.rank, peer), {})
        self._left[peer] = reason
