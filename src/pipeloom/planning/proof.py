"""Proves lowered lists safe from their certificate, by arrays alone: seconds for millions of entries.

Takes lists as codes with the planned times of their compute jobs, and says yes or no. Yes means safe, whoever made
the lists and the times. No means nothing: `verify` then walks the lists, and either finds the mistake or finds that
they are safe for another reason.

A transfer's planned time is taken from the compute jobs beside it: a send or a post happens when the job before it
ends, a recv when the job after it begins. Then, besides every entry being there once, where it belongs:

- along a list, planned times never fall, nor do they from a message's send to its recv;
- from a message's post to its send the planned time rises, strictly;
- `turn`, the jobs' numbers in one order, rises along each list and from each send to its recv.

So ranks whose sends block until the receive is posted can't wait in a circle: times can't fall along it, so it holds
no wait of a send for its post, and what is left of it would have to rise in `turn` for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..schedules.coded import Codes
from ..schedules.schedule import BACKWARD, BACKWARD_B, BACKWARD_W, FORWARD
from .entries import POST, RECV, SEND, CodedLists, EntryCoding, Floats
from .lower import Lowered


def proved(lowered: Lowered) -> bool:
    """Whether the lists' certificate proves them safe. The edges must fit the model (`check_edges`)."""
    lists = lowered.jobs
    if not isinstance(lists, CodedLists) or lists.certificate is None or lists.coding != lowered.coding:
        return False
    tables = _Tables(lists.coding)
    return (
        all(tables.take(stage, lowered.forward_only, lists) for stage in range(lowered.stages))
        and tables.complete(lowered.forward_only)
        and tables.ordered(lowered.forward_only)
        and tables.channels_agree()
    )


@dataclass(frozen=True)
class _Walk:
    """A stage's list without phases. before[i]: how many compute jobs there are up to entry i, itself included."""

    codes: Codes
    is_job: npt.NDArray[np.bool_]
    before: Codes


class _Tables:
    """Where each job and each transfer stands in its list, and when. −1: not seen."""

    def __init__(self, coding: EntryCoding) -> None:
        self.coding = coding
        size, messages = coding.size, coding.messages
        self.placement = np.asarray(coding.placement, dtype=np.int64)
        # by chunk · M + micro-batch: entry in the list
        self.at = {kind: np.full(size, -1) for kind in (FORWARD, BACKWARD_B, BACKWARD_W)}
        # by edge · M + micro-batch, for post, recv, send
        self.transfer = [np.full(messages, -1) for _ in range(3)]
        self.when: list[Floats] = [np.full(messages, np.nan) for _ in range(3)]
        self.turn: list[Codes] = [np.full(messages, -1) for _ in range(3)]
        self.seen = {"jobs": 0, "transfers": 0}
        owners = [[coding.owner(action, edge) for edge in coding.edges] for action in range(3)]
        self.owners = np.asarray(owners, dtype=np.int64).reshape(3, len(coding.edges))
        senders, receivers = self.owners[SEND], self.owners[RECV]
        self.crosses = np.repeat(senders != receivers, coding.micro_batches)

    def take(self, stage: int, forward_only: bool, lists: CodedLists) -> bool:
        """Enters a stage's list. False: something stands where it can't."""
        codes, coding = lists.codes[stage], self.coding
        phases = [] if forward_only else [coding.transfers_end, coding.transfers_end + 1]
        tail = len(codes) - len(phases)
        if tail < 0 or codes[tail:].tolist() != phases:
            return False
        body = codes[:tail]
        if body.max(initial=-1) >= coding.transfers_end:
            return False
        walk = _Walk(body, body < coding.jobs_end, np.cumsum(body < coding.jobs_end))
        return self._take_jobs(stage, walk, lists) and self._take_transfers(stage, walk, lists)

    def _take_jobs(self, stage: int, walk: _Walk, lists: CodedLists) -> bool:
        assert lists.certificate is not None
        (at,) = np.nonzero(walk.is_job)
        kind, number = np.divmod(walk.codes[at], self.coding.size)
        if not bool((self.placement[number // self.coding.micro_batches] == stage).all()):
            return False
        for one in (FORWARD, BACKWARD_B, BACKWARD_W):
            mine = (kind == one) if one == FORWARD else (kind == one) | (kind == BACKWARD)
            self.at[one][number[mine]] = at[mine]
            self.seen["jobs"] += int(mine.sum())
        start, end, turn = (
            side[stage] for side in (lists.certificate.start, lists.certificate.end, lists.certificate.turn)
        )
        if not len(start) == len(end) == len(turn) == len(at):
            return False
        return bool((start <= end).all() and (end[:-1] <= start[1:]).all() and (turn[:-1] < turn[1:]).all())

    def _take_transfers(self, stage: int, walk: _Walk, lists: CodedLists) -> bool:
        assert lists.certificate is not None
        (at,) = np.nonzero(~walk.is_job)
        action, number = np.divmod(walk.codes[at] - self.coding.jobs_end, max(1, self.coding.messages))
        if not bool((self.owners[action, number // self.coding.micro_batches] == stage).all()):
            return False
        # between two jobs the posts and sends come first: their planned time is the earlier one
        follows = (np.diff(at) == 1) & (action[:-1] == RECV) & (action[1:] != RECV)
        if bool(follows.any()):
            return False
        start, end, turn = (
            side[stage] for side in (lists.certificate.start, lists.certificate.end, lists.certificate.turn)
        )
        jobs_before = walk.before[at]
        for one in (POST, RECV, SEND):
            mine = action == one
            job = jobs_before[mine] if one == RECV else jobs_before[mine] - 1
            if one != POST and len(job) and not (job.min() >= 0 and job.max() < len(start)):
                return False  # a recv after the last job, or a send before the first
            self.transfer[one][number[mine]] = at[mine]
            if one == POST:
                first = job < 0
                planned = np.full(len(job), -np.inf)
                planned[~first] = end[job[~first]]
                self.when[one][number[mine]] = planned
            else:
                self.when[one][number[mine]] = (start if one == RECV else end)[job]
                self.turn[one][number[mine]] = turn[job]
        self.seen["transfers"] += len(at)
        return True

    def complete(self, forward_only: bool) -> bool:
        """Every job and transfer was seen, and none twice: there are as many as there must be, and no gap."""
        kinds = (FORWARD,) if forward_only else (FORWARD, BACKWARD_B, BACKWARD_W)
        return (
            self.seen["jobs"] == len(kinds) * self.coding.size
            and all(bool((self.at[kind] >= 0).all()) for kind in kinds)
            and self.seen["transfers"] == 3 * int(self.crosses.sum())
            and all(bool((places[self.crosses] >= 0).all()) for places in self.transfer)
        )

    def ordered(self, forward_only: bool) -> bool:
        """Each job comes after what it needs, in its list and in planned time."""
        if not forward_only:
            at = self.at
            if not bool((at[FORWARD] < at[BACKWARD_B]).all() and (at[BACKWARD_B] <= at[BACKWARD_W]).all()):
                return False
        micro_batches = self.coding.micro_batches
        for number, edge in enumerate(self.coding.edges):
            if forward_only and edge.direction == "B":
                return False
            places = self.at[FORWARD if edge.direction == "F" else BACKWARD_B].reshape(-1, micro_batches)
            produced, consumed = places[edge.source], places[edge.target]
            if self.owners[SEND][number] == self.owners[RECV][number]:
                if not bool((produced < consumed).all()):
                    return False
                continue
            mine = slice(number * micro_batches, (number + 1) * micro_batches)
            post, recv, send = (places[mine] for places in self.transfer)
            if not bool((produced < send).all() and (post < recv).all() and (recv < consumed).all()):
                return False
        post_time, recv_time, send_time = (planned[self.crosses] for planned in self.when)
        rises = self.turn[SEND][self.crosses] < self.turn[RECV][self.crosses]
        return bool((post_time < send_time).all() and (send_time <= recv_time).all() and rises.all())

    def channels_agree(self) -> bool:
        """Each channel's posts come in the order of its sends."""
        channels: dict[tuple[int, int, str], list[int]] = {}
        for number, edge in enumerate(self.coding.edges):
            sender, receiver = int(self.owners[SEND][number]), int(self.owners[RECV][number])
            if sender != receiver:
                channels.setdefault((sender, receiver, edge.direction), []).append(number)
        for members in channels.values():
            sent, posted = (
                np.argsort(self.transfer[action].reshape(-1, self.coding.micro_batches)[members], axis=None)
                for action in (SEND, POST)
            )
            if not np.array_equal(sent, posted):
                return False
        return True
