"""The optional extra `transformers`, imported when it is first needed."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from .spec import GenerationError


class MissingExtra(GenerationError):
    """A package that is needed here and isn't installed; says how to get it."""


def transformers(what: str) -> Any:
    """The transformers package. what: names what needs it."""
    return _package("transformers", what)


def gguf(what: str) -> Any:
    """The gguf package, by which transformers reads GGUF files."""
    return _package("gguf", what)


def _package(name: str, what: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(
            f"{what} needs {name}, which isn't installed ({error}): pip install 'pipeloom[transformers]'"
        ) from error
