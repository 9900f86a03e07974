"""transformers asks whether it is being traced, and then builds its masks, and runs its experts, in a form that can be.

Nothing here imports it: who has not loaded transformers needs no answers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

#: (module, name of a function) -> what stands for it
_Answers = dict[tuple[Any, str], Any]


def traced(*, packed: bool) -> contextlib.AbstractContextManager[None]:
    """While open, all of transformers hears yes. packed: the user says where words stand, so that several texts may lie
    in one row; if not, attention needs no mask for that, and stays causal without one."""
    answers: _Answers = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and callable(getattr(module, "__dict__", {}).get("is_tracing")):
            answers[module, "is_tracing"] = lambda *_a, **_k: True
    if (experts := sys.modules.get("transformers.integrations.moe")) is not None:
        answers[experts, "is_torchdynamo_compiling"] = lambda: True
    if (masks := sys.modules.get("transformers.masking_utils")) is not None and not packed:
        answers[masks, "find_packed_sequence_indices"] = lambda *_a, **_k: None
    return _answering(answers)


def masked(masks: bool) -> contextlib.AbstractContextManager[None]:
    """While open, attention masks are built in a form that can be traced; without masks, where none is needed, they are
    left out, as when nothing is traced."""
    module = sys.modules.get("transformers.masking_utils")
    names = ("is_tracing",) if masks else ("is_tracing", "is_torchdynamo_exporting")
    return _answering({(module, name): lambda *_a, **_k: masks for name in names})


@contextlib.contextmanager
def _answering(answers: _Answers) -> Iterator[None]:
    before = {
        (module, name): module.__dict__[name]
        for module, name in answers
        if module is not None and name in module.__dict__
    }
    try:
        for module, name in before:
            setattr(module, name, answers[module, name])
        yield
    finally:
        for (module, name), function in before.items():
            setattr(module, name, function)
