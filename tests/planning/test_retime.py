"""Timing only what a move changes gives what timing everything gives, to the bit, and can be taken back."""

import random

import numpy as np

from pipeloom.planning.case import Case, Ints
from pipeloom.planning.retime import (
    Spread,
    first_turns,
    renew_turns,
    retime,
    shift,
    sound,
    spread,
    touched,
    undo,
)
from pipeloom.planning.walk import STUCK, Times, blank, finish, fits
from search_cases import random_case, random_order


def settled(case: Case, order: Ints) -> tuple[Times, Spread]:
    times, room = blank(case), spread(case)
    assert finish(case.arrays, order, times) < STUCK
    for stage in range(case.stages):
        fits(case.arrays, order, times, stage, *case.arrays.offset[stage : stage + 2])
    first_turns(times, room)
    return times, room


def same(one: Times, other: Times) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("start", "done", "number", "end", "where")
    ) and all(np.allclose(getattr(one, n), getattr(other, n), atol=1e-9) for n in ("rest", "level"))


def test_random_moves() -> None:
    rng = random.Random(5)
    outcomes = {"kept": 0, "unsound": 0, "circle": 0, "memory": 0}
    for number in range(150):
        case = random_case(rng, limited=number % 2 == 0)
        order = random_order(case, rng, moves=20).entries.copy()
        times, room = settled(case, order)
        for step in range(40):
            before = settled(case, order)[0]
            stage = rng.randrange(case.stages)
            begin, end = case.arrays.offset[stage : stage + 2]
            i = rng.randrange(begin, end)
            j = min(max(i + rng.randint(-8, 8), begin), end - 1)
            shift(case.arrays, order, times, i, j)
            first, last = touched(case.arrays, order, stage, i, j)
            if step % 10 == 9:
                renew_turns(times, room)
            ok = sound(case.arrays, order, times, first, last)
            outcomes["unsound"] += not ok
            if ok and not fits(case.arrays, order, times, stage, first, last + 1):
                ok = False
                outcomes["memory"] += 1
            if ok:
                ok, _ = retime(case.arrays, order, times, room, first, last, 1e9)
                outcomes["circle"] += not ok
                if not ok:
                    undo(times, room)
            fresh = blank(case)
            runs = finish(case.arrays, order, fresh) < STUCK and all(
                fits(case.arrays, order, fresh, s, *case.arrays.offset[s : s + 2]) for s in range(case.stages)
            )
            assert ok == runs
            if ok:
                outcomes["kept"] += 1
                assert same(times, fresh)
            else:
                shift(case.arrays, order, times, j, i)
                fits(case.arrays, order, times, stage, first, last + 1)
                assert same(times, before)
    assert min(outcomes.values()) > 50, outcomes


def test_a_move_that_ends_after_the_bound_is_refused_and_taken_back() -> None:
    rng = random.Random(6)
    refused = in_vain = 0
    for _ in range(60):
        case = random_case(rng)
        order = random_order(case, rng).entries.copy()
        times, room = settled(case, order)
        end = max(times.done[last - 1] for last in case.arrays.offset[1:])
        for _ in range(30):
            before = settled(case, order)[0]
            stage = rng.randrange(case.stages)
            first, last = case.arrays.offset[stage : stage + 2]
            i, j = rng.randrange(first, last), rng.randrange(first, last)
            shift(case.arrays, order, times, i, j)
            first, last = touched(case.arrays, order, stage, i, j)
            if sound(case.arrays, order, times, first, last):
                fresh = blank(case)
                made = finish(case.arrays, order, fresh)
                ok, _ = retime(case.arrays, order, times, room, first, last, end + 1e-6)
                assert not ok or made <= end + 1e-6
                refused += not ok
                in_vain += not ok and made <= end + 1e-6
                undo(times, room)
            shift(case.arrays, order, times, j, i)
            assert same(times._replace(level=before.level), before)
    assert refused > 50
    assert in_vain <= refused // 50


def test_turns_are_in_the_order_of_starts() -> None:
    rng = random.Random(7)
    case = random_case(rng)
    times, room = settled(case, random_order(case, rng).entries)
    times.start[:] = [rng.random() for _ in times.start]
    renew_turns(times, room)
    assert np.array_equal(times.start[room.at], np.sort(times.start))
    assert np.array_equal(room.at[room.turn], np.arange(case.jobs))
