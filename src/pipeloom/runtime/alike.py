"""Copies begin alike: each copy of a shared weight takes its owner's values, and each replica takes replica 0's.

Ranks build the model each for itself. One that was seeded otherwise, or not at all, would train copies that differ from
the first step on, and nobody would be told. DDP broadcasts for the same reason when it is made.
"""

from __future__ import annotations

import torch

from . import tags
from .parameters import ParameterStore
from .replicas import Replicas
from .stepping import Work, arrive
from .transport import Receive, Transport


def make_alike(store: ParameterStore, transport: Transport, replicas: Replicas) -> Work[None]:
    """A collective call of all ranks of all replicas."""
    yield from _take_owners(store, transport)
    if replicas.size > 1:
        held = {**store.parameters, **store.buffers}
        tensors = {
            id(held[name]): held[name].detach() for name in sorted(held)
        }  # in one order on all replicas
        for coming in [replicas.broadcast(tensor) for tensor in tensors.values()]:
            yield from arrive(coming)


def _take_owners(store: ParameterStore, transport: Transport) -> Work[None]:
    coming: list[tuple[torch.Tensor, Receive]] = []
    for number, name in enumerate(store.order):
        holders = store.holders.get(name, [])
        if len(holders) < 2 or store.stage not in holders:
            continue
        parameter = store.parameters[name].detach()
        if store.owner[name] == store.stage:
            for holder in holders[1:]:
                transport.send(holder, "control", tags.TIED + number, parameter.contiguous())
        else:
            receive = transport.post(
                store.owner[name], "control", tags.TIED + number, parameter.shape, parameter.dtype
            )
            coming.append((parameter, receive))
    for parameter, receive in coming:
        parameter.copy_((yield from arrive(receive)))
    transport.flush()
