"""The proof of a split: every value that a program reads has been made, once, before it is read.

Reads a ProgramSet alone, as a rank or a plan would, so that a mistake of the splitter (or of a pass before it)
is found where it was made and not as a missing value in the middle of a step.
"""

from __future__ import annotations

from collections import Counter

from ..program.ir import ProgramError
from ..program.subprogram import ProgramSet, SubProgram
from ..schedules.jobs import Direction, Kind


def check_programs(programs: ProgramSet) -> None:
    """Raises ProgramError, naming the program and the value, unless

    - a program reads only what its chunk's earlier programs made or a message brought (F, then B and W, or X);
    - no value is made twice on the way through a chunk (F, B, W or F, X), and messages carry only what their
    source makes; - each gradient slot is added to by its own chunk's W (and X), once, and by nothing else; -
    loss, weight and outputs are made by the F of the chunk that is said to make them.
    """
    ways: list[tuple[Kind, ...]] = [("F", "X"), ("F", "B", "W")]
    for chunk in range(programs.chunks):
        for way in ways:
            if (way[-1], chunk) in programs.programs:
                _check_way(programs, chunk, way)
        if ("X", chunk) not in programs.programs:
            _check_way(programs, chunk, ("F",))
    for what, name, chunk in [
        ("loss", programs.loss, programs.loss_chunk),
        *([("weight", programs.weight, programs.weight_chunk)] if programs.weight is not None else []),
        *(("output", o, c) for o, c in zip(programs.outputs, programs.output_chunks, strict=True)),
    ]:
        if name not in programs.programs["F", chunk].outputs:
            raise ProgramError(f"the {what} {name} isn't among what F{chunk} makes")


def _check_way(programs: ProgramSet, chunk: int, way: tuple[Kind, ...]) -> None:
    made: set[str] = set()
    for kind in way:
        program = programs.programs[kind, chunk]
        arriving: Direction | None = {"F": "F", "B": "B", "X": "B"}.get(kind)  # type: ignore[assignment]
        made |= {
            name
            for (direction, _, target), names in programs.messages.items()
            if direction == arriving and target == chunk
            for name in names
        }
        for given in program.inputs:
            if given.kind == "value" and given.name not in made:
                raise ProgramError(
                    f"{kind}{chunk} reads {given.name}, which no earlier program of chunk {chunk} makes and no "
                    "message brings it"
                )
        twice = [n for n, count in Counter(program.outputs).items() if count > 1 or n in made]
        if twice:
            raise ProgramError(f"{kind}{chunk} makes {twice[0]}, which has been made already")
        made |= set(program.outputs)
        for (direction, source, target), names in programs.messages.items():
            if direction == arriving and source == chunk:
                missing = [n for n in names if n not in program.outputs]
                if missing:
                    raise ProgramError(
                        f"{kind}{chunk} is to send {missing[0]} to chunk {target}, but doesn't make it"
                    )
        _check_slots(programs, program)


def _check_slots(programs: ProgramSet, program: SubProgram) -> None:
    added = Counter(i.name for i in program.inputs if i.kind == "acc")
    mine = [s.name for s in programs.slots if s.chunk == program.chunk] if program.kind in ("W", "X") else []
    if added != Counter(mine):
        wrong = sorted((added - Counter(mine)) + (Counter(mine) - added))
        raise ProgramError(
            f"{program.kind}{program.chunk} should add to each gradient slot of its chunk once, but doesn't "
            f"with {wrong[0]}"
        )
