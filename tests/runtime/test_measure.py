"""The measured timeline of a step says what ran, where, and what was sent."""

from __future__ import annotations

from handmade import Chain, batch, fleet, lowered, programs

from pipeloom.runtime import measure
from pipeloom.runtime.ledger import Ledger
from pipeloom.runtime.measure import clock_offsets, measured_timeline
from pipeloom.runtime.stepping import drive
from pipeloom.runtime.transport import MemoryTransport
from pipeloom.schedules.jobs import Job

PLACEMENT, ROWS = (0, 1, 0, 1), [3, 3, 2]


def test_every_job_and_message_is_in_the_timeline_once():
    ranks = fleet(PLACEMENT, ROWS, split=True, skip=True)
    ranks.step(batch(ROWS))
    ranks.step(batch(ROWS))
    transports = [u.transport for u in ranks.updaters]
    assert drive([clock_offsets(t) for t in transports]) == [0.0, 0.0]
    timelines = drive(
        [
            measured_timeline(t, e.recorder, 0.0, "measured")
            for t, e in zip(transports, ranks.executors, strict=True)
        ]
    )
    assert timelines[0] == timelines[1]
    timeline = timelines[0]
    work = sorted((s.rank, s.kind, s.chunk, s.micro_batch) for s in timeline.spans if s.kind in "FBW")
    sets = [programs(Chain(4, skip=True), 3)] * 3
    lists = lowered(PLACEMENT, sets, split=True)
    expected = sorted(
        (rank, j.kind, j.chunk, j.micro_batch) for rank in (0, 1) for j in lists[rank] if isinstance(j, Job)
    )
    assert work == expected
    sends = sorted(str(j) for jobs in lists for j in jobs if str(j).startswith("send"))
    flows = sorted(
        f"send {f.direction}{f.source}>{f.target}.{f.micro_batch} to stage {f.receiver}"
        for f in timeline.flows
    )
    assert flows == sends
    assert {f.nbytes for f in timeline.flows} == {3 * 4 * 8, 2 * 4 * 8}
    assert all(0 <= s.start <= s.end for s in timeline.spans)
    assert all(f.sent <= f.arrived for f in timeline.flows)
    for points in timeline.memory:
        assert points[0] == (0.0, 0.0)
        assert points[-1][1] == 0.0
        assert max(live for _, live in points) > 0
    figures = timeline.figures()
    assert 0 < figures.bubble_global < 1  # ranks of one process take turns


def test_the_ledger_counts_shared_memory_once_and_frees_it_with_the_last():
    ledger = Ledger()
    ledger.add("a", "memory", 100)
    ledger.add("view of a", "memory", 40)
    ledger.add("b", "other", 10)
    assert ledger.now == 110
    ledger.during(50)
    ledger.drop("a")
    assert ledger.now == 110
    ledger.drop("view of a")
    ledger.drop("never there")
    assert (ledger.now, ledger.peak) == (10, 160)


class FarClock(MemoryTransport):
    """A rank in memory that has to measure its clock."""

    shares_clock = False


def test_a_clock_that_differs_is_found(monkeypatch):
    near, far = (FarClock(t.rank, t.size, t._mail) for t in MemoryTransport.group(2))
    real = measure.perf_counter
    late = {"by": 0.0}
    monkeypatch.setattr(measure, "perf_counter", lambda: real() + late["by"])

    def shifted(work):
        """Run a generator with the clock that is five seconds ahead."""
        while True:
            late["by"] = 5.0
            try:
                receive = next(work)
            except StopIteration as stop:
                return stop.value
            finally:
                late["by"] = 0.0
            yield receive

    offsets = drive([clock_offsets(near), shifted(clock_offsets(far))])
    assert offsets[0] == 0.0
    assert abs(offsets[1] + 5.0) < 0.5
    assert drive([clock_offsets(near), clock_offsets(far)]) == [0.0, 0.0]
