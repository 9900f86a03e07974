"""Checks of a plan's transfers: each message once on both sides, in the right place, in one order a
channel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ..schedules.jobs import Edge, Transfer
from .errors import JobKey, MessageKey, PlanError, message_name, some
from .lower import Channel, Lowered

#: (stage, index) of each F, B and W
Where = Mapping[JobKey, tuple[int, int]]


@dataclass
class Sides:
    """Indices of a message's post, recv and send in their lists."""

    post: int
    recv: int
    send: int


def check_transfers(lowered: Lowered, where: Where) -> dict[MessageKey, Sides]:
    found: defaultdict[tuple[str, MessageKey], list[tuple[int, int, int]]] = defaultdict(list)
    for stage, jobs in enumerate(lowered.jobs):
        for index, job in enumerate(jobs):
            if isinstance(job, Transfer):
                found[job.action, job.message].append((stage, index, job.peer))
    messages: dict[MessageKey, Sides] = {}
    for edge in lowered.edges:
        sender, receiver = lowered.placement[edge.source], lowered.placement[edge.target]
        if sender == receiver:
            continue
        for micro_batch in range(lowered.micro_batches):
            message = (edge.direction, edge.source, edge.target, micro_batch)
            sides = Sides(
                *(
                    _one_side(found.pop((action, message), []), action, message, own, peer)
                    for action, own, peer in (
                        ("post", receiver, sender),
                        ("recv", receiver, sender),
                        ("send", sender, receiver),
                    )
                )
            )
            _between(lowered, where, edge, micro_batch, sides)
            messages[message] = sides
    for (action, message), places in found.items():
        stage, index, _ = places[0]
        raise PlanError(
            "transfers",
            f"stage {stage} has {action} of {message_name(message)} at entry {index}, and no such message "
            "is needed: there is no such edge, or it joins chunks of one stage",
        )
    return messages


def _one_side(
    places: list[tuple[int, int, int]], action: str, message: MessageKey, own: int, peer: int
) -> int:
    if not places:
        raise PlanError(
            "transfers", f"no {action} of {message_name(message)}: stage {own} needs one, with stage {peer}"
        )
    if len(places) > 1:
        at = some([f"stage {stage} entry {index}" for stage, index, _ in places])
        raise PlanError(
            "transfers", f"{len(places)} times {action} of {message_name(message)}: {at}; there must be one"
        )
    stage, index, with_stage = places[0]
    if (stage, with_stage) != (own, peer):
        raise PlanError(
            "transfers",
            f"{action} of {message_name(message)} is on stage {stage} with stage {with_stage} (entry "
            f"{index}); it belongs on stage {own}, with stage {peer}",
        )
    return index


def _between(lowered: Lowered, where: Where, edge: Edge, micro_batch: int, sides: Sides) -> None:
    """Producer before send; post before recv before consumer."""
    sender, produced = where[edge.direction, edge.source, micro_batch]
    receiver, consumed = where[edge.direction, edge.target, micro_batch]
    name = message_name((edge.direction, edge.source, edge.target, micro_batch))
    if sides.send < produced:
        raise PlanError(
            "dependencies",
            f"stage {sender} sends {name} (entry {sides.send}) before {lowered.jobs[sender][produced]} "
            f"(entry {produced}) makes it",
        )
    if sides.recv > consumed:
        raise PlanError(
            "dependencies",
            f"stage {receiver}: {lowered.jobs[receiver][consumed]} (entry {consumed}) needs {name}, whose "
            f"recv comes later (entry {sides.recv})",
        )
    if sides.post > sides.recv:
        raise PlanError(
            "transfers",
            f"stage {receiver} waits for {name} (entry {sides.recv}) before its receive is posted (entry "
            f"{sides.post})",
        )


def check_channels(lowered: Lowered, messages: dict[MessageKey, Sides]) -> None:
    channels: defaultdict[Channel, list[MessageKey]] = defaultdict(list)
    for message in messages:
        direction, source, target, _ = message
        channels[lowered.placement[source], lowered.placement[target], direction].append(message)
    for (sender, receiver, direction), members in channels.items():
        sent = sorted(members, key=lambda m: messages[m].send)
        posted = sorted(members, key=lambda m: messages[m].post)
        for number, (one, other) in enumerate(zip(sent, posted, strict=True)):
            if one != other:
                raise PlanError(
                    "channels",
                    f"{direction} messages from stage {sender} to stage {receiver} are sent in one order "
                    f"and posted in another: number {number} is sent as {message_name(one)} (entry "
                    f"{messages[one].send} of stage {sender}) and posted as {message_name(other)} (entry "
                    f"{messages[other].post} of stage {receiver})",
                )
