import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from made_up_timelines import one_f_one_b

from pipeloom.report.trace import COMPUTE, RECEIVE, SEND, chrome_trace, write_trace
from pipeloom.schedules.timeline import Flow, Span, Timeline

Event = dict[str, Any]


def of_phase(trace: dict[str, Any], *phases: str) -> list[Event]:
    return [e for e in trace["traceEvents"] if e["ph"] in phases]


def enclosing(trace: dict[str, Any], event: Event) -> list[Event]:
    """The slices of the event's track that hold its time."""
    return [
        s
        for s in of_phase(trace, "X")
        if (s["pid"], s["tid"]) == (event["pid"], event["tid"])
        and s["ts"] <= event["ts"] <= s["ts"] + s["dur"] + 1e-9
    ]


def test_a_slice_a_job_with_its_arguments_in_microseconds() -> None:
    timeline = one_f_one_b(stages=2, micro_batches=3)
    trace = chrome_trace([timeline])
    slices = [s for s in of_phase(trace, "X") if s["tid"] == COMPUTE]
    assert len(slices) == len(timeline.spans)
    by_name = {s["name"]: s for s in slices}
    last = by_name["X0.2"]
    span = next(s for s in timeline.spans if s.name == "X0.2")
    assert last["args"] == {"kind": "X", "chunk": 0, "micro-batch": 2}
    assert last["pid"] == 0
    assert last["ts"] == pytest.approx(span.start * 1e6, abs=1e-3)
    assert last["dur"] == pytest.approx((span.end - span.start) * 1e6, abs=2e-3)
    assert by_name["update"]["args"] == {"kind": "update"}


def test_every_arrow_runs_from_producer_to_consumer_and_is_bound_to_slices() -> None:
    timeline = one_f_one_b(stages=3, micro_batches=5, jitter=0.5, seed=4)
    trace = chrome_trace([timeline])
    arrows = defaultdict(list)
    for event in of_phase(trace, "s", "t", "f"):
        arrows[event["id"]].append(event)
    assert len(arrows) == len(timeline.flows) == 2 * 2 * 5
    for flow, stops in zip(timeline.flows, arrows.values(), strict=True):
        assert [e["ph"] for e in stops] == ["s", "t", "t", "f"]
        assert [e["ts"] for e in stops] == sorted(e["ts"] for e in stops)
        names = [{s["name"] for s in enclosing(trace, e)} for e in stops]
        kind = "F" if flow.direction == "F" else "X"
        message = f"{flow.direction}{flow.source}>{flow.target}.{flow.micro_batch}"
        assert f"{kind}{flow.source}.{flow.micro_batch}" in names[0]
        assert f"send {message}" in names[1]
        assert f"receive {message}" in names[2]
        assert f"{kind}{flow.target}.{flow.micro_batch}" in names[3]
        assert stops[0]["pid"] == flow.sender
        assert stops[3]["pid"] == flow.receiver


def test_an_arrow_without_its_jobs_still_has_both_ends() -> None:
    trace = chrome_trace([Timeline("t", 2, [], [Flow("F", 0, 1, 0, 0, 1, 0.5, 0.5, 8)])])
    stops = of_phase(trace, "s", "t", "f")
    assert [e["ph"] for e in stops] == ["s", "f"]
    assert all(enclosing(trace, e) for e in stops)


def test_an_arrow_never_runs_backwards_where_clocks_disagree() -> None:
    spans = [Span(0, "F", 0, 0, 0.0, 1.0), Span(1, "F", 1, 0, 0.2, 0.4)]
    trace = chrome_trace([Timeline("t", 2, spans, [Flow("F", 0, 1, 0, 0, 1, 1.0, 0.9, 8)])])
    stops = of_phase(trace, "s", "t", "f")
    assert [e["ts"] for e in stops] == sorted(e["ts"] for e in stops)
    assert all(enclosing(trace, e) for e in stops)


def test_messages_that_overlap_get_lanes_of_their_own() -> None:
    flows = [Flow("F", 0, 1, m, 0, 1, 0.1 * m, 0.1 * m + 0.25, 8) for m in range(6)]
    trace = chrome_trace([Timeline("t", 2, [], flows)])
    tracks = defaultdict(list)
    for event in of_phase(trace, "X"):
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(tracks) == {(0, SEND + i) for i in range(3)} | {(1, RECEIVE + i) for i in range(3)}
    for slices in tracks.values():
        slices.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(slices))
    names = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in of_phase(trace, "M") if e["name"] == "thread_name"
    }
    assert names[0, SEND] == "send"
    assert names[0, SEND + 1] == "send (2)"
    assert names[1, RECEIVE + 2] == "receive (3)"
    assert set(tracks) <= set(names)


def test_predicted_and_measured_are_separate_named_groups() -> None:
    trace = chrome_trace([one_f_one_b("predicted", stages=12), one_f_one_b("measured", stages=12)])
    names = {e["pid"]: e["args"]["name"] for e in of_phase(trace, "M") if e["name"] == "process_name"}
    assert len(names) == 24
    assert names[3] == "predicted: rank 3"
    assert names[103] == "measured: rank 3"
    order = {
        e["pid"]: e["args"]["sort_index"] for e in of_phase(trace, "M") if e["name"] == "process_sort_index"
    }
    assert max(order[p] for p in range(12)) < min(order[100 + p] for p in range(12))
    ends = defaultdict(set)
    for event in of_phase(trace, "s", "f"):
        ends[event["id"]].add((event["pid"] // 100, event["ph"]))
    assert len(ends) == 2 * 2 * 11 * 4
    assert all(len(e) == 2 and len({group for group, _ in e}) == 1 for e in ends.values())


def test_live_bytes_are_a_counter() -> None:
    timeline = one_f_one_b(stages=2, activation=7)
    counts = [e for e in of_phase(chrome_trace([timeline]), "C") if e["pid"] == 1]
    assert [e["args"]["bytes"] for e in counts] == [b for _, b in timeline.memory[1]]
    assert counts[1]["ts"] == pytest.approx(timeline.memory[1][1][0] * 1e6, abs=1e-3)


def test_other_units_are_drawn_as_milliseconds_and_said_so() -> None:
    trace = chrome_trace([Timeline("t", 1, [Span(0, "F", 0, 0, 1.0, 3.0)], unit="units")])
    [only] = of_phase(trace, "X")
    assert (only["ts"], only["dur"]) == (1000.0, 2000.0)
    assert trace["otherData"]["timelines"][0]["microseconds_per_unit"] == 1000.0


def test_the_file_is_json(tmp_path: Path) -> None:
    timelines = [one_f_one_b()]
    path = write_trace(tmp_path / "trace.json", timelines)
    assert json.loads(path.read_text(encoding="utf-8")) == chrome_trace(timelines)


def test_a_broken_timeline_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 5"):
        chrome_trace([Timeline("t", 1, [Span(5, "F", 0, 0, 0.0, 1.0)])])
