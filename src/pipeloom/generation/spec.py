"""GenerationSpec: what a model must say so that its generation can be cut into stages.

Why so: every family of models has its own signature and its own cache. A spec reduces them to one function, a
step, over a flat cache of plain tensors; from there on, which chunk owns which part of the cache falls out of
dataflow, and nothing else knows the model. A model without a cache needs `step` alone and is run by recomputing.

The adapter for transformers models is in `transformers.py`; `recomputing` makes the spec of a plain module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..program import compat


class GenerationError(ValueError):
    """A spec, a model or a prompt that can't be generated with; says which, and what to do."""


@dataclass(frozen=True)
class GenerationSpec:
    """How a model makes the next token. B rows, q new ids a row, T positions in the cache.

    step(model, ids, start, cache, consts) → (logits, cache). ids: int64 (B, q). start: int64, 0-dim: the position of
    ids[:, 0], which equals T. cache: the pytree of `init_cache`, grown by earlier steps; returned with T + q
    positions in the same form (or, where `grow_dim` is None, changed in place and not looked at). logits: float
    (B, vocabulary), of the last position. consts: what `scope_inputs` returned. It must be traceable: no branch on
    values, and no state that is kept from call to call.

    init_cache(batch, device, dtype) → pytree of tensors with no positions yet; dimension 0 is the batch. None: the
    model has no cache; each step then gets all ids so far, at start 0, with cache None.

    scope_inputs(lengths) → pytree of tensors, or None: constants of a scope, such as left padding, made once when it
    starts. lengths: int64 (B,), ids of each row; rows are padded on the left to the longest. Dimension 0 is the
    batch. Field None: such a model takes one prompt a scope.

    grow_dim: the dimension of every cache leaf that grows by q a step; None: the leaves keep their size.
    max_len: the most positions there may be, prompt and new ids together; None: no limit.
    window: without a cache: only the last `window` ids are run, so that a text may grow beyond the positions that a
    model has; None: all of them.
    dtype: of caches. masks: whether attention needs its mask written out (sliding windows); see `compat.export_step`.
    """

    step: Callable[[nn.Module, Tensor, Tensor, Any, Any], tuple[Tensor, Any]]
    init_cache: Callable[[int, torch.device, torch.dtype], Any] | None
    scope_inputs: Callable[[Tensor], Any] | None = None
    grow_dim: int | None = None
    max_len: int | None = None
    window: int | None = None
    dtype: torch.dtype = torch.float32
    masks: bool = False

    def __post_init__(self) -> None:
        for name in ("max_len", "window"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise GenerationError(
                    f"GenerationSpec: {name}={value!r}: write a whole number of at least 1, or None"
                )
        if self.window is not None and self.init_cache is not None:
            raise GenerationError(
                "GenerationSpec: window is for a model without a cache, and this one has init_cache: its cache holds "
                "positions that a window would have to forget. Leave one of them out."
            )

    @property
    def cached(self) -> bool:
        return self.init_cache is not None

    def new_cache(self, batch: int, device: torch.device) -> list[tuple[str, Tensor]]:
        """The leaves of a fresh cache by name, in order. Raises GenerationError for what no cache can be."""
        if self.init_cache is None:
            return []
        leaves, _ = compat.named_leaves(self.init_cache(batch, device, self.dtype), "cache")
        for name, leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise GenerationError(
                    f"init_cache: {name} is {type(leaf).__name__}, where a cache holds tensors alone"
                )
            if leaf.dim() == 0 or leaf.shape[0] != batch:
                raise GenerationError(
                    f"init_cache: {name} has shape {tuple(leaf.shape)} for a batch of {batch}: dimension 0 must be it"
                )
            if self.grow_dim is not None and not 0 < self.grow_dim < leaf.dim():
                raise GenerationError(
                    f"init_cache: {name} has shape {tuple(leaf.shape)}: it has no dimension grow_dim={self.grow_dim} "
                    "beside the batch"
                )
            if self.grow_dim is not None and leaf.shape[self.grow_dim] != 0:
                raise GenerationError(
                    f"init_cache: {name} has shape {tuple(leaf.shape)}: a new cache has no positions yet, so dimension "
                    f"{self.grow_dim} must be 0"
                )
        return leaves

    def check_lengths(self, what: str, length: int, new: int) -> None:
        """Raises GenerationError for a prompt of `length` ids with `new` more that can't be run. what: names it."""
        if length == 0:
            raise GenerationError(f"{what} is empty: a model goes on from at least one token")
        if new < 1:
            raise GenerationError(f"{what}: max_new_tokens={new}: write at least 1")
        if self.max_len is not None and length + new > self.max_len:
            raise GenerationError(
                f"{what} is too long: {length} tokens and {new} new ones make {length + new}, and the model has "
                f"{self.max_len} positions. Shorten it, or lower max_new_tokens to {max(self.max_len - length, 0)}."
            )


def recomputing(max_len: int | None = None, window: int | None = None) -> GenerationSpec:
    """The spec of a module that maps int64 ids (B, T) to logits (B, T, vocabulary) and has no cache: every step runs
    all ids so far (the last `window` of them). An output with `.logits`, or a tuple that begins with them, will do."""

    def step(model: nn.Module, ids: Tensor, start: Tensor, cache: Any, consts: Any) -> tuple[Tensor, Any]:
        del start, cache, consts
        return logits_of(model(ids))[:, -1], None

    return GenerationSpec(step, None, max_len=max_len, window=window)


def logits_of(output: Any) -> Tensor:
    """The logits in what a language model returns."""
    if isinstance(output, Sequence):
        output = output[0]
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise GenerationError(
            f"the model returned {type(output).__name__}, in which no logits were found: write a GenerationSpec whose "
            "step picks them out"
        )
    return found
