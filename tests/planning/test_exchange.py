"""CSV out and in: what torch's own parser reads back, what comes round, and what is refused, with row and column."""

from __future__ import annotations

import csv
import io

import pytest

from pipeloom import planning
from pipeloom.planning.errors import PlanError
from pipeloom.planning.exchange import schedule_from_csv, to_csv
from pipeloom.schedules import Edge, build, chain_edges, forward_only, loop
from pipeloom.schedules.catalogue import CATALOGUE
from pipeloom.schedules.schedule import Schedule


def lowered(schedule: Schedule, comm: float = 0.1) -> planning.Lowered:
    chunks = schedule.total_chunks
    return planning.lower(
        schedule, chain_edges(chunks, 4), planning.Costs.uniform(chunks, 1.0, 1.1, 0.8, comm)
    )


def made(name: str, stages: int = 3, micro_batches: int = 5) -> Schedule:
    return build(name, stages=stages, chunks=CATALOGUE[name].chunks or 2, micro_batches=micro_batches)


def test_a_small_plan_in_full() -> None:
    text = to_csv(lowered(build("1F1B", stages=2, micro_batches=2), comm=0.0))
    assert text.splitlines() == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD",
        "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD",
    ]


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_schedule_comes_round(name: str) -> None:
    schedule = made(name)
    again = schedule_from_csv(to_csv(lowered(schedule)), name=name)
    assert again == schedule


@pytest.mark.parametrize("name", CATALOGUE)
def test_torch_reads_the_same_actions(name: str) -> None:
    from torch.distributed.pipelining.schedules import _Action, _validate_schedule

    schedule = made(name)
    rows = list(csv.reader(io.StringIO(to_csv(lowered(schedule)))))
    actions = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    assert [[str(a) for a in row] for row in actions.values()] == rows
    mapping = _validate_schedule(actions, 3, schedule.total_chunks, 5)  # type: ignore[arg-type]
    assert [mapping[chunk] for chunk in range(schedule.total_chunks)] == list(schedule.placement)


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 3), (3, 5), (4, 8)])
def test_receives_come_in_the_order_of_sends_of_both_directions(
    name: str, stages: int, micro_batches: int
) -> None:
    schedule = made(name, stages, micro_batches)
    rows = list(csv.reader(io.StringIO(to_csv(lowered(schedule)))))
    sent: dict[tuple[int, int], list[tuple[str, int, str]]] = {}
    received: dict[tuple[int, int], list[tuple[str, int, str]]] = {}
    for rank, row in enumerate(rows):
        for cell in row:
            for verb, lists in (("SEND_", sent), ("RECV_", received)):
                if verb not in cell:
                    continue
                chunk, _, rest = cell.partition(verb)
                way, number = rest[0], rest[1:]
                up = 1 if way == "F" else -1
                other = int(chunk) + (up if verb == "SEND_" else -up)
                target = other if verb == "SEND_" else int(chunk)
                pair = (rank, schedule.placement[other])
                lists.setdefault(pair if verb == "SEND_" else pair[::-1], []).append((way, target, number))
    assert sent
    assert sent == received


def test_the_form_without_transfers_comes_in() -> None:
    text = "0F0,0F1,,0I0,0W0,0B1\n,1F0,1I0,1F1,1W0,1B1\n"
    schedule = schedule_from_csv(text)
    assert [list(map(str, jobs)) for jobs in schedule.jobs] == [
        ["F0.0", "F0.1", "B0.0", "W0.0", "X0.1"],
        ["F1.0", "B1.0", "F1.1", "W1.0", "X1.1"],
    ]


def test_overlapped_actions_are_taken_in_turn() -> None:
    schedule = schedule_from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert list(map(str, schedule.jobs[0])) == ["F0.0", "F0.1", "X0.0", "X0.1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,Q\n", r"row 2, column 2: 'Q' is no action"),
        ("0F0,0F,0B0\n", r"row 1, column 2: '0F' is no action"),
        ("0F0,(0B0;x)OVERLAP_F_B\n", r"row 1, column 2: 'x' is no action"),
        ("0F0,0B0\n0F1,0B1\n", r"row 2, column 1: 0F1 is an action of chunk 0, which lives in row 1"),
        ("", "the CSV has no action"),
        (",,\n", "the CSV has no action"),
        ("0F0,2F0\n", "no action of chunk 1, but one of chunk 2"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule_from_csv(text)


def test_a_placement_is_kept() -> None:
    with pytest.raises(
        ValueError, match="row 1, column 1: 0F0 is an action of chunk 0, which lives in row 2"
    ):
        schedule_from_csv("0F0,0B0\n1F0,1B0\n", placement=[1, 0])
    assert schedule_from_csv("1F0,1B0\n0F0,0B0\n", placement=[1, 0]).placement == (1, 0)


def test_plans_that_torch_can_not_run_are_refused() -> None:
    with pytest.raises(PlanError, match="this plan has no backward"):
        to_csv(lowered(forward_only(loop(2, 2), 3)))
    schedule = build("1F1B", stages=3, micro_batches=2)
    edges = [*chain_edges(3), Edge("F", 0, 2), Edge("B", 2, 0)]
    skipping = planning.lower(schedule, edges, planning.Costs.uniform(3))
    with pytest.raises(PlanError, match=r"chunk 2 sends to chunk 0.*where no value skips a chunk"):
        to_csv(skipping)
