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
from .replicas import Replicas
from .stepping import Work, arrive, exchange
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
    rows = yield from exchange(transport, tags.AGREEMENT, _encoded(line), [(_TEXT,)] * transport.size)
    transport.flush()
    lines = [_decoded(row) for row in rows]
    for rank, other in enumerate(lines):
        if other != lines[0]:
            mine, first, there = (transport.ranks[r] for r in (transport.rank, 0, rank))
            raise DisagreementError(
                f"rank {mine}: ranks {first} and {there} don't have the same {what}:\n  rank {first}: "
                f"{lines[0]}\n  rank {there}: {other}\n"
                "All ranks of a pipeline must build the same model (same class, sizes and training mode), "
                "strategy and batch."
            )


def compare_replicas(replicas: Replicas, what: str, line: str) -> Work[None]:
    """Raises DisagreementError on every replica unless all gave the same line. A collective call of a stage's
    replicas."""
    if replicas.size == 1:
        return
    rows = yield from arrive(replicas.gather(_encoded(line)))
    lines = [_decoded(row) for row in rows]
    for replica, other in enumerate(lines):
        if other != lines[0]:
            raise DisagreementError(
                f"replica {replicas.index}: replicas 0 and {replica} don't have the same {what}:\n  replica 0: "
                f"{lines[0]}\n  replica {replica}: {other}\n"
                "All replicas must build the same model and strategy, with an example of the same shapes, and take "
                "each step alike; only the batches that they are given may differ."
            )


def _encoded(line: str) -> Tensor:
    text = line.encode()[:_TEXT]
    encoded = torch.zeros(_TEXT, dtype=torch.uint8)
    encoded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return encoded


def _decoded(encoded: Tensor) -> str:
    return bytes(encoded.tolist()).rstrip(b"\0").decode(errors="replace")


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
            number, there, first = (transport.ranks[r] for r in (transport.rank, rank, 0))
            raise DisagreementError(
                f"rank {number}: rank {there} was given a batch {what} than rank {first} (here: {shapes}). "
                "Every rank of a pipeline takes the "
                'same batch: seed the data loader alike, and shard it over replicas ("dp"), not over the pipeline\'s '
                "ranks."
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
