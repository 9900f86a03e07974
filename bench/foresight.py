"""One rank of the forecast: calibrates on 1F1B, predicts the others, and later measures them.

Both functions are collective calls of two ranks (see start.py) and give JSON-able dicts. Cuts, orders and costs travel
from the first to the second as text, so that what is run is what was predicted: the second checks the plans' digests.

What a job costs comes from steps of 1F1B on both ranks, in its whole and in its split form: the median of each job,
with all that disturbs it there; how much jobs differ from their medians comes from there too (see jitter.py).
Within a chunk of 1F1B the pieces keep the proportions that timing them apart gave. What a message costs its two ranks
is counted by itself, since other schedules send more of them: the time that passes between two jobs without waiting,
and the processor time of the threads that move bytes, which both cores lack while both ranks compute.
Costs are then stretched a little, all alike, so that the simulated step of 1F1B takes what its steps took.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from jitter import COMPUTE, Jitter, medians
from pipeloom import Plan, Strategy
from pipeloom.api import Pipeline
from pipeloom.auto import Auto
from pipeloom.passes.label_chunks import LabelChunks
from pipeloom.planner import Planner
from pipeloom.planning import Costs
from pipeloom.planning.choice import Choice
from pipeloom.planning.partition import Pieces
from pipeloom.program.batch import flatten_batch, split_batch
from pipeloom.program.subprogram import ProgramSet
from pipeloom.runtime import launch
from pipeloom.schedules import Schedule, Timeline, build, linear, loop, vee
from pipeloom.schedules.jobs import Edge
from rounds import timed
from setting import RANKS, Setting, loss_fn

#: what is predicted -> where its chunks lie; "auto" chooses
PLACEMENTS = {"1F1B": linear(RANKS), "VPP": loop(RANKS, 2), "ZBV": vee(RANKS)}
CPU = torch.device("cpu")
#: bytes, more than any cache holds
CACHE = 256 << 20


class Foreseen(Planner):
    """A planner for cuts and an order that were chosen before, with costs that were written down before."""

    def __init__(self, model: nn.Module, setting: Setting, choice: Choice, costs: Costs | None) -> None:
        strategy = Strategy(
            pp_degree=RANKS,
            vpp_degree=choice.chunks // RANKS,
            schedule_mode=choice.jobs,
            placement=choice.placement,
            accumulate_steps=setting.micro_batches,
            costs="roofline",
        )
        super().__init__(model, loss_fn, strategy, CPU)
        self.choose(choice)
        self._given = costs

    def costs(
        self, programs: ProgramSet, persistent: Sequence[int] = (), placement: Sequence[int] | None = None
    ) -> Costs:
        if self._given is None:
            return super().costs(programs, persistent, placement)
        return replace(self._given, persistent=tuple(map(float, persistent)))


def pipeline(setting: Setting, choice: Choice, costs: Costs | None = None) -> Pipeline:
    """This rank's end of a pipeline that runs the choice."""
    model = setting.model()
    place = launch.join(RANKS, "cpu")
    planner = Foreseen(model, setting, choice, costs)
    pipe = Pipeline(planner, place.transport, setting.make_optimizer, watch=place.watch)
    pipe.run(pipe.prepare(*setting.batch()))
    return pipe


# ---- the first part: calibrate and predict


def predict(setting: Setting, steps: int, warm_up: int, budget: float) -> dict[str, Any]:
    """{name: prediction}; on rank 0. A prediction: step (seconds), peak (bytes a rank beyond what is always there),
    and what `measure` needs to run it."""
    auto = made_auto(setting)
    dist.barrier()
    _ = auto.pieces  # timed by both ranks at once, as they will run
    cuts = told(auto.cuts(PLACEMENTS["1F1B"], setting.micro_batches))
    seen = watch(
        setting, {split: one_f_one_b(setting, cuts, split) for split in (False, True)}, steps, warm_up
    )
    if dist.get_rank() != 0:
        return {}
    foresight = Foresight(setting, auto, cuts, seen)
    return {name: foresight.prediction(name, budget) for name in (*PLACEMENTS, "auto")}


def made_auto(setting: Setting) -> Auto:
    strategy = Strategy(pp_degree=RANKS, schedule_mode="auto", accumulate_steps=setting.micro_batches)
    leaves, form = flatten_batch(*setting.batch())
    sizes = strategy.micro_batches(setting.batch_size)
    return Auto(Planner(setting.model(), loss_fn, strategy, CPU), split_batch(leaves, sizes)[0], form)


def told(cuts: Sequence[int]) -> tuple[int, ...]:
    """Rank 0's cuts."""
    box = [list(cuts)]
    dist.broadcast_object_list(box, 0)
    return tuple(box[0])


def one_f_one_b(setting: Setting, cuts: Sequence[int], split: bool) -> Choice:
    schedule = build("1F1B", stages=RANKS, micro_batches=setting.micro_batches, split_backward=split or None)
    return Choice.of(schedule, cuts, 0.0, 0.0)


@dataclass
class Seen:
    """Steps of 1F1B, medians: seconds of a whole step, of what follows the last job, of each job by (kind, chunk);
    transfer: of a message that was waited for. between, moving: what a message takes of either of its ranks, between
    jobs and in other threads. jitter: how jobs differ from their medians."""

    step: float
    tail: float
    jobs: dict[tuple[str, int], float]
    transfer: float
    between: float
    moving: float
    jitter: Jitter


def watch(setting: Setting, choices: dict[bool, Choice], steps: int, warm_up: int) -> dict[bool, Seen]:
    """Steps of each choice, in turn."""
    pipes = {split: pipeline(setting, choice) for split, choice in choices.items()}
    whole: dict[bool, list[float]] = {split: [] for split in pipes}
    timelines: dict[bool, list[Timeline]] = {split: [] for split in pipes}
    moving: dict[bool, list[float]] = {split: [] for split in pipes}
    for number in range(warm_up + steps):
        for split, pipe in pipes.items():
            step = Step(pipe, setting)
            cool()
            busy = time.process_time() - time.thread_time()
            took = timed(step)
            busy = time.process_time() - time.thread_time() - busy
            timeline = pipe.timeline()
            if number >= warm_up:
                whole[split].append(took)
                timelines[split].append(timeline)
                moving[split].append(busy)
    for pipe in pipes.values():
        pipe.close()
    return {split: what_was_seen(whole[split], timelines[split], moving[split]) for split in pipes}


def cool() -> None:
    """Empties the processor's caches: two pipelines that take turns would find more of theirs there than four do."""
    torch.ones(CACHE // 4).add_(1)


class Step:
    """One training step, to be called."""

    def __init__(self, pipe: Pipeline, setting: Setting) -> None:
        self.pipe, self.batch = pipe, setting.batch()

    def __call__(self) -> None:
        float(self.pipe.step(*self.batch).loss)


def what_was_seen(whole: Sequence[float], timelines: Sequence[Timeline], moving: Sequence[float]) -> Seen:
    """moving: processor seconds of this rank's other threads, step by step. A collective call."""
    working = [jobs_end(t) - jobs_start(t) for t in timelines]
    everyones: list[float] = [0.0] * RANKS
    dist.all_gather_object(everyones, statistics.median(moving))
    ends = 2 * len(timelines[0].flows)  # each message keeps two ranks busy
    return Seen(
        statistics.median(whole),
        statistics.median(w - j for w, j in zip(whole, working, strict=True)),
        medians(timelines),
        statistics.median(seconds for t in timelines for seconds in transfers(t)),
        statistics.median(between_jobs(t) for t in timelines) / ends,
        sum(everyones) / ends,
        Jitter.of(timelines),
    )


def transfers(timeline: Timeline) -> list[float]:
    """Seconds of the messages that their receivers were waiting for when they were sent."""
    waits = {(s.rank, s.chunk, s.micro_batch, s.end): s.start for s in timeline.spans if s.kind == "wait"}
    seen = [
        (waits.get((flow.receiver, flow.target, flow.micro_batch, flow.arrived)), flow)
        for flow in timeline.flows
    ]
    return [flow.arrived - flow.sent for began, flow in seen if began is not None and began < flow.sent]


def between_jobs(timeline: Timeline) -> float:
    """Seconds that pass on all ranks between a rank's first job and its last one, neither in jobs nor in waiting."""
    total = 0.0
    for rank in range(timeline.ranks):
        jobs = [s for s in timeline.spans if s.rank == rank and s.kind in COMPUTE]
        begin, end = min(s.start for s in jobs), max(s.end for s in jobs)
        waits = [s for s in timeline.spans if s.rank == rank and s.kind == "wait" and begin <= s.start < end]
        total += end - begin - sum(s.end - s.start for s in (*jobs, *waits))
    return total


def jobs_start(timeline: Timeline) -> float:
    return min(span.start for span in timeline.spans if span.kind in COMPUTE)


def jobs_end(timeline: Timeline) -> float:
    return max(span.end for span in timeline.spans if span.kind in COMPUTE)


class Foresight:
    """Predictions from what was seen of 1F1B alone."""

    def __init__(self, setting: Setting, auto: Auto, cuts: Sequence[int], seen: dict[bool, Seen]) -> None:
        self.setting, self.auto, self.cuts, self.seen = setting, auto, tuple(cuts), seen
        whole, split = (
            {job: without_message(job[0], t, seen[form].moving) for job, t in seen[form].jobs.items()}
            for form in (False, True)
        )
        pieces: Pieces = auto.pieces.calibrated(
            cuts, *([split.get((kind, c), 0.0) for c in range(RANKS)] for kind in "FBW")
        )
        #: X ÷ (B + W), and a whole F ÷ a split one's, of a piece by the chunk of 1F1B that it lies in
        self._joined = [whole["X", c] / (split.get(("B", c), 0.0) + split["W", c]) for c in range(RANKS)]
        self._forward = [whole["F", c] / split["F", c] for c in range(RANKS)]
        vars(auto)["pieces"] = pieces  # in the place of those that were timed apart
        self._fixed = False

    def prediction(self, name: str, budget: float) -> dict[str, Any]:
        choice = self._choice(name, budget)
        whole = not any(job[0] in "BW" for jobs in choice.jobs for job in jobs)
        costs, programs = self._costs(choice, whole)
        schedule = choice.schedule(self.setting.micro_batches)
        assert schedule is not None
        plan = Plan.make(schedule, programs.edges(), costs)
        seen = self.seen[not whole]
        return {
            "step": seen.jitter.makespan(plan) * self._stretch(whole) + seen.tail,
            "peak": list(plan.simulation.peak),
            "bubble": plan.predicted.bubble_global,
            "digest": plan.digest(),
            "choice": choice.to_json(),
            "costs": costs.to_json(),
        }

    def _choice(self, name: str, budget: float) -> Choice:
        M = self.setting.micro_batches
        if name == "auto":
            return self.auto.propose(M, budget_seconds=budget).choice
        placement = PLACEMENTS[name]
        cuts = self.cuts if name == "1F1B" else self.auto.cuts(placement, M)
        modelled = self.auto.costs(placement, cuts)
        chunks = len(placement)
        unit = [sum(c) / chunks for c in (modelled.forward, modelled.backward_b, modelled.backward_w)]
        schedule: Schedule = build(
            name,
            stages=RANKS,
            chunks=chunks // RANKS,
            micro_batches=M,
            ascending=True,
            unit_costs=(*unit, self.seen[False].transfer),
        )
        return Choice.of(schedule, cuts, 0.0, 0.0)

    def _costs(self, choice: Choice, whole: bool) -> tuple[Costs, ProgramSet]:
        """Seconds from the pieces, bytes from the programs."""
        auto = self.auto
        label = LabelChunks(choice.chunks, positions=choice.positions)
        programs = auto.planner.split(auto.program.copy(), label)
        modelled = auto.costs(choice.placement, choice.positions)
        edges = [0, *choice.positions, len(auto.pieces)]
        seen = self.seen[not whole]
        ends = dict.fromkeys(((d, c) for d in "FB" for c in range(choice.chunks)), 0.0)
        for edge in crossing(programs, choice):
            for chunk in (edge.source, edge.target):
                ends[edge.direction, chunk] += seen.between + seen.moving
        forward, backward, joined = list(modelled.forward), list(modelled.backward_b), []
        for chunk in range(choice.chunks):
            middle = (edges[chunk] + edges[chunk + 1]) / 2
            home = int(middle >= self.cuts[0])
            both = modelled.backward_b[chunk] + modelled.backward_w[chunk]
            joined.append(both * self._joined[home] + ends["B", chunk])
            if whole:
                forward[chunk] *= self._forward[home]
            forward[chunk] += ends["F", chunk]
            backward[chunk] += ends["B", chunk]
        costs = replace(
            auto.planner.costs(programs, [0] * RANKS, choice.placement),
            forward=tuple(forward),
            backward_b=tuple(backward),
            backward_w=modelled.backward_w,
            backward=tuple(joined),
            latency=seen.transfer,
            bandwidth=float("inf"),
            links={},
            update=0.0,
        )
        return costs, programs

    def _stretch(self, whole: bool) -> float:
        """What the steps of 1F1B took between their first job and their last, by what their jobs' medians add up to."""
        choice = one_f_one_b(self.setting, self.cuts, not whole)
        costs, programs = self._costs(choice, whole)
        schedule = choice.schedule(self.setting.micro_batches)
        assert schedule is not None
        seen = self.seen[not whole]
        return (seen.step - seen.tail) / seen.jitter.makespan(Plan.make(schedule, programs.edges(), costs))


def without_message(kind: str, seconds: float, moving: float) -> float:
    """What a job takes without the message that each of them but W sends or takes. Jobs of a toy may be shorter than
    what moving a message takes of the other core: at least half is theirs."""
    return seconds if kind == "W" else max(seconds - moving, seconds / 2)


def crossing(programs: ProgramSet, choice: Choice) -> list[Edge]:
    """The edges whose messages go from rank to rank."""
    where = choice.placement
    return [edge for edge in programs.edges() if where[edge.source] != where[edge.target]]


# ---- the second part: measure


def measure(setting: Setting, predictions: dict[str, Any], rounds: int, warm_up: int) -> dict[str, Any]:
    """seconds[name][round], steps taken in turn; peak[name]: the most bytes allocated on this rank during one more
    step, beyond those that were there before it."""
    pipes = {}
    for name, prediction in predictions.items():
        choice, costs = Choice.from_json(prediction["choice"]), Costs.from_json(prediction["costs"])
        pipes[name] = pipeline(setting, choice, costs)
        if pipes[name].plan.digest() != prediction["digest"]:
            raise ValueError(f"{name}: the plan that would be run isn't the one that was predicted")
    steps = {name: Step(pipe, setting) for name, pipe in pipes.items()}
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    order = list(pipes)
    for number in range(warm_up + rounds):
        for name in order:
            cool()
            took = timed(steps[name])
            if number >= warm_up:
                seconds[name].append(took)
        order = order[1:] + order[:1]
    # The pipelines are left open: torch's profiler has written over freed memory when connections that it had watched
    # were closed after it. Each rank's process ends here anyway.
    peak = {name: allocated(step) for name, step in steps.items()}
    return {"seconds": seconds, "peak": peak}


def allocated(step: Step) -> int:
    """The most bytes that torch's allocator gave out during a step, less what it got back, by the profiler's events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    results: Any = found.profiler
    changes = [(e.start_ns(), e.nbytes()) for e in results.kineto_results.events() if e.name() == "[memory]"]
    levels = accumulate(int(size) for _, size in sorted(changes, key=lambda change: change[0]))
    return max(levels)
