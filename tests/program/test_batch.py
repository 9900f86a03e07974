"""Batches: flattened to tensor leaves, put back, and cut into micro-batches."""

from __future__ import annotations

import pytest
import torch

from pipeloom.program.batch import batch_size, flatten_batch, shape_key, split_batch

X, Y, Z = torch.zeros(4, 2), torch.ones(4), torch.full((4, 3), 2.0)


def test_a_tensor_is_the_one_argument() -> None:
    leaves, form = flatten_batch(X, Y)
    assert [leaf is t for leaf, t in zip(leaves, (X, Y), strict=True)] == [True, True]
    args, kwargs, targets = form.rebuild(leaves)
    assert (args[0] is X, kwargs, targets is Y) == (True, {}, True)
    assert form.names == ("input 0", "target leaf 0")


def test_a_tuple_is_arguments_and_a_mapping_keywords() -> None:
    args, kwargs, targets = flatten_batch((X, 3, None))[1].rebuild([Z])
    assert args[0] is Z
    assert (args[1:], kwargs, targets) == ((3, None), {}, None)
    leaves, form = flatten_batch({"ids": X, "mask": Y, "training": True}, {"labels": Z, "smooth": 0.1})
    args, kwargs, targets = form.rebuild(leaves)
    assert args == ()
    assert kwargs["ids"] is X
    assert kwargs["mask"] is Y
    assert kwargs["training"] is True
    assert targets["labels"] is Z
    assert targets["smooth"] == 0.1


def test_nested_containers_come_back_as_they_were() -> None:
    inputs = ([X, {"b": Y, "a": (Z, "how")}], None)
    leaves, form = flatten_batch(inputs)
    args, _, _ = form.rebuild([leaf + 1 for leaf in leaves])
    assert isinstance(args[0], list)
    assert torch.equal(args[0][1]["b"], Y + 1)
    assert isinstance(args[0][1]["a"], tuple)
    assert args[0][1]["a"][1] == "how"
    assert args[1] is None
    assert form.names == ("tensor leaf 0", "tensor leaf 1", "tensor leaf 2")


def test_a_size_stands_for_a_float_tensor() -> None:
    leaves, _ = flatten_batch((torch.Size([4, 2]), Y))
    assert leaves[0].device.type == "meta"
    assert (tuple(leaves[0].shape), leaves[0].dtype) == ((4, 2), torch.float32)
    assert flatten_batch(torch.Size([3]))[0][0].shape == (3,)


def test_equal_forms_have_equal_keys() -> None:
    def key(inputs: object) -> object:
        return flatten_batch(inputs)[1].key()

    assert key((X, True)) == key((Z, True))
    assert key((X, True)) != key((X, False))
    assert key((X, True)) != key([X, True, None])
    assert key({"a": X}) != key({"b": X})


def test_a_batch_without_a_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="the batch holds no tensor: inputs is dict"):
        flatten_batch({"a": 3})


def test_the_number_of_samples_is_dimension_0() -> None:
    leaves, form = flatten_batch((X, torch.tensor(3.0)), Y)
    assert batch_size(leaves, form) == 4


def test_leaves_of_different_size_are_refused_by_name() -> None:
    leaves, form = flatten_batch({"ids": X, "mask": torch.zeros(3, 2)}, Y)
    with pytest.raises(
        ValueError, match=r"input 'ids' has 4 samples and input 'mask' has 3 \(shape \(3, 2\)\)"
    ):
        batch_size(leaves, form)
    leaves, form = flatten_batch(X, torch.zeros(5))
    with pytest.raises(ValueError, match="input 0 has 4 samples and target leaf 0 has 5"):
        batch_size(leaves, form)


def test_scalars_alone_are_no_batch() -> None:
    leaves, form = flatten_batch(torch.tensor(1.0))
    with pytest.raises(ValueError, match="all of its tensors are scalars"):
        batch_size(leaves, form)


def test_micro_batches_are_views_and_share_scalars() -> None:
    scalar = torch.tensor(3.0)
    first, second = split_batch([X, scalar, Y], [3, 1])
    assert [tuple(t.shape) for t in first] == [(3, 2), (), (3,)]
    assert [tuple(t.shape) for t in second] == [(1, 2), (), (1,)]
    assert second[1] is scalar
    assert first[0].untyped_storage().data_ptr() == X.untyped_storage().data_ptr()


def test_a_capture_depends_on_shape_stride_and_dtype() -> None:
    square = torch.zeros(2, 2)
    keys = {shape_key([t]) for t in (X, square, square.t(), square.double(), square.clone())}
    assert len(keys) == 4  # the clone is as the original
