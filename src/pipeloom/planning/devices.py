"""What a device can do, for planning a run on machines that aren't here: rooflines of accelerators by name.

A roofline (Williams, Waterman and Patterson 2009) says that an op takes as long as its arithmetic or its bytes
moved, whichever is slower. The figures in DEVICES are the makers' own, from their public data sheets: NVIDIA's for
V100, A100, H100, H200, B200 (HGX), L4, L40S and RTX 4090 (Ada white paper), AMD's for MI300X. FLOP/s are dense, of
the matrix units where a dtype has them and not for float32, since torch doesn't use TF32 unless it is told to.
Bandwidths of links are one way. What no data sheet says is assumed: what a launch takes, latencies, networks as the
maker's own servers of 8 have them, and "cpu-core" as one AVX2 core at 3 GHz among 16.

No op reaches such figures, so a Device's roofline is EFFICIENCY of them. That is a model: see DOUBT.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

#: shares of the data sheet's arithmetic, memory bandwidth and link bandwidth that large ops reach
EFFICIENCY: Final = (0.6, 0.8, 0.8)
#: seconds that an op takes at least, run eagerly: what a kernel's launch takes
LAUNCH: Final = 5e-6
#: a step that a roofline predicts may take this many times longer or shorter; plans compare better than that
DOUBT: Final = 1.5


class DeviceError(ValueError):
    """No device of that name, or figures that describe none."""


class Link(NamedTuple):
    """Seconds until the first byte arrives, and bytes a second after it, one way."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Roofline:
    """What planning assumes of a device and its links.

    flops: operations a second by dtype; "float32" stands for those not named. bytes_per_second: of memory. near:
    between ranks of a node; far: between nodes of `node` ranks each (0: all ranks are near). launch: seconds that an
    op takes at least.
    """

    flops: Mapping[str, float]
    bytes_per_second: float
    near: Link
    far: Link | None = None
    node: int = 0
    launch: float = 0.0

    def seconds(self, flops: float, moved: float, dtype: str = "float32") -> float:
        """The slower of computing and moving; nothing for an op that does neither."""
        rate = self.flops.get(dtype, self.flops["float32"])
        return max(flops / rate, moved / self.bytes_per_second, self.launch) if flops or moved else 0.0

    def links(self, ranks: int) -> dict[tuple[int, int], tuple[float, float]]:
        """The links between ranks on different nodes, as `Costs.links` has them."""
        if self.far is None or not self.node:
            return {}
        pairs = ((s, r) for s in range(ranks) for r in range(ranks))
        return {(s, r): (self.far[0], self.far[1]) for s, r in pairs if s // self.node != r // self.node}


#: where nothing is known: a CPU core's proportions. Ratios matter more than the absolute values
UNKNOWN: Final = Roofline({"float32": 5e10}, 1e10, Link(2e-4, 2e9))


@dataclass(frozen=True)
class Device:
    """A device's data sheet. flops: dense FLOP/s by dtype; memory: bytes, and memory_bandwidth bytes a second;
    near, far: links within a node of `node` devices and between nodes; efficiency, launch: as the constants."""

    name: str
    flops: Mapping[str, float]
    memory: float
    memory_bandwidth: float
    near: Link
    far: Link
    node: int = 8
    efficiency: tuple[float, float, float] = EFFICIENCY
    launch: float = LAUNCH

    def roofline(self) -> Roofline:
        """The share of the data sheet that large ops reach."""
        compute, memory, link = self.efficiency
        return Roofline(
            {dtype: rate * compute for dtype, rate in self.flops.items()},
            self.memory_bandwidth * memory,
            Link(self.near.latency, self.near.bandwidth * link),
            Link(self.far.latency, self.far.bandwidth * link),
            self.node,
            self.launch,
        )


def _device(
    name: str, single: float, half: float, memory: float, speed: float, near: float, far: float
) -> Device:
    """TFLOP/s of float32 and of the two halves, GB, GB/s of memory, of a near and of a far link."""
    rates = {"float32": single * 1e12, "bfloat16": half * 1e12, "float16": half * 1e12}
    return Device(name, rates, memory * 1e9, speed * 1e9, Link(1e-5, near * 1e9), Link(2e-5, far * 1e9))


def _v100() -> Device:
    figures = _device("v100", 15.7, 125, 32, 900, 150, 12.5)
    whole = {**figures.flops, "bfloat16": figures.flops["float32"]}  # no matrix units for it
    return Device("v100", whole, figures.memory, figures.memory_bandwidth, figures.near, figures.far)


DEVICES: Final[dict[str, Device]] = {
    device.name: device
    for device in (
        _v100(),
        _device("a100-40gb", 19.5, 312, 40, 1555, 300, 25),
        _device("a100-80gb", 19.5, 312, 80, 2039, 300, 25),
        _device("h100-sxm", 67, 989, 80, 3350, 450, 50),
        _device("h100-pcie", 51, 756, 80, 2000, 64, 50),
        _device("h200", 67, 989, 141, 4800, 450, 50),
        _device("b200", 75, 2250, 180, 8000, 900, 50),
        _device("l4", 30.3, 121, 24, 300, 32, 12.5),
        _device("l40s", 91.6, 362, 48, 864, 32, 25),
        _device("rtx-4090", 82.6, 165.2, 24, 1008, 32, 12.5),
        _device("mi300x", 163.4, 1307.4, 192, 5300, 64, 50),
        Device("cpu-core", {"float32": 9.6e10}, 4e9, 1e10, Link(1e-4, 4e9), Link(2e-4, 1.25e9), 16),
    )
}

_SHORT: Final = {"h100": "h100-sxm", "a100": "a100-80gb", "4090": "rtx-4090", "cpu": "cpu-core"}

_FIELDS: Final = ("flops", "memory", "memory_bandwidth", "near", "far", "node", "efficiency", "name")


def device_named(name: str) -> Device:
    """The device of that name, in any case. Raises DeviceError with the names that there are."""
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    found = DEVICES.get(_SHORT.get(plain, plain))
    if found is None:
        near = difflib.get_close_matches(plain, [*DEVICES, *_SHORT], 1, 0.5)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise DeviceError(
            f"there are no figures of a device {name!r}.{hint} There are {', '.join(DEVICES)}; or give your own"
        )
    return found


def device_from(data: Mapping[str, Any]) -> Device:
    """A device of the user's own figures: flops (a number, or one a dtype), memory_bandwidth, and optionally memory
    (bytes), near and far ([seconds, bytes a second]), node (ranks), efficiency (three shares; 1 each if left out,
    since own figures are what was reached), name. Raises DeviceError."""
    unknown = [key for key in data if key not in _FIELDS]
    if unknown:
        raise DeviceError(f"a device has no figure {unknown[0]!r}: there are {', '.join(_FIELDS)}")
    missing = [key for key in ("flops", "memory_bandwidth") if key not in data]
    if missing:
        raise DeviceError(f"a device needs {' and '.join(missing)}, in operations and bytes a second")
    flops = data["flops"]
    rates = dict(flops) if isinstance(flops, Mapping) else {"float32": flops}
    rates.setdefault("float32", next(iter(rates.values()), None))
    near = _link("near", data.get("near", UNKNOWN.near))
    share = data.get("efficiency", (1.0, 1.0, 1.0))
    if not isinstance(share, list | tuple) or len(share) != 3 or not all(0 < _real(s) <= 1 for s in share):
        raise DeviceError(
            f"efficiency={share!r}: write three shares in (0, 1], of arithmetic, memory and links"
        )
    node = data.get("node", 0)
    if not isinstance(node, int) or isinstance(node, bool) or node < 0:
        raise DeviceError(f"node={node!r}: write how many ranks share near links (0: all)")
    memory = data.get("memory", math.inf)
    for key, value in [*rates.items(), ("memory", memory), ("memory_bandwidth", data["memory_bandwidth"])]:
        if not _real(value) > 0:
            raise DeviceError(f"a device's {key} is a number above 0 (got {value!r})")
    return Device(
        str(data.get("name", "a device of your own")),
        {str(dtype): float(rate) for dtype, rate in rates.items()},
        float(memory),
        float(data["memory_bandwidth"]),
        near,
        _link("far", data.get("far", near)),
        node,
        (float(share[0]), float(share[1]), float(share[2])),
        0.0,
    )


def _link(name: str, given: Any) -> Link:
    if isinstance(given, list | tuple) and len(given) == 2 and _real(given[0]) >= 0 and _real(given[1]) > 0:
        return Link(float(given[0]), float(given[1]))
    raise DeviceError(f"{name}={given!r}: a link is [latency in seconds, bytes a second]")


def _real(value: Any) -> float:
    """The number, or not a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
