"""Every op of torch that has a gradient, by torch's own table of samples, cut between two stages with split backwards.

Nightly: five minutes. The table is a private part of torch, which needs the package `expecttest`.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import parity
from parity import Deep, eager_outcome, pipe_outcome, pipeline
from pipeloom.program.capture import CaptureError
from pipeloom.strategy import Strategy

PARTS, SAMPLES = 8, 5
STRATEGY = Strategy(pp_degree=2, schedule_mode="ZBH1", accumulate_steps=1, costs="roofline")
BATCH = torch.ones(2, dtype=torch.double)
#: with some of their samples: shapes, or decisions, that depend on values; sparse gradients
REFUSED = {
    *(
        "combinations",
        "corrcoef",
        "cov",
        "index_fill",
        "index_put",
        "linalg.lstsq",
        "masked_select",
        "narrow",
    ),
    *("nn.functional.embedding", "repeat_interleave", "tensor_split"),
}


class One(nn.Module):
    """One op, whose tensors are parameters times what comes before, and whose results are added up."""

    def __init__(self, op: Any, sample: Any) -> None:
        super().__init__()
        leaves, self.form = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.op, self.plain, self.weights = op, [], nn.ParameterDict()
        for number, leaf in enumerate(leaves):
            self.plain.append(None if isinstance(leaf, Tensor) else leaf)
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.weights[str(number)] = nn.Parameter(leaf.detach().clone())
            elif isinstance(leaf, Tensor):
                self.register_buffer(f"tensor{number}", leaf.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        total, leaves = x.mean(), list(self.plain)
        for number in range(len(leaves)):
            if str(number) in self.weights:
                leaves[number] = self.weights[str(number)] * total
            elif hasattr(self, f"tensor{number}"):
                leaves[number] = getattr(self, f"tensor{number}")
        given, args, kwargs = pytree.tree_unflatten(leaves, self.form)
        for number, result in enumerate(pytree.tree_leaves(self.op(given, *args, **kwargs))):
            if isinstance(result, Tensor) and (result.is_floating_point() or result.is_complex()):
                real = torch.view_as_real(result) if result.is_complex() else result
                each = torch.cos(torch.arange(real.numel(), dtype=real.dtype).reshape(real.shape) + number)
                total = total + (torch.where(torch.isfinite(real), real, 0.0) * each).sum()
        return total


def verdict(model: nn.Module) -> str:
    """ "" if the pipeline's loss and gradients are eager PyTorch's, or there are none."""
    batch = ((BATCH,), None)
    case = Deep(model, None, lambda _: batch)
    try:
        reference = eager_outcome(case, batch, [2])
    except Exception:
        return ""  # the op has no derivative here
    if not reference.gradients:
        return ""
    try:
        outcome = pipe_outcome(pipeline(case, STRATEGY, BATCH), batch)
    except CaptureError:
        return "refused"
    outcome.gradients = {n: g for n, g in outcome.gradients.items() if n in reference.gradients or g.any()}
    error = outcome.error(reference)
    exact = torch.equal(outcome.loss, reference.loss)  # the op may have made a loss of 0
    return "" if error <= 1e-9 or (exact and error != error) else f"off by {error:.1e}"


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_an_op_between_two_stages_is_eager_pytorchs(part: int) -> None:
    pytest.importorskip("expecttest", reason="torch's table of ops needs it: pip install expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    ops = [op for op in op_db if torch.double in op.dtypes and op.supports_autograd][part::PARTS]
    found: dict[str, str] = {}
    for op in ops:
        torch.manual_seed(0)
        random.seed(0)
        samples = list(op.sample_inputs("cpu", torch.double, requires_grad=False))
        for sample in samples[:: max(1, len(samples) // SAMPLES)][:SAMPLES]:
            if (said := verdict(One(op.op, sample))) and not (said == "refused" and op.name in REFUSED):
                found[f"{op.name} {op.variant_test_name}".strip()] = said
        parity._PROGRAMS.clear()
        parity._MAKERS.clear()
    assert len(ops) > 50
    assert found == {}
