"""The graphs of training, without programs: orders that dependencies force, counts, and what is in flight.

The event traces of Paddle's fleet executor (2.6) are one valid order each. What every valid order has is forced by the
graph: each event after those that it needs, and not before there is room. Our runs and Paddle's must both satisfy that,
with the same events.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fleet_scripts import events, shuffled, stream

from pipeloom.fleet import Graph
from pipeloom.fleet.task_node import Program
from pipeloom.fleet.training import evaluation_graph, training_graph, variable

TRACES = json.loads(Path(__file__).with_name("paddle_fleet_traces.json").read_text(encoding="utf-8"))
SHAPES = [(1, 1), (1, 4), (2, 1), (2, 8), (3, 5), (4, 8), (4, 3)]

Event = tuple[str, int]


def stub(rank: int, name: str) -> Program:
    """Makes what the task's edges to any of 4 stages carry, and nothing else."""
    way = "F" if name == "fwd" else "B"
    return lambda _: {variable(way, (rank, stage)): 0 for stage in range(4)}


def graph_of(schedule: str, stages: int, micro_batches: int) -> Graph:
    return training_graph(schedule, stages, micro_batches, stub)


def names(graph: Graph) -> list[list[Event]]:
    return [[(e.task.name, e.scope) for e in ran] for ran in events(graph)]


def forced(graph: Graph, rank: int, order: list[Event]) -> list[str]:
    """What an order of one rank breaks of what the rank's own edges force: a task runs a scope after the task above
    has; and after the task below has made room, where the buffer is finite."""
    at = {event: place for place, event in enumerate(order)}
    wrong = []
    for above, below, link in graph.edges():
        if not above.rank == below.rank == rank or min(above.task_id, below.task_id) < 0:
            continue
        for scope in range(graph.max_run_times):
            if at[above.name, scope] > at[below.name, scope]:
                wrong.append(f"{below.name}{scope} before {above.name}{scope}")
            later = scope + link.buffer_size
            bounded = link.buffer_size > 0 and later < graph.max_run_times
            if bounded and at[above.name, later] < at[below.name, scope]:
                wrong.append(f"{above.name}{later} before {below.name}{scope} has made room")
    for name in {name for name, _ in order}:
        own = [scope for n, scope in order if n == name]
        if own != sorted(own):
            wrong.append(f"{name} not in the order of scopes")
    return wrong


def traces(mode: str) -> list[Any]:
    return [
        pytest.param(trace, id=f"S{trace['stages']} M{trace['micro_batches']} rank {trace['rank']}")
        for trace in TRACES
        if trace["mode"] == mode and trace["done"]
    ]


@pytest.mark.parametrize("trace", traces("1f1b"))
def test_1f1b_runs_what_paddle_runs_under_the_same_order(trace: Any) -> None:
    graph = graph_of("1F1B", trace["stages"], trace["micro_batches"])
    theirs = [(name, scope) for name, scope, _ in trace["events"]]
    ours = names(graph)[trace["rank"]]
    assert Counter(ours) == Counter(theirs)
    assert forced(graph, trace["rank"], theirs) == []
    assert forced(graph, trace["rank"], ours) == []


def test_the_check_of_orders_can_fail() -> None:
    graph = graph_of("1F1B", 2, 3)
    order = names(graph)[1]
    swapped = [*order]
    first, second = order.index(("fwd", 1)), order.index(("bwd", 0))
    swapped[first], swapped[second] = swapped[second], swapped[first]
    assert "fwd1 before bwd0 has made room" in forced(graph, 1, swapped)


@pytest.mark.parametrize("trace", traces("gen"))
def test_the_stream_graph_runs_what_paddle_runs_in_the_same_order_of_turns(trace: Any) -> None:
    """Scope k takes k + 1 turns. Paddle's events: recv has no step; of a Cond the stops alone."""
    scopes, rank = trace["micro_batches"], trace["rank"]
    graph = stream(trace["stages"], scopes, trace["gen_bsz"], lambda k: k + 1)
    ours = []
    for event in events(graph)[rank]:
        name, scope = event.task.name, event.scope
        if name != "cond":
            ours.append((name, scope, event.step if name == "send" else None))
        elif not event.goes_on:
            ours.append(("cond_stop", scope, event.step))
    theirs = [tuple(event) for event in trace["events"]]
    assert Counter(ours) == Counter(theirs)
    for order in (ours, theirs):
        at = {event: place for place, event in enumerate(order)}
        for start in range(0, scopes, trace["gen_bsz"]):
            batch = range(start, start + trace["gen_bsz"])
            turns = sorted((step, k) for k in batch for step in range(k + 1))
            sends = [at["send", k, step] for step, k in turns]
            assert sends == sorted(sends)
            for k in batch:
                assert (
                    at["start", k, None] < at["send", k, 0] < at["cond_stop", k, k + 1] < at["end", k, None]
                )
                # the next batch begins when this one has left
                assert all(
                    at["cond_stop", k, k + 1] < at["start", later, None]
                    for later in range(batch.stop, scopes)
                )


def test_a_short_last_batch_runs_where_paddle_died() -> None:
    """Its executor ended on 5 scopes in batches of 2 (the trace without events)."""
    (died,) = [trace for trace in TRACES if not trace["done"]]
    graph = stream(died["stages"], died["micro_batches"], died["gen_bsz"], lambda k: k + 1)
    ended = [e.scope for e in events(graph)[0] if e.task.name == "end"]
    assert sorted(ended) == list(range(died["micro_batches"]))


# ---- what is in flight


def most_in_flight(order: list[Event], begins: str, ends: str) -> int:
    live = most = 0
    for name, _ in order:
        live += (name == begins) - (name == ends)
        most = max(most, live)
    return most


def at_random(graph: Graph, seed: int) -> list[list[Event]]:
    return [[(e.task.name, e.scope) for e in ran] for ran in shuffled(graph, seed)]


@pytest.mark.parametrize(("stages", "micro_batches"), SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_1f1b_never_has_more_than_s_minus_s_live_forwards(stages: int, micro_batches: int, seed: int) -> None:
    for s, order in enumerate(at_random(graph_of("1F1B", stages, micro_batches), seed)):
        most = most_in_flight(order, "fwd", "bwd")
        assert most <= stages - s
        if s == stages - 1:
            assert most == 1


@pytest.mark.parametrize(("stages", "micro_batches"), SHAPES)
def test_f_then_b_runs_no_backward_before_the_last_forward(stages: int, micro_batches: int) -> None:
    for order in names(graph_of("FThenB", stages, micro_batches)):
        kinds = [name for name, _ in order if name in ("fwd", "bwd")]
        assert kinds == ["fwd"] * micro_batches + ["bwd"] * micro_batches


@pytest.mark.parametrize(("stages", "micro_batches"), SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_zbh1_bounds_forwards_and_what_waits_for_its_w(stages: int, micro_batches: int, seed: int) -> None:
    for s, order in enumerate(at_random(graph_of("ZBH1", stages, micro_batches), seed)):
        assert most_in_flight(order, "fwd", "bwd_b") <= stages - s
        assert most_in_flight(order, "bwd_b", "bwd_w") <= max(1, s)
        assert Counter(name for name, _ in order) == dict.fromkeys(
            ("lr", "fwd", "bwd_b", "bwd_w", "opt"), micro_batches
        )


def test_zbh1_puts_w_off_while_something_else_can_run() -> None:
    order = names(graph_of("ZBH1", 4, 8))[3]
    assert order.index(("bwd_w", 0)) > order.index(("bwd_b", 1))


def test_lr_runs_in_the_first_scope_and_opt_in_the_last() -> None:
    for ran in events(graph_of("1F1B", 2, 5)):
        executed = {
            name: [e.scope for e in ran if e.task.name == name and e.executed] for name in ("lr", "opt")
        }
        assert executed == {"lr": [0], "opt": [4]}


def test_an_edge_over_several_stages_has_room_for_all_that_is_between() -> None:
    graph = training_graph(
        "1F1B",
        4,
        8,
        stub,
        forward=[(0, 1), (1, 2), (2, 3), (0, 3)],
        backward=[(3, 2), (2, 1), (1, 0), (3, 0)],
    )
    assert graph.nodes[1].downstream[13].buffer_size == 4
    for s, order in enumerate(names(graph)):
        assert most_in_flight(order, "fwd", "bwd") == min(8, 4 - s)


def test_evaluation_is_forwards_alone() -> None:
    assert names(evaluation_graph(2, 3, stub)) == [[("fwd", m) for m in range(3)]] * 2


def test_a_schedule_without_a_graph() -> None:
    with pytest.raises(ValueError, match="there is no fleet graph for 'VPP': 1F1B, FThenB, ZBH1"):
        graph_of("VPP", 2, 2)
