"""The finalize job: from what the micro-batches summed up to what `.grad` means.

    accumulators × factor  →  sum of the slots of each parameter  →  + what earlier steps left in .grad

The slots of a parameter that several ranks hold travel to every holder; every holder sums all of them in the
same order, so that the copies stay bit-equal to each other, and to the sum that a single rank makes, for
every cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import tags
from .parameters import Gradient, ParameterStore
from .stepping import Work, arrive
from .transport import Receive, Transport


def finalize(store: ParameterStore, transport: Transport, factor: float | Tensor) -> Work[None]:
    """factor: 1/total weight where the tangents didn't hold it, times 1/loss scale. A collective call of all
    ranks.
    """
    if isinstance(factor, Tensor) or factor != 1.0:
        store.scale(factor)
    incoming = _exchange_slots(store, transport)
    for gradient in store.gradients:
        yield from _sum_slots(gradient, store, incoming)
    if any(gradient.shared for gradient in store.gradients):
        transport.flush()  # the accumulators that are being sent are cleared next
    store.clear_extras()
    store.add_carried()


def _exchange_slots(store: ParameterStore, transport: Transport) -> dict[str, Receive]:
    """Post and send the slots of shared parameters; receives by slot name. All ranks go through them in one
    order.
    """
    incoming: dict[str, Receive] = {}
    outgoing: list[tuple[int, int, Tensor]] = []
    for gradient in store.gradients:
        if not gradient.shared:
            continue
        for slot, stage in gradient.slots:
            number = tags.TIED + store.slot_number[slot.name]
            if stage == store.stage:
                accumulator = store.accumulators[slot.name]
                outgoing += [(holder, number, accumulator) for holder in gradient.holders if holder != stage]
            else:
                incoming[slot.name] = transport.post(stage, "control", number, slot.shape, slot.dtype)
    for holder, number, accumulator in outgoing:
        transport.send(holder, "control", number, accumulator)
    return incoming


def _sum_slots(gradient: Gradient, store: ParameterStore, incoming: dict[str, Receive]) -> Work[None]:
    parts: list[Tensor] = []
    for slot, _ in gradient.slots:
        if slot.name in incoming:
            parts.append((yield from arrive(incoming[slot.name])))
        else:
            parts.append(store.accumulators[slot.name])
    if parts[0] is gradient.view:
        for part in parts[1:]:
            gradient.view.add_(part)
        return
    total = torch.clone(parts[0]) if len(parts) > 1 else parts[0]
    for part in parts[1:]:
        total.add_(part)
    gradient.view.copy_(total)
