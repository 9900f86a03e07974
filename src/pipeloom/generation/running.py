"""What the tasks of one rank do in a run: the programs behind start, send, recv and end.

Takes a Stage and the prompts, keeps each scope's Passage, and collects the tokens as they come. Caches lie in the
fleet's scopes, so that they are freed the moment a scope leaves the loop; `peak_bytes` says how large they got.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from time import perf_counter

import torch
from torch import Tensor

from ..fleet.scope import Scope
from ..fleet.task_node import Program
from ..program import compat
from ..runtime.stepping import Work
from .passage import Passage
from .request import Request, Result, Token, Words, Writer
from .sampling import Row
from .stage import Stage
from .stream_graph import GOES_ON


class Pause:
    """Handed out where tokens have come, so that whoever steps this rank can take them; nothing to wait for."""

    peer = 0

    def ready(self) -> bool:
        return True

    def wait(self) -> Tensor:
        return torch.empty(0)

    def __str__(self) -> str:
        return "nothing"


class Running:
    """One run on one rank.

    groups: the prompts of each scope. cancelled: numbers of prompts that are to stop; only the first stage looks.
    results: by number of the prompt, of those that are over. fresh: tokens that have come and were not taken yet.
    """

    def __init__(
        self,
        stage: Stage,
        groups: Sequence[Sequence[Request]],
        words: Words | None,
        cancelled: Collection[int],
    ) -> None:
        self.stage = stage
        self.groups = groups
        self.words = words
        self.results: dict[int, Result] = {}
        self.fresh: deque[Token] = deque()
        self.cache_bytes = 0
        self.peak_bytes = 0
        self.busy = 0.0
        self._cancelled = cancelled
        self._passages: dict[int, Passage] = {}
        self._rows: dict[int, list[Row]] = {}
        self._writers: dict[int, Writer] = {}
        self._bytes: dict[int, int] = {}
        self._began = perf_counter()

    def programs(self) -> dict[str, Program]:
        """By the names of the tasks."""
        return {"start": self.start, "send": self.send, "recv": self.recv, "end": self.end}

    def unfinished(self) -> list[Result]:
        """What the prompts that have begun, and aren't over, have got so far."""
        found = []
        for passage in self._passages.values():
            found += [self._result(passage, row) for row in range(len(passage.rows))]
        return found

    # ---- tasks

    def start(self, scope: Scope) -> None:
        """A scope begins: its cache, its constants, and on the last stage its draws."""
        rows = self.groups[scope.index]
        passage = self._passages[scope.index] = Passage(rows, self.stage.spec, self.stage.device)
        make = self.stage.spec.scope_inputs
        consts = make(passage.lengths()) if make is not None else None
        named, _ = compat.named_leaves(consts, "consts")
        scope["consts"] = {name: leaf for name, leaf in named if leaf is not None}
        scope["leaves"] = self.stage.new_cache(len(rows))
        scope[GOES_ON] = True
        if self.stage.last:
            self._rows[scope.index] = [Row(row, self.words, self.stage.device) for row in rows]
        if self.stage.first and self.words is not None:
            self._writers.update({row.index: self.words.writer() for row in rows})

    def send(self, scope: Scope) -> None:
        """This stage's layers for the scope's next ids. A scope whose rows are all cancelled passes without being
        computed."""
        passage = self._passages[scope.index]
        if self.stage.first:
            stop = [row for row, request in enumerate(passage.rows) if request.index in self._cancelled]
            gone = all(passage.stopped[row] or row in stop for row in range(len(passage.rows)))
            values: list[Tensor] | None = None if gone else []
            scope["cancelled"] = stop
        else:
            values = scope["passed"]
        if values is None:
            scope["passed"] = None
            return
        began = perf_counter()
        leaves = scope["leaves"]
        with torch.no_grad():
            scope["passed"] = self.stage.run(passage.feed(), passage.past, leaves, scope["consts"], values)
        passage.fed()
        self._count(scope.index, sum(leaf.numel() * leaf.element_size() for leaf in leaves))
        self.busy += perf_counter() - began

    def recv(self, scope: Scope) -> Work[None]:
        """The last stage chooses each row's token; the others are told."""
        passage = self._passages[scope.index]
        if self.stage.last:
            began = perf_counter()
            self._choose(scope, passage)
            self.busy += perf_counter() - began
        tokens: list[int] = scope["tokens"]
        stopped: list[str] = scope["stopped"]
        going = [row for row, why in enumerate(passage.stopped) if not why]
        passage.take(tokens, stopped)
        for row in going:
            request = passage.rows[row]
            text = self._text(request.index, tokens[row], over=bool(stopped[row]))
            position = len(passage.tokens[row]) - (tokens[row] >= 0)
            self.fresh.append(Token(request.index, position, tokens[row], text, stopped[row]))
            if stopped[row]:
                self.results[request.index] = self._result(passage, row)
        scope[GOES_ON] = not passage.over
        yield Pause()

    def end(self, scope: Scope) -> None:
        """The scope has left the loop, and its caches are freed."""
        del self._passages[scope.index]
        self._rows.pop(scope.index, None)
        self._count(scope.index, 0)

    # ---- parts

    def _choose(self, scope: Scope, passage: Passage) -> None:
        made = scope.pop("passed")
        stop: list[int] = scope["cancelled"]
        tokens: list[int] = []
        stopped: list[str] = []
        for number, row in enumerate(self._rows[scope.index]):
            if passage.stopped[number]:
                token, why = -1, passage.stopped[number]
            elif number in stop:
                token, why = -1, "cancelled"
            else:
                with torch.no_grad():
                    token, why = row.next(made[0][number : number + 1])
            tokens.append(token)
            stopped.append(why)
        scope["tokens"], scope["stopped"] = tokens, stopped

    def _text(self, prompt: int, token: int, *, over: bool) -> str:
        writer = self._writers.get(prompt)
        if writer is None:
            return ""
        text = writer.put(token) if token >= 0 else ""
        return text + writer.end() if over else text

    def _result(self, passage: Passage, row: int) -> Result:
        request = passage.rows[row]
        tokens = tuple(passage.tokens[row])
        text = self.words.decode(tokens) if self.words is not None else ""
        seconds = perf_counter() - self._began
        return Result(request.index, request.ids, tokens, text, passage.stopped[row], seconds)

    def _count(self, scope: int, nbytes: int) -> None:
        self.cache_bytes += nbytes - self._bytes.get(scope, 0)
        self._bytes[scope] = nbytes
        self.peak_bytes = max(self.peak_bytes, self.cache_bytes)


def step_figures(running: Running, seconds: float) -> list[float]:
    """What one rank has to say about a run: bytes of weights, of caches at most and now, seconds busy and in all."""
    return [
        float(running.stage.weight_bytes),
        float(running.peak_bytes),
        float(running.cache_bytes),
        running.busy,
        seconds,
    ]
