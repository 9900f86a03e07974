"""Running what is written as generators: a step, a finalize, an exchange.

Everything in this room that may have to wait for a message is a generator that yields the receive that it
waits for. Over torch.distributed a receive blocks instead, so `finish` runs one generator to its end; the
ranks of one process are stepped in turn by `drive`, deterministically and without threads. Both run it
without autograd.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from .errors import StuckError
from .transport import Receive, Transport

T = TypeVar("T")
#: A piece of work that yields the receives it waits for, and returns a T.
Work = Generator[Receive, None, T]


def arrive(receive: Receive) -> Work[Tensor]:
    """Wait for one message."""
    while not receive.ready():
        yield receive
    return receive.wait()


def _advance(work: Work[T]) -> Receive:
    """On to the next receive, without autograd: the mode must not leak out of a generator that is suspended."""
    with torch.no_grad():
        return next(work)


def finish(work: Work[T]) -> T:
    """Run one rank's work to its end. Raises StuckError if it waits for a message that isn't there and can't
    block.
    """
    try:
        receive = _advance(work)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    work.close()
    raise StuckError(f"{receive}: this rank runs alone, and waits for a message that nobody has sent")


def drive(works: Sequence[Work[T]]) -> list[T]:
    """Step the ranks of one process in turn until all are done; what each returns, in order.

    An exception of one ends all (the others are closed). Raises StuckError, saying who waits for what, when
    no rank can go on.
    """
    stepping = rounds(works)
    while True:
        try:
            next(stepping)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


def rounds(works: Sequence[Work[T]]) -> Generator[None, None, list[T]]:
    """`drive`, one round at a time: yields when each rank that can go on has gone to its next wait."""
    done: dict[int, T] = {}
    waiting: dict[int, Receive] = {}
    try:
        while len(done) < len(works):
            moved = False
            for rank, work in enumerate(works):
                if rank in done or (rank in waiting and not waiting[rank].ready()):
                    continue
                moved = True
                try:
                    waiting[rank] = _advance(work)
                except StopIteration as stop:
                    done[rank] = stop.value
                    waiting.pop(rank, None)
            if not moved:
                lines = [f"  rank {rank} waits: {receive}" for rank, receive in sorted(waiting.items())]
                raise StuckError("no rank can go on; the job lists don't fit together:\n" + "\n".join(lines))
            yield
    finally:
        for work in works:
            work.close()
    return [done[rank] for rank in range(len(works))]


def exchange(
    transport: Transport, tag: int, tensor: Tensor, shapes: Sequence[Sequence[int]]
) -> Work[list[Tensor]]:
    """Give every rank a copy of every rank's tensor: a list by rank, the own one included.

    tensor: contiguous; shapes[rank]: the shape of that rank's tensor (all of one dtype). Ranks with nothing
    to say (a dimension of 0) send nothing.
    """
    receives = start_exchange(transport, tag, tensor, shapes)
    gathered = []
    for rank in range(transport.size):
        receive = receives.get(rank)
        if rank == transport.rank:
            gathered.append(tensor)
        elif receive is None:
            gathered.append(tensor.new_empty(tuple(shapes[rank])))
        else:
            gathered.append((yield from arrive(receive)))
    return gathered


def start_exchange(
    transport: Transport, tag: int, tensor: Tensor, shapes: Sequence[Sequence[int]]
) -> dict[int, Receive]:
    """Post and send an `exchange` without waiting; the receives by rank."""
    peers = [rank for rank in range(transport.size) if rank != transport.rank]
    receives = {
        peer: transport.post(peer, "control", tag, shapes[peer], tensor.dtype)
        for peer in peers
        if 0 not in shapes[peer]
    }
    if tensor.numel():
        for peer in peers:
            transport.send(peer, "control", tag, tensor)
    return receives
