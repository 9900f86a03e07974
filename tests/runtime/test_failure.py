"""Who gets the blame, without processes: a store and ranks that never speak."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from pipeloom.runtime import failure
from pipeloom.runtime.errors import JobError, PeerError, TransferError
from pipeloom.runtime.failure import FailureWatch
from pipeloom.runtime.transport import MemoryTransport


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(failure, "_ACKNOWLEDGE_SECONDS", 0.1)
    monkeypatch.setattr(failure, "_RECORD_SECONDS", 0.1)


def failing(watch, error):
    with watch.guard():
        raise error


class DeadStore:
    def __getattr__(self, name):
        def gone(*_):
            raise dist.DistNetworkError(f"{name}: connection reset")

        return gone


@pytest.mark.usefixtures("quick")
def test_the_first_record_wins_and_everyone_names_it():
    store = dist.HashStore()
    watches = [FailureWatch(store, t) for t in MemoryTransport.group(3)]
    cause = JobError(1, "B2.0", ValueError("bad"))
    cause.__cause__ = ValueError("bad")
    with pytest.raises(JobError):
        failing(watches[1], cause)
    for rank in (0, 2):
        with pytest.raises(
            PeerError, match=r"rank 1 failed in job B2\.0: ValueError: bad \[rank . was at: recv x\]"
        ):
            failing(watches[rank], TransferError(rank, (rank + 1) % 3, "recv x", "closed"))


@pytest.mark.usefixtures("quick")
def test_a_peer_that_died_without_a_word_is_blamed_by_all():
    store = dist.HashStore()
    watches = [FailureWatch(store, t) for t in MemoryTransport.group(3)]
    with pytest.raises(PeerError, match="rank 0: stopped because rank 2 failed: its process is gone"):
        failing(watches[0], TransferError(0, 2, "recv x", "closed"))
    with pytest.raises(PeerError, match="rank 1: stopped because rank 2 failed: its process is gone"):
        failing(watches[1], TransferError(1, 0, "recv y", "closed"))


@pytest.mark.usefixtures("quick")
def test_a_store_that_died_too_leaves_what_the_rank_saw_itself():
    watch = FailureWatch(DeadStore(), MemoryTransport.group(2)[0])
    with pytest.raises(PeerError, match="rank 1 failed: its process is gone"):
        failing(watch, TransferError(0, 1, "recv x", "closed"))
    own = FailureWatch(DeadStore(), MemoryTransport.group(2)[0])
    with pytest.raises(KeyError, match="mine"):
        failing(own, KeyError("mine"))


@pytest.mark.usefixtures("quick")
def test_a_pipeline_that_stopped_says_so():
    watch = FailureWatch(dist.HashStore(), MemoryTransport.group(2)[0])
    with pytest.raises(ZeroDivisionError):
        failing(watch, ZeroDivisionError("x"))
    with (
        pytest.raises(RuntimeError, match="stopped before: ZeroDivisionError: x; make a new one"),
        watch.guard(),
    ):
        pass
