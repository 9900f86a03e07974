"""A prompt with its own limits, and what became of it.

Takes what a user gives (text, ids, or a mapping with limits of its own), gives checked Requests. Every rank of a
pipeline makes the same ones, so that nothing of a prompt is ever sent.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from .spec import GenerationError

#: torch.Generator looks at 64 bits of a seed
_SEEDS = 2**63


class Words(Protocol):
    """The text of tokens: a tokenizer as generation needs it."""

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a text."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def writer(self) -> Writer:
        """Of one text that is written token by token."""
        ...

    def stops(self, strings: Sequence[str]) -> Callable[[Tensor, Any], Tensor]:
        """A criterion: (ids (1, T), scores) → bool (1,), whether the text now ends in one of the strings."""
        ...


class Writer(Protocol):
    """Gives a text piece by piece."""

    def put(self, token: int) -> str:
        """What can be shown now that this token has come: whole characters, perhaps none."""
        ...

    def end(self) -> str:
        """What was held back."""
        ...


@dataclass(frozen=True)
class Limits:
    """How a prompt is continued.

    max_new_tokens: at most so many. temperature: 0 takes the likeliest token; above, tokens are drawn, the higher the
    more freely. top_k: draw among so many likeliest (None or 0: all). top_p: among the likeliest that together have
    this probability. repetition_penalty: above 1 makes tokens that occur already less likely. seed: of the draws;
    prompt number i of several takes seed + i unless it has its own. ends: tokens that end the text; None: the
    tokenizer's. stop: texts that end it. processors: further transformers logits processors, called in turn with (ids,
    scores); criteria: further stopping criteria.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0
    ends: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    processors: tuple[Any, ...] = ()
    criteria: tuple[Any, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether nothing of transformers is needed to draw a token."""
        return not self.top_k and self.top_p in (None, 1.0) and self.repetition_penalty == 1.0

    @classmethod
    def of(cls, values: Mapping[str, Any], what: str, base: Limits | None = None) -> Limits:
        """Limits with these values changed and checked. Raises GenerationError; what: names whose they are."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, 1, 0.5)
                hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
                raise GenerationError(f"{what} has no option {name!r}: {hint}")
        tidy = dict(values)
        for name in ("stop", "ends"):
            given = tidy.get(name)
            if isinstance(given, (str, int)):
                tidy[name] = (given,)
            elif given is not None:
                tidy[name] = tuple(given)
        for name in ("processors", "criteria"):
            if tidy.get(name) is not None:
                tidy[name] = tuple(tidy[name])
        found = replace(base or cls(), **tidy)
        found._check(what)
        return found

    def _check(self, what: str) -> None:
        def bad(name: str, allowed: str) -> GenerationError:
            return GenerationError(f"{what}: {name}={getattr(self, name)!r}: write {allowed}")

        if not _whole(self.max_new_tokens) or self.max_new_tokens < 1:
            raise bad("max_new_tokens", "a whole number of at least 1")
        if not _number(self.temperature) or not 0 <= self.temperature < float("inf"):
            raise bad("temperature", "0 for the likeliest token, or a number above it")
        if self.top_k is not None and (not _whole(self.top_k) or self.top_k < 0):
            raise bad("top_k", "a whole number of at least 1, or 0 for all tokens")
        if self.top_p is not None and (not _number(self.top_p) or not 0 < self.top_p <= 1):
            raise bad("top_p", "a number above 0 and at most 1")
        if not _number(self.repetition_penalty) or self.repetition_penalty <= 0:
            raise bad("repetition_penalty", "a number above 0 (1 is none)")
        if not _whole(self.seed) or not 0 <= self.seed < _SEEDS:
            raise bad("seed", "a whole number from 0 to below 2**63")
        if self.ends is not None and not all(_whole(t) and t >= 0 for t in self.ends):
            raise bad("ends", "token numbers")
        if not all(isinstance(s, str) and s for s in self.stop):
            raise bad("stop", "texts that aren't empty")


@dataclass(frozen=True)
class Request:
    """One prompt: its number, its ids, its limits."""

    index: int
    ids: tuple[int, ...]
    limits: Limits

    @property
    def name(self) -> str:
        return f"prompt {self.index}"


@dataclass(frozen=True)
class Result:
    """What became of a prompt. tokens: the new ones. text: theirs ("" without a tokenizer). stopped: "length", "end"
    (a token that ends a text), "stop" (a text of `stop`, or a criterion of one's own), "cancelled"; "" where the run
    ended before. seconds: from the start of the run to its last token."""

    index: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    stopped: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Token:
    """One new token of a stream. prompt: number of the prompt; position: among its new tokens, from 0; id: −1 where a
    prompt was cancelled and no token came. text: what may be shown of it now. stopped: as in Result, "" while the
    prompt goes on."""

    prompt: int
    position: int
    id: int
    text: str
    stopped: str


def requests(prompts: Any, words: Words | None, options: Mapping[str, Any]) -> list[Request]:
    """Checked Requests, numbered. prompts: a text, or a list of which each is a text, ids (a list or an int64 tensor),
    or a mapping with "prompt" and limits of its own. Raises GenerationError naming the prompt."""
    base = Limits.of(options, "generate")
    given = [prompts] if isinstance(prompts, (str, Mapping, Tensor)) else list(prompts)
    if given and all(_whole(item) for item in given):
        given = [given]
    if not given:
        raise GenerationError("no prompt was given: write at least one")
    found = []
    for index, item in enumerate(given):
        what = f"prompt {index}"
        limits = replace(base, seed=base.seed + index)
        if isinstance(item, Mapping):
            own = dict(item)
            if "prompt" not in own:
                raise GenerationError(f'{what} is a mapping without "prompt": write its text or ids there')
            item = own.pop("prompt")
            limits = Limits.of(own, what, limits)
        if limits.ends is None:
            limits = replace(limits, ends=tuple(sorted(words.ends)) if words is not None else ())
        if limits.stop and words is None:
            raise GenerationError(
                f"{what}: stop needs a tokenizer, which knows the text of tokens: pass words=…"
            )
        found.append(Request(index, _ids(item, words, what), limits))
    return found


def _ids(item: Any, words: Words | None, what: str) -> tuple[int, ...]:
    if isinstance(item, str):
        if words is None:
            raise GenerationError(f"{what} is text, and there is no tokenizer: pass words=…, or give ids")
        return tuple(words.encode(item))
    if isinstance(item, Tensor):
        flat = item.flatten() if item.dim() == 2 and item.shape[0] == 1 else item
        if flat.dim() != 1 or flat.dtype not in (torch.int64, torch.int32):
            raise GenerationError(
                f"{what} is a tensor of shape {tuple(item.shape)} and dtype {item.dtype}: give int64 ids of one row"
            )
        return tuple(flat.tolist())
    if isinstance(item, Sequence) and all(_whole(i) and i >= 0 for i in item):
        return tuple(item)
    raise GenerationError(f'{what} is {type(item).__name__}: give a text, ids, or a mapping with "prompt"')


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
