"""The orders of torch.distributed.pipelining's schedules, generated live from its classes.

A class takes its stages' numbers from a stage object; here that is a stand-in, so no process group is needed. GPipe
and 1F1B have no list of jobs to generate: they are loops, in the order that our FThenB and 1F1B have.
"""

from __future__ import annotations

import logging
from typing import Any, Final
from unittest import mock

from pipeloom.schedules import Job, Schedule, linear, loop, vee
from pipeloom.schedules.jobs import Kind

#: torch's names, and the chunks a stage that each takes (None: any)
TORCH: Final = {
    "LoopedBFS": None,
    "Interleaved1F1B": None,
    "InterleavedZeroBubble": None,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}

_KINDS: Final[dict[str, Kind]] = {
    "FORWARD": "F",
    "FULL_BACKWARD": "X",
    "BACKWARD_INPUT": "B",
    "BACKWARD_WEIGHT": "W",
}


def prepare(name: str, stages: int, chunks: int, micro_batches: int) -> Any:
    """torch's schedule object, with its order and its transfers. Raises what torch
    raises for numbers that it doesn't take."""
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torch.distributed.pipelining.stage import PipelineStage

    logging.getLogger("torch.distributed.pipelining").setLevel(logging.ERROR)
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank = stage.stage_index = 0
    stage.group_size, stage.num_stages = stages, stages * chunks
    stage.submod, stage.is_first, stage.is_last, stage.has_backward = None, True, False, True
    return get_schedule_class(name)([stage] * chunks, micro_batches)


def torch_schedule(name: str, stages: int, chunks: int, micro_batches: int) -> Schedule | None:
    """torch's order, or None where torch refuses the numbers. An overlapped forward and backward are one job after
    the other."""
    try:
        order = prepare(name, stages, chunks, micro_batches).pipeline_order
    except (ValueError, AssertionError, RuntimeError):
        return None
    placement = linear(stages) if chunks == 1 else loop(stages, chunks)
    if name in ("ZBVZeroBubble", "DualPipeV"):
        placement = vee(stages, chunks)
    jobs = []
    for rank in range(stages):
        actions = [a for action in order[rank] for a in getattr(action, "sub_actions", None) or (action,)]
        jobs.append(
            [
                Job(_KINDS[a.computation_type.name], a.stage_index, a.microbatch_index)
                for a in actions
                if a is not None and a.computation_type.name in _KINDS
            ]
        )
    return Schedule.from_jobs(f"torch {name}", placement, micro_batches, jobs)
