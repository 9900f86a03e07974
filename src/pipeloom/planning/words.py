"""The words of lowered lists as text, and back: what a plan file holds. Very long lists are packed codes.

F0.3 · post F0>1.3 from stage 0 · recv F0>1.3 from stage 0 · send F0>1.3 to stage 1 · finalize · update
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from typing import Any, Final

import numpy as np

from ..schedules.coded import Codes
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


def pack(codes: Codes) -> str:
    """The codes as text: little-endian int64, zlib, base64."""
    return base64.b64encode(zlib.compress(codes.astype("<i8").tobytes(), 1)).decode()


def unpack(text: Any, most: int) -> Codes:
    """What `pack` was given. Raises ValueError for anything else, or for more than `most` codes."""
    try:
        packed = base64.b64decode(text, validate=True)
        reader = zlib.decompressobj()
        data = reader.decompress(packed, 8 * most)
    except (TypeError, binascii.Error, zlib.error) as error:
        raise ValueError(f"a list's codes can't be unpacked: {error}") from None
    if not reader.eof or len(data) % 8:
        raise ValueError(f"a list's codes are cut off, or more than the {most} that this plan can have")
    return np.frombuffer(data, dtype="<i8").astype(np.int64)
