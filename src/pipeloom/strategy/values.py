"""Values of options: what is a number, a size in bytes, one of a few words; each refusal in the same voice.

Taken by the checks of a Strategy (checks.py, own.py), which put the checked form back into the frozen dataclass with
`set_field`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .strategy import Strategy


class StrategyError(ValueError):
    """A bad option or a bad combination: says the field, its value, what is allowed and what to do."""


#: the planner chooses placement, chunks a stage, cuts and order; of `recompute`, the chunks
AUTO: Final = "auto"
#: of `recompute`: no chunk, every chunk
NONE: Final = "none"
ALL: Final = "all"
#: the schedule stands in schedule_file
FILE: Final = "file"
#: what executor "fleet" has graphs for
FLEET_SCHEDULES: Final = ("1F1B", "FThenB", "ZBH1")

UNITS: Final[dict[str, int]] = {
    "B": 1,
    **{f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")},
    **{f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")},
}


def set_field(strategy: Strategy, name: str, value: object) -> None:
    object.__setattr__(strategy, name, value)  # frozen for users; here while it is being made


def check_whole(strategy: Strategy, name: str, least: int, meaning: str) -> None:
    value = getattr(strategy, name)
    if not is_int(value) or value < least:
        raise StrategyError(f"{name}={value!r}: write a whole number of at least {least} ({meaning})")


def check_flag(strategy: Strategy, name: str) -> None:
    value = getattr(strategy, name)
    if not isinstance(value, bool):
        raise StrategyError(f"{name}={value!r}: write True or False")


def check_choice(
    strategy: Strategy, name: str, built: tuple[str, ...], later: Mapping[str, str] | None = None
) -> None:
    value = getattr(strategy, name)
    if value in built:
        return
    allowed = " or ".join(f'"{choice}"' for choice in built)
    if later and value in later:
        raise StrategyError(f"{name}={value!r} ({later[value]}) is not built yet: use {allowed}")
    raise StrategyError(f"{name}={value!r}: write {allowed}")


def parse_bytes(limit: object) -> int | None:
    if limit is None:
        return None
    if is_int(limit) and limit > 0:  # type: ignore[operator]
        return limit  # type: ignore[return-value]
    if isinstance(limit, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", limit)
        if match and match[2] in UNITS and float(match[1]) > 0:
            return int(float(match[1]) * UNITS[match[2]])
    raise StrategyError(
        f'memory_limit={limit!r}: write a number of bytes above 0, or text like "16GiB" (1024³) or "500MB" '
        "(1000²), or None"
    )


def count_chunks(count: int) -> str:
    return "1 chunk" if count == 1 else f"{count} chunks"


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
