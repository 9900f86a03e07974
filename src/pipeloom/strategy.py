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
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar, Final, Literal

from .planning.exchange import schedule_from_csv
from .planning.explicit import Own, first_micro_batches, own_schedule
from .schedules import Schedule, build, canonical_name, linear, loop, vee
from .schedules.catalogue import CATALOGUE


class StrategyError(ValueError):
    """A bad option or a bad combination: says the field, its value, what is allowed and what to do."""


#: the planner chooses placement, chunks a stage, cuts and order
AUTO: Final = "auto"
#: the schedule stands in schedule_file
FILE: Final = "file"

_UNITS: Final[dict[str, int]] = {
    "B": 1,
    **{f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")},
    **{f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")},
}


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
        factor or "dynamic". seed: keys every random draw. recompute: None.
    Running
        enable_send_recv_overlap: False waits for each send. executor: "list". compile_backend: "eager".
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
    recompute: None = None
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
        self._check_shape()
        self._check_cuts()
        self._check_placement()
        self._check_batch()
        self._check_numerics()
        self._check_running()

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

    # ---- checks, a method for each group of fields

    @classmethod
    def _check_names(cls, names: Iterable[str]) -> None:
        known = [field.name for field in dataclasses.fields(cls)]
        for name in names:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, 1, 0.5)
                hint = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(known)}"
                raise StrategyError(f"Strategy has no field {name!r}: {hint}")

    def _check_shape(self) -> None:
        self._whole("pp_degree", 1, "stages, so ranks of one pipeline")
        self._whole("vpp_degree", 1, "chunks a stage")
        self._flag("split_backward")
        self._set("_listed", None)
        self._set("_placed", None)
        if self.schedule_file is not None:
            if self.schedule_mode not in ("1F1B", FILE):  # the default, or written by to_dict
                raise StrategyError(
                    f"schedule_file {self.schedule_file} was given beside schedule_mode={self.schedule_mode!r}: "
                    "leave one of them out"
                )
            self._set("schedule_mode", FILE)
        if self.schedule_file is not None or _is_own(self.schedule_mode):
            self._set("split_backward", True)  # it may have any of B, W and X
            return  # the rest of it is checked with its placement
        mode = _schedule(self.schedule_mode)
        self._set("schedule_mode", mode)
        self._check_search(mode)
        if mode == AUTO:
            self._set("split_backward", True)
            return
        wanted = CATALOGUE[mode].chunks
        if wanted is not None and self.vpp_degree != wanted:
            others = [name for name, entry in CATALOGUE.items() if entry.chunks in (None, self.vpp_degree)]
            raise StrategyError(
                f"schedule_mode {mode} runs {_chunks(wanted)} a stage, but vpp_degree is "
                f"{self.vpp_degree}: set "
                f"vpp_degree={wanted}, or a schedule for {_chunks(self.vpp_degree)} a stage: "
                f"{', '.join(others)}"
            )
        if CATALOGUE[mode].splits:
            self._set("split_backward", True)

    def _check_search(self, mode: str) -> None:
        seconds = self.search_seconds
        if not (_is_number(seconds) and 0 < seconds < math.inf):
            raise StrategyError(f"search_seconds={seconds!r}: write a number of seconds above 0")
        if mode != AUTO:
            return
        for name, default in (("vpp_degree", 1), ("cuts", None), ("placement", None)):
            value = getattr(self, name)
            if value != default:
                raise StrategyError(
                    f'schedule_mode "auto" chooses {name} itself, but {name}={value!r} was given: leave it out, '
                    "or name a schedule"
                )

    def _check_cuts(self) -> None:
        cuts = self.cuts
        if cuts is None:
            return
        if isinstance(cuts, str):
            if not cuts:
                raise StrategyError("cuts is an empty text: leave it None to have the model cut by cost")
            if re.fullmatch(r"\d+([-,|]\d+)*", cuts):
                counts = len(re.split(r"[-,|]", cuts))
                if counts != self.chunks:
                    raise StrategyError(
                        f"cuts={cuts!r} gives {counts} counts of layers, but pp_degree {self.pp_degree} × "
                        f"vpp_degree {self.vpp_degree} = {_chunks(self.chunks)}: write a count for each chunk"
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
        if len(cuts) != self.chunks - 1:
            raise StrategyError(
                f"cuts has {len(cuts)} names, but pp_degree {self.pp_degree} × vpp_degree "
                f"{self.vpp_degree} = {_chunks(self.chunks)} "
                f"need {self.chunks - 1}: one for each chunk after the first, which begins with the model"
            )
        self._set("cuts", tuple(cuts))

    def _check_own(self) -> None:
        """A schedule of the user's own: read, if it is a list or a file, and told the number of micro-batches by."""
        if not self.has_own_schedule:
            return
        mode, name = self.schedule_mode, "schedule_mode"
        if self.schedule_file is not None:
            name = f"schedule_file {self.schedule_file}"
            mode = _read_schedule(self.schedule_file)
        elif callable(mode) and not isinstance(mode, Schedule):
            return
        try:
            listed = own_schedule(mode, name, self.pp_degree, self.chunks, self._placed)
        except ValueError as error:
            raise StrategyError(str(error)) from None
        if self.schedule_file is None:
            self._set("schedule_mode", tuple(tuple(map(str, jobs)) for jobs in listed.jobs))
        if not isinstance(mode, Schedule) or self.schedule_file is not None:
            listed = Schedule(self.schedule_name, listed.placement, listed.micro_batches, listed.codes)
        self._set("_placed", listed.placement)
        self._set("_listed", listed)
        if self.accumulate_steps is None and self.micro_batch_size is None:
            self._set("accumulate_steps", listed.micro_batches)
        if self.accumulate_steps not in (None, listed.micro_batches):
            raise StrategyError(
                f"{name} is a schedule for {listed.micro_batches} micro-batches, but accumulate_steps is "
                f"{self.accumulate_steps}: set accumulate_steps={listed.micro_batches}, or give a schedule for "
                f"{self.accumulate_steps}"
            )

    def _check_placement(self) -> None:
        self._check_given_placement()
        self._check_own()

    def _check_given_placement(self) -> None:
        placement = self.placement
        if placement is None:
            return
        stages, turns = self.pp_degree, self.vpp_degree
        own = self.has_own_schedule
        expected: list[int] = []
        if not own:
            name = self.named_schedule
            assert name is not None
            expected = list(build(name, stages=stages, chunks=turns, micro_batches=1).placement)
        if isinstance(placement, str):
            name = placement.lower()
            if name not in ("linear", "loop", "v"):
                raise StrategyError(
                    f'placement={placement!r}: write "linear", "loop", "v", a list of stages, or None'
                )
            if name == "linear" and self.vpp_degree > 1:
                raise StrategyError(
                    f'placement "linear" has one chunk a stage, but vpp_degree is {self.vpp_degree}: use '
                    '"loop" or "v"'
                )
            if name == "v" and turns != 2 and not own:
                raise StrategyError(
                    f'placement "v" has 2 chunks a stage, but vpp_degree is {turns}: set vpp_degree=2'
                )
            named = {"linear": linear(stages), "loop": loop(stages, turns), "v": vee(stages, turns)}
            given = named[name]
            self._set("placement", name)
        else:
            if not isinstance(placement, (list, tuple)) or not all(_is_int(stage) for stage in placement):
                raise StrategyError(
                    f'placement={placement!r}: write "linear", "loop", "v", a list of stages, or None'
                )
            if len(placement) != self.chunks:
                raise StrategyError(
                    f"placement lists {len(placement)} stages, but pp_degree {self.pp_degree} × vpp_degree "
                    f"{self.vpp_degree} "
                    f"make {_chunks(self.chunks)}: give a stage for each"
                )
            wrong = next((stage for stage in placement if not 0 <= stage < self.pp_degree), None)
            if wrong is not None:
                raise StrategyError(
                    f"placement names stage {wrong}, but the stages are 0 to {self.pp_degree - 1}"
                )
            given = list(placement)
            self._set("placement", tuple(placement))
        if own:
            if unused := sorted(set(range(stages)) - set(given)):
                raise StrategyError(
                    f"placement={self.placement!r} leaves stage {unused[0]} without a chunk: use each of the {stages} "
                    "stages, or lower pp_degree"
                )
            self._set("_placed", tuple(given))
        elif given != expected:
            raise StrategyError(
                f"placement={self.placement!r} contradicts schedule_mode {self.schedule_mode}, whose "
                f"chunks lie on stages {expected}: "
                "leave placement None, or choose the schedule that goes with it"
            )

    def _check_batch(self) -> None:
        if self.accumulate_steps is not None:
            self._whole("accumulate_steps", 1, "micro-batches of a step, or None")
        if self.micro_batch_size is not None:
            self._whole("micro_batch_size", 1, "samples of a micro-batch, or None")
        self._choice("gradient_merge", ("average", "sum"))
        self._set("memory_limit", _bytes(self.memory_limit))
        if self.max_norm is not None and not (_is_number(self.max_norm) and self.max_norm > 0):
            raise StrategyError(
                f"max_norm={self.max_norm!r}: write a norm above 0, or None to leave gradients unclipped"
            )

    def _check_numerics(self) -> None:
        if self.autocast is not None:
            name = str(self.autocast).removeprefix("torch.")
            if name not in ("bfloat16", "float16"):
                raise StrategyError(
                    f'autocast={self.autocast!r}: write "bfloat16" or "float16", or None for full precision'
                )
            self._set("autocast", name)
        scale = self.loss_scale
        if scale is not None and scale != "dynamic" and not (_is_number(scale) and 0 < scale < math.inf):
            raise StrategyError(
                f'loss_scale={scale!r}: write a factor above 0, "dynamic", or None for no scaling'
            )
        if self.recompute is not None:
            raise StrategyError(
                f"recompute={self.recompute!r}: choosing what to recompute is not built yet; activation "
                "checkpointing in "
                "the model itself (torch.utils.checkpoint) is honoured: use that, and leave recompute None"
            )
        if not _is_int(self.seed) or not 0 <= self.seed < 2**63:
            raise StrategyError(f"seed={self.seed!r}: write a whole number from 0 to 2**63 − 1")

    def _check_running(self) -> None:
        self._flag("enable_send_recv_overlap")
        self._choice("executor", ("list",), {"fleet": "the dataflow executor"})
        self._choice("compile_backend", ("eager",), {"inductor": "compiling sub-programs"})
        self._choice("costs", ("measured", "roofline"))
        window = self.profile
        if window is not None:
            if (
                not isinstance(window, (list, tuple))
                or len(window) != 2
                or not all(_is_int(step) for step in window)
            ):
                raise StrategyError(f"profile={window!r}: write (first step, last step), or None")
            if not 0 <= window[0] <= window[1]:
                raise StrategyError(
                    f"profile={tuple(window)}: the first step is at least 0 and the last one not before it "
                    "(both are included)"
                )
            self._set("profile", tuple(window))
        names = self.passes
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name for name in names):
            raise StrategyError(f"passes={names!r}: give the names of registered passes in a list")
        if len(set(names)) != len(names):
            raise StrategyError(f"passes={list(names)!r} names a pass twice: a pass runs once")
        self._set("passes", tuple(names))

    # ---- small checks

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen for users; here while it is being made

    def _whole(self, name: str, least: int, meaning: str) -> None:
        value = getattr(self, name)
        if not _is_int(value) or value < least:
            raise StrategyError(f"{name}={value!r}: write a whole number of at least {least} ({meaning})")

    def _flag(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise StrategyError(f"{name}={value!r}: write True or False")

    def _choice(self, name: str, built: tuple[str, ...], later: Mapping[str, str] | None = None) -> None:
        value = getattr(self, name)
        if value in built:
            return
        allowed = " or ".join(f'"{choice}"' for choice in built)
        if later and value in later:
            raise StrategyError(f"{name}={value!r} ({later[value]}) is not built yet: use {allowed}")
        raise StrategyError(f"{name}={value!r}: write {allowed}")


def _schedule(name: object) -> str:
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


def _is_own(mode: object) -> bool:
    """Whether it has the form of a schedule of the user's own."""
    return isinstance(mode, list | tuple | Schedule) or callable(mode)


def _read_schedule(path: str) -> Schedule:
    try:
        with open(path, encoding="utf-8") as file:
            return schedule_from_csv(file.read())
    except OSError as error:
        raise StrategyError(
            f"schedule_file {path}: can't be read ({error.strerror}); check the path"
        ) from None
    except ValueError as error:
        raise StrategyError(f"schedule_file {path}: {error}") from None


def _qualified(function: Callable[..., Any]) -> str:
    """ "module:name", whose colon tells it from the names of schedules."""
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}:{owner.__qualname__}"


def _plain(value: Any) -> Any:
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def _bytes(limit: object) -> int | None:
    if limit is None:
        return None
    if _is_int(limit) and limit > 0:  # type: ignore[operator]
        return limit  # type: ignore[return-value]
    if isinstance(limit, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", limit)
        if match and match[2] in _UNITS and float(match[1]) > 0:
            return int(float(match[1]) * _UNITS[match[2]])
    raise StrategyError(
        f'memory_limit={limit!r}: write a number of bytes above 0, or text like "16GiB" (1024³) or "500MB" '
        "(1000²), or None"
    )


def _chunks(count: int) -> str:
    return "1 chunk" if count == 1 else f"{count} chunks"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
