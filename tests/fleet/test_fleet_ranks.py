"""Graphs of one's own on real ranks over Gloo; a rank that raises, one that is killed, one that stalls."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from pipeloom.fleet import INFINITE, Dependency, Graph, NodeType, TaskError, TaskNode, connect, run
from pipeloom.runtime.errors import PeerError


def fan_graph(times):
    """Rank 0 makes x, all ranks work on it, rank 0 adds up."""
    make = TaskNode(
        0, 0, times, lambda scope: {"x": torch.full((300, 300), float(scope.index)), "k": scope.index}
    )
    add = TaskNode(
        0,
        1,
        times,
        lambda scope: scope.root.setdefault("sums", []).append(
            [float(scope["x1"].mean()), float(scope["x2"].mean()), scope["k1"] + scope["k2"]]
        ),
    )
    tasks = [make, add]
    for rank in (1, 2):
        work = TaskNode(rank, 1 + rank, times, lambda s, r=rank: {f"x{r}": s["x"] * r, f"k{r}": s["k"]})
        last = TaskNode(
            rank, 3 + rank, times, lambda s: s.root.setdefault("seen", []).append(s.index), NodeType.AMPLIFIER
        )
        last.run_pre_steps, last.run_at_offset = 2, 1
        connect(make, work, buffer_size=rank, carries=("x", "k"), keep=True)
        connect(work, add, buffer_size=INFINITE if rank == 1 else 2, carries=(f"x{rank}", f"k{rank}"))
        connect(work, last)
        tasks += [work, last]
    return Graph(tasks)


def fan(_rank, _size):
    root = run(fan_graph(5))
    return {"sums": root.get("sums"), "seen": root.get("seen")}


def test_fan_out_and_fan_in_over_three_ranks(ranks):
    first, *others = ranks(fan, 3)
    assert first["sums"] == [[k, 2.0 * k, 2 * k] for k in range(5)]
    assert [other["seen"] for other in others] == [[1, 3], [1, 3]]


def loop(_rank, _size, times):
    """A number goes round over both ranks until it is below 3; only rank 0 has a Cond."""
    start = TaskNode(0, 0, times, lambda s: {"x": torch.tensor(4.0 * s.index), "more": True}, NodeType.START)
    cond = TaskNode(0, 1, times, node_type=NodeType.COND, cond_var_name="more")
    halve = TaskNode(0, 2, times, lambda s: {"x": s["x"] / 2})
    add = TaskNode(1, 3, times, lambda s: {"x": s["x"] + 1, "more": float(s["x"] + 1) >= 3})
    end = TaskNode(0, 4, times, lambda s: s.root.setdefault("found", []).append([s.index, float(s["x"])]))
    connect(start, cond, buffer_size=2)
    connect(cond, halve)
    connect(halve, add, carries=("x",))
    connect(add, cond, dependency=Dependency.LOOP, carries=("x", "more"))
    connect(cond, end, dependency=Dependency.STOP_LOOP, carries=("x",))
    return sorted(run(Graph([start, cond, halve, add, end])).get("found", []))


def test_a_loop_over_two_ranks(ranks):
    def expected(x):
        while True:
            x = x / 2 + 1
            if x < 3:
                return x

    found, none = ranks(loop, 2, 5)
    assert found == [[k, expected(4.0 * k)] for k in range(5)]
    assert none == []


def fail(_rank, _size, how):
    def work(scope):
        if scope.index == 1:
            if how == "raise":
                raise ArithmeticError("the sky fell")
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(5)

    a, b, c = TaskNode(0, 0, 4), TaskNode(1, 1, 4, work, name="bad"), TaskNode(2, 2, 4)
    connect(a, b)
    connect(b, c)
    dist.barrier()
    began = time.monotonic()
    try:
        run(Graph([a, b, c]), timeout=1.5 if how == "stall" else 60.0)
    except (TaskError, PeerError) as error:
        return [type(error).__name__, str(error), time.monotonic() - began]
    return ["no error", "", time.monotonic() - began]


def test_a_task_that_raises_is_named_by_every_rank(ranks):
    for rank, (kind, text, seconds) in enumerate(ranks(fail, 3, "raise")):
        assert kind == ("TaskError" if rank == 1 else "PeerError")
        assert text.startswith(f"rank {rank}:")
        assert "bad (Compute, task 1 on rank 1) in scope 1" in text
        assert "ArithmeticError: the sky fell" in text
        assert seconds < 8
        if rank != 1:
            assert 'raise ArithmeticError("the sky fell")' in text


def test_a_killed_rank_is_named_by_the_others(ranks):
    outcomes = ranks.outcomes(fail, 3, "kill")
    assert outcomes[1].kind == "died"
    for rank in (0, 2):
        kind, text, seconds = outcomes[rank].value
        assert kind == "PeerError", text
        assert f"rank {rank}: stopped because rank 1 failed: its process is gone" in text
        assert seconds < 8


def test_a_stalled_rank_ends_the_run_of_all(ranks):
    outcomes = ranks.outcomes(fail, 3, "stall")
    for rank in (0, 2):
        kind, text, seconds = outcomes[rank].value
        assert kind == "PeerError", text
        assert f"rank {rank}: stopped because rank 1 failed: it has stalled" in text
        assert "nothing came for 1.5 s (the time-out)" in text
        assert seconds < 8
