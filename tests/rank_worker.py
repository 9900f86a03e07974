"""The process behind one rank of the `ranks` fixture (conftest.py): waits for calls, runs them, answers.

Started as a script: `rank_worker.py READ_FD WRITE_FD`. A call is one line of JSON:
{"file", "function", "args", "rank", "size", "store", "timeout"}; the answer is {"value"} or {"error",
"kind"}. The first line of all answers says that torch is imported. Each call gets a fresh default process
group (Gloo, loopback) over a file store; "no group" is the kind of error where it couldn't be made.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib.util
import json
import os
import signal
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG = 1


class NoGroup(RuntimeError):
    """The default process group couldn't be made: torch now numbers this process's groups unlike its peers'."""


def die_with_parent() -> None:
    """No worker outlives the test run, however that ends."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux: the closed pipe ends us
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        sys.exit("the test run is gone")


def load(file: str, modules: dict[str, ModuleType]) -> ModuleType:
    """A test module, loaded once. Its folder and the tests' folder can be imported from, as pytest does it."""
    if file not in modules:
        for folder in (str(Path(__file__).parent), str(Path(file).parent)):
            if folder not in sys.path:
                sys.path.insert(0, folder)
        name = Path(file).stem
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        modules[file] = module
    return modules[file]


def run(call: dict[str, Any], modules: dict[str, ModuleType]) -> Any:
    import torch.distributed as dist

    function = getattr(load(call["file"], modules), call["function"])
    store = dist.FileStore(call["store"], call["size"])
    try:
        dist.init_process_group(
            "gloo",
            store=store,
            rank=call["rank"],
            world_size=call["size"],
            timeout=timedelta(seconds=call["timeout"]),
        )
        # A rank whose own connections stand could be done, and gone, before its peers' stand: they would fail.
        dist.barrier()
    except RuntimeError as error:
        raise NoGroup(str(error)) from error
    try:
        return function(call["rank"], call["size"], *call["args"])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def kind_of(error: BaseException) -> str:
    return "no group" if isinstance(error, NoGroup) else type(error).__name__


def main() -> None:
    die_with_parent()
    read, write = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test run, which then ends us
    faulthandler.register(signal.SIGUSR1, file=sys.stdout)  # a rank that hangs is asked where it is
    import torch

    torch.set_num_threads(1)
    modules: dict[str, ModuleType] = {}
    with os.fdopen(read) as calls, os.fdopen(write, "w") as answers:
        answers.write('{"value": "ready"}\n')
        answers.flush()
        for line in calls:
            call = json.loads(line)
            try:
                answer = json.dumps({"value": run(call, modules)})
            except BaseException as error:
                answer = json.dumps({"error": traceback.format_exc(), "kind": kind_of(error)})
            answers.write(answer + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
