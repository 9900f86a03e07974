"""The commands. No logic here: each one reads its options, calls one room and prints.

    pipeloom train       start a training run on this machine, or join one under torchrun
    pipeloom simulate    what a schedule would cost, without torch
    pipeloom schedules   the schedules by name, drawn

Exit codes: 0, 1 for a failure, 2 for bad input (told in one line), 130 for an interrupt.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

from . import planning, schedules
from .planning.exchange import to_csv
from .schedules.catalogue import ALIASES, CATALOGUE

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

#: where a message names a field, the command's user wants to know the option
_OPTIONS: Final[dict[str, str]] = {
    "pp_degree": "--stages",
    "vpp_degree": "--chunks",
    "schedule_mode": "--schedule",
    "accumulate_steps": "--micro-batches",
}
_SHAPE, _RUN, _MODEL = "Pipeline", "Training", "Model"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pipeloom {importlib.metadata.version('pipeloom')}")
        raise typer.Exit


@app.callback()
def _all(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Pipeline-parallel training for PyTorch: compile a model into jobs, order them, run them on real ranks."""
    del version


@app.command()
def train(
    config: Annotated[
        Path | None,
        typer.Option(help="A TOML file with [train], [model], [strategy]; options go before it."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="A run folder: go on from its latest checkpoint.")
    ] = None,
    stages: Annotated[int | None, typer.Option(help="Stages, one rank each.", rich_help_panel=_SHAPE)] = None,
    chunks: Annotated[int | None, typer.Option(help="Chunks a stage.", rich_help_panel=_SHAPE)] = None,
    schedule: Annotated[
        str | None, typer.Option(help="See `pipeloom schedules`.", rich_help_panel=_SHAPE)
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Micro-batches a step.", rich_help_panel=_SHAPE)
    ] = None,
    micro_batch_size: Annotated[
        int | None, typer.Option(help="Or their size.", rich_help_panel=_SHAPE)
    ] = None,
    split_backward: Annotated[
        bool | None, typer.Option(help="Run backwards as two jobs.", rich_help_panel=_SHAPE)
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="Of a rank, like 16GiB.", rich_help_panel=_SHAPE)
    ] = None,
    max_norm: Annotated[
        float | None, typer.Option(help="Clip the gradient norm.", rich_help_panel=_RUN)
    ] = None,
    autocast: Annotated[str | None, typer.Option(help="bfloat16 or float16.", rich_help_panel=_RUN)] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.", rich_help_panel=_RUN)] = None,
    minutes: Annotated[
        float | None, typer.Option(help="End after so many, if steps are left.", rich_help_panel=_RUN)
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Windows a step.", rich_help_panel=_RUN)] = None,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate.", rich_help_panel=_RUN)] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps of its rise.", rich_help_panel=_RUN)] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of weights, batches, dropout.", rich_help_panel=_RUN)
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="A UTF-8 file; default: Python's own docs.", rich_help_panel=_RUN)
    ] = None,
    out: Annotated[str | None, typer.Option(help="Where run folders are made.", rich_help_panel=_RUN)] = None,
    eval_every: Annotated[int | None, typer.Option(help="In steps.", rich_help_panel=_RUN)] = None,
    save_every: Annotated[int | None, typer.Option(help="In steps.", rich_help_panel=_RUN)] = None,
    sample: Annotated[
        int | None, typer.Option(help="Characters to write at the end.", rich_help_panel=_RUN)
    ] = None,
    width: Annotated[int | None, typer.Option(help="Of the model.", rich_help_panel=_MODEL)] = None,
    layers: Annotated[int | None, typer.Option(help="Of the model.", rich_help_panel=_MODEL)] = None,
    heads: Annotated[int | None, typer.Option(help="Of a layer.", rich_help_panel=_MODEL)] = None,
    sequence: Annotated[int | None, typer.Option(help="In characters.", rich_help_panel=_MODEL)] = None,
    dropout: Annotated[float | None, typer.Option(help="From 0 to below 1.", rich_help_panel=_MODEL)] = None,
    tied: Annotated[
        bool | None, typer.Option(help="Head shares the embedding.", rich_help_panel=_MODEL)
    ] = None,
    plain: Annotated[
        bool | None, typer.Option("--plain/--live", help="Print lines, or a live table.")
    ] = None,
) -> None:
    """Train a GPT on text through a pipeline of ranks on this machine.

    Under torchrun each process joins as the rank that it is. Ctrl-C stops all ranks after their step and keeps a
    checkpoint; --resume goes on from it.
    """
    from .training.config import TrainConfig, merge_tables, read_tables
    from .training.folder import RunFolder
    from .training.launch import launch

    given: dict[str, dict[str, Any]] = {
        "strategy": {
            "pp_degree": stages,
            "vpp_degree": chunks,
            "schedule_mode": schedule,
            "accumulate_steps": micro_batches,
            "micro_batch_size": micro_batch_size,
            "split_backward": split_backward,
            "memory_limit": memory_limit,
            "max_norm": max_norm,
            "autocast": autocast,
        },
        "train": {
            "steps": steps,
            "minutes": minutes,
            "batch_size": batch_size,
            "lr": lr,
            "warmup": warmup,
            "seed": seed,
            "text": text,
            "out": out,
            "eval_every": eval_every,
            "save_every": save_every,
            "sample": sample,
        },
        "model": {
            "width": width,
            "layers": layers,
            "heads": heads,
            "sequence": sequence,
            "dropout": dropout,
            "tied": tied,
        },
    }
    options = {
        name: {field: value for field, value in table.items() if value is not None}
        for name, table in given.items()
    }
    tables = RunFolder(resume).tables() if resume is not None else {}
    if config is not None:
        tables = merge_tables(tables, read_tables(config))
    where = str(config or "") if not any(options.values()) else ""
    run = TrainConfig.from_tables(merge_tables(tables, options), where=where)
    raise typer.Exit(launch(run, resume, plain=plain))


@app.command()
def simulate(
    stages: Annotated[int, typer.Option(help="Stages S.")],
    micro_batches: Annotated[int, typer.Option(help="Micro-batches M.")],
    chunks: Annotated[int, typer.Option(help="Chunks a stage, V.")] = 1,
    schedule: Annotated[str, typer.Option(help="See `pipeloom schedules`.")] = "1F1B",
    split_backward: Annotated[bool | None, typer.Option(help="Run backwards as two jobs.")] = None,
    costs: Annotated[
        str, typer.Option(help="F,B,W of a stage, in any unit; a chunk costs its share of them.")
    ] = "1,1,1",
    comm: Annotated[float, typer.Option(help="Of a message between stages, in the same unit.")] = 0.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write jobs and figures there; - for standard output.")
    ] = None,
    csv_file: Annotated[
        Path | None,
        typer.Option("--csv", help="Write the plan there for torch.distributed.pipelining (compute_comms)."),
    ] = None,
) -> None:
    """What a schedule would cost: its makespan, bubbles and memory, and the least that is possible.

    Memory is in units of one micro-batch's activations of one stage.
    """
    numbers = [float(part) if _is_number(part) else -1.0 for part in costs.split(",")]
    if len(numbers) != 3 or min(numbers) < 0:
        raise ValueError(
            f"--costs {costs}: write three numbers of at least 0, for F, B and W, like 1,1.1,0.8"
        )
    if not comm >= 0:
        raise ValueError(f"--comm {comm}: write a number of at least 0")
    options = {} if split_backward is None else {"split_backward": split_backward}
    forward, backward, weight = numbers
    share = [number / max(1, chunks) for number in numbers]
    made = schedules.build(
        schedule,
        stages=stages,
        chunks=chunks,
        micro_batches=micro_batches,
        unit_costs=(*share, comm),
        **options,
    )
    per_chunk = planning.Costs.per_stage(stages, chunks, forward, backward, weight, comm)
    result = planning.simulate(made, per_chunk)
    bound = planning.lower_bound(made.placement, micro_batches, per_chunk)
    report = planning.simulation_json(made, result, bound)
    if csv_file is not None:
        lowered = planning.lower(made, schedules.chain_edges(made.total_chunks), per_chunk)
        try:
            csv_file.write_text(to_csv(lowered), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--csv {csv_file}: can't be written ({error.strerror})") from None
    if json_file is not None:
        text = json.dumps(report) + "\n"
        if str(json_file) == "-":
            typer.echo(text, nl=False)
            return
        try:
            json_file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--json {json_file}: can't be written ({error.strerror})") from None
    typer.echo(schedules.draw(made, columns=28))
    above = f"{result.makespan / bound - 1:.1%} above the bound {bound:.6g}" if bound else "no work"
    typer.echo(f"\nmakespan       {result.makespan:.6g} ({above})")
    typer.echo(f"bubble, global {result.bubble_global:.2%} of stages × makespan")
    typer.echo(f"bubble, span   {result.bubble_span:.2%} of stages × the longest span of a stage")
    typer.echo(f"peak a stage   {' '.join(f'{peak:.4g}' for peak in result.peak)}")


@app.command("schedules")
def list_schedules() -> None:
    """The schedules by name, with their aliases, drawn for four stages."""
    for name, entry in CATALOGUE.items():
        aliases = [alias for alias, of in ALIASES.items() if of == name]
        needs = (
            "any number of chunks"
            if entry.chunks is None
            else f"{entry.chunks} chunk{'s' * (entry.chunks > 1)}"
        )
        typer.echo(f"{name}  ({needs} a stage{'; also ' + ', '.join(aliases) if aliases else ''})")
        typer.echo(inspect.getdoc(entry.policy) or "")
        typer.echo("")


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\s*\d*\.?\d+(e[+-]?\d+)?\s*", text, re.IGNORECASE) is not None


def main() -> None:
    """The entry of the `pipeloom` command."""
    # typer carries click's classes under changing names; BadParameter is public, and their descendant.
    click_exception: Any = typer.BadParameter.__mro__[2]
    try:
        code = app(standalone_mode=False)
    except click_exception as error:
        _fail(error.format_message())
    except ValueError as error:
        _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    """One line and exit code 2. (Without a message the help has been printed already.)"""
    named = [f"{name} is {option}" for name, option in _OPTIONS.items() if re.search(rf"\b{name}\b", message)]
    hint = f" ({'; '.join(named)})" if named else ""
    if message:
        typer.echo(f"error: {' '.join(message.split())}{hint}", err=True)
    sys.exit(2)
