"""A run's folder: what a run leaves behind, and what another one resumes from.

    runs/20250101-120000-1F1B-2/
      config.json      the run's tables (see config.py)
      metrics.jsonl    one line a step: step, loss, held_out, tokens_per_second, lr, busy
      LATEST           which checkpoint to resume from, its step, the text's digest
      step-000100/     a checkpoint
      trace.json, timeline.html, sample.txt      written at the end

Why so: a run may be stopped at any moment. A checkpoint is written whole into a folder of its own, and only
then is LATEST replaced, in one rename; a reader never sees half of either. Only the first rank writes here,
but for the checkpoints, which all ranks write together.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .config import ConfigError, TrainConfig


@dataclass(frozen=True)
class Latest:
    """What LATEST says: the checkpoint's folder name, its step (steps done), the digest of the text trained
    on.
    """

    checkpoint: str
    step: int
    text: str


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    @staticmethod
    def create(config: TrainConfig) -> RunFolder:
        """A new folder under config.out, named by the time, the schedule and the number of stages."""
        strategy = config.strategy
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{strategy.schedule_name}-{strategy.pp_degree}"
        for attempt in range(1, 1000):
            path = Path(config.out) / (name if attempt == 1 else f"{name}.{attempt}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                if not path.is_dir():
                    raise ConfigError(f"{path}: is in the way; remove it or choose another --out") from None
                continue
            except OSError as error:
                raise ConfigError(f"{path}: can't be made ({error.strerror}); choose another --out") from None
            replace_file(path / "config.json", json.dumps(config.to_tables(), indent=1) + "\n")
            return RunFolder(path)
        raise ConfigError(f"{config.out}: a thousand runs in one second; choose another --out")

    def tables(self) -> dict[str, Any]:
        """config.json's tables. Raises ConfigError where this is no run folder."""
        try:
            tables = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"{self.path}: not a run folder: config.json can't be read ({error.strerror}); give the "
                "folder that the run printed"
            ) from None
        except ValueError as error:
            raise ConfigError(f"{self.path / 'config.json'}: not valid JSON: {error}") from None
        if not isinstance(tables, dict):
            raise ConfigError(f"{self.path / 'config.json'}: holds no tables; it isn't a run's")
        return tables

    def latest(self) -> Latest:
        """Which checkpoint to resume from. Raises ConfigError where there is none."""
        file = self.path / "LATEST"
        try:
            latest = Latest(**json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise ConfigError(f"{self.path}: has no checkpoint yet (no LATEST): start anew") from None
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{file}: can't be understood ({error}); is this a run's folder?") from None
        if Path(latest.checkpoint).name != latest.checkpoint or not (self.path / latest.checkpoint).is_dir():
            raise ConfigError(f"{file}: names {latest.checkpoint!r}, which is no folder in {self.path}")
        return latest

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint after `step` steps."""
        return self.path / f"step-{step:06d}"

    def publish(self, step: int, text: str, keep: int) -> None:
        """Make the complete checkpoint of `step` the latest one; remove all but the `keep` newest."""
        latest = Latest(self.checkpoint(step).name, step, text)
        replace_file(self.path / "LATEST", json.dumps(asdict(latest)) + "\n")
        older = [path for path in self._checkpoints() if path.name < latest.checkpoint]
        for path in older[: max(0, len(older) - (keep - 1))]:
            shutil.rmtree(path, ignore_errors=True)

    def append(self, row: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rewind(self, step: int) -> None:
        """Drop the metrics (and checkpoints) of steps after `step`: a resumed run writes them again."""
        file = self.path / "metrics.jsonl"
        if file.exists():
            rows = [line for line in file.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
            replace_file(file, "".join(line + "\n" for line in rows))
        for path in self._checkpoints():
            if path.name > self.checkpoint(step).name:
                shutil.rmtree(path, ignore_errors=True)

    def _checkpoints(self) -> list[Path]:
        return sorted(path for path in self.path.glob("step-*") if path.is_dir())


def replace_file(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the new one, whole."""
    draft = path.with_name(path.name + ".new")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _step_of(line: str) -> float:
    """A metrics line's step; infinity for a line that was cut short as its writer died."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
