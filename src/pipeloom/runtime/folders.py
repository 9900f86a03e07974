"""Folders that appear whole or not at all, written by all ranks of a pipeline together.

A folder is written beside its place, under a name that begins with a dot, synced, and moved there when every rank is
done. A kill at any moment leaves the folder that was there before, or the new one; between the two renames of a
replacement, the old one as `.<name>.old`, where `whole_folder` looks too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from .replicas import Replicas
from .stepping import arrive, finish


@contextlib.contextmanager
def placed(group: dist.ProcessGroup | None, place: Path) -> Iterator[Path]:
    """Gives a new folder to write into; afterwards it lies at `place`, instead of what was there. A collective call of
    the group's ranks (None: one process). An error on one rank leaves `place` as it was, and is an OSError on the
    others."""
    partial = place.with_name(f".{place.name}.partial")
    first = group is None or dist.get_rank(group) == 0
    with agreed(group, f"{place}: another rank could not make a folder beside it"):
        if first:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
    with agreed(group, f"{place}: another rank could not write its part"):
        yield partial
    with agreed(group, f"{place}: another rank could not move the folder to its place"):
        if first:
            _put_in_place(partial, place)


@contextlib.contextmanager
def agreed(group: dist.ProcessGroup | None, otherwise: str) -> Iterator[None]:
    """An Exception inside, on any rank, is an error on every rank: OSError(otherwise) on those that had none."""
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    failed = mine is not None
    if group is not None:
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        flag = torch.tensor([int(failed)], device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group)
        failed = bool(flag)
    if mine is not None:
        raise mine
    if failed:
        raise OSError(otherwise)


@contextlib.contextmanager
def by_replicas(replicas: Replicas, what: str) -> Iterator[None]:
    """What all replicas do, each by itself: none goes on before all are done. An error of one is an OSError on the
    others."""
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    if replicas.size > 1:
        failed = finish(arrive(replicas.gather(torch.tensor(int(mine is not None)))))
        if mine is None and bool(failed.any()):
            raise OSError(f"replica {int(failed.argmax())} could not {what}")
    if mine is not None:
        raise mine


def whole_folder(place: Path, file: str) -> Path:
    """The folder at a place that holds `file`; the one before it, if a replacement was cut off between its renames.
    Raises FileNotFoundError."""
    for candidate in (place, place.with_name(f".{place.name}.old")):
        if (candidate / file).exists():
            return candidate
    raise FileNotFoundError(f"there is no checkpoint in {place}")


def _put_in_place(partial: Path, place: Path) -> None:
    _sync(partial)
    old = place.with_name(f".{place.name}.old")
    if place.exists():
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
    partial.rename(place)
    _sync(place.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
