"""The one place that knows torch's private names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import pipeloom
from models import Chain, squares
from pipeloom.program import compat
from pipeloom.program.capture import CaptureError, capture

PACKAGE = Path(pipeloom.__file__).parent


def test_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.check_torch_version()
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    with pytest.raises(RuntimeError, match=r"this is torch 2\.14\.0\. Install torch>=2\.13,<2\.14"):
        compat.check_torch_version()
    monkeypatch.setattr(torch, "__version__", "2.130.0")
    with pytest.raises(RuntimeError):
        compat.check_torch_version()


def test_a_failed_capture_does_not_poison_the_next() -> None:
    class Item(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.layer(x).sum().item()

    example = (torch.randn(4, 8), torch.randn(4, 8))
    for _ in range(3):
        with pytest.raises(CaptureError):
            capture(Item(), squares, example=example)
    assert len(capture(Chain(2), squares, example=example).gradients()) == 4
    assert float(torch.ones(2).sum()) == 2  # no fake mode is left open


def test_checkpoint_is_itself_again_after_a_capture() -> None:
    import torch.utils.checkpoint as module

    before = (module.CheckpointFunction, module._checkpoint_without_reentrant_generator)
    capture(Chain(1), squares, example=(torch.randn(4, 8), torch.randn(4, 8)))
    assert (module.CheckpointFunction, module._checkpoint_without_reentrant_generator) == before


def _private_torch_names(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(a.name for a in node.names)]
            found += [f"{node.module} import {n}" for n in names if n.startswith("_")]
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.startswith("torch.") and "._" in a.name]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            text = ast.unparse(node)
            if text.startswith("torch._") or node.attr in (
                "_schema",
                "_cdata",
                "_parameters",
                "_buffers",
                "_modules",
            ):
                found.append(text)
    return found


def test_private_names_of_torch_are_in_compat_alone() -> None:
    for path in PACKAGE.rglob("*.py"):
        names = _private_torch_names(ast.parse(path.read_text()))
        assert (path.name == "compat.py") == bool(names), (path.name, names)
