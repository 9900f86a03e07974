"""Predicts steps before they run: calibrated on 1F1B alone, for VPP, ZBV and auto; then runs them.

    python bench/forecast.py                                 d 512, 8 layers, sequence 256, micro-batch 2, M 8
    python bench/forecast.py --predictions FILE              where the predictions are written before anything is run
    python bench/forecast.py --write bench/RESULTS.md        adds the results to that file, with date and command
    python bench/forecast.py --rounds 3 --steps 3 --d 128 --seq 128 --vocabulary 1024     a quick look

Two pairs of processes: the first takes steps of 1F1B and predicts; the predictions are written down with their
SHA-256 hash; the second, which gets nothing but them, runs all four in turn. Peak memory is what torch's profiler sees
allocated during a step beyond what was there before it, against the plan's figure.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from against_torch import add_sizes, append, described, setting_of
from foresight import measure, predict
from setting import RANKS
from start import both_ranks
from tables import MEGABYTE, markdown


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
    calibrating = (setting, options.steps, options.warm_up, options.budget)
    predictions = both_ranks(predict, *calibrating, timeout=options.timeout)[0]
    text = json.dumps(predictions, sort_keys=True)
    if options.predictions is not None:
        options.predictions.write_text(text, encoding="utf-8")
    figures = "; ".join(f"{name} {1e3 * p['step']:.1f} ms" for name, p in predictions.items())
    yield (
        f"Predicted from {options.steps} steps of 1F1B, before the others ran: {figures} (SHA-256 of all predictions "
        f"{hashlib.sha256(text.encode()).hexdigest()})."
    )
    found = both_ranks(
        measure, setting, predictions, options.rounds, options.warm_up, timeout=options.timeout
    )
    yield table(predictions, found)


def table(predictions: dict[str, Any], found: list[dict[str, Any]]) -> str:
    """Markdown: a row a schedule, predicted and measured. found: as `foresight.measure` gives it, by rank."""
    seconds = {name: statistics.median(times) for name, times in found[0]["seconds"].items()}
    drift = seconds["1F1B"] / predictions["1F1B"]["step"]
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
        rows.append(
            [
                name,
                f"{1e3 * prediction['step']:.1f}",
                f"{1e3 * seconds[name]:.1f} ({1e3 * min(times):.1f}–{1e3 * max(times):.1f})",
                _off(prediction["step"], seconds[name]),
                _off(prediction["step"] * drift, seconds[name]),
                ", ".join(f"{p / MEGABYTE:.2f}" for p in prediction["peak"]),
                ", ".join(f"{p / MEGABYTE:.2f}" for p in peaks),
                ", ".join(_off(p, m) for p, m in zip(prediction["peak"], peaks, strict=True)),
            ]
        )
    return markdown(rows)


def _off(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.1%}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_sizes(parser)
    parser.add_argument("--steps", type=int, default=9, help="steps of 1F1B, in each form, to calibrate on")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds that auto may search")
    parser.add_argument("--predictions", type=Path, metavar="FILE", help="write the predictions there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
