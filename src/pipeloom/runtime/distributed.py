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
    def __init__(self, owner: DistributedTransport, peer: int, what: str, buffer: Tensor, work: dist.Work):
        self._owner = owner
        self._peer = peer
        self._what = what
        self._buffer = buffer
        self._work: dist.Work | None = work

    @property
    def peer(self) -> int:
        return self._peer

    def ready(self) -> bool:
        return True

    def wait(self) -> Tensor:
        if self._work is not None:
            self._owner.wait(self._work, self._peer, self._what)
            self._work = None
        return self._buffer

    def __str__(self) -> str:
        return f"{self._what} from rank {self._peer}"


class DistributedTransport:
    """One rank's end over a process group that holds exactly the ranks of this pipeline, in stage order.

    device: where received tensors lie. timeout: seconds a single wait may take. pair_groups: one group for
    each (sender, receiver, channel), needed where the backend has no tags; creating them is a collective call
    of all ranks of the default group.
    """

    shares_clock = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device | str = "cpu",
        timeout: float = DEFAULT_TIMEOUT,
        pair_groups: bool | None = None,
    ):
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group
        self._device = torch.device(device)
        self._timeout = timeout
        self._sends: list[tuple[dist.Work, Tensor, int, str]] = []
        self._pairs: dict[tuple[int, int, Channel], dist.ProcessGroup] = {}
        if pair_groups if pair_groups is not None else dist.get_backend(group) == "nccl":
            self._make_pairs()

    def post(
        self, peer: int, channel: Channel, tag: int, shape: Sequence[int], dtype: torch.dtype
    ) -> Receive:
        what = f"receive on channel {channel}, tag {tag}"
        buffer = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        group, source = self._way(peer, self.rank, channel, peer)
        try:
            work = dist.irecv(buffer, group=group, group_src=source, tag=tag)
        except RuntimeError as error:
            raise TransferError(self.rank, peer, what, describe(error)) from error
        assert work is not None
        return _DistributedReceive(self, peer, what, buffer, work)

    def send(self, peer: int, channel: Channel, tag: int, tensor: Tensor) -> None:
        what = f"send on channel {channel}, tag {tag}"
        group, target = self._way(self.rank, peer, channel, peer)
        try:
            work = dist.isend(tensor, group=group, group_dst=target, tag=tag)
        except RuntimeError as error:
            raise TransferError(self.rank, peer, what, describe(error)) from error
        assert work is not None
        self._sends.append((work, tensor, peer, what))

    def flush(self) -> None:
        sends, self._sends = self._sends, []
        for work, _, peer, what in sends:
            self.wait(work, peer, what)

    def wait(self, work: dist.Work, peer: int, what: str) -> None:
        began = monotonic()
        try:
            work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            late = monotonic() - began >= 0.9 * self._timeout
            reason = f"nothing came for {self._timeout:g} s (the time-out)" if late else describe(error)
            raise TransferError(self.rank, peer, what, reason, timed_out=late) from error

    def abort(self) -> None:
        self._sends.clear()
        for group in (self._group, *self._pairs.values()):
            with contextlib.suppress(RuntimeError):  # already closed
                group.abort()

    def close(self) -> None:
        """Finish what is under way. The groups belong to their maker, but the pair groups are ours."""
        self.flush()
        for group in self._pairs.values():
            dist.destroy_process_group(group)
        self._pairs.clear()

    def _way(self, sender: int, receiver: int, channel: Channel, peer: int) -> tuple[dist.ProcessGroup, int]:
        """The group that carries a message, and the peer's number in it."""
        pair = self._pairs.get((sender, receiver, channel))
        if pair is None:
            return self._group, peer
        return pair, int(peer > self.rank)

    def _make_pairs(self) -> None:
        ranks = dist.get_process_group_ranks(self._group)
        for sender in range(self.size):
            for receiver in range(self.size):
                if sender == receiver:
                    continue
                for channel in CHANNELS:
                    pair = dist.new_group(sorted((ranks[sender], ranks[receiver])))
                    if self.rank in (sender, receiver):
                        self._pairs[sender, receiver, channel] = pair
                        dist.broadcast(torch.zeros(1, device=self._device), group=pair, group_src=0)
