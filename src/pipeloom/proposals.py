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

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .auto import Auto, within
from .passes.cuts import choose_cuts, replicated
from .planner import Planner
from .planning import PlanError
from .planning.candidates import AUTO, EVEN, Candidate, Row, chosen, named_rows, placements
from .planning.devices import DOUBT, UNKNOWN, Device, DeviceError, Link, Roofline, device_from, device_named
from .planning.plan import Plan
from .planning.search import Found, search
from .planning.trial import budget_seconds
from .program import compat
from .program.batch import batch_size, flatten_batch, split_batch
from .program.capture import LossFunction, split_example
from .report.figures import format_bytes, format_time
from .report.proposals import show_proposals
from .schedules.timeline import Timeline
from .strategy import Strategy, StrategyError

GIB = 2**30
#: shares of the budget: a search on each placement, more time for the best of them; the rest is for the next GiB
_EACH, _BEST = 0.4, 0.4
#: what an unlimited plan's peak may grow by when it is searched for again
_ROOM = 1.05


@dataclass(frozen=True)
class Source:
    """Where seconds come from. kind: "measured", "roofline" or "given". memory: of the device, bytes. own: the
    user's seconds of chunks."""

    kind: str
    name: str
    roofline: Roofline
    memory: float = math.inf
    own: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Proposals:
    """What `plan` found.

    rows: all plans, the chosen one first, then those that fit, fastest first. best: the chosen row, None where nothing
    fits; why: it, in a sentence. memory_limit: bytes a rank, or infinite. bound: seconds that no order of any candidate
    within it can beat, or none at all where nothing fits. costs: where seconds come from, and how sure they are.
    next_gib: what a GiB more on each rank would buy. modules[row]: the modules at which a row's chunks begin.
    strategy: runs the best row's schedule, with cuts and order chosen anew on its ranks; None if there is none.
    """

    rows: tuple[Row, ...]
    best: Row | None
    why: str
    bound: float
    memory_limit: float
    memory: str
    costs: str
    next_gib: str
    micro_batches: int
    modules: tuple[tuple[str, ...], ...]
    strategy: Strategy | None

    @property
    def ranks(self) -> int:
        return self.rows[0].plan.stages

    def show(self, *, every: bool = False) -> None:
        """Prints the table: of each schedule its fastest plan, or all plans."""
        notes = [("Costs", self.costs), ("Memory", self.memory), ("Chosen", self.why)]
        if self.best is not None:
            where = self.modules[self.rows.index(self.best)]
            notes.append(("Chunks", f"begin at {', '.join(where)}" if where else "the whole model is one"))
        notes.append(("Next GiB", self.next_gib))
        show_proposals(self.rows, self.best, self.bound, self.memory_limit, notes, every=every)

    def timeline(self) -> Timeline:
        """The chosen plan's step. Raises PlanError where nothing fits."""
        if self.best is None:
            raise PlanError("memory", self.why)
        timeline = self.best.plan.timeline()
        timeline.title = f"predicted {self.best.name}"
        return timeline

    def to_json(self) -> dict[str, Any]:
        """Plain values: seconds, bytes, shares of 1."""
        rows = []
        for row, modules in zip(self.rows, self.modules, strict=True):
            rows.append({**row.to_json(self.bound, self.memory_limit), "chunks_begin_at": list(modules)})
        return {
            "ranks": self.ranks,
            "micro_batches": self.micro_batches,
            "memory_limit": round(self.memory_limit) if math.isfinite(self.memory_limit) else None,
            "memory": self.memory,
            "costs": self.costs,
            "bound": self.bound,
            "chosen": None if self.best is None else self.rows.index(self.best),
            "why": self.why,
            "next_gib": self.next_gib,
            "strategy": None if self.strategy is None else self.strategy.to_dict(),
            "rows": rows,
        }


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
    memory, else any amount. budget: seconds of searching ("30s"); capturing, timing and splitting come on top.
    chunks: a stage, to be tried.
    device: None: parts of the model are timed here; a name of planning.devices: its roofline; a Device, or a mapping
    or JSON file with a device's figures ("flops", …) or with the seconds of chunks that the user has timed ("forward",
    "backward_b", "backward_w": a number a chunk; and optionally "cuts" as in Strategy, "latency", "bandwidth").

    Raises what `compile` raises for a model that can't be captured or cut, StrategyError and DeviceError for bad
    options. Where nothing fits, the rows say by how much.
    """
    given = strategy if strategy is not None else Strategy(schedule_mode=AUTO)
    wanted = _strategy(given, ranks, memory, micro_batches)
    source, seconds = _source(device, wanted), budget_seconds(budget)
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
        auto.pieces = _given_pieces(auto, source.own)
    if given.cuts is not None:
        for _, _, placement in placements(wanted.pp_degree, chunks):
            if len(placement) == given.chunks:
                auto.fix(
                    placement, choose_cuts(auto.program, given.chunks, given.cuts, replicated(auto.program))
                )
    return _Table(auto, source, len(sizes), chunks, seconds).proposals()


class _Table:
    """The making of one Proposals."""

    def __init__(
        self, auto: Auto, source: Source, micro_batches: int, chunks: Sequence[int], budget: float
    ) -> None:
        self.auto = auto
        self.source = source
        self.strategy = auto.planner.strategy
        self.stages = self.strategy.pp_degree
        self.micro_batches = micro_batches
        self.budget = budget
        self.candidates = self._candidates(chunks)
        self.rows = named_rows(self.candidates, micro_batches)
        self.limit, self.memory = self._limit()

    def proposals(self) -> Proposals:
        self._search()
        best = chosen(self.rows, self.limit)
        limit = math.inf if best is None else self.limit
        bound = min(c.bound(self.micro_batches, limit) for c in self.candidates)
        why = self._why(best, bound)
        gib = self._next_gib(best)

        def rank(row: Row) -> tuple[bool, bool, float]:
            return (row is not best, not row.fits(self.limit), row.makespan)

        rows = tuple(sorted(self.rows, key=rank))
        return Proposals(
            rows,
            best,
            why,
            bound,
            self.limit,
            self.memory,
            self._costs(),
            gib,
            self.micro_batches,
            tuple(self._modules(row) for row in rows),
            None if best is None else self._runs(best),
        )

    def _candidates(self, chunks: Sequence[int]) -> list[Candidate]:
        if not chunks or any(not isinstance(v, int) or v < 1 for v in chunks):
            raise StrategyError(
                f"chunks={chunks!r}: write whole numbers of at least 1, the chunks a stage to try"
            )
        most = (len(self.auto.allowed) + 1) // self.stages
        able = [found for found in placements(self.stages, chunks) if found[1] <= most]
        if not able:  # let partitioning say why
            able = placements(self.stages, [min(chunks)])[:1]
        out = []
        for name, turns, placement in able:
            cuts = self.auto.cuts(placement, self.micro_batches)
            costs, edges = self.auto.exact(placement, cuts)
            out.append(Candidate(name, turns, placement, cuts, costs, tuple(edges)))
        return out

    def _limit(self) -> tuple[float, str]:
        given = self.strategy.memory_bytes
        if given is not None:
            return float(given), f"{format_bytes(given)} a rank"
        if math.isfinite(self.source.memory):
            return (
                self.source.memory,
                f"{format_bytes(self.source.memory)} a rank, all that {self.source.name} has",
            )
        plain = next((row for row in self.rows if row.name == "1F1B"), self.rows[0])
        return (
            math.inf,
            f"no limit was given: every plan fits ({plain.name} needs {format_bytes(max(plain.peak))})",
        )

    # ---- searches

    def _search(self) -> None:
        """Auto's row for each candidate, then more time for the best of them."""
        found: list[tuple[Candidate, Found]] = []
        for candidate in self.candidates:
            try:
                found.append((candidate, self._hunt([candidate], self.limit, _EACH / len(self.candidates))))
            except PlanError as error:
                if error.check != "memory":
                    raise
        if not found:
            return
        best = min(found, key=lambda pair: pair[1].makespan)
        again = self._hunt([best[0]], self.limit, _BEST)
        for candidate, answer in found:
            if candidate is best[0] and again.makespan < answer.makespan:
                answer = again
            plan = Plan.make(answer.schedule, candidate.edges, candidate.costs)
            self.rows.append(Row(AUTO, True, candidate, plan))

    def _hunt(self, candidates: Sequence[Candidate], limit: float, share: float) -> Found:
        by_placement = {c.placement: c for c in candidates}

        def find(allowed: Sequence[float], seconds: float) -> Found:
            return search(
                self.stages,
                self.micro_batches,
                lambda placement, _v: by_placement[tuple(placement)].costs,
                edges_of=lambda placement, _v: by_placement[tuple(placement)].edges,
                memory_limit=allowed,
                budget_seconds=seconds,
                chunks_allowed=[c.chunks for c in candidates],
                placements=sorted({c.name for c in candidates}),
                seed=self.strategy.seed,
            )

        return within(find, limit, self.stages, self.budget * share)

    def _next_gib(self, best: Row | None) -> str:
        limit = self.limit + GIB
        if math.isinf(limit):
            return "nothing: there is no limit"
        if best is not None:
            if all(row.fits(self.limit) for row in self.rows):
                return "nothing: every plan here fits already"
            if min(c.bound(self.micro_batches, limit) for c in self.candidates) >= best.makespan * (1 - EVEN):
                return "nothing: no order could be faster"
        rows = list(self.rows)
        try:
            found = self._hunt(self.candidates, limit, 1 - _EACH - _BEST)
            candidate = next(c for c in self.candidates if c.placement == found.schedule.placement)
            rows.append(
                Row(AUTO, True, candidate, Plan.make(found.schedule, candidate.edges, candidate.costs))
            )
        except PlanError as error:
            if error.check != "memory":
                raise
        more = chosen(rows, limit)
        if more is None:
            return "nothing would fit either"
        text = f"{more.name} on {_shape(more.candidate)}"
        if best is None:
            return f"{text} would fit: a step of {format_time(more.step)}"
        gain = 1 - more.makespan / best.makespan
        return f"step {gain:.1%} shorter, with {text}" if gain > EVEN else "nothing"

    # ---- words

    def _why(self, best: Row | None, bound: float) -> str:
        if best is None:
            lean = min(self.rows, key=lambda row: max(row.peak))
            worst = max(range(self.stages), key=lean.peak.__getitem__)
            return (
                f"nothing fits {format_bytes(self.limit)} a rank: the leanest, {lean.name} on "
                f"{_shape(lean.candidate)}, needs {format_bytes(lean.peak[worst])} on rank {worst}; take more ranks, "
                "smaller micro-batches, or recompute in the model (torch.utils.checkpoint)"
            )
        fitting = [row for row in self.rows if row.fits(self.limit)]
        text = f"{best.name} on {_shape(best.candidate)}: the fastest of {len(fitting)} plans that fit"
        others = [row for row in fitting if (row.schedule == AUTO) != (best.schedule == AUTO)]
        if others:
            second = min(others, key=lambda row: row.makespan)
            gain = second.makespan / best.makespan - 1
            rival = f"the best named one, {second.name}" if best.schedule == AUTO else "what the search found"
            text += f", {gain:.1%} faster than {rival}" if gain > EVEN else f", and as fast as {rival}"
        above = best.makespan / bound - 1 if bound else 0.0
        return f"{text}; {above:.1%} above the lower bound"

    def _costs(self) -> str:
        kind, name = self.source.kind, self.source.name
        if kind == "measured":
            spread = self.auto.spread or 0.0
            return (
                f"measured here on {_machine(self.auto.planner.device)}, two rounds {spread:.0%} apart; ranks that "
                "share this machine will be slower, and links are assumed"
            )
        if kind == "given":
            return f"{name}; between chunks' ends, shared out by operations and bytes"
        return (
            f"roofline of {name}: a model, steps within a factor of {DOUBT:g}; plans compare better than that"
        )

    def _modules(self, row: Row) -> tuple[str, ...]:
        names = (compat.module_of(self.auto.order[cut]) for cut in row.candidate.cuts)
        return tuple(name or "the top level" for name in names)

    def _runs(self, best: Row) -> Strategy:
        changes: dict[str, Any] = {"costs": "measured"}
        if math.isfinite(self.limit):
            changes["memory_limit"] = int(self.limit)
        elif best.schedule == AUTO:  # which else keeps to what 1F1B needs
            changes["memory_limit"] = math.ceil(max(best.peak) * _ROOM)
        if best.schedule != AUTO:
            changes |= {"schedule_mode": best.schedule, "vpp_degree": best.candidate.chunks}
            changes["split_backward"] = best.split
        return self.strategy.replace(**changes)


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


def _source(device: str | PathLike[str] | Device | Mapping[str, Any] | None, strategy: Strategy) -> Source:
    if device is None or device == "measured":
        if strategy.costs == "roofline":
            return Source("roofline", "an unknown device with a CPU core's proportions", UNKNOWN)
        return Source("measured", "", UNKNOWN)
    if isinstance(device, Device):
        return Source("roofline", device.name, device.roofline(), device.memory)
    if isinstance(device, Mapping):
        return _own(device, "your own numbers")
    if isinstance(device, PathLike) or str(device).endswith(".json"):
        return _own(read_numbers(device), str(device))
    return _source(device_named(device), strategy)


def _own(data: Mapping[str, Any], name: str) -> Source:
    if "forward" not in data:
        found = device_from(data)
        return Source("roofline", found.name, found.roofline(), found.memory)
    known = ("forward", "backward_b", "backward_w", "cuts", "latency", "bandwidth")
    unknown = [key for key in data if key not in known]
    if unknown:
        raise DeviceError(f"{name}: there is no field {unknown[0]!r}: there are {', '.join(known)}")
    columns = [data.get(key) for key in known[:3]]
    if not all(isinstance(c, list | tuple) and len(c) == len(data["forward"]) > 0 for c in columns):
        raise DeviceError(
            f"{name}: forward, backward_b and backward_w are lists with a number of seconds a chunk"
        )
    if not all(isinstance(x, int | float) and math.isfinite(x) and x >= 0 for c in columns for x in c or ()):
        raise DeviceError(f"{name}: seconds of chunks are finite numbers of at least 0")
    latency = data.get("latency", UNKNOWN.near.latency)
    bandwidth = data.get("bandwidth", UNKNOWN.near.bandwidth)
    if not (isinstance(latency, int | float) and isinstance(bandwidth, int | float)):
        raise DeviceError(f"{name}: latency is in seconds and bandwidth in bytes a second")
    if not (latency >= 0 and bandwidth > 0):
        raise DeviceError(f"{name}: latency is at least 0 and bandwidth above 0 (got {latency}, {bandwidth})")
    roofline = Roofline(UNKNOWN.flops, UNKNOWN.bytes_per_second, Link(float(latency), float(bandwidth)))
    return Source("given", name, roofline, own=data)


def read_numbers(path: str | PathLike[str]) -> Mapping[str, Any]:
    """The object in a JSON file. Raises DeviceError naming the file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DeviceError(f"{path}: can't be read ({error.strerror}); check the path") from None
    except ValueError as error:
        raise DeviceError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise DeviceError(f"{path}: holds no JSON object with figures of a device or seconds of chunks")
    return data


def _given_pieces(auto: Auto, own: Mapping[str, Any]) -> Any:
    chunks = len(own["forward"])
    cuts = choose_cuts(auto.program, chunks, own.get("cuts"), replicated(auto.program))
    return auto.modelled.calibrated(cuts, own["forward"], own["backward_b"], own["backward_w"])


def _place(model: nn.Module) -> torch.device:
    """Where parts are timed: where the model is, or the CPU for one without storage."""
    tensors = (t for t in (*model.parameters(), *model.buffers()) if not t.is_meta)
    first = next(tensors, None)
    return torch.device("cpu") if first is None else first.device


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return (
        f"{device.type} with {threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else str(device)
    )


def _shape(candidate: Candidate) -> str:
    if candidate.chunks == 1:
        return "1 chunk a stage"
    return f"{candidate.chunks} chunks a stage ({candidate.name})"
