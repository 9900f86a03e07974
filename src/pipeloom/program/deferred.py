"""A model without its memory, that knows how it would have been initialised.

    model = pipeloom.deferred(lambda: GPT(config), seed=0)     # every tensor is on the meta device
    pipe = pipeloom.compile(model, …)                          # this rank's tensors get their values, and no others

Each rank's values are those of `torch.manual_seed(seed); GPT(config)`, to the bit, though no rank ever holds the whole
model. While the constructor runs, its ops are written down on a tape, and run on the meta device alone. `Tape.values`
plays the tape for some tensors: ops that these depend on run for real, and of the others only those that draw random
numbers, on tensors that are thrown away at once, because they move the generator. The most memory that this takes is
the wanted tensors and the largest of the others. Buffers that a constructor computes (rotary tables, masks) come out
like everything else.

Followed: deferred_init of torchdistx, which replays each parameter by itself, from other random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from . import compat, ops


class DeferredError(RuntimeError):
    """A constructor that can't be run without memory; the message names the op and says what to change."""


def deferred(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The model that `torch.manual_seed(seed); make()` would build, on the meta device, with a record of how it is
    initialised.

    Do all that changes a parameter inside `make`: casts, adapters, tied weights. The caller's random state isn't
    touched. Raises DeferredError.
    """
    tape = Tape()
    with _untouched():
        torch.default_generator.manual_seed(seed)
        try:
            with (
                compat.whole_inits(tape.record_whole),
                compat.PosingAs(tape.value),
                compat.EachOp(tape.record),
            ):
                model = make()
        finally:
            tape.give_back()
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"deferred needs a function that makes an nn.Module; it returned {type(model).__name__}"
        )
    _TAPES[model] = tape
    return model


def tape_of(model: nn.Module) -> Tape | None:
    """How a model that `deferred` made is initialised; None for others."""
    return _TAPES.get(model)


@dataclass(slots=True)
class _Draw:
    """The random numbers of an entry. generator: whose, as in the entry's arguments; None: the default one's. after:
    the entry that drew before it; −1: none. state: of the generator before the draw, where someone set it."""

    generator: torch.Generator | None
    after: int
    state: Tensor | None


@dataclass(slots=True)
class _Entry:
    """An op that made or changed a storage. reads, writes: storages. made: those of its results that have a new one, by
    position."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: set[int]
    writes: set[int]
    made: dict[int, Tensor]
    draw: _Draw | None


class Tape:
    """What a constructor did. Its tensors are on the meta device and known by their storages, which it keeps."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._meta: dict[int, Tensor] = {}
        #: values that came from outside, by the storage that stands for them
        self._constants: dict[int, Tensor] = {}
        #: by generator: the state that it was left in after a draw -> that draw's entry
        self._marks: dict[torch.Generator, dict[bytes, int]] = {}
        self._first: dict[torch.Generator, Tensor] = {}

    def knows(self, tensor: Tensor) -> bool:
        return compat.storage_key(tensor) in self._meta

    # ---- writing it

    def record(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an op of the constructor gives, without memory, written down."""
        given = ops.tensors_in((args, kwargs))
        draws = ops.draws(op)
        if ops.reads_values(op) and any(t.is_meta for t in given):
            args, kwargs = self._real((args, kwargs))
            return op(*args, **kwargs)
        if given and not draws and not ops.lifts(op) and not any(t.is_meta for t in given):
            return op(*args, **kwargs)
        if not all(t.is_meta for t in ops.written(op, args, kwargs)):
            raise DeferredError(
                f"{op} writes into a tensor that wasn't made by torch inside the function that deferred was given, and "
                "that can't be written down. Make it there with torch.empty or torch.tensor."
            )
        args, kwargs = ops.map_tensors(self._stand_in, (args, kwargs))
        draw = self._drawn_by(args, kwargs) if draws else None
        try:
            result = op(*args, **ops.on(op, kwargs, "meta"))
        except (NotImplementedError, RuntimeError) as error:
            if draws or ops.written(op, args, kwargs):
                raise DeferredError(f"{op} can't be run without memory in a constructor: {error}") from error
            args, kwargs = self._real((args, kwargs))
            return ops.map_tensors(self._stand_in, op(*args, **kwargs))
        # aliases: `x.data = y` changes a tensor itself
        made = {
            position: tensor.detach()
            for position, tensor in enumerate(ops.tensors_in(result))
            if not self.knows(tensor)
        }
        self._meta |= {compat.storage_key(t): t for t in made.values()}
        writes = _storages([*made.values(), *ops.written(op, args, kwargs)])
        if writes:
            args, kwargs = ops.map_tensors(Tensor.detach, (args, kwargs))
            reads = _storages(ops.tensors_in((args, kwargs)))
            self._entries.append(_Entry(op, args, kwargs, reads, writes, made, draw))
        return result

    def record_whole(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """What a function gives that draws, any number of times, into its first argument, written down as one op."""
        target: Tensor = args[0]
        draw = self._drawn_by(args, kwargs)
        storages = _storages([target])
        args = (target.detach(), *args[1:])
        self._entries.append(_Entry(function, args, kwargs, storages, storages, {}, draw))
        return target

    def value(self, tensor: Tensor) -> Tensor:
        """A tensor with values: itself, unless it is one of the tape's."""
        return self.values([tensor])[0] if self.knows(tensor) else tensor

    def give_back(self) -> None:
        """Generators of the user's own are put back to where they were."""
        for generator, state in self._first.items():
            generator.set_state(state)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """The meta tensor for one that has values: those are kept."""
        if tensor.is_meta:
            return tensor
        twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        key = compat.storage_key(twin)
        self._meta[key], self._constants[key] = twin, tensor.detach().clone()
        return twin

    def _drawn_by(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Draw:
        """Whose numbers an op draws, and where they begin. Nothing is drawn now, so each draw leaves the generator in a
        state that tells it from all others: one that is found later says after which draw the generator stands, and
        any other that someone has seeded it."""
        own = ops.generator_in((args, kwargs))
        generator = torch.default_generator if own is None else own
        state = generator.get_state()
        marks = self._marks.setdefault(generator, {})
        self._first.setdefault(generator, state)
        after = marks.get(ops.as_bytes(state))
        generator.manual_seed(_MARK + len(self._entries))
        marks[ops.as_bytes(generator.get_state())] = len(self._entries)
        return _Draw(own, -1 if after is None else after, state if after is None else None)

    # ---- playing it

    def values(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The values of some of its tensors, on the CPU, each in memory of its own. Raises KeyError for a tensor that
        it doesn't know."""
        unknown = [t for t in tensors if not self.knows(t)]
        if unknown:
            raise KeyError(f"the tape has no tensor like this one of shape {tuple(unknown[0].shape)}")
        with _untouched(), torch.no_grad():
            real = _Player(self._entries, self._constants, self._meta).play(_storages(tensors))
            found = []
            for tensor in tensors:
                value = ops.tensor_in(real[compat.storage_key(tensor)], tensor)
                alone = value.untyped_storage().nbytes() == value.nbytes
                found.append(value if alone else value.clone())
            return found

    def _real(self, arguments: Any) -> Any:
        """Arguments with values in place of meta tensors."""
        wanted = {id(t): t for t in ops.tensors_in(arguments) if t.is_meta}
        values = dict(zip(wanted, self.values(list(wanted.values())), strict=True))
        return ops.map_tensors(lambda t: values.get(id(t), t), arguments)


class _Player:
    """Runs what some storages need. real: their memory, one flat tensor of bytes a storage."""

    def __init__(
        self, entries: Sequence[_Entry], constants: dict[int, Tensor], meta: dict[int, Tensor]
    ) -> None:
        self.entries = entries
        self.constants = constants
        self.meta = meta
        self.real: dict[int, Tensor] = {}
        self.generators: dict[torch.Generator | None, torch.Generator] = {None: torch.default_generator}
        self.states: dict[int, Tensor] = {}

    def play(self, wanted: set[int]) -> dict[int, Tensor]:
        todo = self._needed(wanted)
        last_use = {key: number for number, needed in todo if needed for key in self._touched(number)}
        resumed = {e.draw.after for number, _ in todo if (e := self.entries[number]).draw is not None}
        for number, needed in todo:
            entry = self.entries[number]
            if needed:
                for key in entry.reads - self.real.keys():
                    self.real[key] = ops.memory_of(self.constants[key], self.meta[key])
            self._run(entry, needed, number if number in resumed else -1)
            if needed:
                for key in self._touched(number) - wanted:
                    if last_use[key] == number:
                        del self.real[key]
        for key in wanted - self.real.keys():
            self.real[key] = ops.memory_of(self.constants[key], self.meta[key])
        return self.real

    def _touched(self, number: int) -> set[int]:
        return self.entries[number].reads | self.entries[number].writes

    def _needed(self, wanted: set[int]) -> list[tuple[int, bool]]:
        """The entries to run, in order, and whether they run for their results or for the generator alone."""
        alive = set(wanted)
        drawn_after: set[int] = set()
        found = []
        for number in reversed(range(len(self.entries))):
            entry = self.entries[number]
            moves = number in drawn_after
            needed = bool(entry.writes & alive) or (moves and not ops.draws_steadily(entry.op))
            if needed:
                alive -= _storages(entry.made.values())
                alive |= entry.reads
            if needed or moves:
                found.append((number, needed))
                if entry.draw is not None:
                    drawn_after.add(entry.draw.after)
        return found[::-1]

    def _run(self, entry: _Entry, needed: bool, remember: int) -> None:
        def value(tensor: Tensor) -> Tensor:
            if needed:
                return ops.tensor_in(self.real[compat.storage_key(tensor)], tensor)
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

        if entry.draw is not None:
            self._set(entry.draw)
        args, kwargs = ops.map_tensors(value, (entry.args, entry.kwargs))
        args, kwargs = ops.map_generators(self.generators.__getitem__, (args, kwargs))
        results = ops.tensors_in(entry.op(*args, **ops.on(entry.op, kwargs, "cpu")))
        if needed:
            for position, meta in entry.made.items():
                self.real[compat.storage_key(meta)] = ops.memory_of(results[position], meta)
        if entry.draw is not None and remember >= 0:
            self.states[remember] = self.generators[entry.draw.generator].get_state()

    def _set(self, draw: _Draw) -> None:
        """Make a generator stand where it stood."""
        if draw.generator not in self.generators:
            self.generators[draw.generator] = torch.Generator()
        state = self.states[draw.after] if draw.state is None else draw.state
        self.generators[draw.generator].set_state(state)


_TAPES: WeakKeyDictionary[nn.Module, Tape] = WeakKeyDictionary()
#: seeds of the states that generators are left in while nothing is drawn
_MARK = 0x5EED_0000_0000_0000


def _storages(tensors: Any) -> set[int]:
    return {compat.storage_key(t) for t in tensors}


@contextmanager
def _untouched() -> Iterator[None]:
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
