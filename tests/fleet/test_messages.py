"""Frames: what goes in comes out, and what can't travel says so."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.fleet.messages import FRAME, Kind, Message, decode, encode, layouts, values_of

NUMBER = st.integers(-(2**31), 2**31 - 1)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def there_and_back(message: Message, values: dict[str, object], run: int = 3, acknowledged: int = 5) -> dict:
    frame, rest, tensors = encode(message, values, run, acknowledged)
    assert frame.shape == (FRAME,)
    read = decode(frame)
    assert (read.message, read.run, read.acknowledged) == (message, run, acknowledged)
    assert read.missing == (0 if rest is None else rest.numel())
    text = read.text + (b"" if rest is None else rest.numpy().tobytes())
    assert [(t.numel(), t.dtype) for t in tensors] == [
        (torch.Size(layout.shape).numel(), layout.dtype) for layout in layouts(text)
    ]
    return values_of(text, tensors)


@given(st.sampled_from(Kind), st.tuples(*[NUMBER] * 6))
def test_the_numbers_of_a_message_survive(kind: Kind, numbers: tuple[int, ...]) -> None:
    assert there_and_back(Message(kind, *numbers), {}) == {}


@given(st.dictionaries(st.text(max_size=10), PLAIN, max_size=4))
def test_plain_values_survive_whatever_their_length(values: dict[str, object]) -> None:
    message = Message(Kind.DATA_WITH_VARS, 0, 1, 2)
    assert there_and_back(message, {**values, "long": "x" * 600}) == {**values, "long": "x" * 600}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_tensors_survive(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    found = there_and_back(Message(Kind.DATA_WITH_VARS, 0, 1), {"a": tensor, "b": [tensor, tensor.clone()]})
    assert torch.equal(found["a"], tensor)
    assert found["a"].shape == shape
    assert [torch.equal(t, tensor) for t in found["b"]] == [True, True]


def test_a_tensor_with_gaps_is_copied_together() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(there_and_back(Message(Kind.DATA_WITH_VARS, 0, 1), {"t": tensor})["t"], tensor)


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(ValueError, match=r"weird can't be sent \(Object of type object"):
        encode(Message(Kind.DATA_WITH_VARS, 0, 1), {"weird": object()}, 0, 0)


def test_messages_print() -> None:
    assert str(Message(Kind.START_LOOP, 1, 2, 3, 4)) == "START_LOOP 1→2 scope 3 step 4"
