"""Policies of the V placement, where the last chunk is on the first stage: ZBV, V-Half, V-Min, DualPipeV.

Drawings as in policies.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from .generator import Fill, Order, Policy, Queue, merged
from .modulo import block, repeated
from .policies import Request
from .schedule import BACKWARD_B, BACKWARD_W, vee

#: F, B and W of two chunks
_PERIOD = 6


def zbv(r: Request) -> Policy:
    """Zero bubble on a V placement (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"): the
    last chunk is on the first stage, so a backward begins where the forward ended. Made for M+2S
    micro-batches, of which the last 2S are dropped. Limit 2S; no more than 2S chunk forwards whose W has not
    run, which is 1F1B's memory.

    stage 0  F0  F1  F2  F3  F4  F5  .   F0' B0' F1' B1' W0' F2' B2' W1' F3' B3' W2' B0  W3' F4' B4' …
    stage 1  .   F0  F1  F2  F3  F4  F0' F5  F1' B0' W0' F2' B1' W1' F3' B2' W2' B0  W0  F4' B3' W3' …
    stage 2  .   .   F0  F1  F2  F0' F3  F1' F4  F2' B0' W0' F3' B1' W1' F5  B0  W0  F4' B2' W2' B1 …
    stage 3  .   .   .   F0  F0' F1  F1' F2  F2' F3  F3' B0' W0' F4  B0  W0  F4' B1' W1' F5  B1  W1 …
    """
    placement, made_for = vee(r.stages), r.micro_batches + 2 * r.stages
    limits = r.within([2 * r.stages] * r.stages)
    queues = [_queues(s, r.stages, made_for) for s in range(r.stages)]
    orders = merged(placement, queues, limits, made_for)
    return Policy(placement, orders, Fill(limits, costs=r.costs), made_for)


def v_half(r: Request) -> Policy:
    """Half of 1F1B's memory on a V placement (Qi et al. 2024): a modulo schedule whose forwards take one slot a
    forwards whose W has not run.

    stage 0  F0  F1  .   .   .   .   .   F0' B0' F2  W0' .   F1' B1' F3  W1' .   F2' B2' F4  B0  W2' …
    stage 1  .   F0  F1  .   .   .   F0' .   .   B0' F2  F1' W0' .   B1' F3  F2' W1' B0  B2' F4  W0 …
    stage 2  .   .   F0  .   .   F0' F1  .   .   F1' B0' F2  W0' .   F2' B1' F3  B0  W1' W0  F3' B2' …
    stage 3  .   .   .   F0  F0' .   .   F1  F1' .   .   B0' F2  F2' B0  W0' B1' F3  W0  F3' B1  W1' …
    """
    return _modulo(r, (1, 2), (2, 1), (r.stages + 2) // 2)


def v_min(r: Request) -> Policy:
    """The least memory at which a V placement still has a period without waits, a third of 1F1B's (Qi et al. 2024):
    a modulo schedule that takes one slot a stage. No more than 2·((S+4) div 3) chunk forwards whose W has not run.
    Slow where F, B and W differ much.

    stage 0  F0  F1  .   .   .   .   .   F0' B0' F2  W0' .   .   F1' B1' B0  W1' F3  W0  F2' B2' B1 …
    stage 1  .   F0  .   .   .   .   F0' F1  .   B0' W0' .   F1' F2  B0  B1' W0  W1' F2' F3  B1  B2' …
    stage 2  .   .   F0  .   .   F0' .   .   F1  .   B0' F1' W0' B0  F2  W0  B1' F2' W1' B1  F3  W1 …
    stage 3  .   .   .   F0  F0' .   .   .   .   F1  F1' B0' B0  W0' W0  F2  F2' B1' B1  W1' W1  F3 …
    """
    return _modulo(r, (1, 1), (1, 1), (r.stages + 4) // 3)


def dualpipev(r: Request) -> Policy:
    """DeepSeek's DualPipe folded at its middle, on a V placement: from the warm-up on, a forward and a backward of
    other micro-batches stand side by side in pairs; DeepSeek runs a pair as one overlapped kernel, here one job
    follows the other. For M < 2S, made for 2S and the rest dropped. Limit 2S+1.

    stage 0  F0  F1  F2  F3  F4  F5  .   F0' B0' W0' F1' B1' W1' F2' B2' W2' F3' B3' W3' F4' B0  W0 …
    stage 1  .   F0  F1  F2  F3  F4  F0' F5  F1' B0' W0' F2' B1' W1' F3' B2' W2' F4' B0  W0  B3' W3' …
    stage 2  .   .   F0  F1  F2  F0' F3  F1' F4  F2' B0' W0' F3' F5  B1' W1' F4' B0  W0  B2' W2' F5' …
    stage 3  .   .   .   F0  F0' F1  F1' F2  F2' F3  F3' F4  B0' W0' F4' B0  W0  F5  B1' W1' F5' B1 …
    """
    stages, made_for = r.stages, max(r.micro_batches, 2 * r.stages)
    return Policy(vee(stages), [_dual(s, stages, made_for) for s in range(stages)], None, made_for)


def _modulo(r: Request, forward: tuple[int, int], backward: tuple[int, int], peak: int) -> Policy:
    """forward, backward: slots a stage in the first and in the second pass. peak: in micro-batches on a stage."""
    placement = vee(r.stages)
    slots = block(placement, forward, backward, _PERIOD)
    orders = repeated(placement, slots, _PERIOD, r.micro_batches)
    return Policy(placement, orders, Fill(r.within([2 * peak] * r.stages), costs=r.costs))


def _queues(stage: int, stages: int, made_for: int) -> tuple[Queue, Queue]:
    """With a and b the stage's two chunks: forwards a^(2(S−s)−1) (ba)^s b^(S−s) (ab)*, backwards b^(S−s)
    (ab)*."""
    a, b = stage, 2 * stages - 1 - stage
    ahead = stages - stage
    forward = [a] * (2 * ahead - 1) + [b, a] * stage + [b] * ahead
    return _numbered(forward, a, b, made_for), _numbered([b] * ahead, a, b, made_for)


def _numbered(begin: list[int], a: int, b: int, made_for: int) -> Queue:
    """The chunks of `begin`, then a and b in turn, with ascending micro-batches for each until both have
    `made_for`."""
    count = {a: 0, b: 0}
    queue: Queue = []
    for chunk in begin + [a, b] * made_for:
        if count[chunk] < made_for:
            queue.append(chunk * made_for + count[chunk])
            count[chunk] += 1
    return queue


def _dual(stage: int, stages: int, made_for: int) -> Order:
    """DualPipeV's eight steps. Lower case: the stage's first chunk, upper case: its second; f, b: forward and
    backward; a backward's W follows it at once unless it is marked with '; w: the oldest W that is left."""
    after = stages - 1 - stage
    half = (stage + 1) // 2
    drain = ["B", "b"] * half + (["B"] if stage % 2 == 0 else [])
    late = ["b'"] if stage % 2 == 0 else []
    late += ["B'", "b'"] * (stage + 1 - half - len(late))
    steps: Sequence[str] = [
        *["f"] * (2 * after),
        *["f", "F"] * (stage + 1),
        *["B'", "w", "F"] * after,
        *["f", "B", "F", "b"] * (made_for - 2 * stages + stage + 1),
        *["B", "F", "b"] * after,
        *drain,
        *late,
        *["w", "b'"] * after,
        *["w"] * (stage + 1),
    ]
    size = 2 * stages * made_for
    chunk = {"f": stage, "b": stage, "F": 2 * stages - 1 - stage, "B": 2 * stages - 1 - stage}
    count = dict.fromkeys("fFbB", 0)
    left: list[int] = []
    order: Order = []
    for step in steps:
        if step == "w":
            order.append(left.pop(0))
            continue
        name = step[0]
        code = chunk[name] * made_for + count[name]
        count[name] += 1
        if name in "fF":
            order.append(code)
            continue
        order.append(code + BACKWARD_B * size)
        if step.endswith("'"):
            left.append(code + BACKWARD_W * size)
        else:
            order.append(code + BACKWARD_W * size)
    return order
