"""Starting the ranks of a run on this machine, and leaving none behind.

Takes a checked TrainConfig, gives the run's exit code. Ranks are started by torch's elastic launcher, the
one behind torchrun; under an existing torchrun (RANK is set) or with one stage this process is the rank.
Each rank runs `python -m pipeloom.training.rank` and asks the kernel to be killed when the launcher dies,
however it dies.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import uuid
from pathlib import Path

from .config import TrainConfig
from .rank import INTERRUPTED, die_with_parent, run

#: seconds that ranks have to finish their step and save it, after the launcher was asked to stop
GRACE = 60


def launch(config: TrainConfig, resume: Path | None = None, *, plain: bool | None = None) -> int:
    """Run `config` on one rank a stage; wait for the end. Returns 0; 130 if interrupted; 2 for what can't be
    run; 1 for a failure, whose message the failing rank has printed."""
    order = json.dumps({"tables": config.to_tables(), "resume": resume and str(resume), "plain": plain})
    if "RANK" in os.environ:
        die_with_parent(os.getppid())
        return run(order)
    if config.strategy.pp_degree == 1:
        return run(order)
    from .data import Corpus, DataError

    try:
        Corpus.load(config.text)  # each rank reads it; one that can't be read is told before any is started
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return start_ranks("pipeloom.training.rank", config.strategy.pp_degree, order)


def start_ranks(module: str, ranks: int, order: str) -> int:
    """Run `python -m MODULE ORDER` once a rank; wait for the end. Exit codes as in `launch`."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Each rank tells its own failure in words; the launcher's report of exit codes would bury it.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the machine's cores
    os.environ["PIPELOOM_LAUNCHER"] = str(os.getpid())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        shutdown_timeout=GRACE,
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, order)
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        return next((code for code in (INTERRUPTED, 2) if code in codes), 1)
    except (SignalException, KeyboardInterrupt):
        return INTERRUPTED
    return 0
