"""When one rank fails, every rank ends, soon, and says which one it was and why.

The rank that raises writes (rank, job, cause) to the store, closes its connections, and stays for at most
three seconds so that the others can read the store. A rank whose transfer breaks reads the store: the record
names the culprit. No record means that the peer died without a word; then the rank writes that, and closes in
turn, so that the news runs on to those who wait for it. A peer that is alive but stalled is found by the
transport's time-out.

The first record wins: all ranks name the same culprit.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from time import monotonic, sleep
from typing import Protocol, TypeVar

from .errors import JobError, PeerError, TransferError, describe
from .transport import Transport

_ACKNOWLEDGE_SECONDS = 3.0
_RECORD_SECONDS = 0.5
#: the same where several ranks may be to blame, and those who know better may need a moment to say so
_UNSURE_SECONDS = 3.0
_POLL_SECONDS = 0.02
_KEY = "failure"
_SEEN = "failure/seen"

T = TypeVar("T")


class Store(Protocol):
    """What is used of torch.distributed's stores."""

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def get(self, key: str) -> bytes: ...

    def add(self, key: str, amount: int) -> int: ...


class FailureWatch:
    """Guards the steps of one rank. store: shared by the ranks of this pipeline and its replicas, and by nobody else
    (a PrefixStore). members: how many ranks these are; None: the transport's.
    """

    def __init__(self, store: Store, transport: Transport, members: int | None = None):
        self._store = store
        self._rank = transport.ranks[transport.rank]
        self._members = transport.size if members is None else members
        self._failed: str | None = None
        self._closes: list[Callable[[], None]] = [transport.abort]

    def also_closes(self, abort: Callable[[], None]) -> None:
        """Has further connections of this pipeline closed when it fails."""
        self._closes.append(abort)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Around everything that a rank does with its peers. Raises PeerError where another rank is to blame;
        what this rank raised itself goes through after the others were told. Afterwards the pipeline can't be
        used."""
        if self._failed is not None:
            raise RuntimeError(f"this pipeline stopped before: {self._failed}; make a new one")
        try:
            yield
        except TransferError as error:
            self._failed = str(error)
            peer_error = self._blame(error)
            self._failed = str(peer_error)
            raise peer_error from error
        except PeerError as error:  # the rank that failed has told this one already, and waits for nobody
            self._failed = str(error)
            self._ask(lambda: self._store.add(_SEEN, 1), 0)
            self._close()
            raise
        except BaseException as error:
            self._failed = describe(error)
            self._tell(error)
            raise

    def _close(self) -> None:
        for close in self._closes:
            close()

    def _tell(self, error: BaseException) -> None:
        job = error.job if isinstance(error, JobError) else ""
        cause = (
            describe(error.__cause__) if isinstance(error, JobError) and error.__cause__ else describe(error)
        )
        self._record(self._rank, job, cause)
        self._close()
        deadline = monotonic() + _ACKNOWLEDGE_SECONDS
        while monotonic() < deadline:
            seen = self._ask(lambda: self._store.add(_SEEN, 0), self._members)
            if seen >= self._members - 1:
                return
            sleep(_POLL_SECONDS)

    def _blame(self, error: TransferError) -> PeerError:
        """Who is to blame for a broken transfer; tells those who wait for this rank."""
        rank = self._rank
        record = self._find(_UNSURE_SECONDS if error.others else _RECORD_SECONDS)
        if record is None:
            if error.timed_out:
                cause = f"it has stalled: rank {rank} waited for {error.what}; {error.reason}"
            else:
                others = f" (or that of rank {', '.join(map(str, error.others))})" if error.others else ""
                cause = f"its process{others} is gone or has left the pipeline ({error.reason})"
            record = self._record(error.peer, "", cause)
        self._ask(lambda: self._store.add(_SEEN, 1), 0)
        self._close()
        failed_rank, job, cause = record
        return PeerError(rank, failed_rank, job, cause, f"rank {rank} was at: {error.what}")

    def _find(self, seconds: float) -> tuple[int, str, str] | None:
        deadline = monotonic() + seconds
        while True:
            if self._ask(lambda: self._store.check([_KEY]), False):
                return self._ask(lambda: _parsed(self._store.get(_KEY)), None)
            if monotonic() >= deadline:
                return None
            sleep(_POLL_SECONDS)

    def _record(self, rank: int, job: str, cause: str) -> tuple[int, str, str]:
        """Write a record, unless there is one; the record that counts."""
        text = json.dumps({"rank": rank, "job": job, "cause": cause})
        return self._ask(lambda: _parsed(self._store.compare_set(_KEY, "", text)), (rank, job, cause))

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        """The store may have died with the rank that kept it."""
        try:
            return question()
        except (RuntimeError, OSError):
            return otherwise


def _parsed(text: bytes) -> tuple[int, str, str]:
    record = json.loads(text)
    return int(record["rank"]), str(record["job"]), str(record["cause"])
