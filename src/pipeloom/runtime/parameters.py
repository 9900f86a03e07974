"""The weights, buffers and gradients that one rank holds.

Takes the user's module and the program of all chunks; keeps the parameters that this stage's chunks read (the
user's own nn.Parameter objects, moved to the device), and releases those of other stages by putting meta
tensors in their place. Gives:

    parameters, buffers    name -> tensor, what the programs' inputs of kind "param" and "buffer" are bound to
    accumulators           slot name -> tensor, for inputs of kind "acc": gradients sum up here over a step
    gradients              every trainable parameter held here, with its `.grad` and the slots that make it up

Gradients of a chunk lie in one flat buffer a dtype, and `.grad` is a view of it, so that scaling, clipping
and reducing are one operation a buffer. Where all slots of a parameter lie on this rank, its first slot *is*
the `.grad` view, in the buffer of that slot's chunk; other slots (a parameter used twice, or tied under two names)
have flat accumulators of their own, and views that are no slots lie in buffers apart.

Views start at multiples of 64 bytes: matrix kernels may round differently at other alignments, and gradients
are to be bit-equal for every cut of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..program.subprogram import GradientSlot, ProgramSet
from .initial import Initial

_ALIGNMENT = 64


class SlotPlace(NamedTuple):
    """A slot and the stage whose chunk sums it."""

    slot: GradientSlot
    stage: int


@dataclass
class Gradient:
    """One trainable parameter held on this rank.

    name: its first name in the model; position: its place in model order. slots: all of its slots in summing
    order, on whatever stage. holders: the stages that hold the parameter, ascending; the first is its owner.
    """

    name: str
    position: int
    parameter: nn.Parameter
    view: Tensor
    slots: list[SlotPlace]
    holders: list[int]

    @property
    def shared(self) -> bool:
        """Whether several ranks hold the parameter, and must agree on its gradient."""
        return len(self.holders) > 1


class ParameterStore:
    """What stage `stage` holds of `module`.

    placement[chunk] -> stage. release False keeps other stages' parameters (one process, one stage). Ranks of
    one process need a copy of the module each: a parameter has one `.grad`. initial: gives tensors on the meta device
    their values (a parameter there becomes a new one), and takes others from files.
    Raises ValueError for a name that the module doesn't have, or a parameter of this stage without values
    (meta).
    """

    def __init__(
        self,
        module: nn.Module,
        programs: ProgramSet,
        placement: Sequence[int],
        stage: int,
        device: torch.device | str = "cpu",
        release: bool = True,
        initial: Initial | None = None,
    ):
        self.module = module
        self.stage = stage
        self.device = torch.device(device)
        named = dict(module.named_parameters(remove_duplicate=False))
        named_buffers = dict(module.named_buffers(remove_duplicate=False))
        #: every name of a parameter -> its first name in the model
        self.first_name: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, parameter in named.items():
            self.first_name[name] = first.setdefault(id(parameter), name)
        #: first name -> the stages that hold the parameter, ascending: those whose chunks use it
        self.holders = holders = self._holders(programs, placement, named)
        self.order = list(dict.fromkeys(self.first_name.values()))
        #: first names of the parameters that get a gradient, on any stage
        self.trained = {self.first_name[slot.parameter] for slot in programs.slots}
        #: a number for each slot, the same on all stages
        self.slot_number = {slot.name: number for number, slot in enumerate(programs.slots)}

        mine = {name for name, stages in holders.items() if stage in stages}
        #: parameters under their first names -> the stage that saves them and counts them in the norm
        self.owner = {name: min(holders.get(name, [0])) for name in self.order}
        buffer_holders = _buffer_holders(programs, placement, named_buffers)
        self.buffer_owner = {name: min(buffer_holders.get(name, [0])) for name in named_buffers}
        my_buffers = {name for name, stages in buffer_holders.items() if stage in stages}

        if release:
            _release(module, {id(named[n]) for n in holders if n not in mine})
            _release_buffers(module, {id(named_buffers[n]) for n in buffer_holders if n not in my_buffers})
        # what no chunk reads in training may be read in evaluation, by whichever stage: every stage keeps it
        mine |= set(self.order) - set(holders)
        my_buffers |= set(named_buffers) - set(buffer_holders)
        if initial is not None:
            self._initialise(initial.values([*sorted(mine), *sorted(my_buffers)]), named)
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in named.items():
            if self.first_name[name] in mine:
                self.parameters[name] = self._moved(name, parameter)
        self.buffers = self._moved_buffers(my_buffers)
        self.accumulators: dict[str, Tensor] = {}
        self.gradients: list[Gradient] = []
        self._flat_gradients: list[Tensor] = []
        self._flat_extras: list[Tensor] = []
        self._summed: dict[int, list[Tensor]] = {}
        self._place_gradients(programs, placement, holders)
        self._left_over = False
        self._carried: list[Tensor] | None = None
        self.bind()

    # -- what a step does with gradients

    def begin_step(self) -> None:
        """Make every accumulator zero. What earlier steps left in `.grad` without an update is set aside, and
        added by `add_carried`. A `.grad` that the user took away (None) counts as zero; one that the user put
        there counts."""
        self._carried = None
        if self._left_over or any(g.parameter.grad is not g.view for g in self.gradients):
            for gradient in self.gradients:
                found = gradient.parameter.grad
                if found is None:
                    gradient.view.zero_()
                elif found is not gradient.view and found.data_ptr() != gradient.view.data_ptr():
                    gradient.view.copy_(found)
            self._carried = [flat.clone() for flat in self._flat_gradients]
            self.clear()
        self.bind()

    def add_carried(self) -> None:
        """After finalize: what earlier steps left comes back."""
        if self._carried is not None:
            for flat, carried in zip(self._flat_gradients, self._carried, strict=True):
                flat.add_(carried)
            self._carried = None
        self._left_over = True

    def scale(self, factor: float | Tensor) -> None:
        """Multiply all accumulators, the `.grad` views among them."""
        for flat in (*self._flat_gradients, *self._flat_extras):
            flat.mul_(factor)

    def scale_gradients(self, factor: float | Tensor) -> None:
        for flat in self._flat_gradients:
            flat.mul_(factor)

    def clear_extras(self) -> None:
        for flat in self._flat_extras:
            flat.zero_()

    def clear(self) -> None:
        """Make all gradients and accumulators zero."""
        for flat in self._flat_gradients:
            flat.zero_()
        self.clear_extras()
        self._left_over = False

    def bind(self) -> None:
        """Put the views back as `.grad`, where someone took them away."""
        for gradient in self.gradients:
            if gradient.parameter.grad is not gradient.view:
                gradient.parameter.grad = gradient.view

    # -- what others ask

    def summed(self, chunk: int) -> list[Tensor]:
        """The flat buffers into which the W's of a chunk sum: all of them, and nothing else."""
        return self._summed.get(chunk, [])

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) pairs for the optimizer, in model order: what gets a gradient and is held here."""
        return [(g.name, g.parameter) for g in self.gradients]

    def owned(self) -> list[Gradient]:
        """The gradients that this rank counts in the norm: each parameter has one owner."""
        return [g for g in self.gradients if g.holders[0] == self.stage]

    def gradient_bytes(self) -> int:
        return sum(flat.nbytes for flat in (*self._flat_gradients, *self._flat_extras))

    def persistent_bytes(self) -> int:
        """Weights, buffers and gradients of this rank, in bytes."""
        held = {id(p): p.nbytes for p in self.parameters.values()}
        held.update((id(b), b.nbytes) for b in self.buffers.values())
        return sum(held.values()) + self.gradient_bytes()

    # -- construction

    def _holders(
        self, programs: ProgramSet, placement: Sequence[int], named: dict[str, nn.Parameter]
    ) -> dict[str, list[int]]:
        stages: dict[str, set[int]] = {}
        for chunk in range(programs.chunks):
            slotted = [slot.parameter for slot in programs.slots if slot.chunk == chunk]
            for name in (*programs.parameters(chunk), *slotted):
                if name not in named:
                    raise ValueError(f"chunk {chunk} reads parameter {name!r}, which the module doesn't have")
                stages.setdefault(self.first_name[name], set()).add(placement[chunk])
        return {name: sorted(found) for name, found in stages.items()}

    def _initialise(self, values: dict[str, Tensor], named: dict[str, nn.Parameter]) -> None:
        """Put values into this stage's tensors, by first name; `named` gets the parameters that are new."""
        new: dict[int, nn.Parameter] = {}
        for name, value in values.items():
            if name not in named:
                path, _, last = name.rpartition(".")
                setattr(self.module.get_submodule(path), last, value.to(self.device))
            elif named[name].is_meta:
                old = named[name]
                new[id(old)] = nn.Parameter(value.to(self.device), requires_grad=old.requires_grad)
            else:
                named[name].data.copy_(value)
        _replace(self.module, new)
        named.update({name: new[id(p)] for name, p in named.items() if id(p) in new})

    def _moved(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name!r} belongs to stage {self.stage} but has no values (it is on the "
                "meta device): build the model with pipeloom.deferred, or pass weights= to compile"
            )
        if parameter.device != self.device:
            parameter.data = parameter.data.to(self.device)
        return parameter

    def _moved_buffers(self, mine: Iterable[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in mine:
            path, _, last = name.rpartition(".")
            owner = self.module.get_submodule(path)
            buffer = owner.get_buffer(last)
            if buffer.device != self.device:
                buffer = buffer.to(self.device)
                setattr(owner, last, buffer)
            found[name] = buffer
        return found

    def _place_gradients(
        self, programs: ProgramSet, placement: Sequence[int], holders: dict[str, list[int]]
    ) -> None:
        by_parameter: dict[str, list[SlotPlace]] = {}
        for slot in programs.slots:
            place = SlotPlace(slot, placement[slot.chunk])
            by_parameter.setdefault(self.first_name[slot.parameter], []).append(place)
        gradients = _Arena(self.device)
        extras = _Arena(self.device)
        wanted: list[tuple[str, list[SlotPlace], int]] = []
        for position, name in enumerate(self.order):
            places = by_parameter.get(name)
            if places is None or self.stage not in holders[name]:
                continue
            places.sort(key=lambda p: (p.slot.index, p.slot.name))
            parameter, first = self.parameters[name], places[0].slot
            alone = holders[name] == [self.stage] and first.dtype == parameter.dtype
            gradients.want(name, (first.chunk if alone else -1, parameter.dtype), parameter.shape)
            for number, place in enumerate(places):
                if place.stage == self.stage and not (alone and number == 0):
                    extras.want(place.slot.name, (place.slot.chunk, place.slot.dtype), place.slot.shape)
            wanted.append((name, places, position))
        views, slots = gradients.build(), extras.build()
        self._flat_gradients, self._flat_extras = list(gradients.flats.values()), list(extras.flats.values())
        for (chunk, _), flat in (*gradients.flats.items(), *extras.flats.items()):
            self._summed.setdefault(chunk, []).append(flat)
        self._summed.pop(-1, None)
        for name, places, position in wanted:
            for place in places:
                if place.stage == self.stage:
                    self.accumulators[place.slot.name] = slots.get(place.slot.name, views[name])
            self.gradients.append(
                Gradient(name, position, self.parameters[name], views[name], places, holders[name])
            )


class _Arena:
    """Flat zero buffers, one a key, cut into aligned views."""

    def __init__(self, device: torch.device):
        self.device = device
        self.flats: dict[tuple[int, torch.dtype], Tensor] = {}
        self._wanted: dict[tuple[int, torch.dtype], list[tuple[str, tuple[int, ...], int]]] = {}
        self._sizes: dict[tuple[int, torch.dtype], int] = {}

    def want(self, name: str, key: tuple[int, torch.dtype], shape: Sequence[int]) -> None:
        unit = _ALIGNMENT // key[1].itemsize
        start = self._sizes.get(key, 0)
        self._wanted.setdefault(key, []).append((name, tuple(shape), start))
        self._sizes[key] = start + -(-torch.Size(shape).numel() // unit) * unit

    def build(self) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        for key, parts in sorted(self._wanted.items(), key=lambda item: (item[0][0], str(item[0][1]))):
            flat = torch.zeros(self._sizes[key], dtype=key[1], device=self.device)
            self.flats[key] = flat
            for name, shape, start in parts:
                views[name] = flat[start : start + torch.Size(shape).numel()].view(shape)
        return views


def _buffer_holders(
    programs: ProgramSet, placement: Sequence[int], named: dict[str, Tensor]
) -> dict[str, list[int]]:
    stages: dict[str, set[int]] = {}
    for chunk in range(programs.chunks):
        for name in programs.buffers(chunk):
            if name not in named:
                raise ValueError(f"chunk {chunk} reads buffer {name!r}, which the module doesn't have")
            stages.setdefault(name, set()).add(placement[chunk])
    return {name: sorted(found) for name, found in stages.items()}


def _release(module: nn.Module, identities: set[int]) -> None:
    parameters = {id(p): p for p in module.parameters() if id(p) in identities}
    empty = {
        key: nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for key, p in parameters.items()
    }
    _replace(module, empty)


def _replace(module: nn.Module, new: dict[int, nn.Parameter]) -> None:
    """Put other parameters in place of those with these identities, under all of their names."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in new:
                setattr(owner, name, new[id(parameter)])


def _release_buffers(module: nn.Module, identities: set[int]) -> None:
    for owner in module.modules():
        for name, buffer in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
            if id(buffer) in identities:
                setattr(owner, name, torch.empty_like(buffer, device="meta"))
