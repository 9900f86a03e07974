"""The same steps on real Gloo ranks: bit-equal to the in-memory form; and what happens when a rank fails."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from handmade import Chain, batch, fleet, lowered, programs
from torch.distributed.device_mesh import init_device_mesh

from pipeloom.runtime.distributed import DistributedTransport
from pipeloom.runtime.errors import JobError, PeerError
from pipeloom.runtime.executor import Executor
from pipeloom.runtime.launch import join
from pipeloom.runtime.measure import clock_offsets, measured_timeline
from pipeloom.runtime.parameters import ParameterStore
from pipeloom.runtime.stepping import exchange, finish
from pipeloom.runtime.update import Updater

ROWS = [3, 3, 2]
PLACEMENTS = {2: (0, 1), 3: (0, 1, 2), 4: (0, 1, 2, 3)}


def build(stage, placement, transport, overlap=True, **options):
    sets = {n: programs(Chain(len(placement), **options), n) for n in set(ROWS)}
    program_sets = [sets[n] for n in ROWS]
    store = ParameterStore(Chain(len(placement), **options), program_sets[0], placement, stage)
    optimizer = torch.optim.SGD([p for _, p in store.trainable()], lr=0.1, momentum=0.9)
    return Executor(
        stage,
        lowered(placement, program_sets, split=True)[stage],
        program_sets,
        placement,
        store,
        transport,
        updater=Updater(store, transport, optimizer, max_norm=0.05),
        overlap=overlap,
    )


def run(executor, batches):
    tangents = [torch.tensor(n / sum(ROWS), dtype=torch.float64) for n in ROWS]
    keys = [torch.tensor(m) for m in range(len(ROWS))]
    return finish(executor.run(batches, tangents, keys, weights=[float(n) for n in ROWS]))


def steps(_rank, size, placement, pair_groups, overlap):
    if pair_groups:
        transport = DistributedTransport(dist.new_group(list(range(size))), pair_groups=True)
    else:
        transport = join(size).transport
    executor = build(transport.rank, placement, transport, overlap, skip=True, tied=True)
    figures = []
    for step in range(3):
        result = run(executor, batch(ROWS, seed=step))
        figures += [float(result.loss).hex(), float(result.grad_norm).hex()]
    offset = finish(clock_offsets(transport))
    timeline = finish(measured_timeline(transport, executor.recorder, offset, "measured"))
    weights = {
        g.name: [float(v).hex() for v in g.parameter.detach().flatten()] for g in executor._store.gradients
    }
    transport.close()
    return [figures, weights, timeline.to_json(), offset]


@pytest.mark.parametrize(
    ("placement", "pair_groups", "overlap"),
    [((0, 1, 1, 0), False, True), ((0, 1, 0, 1), True, True), ((0, 1, 2, 2), False, False)],
)
def test_gloo_ranks_give_the_bits_of_the_in_memory_form(ranks, placement, pair_groups, overlap):
    size = max(placement) + 1
    answers = ranks(steps, size, placement, pair_groups, overlap, timeout=100)
    memory = fleet(
        placement,
        ROWS,
        True,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        max_norm=0.05,
        skip=True,
        tied=True,
    )
    expected = []
    for step in range(3):
        (result, *_) = memory.step(batch(ROWS, seed=step))
        expected += [float(result.loss).hex(), float(result.grad_norm).hex()]
    for (figures, weights, _, _), store in zip(answers, memory.stores, strict=True):
        assert figures == expected
        assert weights == {
            g.name: [float(v).hex() for v in g.parameter.detach().flatten()] for g in store.gradients
        }
    timelines = [timeline for _, _, timeline, _ in answers]
    assert all(timeline == timelines[0] for timeline in timelines)
    spans = timelines[0]["spans"]
    work = [s for s in spans if s[1] in "FBW"]
    assert len(work) == 3 * len(placement) * len(ROWS)
    assert {s[1] for s in spans} == {"F", "B", "W", "wait", "finalize", "update"}
    sends = sum(
        1
        for jobs in lowered(placement, [programs(Chain(4, skip=True), 3)] * 3)
        for j in jobs
        if str(j).startswith("send")
    )
    assert len(timelines[0]["flows"]) == sends
    assert all(flow[6] <= flow[7] for flow in timelines[0]["flows"])  # sent before it arrived, on one clock
    assert [offset for *_, offset in answers] == [0.0] * size  # one machine, one clock


def gather(rank, size):
    transport = join(size).transport
    mine = torch.arange(rank, dtype=torch.float64)
    parts = finish(exchange(transport, 7, mine, [(n,) for n in range(size)]))
    transport.close()
    return [part.tolist() for part in parts]


def test_exchange_gives_every_rank_everything(ranks):
    assert ranks(gather, 3) == [[[], [0.0], [0.0, 1.0]]] * 3


def fail(rank, size, how):
    place = join(size, timeout=3.0 if how == "stall" else 60.0)
    executor = build(rank, PLACEMENTS[size], place.transport)
    batches = batch(ROWS)
    with place.watch.guard():
        run(executor, batches)
    dist.barrier()
    began = time.monotonic()
    try:
        with place.watch.guard():
            if rank == 1 and how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 1 and how == "stall":
                time.sleep(8)
            if rank == 1:
                forward = executor.plan.items[2]
                assert str(forward.job) == "F1.0"
                forward.call = _broken
            run(executor, batches)
    except (PeerError, JobError) as error:
        kept = error  # a kept traceback must not keep the connections open
        again = ""
        try:
            with place.watch.guard():
                pass
        except RuntimeError as refused:
            again = str(refused)
        return [type(kept).__name__, str(kept), time.monotonic() - began, again]
    return ["no error", "", time.monotonic() - began, ""]


def _broken(_args):
    raise ArithmeticError("the sky fell")


def test_a_rank_that_raises_is_named_by_every_rank(ranks):
    answers = ranks(fail, 4, "raise")
    assert [kind for kind, *_ in answers] == ["PeerError", "JobError", "PeerError", "PeerError"]
    for rank, (_, text, seconds, again) in enumerate(answers):
        assert text.startswith(f"rank {rank}:")
        assert "F1.0" in text
        assert "ArithmeticError: the sky fell" in text
        if rank != 1:
            assert "rank 1 failed in job F1.0" in text
        assert seconds < 8
        assert "this pipeline stopped before" in again


def test_a_killed_rank_is_named_by_the_others(ranks):
    outcomes = ranks.outcomes(fail, 3, "kill")
    assert outcomes[1].kind == "died"
    for rank in (0, 2):
        kind, text, seconds, _ = outcomes[rank].value
        assert kind == "PeerError"
        assert "rank 1 failed: its process is gone" in text
        assert f"rank {rank} was at: " in text
        assert seconds < 8
    assert "recv F1>2.0 from stage 1, needed by job F2.0" in outcomes[2].value[1]


def test_a_stalled_rank_is_found_by_the_time_out(ranks):
    outcomes = ranks.outcomes(fail, 2, "stall")
    kind, text, seconds, _ = outcomes[0].value
    assert kind == "PeerError"
    assert "rank 1 failed: it has stalled: rank 0 waited for" in text
    assert "nothing moved for 3 s (the time-out)" in text
    assert seconds < 7


def misfit(_rank, size):
    try:
        join(size + 1)
    except ValueError as error:
        return str(error)


def mesh_misfit(_rank, size):
    told = []
    for shape, names in [((size,), ("dp",)), ((2, size // 2), ("tp", "pp")), ((size,), ("pp",))]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        try:
            place = join(mesh.size(len(shape) - 1) if names != ("pp",) else 4, mesh=mesh)
            told.append(["joined", place.stage])
        except ValueError as error:
            told.append(str(error))
    place = join(size, mesh=mesh)
    told.append(finish(exchange(place.transport, 7, torch.tensor([place.stage]), [(1,)] * size))[1].tolist())
    return told


def test_a_mesh_must_be_a_pipeline_and_its_replicas(ranks):
    unnamed, others, size, gathered = ranks(mesh_misfit, 2)[0]
    assert "one of them must be named" in unnamed
    assert "further dimensions ({'tp': 2}): a pipeline takes" in others
    assert size == 'pp_degree is 4, but dimension "pp" of the mesh has 2 ranks'
    assert gathered == [1]


def test_a_world_of_another_size_is_refused(ranks):
    text = (
        "pp_degree is 3, but 2 ranks were started: start 3, or pass a DeviceMesh that names its pipeline "
        'dimension "pp" (and, for replicas of the pipeline, one "dp")'
    )
    assert ranks(misfit, 2) == [text] * 2


def test_a_single_process_is_told_to_use_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2"):
        join(2)
    assert join(1).watch is None
