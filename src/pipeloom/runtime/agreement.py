"""What ranks compare before they send anything: programs, plans, and each step's batch.

A rank that captured another graph, or was handed another batch, would leave its peers waiting for messages of
other sizes: a hang or a crash far from the cause. So each says in a line what it has, and a difference is an
error on every rank that names both sides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from . import tags
from .errors import StepError
from .stepping import Work, exchange
from .transport import Transport

_TEXT = 2048
_SAMPLES = 64


class DisagreementError(StepError):
    """Two ranks of one pipeline don't have the same program, plan or batch."""


def gather(transport: Transport, numbers: Sequence[float]) -> Work[list[list[float]]]:
    """Every rank's numbers (as many on each), float64. A collective call."""
    mine = torch.tensor(list(numbers), dtype=torch.float64)
    rows = yield from exchange(transport, tags.AGREEMENT, mine, [tuple(mine.shape)] * transport.size)
    transport.flush()
    return [row.tolist() for row in rows]


def tell(transport: Transport, text: str | None) -> Work[str]:
    """Rank 0's text, on every rank. text: None elsewhere. A collective call."""
    mine = (
        torch.frombuffer(bytearray((text or "").encode()), dtype=torch.uint8)
        if text
        else torch.empty(0, dtype=torch.uint8)
    )
    lengths = yield from gather(transport, [float(len(mine))])
    shapes = [(int(row[0]),) for row in lengths]
    rows = yield from exchange(transport, tags.AGREEMENT, mine, shapes)
    transport.flush()
    return bytes(rows[0].tolist()).decode()


def compare(transport: Transport, what: str, line: str) -> Work[None]:
    """Raises DisagreementError on every rank unless all ranks gave the same line. A collective call."""
    if transport.size == 1:
        return
    text = line.encode()[:_TEXT]
    mine = torch.zeros(_TEXT, dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = yield from exchange(transport, tags.AGREEMENT, mine, [(_TEXT,)] * transport.size)
    transport.flush()
    lines = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
    for rank, other in enumerate(lines):
        if other != lines[0]:
            raise DisagreementError(
                f"rank {transport.rank}: ranks 0 and {rank} don't have the same {what}:\n  rank 0: "
                f"{lines[0]}\n  rank {rank}: {other}\n"
                "All ranks of a pipeline must build the same model (same class, sizes and training mode), "
                "strategy and batch."
            )


def compare_batches(transport: Transport, leaves: Sequence[Tensor]) -> Work[None]:
    """Raises DisagreementError unless all ranks hold the same batch: shapes, dtypes and a sample of the
    values. Cheap: one message of 16 bytes a peer. A collective call."""
    if transport.size == 1:
        return
    shapes = repr([(tuple(t.shape), str(t.dtype)) for t in leaves])
    mine = torch.tensor([_number(shapes.encode()), _number(b"".join(_sample(t) for t in leaves))])
    rows = yield from exchange(transport, tags.AGREEMENT, mine, [(2,)] * transport.size)
    for rank, row in enumerate(rows):
        if row.tolist() != rows[0].tolist():
            what = "of other shapes" if int(row[0]) != int(rows[0][0]) else "with other values"
            raise DisagreementError(
                f"rank {transport.rank}: rank {rank} was given a batch {what} than rank 0 (here: {shapes}). "
                "Every rank of a pipeline takes the "
                "same batch: seed the data loader alike, and don't shard it over the pipeline's ranks."
            )


def _sample(leaf: Tensor) -> bytes:
    if leaf.is_meta or not leaf.numel():
        return b""
    flat = leaf.detach().reshape(-1)
    step = max(1, flat.numel() // _SAMPLES)
    picked = flat[::step][:_SAMPLES].cpu().contiguous()
    return picked.view(torch.uint8).numpy().tobytes()


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)
