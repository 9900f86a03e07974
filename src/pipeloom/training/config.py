"""What a training run is: read from a TOML file and from the command's options, checked before any rank
starts.

    [train]                         [model]               [strategy]
    steps = 400                     width = 192           pp_degree = 2
    batch_size = 16                 layers = 6            schedule_mode = "ZBV"
    lr = 2e-3                       heads = 6             vpp_degree = 2
    text = "shakespeare.txt"        dropout = 0.1         accumulate_steps = 8

Takes tables of plain values, gives a frozen TrainConfig. No torch here: a misspelt option is told at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..strategy import Strategy, StrategyError


class ConfigError(ValueError):
    """A bad option of a training run: says the table, the field, its value and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the GPT: width d, layers, heads (dividing d), the longest sequence in characters, dropout in
    [0, 1); tied: the head shares the embedding's weight."""

    width: int = 192
    layers: int = 6
    heads: int = 6
    sequence: int = 128
    dropout: float = 0.0
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "sequence"):
            _whole("model", self, name, 1)
        _number("model", self, "dropout", 0.0, 1.0, "below 1")
        _flag("model", self, "tied")
        if self.width % self.heads:
            raise ConfigError(
                f"[model] heads={self.heads} doesn't divide width={self.width}: choose a divisor"
            )


def _default_strategy() -> Strategy:
    return Strategy(pp_degree=2, schedule_mode="1F1B", accumulate_steps=4, max_norm=1.0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run. Raises ConfigError (or StrategyError from its strategy) for a bad value.

    steps: optimizer steps. minutes: end earlier, after so much training time, if steps are left.
    batch_size: windows of text a step. lr: the highest learning rate: it rises over `warmup` steps and falls
    along a cosine to `final_lr` times lr at the last step. betas, weight_decay: AdamW's. seed: weights,
    batches and dropout. text: a UTF-8 file, or None for Python's documentation topics. out: the folder in
    which run folders are made. eval_every, save_every: in steps. eval_batches: fixed batches of held-out
    text. keep: checkpoints kept. sample: characters written by the trained model at the end; 0 for none.
    """

    steps: int = 400
    minutes: float | None = None
    batch_size: int = 16
    lr: float = 2e-3
    warmup: int = 40
    final_lr: float = 0.05
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    seed: int = 0
    text: str | None = None
    out: str = "runs"
    eval_every: int = 50
    eval_batches: int = 4
    save_every: int = 100
    keep: int = 2
    sample: int = 400
    model: ModelConfig = field(default_factory=ModelConfig)
    strategy: Strategy = field(default_factory=_default_strategy)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "eval_every", "eval_batches", "save_every", "keep"):
            _whole("train", self, name, 1)
        for name in ("warmup", "seed", "sample"):
            _whole("train", self, name, 0)
        if self.seed >= 2**32:
            raise ConfigError(f"[train] seed={self.seed}: write a whole number below 2**32")
        if self.minutes is not None:
            _number("train", self, "minutes", 0.0, math.inf, "above 0, or leave it out", open_below=True)
        _number("train", self, "lr", 0.0, math.inf, "above 0", open_below=True)
        _number("train", self, "final_lr", 0.0, 1.0, "from 0 to 1, a share of lr", open_above=False)
        _number("train", self, "weight_decay", 0.0, math.inf, "of at least 0")
        if not (
            isinstance(self.betas, (list, tuple))
            and len(self.betas) == 2
            and all(isinstance(b, (int, float)) and 0 <= b < 1 for b in self.betas)
        ):
            raise ConfigError(
                f"[train] betas={self.betas!r}: write two numbers from 0 to below 1, like [0.9, 0.99]"
            )
        object.__setattr__(self, "betas", tuple(self.betas))
        for name in ("text", "out"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value) and not (name == "text" and value is None):
                raise ConfigError(f"[train] {name}={value!r}: write a path")
        self.strategy.micro_batches(self.batch_size)

    def lr_share(self, step: int) -> float:
        """The learning rate of step `step` (from 0) as a share of lr."""
        rise = (step + 1) / self.warmup if step < self.warmup else 1.0
        along = min(1.0, max(0.0, (step - self.warmup) / max(1, self.steps - self.warmup)))
        return rise * (self.final_lr + (1 - self.final_lr) * 0.5 * (1 + math.cos(math.pi * along)))

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any], *, where: str = "") -> TrainConfig:
        """A run from {"train": {…}, "model": {…}, "strategy": {…}}, each optional.

        What [strategy] leaves out takes this command's default (two stages, 1F1B, 4 micro-batches, clip norm
        1, the run's seed), not Strategy's. `where` (a file's name) is put before each message.
        """
        prefix = f"{where}: " if where else ""
        try:
            for name, table in tables.items():
                if name not in ("train", "model", "strategy"):
                    raise ConfigError(
                        f"[{name}] is not a table of a run: there are [train], [model] and [strategy]"
                    )
                if not isinstance(table, Mapping):
                    raise ConfigError(
                        f"{name}={table!r} is not a table: write [{name}] and its fields below it"
                    )
            train = _known("train", tables.get("train", {}), cls, ("model", "strategy"))
            model = ModelConfig(**_known("model", tables.get("model", {}), ModelConfig))
            run = cls(**train, model=model, strategy=Strategy())
        except ConfigError as error:
            raise ConfigError(f"{prefix}{error}") from None
        given = dict(tables.get("strategy", {}))
        defaults: dict[str, Any] = {"pp_degree": 2, "max_norm": 1.0, "seed": run.seed}
        if "accumulate_steps" not in given and "micro_batch_size" not in given:
            defaults["accumulate_steps"] = 4
        strategy = Strategy.from_dict({**defaults, **given}, where=f"{prefix}[strategy]")
        try:
            return dataclasses.replace(run, strategy=strategy)
        except (ConfigError, StrategyError) as error:
            raise type(error)(f"{prefix}{error}") from None

    def to_tables(self) -> dict[str, dict[str, Any]]:
        """Plain values, as JSON has them, that `from_tables` takes back."""
        train = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del train["model"], train["strategy"]
        train["betas"] = list(self.betas)
        return {"train": train, "model": dataclasses.asdict(self.model), "strategy": self.strategy.to_dict()}


def read_tables(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError naming the file."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror}); check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def merge_tables(below: Mapping[str, Any], above: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """`below` with the fields of `above` in their place (options over a file)."""
    merged = dict(below)
    for name, table in above.items():
        lower = merged.get(name, {})
        merged[name] = {**lower, **table} if isinstance(lower, Mapping) else lower
    return merged


def _known(table: str, values: Mapping[str, Any], of: type, but: tuple[str, ...] = ()) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(of) if f.name not in but]
    for name in values:
        if name not in names:
            close = difflib.get_close_matches(str(name), names, 1, 0.5)
            hint = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(names)}"
            raise ConfigError(f"[{table}] has no field {name!r}: {hint}")
    return dict(values)


def _whole(table: str, of: object, name: str, least: int) -> None:
    value = getattr(of, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"[{table}] {name}={value!r}: write a whole number of at least {least}")


def _flag(table: str, of: object, name: str) -> None:
    value = getattr(of, name)
    if not isinstance(value, bool):
        raise ConfigError(f"[{table}] {name}={value!r}: write true or false")


def _number(
    table: str,
    of: object,
    name: str,
    least: float,
    most: float,
    allowed: str,
    *,
    open_below: bool = False,
    open_above: bool = True,
) -> None:
    value = getattr(of, name)
    fits = isinstance(value, (int, float)) and not isinstance(value, bool)
    if (
        not fits
        or not least <= value <= most
        or (open_below and value == least)
        or (open_above and value == most)
    ):
        raise ConfigError(f"[{table}] {name}={value!r}: write a number {allowed}")
