"""A placement or a schedule of the user's own in a Strategy: read, checked against the other fields, kept.

Takes lists of jobs, a function, a Schedule, or a CSV file of torch.distributed.pipelining (planning.explicit and
planning.exchange read them); gives the Strategy its `_listed` schedule and where its chunks lie, `_placed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..planning.exchange import read_csv
from ..planning.explicit import own_schedule
from ..schedules import Schedule, build, linear, loop, vee
from .values import StrategyError, count_chunks, is_int, set_field

if TYPE_CHECKING:
    from .strategy import Strategy


def check_placement(strategy: Strategy) -> None:
    check_given_placement(strategy)
    check_own(strategy)


def check_own(strategy: Strategy) -> None:
    """A schedule of the user's own: read, if it is a list or a file, and told the number of micro-batches by."""
    if not strategy.has_own_schedule:
        return
    mode, name = strategy.schedule_mode, "schedule_mode"
    if strategy.schedule_file is not None:
        name = f"schedule_file {strategy.schedule_file}"
        mode = read_schedule(strategy.schedule_file)
    elif callable(mode) and not isinstance(mode, Schedule):
        return
    try:
        listed = own_schedule(mode, name, strategy.pp_degree, strategy.chunks, strategy._placed)
    except ValueError as error:
        raise StrategyError(str(error)) from None
    if strategy.schedule_file is None:
        set_field(strategy, "schedule_mode", tuple(tuple(map(str, jobs)) for jobs in listed.jobs))
    if not isinstance(mode, Schedule) or strategy.schedule_file is not None:
        listed = Schedule(strategy.schedule_name, listed.placement, listed.micro_batches, listed.codes)
    set_field(strategy, "_placed", listed.placement)
    set_field(strategy, "_listed", listed)
    if strategy.accumulate_steps is None and strategy.micro_batch_size is None:
        set_field(strategy, "accumulate_steps", listed.micro_batches)
    if strategy.accumulate_steps not in (None, listed.micro_batches):
        raise StrategyError(
            f"{name} is a schedule for {listed.micro_batches} micro-batches, but accumulate_steps is "
            f"{strategy.accumulate_steps}: set accumulate_steps={listed.micro_batches}, or give a schedule for "
            f"{strategy.accumulate_steps}"
        )


def check_given_placement(strategy: Strategy) -> None:
    placement = strategy.placement
    if placement is None:
        return
    stages, turns = strategy.pp_degree, strategy.vpp_degree
    own = strategy.has_own_schedule
    expected: list[int] = []
    if not own:
        name = strategy.named_schedule
        assert name is not None
        expected = list(build(name, stages=stages, chunks=turns, micro_batches=1).placement)
    if isinstance(placement, str):
        name = placement.lower()
        if name not in ("linear", "loop", "v"):
            raise StrategyError(
                f'placement={placement!r}: write "linear", "loop", "v", a list of stages, or None'
            )
        if name == "linear" and strategy.vpp_degree > 1:
            raise StrategyError(
                f'placement "linear" has one chunk a stage, but vpp_degree is {strategy.vpp_degree}: use '
                '"loop" or "v"'
            )
        if name == "v" and turns != 2 and not own:
            raise StrategyError(
                f'placement "v" has 2 chunks a stage, but vpp_degree is {turns}: set vpp_degree=2'
            )
        named = {"linear": linear(stages), "loop": loop(stages, turns), "v": vee(stages, turns)}
        given = named[name]
        set_field(strategy, "placement", name)
    else:
        if not isinstance(placement, (list, tuple)) or not all(is_int(stage) for stage in placement):
            raise StrategyError(
                f'placement={placement!r}: write "linear", "loop", "v", a list of stages, or None'
            )
        if len(placement) != strategy.chunks:
            raise StrategyError(
                f"placement lists {len(placement)} stages, but pp_degree {strategy.pp_degree} × vpp_degree "
                f"{strategy.vpp_degree} "
                f"make {count_chunks(strategy.chunks)}: give a stage for each"
            )
        wrong = next((stage for stage in placement if not 0 <= stage < strategy.pp_degree), None)
        if wrong is not None:
            raise StrategyError(
                f"placement names stage {wrong}, but the stages are 0 to {strategy.pp_degree - 1}"
            )
        given = list(placement)
        set_field(strategy, "placement", tuple(placement))
    if own:
        if unused := sorted(set(range(stages)) - set(given)):
            raise StrategyError(
                f"placement={strategy.placement!r} leaves stage {unused[0]} without a chunk: use each of the {stages} "
                "stages, or lower pp_degree"
            )
        set_field(strategy, "_placed", tuple(given))
    elif given != expected:
        raise StrategyError(
            f"placement={strategy.placement!r} contradicts schedule_mode {strategy.schedule_mode}, whose "
            f"chunks lie on stages {expected}: "
            "leave placement None, or choose the schedule that goes with it"
        )


def is_own(mode: object) -> bool:
    """Whether it has the form of a schedule of the user's own."""
    return isinstance(mode, list | tuple | Schedule) or callable(mode)


def read_schedule(path: str) -> Schedule:
    try:
        return read_csv(path)
    except ValueError as error:
        raise StrategyError(f"schedule_file {error}") from None
