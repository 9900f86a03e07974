"""What a user sees of a run: one text as it comes, several as they are over, and figures at the end.

Texts go to standard output, everything else to standard error: so the output can be piped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from ..generation import RankFigures, Result, StreamFigures, Token

_WHY = {
    "length": "as long as asked",
    "end": "the text ended",
    "stop": "a stop text came",
    "cancelled": "cancelled",
    "": "not over",
}


class Show:
    """prompts: their texts, by number. as_json: a line of JSON a prompt instead."""

    def __init__(self, prompts: Sequence[str], *, as_json: bool) -> None:
        self._prompts = prompts
        self._json = as_json
        self._streams = len(prompts) == 1 and not as_json
        if self._streams:
            self._write(prompts[0])

    def token(self, token: Token) -> None:
        if self._streams:
            self._write(token.text)

    def result(self, result: Result) -> None:
        """A prompt is over (or, after a failure, isn't)."""
        if self._json:
            self._write(json.dumps({**asdict(result), "prompt": self._prompts[result.index]}) + "\n")
        elif self._streams:
            self._write("\n")
        else:
            count = f"{len(result.tokens)} token{'s' * (len(result.tokens) != 1)}"
            self._write(f"── prompt {result.index}: {count}, {_WHY[result.stopped]}\n")
            self._write(f"{self._prompts[result.index]}{result.text}\n\n")

    def figures(self, figures: StreamFigures) -> None:
        """The end of a run."""
        print(
            f"{figures.tokens} tokens in {figures.seconds:.2f} s: {figures.tokens_per_second:.1f} a second",
            file=sys.stderr,
        )
        for stage, rank in enumerate(figures.ranks):
            print(f"stage {stage}: {_rank(rank)}", file=sys.stderr)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _rank(rank: RankFigures) -> str:
    busy = rank.busy / rank.seconds if rank.seconds else 0.0
    return (
        f"{_size(rank.weight_bytes)} of weights; caches at most {_size(rank.cache_bytes)}, {_size(rank.left_bytes)} "
        f"left; busy {busy:.0%}"
    )


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
