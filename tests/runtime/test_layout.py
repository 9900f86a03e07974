"""Values arrive with exactly the strides that the programs were captured with."""

from __future__ import annotations

import pytest
import torch

from pipeloom.program.subprogram import ValueInfo
from pipeloom.runtime.layout import Wire


def info(tensor):
    return ValueInfo(
        "v",
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        0,
        tensor.nbytes,
        tensor.untyped_storage().nbytes(),
    )


BASE = torch.arange(120.0)
LAYOUTS = {
    "contiguous": (BASE.view(2, 3, 4, 5), 120),
    "transposed": (BASE.view(24, 5).t(), 120),
    "permuted": (BASE.view(2, 3, 4, 5).permute(3, 0, 2, 1), 120),
    "channels last": (BASE.view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), 120),
    "with an offset": (BASE[20:].view(20, 5), 100),
    "expanded": (BASE[:4].view(4, 1).expand(4, 30), 4),
    "expanded and permuted": (BASE[:12].view(3, 1, 4).expand(3, 5, 4).permute(2, 1, 0), 12),
    "expanded scalar": (BASE[3].expand(6, 7), 1),
    "overlapping": (BASE.unfold(0, 8, 2), 120),
    "overlapping and expanded": (BASE[:10].unfold(0, 4, 1).unsqueeze(1).expand(7, 3, 4), 10),
    "columns with gaps": (BASE.view(12, 10)[:, 2:5], 36),
    "every second": (BASE[::2], 60),
    "gaps and expanded": (BASE.view(12, 10)[:, :3].unsqueeze(1).expand(12, 4, 3), 36),
    "one element rows": (BASE.view(120, 1)[:5].as_strided((5, 1), (1, 77)), 5),
    "scalar": (torch.tensor(3.5), 1),
    "bool": (torch.tensor([True, False, True]), 3),
    "integers": (torch.arange(6).view(2, 3).t(), 6),
    "half": (torch.randn(4, 4).bfloat16(), 16),
    "complex": (torch.randn(3, 2, dtype=torch.complex64).t(), 6),
    "empty": (torch.empty(0, 3), 0),
    "empty, odd strides": (torch.empty_strided((3, 0, 2), (7, 1, 5)), 0),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_and_strides_arrive(name):
    tensor, count = LAYOUTS[name]
    wire = Wire.of(info(tensor))
    flat = wire.pack(tensor)
    assert (wire.count, wire.nbytes) == (count, count * tensor.element_size())
    assert flat.shape == (count,)
    assert flat.is_contiguous()
    arrived = wire.unpack(flat.clone())
    assert torch.equal(arrived, tensor)
    assert arrived.stride() == tensor.stride()
    assert arrived.dtype == tensor.dtype


@pytest.mark.parametrize("name", ["contiguous", "permuted", "expanded", "overlapping", "with an offset"])
def test_dense_memory_is_not_copied(name):
    tensor, _ = LAYOUTS[name]
    assert Wire.of(info(tensor)).pack(tensor).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("name", ["permuted", "expanded", "columns with gaps", "gaps and expanded"])
def test_a_kernel_that_lays_its_result_out_otherwise_is_put_right(name):
    tensor, _ = LAYOUTS[name]
    wire = Wire.of(info(tensor))
    arrived = wire.unpack(wire.pack(tensor.contiguous()).clone())
    assert torch.equal(arrived, tensor)
    assert arrived.stride() == tensor.stride()


def test_lazy_conjugation_and_negation_are_resolved():
    complexes = torch.randn(4, dtype=torch.complex64)
    for tensor in (complexes.conj(), complexes.conj().imag):
        wire = Wire.of(info(tensor))
        assert torch.equal(wire.unpack(wire.pack(tensor).clone()), tensor)


def test_another_shape_or_dtype_is_an_error():
    wire = Wire.of(info(torch.zeros(2, 3)))
    with pytest.raises(ValueError, match=r"shape \(3, 2\), torch.float32 came out .* captured with \(2, 3\)"):
        wire.pack(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"torch.float64 came out"):
        wire.pack(torch.zeros(2, 3, dtype=torch.float64))
