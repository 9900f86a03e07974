"""Functions that numba compiles: the search times orders millions of times.

Compiled on first use, never at import, and cached beside the module (or in the user's cache directory where
that can't be written), so that a machine compiles once: about ten seconds. A wheel can't ship the result,
which depends on the processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Kernel = TypeVar("Kernel", bound=Callable[..., object])


def compiled(function: Kernel) -> Kernel:
    """The function, compiled for the types of its arguments. It must not make arrays: without the counting of
    references that this would need, kernels that pass many arrays about run up to four times faster. Floats
    keep their IEEE meaning, so that a search gives the same answer on every machine."""
    options: dict[str, Any] = {"cache": True, "error_model": "numpy", "_nrt": False}
    return cast(Kernel, numba.njit(**options)(function))
