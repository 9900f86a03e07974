"""One rank of a training run: `python -m pipeloom.training.rank ORDER`, where ORDER is the launcher's JSON.

Why so: each rank is a process that anyone can look at, start by hand and kill. Before it imports anything
heavy, it makes sure that it won't outlive its launcher. It turns errors into one line and an exit code: 2
for what can't be run (told by the first rank alone, since all find the same), 1 for a failure, 130 for an
interrupt.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

from ..strategy import StrategyError
from .config import ConfigError, TrainConfig

INTERRUPTED = 130
_PR_SET_PDEATHSIG = 1


def run(order: str) -> int:
    """Run this process's rank to its end; gives the exit code."""
    # Capture saves and restores torch's settings, and torch remarks on one that this machine doesn't have.
    warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")
    values = json.loads(order)
    rank = os.environ.get("RANK", "0")
    try:
        from ..runtime.errors import JobError, PeerError
        from .data import DataError
        from .loop import train
    except KeyboardInterrupt:
        return INTERRUPTED
    try:
        config = TrainConfig.from_tables(values["tables"])
        resume = None if values["resume"] is None else Path(values["resume"])
        return train(config, resume, plain=values["plain"])
    except (ConfigError, StrategyError, DataError) as error:
        if rank == "0":
            print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except PeerError as error:  # the failing rank tells the rest
        print(f"error: {error}", file=sys.stderr)
        return 1
    except JobError as error:
        traceback.print_exception(error.__cause__)
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        traceback.print_exc()
        print(f"rank {rank} failed: {error}", file=sys.stderr)
        return 1


def die_with_parent(parent: int) -> None:
    """Kill this process when `parent`, its parent's process id, is gone: by the kernel on Linux, elsewhere
    by a thread that looks once a second."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0:
            if os.getppid() != parent:  # it died before we asked
                os._exit(1)
            return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch-launcher").start()


def main() -> int:
    """The process's entry."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, until the loop takes over
    die_with_parent(int(os.environ.get("PIPELOOM_LAUNCHER", os.getppid())))
    code = run(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
