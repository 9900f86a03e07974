"""Tokens per second of a model that is spread over two ranks, beside what the same two cores give without a pipeline.

    python bench/generation.py                             SmolLM2-135M (`pipeloom fetch smollm2`), 8 × 64 tokens
    python bench/generation.py --model FOLDER              another causal language model of transformers
    python bench/generation.py --model random --tokens 8 --rounds 2      a small one with random weights: a quick look
    python bench/generation.py --write bench/RESULTS.md    adds the results to that file, with date and command

Contenders, float32, the likeliest token each time, no token ends a text, so that all make the same tokens (which is
checked before the clock runs):

    transformers           `model.generate`, prompt after prompt: one process with one thread; one with two; two
                           independent processes with one thread and half of the prompts each
    ours, without cuts     the same three, with our step graphs (S 1), prompt after prompt
    ours, two ranks        one thread each, Gloo over loopback, 1, 2, 4, … prompts in flight

They take turns within each round; a round's time is from one barrier of both processes to the next.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from against_torch import append
from pipeloom import Strategy
from pipeloom.generation import Generator, LocalGenerator, compile, compile_local
from start import both_ranks
from tables import markdown, ratio

#: what the prompts are made of: text, where there is a tokenizer
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "Water boils at",
    "def fibonacci(n):",
    "The three most important things to know about pipelines are",
    "Dear Sir or Madam,",
    "In 1969, people first",
    "List five animals that live in the desert and say how each of them keeps cool:",
)
ONE, TWO_THREADS, APART = "one process, one thread", "one process, two threads", "two independent processes"
RANDOM = "random"


def measure(
    model: str, prompts: int, tokens: int, in_flight: Sequence[int], rounds: int, warm_up: int
) -> dict[str, Any]:
    """One rank of the benchmark: seconds[contender][round], and what each rank of ours held."""
    rank = dist.get_rank()
    plain, ids = build(model, prompts)
    alone = compile_local(plain)
    gen = compile(plain, strategy=Strategy(pp_degree=2))
    contenders = contenders_of(plain, ids, tokens, rank, alone, gen, in_flight)
    check(plain, ids, tokens, gen)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for number in range(warm_up + rounds):
        for name in order:
            dist.barrier()
            began = perf_counter()
            contenders[name]()
            dist.barrier()
            if number >= warm_up:
                seconds[name].append(perf_counter() - began)
        order = order[1:] + order[:1]
    held = []
    for count in in_flight:
        stream = gen.stream(ids, max_new_tokens=tokens, ends=(), in_flight=count)
        for _ in stream:
            pass
        held.append([[r.weight_bytes, r.cache_bytes, r.busy / r.seconds] for r in stream.figures.ranks])
    gen.close()
    return {"seconds": seconds, "held": held, "lengths": [len(i) for i in ids]}


def build(model: str, prompts: int) -> tuple[Any, list[list[int]]]:
    """The model, and the ids of the prompts."""
    import transformers

    from pipeloom.generation.smollm2 import fetched

    if model == RANDOM:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
        )
        made = transformers.LlamaForCausalLM(config).eval()
        return made, [[(7 * i + j) % 256 for j in range(3 + i % 5)] for i in range(prompts)]
    folder = fetched() if model == "smollm2" else Path(model)
    made = transformers.AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return made.eval(), [tokenizer(TEXTS[i % len(TEXTS)])["input_ids"] for i in range(prompts)]


def by_transformers(model: Any, ids: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    found = []
    for prompt in ids:
        given = torch.tensor([prompt])
        made = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(made[0, len(prompt) :].tolist())
    return found


def contenders_of(
    model: Any,
    ids: list[list[int]],
    tokens: int,
    rank: int,
    alone: LocalGenerator,
    gen: Generator,
    in_flight: Sequence[int],
) -> dict[str, Callable[[], None]]:
    """By name, what this rank does in each."""

    def transformers(some: list[list[int]]) -> None:
        by_transformers(model, some, tokens)

    def ours(some: list[list[int]]) -> None:
        alone.generate(some, max_new_tokens=tokens, ends=(), in_flight=1)

    def first_rank(run: Callable[[list[list[int]]], None], threads: int) -> Callable[[], None]:
        def work() -> None:
            if rank == 0:
                torch.set_num_threads(threads)
                run(ids)
                torch.set_num_threads(1)

        return work

    def flying(count: int) -> Callable[[], None]:
        def work() -> None:
            gen.generate(ids, max_new_tokens=tokens, ends=(), in_flight=count)

        return work

    def half(run: Callable[[list[list[int]]], None]) -> Callable[[], None]:
        return lambda: run(ids[rank::2])

    found: dict[str, Callable[[], None]] = {}
    for name, run in (("transformers", transformers), ("ours, without cuts", ours)):
        found[f"{name}: {ONE}"] = first_rank(run, 1)
        found[f"{name}: {TWO_THREADS}"] = first_rank(run, 2)
        found[f"{name}: {APART}"] = half(run)
    for count in in_flight:
        found[f"ours, two ranks: {count} in flight"] = flying(count)
    return found


def check(model: Any, ids: list[list[int]], tokens: int, gen: Generator) -> None:
    """Raises ValueError unless ours are transformers' tokens."""
    wanted = by_transformers(model, ids, tokens)
    found = [list(r.tokens) for r in gen.generate(ids, max_new_tokens=tokens, ends=())]
    if found != wanted:
        wrong = next(i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
        raise ValueError(f"prompt {wrong}: {found[wrong]} where transformers has {wanted[wrong]}")


def table(found: dict[str, Any], tokens: int, prompts: int) -> str:
    """Markdown: a row a contender. Speeds: tokens a second by the median round."""
    seconds = found["seconds"]
    rows = [
        [
            "contender",
            "tokens/s",
            "slowest",
            "fastest",
            "× one process (10–90% of rounds)",
            "÷ two independent ones",
            "÷ ours, two independent ones",
        ]
    ]
    one, apart = seconds[f"transformers: {ONE}"], seconds[f"transformers: {APART}"]
    ours = seconds[f"ours, without cuts: {APART}"]
    for name, times in seconds.items():
        speeds = [tokens * prompts / t for t in (statistics.median(times), max(times), min(times))]
        rows.append(
            [name, *(f"{s:.1f}" for s in speeds), ratio(one, times), ratio(apart, times), ratio(ours, times)]
        )
    return markdown(rows)


def memory(found: dict[str, Any], in_flight: Sequence[int]) -> str:
    """Markdown: what each rank held."""
    rows = [["in flight", "weights MB, rank 0 / 1", "caches at most MB", "busy"]]
    for count, ranks in zip(in_flight, found["held"], strict=True):
        weights, caches, busy = zip(*ranks, strict=True)
        rows.append(
            [
                str(count),
                " / ".join(f"{w / 1e6:.1f}" for w in weights),
                " / ".join(f"{c / 1e6:.2f}" for c in caches),
                " / ".join(f"{b:.0%}" for b in busy),
            ]
        )
    return markdown(rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="smollm2", help=f"smollm2, a folder, or {RANDOM}")
    add("--prompts", type=int, default=8)
    add("--tokens", type=int, default=64, help="new ones of each prompt")
    add("--in-flight", default="1,2,4,8")
    add("--rounds", type=int, default=7, help="timed rounds")
    add("--warm-up", type=int, default=1, help="rounds before them")
    add("--write", type=Path, metavar="FILE", help="add the results to this file")
    add("--timeout", type=float, default=3600.0, help="seconds that both processes may take")
    options = parser.parse_args(arguments)
    flying = [int(n) for n in options.in_flight.split(",")]
    work = (options.model, options.prompts, options.tokens, flying, options.rounds, options.warm_up)
    found = both_ranks(measure, *work, timeout=options.timeout)[0]
    report = "\n\n".join(
        [
            f"Generation: {options.model}, {options.prompts} prompts of {min(found['lengths'])} to "
            f"{max(found['lengths'])} tokens, {options.tokens} new ones each, float32; {options.rounds} rounds. "
            f"{os.cpu_count()} cores ({platform.machine()}); torch {torch.__version__}, transformers "
            f"{version('transformers')}, pipeloom {version('pipeloom')}, Python {platform.python_version()}.",
            table(found, options.tokens, options.prompts),
            memory(found, flying),
        ]
    )
    print(report, flush=True)
    if options.write is not None:
        append(options.write, report, arguments if arguments is not None else sys.argv[1:], "generation.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
