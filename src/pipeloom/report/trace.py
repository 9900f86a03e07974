"""Timelines as Chrome trace events, for ui.perfetto.dev and chrome://tracing.

Takes Timelines, predicted or measured alike, and gives the JSON object of the Trace Event Format (Google,
"Trace Event Format", the JSON Object form): a process a rank, with a compute track, send and receive tracks,
an arrow for each message and a counter of live bytes. With several timelines each has its own group of
processes, so that predicted and measured lie under one another on one axis.

    pid   rank + group · 10ᵏ, the smallest power of ten that is not below the number of ranks
    tid   0 compute; 1 sums over replicas, which run beside it; 1000 + i send; 2000 + i receive: messages that
          overlap in time get a lane each, since slices of one track may only nest
    flow  producer's job → send → receive → consumer's job, as far as those jobs are in the timeline
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pipeloom.report.figures import check_timelines, peak_bytes
from pipeloom.schedules.timeline import Flow, Span, Timeline

COMPUTE: Final = 0
REDUCE: Final = 1
SEND: Final = 1000
RECEIVE: Final = 2000

#: Perfetto binds arrows to slices, and a slice of length 0 can't hold one: a message lasts at least 1 ns.
_SHORTEST: Final = 0.001

#: Names of Chrome's palette, the nearest to the colours of the timeline page.
_COLOURS: Final = {
    "F": "thread_state_runnable",
    "B": "thread_state_iowait",
    "W": "thread_state_running",
    "X": "terrible",
    "finalize": "grey",
    "update": "black",
    "wait": "white",
    "reduce": "olive",
}

Event = dict[str, Any]


def chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The trace of one or more timelines as a JSON-ready object.

    Times are microseconds; in a timeline whose unit isn't seconds, one unit is drawn as one millisecond
    (`otherData` says so). Raises ValueError for a timeline that can't be drawn (see `check_timelines`).
    """
    check_timelines(timelines)
    step = 1
    while step < max((t.ranks for t in timelines), default=1):
        step *= 10
    step = max(step, 10)
    events: list[Event] = []
    for group, timeline in enumerate(timelines):
        label = f"{timeline.title}: " if len(timelines) > 1 else ""
        events += _events(timeline, first_pid=group * step, label=label, first_flow=len(events))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "producer": "pipeloom",
            "timelines": [
                {
                    "title": t.title,
                    "first_pid": group * step,
                    "ranks": t.ranks,
                    "unit": t.unit,
                    "microseconds_per_unit": _scale(t),
                    "peak_bytes": list(peak_bytes(t)),
                }
                for group, t in enumerate(timelines)
            ],
        },
    }


def write_trace(path: str | Path, timelines: Sequence[Timeline]) -> Path:
    """Write `chrome_trace(timelines)` to `path` as JSON and return the path."""
    path = Path(path)
    path.write_text(
        json.dumps(chrome_trace(timelines), separators=(",", ":"), allow_nan=False), encoding="utf-8"
    )
    return path


def _scale(timeline: Timeline) -> float:
    return 1e6 if timeline.unit == "s" else 1e3


def _events(timeline: Timeline, first_pid: int, label: str, first_flow: int) -> Iterator[Event]:
    scale = _scale(timeline)
    yield from _names(timeline, first_pid, label)
    for span in timeline.spans:
        yield _job_slice(span, first_pid + span.rank, scale)
    jobs = {(s.rank, s.kind, s.chunk, s.micro_batch): s for s in timeline.spans}
    times = [_message_times(flow, scale) for flow in timeline.flows]
    sends = _lanes([flow.sender for flow in timeline.flows], times)
    receives = _lanes([flow.receiver for flow in timeline.flows], times)
    tracks = {(f.sender, SEND + lane) for f, lane in zip(timeline.flows, sends, strict=True)}
    tracks |= {(f.receiver, RECEIVE + lane) for f, lane in zip(timeline.flows, receives, strict=True)}
    for rank, tid in sorted(tracks):
        first, name = (SEND, "send") if tid < RECEIVE else (RECEIVE, "receive")
        yield from _track(first_pid + rank, tid, name if tid == first else f"{name} ({tid - first + 1})")
    for index, flow in enumerate(timeline.flows):
        tids = (SEND + sends[index], RECEIVE + receives[index])
        yield from _message(flow, times[index], jobs, first_pid, scale, tids, first_flow + index)
    for rank, points in enumerate(timeline.memory):
        for time, nbytes in points:
            yield {
                "ph": "C",
                "name": "live bytes",
                "pid": first_pid + rank,
                "ts": _us(time, scale),
                "args": {"bytes": nbytes},
            }


def _names(timeline: Timeline, first_pid: int, label: str) -> Iterator[Event]:
    for rank in range(timeline.ranks):
        pid = first_pid + rank
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{label}rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        yield from _track(pid, COMPUTE, "compute")
        if any(span.rank == rank and span.kind == "reduce" for span in timeline.spans):
            yield from _track(pid, REDUCE, "reduce")


def _track(pid: int, tid: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _job_slice(span: Span, pid: int, scale: float) -> Event:
    args: dict[str, Any] = {"kind": span.kind}
    if span.chunk >= 0:
        args["chunk"] = span.chunk
    if span.micro_batch >= 0:
        args["micro-batch"] = span.micro_batch
    track = REDUCE if span.kind == "reduce" else COMPUTE
    return _slice(span.name, span.kind, pid, track, _us(span.start, scale), _us(span.end, scale), args)


def _slice(name: str, cat: str, pid: int, tid: int, start: float, end: float, args: dict[str, Any]) -> Event:
    event: Event = {"ph": "X", "name": name, "cat": cat, "pid": pid, "tid": tid, "ts": start}
    event["dur"] = round(end - start, 3)
    event["args"] = args
    if cat in _COLOURS:
        event["cname"] = _COLOURS[cat]
    return event


def _message(
    flow: Flow,
    times: tuple[float, float],
    jobs: dict[tuple[int, str, int, int], Span],
    first_pid: int,
    scale: float,
    tids: tuple[int, int],
    identity: int,
) -> Iterator[Event]:
    """The two slices of a message and the arrow through them, from its producer to its consumer."""
    name = f"{flow.direction}{flow.source}>{flow.target}.{flow.micro_batch}"
    start, end = times
    args = {
        "kind": "activation" if flow.direction == "F" else "gradient",
        "chunk": flow.source,
        "target chunk": flow.target,
        "micro-batch": flow.micro_batch,
        "bytes": flow.nbytes,
        "from rank": flow.sender,
        "to rank": flow.receiver,
    }
    sender, receiver = first_pid + flow.sender, first_pid + flow.receiver
    yield _slice(f"send {name}", "send", sender, tids[0], start, end, args)
    yield _slice(f"receive {name}", "receive", receiver, tids[1], start, end, args)

    stops = [(sender, tids[0], start), (receiver, tids[1], round((start + end) / 2, 3))]
    kinds = ("F",) if flow.direction == "F" else ("B", "X")
    for kind in kinds:
        producer = jobs.get((flow.sender, kind, flow.source, flow.micro_batch))
        if producer is not None and _us(producer.start, scale) <= start:
            # An arrow must not run backwards in time: the middle of the job, unless the send began before it.
            middle = _us((producer.start + producer.end) / 2, scale)
            stops.insert(0, (sender, COMPUTE, min(middle, start)))
        consumer = jobs.get((flow.receiver, kind, flow.target, flow.micro_batch))
        if consumer is not None and _us(consumer.end, scale) >= stops[-1][2]:
            middle = _us((consumer.start + consumer.end) / 2, scale)
            stops.append((receiver, COMPUTE, max(middle, stops[-1][2])))
    for index, (pid, tid, ts) in enumerate(stops):
        phase = "s" if index == 0 else "f" if index == len(stops) - 1 else "t"
        event: Event = {
            "ph": phase,
            "name": "message",
            "cat": "message",
            "id": identity,
            "pid": pid,
            "tid": tid,
        }
        event["ts"] = ts
        event["bp"] = "e"  # bind to the slice around this time, not to the next one
        yield event


def _message_times(flow: Flow, scale: float) -> tuple[float, float]:
    start = _us(flow.sent, scale)
    return start, max(_us(flow.arrived, scale), round(start + _SHORTEST, 3))


def _lanes(ranks: Sequence[int], times: Sequence[tuple[float, float]]) -> list[int]:
    """The lane of each message: the lowest of its rank's that is free, so that no two overlap in one lane."""
    lanes = [0] * len(times)
    free_at: dict[int, list[float]] = {}
    for index in sorted(range(len(times)), key=lambda i: times[i]):
        start, end = times[index]
        ends = free_at.setdefault(ranks[index], [])
        lane = next((i for i, free in enumerate(ends) if free <= start), len(ends))
        ends[lane : lane + 1] = [end]
        lanes[index] = lane
    return lanes


def _us(time: float, scale: float) -> float:
    return round(time * scale, 3)
