"""The words of lowered lists as text, and back: what a plan file holds.

F0.3 · post F0>1.3 from stage 0 · recv F0>1.3 from stage 0 · send F0>1.3 to stage 1 · finalize · update
"""

from __future__ import annotations

import re
from typing import Any, Final

from ..schedules.jobs import Job, LoweredJob, Phase, Transfer

_TRANSFER: Final = re.compile(r"(post|recv|send) ([FB])(\d+)>(\d+)\.(\d+) (from|to) stage (\d+)\Z")


def parse(text: Any) -> LoweredJob:
    """The entry that prints as `text`. Raises ValueError for anything else."""
    if text == "finalize" or text == "update":
        return Phase(text)
    match = _TRANSFER.match(text) if isinstance(text, str) else None
    if match is None:
        try:
            return Job.parse(text)
        except (ValueError, TypeError):
            raise ValueError(
                f"{text!r} is no entry of a plan: write a job (F0.3), a transfer (send F0>1.3 to stage 1), "
                "finalize or update"
            ) from None
    action, direction, source, target, micro_batch, way, peer = match.groups()
    if (action == "send") != (way == "to"):
        raise ValueError(f"{text!r}: a send goes to a stage, a post and a recv come from one")
    numbers = (int(source), int(target), int(micro_batch), int(peer))
    return Transfer(action, direction, *numbers)  # type: ignore[arg-type]
