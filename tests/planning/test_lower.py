"""The lowering: no hang whatever jobs cost, no time lost, skips and shared channels included."""

import random
import time
from dataclasses import replace

import pytest

from pipeloom.planning import Costs, Lowered, lower, simulate, verify
from pipeloom.planning.lower import recognised
from pipeloom.planning.proof import proved
from pipeloom.planning.replay import replay
from pipeloom.schedules import Edge, Phase, Schedule, Transfer, build, chain_edges, forward_only, vee
from pipeloom.schedules.catalogue import CATALOGUE
from pipeloom.schedules.timing import Stuck


def families(stages):
    for name, entry in CATALOGUE.items():
        for v in (entry.chunks,) if entry.chunks else (1, 2, 4):
            for split in (True,) if entry.splits else (False, True):
                yield name, stages, v, split


def sample(seed, count):
    """Some of all families with S 2–8, M 1–4S."""
    rng = random.Random(seed)
    everything = [(*f, m) for s in range(2, 9) for f in families(s) for m in range(1, 4 * s + 1)]
    return rng.sample(everything, count)


def makespan(walked):
    return max(ends[-1] for ends in walked.end if ends)


@pytest.mark.parametrize("part", range(3))
def test_never_hangs_and_loses_no_time(part):
    for case in sample(part, 40):
        hangs_never_and_loses_no_time(*case)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stages", range(2, 9))
def test_never_hangs_and_loses_no_time_anywhere(stages):
    for family in families(stages):
        for micro_batches in range(1, 4 * stages + 1):
            hangs_never_and_loses_no_time(*family, micro_batches)


def hangs_never_and_loses_no_time(name, s, v, split, m):
    schedule = build(name, stages=s, chunks=v, micro_batches=m, split_backward=split)
    costs = Costs.per_stage(s, v, 1, 1.1, 0.8, 0.1)
    edges = chain_edges(s * v)
    lowered = lower(schedule, edges, costs)
    free = simulate(schedule, costs, edges)
    walked = replay(lowered, costs)
    assert makespan(walked) == pytest.approx(free.makespan, rel=1e-9), (name, s, v, split, m)
    assert proved(lowered)
    # a send never waits for its post
    assert walked.start == replay(lowered, costs, rendezvous=False).start


@pytest.mark.parametrize("part", range(2))
def test_costs_other_than_planned_never_hang_it(part):
    rng = random.Random(part)
    for name, s, v, split, m in sample(10 + part, 30):
        schedule = build(name, stages=s, chunks=v, micro_batches=m, split_backward=split)
        edges = chain_edges(s * v) + skips(rng, schedule.placement)
        lowered = lower(schedule, edges, Costs.per_stage(s, v, 1, 1.1, 0.8, 0.1))
        verify(lowered)
        real = [[rng.uniform(0.0, 2.0) for _ in range(s * v)] for _ in range(3)]
        replay(lowered, Costs(*map(tuple, real), comm=rng.choice([0.0, 0.1, 5.0])))  # raises Hang


def skips(rng, placement):
    """Some edges between chunks that are no neighbours, up and down."""
    pairs = [(a, b) for b in range(len(placement)) for a in range(b - 1)]
    chosen = rng.sample(pairs, min(len(pairs), 3))
    return [e for a, b in chosen for e in (Edge("F", a, b, 8), Edge("B", b, a, 8))]


def test_costs_of_zero_are_safe_too():
    """Programs can be empty: a B of the first chunk, for one."""
    for name, s, v, split in families(4):
        schedule = build(name, stages=s, chunks=v, micro_batches=5, split_backward=split)
        lowered = lower(schedule, chain_edges(s * v), Costs.uniform(s * v, 0, 0, 0, 0))
        verify(lowered)
        replay(lowered, Costs.per_stage(s, v, 1, 2, 3, 4))


def transfers(lowered, stage):
    return [str(job) for job in lowered.jobs[stage] if isinstance(job, Transfer)]


def test_two_stages_one_micro_batch():
    schedule = build("1F1B", stages=2, micro_batches=1)
    lowered = lower(schedule, chain_edges(2, 4), Costs.uniform(2))
    assert [" ".join(str(j) for j in jobs) for jobs in lowered.jobs] == [
        "F0.0 send F0>1.0 to stage 1 post B1>0.0 from stage 1 recv B1>0.0 from stage 1 X0.0 finalize update",
        "post F0>1.0 from stage 0 recv F0>1.0 from stage 0 F1.0 X1.0 send B1>0.0 to stage 0 finalize update",
    ]
    planned = lowered.certificate
    assert [times.tolist() for times in planned.start] == [[0, 4], [1, 2]]
    assert [times.tolist() for times in planned.end] == [[1, 6], [2, 4]]
    assert [turns.tolist() for turns in planned.turn] == [[0, 3], [1, 2]]


def test_edges_within_a_stage_need_no_message():
    lowered = lower(build("ZBV", stages=2, chunks=2, micro_batches=3), chain_edges(4), Costs.uniform(4))
    messages = {job.message[:3] for jobs in lowered.jobs for job in jobs if isinstance(job, Transfer)}
    assert messages == {("F", 0, 1), ("F", 2, 3), ("B", 3, 2), ("B", 1, 0)}  # 1 and 2 share a stage


def test_no_edge_no_message_and_no_wait():
    lowered = lower(build("FThenB", stages=2, micro_batches=2), [], Costs.uniform(2))
    assert [transfers(lowered, s) for s in (0, 1)] == [[], []]
    assert lowered.certificate.start[1].tolist() == lowered.certificate.start[0].tolist()


def test_a_skip_shares_the_channel_and_waits_in_its_buffer():
    """0→1 and 0→3 go from stage 0 to stage 1: sent together, consumed far apart."""
    schedule = build("VPP", stages=2, chunks=2, micro_batches=2)
    edges = [*chain_edges(4), Edge("F", 0, 3, 8), Edge("B", 3, 0, 8)]
    lowered = lower(schedule, edges, Costs.uniform(4))
    verify(lowered)
    sent = [t for t in transfers(lowered, 0) if t.startswith("send F0")]
    assert sent == [
        "send F0>1.0 to stage 1",
        "send F0>3.0 to stage 1",
        "send F0>1.1 to stage 1",
        "send F0>3.1 to stage 1",
    ]
    mine = [t.split()[:2] for t in transfers(lowered, 1) if " F0>" in t]
    posts = [m for action, m in mine if action == "post"]
    recvs = [m for action, m in mine if action == "recv"]
    assert posts == ["F0>1.0", "F0>3.0", "F0>1.1", "F0>3.1"]
    assert recvs == ["F0>1.0", "F0>1.1", "F0>3.0", "F0>3.1"]


def test_forward_only_has_no_backward_and_no_phase():
    lowered = lower(forward_only(vee(2), 3), chain_edges(4), Costs.uniform(4))
    verify(lowered)
    assert lowered.forward_only
    assert {job.kind for jobs in lowered.compute() for job in jobs} == {"F"}
    assert not any(isinstance(job, Phase) for jobs in lowered.jobs for job in jobs)
    assert all(edge.direction == "F" for edge in lowered.edges)


def test_an_order_with_a_circle_is_refused_and_named():
    jobs = [["F0.0", "X0.0", "F0.1", "X0.1"], ["F1.1", "X1.1", "F1.0", "X1.0"]]
    schedule = Schedule.from_jobs("mine", [0, 1], 2, jobs)
    with pytest.raises(Stuck, match=r"stage 0: X0.0 waits for X1.0; stage 1: F1.1 waits for F0.1"):
        lower(schedule, chain_edges(2), Costs.uniform(2))


@pytest.mark.parametrize(
    ("edge", "says"),
    [
        (Edge("F", 1, 0), "an F edge runs to a later chunk"),
        (Edge("B", 0, 1), "a B edge to an earlier one"),
        (Edge("F", 0, 7), "a model of 2 chunks"),
        (Edge("F", 0, 1, -3), "not negative"),
        (Edge("F", 0, 1, 3), "the same edge: give it once"),
    ],
)
def test_edges_are_checked(edge, says):
    with pytest.raises(ValueError, match=says):
        lower(build("1F1B", stages=2, micro_batches=1), [*chain_edges(2), edge], Costs.uniform(2))


def test_a_missing_job_is_named():
    schedule = Schedule.from_jobs("mine", [0, 1], 2, [["F0.0", "X0.0"], ["F1.0", "X1.0"]])
    with pytest.raises(ValueError, match="no B or X of chunk 1 for micro-batch 1, on stage 1"):
        lower(schedule, chain_edges(2), Costs.uniform(2))


def test_lowered_gives_its_schedule_back():
    schedule = build("ZBV", stages=3, chunks=2, micro_batches=4)
    lowered = lower(schedule, chain_edges(6), Costs.uniform(6))
    assert isinstance(lowered, Lowered)
    assert lowered.schedule() == schedule


def test_lists_from_elsewhere_get_their_certificate_back_if_they_are_ours():
    schedule = build("ZBV", stages=2, chunks=2, micro_batches=4)
    costs = Costs.per_stage(2, 2, 1, 1.1, 0.8, 0.1)
    lowered = lower(schedule, chain_edges(4), costs)
    read = replace(lowered, jobs=tuple(tuple(jobs) for jobs in lowered.jobs))
    assert recognised(read, costs).certificate.costs == costs
    assert recognised(read, costs).jobs == lowered.jobs
    dearer = Costs.per_stage(2, 2, 1, 1.1, 0.8, 2.0)
    assert recognised(read, dearer) is read  # posts stand elsewhere under these
    late = [list(jobs) for jobs in read.jobs]
    late[0].insert(0, late[0].pop(2))
    assert recognised(replace(read, jobs=tuple(map(tuple, late))), costs).certificate is None
    assert recognised(replace(read, jobs=((), ())), costs).certificate is None
    assert recognised(replace(read, jobs=(("F0.0",), ())), costs).certificate is None


THOUSANDS = [(name, entry.chunks or 2) for name, entry in CATALOGUE.items()]


def seconds(name, s, v, m):
    """CPU seconds to generate, lower, verify and simulate."""
    begin = time.process_time()
    schedule = build(name, stages=s, chunks=v, micro_batches=m)
    costs = Costs.per_stage(s, v, 1, 1.1, 0.8, 0.1)
    lowered = lower(schedule, chain_edges(s * v, 8), costs)
    verify(lowered, costs=costs, memory_limit=1e9)
    assert simulate(schedule, costs, lowered=lowered).figures.step_time > 0
    return time.process_time() - begin


@pytest.mark.parametrize(("name", "v"), [("VPP", 2), ("ZBV", 2), ("V-Half", 2)])
def test_large_plans_take_a_second(name, v):
    """Under half a second where nothing else runs; the limit allows for a busy machine."""
    assert seconds(name, 64, v, 256) < 4


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "v"), THOUSANDS)
def test_plans_of_a_thousand_ranks_take_half_a_minute(name, v):
    assert seconds(name, 256, v, 2048) < 60
