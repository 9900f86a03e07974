"""The commands. No logic here: each one reads its options, calls one room and prints.

    pipeloom train       start a training run on this machine, or join one under torchrun
    pipeloom plan        which pipeline a run should use, before it is started
    pipeloom generate    text from a trained model, through a pipeline
    pipeloom fetch       a small model to try it with
    pipeloom simulate    what a schedule would cost, without torch
    pipeloom schedules   the schedules by name, drawn

Exit codes: 0, 1 for a failure, 2 for bad input (told in one line), 130 for an interrupt.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

from . import planning, schedules
from .planning.exchange import to_csv
from .schedules.catalogue import ALIASES, CATALOGUE
from .schedules.timeline import Timeline

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

#: where a message names a field, the command's user wants to know the option
_OPTIONS: Final[dict[str, str]] = {
    "pp_degree": "--stages",
    "vpp_degree": "--chunks",
    "schedule_mode": "--schedule",
    "accumulate_steps": "--micro-batches",
    "memory_limit": "--memory",
    "budget": "--budget",
}
_SHAPE, _RUN, _MODEL, _TEXT = "Pipeline", "Training", "Model", "Text"


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
    """Pipeline-parallel training and generation for PyTorch: compile a model, cut it, run it on real ranks."""
    del version


@app.command()
def train(
    config: Annotated[
        Path | None,
        typer.Option(help="A TOML file with the tables train, model and strategy; options go before it."),
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
def plan(
    config: Annotated[Path | None, typer.Option(help="A TOML file as `pipeloom train` takes it.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks of the pipeline, here or elsewhere.")] = None,
    memory: Annotated[str | None, typer.Option(help="Of a rank, like 16GiB.")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches a step.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Windows a step.")] = None,
    budget: Annotated[str, typer.Option(help="Of searching, like 10s or 2min.")] = "10s",
    device: Annotated[
        str | None,
        typer.Option(help="A name (h100, a100-80gb, …) or a JSON file of numbers; default: timed here."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Show all plans, not the best of each schedule.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all plans there; - for standard output.")
    ] = None,
    timeline: Annotated[Path | None, typer.Option(help="Write the chosen plan's page there.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write its trace for ui.perfetto.dev there.")] = None,
    csv_file: Annotated[
        Path | None,
        typer.Option("--csv", help="Write it there for torch.distributed.pipelining (compute_comms)."),
    ] = None,
) -> None:
    """Which pipeline a run should use, before it is started: every schedule's step, bubbles, memory and traffic.

    No ranks are started; there may be more than this machine has. Exit code 1: nothing fits the memory.
    """
    from .training.config import TrainConfig, merge_tables, read_tables
    from .training.propose import propose

    tables = read_tables(config) if config is not None else {}
    strategy = {} if micro_batches is None else {"accumulate_steps": micro_batches}
    train = {} if batch_size is None else {"batch_size": batch_size}
    run = TrainConfig.from_tables(
        merge_tables(tables, {"strategy": strategy, "train": train}), where=str(config or "")
    )
    found = propose(run, ranks=ranks, memory=memory, budget=budget, device=device)
    if not (json_file is not None and _write_json(json_file, found.to_json())):
        found.show(every=every)
    if found.best is None:
        raise typer.Exit(1)
    if timeline is not None or trace is not None:
        _write_pictures([found.timeline()], timeline, trace)
    if csv_file is not None:  # last: not every plan can have one
        _write_csv(csv_file, found.best.plan.to_csv())


@app.command()
def simulate(
    stages: Annotated[int, typer.Option(help="Stages S.")],
    micro_batches: Annotated[int, typer.Option(help="Micro-batches M.")],
    chunks: Annotated[
        int | None, typer.Option(help="Chunks a stage, V; default: 1, and for auto the best of 1 to 4.")
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(help="See `pipeloom schedules`; or auto, a search; or a CSV file as --csv writes it."),
    ] = "1F1B",
    split_backward: Annotated[bool | None, typer.Option(help="Run backwards as two jobs.")] = None,
    costs: Annotated[
        str | None, typer.Option(help="F,B,W of a stage, in any unit; a chunk costs its share of them.")
    ] = None,
    costs_file: Annotated[
        Path | None,
        typer.Option(
            help="Or of each chunk: JSON with forward, backward_b and backward_w, a number a chunk."
        ),
    ] = None,
    comm: Annotated[float, typer.Option(help="Of a message between stages, in the same unit.")] = 0.0,
    memory: Annotated[
        str | None,
        typer.Option(help="Limit of a stage: 1x is what 1F1B needs, 6 is six micro-batches; for auto 1x."),
    ] = None,
    budget: Annotated[str, typer.Option(help="Of auto's search, like 30s.")] = "10s",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write jobs and figures there; - for standard output.")
    ] = None,
    timeline: Annotated[Path | None, typer.Option(help="Write the step as an HTML page there.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev there.")] = None,
    beside: Annotated[
        str | None,
        typer.Option(help="Another schedule, for the same costs, below it in the page and the trace."),
    ] = None,
    csv_file: Annotated[
        Path | None,
        typer.Option("--csv", help="Write the plan there for torch.distributed.pipelining (compute_comms)."),
    ] = None,
) -> None:
    """What a schedule would cost: its makespan, bubbles and memory, and the least that is possible.

    Memory is in units of one micro-batch's activations of one stage.
    """
    from .planning import trial as trials

    if costs is not None and costs_file is not None:
        raise ValueError("--costs and --costs-file both say what jobs cost: give one of them")
    if costs_file is not None:
        numbers = trials.numbers_of(costs_file, stages, comm)
    else:
        numbers = trials.numbers(costs or "1,1,1", comm)
    if beside is not None and timeline is None and trace is None:
        raise ValueError("--beside draws a second schedule: give --timeline or --trace, where to draw it")
    tried = trials.trial(
        schedule,
        numbers,
        stages,
        micro_batches,
        chunks=chunks,
        split_backward=split_backward,
        memory=memory,
        budget=budget,
    )
    others = []
    if beside is not None:
        name, _, number = beside.partition(":")
        if number and not number.isdecimal():
            raise ValueError(f"--beside {beside}: write a schedule's name and its chunks a stage, like ZBV:2")
        turns = int(number) if number else None
        others.append(
            trials.trial(name, numbers, stages, micro_batches, chunks=turns, memory=memory, budget=budget)
        )
    made, result, bound = tried.schedule, tried.simulation, tried.bound
    if csv_file is not None:
        lowered = planning.lower(made, schedules.chain_edges(made.total_chunks), result.costs)
        _write_csv(csv_file, to_csv(lowered))
    if timeline is not None or trace is not None:
        drawn = [t.simulation.timeline(f"predicted {t.schedule.name}") for t in (tried, *others)]
        _write_pictures(drawn, timeline, trace)
    if json_file is not None and _write_json(json_file, planning.simulation_json(made, result, bound)):
        return
    typer.echo(schedules.draw(made, columns=28))
    above = f"{result.makespan / bound - 1:.1%} above the bound {bound:.6g}" if bound else "no work"
    typer.echo(f"\nmakespan       {result.makespan:.6g} ({above})")
    typer.echo(f"bubble, global {result.bubble_global:.2%} of stages × makespan")
    typer.echo(f"bubble, span   {result.bubble_span:.2%} of stages × the longest span of a stage")
    typer.echo(f"peak a stage   {' '.join(f'{peak:.4g}' for peak in result.peak)}")
    for name, text in tried.notes:
        typer.echo(f"{name:<15}{text}")


@app.command()
def generate(
    model: Annotated[
        str, typer.Option(help="A run folder of `pipeloom train`, a folder of transformers, or smollm2.")
    ],
    prompt: Annotated[list[str] | None, typer.Option(help="A text to go on from; may be repeated.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A file of them: one a line, or JSON lines with limits of their own.")
    ] = None,
    stages: Annotated[int, typer.Option(help="Stages, one rank each.", rich_help_panel=_SHAPE)] = 1,
    batch: Annotated[
        int, typer.Option(help="Prompts that go together as one batch.", rich_help_panel=_SHAPE)
    ] = 1,
    in_flight: Annotated[
        int | None, typer.Option(help="Batches under way; default: two a stage.", rich_help_panel=_SHAPE)
    ] = None,
    refill: Annotated[
        str, typer.Option(help="continuous, or batch: wait for all in flight.", rich_help_panel=_SHAPE)
    ] = "continuous",
    max_new_tokens: Annotated[int, typer.Option(help="Of each prompt.", rich_help_panel=_TEXT)] = 64,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token.", rich_help_panel=_TEXT)] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw among so many.", rich_help_panel=_TEXT)] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw among those of this probability.", rich_help_panel=_TEXT)
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: repeat less.", rich_help_panel=_TEXT)
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of the draws; prompt i takes seed + i.", rich_help_panel=_TEXT)
    ] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="A text that ends it; may be repeated.", rich_help_panel=_TEXT)
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is what a user says.", rich_help_panel=_TEXT)
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON a prompt.")] = False,
) -> None:
    """Go on from prompts with a model that is spread over ranks of this machine.

    Text goes to standard output as it comes, figures to standard error. Ctrl-C ends all texts where they are.
    """
    from .prompting.launch import launch
    from .prompting.order import Order, read_prompts

    given = [{"prompt": text} for text in prompt or []]
    if prompts is not None:
        given += read_prompts(prompts)
    limits = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": stop,
    }
    order = Order(
        model=model,
        prompts=tuple(given),
        limits={name: value for name, value in limits.items() if value is not None},
        stages=stages,
        batch=batch,
        in_flight=in_flight,
        refill=refill,
        chat=chat,
        json=as_json,
    )
    raise typer.Exit(launch(order))


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="smollm2: SmolLM2-135M-Instruct, about 100 MB.")]) -> None:
    """Get a model to try `pipeloom generate` with, once; it is kept in the user's cache."""
    from .generation.smollm2 import fetch as fetch_smollm2
    from .prompting.order import SMOLLM2

    if name != SMOLLM2:
        raise ValueError(f"there is no model {name!r} to fetch; there is {SMOLLM2}")
    fetch_smollm2(typer.echo)


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


def _write_json(path: Path, data: dict[str, Any]) -> bool:
    """Writes a JSON file; True where it is standard output, which nothing else may be printed to."""
    text = json.dumps(data) + "\n"
    if str(path) == "-":
        typer.echo(text, nl=False)
        return True
    with _writing("--json", path):
        path.write_text(text, encoding="utf-8")
    return False


def _write_csv(path: Path, text: str) -> None:
    with _writing("--csv", path):
        path.write_text(text, encoding="utf-8")


def _write_pictures(timelines: Sequence[Timeline], page: Path | None, trace: Path | None) -> None:
    from .report.timeline import write_timeline
    from .report.trace import write_trace

    if page is not None:
        with _writing("--timeline", page):
            write_timeline(page, timelines, title=", ".join(t.title for t in timelines))
    if trace is not None:
        with _writing("--trace", trace):
            write_trace(trace, timelines)


@contextlib.contextmanager
def _writing(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option} {path}: can't be written ({error.strerror})") from None


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


if __name__ == "__main__":
    main()
