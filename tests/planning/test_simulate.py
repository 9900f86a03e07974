"""Predicted times, bubbles and bytes against figures worked out by hand."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from pipeloom.planning import Costs, lower, lower_bound, roofline, simulate, simulation_json
from pipeloom.schedules import Edge, Schedule, Span, build, chain_edges, vee
from pipeloom.schedules.catalogue import CATALOGUE


def unit(name, s, v, m, b=1.0, w=1.0, comm=0.0, **options):
    schedule = build(name, stages=s, chunks=v, micro_batches=m, **options)
    costs = Costs.per_stage(s, v, 1.0, b, w, comm)
    return schedule, costs, simulate(schedule, costs)


def test_1f1b_by_hand():
    _, _, simulation = unit("1F1B", 2, 1, 2)
    # stage 0: F0 0–1, F1 1–2, X0 4–6, X1 7–9; stage 1: F0 1–2, X0 2–4, F1 4–5, X1 5–7
    assert simulation.start == [[0, 1, 4, 7], [1, 2, 4, 5]]
    assert simulation.makespan == 9
    assert simulation.bubble_global == pytest.approx(1 - 12 / 18)
    assert simulation.bubble_span == pytest.approx(1 - 12 / 18)
    assert simulation.peak == (2, 1)
    assert simulation.figures.busy == pytest.approx((6 / 9, 6 / 9))


def test_bubble_span_leaves_out_the_ramp():
    """A zero-bubble schedule: each rank is busy from its first job to its last."""
    _, _, simulation = unit("ZBH2", 4, 1, 12)
    assert simulation.bubble_span == pytest.approx(0, abs=0.06)
    assert simulation.bubble_global == pytest.approx(1 - 36 / simulation.makespan)
    assert simulation.bubble_global > simulation.bubble_span


def test_transfers_take_time_between_stages_only():
    schedule = build("FThenB", stages=2, chunks=1, micro_batches=1)
    slow = simulate(schedule, Costs.per_stage(2, 1, comm=10.0))
    assert slow.makespan == 2 + 4 + 20
    alone = simulate(build("FThenB", stages=1, chunks=2, micro_batches=1), Costs.uniform(2, comm=10.0))
    assert alone.makespan == 6


def test_latency_bandwidth_and_links():
    costs = Costs((1.0,) * 3, (1.0,) * 3, (1.0,) * 3, latency=0.5, bandwidth=10, links={(1, 2): (1.0, 2.0)})
    assert costs.delay(Edge("F", 0, 1, 20), [0, 1, 2]) == 2.5
    assert costs.delay(Edge("F", 1, 2, 20), [0, 1, 2]) == 11
    assert costs.delay(Edge("B", 2, 1, 20), [0, 1, 2]) == 2.5
    assert costs.delay(Edge("F", 1, 2, 20), [0, 0, 0]) == 0
    assert Costs.uniform(2, comm=3.0).delay(Edge("F", 0, 1, 20), [0, 1]) == 3.0


def test_memory_of_each_kind_by_hand():
    """F holds 5 (3 until B, 2 until W), B adds 7 until W; F needs 11 while it runs, W 1."""
    costs = Costs(
        (1.0,), (1.0,), (1.0,), held_forward=(3,), held_weight=(2,), held_backward=(7,),
        workspace={"F": (11,), "W": (1,)}, persistent=(100,),
    )  # fmt: skip
    schedule = Schedule.from_jobs("mine", [0], 2, [["F0.0", "F0.1", "B0.0", "W0.0", "X0.1"]])
    level = simulate(schedule, costs, []).memory[0]
    assert level.after.tolist() == [105, 110, 114, 105, 100]
    assert level.during.tolist() == [111, 116, 117, 115, 105]
    assert level.peak == 117


def test_buffers_count_from_their_post():
    schedule = build("1F1B", stages=2, micro_batches=2)
    costs = Costs.uniform(2, held_weight=10)
    edges = chain_edges(2, 1000)
    lowered = lower(schedule, edges, costs)
    simulation = simulate(schedule, costs, lowered=lowered)
    posts = [str(job) for job in lowered.jobs[1] if str(job).startswith("post")]
    assert len(posts) == 2
    # both receives are posted when stage 1 begins; each buffer goes with the F that reads it
    assert simulation.memory[1].during.tolist() == [2010, 1010, 1010, 10]
    assert simulation.memory[1].after.tolist() == [1010, 1000, 10, 0]


def test_the_timeline_has_it_all():
    schedule = build("1F1B", stages=2, micro_batches=2)
    costs = Costs.per_stage(2, 1, comm=0.5)
    edges = chain_edges(2, 8)
    costs = Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), comm=0.5, finalize=0.25, update=2.0)
    timeline = simulate(schedule, costs, lowered=lower(schedule, edges, costs)).timeline("predicted")
    work = [span for span in timeline.spans if span.kind in "FX"]
    assert len(work) == 8
    assert {span.kind for span in timeline.spans} == {"F", "X", "wait", "finalize", "update"}
    assert len(timeline.flows) == 4
    for flow in timeline.flows:
        assert flow.arrived == flow.sent + 0.5
        assert flow.nbytes == 8
    first = timeline.flows[0]
    assert (first.direction, first.source, first.target, first.sender, first.receiver) == ("F", 0, 1, 0, 1)
    figures = timeline.figures()
    last = max(span.end for span in work)
    assert figures.step_time == last + 2.25
    # spans of one rank never overlap
    for rank in range(2):
        mine = sorted(span for span in timeline.spans if span.rank == rank)
        mine.sort(key=lambda span: span.start)
        assert all(a.end <= b.start for a, b in pairwise(mine))
    assert [points[-1][1] for points in timeline.memory] == [0, 0]


def test_flows_without_lists_are_the_same_messages():
    schedule = build("ZBV", stages=2, chunks=2, micro_batches=3)
    costs = Costs.per_stage(2, 2, comm=0.25)
    edges = chain_edges(4, 8)
    plain = simulate(schedule, costs, edges)
    listed = simulate(schedule, costs, lowered=lower(schedule, edges, costs))
    for one, other in zip(sorted(plain.flows), sorted(listed.flows), strict=True):
        assert one._replace(sent=0, arrived=0) == other._replace(sent=0, arrived=0)
        assert (one.sent, one.arrived) == pytest.approx((other.sent, other.arrived))
    # the lists' buffers come on top
    assert all(a >= b for a, b in zip(listed.peak, plain.peak, strict=True))


@pytest.mark.parametrize("name", ["1F1B", "VPP", "ZBV", "DualPipeV"])
def test_planned_times_are_those_of_a_walk(name):
    """Lists that carry planned times are not walked for figures; a walk gives the same."""
    v = CATALOGUE[name].chunks or 2
    schedule = build(name, stages=3, chunks=v, micro_batches=5)
    costs = Costs.uniform(3 * v, 1, 1.25, 0.5, 0.25, held_weight=3, finalize=0.5, update=0.25)
    lowered = lower(schedule, chain_edges(3 * v, 8), costs)
    by_hand = replace(lowered, jobs=tuple(tuple(jobs) for jobs in lowered.jobs))
    planned, walked = (simulate(schedule, costs, lowered=one) for one in (lowered, by_hand))
    assert walked.walked is not None
    assert planned.walked is None
    for one, other in ((planned.start, walked.start), (planned.end, walked.end)):
        assert [pytest.approx(times) for times in one] == other
    assert planned.clock == pytest.approx(walked.clock)
    assert planned.peak == walked.peak
    assert planned.flows == walked.flows
    assert planned.others == walked.others
    figures = planned.timeline("t").figures(planned.figures.peak_bytes)
    assert figures.busy == pytest.approx(planned.figures.busy)
    assert figures.step_time == pytest.approx(planned.figures.step_time)
    assert figures.bubble_span == pytest.approx(planned.figures.bubble_span)
    assert figures.bubble_global == pytest.approx(planned.figures.bubble_global)


def test_a_link_carries_one_message_at_a_time():
    """Two messages of 10 bytes at 5 bytes a second, made at 1 and 2: the second waits until 3, and arrives at
    3 + 0.5 + 2."""
    schedule = build("FThenB", stages=2, micro_batches=2)
    edges = chain_edges(2, 10)
    free = Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), latency=0.5, bandwidth=5)
    alone = replace(free, exclusive_links=True)
    assert free.occupancy(edges[0], [0, 1]) == 2
    assert Costs.uniform(2, comm=3.0).occupancy(edges[0], [0, 1]) == 3
    assert Costs.uniform(2, comm=3.0).occupancy(edges[0], [0, 0]) == 0
    lists = lower(schedule, edges, alone)
    for simulation in (simulate(schedule, alone, edges), simulate(schedule, alone, lowered=lists)):
        up = [(flow.sent, flow.arrived) for flow in simulation.flows if flow.direction == "F"]
        assert up == [(1, 3.5), (3, 5.5)]
        assert simulation.start[1][:2] == [3.5, 5.5]
    assert simulate(schedule, free, edges).start[1][:2] == [3.5, 4.5]
    assert simulate(schedule, alone, edges).peak == simulate(schedule, free, edges).peak


def test_the_two_directions_of_a_pair_are_two_links():
    """An activation up and a gradient down at the same time don't slow each other."""
    schedule = build("1F1B", stages=2, micro_batches=3)
    costs = Costs.uniform(2, comm=1.0, exclusive_links=True)
    assert (
        simulate(schedule, costs).makespan
        == simulate(schedule, replace(costs, exclusive_links=False)).makespan
    )


def test_reductions_start_after_the_last_w_of_their_chunk():
    """Stage 0 of one: chunk 1's last X ends at 4, chunk 0's at 6. Its reduction of 3 is done at 7, then 1 more."""
    schedule = build("FThenB", stages=1, chunks=2, micro_batches=1)
    costs = Costs.uniform(2, reduce=(1.0, 3.0), finalize=0.5, update=0.25)
    simulation = simulate(schedule, costs)
    assert simulation.end[0] == [1, 2, 4, 6]
    assert simulation.others == [
        Span(0, "reduce", 1, -1, 4, 7),
        Span(0, "reduce", 0, -1, 7, 8),
        Span(0, "wait", -1, -1, 6, 8),
        Span(0, "finalize", -1, -1, 8, 8.5),
        Span(0, "update", -1, -1, 8.5, 8.75),
    ]
    assert simulation.figures.step_time == simulation.timeline("t").figures().step_time == 8.75
    hidden = simulate(schedule, Costs.uniform(2, reduce=(0.0, 2.0)))
    assert hidden.figures.step_time == 6
    split = build("ZBV", stages=1, chunks=2, micro_batches=2)
    late = simulate(split, Costs.uniform(2, reduce=(2.0, 0.0)))
    assert late.figures.step_time == late.end[0][[str(j) for j in split.jobs[0]].index("W0.1")] + 2
    with pytest.raises(ValueError, match="reduce has 3 numbers"):
        Costs.uniform(2, reduce=(1.0, 1.0, 1.0))


def test_buffers_are_reported_beside_what_is_held():
    schedule = build("1F1B", stages=2, micro_batches=2)
    costs = Costs.uniform(2, held_weight=10, persistent=(1, 2))
    edges = chain_edges(2, 1000)
    listed = simulate(schedule, costs, lowered=lower(schedule, edges, costs))
    assert listed.peak == (1021, 2012)
    assert listed.peak_held == (21, 12)
    assert listed.peak_buffered == (1000, 2000)
    plain = simulate(schedule, costs, edges)
    assert plain.peak == plain.peak_held == (21, 12)
    assert plain.peak_buffered == (0, 0)


def test_costs_of_another_model_are_refused():
    with pytest.raises(ValueError, match=r"costs are of 3 chunks and the schedule has 4 \(2 stages × 2\)"):
        simulate(build("VPP", stages=2, chunks=2, micro_batches=2), Costs.uniform(3))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"backward_b": (1.0,)}, "backward_b has 1 numbers, there are 2 chunks"),
        ({"forward": (1.0, -1.0)}, r"forward\[1\] must be a finite number ≥ 0 \(got -1.0\)"),
        ({"forward": (1.0, math.nan)}, r"forward\[1\] must be a finite number"),
        ({"comm": -1.0}, r"comm\[0\]"),
        ({"bandwidth": 0.0}, "a bandwidth > 0"),
        ({"links": {(0, 1): (-1.0, 5.0)}}, "a latency ≥ 0"),
        ({"held_weight": (1.0, 2.0, 3.0)}, "held_weight has 3 numbers"),
        ({"workspace": {"F": (1.0,)}}, "workspace of F has 1 numbers"),
    ],
)
def test_costs_are_checked(fields, says):
    with pytest.raises(ValueError, match=says):
        Costs(**({"forward": (1.0, 1.0), "backward_b": (1.0, 1.0), "backward_w": (1.0, 1.0)} | fields))


def test_costs_to_json_and_back():
    costs = Costs(
        (1.0, 2.0), (1.0, 1.0), (0.5, 0.5), links={(0, 1): (1e-6, 1e9)}, workspace=(4, 5), persistent=(7,)
    )
    assert costs.backward == (1.5, 1.5)
    assert costs.workspace_of("W", 1) == 5
    assert Costs.from_json(costs.to_json()) == costs
    with pytest.raises(ValueError, match="no field"):
        Costs.from_json(costs.to_json() | {"forwards": 3})


def test_roofline():
    assert roofline(1e9, 1e6, 1e9, 1e9) == 1.0
    assert roofline(1e6, 1e9, 1e9, 1e9) == 1.0


def test_json_form():
    schedule, costs, simulation = unit("ZBV", 2, 2, 4)
    data = simulation_json(schedule, simulation, lower_bound(schedule.placement, 4, costs))
    assert set(data) == {
        "placement", "jobs", "makespan", "bubble_global", "bubble_span", "peak", "lower_bound"
    }  # fmt: skip
    assert data["placement"] == [0, 1, 1, 0]
    assert data["jobs"][0][:2] == ["F0.0", "F0.1"]
    assert data["makespan"] >= data["lower_bound"]
    assert data["peak"] == [2, 2]


# ---- the lower bound
# -------------------------------------------------------------------------------------------


def test_bound_by_hand():
    assert lower_bound([0, 1], 2, Costs.per_stage(2)) == 7  # head 1 on stage 1, work 6
    assert lower_bound([0, 1], 1, Costs.per_stage(2)) == 5  # one micro-batch up and down: F F B B W
    assert lower_bound(vee(4), 16, Costs.per_stage(4, 2)) == 48 + 1.5
    # one activation at a time on stage 0: each micro-batch goes up and down alone
    assert lower_bound([0, 1], 3, Costs.per_stage(2), memory_limit=1) == pytest.approx(3 * 5)


def test_no_schedule_beats_the_bound():
    for name, entry in CATALOGUE.items():
        for s in (1, 2, 4):
            for v in (entry.chunks,) if entry.chunks else (1, 2, 3):
                for m in (1, 3, 4, 9):
                    schedule, costs, simulation = unit(name, s, v, m, b=1.3, w=0.6, comm=0.2)
                    bound = lower_bound(schedule.placement, m, costs)
                    tight = lower_bound(schedule.placement, m, costs, memory_limit=simulation.peak)
                    assert bound <= tight + 1e-9
                    assert tight <= simulation.makespan + 1e-9, (name, s, v, m)


def test_bound_without_edges_is_work_alone():
    assert lower_bound([0, 1], 4, Costs.per_stage(2), edges=[]) == 12
