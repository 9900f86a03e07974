"""Shared by all tests: a pool of real ranks, started once a session.

    def halves(rank, size, factor):            # top level of the test module; arguments and result: JSON
        ...

    def test_halves(ranks):
        assert ranks(halves, 2, 0.5) == [1.0, 2.0]         # one result a rank

Each call finds a fresh default process group (Gloo) of `size` ranks. An exception in a rank becomes
RanksFailed with each rank's traceback. A rank that doesn't answer within `timeout` seconds (the stacks of its
threads are shown), dies, or got no process group, is replaced by a new process. `ranks.outcomes` gives what
happened to each rank instead of raising.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

WORKER = Path(__file__).with_name("rank_worker.py")
MOST = 4
START_SECONDS = 120
BEYOND_USE = ("hung", "died", "no group")


class RanksFailed(AssertionError):
    """At least one rank raised, hung or died."""


class Outcome(NamedTuple):
    """What a rank's call ended in: a value, or the name of an exception ("hung", "died") and its text."""

    value: Any
    kind: str
    error: str
    seconds: float


class _Worker:
    def __init__(self) -> None:
        read, answers = os.pipe()
        calls, write = os.pipe()
        self.stacks = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the worker
        environment = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), str(calls), str(answers)],
            pass_fds=(calls, answers),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self.stacks,
        )
        os.close(calls)
        os.close(answers)
        self.calls = os.fdopen(write, "w")
        self.read = read
        self._text = b""
        self._ready = False

    def get_ready(self) -> None:
        """Return when the process has imported torch, so that starting it counts in nobody's time-out."""
        if not self._ready:
            answer = self.answer(time.monotonic() + START_SECONDS)
            if isinstance(answer, str):
                raise RanksFailed(f"a worker process did not start: it {answer}")
            self._ready = True

    def answer(self, deadline: float) -> dict[str, Any] | str:
        """The answer to the last call, or "hung" or "died"."""
        while b"\n" not in self._text:
            # at least 0: an answer that is there is read, however late it is asked for
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self.read], [], [], left)[0]:
                return "hung"
            piece = os.read(self.read, 1 << 16)
            if not piece:
                return "died"
            self._text += piece
        line, self._text = self._text.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def where(self) -> str:
        """The Python stacks of all threads, for a rank that hangs."""
        if self.process.poll() is not None:
            return f"it ended with exit code {self.process.returncode}"
        begin = os.fstat(self.stacks.fileno()).st_size
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        return os.pread(self.stacks.fileno(), 1 << 16, begin).decode(errors="replace")

    def end(self) -> None:
        """This process and no other, by its own handle."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.calls.close()
        os.close(self.read)
        self.stacks.close()


class Ranks:
    """Call a function on ranks 0 … size−1."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []

    def __call__(self, function: Callable[..., Any], size: int, *args: Any, timeout: float = 60) -> list[Any]:
        """What `function(rank, size, *args)` returns on each rank. Raises RanksFailed."""
        outcomes = self.outcomes(function, size, *args, timeout=timeout)
        failures = [f"rank {rank}: {o.kind}\n{o.error}" for rank, o in enumerate(outcomes) if o.kind]
        if failures:
            raise RanksFailed("\n".join(failures))
        return [o.value for o in outcomes]

    def outcomes(
        self, function: Callable[..., Any], size: int, *args: Any, timeout: float = 60
    ) -> list[Outcome]:
        """What became of each rank."""
        if not 1 <= size <= MOST:
            raise ValueError(f"the pool has 1 … {MOST} ranks, not {size}")
        while len(self._workers) < size:
            self._workers.append(_Worker())
        workers = self._workers[:size]
        for worker in workers:
            worker.get_ready()
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            for rank, worker in enumerate(workers):
                call = {
                    "file": function.__code__.co_filename,
                    "function": function.__name__,
                    "args": args,
                    "rank": rank,
                    "size": size,
                    "store": str(Path(folder) / "store"),
                    "timeout": timeout,
                }
                worker.calls.write(json.dumps(call) + "\n")
                worker.calls.flush()
            answers = [(w.answer(began + timeout), time.monotonic() - began) for w in workers]
        stacks = [w.where() if isinstance(a, str) else "" for w, (a, _) in zip(workers, answers, strict=True)]
        return [self._outcome(rank, *answers[rank], stacks[rank]) for rank in range(size)]

    def _outcome(self, rank: int, answer: dict[str, Any] | str, seconds: float, stacks: str) -> Outcome:
        if isinstance(answer, str):
            answer = {"kind": answer, "error": f"no answer after {seconds:.1f} s\n{stacks}"}
        if answer.get("kind") in BEYOND_USE:
            self._workers[rank].end()
            self._workers[rank] = _Worker()
        return Outcome(answer.get("value"), answer.get("kind", ""), answer.get("error", ""), seconds)

    def end(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()


def pytest_collection_finish() -> None:
    """What was imported so far stays: the collector needn't look through it, again and again, while models are
    captured."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    try:
        yield pool
    finally:
        pool.end()
