"""Messages over torch.distributed.

Gloo matches by tag, so one process group carries all channels. NCCL has no tags, and unbatched sends and
receives between one pair share a communicator and a stream: there, each (sender, receiver, channel) gets a
two-rank group of its own, created and warmed up in one fixed order on all ranks, and messages of a channel
are matched in their order. The pair form is tested on Gloo; on NCCL it is not proven until it has run on two
GPUs.

Facts about Gloo that this file rests on: equal tags arrive in order; tensors must be contiguous and stay
alive until the send is done; `Work.is_completed()` stays false until `wait()`, so nothing is polled; a wait
that timed out closes the pair for good; `wait()` raises when the peer's socket closes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import TransferError, describe
from .transport import CHANNELS, Channel, Receive

#: seconds that a rank waits for one message before it says that its peer has stalled
DEFAULT_TIMEOUT = 300.0


class _DistributedReceive:
    def __init__(self, owner: DistributedTransport, peer: int, what: str, buffer: Tensor, number: int):
        self._owner = owner
        self._peer = peer
        self._what = what
        self._buffer = buffer
        self._number: int | None = number

    @property
    def peer(self) -> int:
        return self._peer

    def ready(self) -> bool:
        return True

    def wait(self) -> Tensor:
        if self._number is not None:
            self._owner.wait(self._number, self._peer, self._what)
            self._number = None
        return self._buffer

    def __str__(self) -> str:
        return f"{self._what} from rank {self._owner.ranks[self._peer]}"


class DistributedTransport:
    """One rank's end over a process group that holds exactly the ranks of this pipeline, in stage order.

    The transport owns the group, and nobody else may hold it: only when the last reference is gone are its
    sockets closed, and `abort` relies on that (Gloo's own abort closes nothing, and wakes nobody). device:
    where received tensors lie. timeout: seconds a single wait may take. pair_groups: one group for each
    (sender, receiver, channel), needed where the backend has no tags; creating them is a collective call of
    all ranks of the default group. ranks: what errors call the group's ranks, if not 0, 1, ….
    """

    shares_clock = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device | str = "cpu",
        timeout: float = DEFAULT_TIMEOUT,
        pair_groups: bool | None = None,
        ranks: Sequence[int] | None = None,
    ):
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.ranks: Sequence[int] = range(self.size) if ranks is None else ranks
        self._group: dist.ProcessGroup | None = group
        self._device = torch.device(device)
        self._timeout = timeout
        #: everything under way, by number: kept here alone, because a Work keeps its group's sockets open
        self._works: dict[int, dist.Work] = {}
        #: numbers of transfers; a counter that several threads may draw from
        self._numbers = itertools.count(1)
        self._sends: dict[int, tuple[Tensor, int, str]] = {}
        self._pairs: dict[tuple[int, int, Channel], dist.ProcessGroup] = {}
        if pair_groups if pair_groups is not None else dist.get_backend(group) == "nccl":
            self._make_pairs(dist.get_process_group_ranks(group))

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        return self._group

    def post(
        self, peer: int, channel: Channel, tag: int, shape: Sequence[int], dtype: torch.dtype
    ) -> Receive:
        what = f"receive on channel {channel}, tag {tag}"
        buffer = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        group, source = self._way(peer, self.rank, channel, peer, what)
        try:
            number = self._start(dist.irecv(buffer, group=group, group_src=source, tag=tag))
        except RuntimeError as error:
            raise self._error(peer, what, describe(error)) from error
        return _DistributedReceive(self, peer, what, buffer, number)

    def send(self, peer: int, channel: Channel, tag: int, tensor: Tensor) -> int:
        what = f"send on channel {channel}, tag {tag}"
        group, target = self._way(self.rank, peer, channel, peer, what)
        try:
            number = self._start(dist.isend(tensor, group=group, group_dst=target, tag=tag))
        except RuntimeError as error:
            raise self._error(peer, what, describe(error)) from error
        self._sends[number] = (tensor, peer, what)
        return number

    def complete(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            found = self._sends.pop(number, None)
            if found is not None:
                self.wait(number, *found[1:])

    def flush(self) -> None:
        self.complete(list(self._sends))

    def wait(self, number: int, peer: int, what: str) -> None:
        """Wait for one transfer of this rank. Raises TransferError."""
        work = self._works.pop(number, None)
        if work is None:
            raise self._error(peer, what, "the connections were closed")
        began = monotonic()
        try:
            work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            late = monotonic() - began >= 0.9 * self._timeout
            reason = f"nothing moved for {self._timeout:g} s (the time-out)" if late else describe(error)
            raise self._error(peer, what, reason, late) from error
        finally:
            del work  # or a traceback would keep the sockets open

    def abort(self) -> None:
        self._sends.clear()
        self._works.clear()
        groups = [self._group, *self._pairs.values()]
        self._group = None
        self._pairs.clear()
        while groups:
            group = groups.pop()
            if group is not None:
                with contextlib.suppress(RuntimeError, ValueError):  # already destroyed
                    dist.destroy_process_group(group)
            del group

    def close(self) -> None:
        """Finish what is under way, then give up the groups."""
        if self._group is not None:
            self.flush()
            self.abort()

    def _error(self, peer: int, what: str, reason: str, timed_out: bool = False) -> TransferError:
        return TransferError(self.ranks[self.rank], self.ranks[peer], what, reason, timed_out)

    def _start(self, work: dist.Work | None) -> int:
        assert work is not None
        number = next(self._numbers)
        self._works[number] = work
        return number

    def _way(
        self, sender: int, receiver: int, channel: Channel, peer: int, what: str
    ) -> tuple[dist.ProcessGroup, int]:
        """The group that carries a message, and the peer's number in it."""
        if self._group is None:
            raise self._error(peer, what, "the connections were closed")
        pair = self._pairs.get((sender, receiver, channel))
        if pair is None:
            return self._group, peer
        return pair, int(peer > self.rank)

    def _make_pairs(self, ranks: Sequence[int]) -> None:
        for sender in range(self.size):
            for receiver in range(self.size):
                if sender == receiver:
                    continue
                for channel in CHANNELS:
                    pair = dist.new_group(sorted((ranks[sender], ranks[receiver])))
                    if self.rank in (sender, receiver):
                        self._pairs[sender, receiver, channel] = pair
                        dist.broadcast(torch.zeros(1, device=self._device), group=pair, group_src=0)
