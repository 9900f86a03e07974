"""The table of docs/correctness.md: what breaks in pipeline libraries, run on real ranks of this machine.

    python bench/correctness.py                          # all cases, both systems
    python bench/correctness.py --case 11 --case 13
    python bench/correctness.py --write docs/correctness.md

Each case runs in fresh processes (Gloo over loopback), once by torch.distributed.pipelining and once by pipeloom, since
a failure often ends a process or leaves one waiting; what they give is compared with plain PyTorch in one process. The
cases are in cases.py. A page that is written keeps its text; the table stands between two marks.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from cases import CASES, Answer, Case, merged
from pipeloom.training.rank import die_with_parent

BEGIN, END = "<!-- table: bench/correctness.py -->", "<!-- end of table -->"
#: seconds: what isn't done by then waits for ever
PATIENCE = 90.0


def outcome(number: int, system: str) -> str:
    """What a system makes of a case, in a few words."""
    case = CASES[number]
    if system == "torch" and isinstance(case.torch, str):
        return case.torch
    answers = run(number, system, case.ranks)
    if isinstance(answers, str):
        return answers
    oracle = case.our_oracle if system == "ours" and case.our_oracle is not None else case.oracle
    return case.judge(merged(answers), oracle())


def run(number: int, system: str, size: int) -> list[Answer] | str:
    """What each rank answers; or what became of them."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *_flags(rank, number, system, folder)],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=(Path(folder) / f"error{rank}").open("w"),
            )
            for rank in range(size)
        ]
        late = not _ended(ranks)
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
        told = [_told(Path(folder), rank, process.returncode) for rank, process in enumerate(ranks)]
        if late:
            return f"hangs (looked at for {PATIENCE:g} s)"
        if any(told):
            return _all_told(told)
        return [torch.load(Path(folder) / f"answer{rank}", weights_only=True) for rank in range(size)]


def _flags(rank: int, number: int, system: str, folder: str) -> list[str]:
    values = {"rank": rank, "index": number, "system": system, "folder": folder, "parent": os.getpid()}
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def _ended(ranks: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Waits until all ranks are gone; once one has failed, the others have a few seconds more."""
    deadline = time.monotonic() + PATIENCE
    while any(process.poll() is None for process in ranks):
        if any(process.poll() for process in ranks):
            deadline = min(deadline, time.monotonic() + 15)
        if time.monotonic() > deadline:
            return any(process.poll() for process in ranks)
        time.sleep(0.05)
    return True


def _told(folder: Path, rank: int, code: int) -> str:
    """How a rank failed: the error that it raised, or the signal that ended it; "" where it didn't."""
    if code == 0:
        return ""
    if code < 0:
        name = signal.Signals(-code).name
        return "killed" if name == "SIGKILL" else name
    text = (folder / f"error{rank}").read_text(errors="replace")
    raised = re.findall(r"^(?:\[rank\d+\]: )?[\w.]*?(\w+(?:Error|Exception): .+)$", text, re.MULTILINE)
    said = raised[-1] if raised else "it ended"
    if "Connection closed by peer" in said or "Read error" in said:
        return "connection lost"
    return re.sub(r"\[[^\]]*/[^\]]*\] ", "", said)[:160]


def _all_told(told: Sequence[str]) -> str:
    """Each rank's failure; once where all failed alike."""
    if len(set(told)) == 1:
        return f"every rank: {told[0]}"
    return "; ".join(f"rank {rank}: {said}" for rank, said in enumerate(told) if said)


def work(rank: int, number: int, system: str, folder: Path) -> None:
    """One rank of one case."""
    case = CASES[number]
    store = dist.FileStore(str(folder / "store"), case.ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=case.ranks, timeout=timedelta(seconds=PATIENCE)
    )
    torch.set_num_threads(1)
    runs = case.torch if system == "torch" else case.ours
    assert callable(runs)
    answer = runs(rank, case.ranks)
    torch.save(answer, folder / f"answer{rank}")
    dist.barrier()
    os._exit(0)  # threads of a process group must not decide how a rank ends


def row(case: Case, torchs: str, ours: str) -> str:
    cells = [str(case.number), case.title, torchs, ours]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case", type=int, action="append", help="a case's number; may be given several times"
    )
    parser.add_argument("--write", type=Path, help="the page whose table is to be written anew")
    for name, kind in (("rank", int), ("index", int), ("system", str), ("folder", Path), ("parent", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.rank is not None:
        die_with_parent(options.parent)
        work(options.rank, options.index, options.system, options.folder)
        return
    rows = ["| | case | torch.distributed.pipelining | pipeloom |", "|---|---|---|---|"]
    print(*rows, sep="\n")
    for number, case in enumerate(CASES):
        if not options.case or case.number in options.case:
            rows.append(row(case, outcome(number, "torch"), outcome(number, "ours")))
            print(rows[-1], flush=True)
    if options.write is not None:
        before, _, rest = options.write.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        versions = f"torch {torch.__version__.split('+')[0]}, two cores, Gloo over loopback."
        options.write.write_text("\n".join([before + BEGIN, "", versions, "", *rows, "", END]) + after)


if __name__ == "__main__":
    main()
