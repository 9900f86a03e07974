"""plan: which pipeline a model should run in, before any rank is started.

    proposals = pipeloom.plan(model, loss_fn, example=(inputs, targets), ranks=8, memory="16GiB", micro_batches=32)
    proposals.show()                       # a table: step, bubbles, peak bytes, bytes sent, distance to the bound
    proposals.best, proposals.why          # the plan that was chosen
    proposals.strategy                     # the Strategy that runs it

One process does it all: the model is captured once, cut for each placement and number of chunks, and planned with
every schedule of the catalogue; then `auto` searches on each placement. There may be more ranks than this machine
has, and the model may be on the meta device. Seconds come from timing the model's parts here, from a roofline of a
named device, or from the user; bytes come from the sub-programs, an Adam-like optimizer's state included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import nn

from ..auto import Auto
from ..passes.cuts import choose_cuts, replicated
from ..planner import Planner
from ..planning.candidates import AUTO, placements
from ..planning.devices import Device
from ..planning.trial import budget_seconds
from ..program.batch import batch_size, flatten_batch, split_batch
from ..program.capture import LossFunction, split_example
from ..strategy import Strategy, StrategyError
from .found import Proposals
from .source import given_pieces, source_of
from .table import Table


def plan(
    model: nn.Module,
    loss_fn: LossFunction | None = None,
    *,
    example: Any,
    strategy: Strategy | None = None,
    ranks: int | None = None,
    memory: int | str | None = None,
    micro_batches: int | None = None,
    budget: float | str = 10.0,
    device: str | PathLike[str] | Device | Mapping[str, Any] | None = None,
    chunks: Sequence[int] = (1, 2, 3, 4),
) -> Proposals:
    """The plans that the model could run in, and the best of them. Needs no process group.

    loss_fn, example: as `compile` takes them; the example is a whole batch and may be meta. strategy: its numerics
    and batch; where it has cuts, plans with so many chunks are cut there. ranks, micro_batches, memory go before its
    pp_degree, accumulate_steps, memory_limit. memory: bytes a rank or text like "16GiB"; left out, the named device's
    memory, else what 1F1B needs with one chunk a stage, as for schedule_mode "auto". Where nothing fits, or only slow
    plans do, plans that compute some chunks again in the backward are made too, unless the strategy's `recompute` says
    otherwise. budget: seconds of searching ("30s"), at most; capturing, timing and splitting come on top. chunks: a
    stage, to be tried.
    device: None: parts of the model are timed here; a name of planning.devices: its roofline; a Device, or a mapping
    or JSON file with a device's figures ("flops", …) or with the seconds of chunks that the user has timed ("forward",
    "backward_b", "backward_w": a number a chunk; and optionally "cuts" as in Strategy, "latency", "bandwidth").

    Raises what `compile` raises for a model that can't be captured or cut, StrategyError and DeviceError for bad
    options. Where nothing fits, the rows say by how much.
    """
    given = strategy if strategy is not None else Strategy(schedule_mode=AUTO)
    wanted = _strategy(given, ranks, memory, micro_batches)
    source, seconds = source_of(device, wanted), budget_seconds(budget)
    if source.kind == "roofline":
        wanted = wanted.replace(costs="roofline")
    place = _place(model)
    inputs, targets = split_example(example, loss_fn)
    leaves, form = flatten_batch(inputs, targets)
    sizes = wanted.micro_batches(batch_size(leaves, form))
    if wanted.accumulate_steps is not None and len(sizes) < wanted.accumulate_steps:
        raise StrategyError(
            f"{wanted.accumulate_steps} micro-batches were asked for, but the example has {len(sizes)} samples: give "
            "the batch of a step (its tensors may be meta), or fewer micro-batches"
        )
    planner = Planner(model, loss_fn, wanted, place, source.roofline)
    auto = Auto(planner, split_batch(leaves, sizes)[0], form)
    if source.own is not None:
        auto.pieces = given_pieces(auto, source.own)
    if given.cuts is not None:
        for _, _, placement in placements(wanted.pp_degree, chunks):
            if len(placement) == given.chunks:
                auto.fix(
                    placement, choose_cuts(auto.program, given.chunks, given.cuts, replicated(auto.program))
                )
    return Table(auto, source, len(sizes), chunks, seconds).proposals()


def _strategy(
    given: Strategy, ranks: int | None, memory: int | str | None, micro_batches: int | None
) -> Strategy:
    """The strategy with the options before it; schedule, chunks, cuts and placement are the table's business."""
    changes: dict[str, Any] = {"schedule_mode": AUTO, "vpp_degree": 1, "cuts": None, "placement": None}
    if ranks is not None:
        changes["pp_degree"] = ranks
    if memory is not None:
        changes["memory_limit"] = memory
    if micro_batches is not None:
        changes |= {"accumulate_steps": micro_batches, "micro_batch_size": None}
    return given.replace(**changes)


def _place(model: nn.Module) -> torch.device:
    """Where parts are timed: where the model is, or the CPU for one without storage."""
    tensors = (t for t in (*model.parameters(), *model.buffers()) if not t.is_meta)
    first = next(tensors, None)
    return torch.device("cpu") if first is None else first.device
