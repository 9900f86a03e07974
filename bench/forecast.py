"""Predicts steps before they run: calibrated on 1F1B alone, for VPP, ZBV and auto; then runs them.

    python bench/forecast.py                                 d 512, 8 layers, sequence 256, micro-batch 2, M 8
    python bench/forecast.py --cycles 5                      the whole of it five times (default: 3)
    python bench/forecast.py --predictions FILE              where each cycle's predictions are written before they run
    python bench/forecast.py --write bench/RESULTS.md        adds the results to that file, with date and command
    python bench/forecast.py --cycles 1 --rounds 3 --steps 3 --d 128 --seq 128 --vocabulary 1024     a quick look

A cycle has two pairs of processes: the first takes steps of 1F1B and predicts; the predictions are written down with
their SHA-256 hash; the second, which gets nothing but them, runs all four in turn. Cycles share nothing. There are
several because a machine's speed drifts within minutes, by more than what is to be shown: a cycle's error has the
drift between its two halves in it, the median of all cycles' errors has little of it. Caches are emptied before each
step, so that it finds as little there in either half. Peak memory is what torch's profiler sees allocated during a step
beyond what was there before it, against the plan's figure.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from against_torch import add_sizes, append, described, setting_of
from foresight import measure, predict
from setting import RANKS
from start import both_ranks
from tables import MEGABYTE, markdown

#: Keeps glibc from giving memory back between steps. Whether it does hangs on what else lies in the heap, so that steps
#: of 1F1B cost one rank 64 MB of fresh pages each in one process and none in another.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 35), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    parts = []
    for part in run(options):
        print(part + "\n", flush=True)
        parts.append(part)
    if options.write is not None:
        given = arguments if arguments is not None else sys.argv[1:]
        append(options.write, "\n\n".join(parts), given, "forecast.py")
    return 0


def run(options: argparse.Namespace) -> Iterator[str]:
    """Predicts, measures; gives the parts of the report, in Markdown, as they are known."""
    setting = setting_of(options)
    yield described(setting, options.rounds)
    errors: list[dict[str, Error]] = []
    for number in range(options.cycles):
        calibrating = (setting, options.steps, options.warm_up, options.budget)
        predictions = both_ranks(predict, *calibrating, timeout=options.timeout, environment=KEEP_MEMORY)[0]
        text = json.dumps(predictions, sort_keys=True)
        if options.predictions is not None:
            numbered = options.predictions.with_stem(f"{options.predictions.stem}-{number + 1}")
            numbered.write_text(text, encoding="utf-8")
        figures = "; ".join(f"{name} {1e3 * p['step']:.1f} ms" for name, p in predictions.items())
        yield (
            f"Cycle {number + 1}: predicted from {options.steps} steps of 1F1B, before the others ran: {figures} "
            f"(SHA-256 of all predictions {hashlib.sha256(text.encode()).hexdigest()})."
        )
        measuring = (setting, predictions, options.rounds, options.warm_up)
        found = both_ranks(measure, *measuring, timeout=options.timeout, environment=KEEP_MEMORY)
        yield table(predictions, found)
        errors.append(errors_of(predictions, found))
    yield summary(errors)


class Error(NamedTuple):
    """What was predicted ÷ what was measured − 1: of a step's time, of that if 1F1B's were exact, of each rank's
    peak."""

    step: float
    beside: float
    peaks: tuple[float, ...]


def errors_of(predictions: dict[str, Any], found: list[dict[str, Any]]) -> dict[str, Error]:
    """{schedule: its errors in a cycle}. found: as `foresight.measure` gives it, by rank."""
    seconds = {name: statistics.median(times) for name, times in found[0]["seconds"].items()}
    drift = seconds["1F1B"] / predictions["1F1B"]["step"]
    return {
        name: Error(
            prediction["step"] / seconds[name] - 1,
            prediction["step"] * drift / seconds[name] - 1,
            tuple(p / rank["peak"][name] - 1 for p, rank in zip(prediction["peak"], found, strict=True)),
        )
        for name, prediction in predictions.items()
    }


def summary(errors: list[dict[str, Error]]) -> str:
    """Markdown: a row a schedule, all cycles."""
    rows = [
        ["schedule", "step off, each cycle", "median", "median if 1F1B were exact", "peak off, the worst"]
    ]
    for name in errors[0]:
        mine = [cycle[name] for cycle in errors]
        rows.append(
            [
                name,
                ", ".join(f"{e.step:+.1%}" for e in mine),
                f"{statistics.median(e.step for e in mine):+.1%}",
                f"{statistics.median(e.beside for e in mine):+.1%}",
                f"{max((peak for e in mine for peak in e.peaks), key=abs):+.1%}",
            ]
        )
    return markdown(rows)


def table(predictions: dict[str, Any], found: list[dict[str, Any]]) -> str:
    """Markdown: a row a schedule, predicted and measured. found: as `foresight.measure` gives it, by rank."""
    errors = errors_of(predictions, found)
    rows = [
        [
            "schedule",
            "predicted ms",
            "measured (min–max)",
            "off",
            "off, if 1F1B were exact",
            "peak predicted MB, rank " + ", ".join(map(str, range(RANKS))),
            "measured",
            "off",
        ]
    ]
    for name, prediction in predictions.items():
        times, peaks = found[0]["seconds"][name], [rank["peak"][name] for rank in found]
        error = errors[name]
        rows.append(
            [
                name,
                f"{1e3 * prediction['step']:.1f}",
                f"{1e3 * statistics.median(times):.1f} ({1e3 * min(times):.1f}–{1e3 * max(times):.1f})",
                f"{error.step:+.1%}",
                f"{error.beside:+.1%}",
                ", ".join(f"{p / MEGABYTE:.2f}" for p in prediction["peak"]),
                ", ".join(f"{p / MEGABYTE:.2f}" for p in peaks),
                ", ".join(f"{peak:+.1%}" for peak in error.peaks),
            ]
        )
    return markdown(rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_sizes(parser)
    parser.add_argument("--steps", type=int, default=9, help="steps of 1F1B, in each form, to calibrate on")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds that auto may search")
    parser.add_argument(
        "--cycles", type=int, default=3, help="predictions and runs of them, each from the start"
    )
    parser.add_argument(
        "--predictions", type=Path, metavar="FILE", help="write the predictions beside it, FILE-1, FILE-2, …"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
