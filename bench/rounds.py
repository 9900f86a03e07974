"""One rank of a benchmark: makes the contenders, checks that they do the same work, times them in turn.

Gives a JSON-able dict of what this rank saw; `start.both_ranks` runs it in two processes. A step is timed from
one barrier to the next, so that it counts as done when the slower rank is done. The order of the contenders
moves on by one each round: none always runs after the same one.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from contenders import Alone, Contender, Ours, build
from pipeloom.runtime.agreement import compare_batches
from pipeloom.runtime.stepping import finish
from setting import Setting

#: largest error of a gradient: ‖difference‖ ÷ max(‖reference‖, 1e-6 · ‖all of the reference‖), float32
TOLERANCE = 1e-5
#: largest difference of two losses, relative; after some steps of training they have drifted by more
LOSS_TOLERANCE, DRIFT = 1e-6, 1e-4


def time_steps(setting: Setting, listed: Sequence[str], rounds: int, warm_up: int) -> dict[str, Any]:
    """seconds[contender][round], agreement with the reference, bubbles, and what a comparison of batches costs.
    listed: names of contenders, "alone" among them (see `contenders.names`)."""
    contenders = {name: build(setting, name) for name in listed}
    errors = compare_work(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    bubbles: dict[str, list[float]] = {
        name: [] for name, c in contenders.items() if isinstance(c, Ours) and c.recorded
    }
    order = list(contenders)
    for round_ in range(warm_up + rounds):
        for name in order:
            took = timed(contenders[name].step)
            if round_ >= warm_up:
                seconds[name].append(took)
                if name in bubbles:
                    bubbles[name].append(bubble(contenders[name]))
        order = order[1:] + order[:1]
    compare_drift({n: c for n, c in contenders.items() if not isinstance(c, Alone)})
    found = {
        "seconds": seconds,
        "errors": errors,
        "planned": {name: planned(contenders[name]) for name in bubbles},
        "measured": bubbles,
        "compare_batches": cost_of_comparing(contenders),
    }
    close(contenders.values())
    return found


def memory_growth(setting: Setting, name: str, steps: int = 3) -> dict[str, Any]:
    """Resident bytes of this process: before the contender was made, before its first step, and at the highest moment
    of some steps. One contender a process: memory that was freed stays with the process."""
    start = resident()
    contender = build(setting, name)
    gc.collect()
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark starts anew
    for _ in range(steps):
        timed(contender.step)
    found = {"start": start, "before": before, "peak": resident("VmHWM")}
    close([contender])
    return found


def timed(step: Callable[[], None]) -> float:
    """Seconds from a barrier to the one after the step."""
    dist.barrier()
    begin = perf_counter()
    step()
    dist.barrier()
    return perf_counter() - begin


def compare_work(contenders: dict[str, Contender]) -> dict[str, float]:
    """The largest error of each contender's gradients against a plain model fed micro-batch by micro-batch. Raises
    ValueError, naming contender and parameter, where gradients or loss aren't the same."""
    alone = contenders["alone"]
    alone.backward()
    reference = {n: g.clone() for n, g in alone.gradients().items()}
    expected = alone.loss()
    assert expected is not None
    alone.zero()
    whole = float(torch.stack([g.norm() for g in reference.values()]).norm())
    errors = {}
    for name, contender in contenders.items():
        if contender is alone:
            continue
        contender.backward()
        gradients, loss = contender.gradients(), contender.loss()
        found = {n: error(g, reference[n], whole) for n, g in gradients.items()}
        worst = max(found, key=found.__getitem__)
        if not found[worst] <= TOLERANCE:
            raise ValueError(
                f"{name}: the gradient of {worst} is {found[worst]:.1e} away from the plain model's (allowed: "
                f"{TOLERANCE:g}); the contenders don't do the same work, so their times can't be compared"
            )
        if loss is not None and not abs(loss - expected) <= LOSS_TOLERANCE * abs(expected):
            raise ValueError(f"{name}: the loss is {loss}, the plain model's is {expected}")
        errors[name] = found[worst]
        contender.zero()
    return errors


def error(found: Tensor, reference: Tensor, whole: float) -> float:
    """The distance of two gradients, by the measure of TOLERANCE. whole: the norm of all of the reference."""
    return float((found - reference).norm()) / max(float(reference.norm()), 1e-6 * whole)


def compare_drift(contenders: dict[str, Contender]) -> None:
    """All have trained equally many steps: the losses of the last are alike. Raises ValueError where they aren't."""
    losses = {n: loss for n, c in contenders.items() if (loss := c.loss()) is not None}
    middle = statistics.median(losses.values())
    for name, loss in losses.items():
        if not abs(loss - middle) <= DRIFT * abs(middle):
            raise ValueError(f"{name}: after the same steps the loss is {loss}, the others' is {middle}")


def bubble(contender: Contender) -> float:
    """The global bubble of the last step of one of ours."""
    assert isinstance(contender, Ours)
    figures = contender.pipe.measured
    assert figures is not None
    return figures.bubble_global


def planned(contender: Contender) -> float:
    assert isinstance(contender, Ours)
    return contender.pipe.plan.predicted.bubble_global


def cost_of_comparing(contenders: dict[str, Contender], times: int = 50) -> list[float]:
    """Seconds that a rank waits each time for all ranks to compare their batches (both come at once)."""
    ours = next(c for c in contenders.values() if isinstance(c, Ours))
    pipe, leaves = ours.pipe, list(ours.batch)
    return [timed_alone(lambda: finish(compare_batches(pipe.transport, leaves))) for _ in range(times)]


def timed_alone(work: Callable[[], None]) -> float:
    """Seconds on this rank alone, begun together with the other."""
    dist.barrier()
    begin = perf_counter()
    work()
    return perf_counter() - begin


def resident(field: str = "VmRSS") -> int:
    """Bytes of memory that this process has (VmRSS), or had at its highest (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: memory can be read on Linux only")


def close(contenders: Any) -> None:
    for contender in contenders:
        if isinstance(contender, Ours):
            contender.pipe.close()
