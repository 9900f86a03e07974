"""What `pipeloom generate` was asked to do: checked before any rank starts, and passed to each as JSON.

No torch here: a misspelt option, a file that isn't there and an empty prompt are told at once.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: the name of a model that `pipeloom fetch` gets
SMOLLM2 = "smollm2"


class OrderError(ValueError):
    """Something that was asked and can't be done: says what, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """model: a folder, or SMOLLM2. prompts: mappings with "prompt" and limits of its own. limits: of all prompts
    (`generation.Limits`). chat: prompts are what a user says. json: print a line of JSON a prompt."""

    model: str
    prompts: tuple[dict[str, Any], ...]
    limits: dict[str, Any] = field(default_factory=dict)
    stages: int = 1
    batch: int = 1
    in_flight: int | None = None
    refill: str = "continuous"
    chat: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        if not self.prompts:
            raise OrderError("no prompt was given: use --prompt TEXT or --prompts FILE")
        for name, value in (
            ("--stages", self.stages),
            ("--batch", self.batch),
            ("--in-flight", self.in_flight),
        ):
            if value is not None and value < 1:
                raise OrderError(f"{name} {value}: write at least 1")
        if self.refill not in ("continuous", "batch"):
            raise OrderError(f"--refill {self.refill}: write continuous or batch")
        if self.model != SMOLLM2 and not Path(self.model).is_dir():
            raise OrderError(
                f"--model {self.model}: is no folder; give a run folder of `pipeloom train`, a folder with a model of "
                f"transformers, or {SMOLLM2}"
            )
        for number, prompt in enumerate(self.prompts):
            text = prompt.get("prompt")
            if not isinstance(text, (str, list)):
                raise OrderError(f'prompt {number} has no "prompt": write its text there')
            if not text:
                raise OrderError(f"prompt {number} is empty: a model goes on from at least one token")

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> Order:
        """What `dump` wrote."""
        values = json.loads(text)
        return Order(**{**values, "prompts": tuple(values["prompts"])})


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """One prompt a line: plain text, or a JSON object with "prompt" and limits of its own. Blank lines don't count.
    Raises OrderError naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise OrderError(f"--prompts {path}: can't be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError as error:
        raise OrderError(f"--prompts {path}: not UTF-8 text (byte {error.start}); convert it first") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            found.append({"prompt": line})
            continue
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise OrderError(
                f"--prompts {path}, line {number}: begins with {{ but is no JSON: {error}"
            ) from None
    return found
