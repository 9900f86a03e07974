"""Two judges: eager PyTorch with keyed draws, and sub-programs run by hand in one process.

with KeyedDraws(key):
    loss = model(x)                    # the masks that the captured program draws for this key

result = run_programs(programs, model, leaves, key)
relative_error(result.gradients[name], parameter.grad, global_norm(reference))
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from models import Case, build
from pipeloom.passes import Pass, apply_passes, build_pass, split_programs
from pipeloom.passes.random_keys import preserved_generators, seed_draw
from pipeloom.program.batch import flatten_batch
from pipeloom.program.capture import capture
from pipeloom.program.ir import Program
from pipeloom.program.subprogram import GradientSlot, Input, ProgramSet, SubProgram
from pipeloom.runtime.layout import Wire

CPU = torch.device("cpu")


class KeyedDraws(TorchDispatchMode):
    """While open, the i-th random draw of eager PyTorch is what a captured program draws for (key, i)."""

    supports_higher_order_operators = True  # torch.cond and the like pass through

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key = int(key)
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            given = {a.name: a.default_value for a in func._schema.arguments}
            given |= {**dict(zip(given, args, strict=False)), **kwargs}
            if given.get("dropout_p") != 0:
                seed_draw(self.key, self.count, CPU)
                self.count += 1
        return func(*args, **kwargs)


def global_norm(gradients: Iterable[Tensor]) -> float:
    """The 2-norm over all gradients, in float64."""
    return float(sum(wide(g).norm() ** 2 for g in gradients)) ** 0.5


def wide(tensor: Tensor) -> Tensor:
    """In double precision."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def relative_error(gradient: Tensor, reference: Tensor, norm: float) -> float:
    """norm(error) ÷ max(norm(reference), 1e-6 · global norm): a gradient that is truly 0 doesn't blow the error up."""
    error = float((wide(gradient) - wide(reference)).norm())
    scale = max(float(wide(reference).norm()), 1e-6 * norm)
    return error / scale if scale else error


def worst_error(gradients: Mapping[str, Tensor], references: Mapping[str, Tensor]) -> float:
    """The largest `relative_error`; both must name the same parameters."""
    assert set(gradients) == set(references), set(gradients) ^ set(references)
    norm = global_norm(references.values())
    return max((relative_error(gradients[n], r, norm) for n, r in references.items()), default=0.0)


def capture_case(case: Case, *, training: bool = True, fused: bool = False) -> Program:
    """A program with all passes that come before label_chunks. fused: without split_fused_grads."""
    program = capture(
        case.model, case.loss_fn, example=case.example, training=training, autocast=case.autocast
    )
    names = ["random_keys", "split_fused_grads", "gradient_merge"]
    apply_passes(program, [build_pass(n) for n in names if not (fused and n == "split_fused_grads")])
    return program


@functools.cache
def prepared(name: str) -> tuple[Case, Program]:
    """A case in float64 (float32 under autocast) and its program, captured once for all tests. Leave both as
    they are: the labels may be written anew, but a pass that rewrites the graph needs a capture of its own."""
    case = build(name)
    if case.autocast is None:
        case.double()
    return case, capture_case(case)


def cut(
    program: Program, chunks: int, *, split: bool = True, more: Sequence[Pass] = (), **options: Any
) -> ProgramSet:
    """Labels a program (anew) and splits it. more: passes between; options: those of label_chunks."""
    apply_passes(program, [build_pass("label_chunks", chunks=chunks, **options), *more])
    return split_programs(program, split_backward=split)


def leaves_of(case: Case) -> list[Tensor]:
    """The tensor leaves of a case's batch, as programs number them."""
    return flatten_batch(case.inputs, case.targets)[0]


@dataclass
class Reference:
    """What eager PyTorch makes of a batch."""

    loss: Tensor
    weight: Tensor | None
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def eager(case: Case, key: Tensor) -> Reference:
    """A step of eager PyTorch with the draws of `key`. The case is left as it was: buffers, `.grad` and the caller's
    random state."""
    model = case.model
    before = {n: b.clone() for n, b in model.named_buffers()}
    checkpointing = getattr(model, "checkpointing", None)
    if hasattr(model, "checkpointing"):
        # the recomputation of a checkpoint draws again, outside of the mode that keys draws
        model.checkpointing = None
    with preserved_generators(CPU), KeyedDraws(key):
        loss = case.loss(model)
    weight = None
    if isinstance(loss, tuple):
        loss, weight = loss
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])
    if checkpointing is not None:
        model.checkpointing = checkpointing
    return Reference(loss.detach(), weight, gradients, buffers)


@dataclass
class Outcome:
    """What sub-programs made of one micro-batch. scopes[chunk]: the values that were in the chunk's scope at
    the end."""

    loss: Tensor
    weight: Tensor | None
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    outputs: list[Tensor]
    accumulators: dict[str, Tensor]
    scopes: list[dict[str, Tensor]] = field(default_factory=list)


def usual_order(programs: ProgramSet, split: bool) -> list[tuple[str, int]]:
    """Forward up; backward down, B and W or X."""
    up: list[tuple[str, int]] = [("F", c) for c in range(programs.chunks)]
    if not any(kind == "X" for kind, _ in programs.programs):
        return up
    down = [(k, c) for c in reversed(range(programs.chunks)) for k in (("B", "W") if split else ("X",))]
    return up + down


def run_programs(
    programs: ProgramSet,
    model: nn.Module,
    leaves: Sequence[Tensor],
    key: Tensor,
    *,
    split: bool = True,
    order: Sequence[tuple[str, int]] | None = None,
    tangent: float = 1.0,
    accumulators: dict[str, Tensor] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
) -> Outcome:
    """Runs one micro-batch through all programs by hand, each chunk with a scope of its own.

    A value reaches another chunk only in a message, packed and unpacked as on the wire. order: (kind, chunk),
    by default F up and then B and W (or X) down. accumulators: to add to; buffers: versions to read (both by
    default fresh).
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    current = {**dict(model.named_buffers(remove_duplicate=False)), **(buffers or {})}
    updated: dict[str, Tensor] = {}
    if accumulators is None:
        accumulators = {s.name: torch.zeros(s.shape, dtype=s.dtype) for s in programs.slots}
    scopes: list[dict[str, Tensor]] = [{} for _ in range(programs.chunks)]

    def argument(program: SubProgram, given: Input) -> Tensor:
        match given.kind:
            case "param":
                return parameters[given.name].detach()
            case "buffer":
                return current[given.name]
            case "input":
                return leaves[int(given.name)]
            case "tangent":
                loss = programs.values[programs.loss]
                return torch.full((), tangent, dtype=loss.dtype)
            case "key":
                return key
            case "acc":
                return accumulators[given.name]
            case "value":
                return scopes[program.chunk][given.name]

    with torch.no_grad(), preserved_generators(CPU):
        for kind, chunk in order or usual_order(programs, split):
            program = programs.programs[kind, chunk]  # type: ignore[index]
            if not program.empty:
                given = [argument(program, i) for i in program.inputs]
                made = program.call(given)
                assert len(made) == len(program.outputs)
                scopes[chunk].update(zip(program.outputs, made, strict=True))
                updated.update({b: scopes[chunk][v] for b, v in program.buffers.items()})
            direction = {"F": "F", "B": "B", "X": "B"}.get(kind)
            for (way, source, target), names in programs.messages.items():
                if way == direction and source == chunk:
                    for name in names:
                        wire = Wire.of(programs.values[name])
                        scopes[target][name] = wire.unpack(wire.pack(scopes[chunk][name]).clone())
    weight = None if programs.weight is None else scopes[programs.weight_chunk][programs.weight]
    return Outcome(
        scopes[programs.loss_chunk][programs.loss],
        weight,
        summed_slots(programs.slots, accumulators),
        updated,
        [scopes[c][o] for c, o in zip(programs.output_chunks, programs.outputs, strict=True)],
        accumulators,
        scopes,
    )


def summed_slots(slots: Sequence[GradientSlot], accumulators: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of each parameter: its slots, summed in the order of their index."""
    gradients: dict[str, Tensor] = {}
    for slot in sorted(slots, key=lambda s: (s.parameter, s.index)):
        value = accumulators[slot.name]
        gradients[slot.parameter] = gradients[slot.parameter] + value if slot.index else value.clone()
    return gradients
