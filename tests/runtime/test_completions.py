"""Sends are let go of exactly when a message of the receiver proves that they have arrived."""

from __future__ import annotations

import pytest

from pipeloom.planning import Costs, lower
from pipeloom.runtime.completions import completions
from pipeloom.schedules import build
from pipeloom.schedules.jobs import Transfer, chain_edges


def lists_of(name, stages, chunks, micro_batches):
    schedule = build(name, stages=stages, chunks=chunks, micro_batches=micro_batches)
    costs = Costs.uniform(stages * chunks, 1, 1.1, 0.8, 0.1)
    return lower(schedule, chain_edges(stages * chunks), costs).jobs


@pytest.mark.parametrize(
    ("name", "stages", "chunks"), [("1F1B", 4, 1), ("VPP", 3, 2), ("ZBV", 4, 2), ("ZBH1", 2, 1)]
)
def test_a_send_is_done_only_after_the_peer_has_received_it(name, stages, chunks):
    lists = lists_of(name, stages, chunks, 8)
    for stage in range(stages):
        for message, done in completions(stage, lists).items():
            peer = next(j.peer for j in lists[stage] if isinstance(j, Transfer) and j.message == message)
            order = [(j.action, j.message) for j in lists[peer] if isinstance(j, Transfer)]
            for sent in done:
                assert order.index(("recv", sent)) < order.index(("send", message))


def test_1f1b_holds_no_more_sent_activations_than_it_holds_micro_batches():
    lists = lists_of("1F1B", 4, 1, 16)
    for stage in range(3):
        done = completions(stage, lists)
        held = most = 0
        for job in lists[stage]:
            if isinstance(job, Transfer) and job.action == "send" and job.direction == "F":
                held += 1
            elif isinstance(job, Transfer) and job.action == "recv":
                held -= sum(m[0] == "F" for m in done.get(job.message, ()))
            most = max(most, held)
        assert most <= 4 - stage
        assert held == 0  # each activation is answered by its gradient


def test_each_send_is_let_go_of_once_and_only_own_sends_are():
    lists = lists_of("VPP", 2, 2, 6)
    for stage in range(2):
        own = {j.message for j in lists[stage] if isinstance(j, Transfer) and j.action == "send"}
        done = [m for messages in completions(stage, lists).values() for m in messages]
        assert len(done) == len(set(done))
        assert set(done) <= own
