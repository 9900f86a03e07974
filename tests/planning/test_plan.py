"""Plans: made, shown, written, read back; and that planning needs no torch."""

import json
import subprocess
import sys

import numpy as np
import pytest

import pipeloom.planning.plan as plan_module
from pipeloom.planning import Costs, Plan, PlanError
from pipeloom.planning.words import pack
from pipeloom.schedules import Edge, build, chain_edges


def make(name="ZBV", s=2, v=2, m=3, **options):
    schedule = build(name, stages=s, chunks=v, micro_batches=m)
    costs = Costs(
        (1.0,) * (s * v), (1.1,) * (s * v), (0.8,) * (s * v), latency=0.1, held_weight=(10,) * (s * v)
    )
    return Plan.make(schedule, chain_edges(s * v, 64), costs, **options)


def through_text(plan):
    return json.loads(json.dumps(plan.to_json()))


def test_json_and_back():
    plan = make(memory_limit=[1000, 2000])
    again = Plan.from_json(through_text(plan))
    assert again.jobs == plan.jobs
    assert again.digest() == plan.digest()
    assert again.predicted == plan.predicted
    assert again.memory_limit == (1000, 2000)
    assert again.to_json() == plan.to_json()
    assert (again.stages, again.chunks, again.micro_batches) == (2, 2, 3)
    assert again.ascending


def test_plans_with_very_many_entries_are_packed(monkeypatch):
    plan = make()
    monkeypatch.setattr(plan_module, "_MOST_TEXT", 10)
    data = through_text(plan)
    assert "jobs" not in data
    again = Plan.from_json(data)
    assert again.jobs == plan.jobs
    assert again.digest() == plan.digest()
    assert again.lowered.certificate is not None  # read lists are recognised, and need no walk
    assert again.predicted == plan.predicted
    with pytest.raises(PlanError, match="missing: W"):
        Plan.from_json(data | {"codes": [pack(plan.lowered.codes[0][:-3]), data["codes"][1]]})


@pytest.mark.parametrize(
    ("codes", "says"),
    [
        (["%%%", "%%%"], "can't be unpacked"),
        ([7, 7], "can't be unpacked"),
        (["AAAA", "AAAA"], "can't be unpacked"),
        ([pack(np.zeros(10**6, dtype=np.int64))] * 2, "cut off, or more than the"),
        ([pack(np.zeros(5, dtype=np.int64))[:8]] * 2, "cut off"),
        ([pack(np.array([10**9]))] * 2, "numbers that stand for no entry"),
    ],
)
def test_bad_packs_are_refused(codes, says):
    data = through_text(make())
    del data["jobs"]
    with pytest.raises(ValueError, match=says):
        Plan.from_json(data | {"codes": codes})


def test_digest_says_what_ranks_must_agree_on():
    plan = make()
    assert len(plan.digest()) == 64
    assert make().digest() == plan.digest()
    assert make(m=4).digest() != plan.digest()
    other = through_text(plan)
    other["edges"][0][3] += 1
    assert Plan.from_json(other).digest() != plan.digest()
    dearer = through_text(plan)
    dearer["costs"]["latency"] = 9.0
    assert Plan.from_json(dearer).digest() == plan.digest()


def test_a_plan_that_is_read_is_verified():
    data = through_text(make())
    data["jobs"][0].remove("W0.1")
    with pytest.raises(PlanError, match=r"missing: W0\.1 on stage 0"):
        Plan.from_json(data)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 7}, "not a plan of format 1"),
        ({"jobs": [["F0.0", "dance"]]}, "'dance' is no entry of a plan"),
        ({"costs": {"forwards": []}}, "costs have no field"),
        ({"edges": 3}, "the plan can't be read"),
        ({"memory_limit": 1}, "may use 1: allow more"),
        ({"micro_batches": 0}, "0 micro-batches"),
        ({"placement": [0, 7, 1, 0]}, r"a placement on stages \[0, 1, 7\]"),
        ({"jobs": [[], []]}, r"missing: .* and 32 more"),
    ],
)
def test_bad_files_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        Plan.from_json(through_text(make()) | change)


def test_a_missing_field_is_named():
    data = through_text(make())
    del data["placement"]
    with pytest.raises(ValueError, match="no field 'placement'"):
        Plan.from_json(data)
    with pytest.raises(ValueError, match="not a plan"):
        Plan.from_json([])


def test_limits_hold():
    assert make(memory_limit=1000).predicted.peak_bytes == make().predicted.peak_bytes
    with pytest.raises(PlanError, match=r"needs .* bytes"):
        make(memory_limit=50)


def test_predicted_figures_are_the_lists():
    plan = make("1F1B", 2, 1, 4)
    assert plan.predicted.step_time == pytest.approx(plan.timeline().figures().step_time)
    assert len(plan.predicted.peak_bytes) == 2
    assert plan.timeline().title == "predicted 1F1B"


def test_show_draws_and_tells(capsys):
    make().show()
    text = capsys.readouterr().out
    assert "ZBV: 2 stages × 2 chunks, 3 micro-batches" in text
    assert "stage 0  F0 " in text
    assert "stage 1  .   F0  F0'" in text
    assert "bubble" in text
    assert text.splitlines()[-1].endswith("1 2")


def test_one_stage_has_nothing_to_send():
    plan = make("1F1B", 1, 1, 3)
    assert [str(j) for j in plan.jobs[0]] == [
        "F0.0",
        "X0.0",
        "F0.1",
        "X0.1",
        "F0.2",
        "X0.2",
        "finalize",
        "update",
    ]
    assert plan.predicted.bubble_global == pytest.approx(0)


def test_a_skip_edge_makes_a_plan():
    schedule = build("VPP", stages=2, chunks=2, micro_batches=4)
    edges = [*chain_edges(4, 8), Edge("F", 0, 3, 8), Edge("B", 3, 0, 8)]
    plan = Plan.make(schedule, edges, Costs.uniform(4))
    assert plan.edges == tuple(sorted(edges))


def test_no_torch():
    code = (
        "import sys, pipeloom.schedules, pipeloom.planning;"
        "assert 'torch' not in sys.modules, 'torch came along';"
        "from pipeloom.planning import *; from pipeloom.schedules import *;"
        "s = build('ZBV', stages=2, chunks=2, micro_batches=2);"
        "Plan.make(s, chain_edges(4), Costs.uniform(4)).describe();"
        "assert 'torch' not in sys.modules, 'torch came along'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
