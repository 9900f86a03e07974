"""The named schedules: against recorded job lists, and against what every schedule promises."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from pipeloom.schedules import Job, Schedule, build, chain_edges, draw, forward_only, names, vee
from pipeloom.schedules.catalogue import CATALOGUE
from pipeloom.schedules.timing import times

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "paddle_job_lists.json").read_text())
KIND = {"forward": "F", "backward": "X", "backward_b": "B", "backward_w": "W"}


def whole(case):
    """Recorded without an error on any stage and without a note."""
    return bool(case["jobs"]) and not case.get("errors") and not case.get("note")


def global_chunk(case, stage, local):
    if case["schedule"] == "ZBVPP":
        return stage if local == 0 else 2 * case["stages"] - 1 - stage
    return local * case["stages"] + stage


def recorded_jobs(case):
    """The case's compute jobs, chunks counted through the model."""
    stages = []
    for stage, entries in enumerate(case["jobs"]):
        jobs = []
        for text, micro_batch in entries:
            match = re.fullmatch(r"(forward|backward_b|backward_w|backward)(\d*)", text)
            if match:
                jobs.append(Job(KIND[match[1]], global_chunk(case, stage, int(match[2] or 0)), micro_batch))
        stages.append(jobs)
    return stages


def expand(jobs):
    """X as B, W."""
    out = []
    for job in jobs:
        out += [job._replace(kind="B"), job._replace(kind="W")] if job.kind == "X" else [job]
    return out


def cases():
    for case in RECORDED:
        # VPP with split_backward and M ≠ S records Paddle ignoring the option
        ignored = case["split_backward"] and case["micro_batches"] != case["stages"]
        if whole(case) and case["schedule"] != "ZBVPP" and not ignored:
            yield pytest.param(
                case,
                id=f"{case['schedule']}{'-split' * case['split_backward']}"
                f"-S{case['stages']}-V{case['chunks']}-M{case['micro_batches']}",
            )


@pytest.mark.parametrize("case", list(cases()))
def test_recorded_lists_come_out_job_for_job(case):
    options = {"split_backward": True} if case["split_backward"] else {}
    schedule = build(
        case["schedule"],
        stages=case["stages"],
        chunks=case["chunks"],
        micro_batches=case["micro_batches"],
        **options,
    )
    assert [expand(jobs) for jobs in schedule.jobs] == [expand(jobs) for jobs in recorded_jobs(case)]


def unit_makespan(schedule):
    units = {"F": 1, "B": 1, "W": 1, "X": 2}
    edges = chain_edges(schedule.total_chunks)
    return times(schedule, lambda kind, _: units[kind], edges, lambda _: 0).makespan


def peak(schedule):
    """Most chunk forwards on one stage whose W (or X) has not run, by program order."""
    worst = 0
    for jobs in schedule.jobs:
        held = 0
        for job in jobs:
            held += (job.kind == "F") - (job.kind in "WX")
            worst = max(worst, held)
    return worst


def zbv_cases():
    for case in RECORDED:
        if whole(case) and case["schedule"] == "ZBVPP" and case["chunks"] == 2:
            yield pytest.param(case, id=f"S{case['stages']}-M{case['micro_batches']}-{case['variant']}")


@pytest.mark.parametrize("case", list(zbv_cases()))
def test_zbv_is_as_good_as_the_recorded_lists(case):
    stages, micro_batches = case["stages"], case["micro_batches"]
    ours = build("ZBVPP", stages=stages, chunks=2, micro_batches=micro_batches)
    theirs = Schedule.from_jobs("recorded", vee(stages), micro_batches, recorded_jobs(case))
    assert unit_makespan(ours) <= unit_makespan(theirs)
    if "memory_limit" not in case["variant"] or case["variant"].endswith("2SV"):
        assert peak(ours) <= peak(theirs)


# ---- what every schedule promises
# ----------------------------------------------------------------------------


def everything(stages=(1, 2, 3, 4, 5, 8), per_stage=4):
    """Every M up to per_stage·S for small S, and the telling ones for others."""
    for name, entry in CATALOGUE.items():
        for s in stages:
            telling = {1, 2, s - 1, s, s + 1, 2 * s - 1, 2 * s, 2 * s + 3, 3 * s, 4 * s - 1, 4 * s}
            for v in (entry.chunks,) if entry.chunks else (1, 2, 3, 4):
                for m in range(1, per_stage * s + 1):
                    if s < 5 or m in telling:
                        for split in (True,) if entry.splits else (False, True):
                            yield name, s, v, m, split


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_job_once_on_its_stage_and_no_cycle(name):
    for n, s, v, m, split in everything():
        if n != name:
            continue
        schedule = build(n, stages=s, chunks=v, micro_batches=m, split_backward=split)
        backward = ("B", "W") if split else ("X",)
        want = {Job(k, c, i) for k in ("F", *backward) for c in range(s * v) for i in range(m)}
        have = Counter(job for jobs in schedule.jobs for job in jobs)
        assert set(have) == want
        assert set(have.values()) == {1}
        assert all(
            schedule.placement[j.chunk] == stage for stage, jobs in enumerate(schedule.jobs) for j in jobs
        )
        unit_makespan(schedule)  # raises Stuck if the order has a cycle


@pytest.mark.parametrize("name", CATALOGUE)
def test_micro_batches_ascend_for_each_kind_and_chunk(name):
    """Sums of gradients are bit-equal between schedules only if they are summed in one order."""
    for n, s, v, m, split in everything(stages=(1, 2, 3, 4, 8), per_stage=3):
        if n != name:
            continue
        schedule = build(n, stages=s, chunks=v, micro_batches=m, split_backward=split, ascending=True)
        seen = {}
        for jobs in schedule.jobs:
            for kind, chunk, micro_batch in jobs:
                assert micro_batch == seen.get((kind, chunk), -1) + 1
                seen[kind, chunk] = micro_batch


def test_only_the_recorded_zbh1_has_descending_weights():
    for name, s, v, m, split in everything(stages=(1, 2, 4), per_stage=2):
        free = build(name, stages=s, chunks=v, micro_batches=m, split_backward=split)
        ascending = build(name, stages=s, chunks=v, micro_batches=m, split_backward=split, ascending=True)
        if name != "ZBH1":
            assert free == ascending
    recorded = build("ZBH1", stages=2, micro_batches=3)
    ascending = build("ZBH1", stages=2, micro_batches=3, ascending=True)
    assert [str(j) for j in recorded.jobs[1] if j.kind == "W"] == ["W1.1", "W1.2", "W1.0"]
    assert [str(j) for j in ascending.jobs[1] if j.kind == "W"] == ["W1.0", "W1.1", "W1.2"]
    assert [j.kind for j in recorded.jobs[1]] == [j.kind for j in ascending.jobs[1]]


def peak_limit(name, s, v, m):
    """The most chunk forwards held, as docs say it for each schedule."""
    group = m // max(1, m // s) + bool(m % max(1, m // s))
    return {
        "FThenB": v * m,
        "LoopedBFS": v * m,
        "1F1B": min(s, m),
        "Eager1F1B": min(2 * s - 1, m),
        "VPP": v * m if m == s else min(v * m, 2 * (s - 1) + (v - 1) * group + 1),
        "ZBH1": min(s, m),
        "ZBH2": min(2 * s - 1, m),
        "ZBV": min(2 * s, 2 * m),
        "V-Half": min(2 * ((s + 2) // 2), 2 * m),
        "V-Min": min(2 * ((s + 4) // 3), 2 * m),
        "DualPipeV": min(2 * s + 1, 2 * m),
        # the warm-up is shorter by s on stage s, and s W's are late
        "InterleavedZeroBubble": min(v * m, s + (v - 1) * group + 1),
    }[name]


@pytest.mark.parametrize("name", CATALOGUE)
def test_memory_is_what_the_schedule_is_known_for(name):
    for n, s, v, m, split in everything():
        if n == name and not (n == "VPP" and split and m == s):
            schedule = build(n, stages=s, chunks=v, micro_batches=m, split_backward=split)
            assert peak(schedule) <= peak_limit(n, s, v, m), (s, v, m, split)


@pytest.mark.parametrize(("s", "m"), [(2, 4), (4, 8), (4, 16), (8, 16), (8, 32)])
def test_makespans_are_what_papers_say(s, m):
    """F = B = W = 1 a stage: the bubble of a stage, in units of time. A chunk's job takes 1/V of a
    stage's."""

    def bubble(name, v=1, **options):
        schedule = build(name, stages=s, chunks=v, micro_batches=m, **options)
        return unit_makespan(schedule) / v - 3 * m

    assert bubble("FThenB") == bubble("1F1B") == bubble("Eager1F1B") == 3 * (s - 1)
    assert bubble("VPP", 2) == 3 * (s - 1) / 2
    assert bubble("VPP", 4) == 3 * (s - 1) / 4
    assert bubble("ZBH1") == bubble("ZBH2") == s - 1
    assert bubble("InterleavedZeroBubble", 2) == (s - 1) / 2
    assert bubble("InterleavedZeroBubble", 4) == (s - 1) / 4
    assert bubble("ZBV", 2) == (s - 1) / 2
    assert bubble("LoopedBFS", 2) == 3 * (s - 1) / 2
    # half of 1F1B's and two thirds, up to one micro-batch and the rounding of their memory
    assert bubble("V-Half", 2) <= 3 * (s - 1) / 2 + 1
    assert bubble("V-Min", 2) <= 2 * (s - 1)


@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_vpp_takes_any_number_of_micro_batches_at_the_fused_bound(v):
    for s in range(2, 7):
        for m in range(1, 4 * s + 1):
            schedule = build("VPP", stages=s, chunks=v, micro_batches=m)
            bound = max(m * 3 * v + (s - 1) * 3, s * 3 * v + (m - 1) * 3)
            assert unit_makespan(schedule) == bound, (s, m)


def test_splitting_backwards_costs_no_time_and_no_memory():
    for name in ("FThenB", "1F1B", "Eager1F1B", "VPP"):
        for _, s, v, m, split in (e for e in everything(stages=(1, 2, 4, 5), per_stage=3) if e[0] == name):
            if not split or (name == "VPP" and m == s):
                continue
            fused = build(name, stages=s, chunks=v, micro_batches=m)
            halves = build(name, stages=s, chunks=v, micro_batches=m, split_backward=True)
            assert unit_makespan(halves) <= unit_makespan(fused), (name, s, v, m)
            assert peak(halves) <= peak(fused), (name, s, v, m)


def test_forward_only_runs_on_any_placement():
    for s in (1, 2, 4):
        for m in (1, 3, 8):
            schedule = forward_only(vee(s), m)
            assert schedule.forward_only
            assert sum(map(len, schedule.jobs)) == 2 * s * m
            unit_makespan(schedule)
    assert not build("1F1B", stages=2, micro_batches=2).forward_only


# ---- names, options, drawings
# --------------------------------------------------------------------------------


def test_aliases_and_case():
    four = {"stages": 4, "micro_batches": 5}
    assert build("GPipe", **four) == build("FThenB", **four)
    assert build("interleaved1f1b", chunks=2, **four) == build("VPP", chunks=2, **four)
    assert build("BFS", chunks=2, **four) == build("loopedbfs", chunks=2, **four)
    assert build("LoopedBFS", chunks=2, **four).jobs == build("FThenB", chunks=2, **four).jobs
    assert build("vhalf", chunks=2, **four).name == "V-Half"
    assert build("zbvpp", chunks=2, **four) == build("ZBV", chunks=2, **four)
    assert build("ZBVZeroBubble", chunks=2, **four).placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert build("ZB-H1", **four).name == "ZBH1"
    assert set(names()) >= {"FThenB", "1F1B", "VPP", "ZBH1", "ZBV", "GPipe", "LoopedBFS"}


@pytest.mark.parametrize(
    ("name", "numbers", "says"),
    [
        ("1F1C", {}, r"no schedule '1F1C'. Did you mean 1F1B\? There are FThenB, 1F1B"),
        ("quux", {}, r"no schedule 'quux'. There are FThenB"),
        ("DualPipeV", {}, r"DualPipeV needs 2 chunks a stage \(got chunks=1\): pass chunks=2"),
        ("v-half", {"chunks": 2, "split_backward": False}, "V-Half always splits backwards"),
        ("1F1B", {"chunks": 2}, r"1F1B runs one chunk a stage \(got chunks=2\): use VPP"),
        ("ZBV", {"chunks": 3}, r"ZBV needs 2 chunks a stage \(got chunks=3\)"),
        ("ZBV", {}, r"ZBV needs 2 chunks a stage \(got chunks=1\): pass chunks=2"),
        ("VPP", {"stages": 0}, r"VPP: stages must be a whole number of at least 1 \(got 0\)"),
        ("VPP", {"chunks": 1.5}, r"VPP: chunks must be a whole number"),
        ("VPP", {"micro_batches": -1}, r"VPP: micro_batches must be"),
        ("VPP", {"micro_batches": True}, r"VPP: micro_batches must be"),
        ("VPP", {"warmup": 3}, r"VPP has no option 'warmup'; there are split_backward"),
        ("ZBH1", {"split_backward": False}, "ZBH1 always splits backwards"),
        ("1F1B", {"split_backward": "yes"}, "split_backward must be True or False"),
        ("ZBV", {"chunks": 2, "unit_costs": (1, 2)}, "unit_costs are four numbers"),
        ("ZBV", {"chunks": 2, "unit_costs": (1, 2, float("nan"), 0)}, "unit_costs are four numbers"),
        ("ZBV", {"chunks": 2, "unit_costs": (1, 2, float("inf"), 0)}, "unit_costs are four numbers"),
        ("1F1B", {"memory_limit": "16GiB"}, "memory_limit must be a number of micro-batches on one stage"),
        ("1F1B", {"memory_limit": float("nan")}, "memory_limit must be a number"),
        ("1F1B", {"acts": [1, 1, 1, 1]}, "acts are what memory_limit counts: give both, or neither"),
    ],
)
def test_refusals_say_what_is_wrong(name, numbers, says):
    with pytest.raises(ValueError, match=says):
        build(name, **({"stages": 4, "micro_batches": 8} | numbers))


@pytest.mark.parametrize("name", CATALOGUE)
def test_docstrings_show_the_schedule(name):
    entry = CATALOGUE[name]
    chunks = entry.chunks or (2 if name in ("VPP", "LoopedBFS", "InterleavedZeroBubble") else 1)
    drawing = draw(build(name, stages=4, chunks=chunks, micro_batches=6), columns=22 if chunks > 1 else None)
    rows = [line.strip() for line in entry.policy.__doc__.splitlines()]
    assert [row for row in rows if row.startswith("stage ")] == drawing.splitlines()


def test_unit_costs_move_weights():
    dear = build("ZBH2", stages=4, micro_batches=6, unit_costs=(1, 1, 3, 0.5))
    assert dear != build("ZBH2", stages=4, micro_batches=6)
    assert unit_makespan(dear)
