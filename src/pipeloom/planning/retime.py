"""Judges a change of an order by timing only the jobs whose times it changes.

A shift within a stage mostly fills or opens a wait: few jobs notice. They are timed anew in the order of their
old starts, each once or a few times, from a set of bits; a job whose time comes out as it was stops the
spread. Should the change close a circle, times grow without end and soon pass the bound. Everything written is
logged, so that a refused change costs no more to take back. Compared with timing the whole order this makes a
search several times faster.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .case import Arrays, Case, Floats, Ints
from .compiled import compiled
from .walk import Times, joined

Bits = npt.NDArray[np.uint64]

#: a change is refused once it has timed this many times all jobs
_PATIENCE: Final = 2

#: position of a lone bit, by its product with a de Bruijn sequence (Leiserson et al. 1998)
_SEQUENCE: Final = np.uint64(0x03F79D71B4CB0A89)
_POSITION: Final = np.zeros(64, dtype=np.int64)
for _bit in range(64):
    _POSITION[((0x03F79D71B4CB0A89 << _bit) & 0xFFFFFFFFFFFFFFFF) >> 58] = _bit


class Spread(NamedTuple):
    """Working memory. turn[i]: the i-th entry's number in the order of starts; at: its inverse; dirty: bits by
    turn. The log holds places with their old start and done, and jobs with their old end."""

    turn: Ints
    at: Ints
    dirty: Bits
    places: Ints
    starts: Floats
    dones: Floats
    jobs: Ints
    ends: Floats
    logged: Ints


def spread(case: Case) -> Spread:
    """Room for changes of a case's orders."""
    entries = case.jobs
    log = _PATIENCE * entries + 1
    return Spread(
        turn=np.zeros(entries, dtype=np.int64),
        at=np.zeros(entries, dtype=np.int64),
        dirty=np.zeros(entries // 64 + 1, dtype=np.uint64),
        places=np.zeros(log, dtype=np.int64),
        starts=np.zeros(log),
        dones=np.zeros(log),
        jobs=np.zeros(log, dtype=np.int64),
        ends=np.zeros(log),
        logged=np.zeros(2, dtype=np.int64),
    )


def first_turns(t: Times, s: Spread) -> None:
    """Puts entries in the order of their starts."""
    s.at[:] = np.argsort(t.start, kind="stable")
    s.turn[s.at] = np.arange(len(s.at))


@compiled
def renew_turns(t: Times, s: Spread) -> None:
    """The same for entries that are nearly in order."""
    for turn in range(1, len(s.at)):
        i = s.at[turn]
        place = turn
        while place > 0 and t.start[s.at[place - 1]] > t.start[i]:
            s.at[place] = s.at[place - 1]
            place -= 1
        s.at[place] = i
    for turn in range(len(s.at)):
        s.turn[s.at[turn]] = turn


@compiled
def shift(a: Arrays, order: Ints, t: Times, i: int, j: int) -> None:
    """Moves the entry at i to j; those between give way. Keeps t.number, t.where and t.rest."""
    total, size = a.total, a.micro_batches
    entry = order[i]
    m = t.number[i]
    plain = entry if entry < 3 * total else entry - total
    step = 1 if j > i else -1
    place = i
    while place != j:
        other = order[place + step]
        number = t.number[place + step]
        if other == plain or (other == plain + total and plain >= 2 * total):
            number -= step
            m += step
        order[place] = other
        t.number[place] = number
        if other < 2 * total:
            t.where[other * size + number] = place
        place += step
    order[j] = entry
    t.number[j] = m
    if entry < 2 * total:
        t.where[entry * size + m] = j
    for place in range(max(i, j), min(i, j), -1):
        other = order[place]
        t.rest[place - 1] = t.rest[place] + a.least[other if other < 3 * total else other - total]


@compiled
def touched(a: Arrays, order: Ints, stage: int, i: int, j: int) -> tuple[int, int]:
    """The first and the last entry that a move from i to j changes: with the B before whose W joined or left it,
    and the W behind that did."""
    first, last = min(i, j), max(i, j)
    if first > a.offset[stage] and a.total <= order[first - 1] < 2 * a.total:
        first -= 1
    if last + 1 < a.offset[stage + 1] and order[last + 1] >= 3 * a.total:
        last += 1
    return first, last


@compiled
def sound(a: Arrays, order: Ints, t: Times, first: int, last: int) -> bool:
    """Whether the entries from `first` to `last` come after what they need of their own stage."""
    total, size = a.total, a.micro_batches
    for i in range(first, last + 1):
        entry = order[i]
        m = t.number[i]
        if entry >= 2 * total:
            plain = entry if entry < 3 * total else entry - total
            if t.where[(plain - total) * size + m] > i:
                return False
            continue
        if entry >= total and t.where[(entry - total) * size + m] > i:
            return False
        for k in range(a.into[entry], a.into[entry + 1]):
            if a.near[k] and t.where[a.source[k] * size + m] > i:
                return False
    return True


@compiled
def retime(
    a: Arrays, order: Ints, t: Times, s: Spread, first: int, last: int, bound: float
) -> tuple[bool, int]:
    """Times the order after its entries from `first` to `last`, of one stage, changed. (False, jobs timed) as
    soon as a job passes `bound`: `undo` then restores the times, once the entries are as they were. Now and
    then a job passes it for a moment, on a time of an input that is about to fall: a change is refused in vain,
    but none is accepted that ends after the bound."""
    total, size = a.total, a.micro_batches
    offset, duration, into, source, delay, out, target = (
        a.offset,
        a.duration,
        a.into,
        a.source,
        a.delay,
        a.out,
        a.target,
    )
    start, done, number, end = t.start, t.done, t.number, t.end
    dirty, turns = s.dirty, s.turn
    word = len(dirty)
    for i in range(first, last + 1):
        turn = turns[i]
        dirty[turn >> 6] |= np.uint64(1) << np.uint64(turn & 63)
        word = min(word, turn >> 6)
    logged = jobs = 0
    most = _PATIENCE * len(order)
    words = len(dirty)
    while word < words:
        bits = dirty[word]
        if bits == 0:
            word += 1
            continue
        low = bits & (~bits + np.uint64(1))
        dirty[word] = bits ^ low
        i = s.at[(word << 6) + _POSITION[np.int64((low * _SEQUENCE) >> np.uint64(58))]]
        entry = order[i]
        m = number[i]
        stage = a.stage_of[entry % total]
        begin = done[i - 1] if i > offset[stage] else 0.0
        final = i + 1 == offset[stage + 1]
        rest = t.rest[i]
        if entry >= 2 * total:
            if entry < 3 * total:
                finished = begin + duration[entry]
            elif i > offset[stage] and joined(order[i - 1], entry, total) and number[i - 1] == m:
                finished = begin
            else:
                finished = begin + duration[entry - total]
        else:
            for k in range(into[entry], into[entry + 1]):
                begin = max(begin, end[source[k] * size + m] + delay[k])
            finished = begin + duration[entry]
            if not final and joined(entry, order[i + 1], total) and number[i + 1] == m:
                finished += duration[entry + 2 * total]
                rest = t.rest[i + 1]
        if logged == most or finished + rest > bound:
            dirty[word:] = 0
            s.logged[0], s.logged[1] = logged, jobs
            return False, logged
        s.places[logged] = i
        s.starts[logged] = start[i]
        s.dones[logged] = done[i]
        logged += 1
        start[i] = begin
        if finished != done[i]:
            done[i] = finished
            if not final:
                turn = turns[i + 1]
                dirty[turn >> 6] |= np.uint64(1) << np.uint64(turn & 63)
                word = min(word, turn >> 6)
        if entry < 2 * total and finished != end[entry * size + m]:
            job = entry * size + m
            s.jobs[jobs] = job
            s.ends[jobs] = end[job]
            jobs += 1
            end[job] = finished
            for k in range(out[entry], out[entry + 1]):
                turn = turns[t.where[target[k] * size + m]]
                dirty[turn >> 6] |= np.uint64(1) << np.uint64(turn & 63)
                word = min(word, turn >> 6)
    s.logged[0], s.logged[1] = logged, jobs
    return True, logged


@compiled
def undo(t: Times, s: Spread) -> None:
    """Restores the times that the last `retime` changed."""
    for k in range(s.logged[0] - 1, -1, -1):
        t.start[s.places[k]] = s.starts[k]
        t.done[s.places[k]] = s.dones[k]
    for k in range(s.logged[1] - 1, -1, -1):
        t.end[s.jobs[k]] = s.ends[k]
    s.logged[:] = 0
