"""Start and Cond by scripts of messages; and a Compute inside of a loop."""

from __future__ import annotations

import pytest
from fleet_scripts import Script, stream

from pipeloom.fleet import Graph
from pipeloom.fleet.interceptor import Compute
from pipeloom.fleet.loops import Cond, Start
from pipeloom.fleet.messages import Kind

SOURCE = -1
START, COND, SEND, RECV, END = range(5)


def graph_of(scopes: int = 5, batch: int = 2, *, continuous: bool = False) -> Graph:
    return stream(1, scopes, batch, lambda _: 1, continuous=continuous, buffer=9)


def start_of(**options: int) -> Script:
    graph = graph_of(**options)
    return Script(Start(graph.nodes[START], graph))


def cond_of(batch: int = 3) -> Script:
    """With a batch of scopes 0 … batch−1 let in, and going round for the first time."""
    graph = graph_of(batch=batch)
    cond = Script(Cond(graph.nodes[COND], graph))
    for scope in range(batch):
        cond.ready(START, scope, start_micro_step=0, num_micro_step=batch)
    for scope in range(batch):
        assert cond.offered == (scope, 0)
        assert cond.run(goes_on=True) == [f"START_LOOP {SEND} {scope}"]
    return cond


def back(cond: Script, scope: int) -> None:
    """A scope of `cond_of`'s batch comes back from its first turn."""
    cond.ready(RECV, scope, start_micro_step=0, num_micro_step=3)


# ---- Start


def test_start_announces_a_batch_when_all_of_it_has_run() -> None:
    start = start_of(batch=2)
    start.ready(SOURCE, 0)
    assert start.run() == [f"DATA_IS_USELESS {SOURCE} 0"]
    start.ready(SOURCE, 1)
    assert start.run() == [f"DATA_IS_USELESS {SOURCE} 1", "DATA_IS_READY 1 0", "DATA_IS_READY 1 1"]


def test_the_next_batch_waits_until_all_scopes_have_come_back() -> None:
    start = start_of(batch=2)
    for scope in (0, 1):
        start.ready(SOURCE, scope)
        start.run()
    start.ready(SOURCE, 2)
    assert start.offered is None
    start.credit(COND)
    assert start.offered is None
    start.credit(COND)
    assert start.offered == (2, 0)


def test_the_last_batch_may_be_short() -> None:
    start = start_of(batch=2, scopes=3)
    for scope in (0, 1):
        start.ready(SOURCE, scope)
        start.run()
        start.credit(COND) if scope else None
    start.credit(COND)
    start.ready(SOURCE, 2)
    assert start.run() == [f"DATA_IS_USELESS {SOURCE} 2", "DATA_IS_READY 1 2"]
    assert start.interceptor.done


def test_continuous_refill_lets_one_in_for_each_that_leaves() -> None:
    start = start_of(batch=2, continuous=True)
    for scope in (0, 1):
        start.ready(SOURCE, scope)
        assert start.run()[1:] == [f"DATA_IS_READY 1 {scope}"]
    start.ready(SOURCE, 2)
    assert start.offered is None
    start.credit(COND)
    assert start.run()[1:] == ["DATA_IS_READY 1 2"]


# ---- Cond


def test_a_scope_that_comes_back_waits_for_the_lower_ones() -> None:
    cond = cond_of(batch=3)
    back(cond, 2)
    assert cond.run(goes_on=True) == []
    back(cond, 0)
    assert cond.run(goes_on=True) == [f"START_LOOP {SEND} 0 @1"]
    back(cond, 1)
    assert cond.run(goes_on=True) == [f"START_LOOP {SEND} 1 @1", f"START_LOOP {SEND} 2 @1"]


def test_a_scope_whose_condition_is_false_leaves_at_once_and_nobody_waits_for_it() -> None:
    cond = cond_of(batch=3)
    back(cond, 1)
    assert cond.run(goes_on=True) == []
    back(cond, 0)
    assert cond.offered == (0, 1)
    left = [f"STOP_LOOP {END} 0 @1", f"DATA_IS_USELESS {START} 0 @1"]
    assert cond.run(goes_on=False) == [*left, f"START_LOOP {SEND} 1 @1"]


def test_cond_is_done_when_all_scopes_have_left() -> None:
    graph = graph_of(scopes=2)
    cond = Script(Cond(graph.nodes[COND], graph))
    for scope in (0, 1):
        cond.ready(START, scope, start_micro_step=0, num_micro_step=2)
        assert not cond.interceptor.done
        cond.run(goes_on=False)
    assert cond.interceptor.done


def test_scopes_of_different_batches_do_not_wait_for_each_other() -> None:
    graph = graph_of(continuous=True)
    cond = Script(Cond(graph.nodes[COND], graph))
    for scope in (0, 1):
        cond.ready(START, scope, start_micro_step=scope, num_micro_step=1)
        cond.run(goes_on=True)
    cond.ready(RECV, 1, start_micro_step=1, num_micro_step=1)
    assert cond.run(goes_on=True) == [f"START_LOOP {SEND} 1 @1"]


# ---- a task in a loop


def send_of() -> Script:
    graph = stream(2, 6, 3, lambda _: 1, buffer=9)
    return Script(Compute(graph.nodes[5 + SEND], graph))


def opened(send: Script, scope: int, step: int, batch: int = 0) -> None:
    numbers = {"gen_step": step, "start_micro_step": batch, "num_micro_step": 3}
    send.tell(Kind.START_LOOP, 5 + COND, scope, **numbers)


def arrived(send: Script, scope: int, step: int, batch: int = 0) -> None:
    send.ready(SEND, scope, gen_step=step, start_micro_step=batch, num_micro_step=3)


def test_in_a_loop_only_the_smallest_open_step_runs_in_scope_order() -> None:
    send = send_of()
    opened(send, 0, 1)
    opened(send, 1, 0)
    opened(send, 2, 0)
    arrived(send, 0, 1)
    arrived(send, 2, 0)
    assert send.offered is None  # scope 1 is open at step 0, and hasn't come
    arrived(send, 1, 0)
    order = []
    for _ in range(3):
        order.append(send.offered)
        send.run()
    assert order == [(1, 0), (2, 0), (0, 1)]


def test_batches_take_turns_by_how_long_they_have_been_ready() -> None:
    send = send_of()
    opened(send, 0, 7, batch=0)
    opened(send, 3, 0, batch=3)
    arrived(send, 0, 7, batch=0)
    arrived(send, 3, 0, batch=3)
    assert send.offered == (0, 7)
    send.run()
    assert send.offered == (3, 0)


def test_what_a_task_hands_on_keeps_step_and_batch() -> None:
    send = send_of()
    opened(send, 1, 4)
    arrived(send, 1, 4)
    ready, credit = send.interceptor.ran(send.offer())
    assert (ready.gen_step, ready.start_micro_step, ready.num_micro_step) == (4, 0, 3)
    assert ready.destination == 5 + RECV
    assert credit.destination == SEND


@pytest.mark.parametrize("task", [SEND, RECV])
def test_tasks_of_a_loop_leave_the_end_of_a_run_to_the_cond(task: int) -> None:
    graph = graph_of()
    assert Compute(graph.nodes[task], graph).done
