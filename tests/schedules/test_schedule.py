"""A schedule's lazy lists, placements, and schedules that a user wrote."""

import time

import pytest

from pipeloom.schedules import Job, Schedule, build, linear, loop, vee


def test_placements():
    assert linear(3) == [0, 1, 2]
    assert loop(2, 3) == [0, 1, 0, 1, 0, 1]
    assert vee(3) == [0, 1, 2, 2, 1, 0]
    assert vee(2, 3) == [0, 1, 1, 0, 0, 1]
    assert vee(1) == [0, 0]


def test_jobs_are_a_lazy_sequence():
    jobs = build("1F1B", stages=2, micro_batches=3).jobs[0]
    assert len(jobs) == 6
    assert jobs[0] == Job("F", 0, 0)
    assert jobs[-1] == Job("X", 0, 2)
    assert list(jobs[1:3]) == [Job("F", 0, 1), Job("X", 0, 0)]
    assert jobs[:2] == [Job("F", 0, 0), Job("F", 0, 1)]
    assert jobs != [Job("F", 0, 0)]
    assert jobs != "F0.0"
    assert str(jobs) == "[F0.0 F0.1 X0.0 F0.2 X0.1 X0.2]"
    assert Job("X", 0, 1) in jobs
    with pytest.raises(IndexError):
        jobs[6]


def test_written_schedules_come_back():
    built = build("ZBV", stages=3, chunks=2, micro_batches=4)
    text = [[str(job) for job in jobs] for jobs in built.jobs]
    assert Schedule.from_jobs("ZBV", built.placement, 4, text) == built
    assert Schedule.from_jobs("ZBV", built.placement, 4, [list(jobs) for jobs in built.jobs]) == built
    assert (built.stages, built.chunks, built.total_chunks, built.micro_batches) == (3, 2, 6, 4)
    assert repr(built) == "Schedule('ZBV', stages=3, chunks=2, micro_batches=4)"
    assert built != Schedule.from_jobs("mine", built.placement, 4, text)


@pytest.mark.parametrize(
    ("placement", "jobs", "says"),
    [
        ([0], [["F0"]], "'F0' is not a job: write a kind"),
        ([0], [["F1.0"]], "job F1.0 on stage 0: there are 1 chunks and 2 micro-batches"),
        ([0], [["F0.2"]], "job F0.2 on stage 0"),
        ([0, 1, 0], [[], []], "3 chunks can't be spread evenly over 2 stages"),
        ([0, 0], [[], []], r"must use each of the 2 stages, got \[0\]"),
        ([0, 1], [], "must use each of the 0 stages"),
    ],
)
def test_bad_schedules_are_refused(placement, jobs, says):
    with pytest.raises(ValueError, match=says):
        Schedule.from_jobs("mine", placement, 2, jobs)


@pytest.mark.parametrize("text", ["F0.3", "B10.0", "W2.7", "X3.12"])
def test_a_job_prints_and_parses(text):
    assert str(Job.parse(text)) == text


@pytest.mark.parametrize("name", ["VPP", "ZBV", "InterleavedZeroBubble"])
def test_large_schedules_are_quick(name):
    """A hundred thousand jobs take a fraction of a second; a quadratic step would take minutes."""
    begin = time.process_time()
    schedule = build(name, stages=64, chunks=2, micro_batches=256)
    assert time.process_time() - begin < 5
    assert sum(map(len, schedule.jobs)) >= 64 * 2 * 256 * 2
