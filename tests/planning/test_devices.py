"""Devices: figures by name or of one's own, and the rooflines that they give."""

from __future__ import annotations

from typing import Any

import pytest

from pipeloom.planning.devices import (
    DEVICES,
    EFFICIENCY,
    LAUNCH,
    UNKNOWN,
    DeviceError,
    Link,
    Roofline,
    device_from,
    device_named,
)


def test_a_roofline_takes_the_slower_of_computing_and_moving() -> None:
    roof = Roofline({"float32": 100.0, "bfloat16": 1000.0}, 10.0, Link(0.0, 1.0))
    assert roof.seconds(1000, 10) == 10
    assert roof.seconds(1000, 500) == 50
    assert roof.seconds(1000, 5, "bfloat16") == 1
    assert roof.seconds(1000, 5, "float64") == 10, "a dtype without figures is taken for float32"


def test_no_op_is_shorter_than_a_launch() -> None:
    roof = Roofline({"float32": 100.0}, 10.0, Link(0.0, 1.0), launch=2.0)
    assert roof.seconds(100, 10) == 2
    assert roof.seconds(1000, 10) == 10
    assert roof.seconds(0, 0) == 0, "a view isn't launched"
    assert device_named("h100").roofline().seconds(1, 1) == LAUNCH


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_the_table_is_plausible(device: Any) -> None:
    """In the order of magnitude that such devices have, so that no unit is wrong."""
    if device.name == "cpu-core":
        return
    assert 1e13 < device.flops["float32"] < 2e14
    assert 1 <= device.flops["bfloat16"] / device.flops["float32"] < 40
    assert 2e11 < device.memory_bandwidth < 1e13
    assert 2e10 < device.memory < 2e11
    assert device.near.bandwidth >= device.far.bandwidth
    assert device.near.latency < device.far.latency < 1e-3


def test_a_device_reaches_a_share_of_its_data_sheet() -> None:
    device = device_named("h100")
    roof = device.roofline()
    assert roof.flops["bfloat16"] == pytest.approx(989e12 * EFFICIENCY[0])
    assert roof.bytes_per_second == pytest.approx(3.35e12 * EFFICIENCY[1])
    assert roof.near == Link(device.near.latency, 450e9 * EFFICIENCY[2])


def test_links_between_nodes_are_far() -> None:
    roof = Roofline({"float32": 1.0}, 1.0, Link(1.0, 2.0), Link(3.0, 4.0), node=2)
    links = roof.links(4)
    assert set(links) == {(s, r) for s in range(4) for r in range(4) if s // 2 != r // 2}
    assert set(links.values()) == {(3.0, 4.0)}
    assert UNKNOWN.links(4) == {}


@pytest.mark.parametrize(
    ("name", "found"),
    [("H100", "h100-sxm"), ("A100_40GB", "a100-40gb"), ("RTX 4090", "rtx-4090"), ("cpu", "cpu-core")],
)
def test_names_in_any_spelling(name: str, found: str) -> None:
    assert device_named(name).name == found


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(
        DeviceError, match=r"no figures of a device 'h1000'. Did you mean h100\? There are v100, a100"
    ):
        device_named("h1000")
    with pytest.raises(DeviceError, match=r"'zzz'. There are v100"):
        device_named("zzz")


def test_own_figures_are_taken_as_they_are() -> None:
    device = device_from({"flops": 1e12, "memory_bandwidth": 1e11, "memory": 8e9, "near": [1e-5, 1e10]})
    roof = device.roofline()
    assert (roof.flops["float32"], roof.bytes_per_second, roof.near) == (1e12, 1e11, Link(1e-5, 1e10))
    assert roof.links(4) == {}
    assert device.memory == 8e9
    halves = device_from({"flops": {"bfloat16": 4e12}, "memory_bandwidth": 1e11}).roofline()
    assert halves.seconds(4e12, 0) == 1


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"flop": 1}, "no figure 'flop': there are flops, memory"),
        ({"flops": 1}, "a device needs memory_bandwidth"),
        ({"flops": "x", "memory_bandwidth": 1}, "float32 is a number above 0 .got 'x'"),
        ({"flops": {}, "memory_bandwidth": 1}, "float32 is a number above 0"),
        ({"flops": 1, "memory_bandwidth": 0}, "memory_bandwidth is a number above 0"),
        ({"flops": 1, "memory_bandwidth": 1, "memory": -1}, "memory is a number above 0"),
        ({"flops": 1, "memory_bandwidth": 1, "near": 3}, "near=3: a link is"),
        ({"flops": 1, "memory_bandwidth": 1, "far": [0, 0]}, "far=.*: a link is"),
        ({"flops": 1, "memory_bandwidth": 1, "node": 1.5}, "node=1.5: write how many"),
        ({"flops": 1, "memory_bandwidth": 1, "efficiency": [1, 2, 1]}, "three shares"),
    ],
)
def test_bad_figures_are_refused(data: dict[str, Any], says: str) -> None:
    with pytest.raises(DeviceError, match=says):
        device_from(data)
