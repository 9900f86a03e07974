"""The in-memory transport keeps the promises that executors rely on."""

from __future__ import annotations

import pytest
import torch

from pipeloom.runtime.errors import StuckError, TransferError
from pipeloom.runtime.stepping import arrive, drive, exchange, finish
from pipeloom.runtime.transport import MemoryTransport


def test_equal_addresses_arrive_in_order_whoever_asks_first():
    a, b = MemoryTransport.group(2)
    first, second = (b.post(0, "F", 1, (1,), torch.float32) for _ in range(2))
    assert not second.ready()
    a.send(1, "F", 1, torch.tensor([1.0]))
    assert not second.ready()  # the first message belongs to the first receive
    a.send(1, "F", 1, torch.tensor([2.0]))
    assert float(second.wait()) == 2.0
    assert float(first.wait()) == float(first.wait()) == 1.0


def test_channels_tags_and_peers_are_told_apart():
    a, b, c = MemoryTransport.group(3)
    receives = [
        b.post(p, ch, t, (1,), torch.float32)
        for p, ch, t in [(0, "F", 1), (0, "B", 1), (0, "F", 2), (2, "F", 1)]
    ]
    c.send(1, "F", 1, torch.tensor([4.0]))
    a.send(1, "F", 2, torch.tensor([3.0]))
    a.send(1, "B", 1, torch.tensor([2.0]))
    a.send(1, "F", 1, torch.tensor([1.0]))
    assert [float(r.wait()) for r in receives] == [1.0, 2.0, 3.0, 4.0]


def test_a_message_is_a_copy():
    a, b = MemoryTransport.group(2)
    sent = torch.zeros(2)
    a.send(1, "control", 1, sent)
    sent.add_(1)
    assert b.post(0, "control", 1, (2,), torch.float32).wait().tolist() == [0.0, 0.0]


def test_a_message_of_another_size_or_dtype_is_an_error():
    a, b = MemoryTransport.group(2)
    a.send(1, "F", 5, torch.zeros(3))
    with pytest.raises(
        TransferError, match=r"rank 1: receive on channel F, tag 5 \(peer: rank 0\): \(3,\) .* \(4,\)"
    ):
        b.post(0, "F", 5, (4,), torch.float32).wait()
    with pytest.raises(TransferError, match="never sent"):
        b.post(0, "F", 6, (4,), torch.float32).wait()


def test_ranks_that_wait_for_each_other_are_named():
    def wait(transport, peer):
        yield from arrive(transport.post(peer, "F", 7, (1,), torch.float32))

    a, b = MemoryTransport.group(2)
    with pytest.raises(StuckError, match=r"rank 0 waits: .*tag 7 from rank 1\n  rank 1 waits: .*from rank 0"):
        drive([wait(a, 1), wait(b, 0)])
    with pytest.raises(StuckError, match="runs alone"):
        finish(wait(a, 1))


def test_everything_runs_without_autograd_and_leaves_the_callers_mode_alone():
    modes = []

    def work(transport, peer):
        modes.append(torch.is_grad_enabled())
        receive = transport.post(peer, "F", 1, (1,), torch.float32)
        if transport.rank:
            transport.send(peer, "F", 1, torch.zeros(1))
        yield from arrive(receive)
        modes.append(torch.is_grad_enabled())
        transport.send(peer, "F", 1, torch.zeros(1))

    a, b = MemoryTransport.group(2)
    with pytest.raises(StuckError):
        drive([work(a, 1), work(b, 0), work(b, 0)])
    assert modes
    assert not any(modes)
    assert torch.is_grad_enabled()


def test_exchange():
    transports = MemoryTransport.group(3)
    shapes = [(0,), (1,), (2,)]
    parts = drive([exchange(t, 9, torch.full(shapes[t.rank], float(t.rank)), shapes) for t in transports])
    assert [[p.tolist() for p in gathered] for gathered in parts] == [[[], [1.0], [2.0, 2.0]]] * 3
