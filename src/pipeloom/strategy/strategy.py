"""Strategy: every option of a pipeline, its default and its check.

Why it exists: an option that is silently ignored, or one that two rooms read in two ways, costs a night of
training. So all options live in one frozen dataclass that is checked as it is made, whether it comes from
keyword arguments or from a TOML file, and that refuses what isn't built yet.

    Strategy(pp_degree=4, vpp_degree=2, schedule_mode="ZBV", accumulate_steps=8)
    Strategy.from_toml("run.toml")          # its [strategy] table
    strategy.micro_batches(10)              # the sizes of the micro-batches of a batch of 10

The names of the fields follow Paddle's DistributedStrategy where it has them; schedule names follow Paddle's,
and those of torch.distributed.pipelining are aliases.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar, Literal

from ..planning.explicit import Own, first_micro_batches, own_schedule
from ..schedules import Schedule
from ..schedules.catalogue import CATALOGUE
from .checks import check_batch, check_cuts, check_numerics, check_running, check_shape
from .own import check_placement
from .values import AUTO, FILE, StrategyError


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Every option of a pipeline. Raises StrategyError for a bad value, combination or name.

    Shape of the pipeline
        pp_degree: stages S, ranks of the "pp" dimension. vpp_degree: chunks a stage V.
        schedule_mode: a name of `pipeloom schedules` or torch's name for it; or "auto": the planner searches for
        placement, chunks a stage, cuts and order, for search_seconds, within memory_limit (left out: what 1F1B
        needs), and runs the best that it finds. Or a schedule of the user's own: one list of jobs a stage, like
        [["F0.0", "X0.0"], ["F1.0", "X1.0"]], or a function of (stages, chunks a stage, micro-batches) that gives
        such lists or a schedules.Schedule. Any order that is safe will do.
        schedule_file: a file with such a schedule, as torch.distributed.pipelining writes it (CSV).
        split_backward: run the backward as B and W; implied by ZBH1 and ZBV.
        cuts: where chunks begin: None (balanced by cost), a list of S·V−1 module names, a regular expression that
        matches them in full, or layers a chunk like "6-6-9-3" (of the model's longest list of blocks).
        placement: None (the schedule's own), "linear", "loop", "v" or a list of stages; of a schedule of the user's
        own, any list that uses each stage.
        memory_limit: bytes a rank: None, an int, or text like "16GiB" or "500MB"; kept as an int.
        costs: "measured" (jobs are timed before planning) or "roofline" (modelled).
        passes: names of registered passes of the user's own, run after the built-in ones.
    The batch
        accumulate_steps: micro-batches M; micro_batch_size: samples in one. See `micro_batches`.
        gradient_merge: "average" (over all samples) or "sum". max_norm: clip the global gradient norm.
    Numerics
        autocast: None, "bfloat16" or "float16" (a torch.dtype is taken by its name). loss_scale: None, a
        factor or "dynamic". seed: keys every random draw.
        recompute: whose activations are computed again in the backward, not kept: a regular expression that matches
        names of modules in full, a list of such names, a list of chunks by number, "all" chunks, or "none". Of a chunk
        that is computed again only its inputs are kept. "auto": where the plan of a named schedule doesn't fit
        memory_limit, on each stage the chunks of least compute that make it fit; of schedule_mode "auto", where a plan
        that computes chunks again is faster than all that fit without, or alone fits. None is "auto" for schedule_mode
        "auto" and "none" for the others. Regions of torch.utils.checkpoint in the model are honoured as well.
    Running
        enable_send_recv_overlap: False waits for each send. compile_backend: "eager".
        executor: "list" walks the planned order; "fleet" (1F1B, FThenB, ZBH1) runs each job as soon as its inputs are
        there and its outputs have room, with the same losses and gradients.
        profile: (first step, last step) whose timelines are kept, counted from 0, both included.
    """

    pp_degree: int = 1
    vpp_degree: int = 1
    schedule_mode: str | Own = "1F1B"
    schedule_file: str | None = None
    accumulate_steps: int | None = None
    micro_batch_size: int | None = None
    split_backward: bool = False
    cuts: str | Sequence[str] | None = None
    placement: str | Sequence[int] | None = None
    enable_send_recv_overlap: bool = True
    memory_limit: int | str | None = None
    gradient_merge: Literal["average", "sum"] = "average"
    max_norm: float | None = None
    autocast: str | Any | None = None
    loss_scale: float | Literal["dynamic"] | None = None
    recompute: str | Sequence[str] | Sequence[int] | None = None
    executor: str = "list"
    compile_backend: str = "eager"
    profile: tuple[int, int] | None = None
    seed: int = 0
    passes: Sequence[str] = ()
    costs: Literal["measured", "roofline"] = "measured"
    search_seconds: float = 10.0

    #: made by __post_init__, of a schedule of the user's own: the lists that were given, and where its chunks lie
    _listed: ClassVar[Schedule | None] = None
    _placed: ClassVar[tuple[int, ...] | None] = None

    def __new__(cls, *args: Any, **fields: Any) -> Strategy:
        # Before the generated __init__ sees them: a misspelt field gets a hint, not a bare TypeError.
        if args:
            raise StrategyError(
                f"Strategy takes keyword arguments only, like pp_degree=2 (got {args[0]!r} without a name)"
            )
        cls._check_names(fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_shape(self)
        check_cuts(self)
        check_placement(self)
        check_batch(self)
        check_numerics(self)
        check_running(self)

    # ---- what others ask of a Strategy

    @property
    def schedule_name(self) -> str:
        """A short text for schedule_mode; of the user's own, "own", the function's name or the file's."""
        if self.schedule_file is not None:
            return re.split(r"[/\\\\]", self.schedule_file)[-1]
        if isinstance(self.schedule_mode, str):
            return self.schedule_mode
        if callable(self.schedule_mode):
            return str(getattr(self.schedule_mode, "__name__", type(self.schedule_mode).__name__))
        return "own"

    @property
    def named_schedule(self) -> str | None:
        """The catalogue's name; None for "auto" and for a schedule of the user's own."""
        mode = self.schedule_mode
        return mode if isinstance(mode, str) and mode not in (AUTO, FILE) else None

    @property
    def has_own_schedule(self) -> bool:
        return self.named_schedule is None and self.schedule_mode != AUTO

    def own_schedule(self, micro_batches: int) -> Schedule:
        """The user's own schedule for M micro-batches; of a list for more, the first M. Raises ValueError where it
        isn't a schedule for this many stages, chunks and micro-batches."""
        assert self.has_own_schedule
        if self._listed is not None:
            return first_micro_batches(self._listed, micro_batches)
        assert callable(self.schedule_mode)
        made = self.schedule_mode(self.pp_degree, self.vpp_degree, micro_batches)
        name = f"schedule_mode {self.schedule_name}"
        schedule = own_schedule(made, name, self.pp_degree, self.chunks, self._placed)
        if schedule.micro_batches != micro_batches:
            raise ValueError(
                f"{name}({self.pp_degree}, {self.vpp_degree}, {micro_batches}) gave a schedule for "
                f"{schedule.micro_batches} micro-batches: it must have the jobs of micro-batches 0 to "
                f"{micro_batches - 1}"
            )
        return schedule

    @property
    def own_placement(self) -> tuple[int, ...]:
        """Where the chunks of a schedule of the user's own lie."""
        if self._placed is not None:
            return self._placed
        return self.own_schedule(self.accumulate_steps or 1).placement

    @property
    def chunks(self) -> int:
        """Chunks of the whole model, S·V."""
        return self.pp_degree * self.vpp_degree

    @property
    def chooses_recompute(self) -> bool:
        """Whether the planner says which chunks are computed again."""
        wanted = self.recompute
        return self.memory_limit is not None and (
            wanted == AUTO or (wanted is None and self.schedule_mode == AUTO)
        )

    @property
    def memory_bytes(self) -> int | None:
        """memory_limit as a number of bytes, or None."""
        assert not isinstance(self.memory_limit, str)
        return self.memory_limit

    def micro_batches(self, batch_size: int) -> list[int]:
        """Sizes of the micro-batches of a batch of `batch_size` samples, in order; they sum to `batch_size`.

        Neither accumulate_steps nor micro_batch_size given: one micro-batch. accumulate_steps M: M sizes that
        differ by at most one, the larger first, as torch.tensor_split (10 in 4: 3, 3, 2, 2); a batch of fewer
        samples than M makes that many micro-batches of one. micro_batch_size: as many as it takes, the last
        one smaller. Raises StrategyError for an empty batch, and where both are given and disagree with it.
        """
        if batch_size < 1:
            raise StrategyError(
                f"the batch has {batch_size} samples: a step needs at least one; skip empty batches"
            )
        steps, size = self.accumulate_steps, self.micro_batch_size
        if steps is not None and size is not None:
            if steps * size != batch_size:
                raise StrategyError(
                    f"micro_batch_size {size} × accumulate_steps {steps} = {size * steps} samples, but the "
                    "batch has "
                    f"{batch_size}: give a batch of {size * steps}, or only one of the two fields"
                )
            return [size] * steps
        if size is not None:
            full, rest = divmod(batch_size, size)
            return [size] * full + ([rest] if rest else [])
        count = min(steps or 1, batch_size)
        small, larger = divmod(batch_size, count)
        return [small + 1] * larger + [small] * (count - larger)

    # ---- in and out

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "") -> Strategy:
        """A Strategy from plain values (as JSON or TOML have them). `where` is put before each message."""
        try:
            cls._check_names(values)
            return cls(**values)
        except StrategyError as error:
            raise StrategyError(f"{where}: {error}" if where else str(error)) from None

    @classmethod
    def from_toml(cls, path: str | PathLike[str]) -> Strategy:
        """The [strategy] table of a TOML file; other tables are left alone. Messages name the file."""
        try:
            with open(path, "rb") as file:
                tables = tomllib.load(file)
        except OSError as error:
            raise StrategyError(f"{path}: can't be read ({error.strerror}); check the path") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise StrategyError(f"{path}: not valid TOML: {error}") from None
        table = tables.get("strategy")
        if not isinstance(table, dict):
            raise StrategyError(f"{path}: has no [strategy] table; add one, it may be empty")
        return cls.from_dict(table, where=f"{path} [strategy]")

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` takes back, JSON and TOML alike (None where TOML leaves a field out).
        A function for a schedule is written by its qualified name, which can't be read back."""
        mode = self.schedule_mode
        values = self._values()
        if callable(mode):
            values["schedule_mode"] = _qualified(mode)
        return {name: _plain(value) for name, value in values.items()}

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def replace(self, **changes: Any) -> Strategy:
        """A copy with some fields changed, checked anew."""
        values = self._values()
        if "schedule_mode" in changes or "schedule_file" in changes:
            name = self.named_schedule
            if name is None or CATALOGUE[name].splits:
                values["split_backward"] = False  # it was the old schedule's, not the user's
            if "schedule_mode" in changes:
                values["schedule_file"] = None
            else:
                values["schedule_mode"] = FILE
        return type(self).from_dict({**values, **changes})

    @classmethod
    def _check_names(cls, names: Iterable[str]) -> None:
        known = [field.name for field in dataclasses.fields(cls)]
        for name in names:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, 1, 0.5)
                hint = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(known)}"
                raise StrategyError(f"Strategy has no field {name!r}: {hint}")


def _qualified(function: Callable[..., Any]) -> str:
    """ "module:name", whose colon tells it from the names of schedules."""
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}:{owner.__qualname__}"


def _plain(value: Any) -> Any:
    return [_plain(part) for part in value] if isinstance(value, tuple) else value
