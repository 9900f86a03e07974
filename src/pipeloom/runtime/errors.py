"""What can go wrong while a step runs, each as an error that says where.

JobError       a job of this rank raised
TransferError  a message of this rank could not be sent or received
PeerError      another rank failed, is gone, or stalled: names the rank, its job and the cause
StuckError     in-memory ranks all wait for messages that nobody will send
"""

from __future__ import annotations

from collections.abc import Sequence


class StepError(RuntimeError):
    """The root of everything that a running step raises by itself."""


class JobError(StepError):
    """A job raised. The cause is chained (`__cause__`)."""

    def __init__(self, rank: int, job: str, cause: BaseException):
        super().__init__(f"rank {rank}: job {job} failed: {describe(cause)}")
        self.rank = rank
        self.job = job


class TransferError(StepError):
    """A message failed. `peer` is the other rank; `timed_out` tells a stalled peer from a closed connection. others:
    ranks that may be to blame as well as the peer, in what more than two ranks do together."""

    def __init__(
        self,
        rank: int,
        peer: int,
        what: str,
        reason: str,
        timed_out: bool = False,
        others: Sequence[int] = (),
    ):
        peers = f"peer: rank {peer}" if not others else f"peers: ranks {', '.join(map(str, (peer, *others)))}"
        super().__init__(f"rank {rank}: {what} ({peers}): {reason}")
        self.rank = rank
        self.peer = peer
        self.what = what
        self.reason = reason
        self.timed_out = timed_out
        self.others = tuple(others)

    def during(self, what: str) -> TransferError:
        """The same failure with a better name for the message, known to the caller alone."""
        return TransferError(self.rank, self.peer, what, self.reason, self.timed_out, self.others)


class PeerError(StepError):
    """Another rank ended the step. `failed_rank`, `job` and `cause` are that rank's."""

    def __init__(self, rank: int, failed_rank: int, job: str, cause: str, waiting: str):
        place = f" in job {job}" if job else ""
        super().__init__(
            f"rank {rank}: stopped because rank {failed_rank} failed{place}: {cause} [{waiting}]"
        )
        self.rank = rank
        self.failed_rank = failed_rank
        self.job = job
        self.cause = cause


class StuckError(StepError):
    """No in-memory rank can go on."""


def describe(error: BaseException) -> str:
    """One line: the type and the first line of the message of an exception."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
