"""Bytes alive: shared memory counts once, and stays until all of its names are dropped."""

from __future__ import annotations

from pipeloom.runtime.ledger import Ledger


def test_memory_that_is_shared_counts_once_and_goes_with_its_last_name() -> None:
    ledger = Ledger()
    ledger.add("a", "memory", 10)
    ledger.add("b", "memory", 12)
    ledger.share("sent", "a")
    assert ledger.now == 12
    ledger.drop("a")
    ledger.drop("b")
    assert ledger.now == 12
    ledger.during(5)
    ledger.drop("sent")
    assert (ledger.now, ledger.peak) == (0, 17)


def test_what_is_not_there_can_not_be_shared() -> None:
    ledger = Ledger()
    ledger.share("sent", "a")
    ledger.drop("sent")
    assert (ledger.now, ledger.peak) == (0, 0)
