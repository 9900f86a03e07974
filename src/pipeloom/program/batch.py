"""A batch: what the user hands to `step`, flattened to tensor leaves and cut into micro-batches.

A batch is a tensor, a tuple or list (→ *args) or a mapping (→ **kwargs), nested with non-tensors; the target is
one value of any such form. Tensor leaves are the inputs of the captured program; everything else is a constant of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .compat import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class BatchForm:
    """The form of a batch without its tensors: how to put leaves back. Equal forms share a captured program.

    constants[i] is the i-th leaf where it isn't a tensor; tensors holds the positions of the tensor leaves.
    """

    spec: TreeSpec
    constants: tuple[tuple[int, Any], ...]
    tensors: tuple[int, ...]
    names: tuple[str, ...]

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """(args, kwargs, targets) with these tensor leaves."""
        flat: list[Any] = [None] * (len(self.constants) + len(self.tensors))
        for position, value in self.constants:
            flat[position] = value
        for position, leaf in zip(self.tensors, leaves, strict=True):
            flat[position] = leaf
        args, kwargs, targets = tree_unflatten(flat, self.spec)
        return args, kwargs, targets

    def key(self) -> tuple[Any, ...]:
        return (repr(self.spec), tuple((i, repr(v)) for i, v in self.constants))


def flatten_batch(inputs: Any, targets: Any = None) -> tuple[list[torch.Tensor], BatchForm]:
    """The tensor leaves of a batch and its form. A leaf given as `torch.Size` stands for a float tensor of that
    shape."""
    if isinstance(inputs, Mapping):
        tree: Any = ((), dict(inputs), targets)
    elif isinstance(inputs, (tuple, list)) and not isinstance(inputs, torch.Size):
        tree = (tuple(inputs), {}, targets)
    else:
        tree = ((inputs,), {}, targets)
    flat, spec = tree_flatten(tree, is_leaf=lambda x: isinstance(x, torch.Size))
    flat = [torch.empty(x, device="meta") if isinstance(x, torch.Size) else x for x in flat]
    leaves = [x for x in flat if isinstance(x, torch.Tensor)]
    if not leaves:
        raise ValueError(
            f"the batch holds no tensor: inputs is {type(inputs).__name__}. Pass a tensor, a tuple of them or "
            "a mapping."
        )
    for x in leaves:
        if x.is_nested or x.layout != torch.strided:
            what = "nested" if x.is_nested else "sparse"
            raise ValueError(
                f"the batch holds a {what} tensor ({x.layout}): pass a dense one, padded where lengths differ, with a "
                "mask"
            )
    tensors = tuple(i for i, x in enumerate(flat) if isinstance(x, torch.Tensor))
    constants = tuple((i, x) for i, x in enumerate(flat) if not isinstance(x, torch.Tensor))
    positional = len(tree[0])
    names = tuple(_leaf_name(i, positional, tree) for i in range(len(leaves)))
    return leaves, BatchForm(spec, constants, tensors, names)


def _leaf_name(index: int, positional: int, tree: Any) -> str:
    """A leaf as messages name it; exact for flat batches, by number for nested ones."""
    names = [f"input {i}" for i in range(positional)] + [f"input {k!r}" for k in tree[1]]
    flat_inputs = [x for x in (*tree[0], *tree[1].values()) if isinstance(x, torch.Tensor)]
    if len(flat_inputs) == len(names):
        return names[index] if index < len(names) else f"target leaf {index - len(names)}"
    return f"tensor leaf {index}"


def batch_size(leaves: Sequence[torch.Tensor], form: BatchForm) -> int:
    """The number of samples: dimension 0 of every leaf that has dimensions. Raises ValueError where they differ."""
    size: int | None = None
    first = ""
    for leaf, name in zip(leaves, form.names, strict=True):
        if leaf.dim() == 0:
            continue  # a scalar is the same for every micro-batch
        if size is None:
            size, first = leaf.shape[0], name
        elif leaf.shape[0] != size:
            raise ValueError(
                f"the batch can't be cut into micro-batches: {first} has {size} samples and {name} has {leaf.shape[0]} "
                f"(shape {tuple(leaf.shape)}). Dimension 0 is the batch; put a tensor that is no part of the "
                "batch into a buffer of the model."
            )
    if size is None:
        raise ValueError("the batch can't be cut into micro-batches: all of its tensors are scalars")
    return size


def split_batch(leaves: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[list[torch.Tensor]]:
    """One list of leaves a micro-batch: views of the batch along dimension 0, scalars whole."""
    pieces = [torch.split(leaf, list(sizes)) if leaf.dim() else [leaf] * len(sizes) for leaf in leaves]
    return [[p[m] for p in pieces] for m in range(len(sizes))]


def shape_key(leaves: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Shape, stride and dtype of each leaf: what a static capture depends on."""
    return tuple((tuple(t.shape), t.stride(), t.dtype) for t in leaves)
