"""Two ranks on this machine: one thread each, Gloo over loopback, gone when the benchmark is.

Ranks meet at a store that the starting process keeps, on a port that the system chooses. What rank 0's function
returns comes back as JSON through a file. A rank that raises ends both; so does the time-out; so does the end
of the starting process.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pipeloom.training.rank import die_with_parent
from setting import RANKS

Work = Callable[..., dict[str, Any]]


def both_ranks(
    work: Work, *arguments: Any, timeout: float, environment: Mapping[str, str] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """work(*arguments) on both ranks, as a collective call; what each returned, by rank. `work` is a function
    of a module. environment: variables of their processes. Raises TimeoutError after `timeout` seconds, and what
    torch.multiprocessing raises where a rank fails."""
    wanted = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        order = (os.getpid(), store.port, folder, timeout, work, arguments)
        with mock.patch.dict(os.environ, wanted):
            context = mp.spawn(_rank, order, nprocs=RANKS, join=False)
        deadline = monotonic() + timeout
        try:
            while not context.join(timeout=1.0):
                if monotonic() > deadline:
                    raise TimeoutError(
                        f"the ranks were not done within {timeout:g} s; give a longer --timeout"
                    )
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(RANKS)]


def _rank(
    rank: int, parent: int, port: int, folder: str, timeout: float, work: Work, arguments: tuple[Any, ...]
) -> None:
    die_with_parent(parent)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=timeout)
    )
    found = work(*arguments)
    (Path(folder) / str(rank)).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
