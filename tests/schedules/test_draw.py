"""Drawings, letter for letter."""

import pytest

from pipeloom.schedules import Schedule, build, draw
from pipeloom.schedules.timing import Stuck


def test_one_chunk_a_stage():
    assert draw(build("1F1B", stages=2, micro_batches=2)).splitlines() == [
        "stage 0  F0 F1 .  .  X0--  .  X1--",
        "stage 1  .  F0 X0--  F1 X1--  .  .",
    ]


def test_two_chunks_a_stage_are_told_apart():
    assert draw(build("ZBV", stages=2, chunks=2, micro_batches=1)).splitlines() == [
        "stage 0  F0  .   .   F0' B0' W0' .   B0  W0",
        "stage 1  .   F0  F0' .   .   B0' B0  W0' W0",
    ]


def test_a_long_one_is_cut_and_says_so():
    assert draw(build("1F1B", stages=2, micro_batches=2), columns=3).splitlines() == [
        "stage 0  F0 F1 . …",
        "stage 1  .  F0 X0- …",
    ]


def test_an_unsafe_order_cannot_be_drawn():
    jobs = [["F0.0", "X0.0", "F0.1", "X0.1"], ["F1.1", "F1.0", "X1.0", "X1.1"]]
    with pytest.raises(Stuck) as caught:
        draw(Schedule.from_jobs("mine", [0, 1], 2, jobs))
    assert {stage: tuple(map(str, wait)) for stage, wait in caught.value.waits.items()} == {
        0: ("X0.0", "X1.0"),
        1: ("F1.1", "F0.1"),
    }
