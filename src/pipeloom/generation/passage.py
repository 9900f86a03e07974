"""A scope's way through the pipeline, as each rank keeps track of it: which prompts, which tokens, what comes next.

A scope has one prompt, or several that go together as rows of one batch, padded on the left. Every rank is told each
token, so every rank knows the next step's ids: only the hidden state has to be sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .request import Request
from .spec import GenerationSpec

#: what rows are padded with, and fed once they have stopped: any token will do, nobody looks at what comes of it
_PAD = 0


class Passage:
    """One scope. rows: its prompts. past: positions that the caches hold. tokens[r], stopped[r]: a row's new tokens,
    and why it has ended ("" while it goes on)."""

    def __init__(self, rows: Sequence[Request], spec: GenerationSpec, device: torch.device) -> None:
        self.rows = tuple(rows)
        self.tokens: list[list[int]] = [[] for _ in rows]
        self.stopped = [""] * len(rows)
        self.past = 0
        self._spec = spec
        self._device = device
        width = max(len(row.ids) for row in rows)
        padded = [[_PAD] * (width - len(row.ids)) + list(row.ids) for row in rows]
        #: ids of the next step; without a cache all ids so far
        self._ids = torch.tensor(padded, dtype=torch.int64, device=device)

    @property
    def over(self) -> bool:
        return all(self.stopped)

    def lengths(self) -> Tensor:
        """Ids of each prompt, int64 (rows,)."""
        return torch.tensor([len(row.ids) for row in self.rows], dtype=torch.int64, device=self._device)

    def feed(self) -> Tensor:
        """The ids of the next step, int64 (rows, q)."""
        if self._spec.window is not None:
            return self._ids[:, -self._spec.window :]
        return self._ids

    def fed(self) -> None:
        """The step was run: the cache holds its ids."""
        if self._spec.cached:
            self.past += self._ids.shape[1]

    def take(self, tokens: Sequence[int], stopped: Sequence[str]) -> None:
        """The tokens that were chosen for the rows, and why rows end with them. A row that was cancelled has −1."""
        for row, (token, why) in enumerate(zip(tokens, stopped, strict=True)):
            if self.stopped[row]:
                continue
            if token >= 0:
                self.tokens[row].append(token)
            self.stopped[row] = why
        column = [[max(token, _PAD)] for token in tokens]
        new = torch.tensor(column, dtype=torch.int64, device=self._device)
        self._ids = new if self._spec.cached else torch.cat([self._ids, new], 1)


def grouped(requests: Sequence[Request], batch: int) -> list[list[Request]]:
    """The prompts in scopes of `batch` rows each; the last may have fewer."""
    return [list(requests[i : i + batch]) for i in range(0, len(requests), batch)]
