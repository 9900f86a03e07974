"""What task nodes say to each other, and how that looks on the control plane.

A Message is a few whole numbers: it says that a scope is ready, that a buffer has room again, that a loop goes on.
Values (tensors, or small plain ones such as a token) may go with it. On the control plane a message is one frame of
fixed size: the numbers, then a JSON text that says which values come. Plain values stand in that text; tensors follow
on the data plane, in the order of the frames, so that channels without tags can't mismatch. Nothing is unpickled.

The kinds are those of Paddle's fleet executor (2.6), whose semantics this room follows.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Kind(enum.IntEnum):
    """DATA_IS_READY: a scope may be run by the receiver. DATA_WITH_VARS: the same, and values come with it.
    DATA_IS_USELESS: the receiver's buffer has room for one more. START: the step begins (to a Source). START_LOOP: a
    scope goes through the loop (again). STOP_LOOP: a scope leaves the loop. STOP: the sender has left. ERR: the
    sender has failed."""

    DATA_IS_READY = 0
    DATA_IS_USELESS = 1
    DATA_WITH_VARS = 2
    START = 3
    START_LOOP = 4
    STOP_LOOP = 5
    STOP = 6
    ERR = 7


@dataclass(frozen=True, slots=True)
class Message:
    """source, destination: task ids (of STOP and ERR: ranks). scope: index of the micro-batch; −1 where none is meant.
    gen_step: how often the scope has been through the loop. start_micro_step, num_micro_step: the scopes of the batch
    that the scope goes through the loop with; −1, 0 outside of loops."""

    kind: Kind
    source: int
    destination: int
    scope: int = -1
    gen_step: int = 0
    start_micro_step: int = -1
    num_micro_step: int = 0

    def __str__(self) -> str:
        step = f" step {self.gen_step}" if self.gen_step else ""
        return f"{self.kind.name} {self.source}→{self.destination} scope {self.scope}{step}"


#: a tensor, a list of tensors, or anything that JSON has
Value = Any


class Parcel(NamedTuple):
    """A message with the values that came with it. run: number of the run that it belongs to; peer: the rank that
    sent it."""

    message: Message
    values: dict[str, Value]
    run: int
    peer: int


#: bytes of a frame
FRAME = 512
_HEAD = struct.Struct("<BiiiiiiIQI")
_ROOM = FRAME - _HEAD.size
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


class Announced(NamedTuple):
    """A frame, read. acknowledged: how many frames of ours the sender has. missing: bytes of the text that come in a
    message of their own."""

    message: Message
    run: int
    acknowledged: int
    text: bytes
    missing: int


class Layout(NamedTuple):
    """One tensor that follows on the data plane."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def encode(
    message: Message, values: Mapping[str, Value], run: int, acknowledged: int
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """The frame (uint8, shape (FRAME,)), the rest of its text where it is too long (uint8), and the tensors that
    follow, contiguous and flat. Raises ValueError for a value that can't travel."""
    text, tensors = _describe(values) if values else (b"", [])
    head = _HEAD.pack(
        message.kind,
        message.source,
        message.destination,
        message.scope,
        message.gen_step,
        message.start_micro_step,
        message.num_micro_step,
        run,
        acknowledged,
        len(text),
    )
    frame = torch.frombuffer(bytearray(head + text[:_ROOM].ljust(_ROOM, b"\0")), dtype=torch.uint8)
    rest = torch.frombuffer(bytearray(text[_ROOM:]), dtype=torch.uint8) if len(text) > _ROOM else None
    return frame, rest, tensors


def decode(frame: Tensor) -> Announced:
    """What `encode` wrote into a frame."""
    data = frame.numpy().tobytes()
    kind, source, destination, scope, step, start, count, run, acknowledged, length = _HEAD.unpack_from(data)
    message = Message(Kind(kind), source, destination, scope, step, start, count)
    text = data[_HEAD.size : _HEAD.size + min(length, _ROOM)]
    return Announced(message, run, acknowledged, text, max(0, length - _ROOM))


def layouts(text: bytes) -> list[Layout]:
    """The tensors that a frame's text announces, in order."""
    return [_layout(part) for kind, _, spec in _parts(text) if kind != "v" for part in spec]


def values_of(text: bytes, tensors: list[Tensor]) -> dict[str, Value]:
    """The values by name. tensors: flat, as announced."""
    found: dict[str, Value] = {}
    coming = iter(tensors)
    for kind, name, spec in _parts(text):
        if kind == "v":
            found[name] = spec
            continue
        made = [next(coming).view(_layout(part).shape) for part in spec]
        found[name] = made[0] if kind == "t" else made
    return found


def _parts(text: bytes) -> list[tuple[str, str, Any]]:
    return [(kind, name, spec) for kind, name, spec in json.loads(text)] if text else []


def _layout(spec: Any) -> Layout:
    shape, dtype = spec
    return Layout(tuple(shape), _DTYPES[dtype])


def _describe(values: Mapping[str, Value]) -> tuple[bytes, list[Tensor]]:
    parts: list[tuple[str, str, Any]] = []
    tensors: list[Tensor] = []
    for name, value in values.items():
        if isinstance(value, Tensor):
            kind, group = "t", [value]
        elif isinstance(value, list | tuple) and value and all(isinstance(v, Tensor) for v in value):
            kind, group = "l", list(value)
        else:
            parts.append(("v", name, value))
            continue
        tensors += [t.detach().contiguous().view(-1) for t in group]
        specs = [(list(t.shape), str(t.dtype).removeprefix("torch.")) for t in group]
        parts.append((kind, name, specs))
    try:
        return json.dumps(parts, separators=(",", ":"), allow_nan=True).encode(), tensors
    except TypeError as error:
        raise ValueError(
            f"{', '.join(values)} can't be sent ({error}): an edge carries tensors, lists of tensors, and plain values "
            "(numbers, text, lists and dicts of them)"
        ) from None
