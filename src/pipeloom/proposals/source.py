"""Source: where the seconds of a table of plans come from, and how sure they are.

Timed here; a roofline of a named device (planning.devices) or of figures of the user's own; or seconds of chunks that
the user has timed, shared out between the chunks' ends by operations and bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ..auto import Auto
from ..passes.cuts import choose_cuts, replicated
from ..planning.devices import DOUBT, UNKNOWN, Device, DeviceError, Link, Roofline, device_from, device_named
from ..planning.partition import Pieces
from ..strategy import Strategy


@dataclass(frozen=True)
class Source:
    """Where seconds come from. kind: "measured", "roofline" or "given". memory: of the device, bytes. own: the
    user's seconds of chunks."""

    kind: str
    name: str
    roofline: Roofline
    memory: float = math.inf
    own: Mapping[str, Any] | None = None

    def words(self, auto: Auto) -> str:
        """Where seconds come from and how sure they are, in a sentence."""
        if self.kind == "measured":
            spread = auto.spread or 0.0
            return (
                f"measured here on {_machine(auto.planner.device)}, two rounds {spread:.0%} apart; ranks that "
                "share this machine will be slower, and links are assumed"
            )
        if self.kind == "given":
            return f"{self.name}; between chunks' ends, shared out by operations and bytes"
        return f"roofline of {self.name}: a model, steps within a factor of {DOUBT:g}; plans compare better than that"


def source_of(device: str | PathLike[str] | Device | Mapping[str, Any] | None, strategy: Strategy) -> Source:
    """The source that `plan(device=…)` names. Raises DeviceError for one that there isn't."""
    if device is None or device == "measured":
        if strategy.costs == "roofline":
            return Source("roofline", "an unknown device with a CPU core's proportions", UNKNOWN)
        return Source("measured", "", UNKNOWN)
    if isinstance(device, Device):
        return Source("roofline", device.name, device.roofline(), device.memory)
    if isinstance(device, Mapping):
        return _own(device, "your own numbers")
    if isinstance(device, PathLike) or str(device).endswith(".json"):
        return _own(read_numbers(device), str(device))
    return source_of(device_named(device), strategy)


def _own(data: Mapping[str, Any], name: str) -> Source:
    if "forward" not in data:
        found = device_from(data)
        return Source("roofline", found.name, found.roofline(), found.memory)
    known = ("forward", "backward_b", "backward_w", "cuts", "latency", "bandwidth")
    unknown = [key for key in data if key not in known]
    if unknown:
        raise DeviceError(f"{name}: there is no field {unknown[0]!r}: there are {', '.join(known)}")
    columns = [data.get(key) for key in known[:3]]
    if not all(isinstance(c, list | tuple) and len(c) == len(data["forward"]) > 0 for c in columns):
        raise DeviceError(
            f"{name}: forward, backward_b and backward_w are lists with a number of seconds a chunk"
        )
    if not all(isinstance(x, int | float) and math.isfinite(x) and x >= 0 for c in columns for x in c or ()):
        raise DeviceError(f"{name}: seconds of chunks are finite numbers of at least 0")
    latency = data.get("latency", UNKNOWN.near.latency)
    bandwidth = data.get("bandwidth", UNKNOWN.near.bandwidth)
    if not (isinstance(latency, int | float) and isinstance(bandwidth, int | float)):
        raise DeviceError(f"{name}: latency is in seconds and bandwidth in bytes a second")
    if not (latency >= 0 and bandwidth > 0):
        raise DeviceError(f"{name}: latency is at least 0 and bandwidth above 0 (got {latency}, {bandwidth})")
    roofline = Roofline(UNKNOWN.flops, UNKNOWN.bytes_per_second, Link(float(latency), float(bandwidth)))
    return Source("given", name, roofline, own=data)


def read_numbers(path: str | PathLike[str]) -> Mapping[str, Any]:
    """The object in a JSON file. Raises DeviceError naming the file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DeviceError(f"{path}: can't be read ({error.strerror}); check the path") from None
    except ValueError as error:
        raise DeviceError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise DeviceError(f"{path}: holds no JSON object with figures of a device or seconds of chunks")
    return data


def given_pieces(auto: Auto, own: Mapping[str, Any]) -> Pieces:
    """The model's pieces with the user's seconds of chunks."""
    chunks = len(own["forward"])
    cuts = choose_cuts(auto.program, chunks, own.get("cuts"), replicated(auto.program))
    return auto.modelled.calibrated(cuts, own["forward"], own["backward_b"], own["backward_w"])


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return (
        f"{device.type} with {threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else str(device)
    )
