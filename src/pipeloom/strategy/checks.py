"""Checks of a Strategy's options, a function for each group of fields; called as one is made.

Each raises StrategyError with the field, its value, what is allowed and what to do; some put a field's plain form in
its place (a list becomes a tuple, "16GiB" a number). Schedules of the user's own and placements are in own.py.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from ..schedules import canonical_name
from ..schedules.catalogue import CATALOGUE
from .own import is_own
from .values import (
    AUTO,
    FILE,
    FLEET_SCHEDULES,
    StrategyError,
    check_choice,
    check_flag,
    check_whole,
    count_chunks,
    is_int,
    is_number,
    parse_bytes,
    set_field,
)

if TYPE_CHECKING:
    from .strategy import Strategy


def check_shape(strategy: Strategy) -> None:
    check_whole(strategy, "pp_degree", 1, "stages, so ranks of one pipeline")
    check_whole(strategy, "vpp_degree", 1, "chunks a stage")
    check_flag(strategy, "split_backward")
    set_field(strategy, "_listed", None)
    set_field(strategy, "_placed", None)
    if strategy.schedule_file is not None:
        if strategy.schedule_mode not in ("1F1B", FILE):  # the default, or written by to_dict
            raise StrategyError(
                f"schedule_file {strategy.schedule_file} was given beside schedule_mode={strategy.schedule_mode!r}: "
                "leave one of them out"
            )
        set_field(strategy, "schedule_mode", FILE)
    if strategy.schedule_file is not None or is_own(strategy.schedule_mode):
        set_field(strategy, "split_backward", True)  # it may have any of B, W and X
        return  # the rest of it is checked with its placement
    mode = schedule_of(strategy.schedule_mode)
    set_field(strategy, "schedule_mode", mode)
    check_search(strategy, mode)
    if mode == AUTO:
        set_field(strategy, "split_backward", True)
        return
    wanted = CATALOGUE[mode].chunks
    if wanted is not None and strategy.vpp_degree != wanted:
        others = [name for name, entry in CATALOGUE.items() if entry.chunks in (None, strategy.vpp_degree)]
        raise StrategyError(
            f"schedule_mode {mode} runs {count_chunks(wanted)} a stage, but vpp_degree is "
            f"{strategy.vpp_degree}: set "
            f"vpp_degree={wanted}, or a schedule for {count_chunks(strategy.vpp_degree)} a stage: "
            f"{', '.join(others)}"
        )
    if CATALOGUE[mode].splits:
        set_field(strategy, "split_backward", True)


def check_search(strategy: Strategy, mode: str) -> None:
    seconds = strategy.search_seconds
    if not (is_number(seconds) and 0 < seconds < math.inf):
        raise StrategyError(f"search_seconds={seconds!r}: write a number of seconds above 0")
    if mode != AUTO:
        return
    for name, default in (("vpp_degree", 1), ("cuts", None), ("placement", None)):
        value = getattr(strategy, name)
        if value != default:
            raise StrategyError(
                f'schedule_mode "auto" chooses {name} itself, but {name}={value!r} was given: leave it out, '
                "or name a schedule"
            )


def check_cuts(strategy: Strategy) -> None:
    cuts = strategy.cuts
    if cuts is None:
        return
    if isinstance(cuts, str):
        if not cuts:
            raise StrategyError("cuts is an empty text: leave it None to have the model cut by cost")
        if re.fullmatch(r"\d+([-,|]\d+)*", cuts):
            counts = len(re.split(r"[-,|]", cuts))
            if counts != strategy.chunks:
                raise StrategyError(
                    f"cuts={cuts!r} gives {counts} counts of layers, but pp_degree {strategy.pp_degree} × "
                    f"vpp_degree {strategy.vpp_degree} = {count_chunks(strategy.chunks)}: write a count for each chunk"
                )
            return
        try:
            re.compile(cuts)
        except re.error as error:
            raise StrategyError(
                f"cuts={cuts!r} is not a regular expression ({error}): a text is matched in full "
                "against module names"
            ) from None
        return
    if not isinstance(cuts, (list, tuple)) or not all(isinstance(name, str) and name for name in cuts):
        raise StrategyError(
            f"cuts={cuts!r}: give module names in a list, one regular expression as text, or None to "
            "cut by cost"
        )
    twice = next((name for i, name in enumerate(cuts) if name in cuts[:i]), None)
    if twice is not None:
        raise StrategyError(f"cuts names {twice!r} twice: each chunk begins at a module of its own")
    if len(cuts) != strategy.chunks - 1:
        raise StrategyError(
            f"cuts has {len(cuts)} names, but pp_degree {strategy.pp_degree} × vpp_degree "
            f"{strategy.vpp_degree} = {count_chunks(strategy.chunks)} "
            f"need {strategy.chunks - 1}: one for each chunk after the first, which begins with the model"
        )
    set_field(strategy, "cuts", tuple(cuts))


def check_batch(strategy: Strategy) -> None:
    if strategy.accumulate_steps is not None:
        check_whole(strategy, "accumulate_steps", 1, "micro-batches of a step, or None")
    if strategy.micro_batch_size is not None:
        check_whole(strategy, "micro_batch_size", 1, "samples of a micro-batch, or None")
    check_choice(strategy, "gradient_merge", ("average", "sum"))
    set_field(strategy, "memory_limit", parse_bytes(strategy.memory_limit))
    if strategy.max_norm is not None and not (is_number(strategy.max_norm) and strategy.max_norm > 0):
        raise StrategyError(
            f"max_norm={strategy.max_norm!r}: write a norm above 0, or None to leave gradients unclipped"
        )


def check_numerics(strategy: Strategy) -> None:
    if strategy.autocast is not None:
        name = str(strategy.autocast).removeprefix("torch.")
        if name not in ("bfloat16", "float16"):
            raise StrategyError(
                f'autocast={strategy.autocast!r}: write "bfloat16" or "float16", or None for full precision'
            )
        set_field(strategy, "autocast", name)
    scale = strategy.loss_scale
    if scale is not None and scale != "dynamic" and not (is_number(scale) and 0 < scale < math.inf):
        raise StrategyError(
            f'loss_scale={scale!r}: write a factor above 0, "dynamic", or None for no scaling'
        )
    _check_recompute(strategy)
    if not is_int(strategy.seed) or not 0 <= strategy.seed < 2**63:
        raise StrategyError(f"seed={strategy.seed!r}: write a whole number from 0 to 2**63 − 1")


def _check_recompute(strategy: Strategy) -> None:
    wanted = strategy.recompute
    if wanted is None:
        return
    if isinstance(wanted, str):
        try:
            re.compile(wanted)
        except re.error as error:
            raise StrategyError(
                f"recompute={wanted!r} is not a regular expression ({error}): a text is matched in full against "
                'module names, or is "all"'
            ) from None
        if wanted:
            return
    elif isinstance(wanted, (list, tuple)) and wanted:
        if all(isinstance(name, str) and name for name in wanted):
            set_field(strategy, "recompute", tuple(wanted))
            return
        if all(is_int(chunk) and chunk >= 0 for chunk in wanted):
            if strategy.schedule_mode == AUTO:
                raise StrategyError(
                    f'recompute={wanted!r} names chunks by number, but schedule_mode "auto" chooses the chunks: name '
                    'modules, write "all", or leave it out to have them chosen too'
                )
            wrong = next((c for c in wanted if int(c) >= strategy.chunks), None)
            if wrong is not None:
                raise StrategyError(
                    f"recompute names chunk {wrong}, but pp_degree {strategy.pp_degree} × vpp_degree "
                    f"{strategy.vpp_degree} make {count_chunks(strategy.chunks)}: number them from 0"
                )
            set_field(strategy, "recompute", tuple(wanted))
            return
    raise StrategyError(
        f"recompute={wanted!r}: give module names in a list, one regular expression as text, numbers of chunks in a "
        'list, "all", "none" or "auto"'
    )


def check_executor(strategy: Strategy) -> None:
    check_choice(strategy, "executor", ("list", "fleet"))
    if strategy.executor == "list":
        return
    if strategy.named_schedule not in FLEET_SCHEDULES:
        raise StrategyError(
            f'executor "fleet" has no graph for schedule_mode {strategy.schedule_name!r}: choose '
            f'{", ".join(FLEET_SCHEDULES)} (one chunk a stage), or executor="list"'
        )
    if not strategy.enable_send_recv_overlap:
        raise StrategyError(
            'enable_send_recv_overlap=False was given beside executor "fleet", whose tasks never wait for a send: '
            'leave it True, or choose executor="list"'
        )
    if strategy.schedule_mode == "ZBH1" and strategy.memory_limit is not None:
        raise StrategyError(
            f'memory_limit={strategy.memory_limit!r}: the planned order of ZBH1 keeps it, but executor "fleet" may '
            'put off more W jobs than that order does: leave it None, choose 1F1B, or executor="list"'
        )


def check_running(strategy: Strategy) -> None:
    check_flag(strategy, "enable_send_recv_overlap")
    check_executor(strategy)
    check_choice(strategy, "compile_backend", ("eager",), {"inductor": "compiling sub-programs"})
    check_choice(strategy, "costs", ("measured", "roofline"))
    window = strategy.profile
    if window is not None:
        if (
            not isinstance(window, (list, tuple))
            or len(window) != 2
            or not all(is_int(step) for step in window)
        ):
            raise StrategyError(f"profile={window!r}: write (first step, last step), or None")
        if not 0 <= window[0] <= window[1]:
            raise StrategyError(
                f"profile={tuple(window)}: the first step is at least 0 and the last one not before it "
                "(both are included)"
            )
        set_field(strategy, "profile", tuple(window))
    names = strategy.passes
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name for name in names):
        raise StrategyError(f"passes={names!r}: give the names of registered passes in a list")
    if len(set(names)) != len(names):
        raise StrategyError(f"passes={list(names)!r} names a pass twice: a pass runs once")
    set_field(strategy, "passes", tuple(names))


def schedule_of(name: object) -> str:
    if isinstance(name, str) and name.lower() == AUTO:
        return AUTO
    if name == FILE:
        raise StrategyError('schedule_mode "file" goes with schedule_file: name the CSV file there')
    if isinstance(name, str) and ":" in name:
        raise StrategyError(
            f"schedule_mode {name!r} names a function, which can't be read from text: pass the function itself, or the "
            "lists of jobs that it makes"
        )
    try:
        return canonical_name(name)  # type: ignore[arg-type]
    except ValueError as error:
        raise StrategyError(f"schedule_mode: {error}") from None
