"""Times our schedules against torch.distributed.pipelining's, on the same GPT, in the same run.

    python bench/against_torch.py                            d 512, 8 layers, sequence 256, micro-batch 2, M 8
    python bench/against_torch.py --memory                   resident memory as well, a fresh pair of processes each
    python bench/against_torch.py --write bench/RESULTS.md   adds the results to that file, with date and command
    python bench/against_torch.py --rounds 2 --d 64 --layers 4 --seq 64      a quick look

Two ranks on this machine, a thread each, Gloo over loopback. Every contender starts from the same weights;
before the clock runs, its loss and gradients are compared with the plain model's (float32), and after it, the
losses with each other. Contenders take turns within each round. A step is forward, backward, optimizer and
clearing of gradients, between barriers; ours also computes the gradient norm, compares batches and shares
losses and figures, which torch's doesn't.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from contenders import TORCH, names
from rounds import memory_growth, time_steps
from setting import RANKS, Setting
from start import both_ranks
from tables import memory_table, overhead_text, time_table


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    pairs = tuple(options.pairs.split(","))
    if unknown := [p for p in pairs if p not in TORCH]:
        parser.error(
            f"--pairs: torch has no counterpart of {', '.join(unknown)}; there are {', '.join(TORCH)}"
        )
    if options.micro_batches % RANKS:
        parser.error(
            f"--micro-batches {options.micro_batches}: give a multiple of {RANKS}, torch's VPP needs it"
        )
    setting = setting_of(options, pairs=pairs)
    parts = []
    for part in run(setting, options):
        print(part + "\n", flush=True)
        parts.append(part)
    report = "\n\n".join(parts)
    if options.write is not None:
        append(options.write, report, arguments if arguments is not None else sys.argv[1:])
    return 0


def run(setting: Setting, options: argparse.Namespace) -> Iterator[str]:
    """Times everything; gives the parts of the report, in Markdown, as they are known."""
    yield described(setting, options.rounds)
    listed = names(setting.pairs)
    work = (setting, listed, options.rounds, options.warm_up)
    found = both_ranks(time_steps, *work, timeout=options.timeout)[0]
    yield time_table(found, setting.pairs)
    yield overhead_text(found, setting.pairs)
    if options.memory:
        yield memory_table(
            {
                name: both_ranks(memory_growth, setting, name, timeout=options.timeout)
                for name in listed
                if "unrecorded" not in name
            }
        )


def append(path: Path, report: str, arguments: list[str], script: str = "against_torch.py") -> None:
    """Adds a dated section to the results."""
    command = shlex.join(["python", f"bench/{script}", *arguments])
    title = f"## {datetime.date.today().isoformat()}"
    with path.open("a", encoding="utf-8") as file:
        file.write(f"\n{title}\n\n`{command}`\n\n{report}\n")


def setting_of(options: argparse.Namespace, **more: Any) -> Setting:
    """The setting that `add_sizes`' options name."""
    return Setting(
        width=options.d,
        layers=options.layers,
        heads=options.heads,
        sequence=options.seq,
        vocabulary=options.vocabulary,
        micro_batch=options.micro_batch,
        micro_batches=options.micro_batches,
        optimizer=options.optimizer,
        **more,
    )


def described(setting: Setting, rounds: int) -> str:
    """What was run, and on what."""
    return (
        f"GPT: d {setting.width}, {setting.layers} layers, {setting.heads} heads, sequence {setting.sequence}, "
        f"vocabulary {setting.vocabulary}, float32, {setting.optimizer}; micro-batch {setting.micro_batch}, M "
        f"{setting.micro_batches}; {rounds} rounds. {RANKS} ranks, one thread each, Gloo over loopback, "
        f"{os.cpu_count()} cores ({platform.machine()}); torch {torch.__version__}, pipeloom {version('pipeloom')}, "
        f"Python {platform.python_version()}."
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add_sizes(parser)
    add("--pairs", default="1F1B,VPP,ZBV", help=f"schedules, of {', '.join(TORCH)}")
    add("--memory", action="store_true", help="resident memory as well")
    return parser


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The options that every benchmark of a step has."""
    add = parser.add_argument
    add("--rounds", type=int, default=9, help="timed rounds")
    add("--warm-up", type=int, default=2, help="rounds before them")
    add("--d", type=int, default=512, help="width")
    add("--layers", type=int, default=8)
    add("--heads", type=int, default=8)
    add("--seq", type=int, default=256, help="sequence length")
    add("--vocabulary", type=int, default=8192)
    add("--micro-batch", type=int, default=2, help="samples in a micro-batch")
    add("--micro-batches", type=int, default=8, help="micro-batches a step")
    add("--optimizer", choices=("sgd", "adamw"), default="sgd")
    add("--write", type=Path, metavar="FILE", help="add the results to this file")
    add("--timeout", type=float, default=1800.0, help="seconds that a pair of processes may take")


if __name__ == "__main__":
    sys.exit(main())
