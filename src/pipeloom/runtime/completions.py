"""Which sends are known to be done, and when.

A sent tensor must live until its receiver has it. Waiting for that at the end of the step would keep every
activation that was ever sent
alive, and the bound on memory that a schedule is chosen for would be lost; polling a Gloo send tells nothing. But
the lists say it:
whatever a peer sends after it has received our message m tells us, when it arrives, that m is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..schedules.jobs import Direction, LoweredJob, Transfer

#: (direction, source chunk, target chunk, micro-batch)
MessageId = tuple[Direction, int, int, int]


def completions(stage: int, lists: Sequence[Sequence[LoweredJob]]) -> dict[MessageId, list[MessageId]]:
    """{message that stage receives: its own sends that are done once that message has arrived}.

    lists: the lowered jobs of all stages. A send that no later message answers for is left to the end of the step.
    """
    peers = {job.peer for job in lists[stage] if isinstance(job, Transfer)}
    #: for each peer: how many of our messages it has received before it sends each of its own
    answered: dict[MessageId, tuple[int, int]] = {}
    received: dict[int, list[MessageId]] = {peer: [] for peer in peers}
    for peer in peers:
        for job in lists[peer]:
            if not isinstance(job, Transfer) or job.peer != stage:
                continue
            if job.action == "recv":
                received[peer].append(job.message)
            elif job.action == "send":
                answered[job.message] = (peer, len(received[peer]))
    done = dict.fromkeys(peers, 0)
    sent: set[MessageId] = set()
    found: dict[MessageId, list[MessageId]] = {}
    for job in lists[stage]:
        if not isinstance(job, Transfer):
            continue
        if job.action == "send":
            sent.add(job.message)
        elif job.action == "recv" and job.message in answered:
            peer, count = answered[job.message]
            if count > done[peer]:
                found[job.message] = [m for m in received[peer][done[peer] : count] if m in sent]
                done[peer] = count
    return found
