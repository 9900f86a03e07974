"""What is wrong with a plan, and the words to say it."""

from __future__ import annotations

from ..schedules.jobs import Direction

#: (kind, chunk, micro-batch)
JobKey = tuple[str, int, int]
#: (direction, source chunk, target chunk, micro-batch)
MessageKey = tuple[Direction, int, int, int]

_SHOWN = 4


class PlanError(ValueError):
    """Lists that can't be run. check: which check failed (see the module's list)."""

    def __init__(self, check: str, message: str) -> None:
        self.check = check
        super().__init__(message)


def job_name(key: JobKey) -> str:
    return f"{key[0]}{key[1]}.{key[2]}"


def message_name(message: MessageKey) -> str:
    direction, source, target, micro_batch = message
    return f"{direction}{source}>{target}.{micro_batch}"


def some(names: list[str]) -> str:
    """The first few of many names."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
