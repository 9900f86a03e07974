"""The proof by arrays: it proves what the lowering makes, and never what the entry-by-entry checks refuse."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.planning import Costs, Lowered, PlanError, lower, verify
from pipeloom.planning.entries import Certificate, CodedLists, EntryCoding
from pipeloom.planning.proof import proved
from pipeloom.planning.words import parse
from pipeloom.schedules import Edge, Job, Phase, Transfer, build, chain_edges, forward_only, vee
from pipeloom.schedules.catalogue import CATALOGUE

COSTS = (1, 1.1, 0.8, 0.1)
GOOD = [
    lower(schedule, [*chain_edges(schedule.total_chunks, 8), *more], Costs.per_stage(s, v, *COSTS))
    for s, v, more, schedule in [
        (2, 1, [], build("1F1B", stages=2, micro_batches=3)),
        (2, 2, [], build("ZBV", stages=2, chunks=2, micro_batches=2)),
        (2, 2, [Edge("F", 0, 3), Edge("B", 3, 0)], build("VPP", stages=2, chunks=2, micro_batches=2)),
        (3, 1, [], build("ZBH1", stages=3, micro_batches=2)),
        (2, 2, [], forward_only(vee(2), 2)),
    ]
]


def by_hand(lowered):
    """The same lists as a user would give them: without a certificate."""
    return replace(lowered, jobs=tuple(tuple(jobs) for jobs in lowered.jobs))


def with_codes(lowered, codes, certificate=None):
    lists = CodedLists(codes, lowered.coding, certificate or lowered.certificate)
    return replace(lowered, jobs=lists)


def test_whatever_the_lowering_makes_is_proved():
    for name, entry in CATALOGUE.items():
        for s, m in ((1, 2), (2, 5), (3, 3), (4, 6)):
            v = entry.chunks or 2
            schedule = build(name, stages=s, chunks=v, micro_batches=m)
            assert proved(lower(schedule, chain_edges(s * v), Costs.per_stage(s, v, *COSTS))), (name, s, m)
            assert proved(lower(schedule, chain_edges(s * v), Costs.uniform(s * v))), (name, s, m)
    for lowered in GOOD:
        assert proved(lowered)


def test_lists_without_times_are_not_proved_but_verified():
    for lowered in GOOD:
        assert not proved(by_hand(lowered))
        verify(by_hand(lowered))


def refused(lowered):
    """The check that refuses the lists entry by entry, or None."""
    try:
        verify(by_hand(lowered))
    except PlanError as error:
        return error.check
    return None


@st.composite
def broken(draw):
    """Good lists with their certificate, and one to three changes of entries."""
    lowered = draw(st.sampled_from(GOOD))
    lists = [codes.tolist() for codes in lowered.codes]
    end = lowered.coding.transfers_end + 2
    for _ in range(draw(st.integers(1, 3))):
        stage = draw(st.integers(0, len(lists) - 1))
        codes = lists[stage]
        if not codes:
            continue
        at = draw(st.integers(0, len(codes) - 1))
        change = draw(st.sampled_from(["drop", "double", "swap", "neighbours", "other", "move"]))
        if change == "drop":
            del codes[at]
        elif change == "double":
            codes.insert(draw(st.integers(0, len(codes))), codes[at])
        elif change == "swap":
            to = draw(st.integers(0, len(codes) - 1))
            codes[at], codes[to] = codes[to], codes[at]
        elif change == "neighbours" and at:
            codes[at - 1], codes[at] = codes[at], codes[at - 1]
        elif change == "other":
            codes[at] = draw(st.integers(0, end - 1))
        elif change == "move":
            lists[draw(st.integers(0, len(lists) - 1))].insert(0, codes.pop(at))
    return with_codes(lowered, [np.array(codes, dtype=np.int64) for codes in lists])


@settings(max_examples=400, deadline=None)
@given(broken())
def test_no_broken_list_is_proved(lowered):
    """The certificate stays: it must not vouch for lists that it wasn't made for."""
    check = refused(lowered)
    if proved(lowered):
        assert check is None
    if check is not None:
        with pytest.raises(PlanError) as caught:
            verify(lowered)
        assert caught.value.check == check
    else:
        verify(lowered)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(GOOD), st.randoms(use_true_random=False))
def test_wrong_times_prove_no_order_that_hangs(lowered, rng):
    """Compute jobs shuffled in each list, and times as a liar would choose them."""
    coding = lowered.coding
    lists, start, turn = [], [], []
    for codes in lowered.codes:
        codes = codes.tolist()
        places = [i for i, code in enumerate(codes) if code < coding.transfers_end]
        mixed = [codes[i] for i in places]
        for _ in range(rng.randrange(1, 4)):
            one, other = (rng.randrange(len(mixed)) for _ in range(2))
            mixed[one], mixed[other] = mixed[other], mixed[one]
        for i, code in zip(places, mixed, strict=True):
            codes[i] = code
        lists.append(np.array(codes, dtype=np.int64))
        jobs = sum(code < coding.jobs_end for code in codes)
        start.append(np.sort([rng.choice([0.0, 1.0, 2.0, rng.uniform(0, 9)]) for _ in range(jobs)]))
        turn.append(np.sort(rng.sample(range(1000), jobs)))
    lie = replace(lowered.certificate, start=tuple(start), end=tuple(start), turn=tuple(turn))
    lying = with_codes(lowered, lists, lie)
    if proved(lying):
        assert refused(lying) is None


@pytest.mark.parametrize("side", ["start", "end", "turn"])
def test_times_that_do_not_fit_prove_nothing(side):
    lowered = GOOD[0]
    times = getattr(lowered.certificate, side)
    for wrong in (times[0][::-1], times[0][:-1], times[0] * np.nan if side != "turn" else times[0] * 0):
        other = replace(lowered.certificate, **{side: (wrong, *times[1:])})
        assert not proved(with_codes(lowered, lowered.codes, other))


def test_jobs_that_take_no_time_can_wait_in_a_circle_all_the_same():
    """Where all is at time 0, no time falls: that the circle isn't proved safe is the turns' doing."""
    text = [
        ["post F1>3.0 from stage 1", "recv F1>3.0 from stage 1", "F3.0", "F0.0", "send F0>2.0 to stage 1"],
        ["post F0>2.0 from stage 0", "recv F0>2.0 from stage 0", "F2.0", "F1.0", "send F1>3.0 to stage 0"],
    ]
    edges = (Edge("F", 0, 2), Edge("F", 1, 3))
    circle = Lowered("mine", (0, 1, 1, 0), 1, edges, tuple(tuple(map(parse, t)) for t in text), True)
    nothing = (np.zeros(2), np.zeros(2))
    for order in itertools.permutations(range(4)):
        turns = (np.array(order[:2]), np.array(order[2:]))
        certificate = Certificate(nothing, nothing, turns, Costs.uniform(4))
        assert not proved(with_codes(circle, circle.codes, certificate))
    straight = replace(circle, jobs=(circle.jobs[0][3:] + circle.jobs[0][:3], circle.jobs[1]))
    instants = (np.arange(2.0), np.arange(2.0))
    certificate = Certificate(instants, instants, (np.array([0, 3]), np.array([1, 2])), Costs.uniform(4))
    assert proved(with_codes(straight, straight.codes, certificate))
    verify(lower(build("1F1B", stages=2, micro_batches=3), chain_edges(2), Costs.uniform(2, 0, 0, 0)))


def test_a_certificate_is_for_its_own_edges():
    lowered = GOOD[0]
    assert not proved(replace(lowered, edges=()))
    with pytest.raises(PlanError) as caught:
        verify(replace(lowered, edges=()))
    assert caught.value.check == "transfers"


# ---- entries as integers
# ------------------------------------------------------------------------------------------


def test_codes_come_back():
    for lowered in GOOD:
        coding = lowered.coding
        for jobs, codes in zip(by_hand(lowered).jobs, lowered.codes, strict=True):
            assert [coding.encode(job) for job in jobs] == codes.tolist()
        assert by_hand(lowered).jobs == lowered.jobs
        assert lowered.jobs == by_hand(lowered).jobs
        assert lowered.jobs != by_hand(lowered).jobs[:1]
        assert next(iter(lowered.jobs)) == lowered.jobs[0] == lowered.jobs[:1][0]


@pytest.mark.parametrize(
    "entry",
    [
        Job("F", 2, 0),
        Job("F", 0, 3),
        Job("Q", 0, 0),
        Job("F", -1, 0),
        Transfer("send", "F", 0, 1, 0, 0),  # its peer is stage 1
        Transfer("send", "F", 1, 0, 0, 0),
        Transfer("hold", "F", 0, 1, 0, 1),
        Phase("dance"),
        None,
    ],
)
def test_what_does_not_fit_has_no_code(entry):
    coding = EntryCoding((0, 1), 3, (Edge("F", 0, 1), Edge("B", 1, 0)))
    with pytest.raises(ValueError, match="fits neither the model nor its edges"):
        coding.encode(entry)


@pytest.mark.parametrize("code", [-1, 10**9])
def test_numbers_that_mean_nothing_are_refused(code):
    coding = EntryCoding((0, 1), 3, (Edge("F", 0, 1),))
    with pytest.raises(ValueError, match="stage 1's list holds numbers that stand for no entry"):
        CodedLists([np.array([0]), np.array([code])], coding)
