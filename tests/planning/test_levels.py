"""Bytes along a list: what a B frees as it goes, what messages under way keep alive, what is handed over in a stage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeloom.planning import Costs, lower
from pipeloom.planning.memory import levels
from pipeloom.runtime.completions import completions
from pipeloom.schedules import Job, Transfer, build, chain_edges
from pipeloom.schedules.catalogue import CATALOGUE
from pipeloom.schedules.schedule import Schedule


def test_a_known_workspace_of_b_has_in_it_what_b_frees() -> None:
    """F holds 6 (4 until B, 2 until W), B makes 5 for W: 1 more in the end, and at its worst moment 3."""
    known = Costs(
        (1.0,), (1.0,), (1.0,), held_forward=(4,), held_weight=(2,), held_backward=(5,), workspace={"B": (3,)}
    )
    schedule = Schedule.from_jobs("mine", [0], 1, [["F0.0", "B0.0", "W0.0"]])
    level = levels(schedule.codes, lower(schedule, [], known).coding, 0, known)
    assert level.during.tolist() == [6, 9, 7]
    assert level.after.tolist() == [6, 7, 0]


def test_what_was_handed_over_is_there_while_its_reader_begins() -> None:
    """Both chunks on one stage: F0 makes 8 and hands over 5 that nothing keeps. F1 begins beside them, needs 4 more at
    its worst moment, and keeps 3; with a workspace that isn't known it is taken to free what it was handed first."""

    def during(**options: Any) -> list[float]:
        sent: Any = {("F", 0, 1): 5.0}
        costs = Costs((1.0,) * 2, (1.0,) * 2, (0.0,) * 2, held_forward=(0, 3), sent=sent, **options)
        schedule = Schedule.from_jobs("mine", [0, 0], 1, [["F0.0", "F1.0", "X1.0", "X0.0"]])
        coding = lower(schedule, chain_edges(2), costs).coding
        return levels(schedule.codes, coding, 0, costs).during.tolist()[:2]

    assert during(workspace={"F": (8, 4)}) == [8, 9]
    assert during() == [5, 8]


def sent_costs(chunks: int) -> Costs:
    edges = chain_edges(chunks)
    sent: Any = {edge[:3]: 10.0 ** (number % 5) for number, edge in enumerate(edges)}
    return Costs.uniform(chunks, 1.0, 1.1, 0.8, 0.1, sent=sent)


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 5), (3, 4)])
def test_sends_are_held_as_long_as_the_executor_holds_them(
    name: str, stages: int, micro_batches: int
) -> None:
    schedule = build(name, stages=stages, chunks=CATALOGUE[name].chunks or 2, micro_batches=micro_batches)
    costs = sent_costs(schedule.total_chunks)
    lowered = lower(schedule, chain_edges(schedule.total_chunks), costs)
    for stage, jobs in enumerate(lowered.jobs):
        done = completions(stage, lowered.jobs)
        held: dict[Any, float] = {}
        expected = []
        for entry in jobs:
            if isinstance(entry, Transfer) and entry.action == "send":
                held[entry.message] = costs.sent[entry.message[:3]]
            elif isinstance(entry, Transfer) and entry.action == "recv":
                for message in done.get(entry.message, ()):
                    del held[message]
            elif isinstance(entry, Job):
                way = "F" if entry.kind == "F" else "B" if entry.kind in "BX" else "W"
                for edge in lowered.edges:
                    key = (edge.direction, edge.source, edge.target, entry.micro_batch)
                    inside = lowered.placement[edge.source] == lowered.placement[edge.target]
                    if inside and edge.direction == way and edge.source == entry.chunk:
                        held[key] = costs.sent[edge[:3]]
                    elif inside and edge.direction == way and edge.target == entry.chunk:
                        del held[key]
                expected.append(sum(held.values()))
        found = levels(lowered.codes, lowered.coding, stage, costs).after
        np.testing.assert_allclose(found, expected)


def test_sent_bytes_go_through_json_and_are_checked() -> None:
    costs = sent_costs(4)
    assert Costs.from_json(costs.to_json()) == costs
    with pytest.raises(ValueError, match=r"sent\[0\] must be a finite number ≥ 0 \(got -1"):
        Costs.uniform(2, sent={("F", 0, 1): -1.0})
