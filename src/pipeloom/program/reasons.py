"""Why a model can't be captured, in the user's words: what failed, at which line of whose code, and what to change.

Tracing fails deep inside torch; its message alone names neither the user's line nor a way out.
"""

from __future__ import annotations

import os
import re
import sysconfig
import traceback

import torch

from . import compat

_OURS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_FORM = (
    "The forward must be traceable: torch's own ops on tensors, no .item(), no branch or shape that depends on the "
    "values of a tensor."
)


def reason(error: BaseException) -> str:
    """What failed and what to do about it."""
    if (op := compat.read_value(error)) is not None:
        return (
            f"the value of a tensor is read here ({op}), but nothing has a value while a model is captured. Use "
            "torch.where or a mask in place of if, .item() and float(); what doesn't depend on the batch can be "
            "computed before."
        )
    if (op := compat.made_shape(error)) is not None and "ctc_loss" in op:
        return (
            "CTC loss is captured for log_probs of shape (time, samples, classes) and targets of shape (samples, "
            "length): pad the targets of all samples to one length, and pass target_lengths."
        )
    if (op := compat.made_shape(error)) is not None:
        return (
            f"the shape of what {op} returns depends on values, and a program's shapes are fixed. Use a mask "
            "(torch.where), topk with a fixed k, or a fixed capacity for each expert."
        )
    if compat.left_in_place(error):
        found = re.search(r"target=torch\.ops\.([\w.]+)", str(error))
        return (
            f"{found[1] if found else 'an op'} changes in place a tensor that is neither a parameter nor a buffer, nor "
            "made by the forward itself. Register it as a buffer, or work on a clone of it."
        )
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: " + "\n".join(lines[:3]) + "\n" + _FORM


def place(error: BaseException) -> str:
    """The last line that isn't torch's, Python's or pipeloom's: "model.py, line 12: return x.item()"; "" for none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        standard = frame.filename.startswith(_STANDARD) and "site-packages" not in frame.filename
        if not (standard or frame.filename.startswith(_OURS) or frame.filename.startswith("<")):
            return f"{os.path.basename(frame.filename)}, line {frame.lineno}: {frame.line}"
    return ""
