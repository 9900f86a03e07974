"""Which token comes next: the last stage's part.

Takes the logits of a step, gives a token for each row and why a row has ended. transformers' own processors and
criteria are used as they are, in the order in which its `generate` applies them, and each prompt draws from a
generator of its own: so a prompt gets the tokens of `torch.manual_seed(seed); model.generate(…)`, however the model is
cut and whatever else is under way. Taking the likeliest token, and drawing by temperature alone, need no transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .extra import transformers
from .request import Request, Words


class Row:
    """One prompt's draws. count: tokens drawn so far."""

    def __init__(self, request: Request, words: Words | None, device: torch.device) -> None:
        limits = request.limits
        self.request = request
        self.count = 0
        self._draws = limits.temperature > 0
        self._ends = frozenset(limits.ends or ())
        self._processors = processors_of(request)
        self._criteria = list(limits.criteria)
        if limits.stop and words is not None:
            self._criteria.append(words.stops(limits.stop))
        self._ids = torch.empty(
            (1, len(request.ids) + limits.max_new_tokens), dtype=torch.int64, device=device
        )
        self._length = len(request.ids)
        self._ids[0, : self._length] = torch.tensor(request.ids, dtype=torch.int64)
        self._generator = torch.Generator(device).manual_seed(limits.seed) if self._draws else None

    def next(self, logits: Tensor) -> tuple[int, str]:
        """The next token from float logits (1, vocabulary), and why the row ends with it ("" if it doesn't)."""
        scores = logits.to(torch.float32)
        ids = self._ids[:, : self._length]
        for process in self._processors:
            scores = process(ids, scores)
        if self._draws:
            chances = torch.softmax(scores, dim=-1)
            token = int(torch.multinomial(chances, 1, generator=self._generator))
        else:
            token = int(torch.argmax(scores, dim=-1))
        self._ids[0, self._length] = token
        self._length += 1
        self.count += 1
        return token, self._stopped(token, scores)

    def _stopped(self, token: int, scores: Tensor) -> str:
        if token in self._ends:
            return "end"
        ids = self._ids[:, : self._length]
        if any(bool(torch.as_tensor(criterion(ids, scores)).all()) for criterion in self._criteria):
            return "stop"
        return "length" if self.count == self.request.limits.max_new_tokens else ""


def processors_of(request: Request) -> list[Callable[[Tensor, Tensor], Any]]:
    """In the order of transformers' `generate`: penalties, the user's own, then (for draws) temperature, top-k, top-p.
    Raises MissingExtra where transformers is needed and isn't there."""
    limits = request.limits
    found: list[Callable[[Tensor, Tensor], Any]] = []
    if limits.repetition_penalty != 1.0:
        needed = transformers("repetition_penalty").generation
        found.append(needed.RepetitionPenaltyLogitsProcessor(limits.repetition_penalty))
    found += limits.processors
    if limits.temperature > 0:
        if limits.temperature != 1.0:
            found.append(lambda _, scores: scores / limits.temperature)
        if limits.top_k:
            found.append(transformers("top_k").generation.TopKLogitsWarper(limits.top_k))
        if limits.top_p is not None and limits.top_p < 1.0:
            found.append(transformers("top_p").generation.TopPLogitsWarper(limits.top_p))
    return found
