"""The pool of ranks that other tests stand on: it must tell failures apart, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist


def add_up(rank, _size, start):
    total = torch.tensor([start + rank])
    dist.all_reduce(total)
    return [int(total), os.getpid()]


def raise_on_one(rank, _size):
    if rank == 1:
        raise KeyError("lost")
    return "fine"


def hang_on_zero(rank, _size):
    if rank == 0:
        time.sleep(60)


def die_on_one(rank, _size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_each_call_has_a_fresh_group_on_the_same_processes(ranks):
    first = ranks(add_up, 2, 10)
    assert [total for total, _ in first] == [21, 21]
    assert [total for total, _ in ranks(add_up, 3, 0)] == [3, 3, 3]
    again = ranks(add_up, 2, 20)
    assert [total for total, _ in again] == [41, 41]
    assert [pid for _, pid in again] == [pid for _, pid in first]


def spoil_the_next_group(rank: int, _size: int) -> None:
    """As when a peer was gone before this rank's connections stood."""

    def lost(*_args: object, **_options: object) -> None:
        raise RuntimeError("Connection closed by peer")

    if rank == 1:
        torch.distributed.init_process_group = lost


def test_a_rank_without_a_process_group_is_replaced(ranks):
    ranks(spoil_the_next_group, 2)
    kinds = [o.kind for o in ranks.outcomes(add_up, 2, 1, timeout=4)]
    assert kinds[1] == "no group"
    assert [total for total, _ in ranks(add_up, 2, 1)] == [3, 3]


def test_an_exception_names_its_rank(ranks):
    with pytest.raises(AssertionError, match=r"rank 1: KeyError\n(.|\n)*lost"):
        ranks(raise_on_one, 2)


def test_ranks_that_hang_or_die_are_replaced(ranks):
    hung = ranks.outcomes(hang_on_zero, 2, timeout=2)
    assert hung[0].kind == "hung"
    assert "in hang_on_zero" in hung[0].error
    died = ranks.outcomes(die_on_one, 2, timeout=30)
    assert [o.kind for o in died] == ["", "died"]
    assert [total for total, _ in ranks(add_up, 2, 1)] == [3, 3]
