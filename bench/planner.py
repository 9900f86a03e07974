"""How good are plans? Makespan ÷ lower bound of every named schedule, of torch's, and of the search; and how
long planning takes.

    python bench/planner.py --jobs 2                        81 cells, 30 s of search each, then planning times
    python bench/planner.py --cells 8x16 --budget 3         a quick look: S 8, M 16
    python bench/planner.py --jobs 2 --write bench/RESULTS.md
    python bench/planner.py --cells none                    planning times alone

27 cells (S 4, 8, 16; M S, 2S, 4S; three sets of costs) at 0.5, 1 and 2 times 1F1B's activation memory. Finished
cells are kept in a file, so that a run which was stopped goes on where it was. torch's schedules are generated
live and simulated like ours; a schedule counts with its best V ≤ 4 that fits. Ours are made for the limit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import pairwise
from pathlib import Path

from pipeloom.planning import Costs, lower, simulate, verify
from pipeloom.schedules import build, chain_edges
from pipeloom.schedules.catalogue import CATALOGUE
from planner_cells import COSTS, LIMITS, STAGES, Cell, Result, all_cells, load, measure, save
from tables import markdown
from torch_orders import prepare

#: (S, V, M) of the planning times
LARGE = ((64, 2, 256), (256, 2, 2048))


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    cells = chosen(options.cells, parser)
    results = run(cells, options.budget, options.jobs, options.keep)
    parts = [quality(results, options.budget)] if results else []
    if options.planning:
        parts.append(planning_times(options.torch_patience))
    report = "\n\n".join(parts)
    print(report, flush=True)
    if options.write is not None:
        from against_torch import append

        append(options.write, report, arguments if arguments is not None else sys.argv[1:], "planner.py")
    return 0


def chosen(wanted: str, parser: argparse.ArgumentParser) -> list[Cell]:
    if wanted in ("all", "none"):
        return all_cells() if wanted == "all" else []
    sizes = set(wanted.split(","))
    cells = [cell for cell in all_cells() if f"{cell.stages}x{cell.micro_batches}" in sizes]
    known = sorted({f"{cell.stages}x{cell.micro_batches}" for cell in all_cells()})
    if unknown := sizes - set(known):
        parser.error(f"--cells {','.join(sorted(unknown))}: there are all, none, {', '.join(known)}")
    return cells


def run(cells: Sequence[Cell], budget: float, jobs: int, keep: Path) -> list[Result]:
    """The results of cells, those that the file has and those that are measured now."""
    done = load(keep, budget)
    missing = [cell for cell in cells if cell not in done]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(jobs, len(missing))), mp_context=context) as pool:
        waiting = {pool.submit(measure, cell, budget): cell for cell in missing}
        for number, future in enumerate(as_completed(waiting), 1):
            result = done[waiting[future]] = future.result()
            save(keep, result, budget)
            best = min(result.named.values(), default=float("nan"))
            print(
                f"{number}/{len(missing)} S {result.cell.stages} M {result.cell.micro_batches} {result.cell.costs} "
                f"at {result.cell.memory}x: {result.auto / result.bound:.4f} of the bound ({result.plan}); best named "
                f"{best / result.bound:.4f}",
                file=sys.stderr,
                flush=True,
            )
    return [done[cell] for cell in cells]


def quality(results: Sequence[Result], budget: float) -> str:
    """A table for each memory limit."""
    parts = [
        f"Makespan ÷ lower bound (the least over linear, loop and V placements with V ≤ 4); search: {budget:g} s a "
        "cell on one core. 'bubble': 1 − work ÷ (S · makespan). '–': doesn't fit, or doesn't take these numbers. Our "
        "named schedules are made for the limit where they don't fit as they are; it counts activations alone; "
        "'posted': the most receives that auto's plan has posted on a stage at once."
    ]
    for memory in LIMITS:
        rows = [_title(memory), *[_row(r) for r in results if r.cell.memory == memory]]
        if len(rows) > 1:
            parts.append(markdown(rows))
    parts.append(_summary(results))
    return "\n\n".join(parts)


def _title(memory: float) -> list[str]:
    return [f"{memory:g}x memory", "auto", "bubble", "plan", "posted", "best of torch", *CATALOGUE]


def _row(r: Result) -> list[str]:
    torch_name = min(r.torch, key=r.torch.__getitem__, default="")
    return [
        f"S {r.cell.stages}, M {r.cell.micro_batches}, {r.cell.costs}",
        f"**{r.auto / r.bound:.4f}**",
        f"{1 - r.cell.work / r.auto:.2%}",
        r.plan,
        str(r.posted),
        f"{r.torch[torch_name] / r.bound:.3f} {torch_name}" if torch_name else "–",
        *(f"{r.named[name] / r.bound:.3f}" if name in r.named else "–" for name in CATALOGUE),
    ]


def _summary(results: Sequence[Result]) -> str:
    lines = []
    for memory in LIMITS:
        here = [r for r in results if r.cell.memory == memory]
        if not here:
            continue
        ratios = sorted(r.auto / r.bound for r in here)
        reached = sum(x < 1 + 1e-6 for x in ratios)
        ours = sum(r.auto > min(r.named.values(), default=r.auto) + 1e-6 for r in here)
        theirs = sum(r.auto > min(r.torch.values(), default=r.auto) + 1e-6 for r in here)
        lines.append(
            f"- {memory:g}x: auto ÷ bound at most {ratios[-1]:.4f}, median {ratios[len(ratios) // 2]:.4f}, at the "
            f"bound in {reached} of {len(here)} cells; worse than one of our named schedules in "
            f"{ours}, than one of torch's in {theirs}."
        )
    return "\n".join(lines)


def planning_times(patience: float) -> str:
    """Seconds to generate, lower, verify and simulate a named schedule, beside torch's to generate and lower."""
    rows = [
        ["planning, s", "generate", "lower", "verify", "simulate", "all", "torch: generate and add transfers"]
    ]
    for stages, chunks, micro_batches in LARGE:
        for name, torch_name in (("VPP", "Interleaved1F1B"), ("ZBV", "ZBVZeroBubble")):
            ours = _ours(name, stages, chunks, micro_batches)
            theirs = _within(patience, _torch_seconds, torch_name, stages, chunks, micro_batches)
            rows.append(
                [
                    f"{name}, S {stages}, V {chunks}, M {micro_batches}",
                    *(f"{x:.2f}" for x in (*ours, sum(ours))),
                    f"more than {patience:g}" if theirs is None else f"{theirs:.2f}",
                ]
            )
    return markdown(rows)


def _ours(name: str, stages: int, chunks: int, micro_batches: int) -> list[float]:
    costs = Costs.per_stage(stages, chunks, *COSTS["1/1.1/0.8, comm 0.1"])
    clock = [time.perf_counter()]
    schedule = build(name, stages=stages, chunks=chunks, micro_batches=micro_batches)
    clock.append(time.perf_counter())
    lowered = lower(schedule, chain_edges(schedule.total_chunks), costs)
    clock.append(time.perf_counter())
    verify(lowered)
    clock.append(time.perf_counter())
    simulate(schedule, costs, lowered=lowered)
    clock.append(time.perf_counter())
    return [after - before for before, after in pairwise(clock)]


def _torch_seconds(name: str, stages: int, chunks: int, micro_batches: int) -> float:
    prepare(name, 2, chunks, 4)  # imports
    begin = time.perf_counter()
    prepare(name, stages, chunks, micro_batches)
    return time.perf_counter() - begin


def _within(seconds: float, work: Callable[..., float], *arguments: object) -> float | None:
    """What `work` gives, in a process of its own, or None if that takes longer."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, work, *arguments))
    process.start()
    sender.close()
    try:
        return float(receiver.recv()) if receiver.poll(seconds) else None
    finally:
        process.kill()
        process.join()


def _send(sender, work, *arguments) -> None:  # type: ignore[no-untyped-def]
    sender.send(work(*arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cells", default="all", help=f"all, none, or sizes like 8x16,4x8 (S of {STAGES})")
    add("--budget", type=float, default=30.0, help="seconds of search a cell")
    add("--jobs", type=int, default=1, help="cells at once")
    add("--keep", type=Path, default=Path("runs/planner_cells.jsonl"), help="the file of finished cells")
    add("--planning", action=argparse.BooleanOptionalAction, default=True, help="planning times as well")
    add("--torch-patience", type=float, default=600.0, help="seconds to wait for torch's largest schedules")
    add("--write", type=Path, help="add the report to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
