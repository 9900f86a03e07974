"""Times the fleet executor against the list executor, on the same GPT, plan and ranks; and with a straggler.

    python bench/fleet.py                                    d 512, 8 layers, sequence 256, micro-batch 2, M 8
    python bench/fleet.py --schedules 1F1B,ZBH1 --write bench/RESULTS.md
    python bench/fleet.py --rounds 2 --d 64 --layers 4 --seq 64 --micro-batches 4      a quick look

Two ranks on this machine, a thread each, Gloo over loopback. Both executors train copies of one model; before the clock
runs their gradients are compared, to the bit. They take turns within each round, and every other round in the other
order; what counts is the median over rounds of the ratio of the two times of a round. A step is timed from a barrier
to the next.

The straggler: before some forwards of the last stage, drawn at random with the same draws for both, the rank sleeps
for as long as a forward takes. A list waits for it in the planned order; a fleet runs what else can run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

import pipeloom
from against_torch import add_sizes, append, described, setting_of
from pipeloom import api
from pipeloom.runtime.static_plan import Run
from pipeloom.strategy.values import FLEET_SCHEDULES
from rounds import timed
from setting import RANKS, Setting, loss_fn
from start import both_ranks

EXECUTORS = ("list", "fleet")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_sizes(parser)
    parser.add_argument("--schedules", default="1F1B", help=f"of {', '.join(FLEET_SCHEDULES)}")
    parser.add_argument(
        "--slow", type=float, default=0.3, help="share of forwards that a straggler is late in"
    )
    options = parser.parse_args(arguments)
    schedules = options.schedules.split(",")
    if unknown := [s for s in schedules if s not in FLEET_SCHEDULES]:
        parser.error(f"--schedules: {', '.join(unknown)}: the fleet has {', '.join(FLEET_SCHEDULES)}")
    if not 0 <= options.slow <= 1:
        parser.error(f"--slow {options.slow}: give a share from 0 to 1")
    parts = []
    for part in report(setting_of(options), schedules, options):
        print(part + "\n", flush=True)
        parts.append(part)
    if options.write is not None:
        given = arguments if arguments is not None else sys.argv[1:]
        append(options.write, "\n\n".join(parts), given, "fleet.py")
    return 0


def report(setting: Setting, schedules: Sequence[str], options: argparse.Namespace) -> Iterator[str]:
    """Times everything; gives the parts of the report, in Markdown, as they are known."""
    yield described(setting, options.rounds)
    lines = [
        "| schedule | stages | list, ms | fleet, ms | fleet ÷ list (median of rounds; quartiles) |",
        "|---|---|---|---|---|",
    ]
    for schedule in schedules:
        for slow in (0.0, options.slow):
            work = (setting, schedule, slow, options.rounds, options.warm_up)
            found = both_ranks(compare, *work, timeout=options.timeout)[0]
            lines.append(row(schedule, slow, found["seconds"]))
    yield "\n".join(lines)


def row(schedule: str, slow: float, seconds: dict[str, list[float]]) -> str:
    """One line of the table."""
    by_list, by_fleet = (seconds[executor] for executor in EXECUTORS)
    ratios = [fleet / other for fleet, other in zip(by_fleet, by_list, strict=True)]
    low, middle, high = quartiles(ratios)
    times = [f"{1000 * statistics.median(own):.1f}" for own in (by_list, by_fleet)]
    stages = f"last one late in {slow:.0%} of its forwards" if slow else "undisturbed"
    return f"| {schedule} | {stages} | {times[0]} | {times[1]} | {middle:.3f} ({low:.3f}–{high:.3f}) |"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


# ---- on each rank


def compare(setting: Setting, schedule: str, slow: float, rounds: int, warm_up: int) -> dict[str, Any]:
    """Seconds of each executor's steps, round by round."""
    batch = setting.batch()
    pipes = {executor: compiled(setting, schedule, executor) for executor in EXECUTORS}
    check_same(pipes, batch)
    delays = {executor: Delays(pipe) for executor, pipe in pipes.items()}
    seconds: dict[str, list[float]] = {executor: [] for executor in EXECUTORS}
    for number in range(-warm_up, rounds):
        order = EXECUTORS if number % 2 else tuple(reversed(EXECUTORS))
        for executor in order:
            delays[executor].draw(number, slow)
            took = timed(lambda executor=executor: pipes[executor].step(*batch) and None)
            if number >= 0:
                seconds[executor].append(took)
    for pipe in pipes.values():
        pipe.close()
    return {"seconds": seconds}


def compiled(setting: Setting, schedule: str, executor: str) -> api.Pipeline:
    cuts = [f"layers.{part.start}" for part in setting.equal_parts(RANKS)[1:]]
    return pipeloom.compile(
        setting.model(),
        loss_fn,
        example=setting.batch(),
        strategy=pipeloom.Strategy(
            pp_degree=RANKS,
            schedule_mode=schedule,
            accumulate_steps=setting.micro_batches,
            cuts=cuts,
            executor=executor,
        ),
        optimizer=setting.make_optimizer,
    )


def check_same(pipes: dict[str, api.Pipeline], batch: Any) -> None:
    """Raises ValueError unless both executors give the same bits."""
    losses, gradients = [], []
    for pipe in pipes.values():
        losses.append(float(pipe.step(*batch, update=False).loss))
        gradients.append({name: gradient.clone() for name, gradient in pipe.gradients().items()})
        pipe.zero_grad()
    unequal = [name for name, gradient in gradients[0].items() if not gradient.equal(gradients[1][name])]
    if losses[0] != losses[1] or unequal:
        raise ValueError(
            f"list and fleet don't do the same work: losses {losses}, gradients of {unequal[:3]}"
        )


class Delays:
    """Makes the last stage late in some of its forwards: by as long as an undisturbed one takes."""

    def __init__(self, pipe: api.Pipeline) -> None:
        executor = pipe._last
        assert executor is not None
        recorder = executor.recorder
        runs = [
            (item, recorder.end[i] - recorder.start[i])
            for i, item in enumerate(executor.plan.items)
            if isinstance(item, Run) and item.job.kind == "F"
        ]
        self._late: set[int] = set()
        self._seconds = statistics.median(took for _, took in runs)
        if dist.get_rank() == RANKS - 1:
            for item, _ in runs:
                item.call = self._delayed(item.job.micro_batch, item.call)
        self._count = len(runs)

    def draw(self, number: int, share: float) -> None:
        """Which micro-batches are late in this round."""
        rng = random.Random(number)
        self._late = {m for m in range(self._count) if rng.random() < share}

    def _delayed(self, micro_batch: int, call: Callable[..., Any] | None) -> Callable[..., Any]:
        assert call is not None

        def late(arguments: list[Any]) -> Any:
            if micro_batch in self._late:
                time.sleep(self._seconds)
            return call(arguments)

        return late


if __name__ == "__main__":
    sys.exit(main())
