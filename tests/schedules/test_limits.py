"""Schedules within a memory limit: they fit, any limit that holds one micro-batch will do, and more never hurts."""

import pytest

from pipeloom.schedules import build, chain_edges
from pipeloom.schedules.catalogue import CATALOGUE
from pipeloom.schedules.limits import peaks
from pipeloom.schedules.timing import times

COSTS = (1, 1.1, 0.8, 0.1)


def makespan(schedule, costs=COSTS):
    f, b, w, comm = costs
    durations = {"F": f, "B": b, "W": w, "X": b + w}
    place = schedule.placement
    return times(
        schedule,
        lambda kind, _: durations[kind],
        chain_edges(schedule.total_chunks),
        lambda edge: comm * (place[edge.source] != place[edge.target]),
    ).makespan


def peak(schedule, acts=None):
    return max(peaks(schedule, acts or [1 / schedule.chunks] * schedule.total_chunks))


def limited(name, s, v, m, limit, **more):
    return build(name, stages=s, chunks=v, micro_batches=m, unit_costs=COSTS, memory_limit=limit, **more)


def counts(jobs):
    return sorted(tuple(job) for jobs_of_stage in jobs for job in jobs_of_stage)


@pytest.mark.parametrize("name", CATALOGUE)
def test_any_limit_is_kept_and_more_is_never_slower(name):
    entry = CATALOGUE[name]
    for s, m in ((1, 3), (2, 5), (3, 3), (4, 9)):
        for v in (entry.chunks,) if entry.chunks else (1, 2, 3):
            free = build(name, stages=s, chunks=v, micro_batches=m, unit_costs=COSTS)
            before = float("inf")
            for step in range(2 * v * s + 2):
                limit = 1 + step / (2 * v)
                schedule = limited(name, s, v, m, limit)
                assert peak(schedule) <= limit + 1e-9
                assert makespan(schedule) <= before + 1e-9, (s, v, m, limit)
                before = makespan(schedule)
                assert counts(schedule.jobs) == counts(free.jobs)
                assert schedule.placement == free.placement
            assert makespan(limited(name, s, v, m, peak(free))) <= makespan(free)
            assert makespan(limited(name, s, v, m, 1e9)) <= makespan(free)


@pytest.mark.parametrize("name", CATALOGUE)
def test_limited_schedules_are_ascending(name):
    v = CATALOGUE[name].chunks or 2
    schedule = limited(name, 3, v, 7, 2, ascending=True)
    seen = {}
    for jobs in schedule.jobs:
        for kind, chunk, micro_batch in jobs:
            assert micro_batch == seen.get((kind, chunk), -1) + 1
            seen[kind, chunk] = micro_batch


def test_one_micro_batch_at_a_time():
    assert [str(job) for job in limited("VPP", 2, 2, 1, 1).jobs[1]] == ["F1.0", "F3.0", "X3.0", "X1.0"]
    assert [str(job) for job in limited("1F1B", 2, 1, 2, 1).jobs[0]] == ["F0.0", "X0.0", "F0.1", "X0.1"]


@pytest.mark.parametrize("name", ["1F1B", "VPP", "ZBV"])
@pytest.mark.parametrize("limit", [0.99, 0, -1, float("-inf")])
def test_less_than_one_micro_batch_is_refused(name, limit):
    with pytest.raises(
        ValueError, match=r"can't hold one micro-batch on stage 0, which takes 1: allow at least 1,"
    ):
        limited(name, 4, CATALOGUE[name].chunks or 2 * (name == "VPP") or 1, 8, limit)


def test_acts_of_each_chunk_count():
    """Stage 1 holds chunks 1 and 2 of a V: 5 + 1 bytes a micro-batch; stage 0 2 + 2."""
    acts = [2, 5, 1, 2]
    with pytest.raises(ValueError, match=r"on stage 1, which takes 6: allow at least 6"):
        limited("ZBV", 2, 2, 6, 5.9, acts=acts)
    before = float("inf")
    for limit in (6, 7, 9, 11, 12, 16, 24, 100):
        schedule = limited("ZBV", 2, 2, 6, limit, acts=acts)
        assert peak(schedule, acts) <= limit
        assert makespan(schedule) <= before
        before = makespan(schedule)
    free = build("ZBV", stages=2, chunks=2, micro_batches=6, unit_costs=COSTS)
    assert before <= makespan(free)
    for wrong in ([1, 1], [1, 1, 1, -1], [1, 1, 1, float("nan")]):
        with pytest.raises(ValueError, match="acts must be one finite number ≥ 0 for each of the 4 chunks"):
            limited("ZBV", 2, 2, 6, 100, acts=wrong)


def test_chunks_that_hold_nothing_are_free():
    assert limited("1F1B", 2, 1, 4, 0, acts=[0, 0]) == build("1F1B", stages=2, micro_batches=4)


def test_peaks_by_hand():
    schedule = build("ZBH1", stages=2, micro_batches=3)
    assert peaks(schedule, [1, 10]) == [2, 20]


def test_a_schedule_with_room_is_itself():
    """A limit above what a schedule takes changes nothing where nothing is faster."""
    for name, v in (("1F1B", 1), ("ZBH1", 1), ("VPP", 2), ("ZBV", 2), ("FThenB", 1)):
        free = build(name, stages=4, chunks=v, micro_batches=8, unit_costs=COSTS)
        assert limited(name, 4, v, 8, 100) == free


def test_tight_v_placements_use_the_family():
    """At V-Min's memory ZBV is no slower than V-Min, and DualPipeV no slower than ZBV."""
    for limit in (2, 3, 4):
        tight = [makespan(limited(name, 4, 2, 8, limit)) for name in ("DualPipeV", "ZBV", "V-Half", "V-Min")]
        assert tight[0] <= tight[1] + 1e-9
        assert max(tight) < 8 * 2 * (1 + 1.1 + 0.8) * 2
