"""split_programs: one labelled Program becomes the forward, backward, backward_b and backward_w programs of its chunks.

By closure, not by pattern. For each chunk: F is what its forward ops are; B is what other chunks' backward needs of its
backward ops; W is the rest of what its weight gradients need; X is B and W whole, so that schedules that don't
split don't pay. Chunk 0 has no input gradient, so its B is empty and its W is the whole backward; so it is
behind a frozen prefix. Views are recomputed where they are used inside a chunk, and sent as they are between
chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
import torch.fx as fx

from ..program import compat
from ..program.ir import CHUNK, ROLE, OpRole, Program, ProgramError, closure, is_getitem, where
from ..program.straight import Straight
from ..program.subprogram import GradientSlot, Input, InputKind, ProgramSet, SubProgram, ValueInfo
from ..schedules.jobs import Direction, Kind
from .check_programs import check_programs
from .cost_model import totals
from .cuts import replicated
from .extract import extract, sinkable
from .kept import cheapest_boundary
from .memory import peak_bytes
from .structure import structure_of


def split_programs(program: Program, *, split_backward: bool = True) -> ProgramSet:
    """The ProgramSet of a program that label_chunks has labelled.

    split_backward False: only F and X are made (schedules without B and W). Raises ProgramError where a value
    would be needed before it is made, naming both ends.
    """
    programs = _Splitter(program, split_backward).run()
    check_programs(programs)
    return programs


class _Splitter:
    def __init__(self, program: Program, split_backward: bool) -> None:
        self.program = program
        self.split_backward = split_backward
        self.graph = program.graph
        self.free = replicated(program)
        self.order = {n: i for i, n in enumerate(self.graph.nodes)}
        live = program.live()
        chunks = range(program.chunks)
        self.forward: list[set[fx.Node]] = [set() for _ in chunks]
        self.backward: list[set[fx.Node]] = [set() for _ in chunks]
        for node in program.ops():
            if node in live and node not in self.free:
                side = self.forward if node.meta[ROLE] == OpRole.FORWARD else self.backward
                side[node.meta[CHUNK]].add(node)
        self.parameters = {desc.name: n for n, desc in program.inputs.items() if desc.kind == "param"}
        self.slots: list[list[tuple[fx.Node, GradientSlot]]] = [[] for _ in chunks]
        for node, parameter, index in program.slots():
            chunk = self._chunk_of_slot(node)
            value = compat.fake_values(node)[0]
            slot = GradientSlot(
                f"{parameter}#{index}", parameter, index, tuple(value.shape), self._dtype(parameter), chunk
            )
            self.slots[chunk].append((node, slot))
        self.needed_outputs = [n for n, desc in program.outputs if desc.kind in ("output", "buffer")]
        self.structures: dict[str, SubProgram] = {}

    def _dtype(self, parameter: str) -> torch.dtype:
        """Of the accumulator of a parameter's gradient."""
        dtype = compat.fake_values(self.parameters[parameter])[0].dtype
        # small addends are lost in a sum of half precision
        return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

    def _chunk_of_slot(self, node: fx.Node) -> int:
        if CHUNK in node.meta:
            return int(node.meta[CHUNK])
        raise ProgramError(f"the gradient {where(node)} belongs to no chunk")

    def run(self) -> ProgramSet:
        program, chunks = self.program, range(self.program.chunks)
        # what crosses: messages[direction, source, target] -> values
        messages: dict[tuple[Direction, int, int], list[fx.Node]] = {}
        for c in chunks:
            for nodes in (self.forward[c], self.backward[c]):
                for value in self._inputs(nodes, c, within=False)[1]:
                    if value.op == "placeholder":
                        continue
                    source = value.meta[CHUNK]
                    if source == c:
                        continue
                    direction: Direction = "F" if value in self.forward[source] else "B"
                    if (source < c) != (direction == "F"):
                        raise ProgramError(
                            f"chunk {c} needs {where(value)} of chunk {source}, which is made too late for it; "
                            "cut elsewhere"
                        )
                    found = messages.setdefault((direction, source, c), [])
                    if value not in found:
                        found.append(value)
        for found in messages.values():
            found.sort(key=self.order.__getitem__)
        sent: list[dict[Direction, list[fx.Node]]] = [{"F": [], "B": []} for _ in chunks]
        for (direction, source, _), found in messages.items():
            sent[source][direction] += [v for v in found if v not in sent[source][direction]]
        programs: dict[tuple[Kind, int], SubProgram] = {}
        for c in chunks:
            self._chunk(c, sent[c], programs)
        self._check_buffers(programs)
        values = self._values(programs, messages)
        weight = program.weight
        outputs = program.model_outputs
        return ProgramSet(
            chunks=program.chunks,
            programs=programs,
            values=values,
            messages={k: [v.name for v in found] for k, found in sorted(messages.items())},
            slots=[slot for per_chunk in self.slots for _, slot in per_chunk],
            loss=program.loss.name,
            loss_chunk=self._home(program.loss),
            weight=weight.name if weight is not None else None,
            weight_chunk=self._home(weight) if weight is not None else -1,
            outputs=[o.name for o in outputs],
            output_chunks=[self._home(o) for o in outputs],
            draws=program.draws,
            means=program.means,
        )

    def _home(self, node: fx.Node) -> int:
        """The chunk whose F makes an output; one made from the batch alone is made by the last."""
        return int(node.meta.get(CHUNK, self.program.chunks - 1))

    def _chunk(
        self, c: int, sent: dict[Direction, list[fx.Node]], programs: dict[tuple[Kind, int], SubProgram]
    ) -> None:
        forward, backward = self.forward[c], self.backward[c]
        slots = self.slots[c]
        exports = sent["B"]
        parts: dict[Kind, tuple[set[fx.Node], list[fx.Node], list[tuple[fx.Node, GradientSlot]]]] = {}
        if self.program.training:
            parts["X"] = (backward, exports, slots)
            if self.split_backward:
                b_nodes = self._with_items(closure(exports) & backward, backward)
                if exports:
                    b_nodes = cheapest_boundary(b_nodes, backward, [n for n, _ in slots], self._needs_of)
                w_nodes = backward - b_nodes
                b_slots: list[tuple[fx.Node, GradientSlot]] = []
                needed = self._inputs(w_nodes, c)[1]
                needed += [v for n, _ in slots if n in b_nodes for v in self._inputs_of_value(n, c)[1]]
                kept = [v for v in dict.fromkeys(needed) if v in b_nodes]
                parts["B"] = (b_nodes, exports + [v for v in kept if v not in exports], b_slots)
                parts["W"] = (w_nodes, [], slots)
        keep: list[fx.Node] = []
        for kind, (nodes, outputs, part_slots) in parts.items():
            program = self._program(kind, c, nodes, outputs, part_slots)
            programs[kind, c] = program
            names = {i.name for i in program.inputs if i.kind == "value"}
            keep += [n for n in forward if n.name in names and n not in keep]
        home = [n for n in self.needed_outputs if self._home(n) == c]
        outputs = list(dict.fromkeys([*sent["F"], *home, *sorted(keep, key=self.order.__getitem__)]))
        programs["F", c] = self._program("F", c, forward, outputs, [])

    def _needs_of(self, node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if n not in self.free]

    def _with_items(self, nodes: set[fx.Node], within: set[fx.Node]) -> set[fx.Node]:
        """With the getitems of the ops in it: a tuple never crosses from one program to another."""
        return nodes | {u for n in nodes for u in n.users if is_getitem(u) and u in within}

    def _inputs(
        self, nodes: Iterable[fx.Node], c: int, within: bool = True
    ) -> tuple[set[fx.Node], list[fx.Node]]:
        """(ops to recompute, values to pass in) for a set of ops of chunk c. within: views of the chunk's own
        values are recomputed."""
        mine = set(nodes)
        extra: set[fx.Node] = set()
        passed: dict[fx.Node, None] = {}
        todo = [
            i
            for n in sorted(mine, key=self.order.__getitem__, reverse=True)
            for i in reversed(n.all_input_nodes)
        ]
        while todo:
            value = todo.pop()
            if value in mine or value in extra or value in passed:
                continue
            own = value.op != "placeholder" and value.meta.get(CHUNK) == c
            if value in self.free or (within and own and sinkable(value)):
                extra.add(value)
                todo.extend(reversed(value.all_input_nodes))
            else:
                passed[value] = None
        return extra, list(passed)

    def _program(
        self,
        kind: Kind,
        c: int,
        nodes: set[fx.Node],
        outputs: list[fx.Node],
        slots: list[tuple[fx.Node, GradientSlot]],
    ) -> SubProgram:
        extra, inputs = self._inputs([*nodes, *(o for o in outputs if o in self.free)], c)
        for value in [*outputs, *(n for n, _ in slots)]:
            if value not in nodes and value not in extra and value not in inputs:
                more, passed = self._inputs_of_value(value, c)
                extra |= more
                inputs += [p for p in passed if p not in inputs]
        names = [self._input(n) for n in inputs] + [Input("acc", slot.name) for _, slot in slots]
        buffers = (
            {} if kind != "F" else {name: n.name for n, name in self.program.buffer_updates() if n in outputs}
        )
        if not nodes and not outputs and not slots:
            return SubProgram(kind, c, _nothing, [], [])
        graph_module = extract(
            self.graph,
            self.program.graph_module,
            nodes | extra,
            inputs,
            outputs,
            [(n, slot.dtype) for n, slot in slots],
            f"{kind}{c}",
        )
        structure = structure_of(graph_module)
        twin = self.structures.get(structure)
        if twin is not None:
            call, graph = twin.call, twin.graph
            flops, moved, peak = twin.flops, twin.moved, twin.peak_bytes
        else:
            call, graph = Straight(graph_module), graph_module
            flops, moved = totals(graph_module.graph.nodes)
            owned = {i.name for i in inputs if i.op != "placeholder"}
            peak = peak_bytes(graph_module.graph, owned if kind != "F" else ())
        result = SubProgram(
            kind,
            c,
            call,
            names,
            [o.name for o in outputs],
            buffers,
            flops=flops,
            moved=moved,
            peak_bytes=peak,
            structure=structure,
            shapes=[_shape(n) for n in graph_module.graph.nodes if n.op == "placeholder"],
            graph=graph,
        )
        self.structures.setdefault(structure, result)
        return result

    def _inputs_of_value(self, value: fx.Node, c: int) -> tuple[set[fx.Node], list[fx.Node]]:
        if value in self.free or (value.meta.get(CHUNK) == c and sinkable(value)):
            extra, passed = self._inputs([value], c)
            return extra | {value}, passed
        return set(), [value]

    def _input(self, node: fx.Node) -> Input:
        desc = self.program.inputs.get(node)
        if desc is None:
            return Input("value", node.name)
        return Input(cast(InputKind, desc.kind), "" if desc.kind == "tangent" else desc.name)

    def _check_buffers(self, programs: dict[tuple[Kind, int], SubProgram]) -> None:
        updated = {name: p.chunk for p in programs.values() for name in p.buffers}
        for p in programs.values():
            for i in p.inputs:
                if i.kind == "buffer" and updated.get(i.name, p.chunk) != p.chunk:
                    raise ProgramError(
                        f"the buffer {i.name!r} is read in chunk {p.chunk} and updated in chunk "
                        f"{updated[i.name]}: its next value would have to travel backwards. Cut so that the "
                        "modules that share it are in one chunk."
                    )

    def _values(
        self,
        programs: dict[tuple[Kind, int], SubProgram],
        messages: dict[tuple[Direction, int, int], list[fx.Node]],
    ) -> dict[str, ValueInfo]:
        names = {name for p in programs.values() for name in p.outputs}
        names |= {i.name for p in programs.values() for i in p.inputs if i.kind == "value"}
        names |= {v.name for found in messages.values() for v in found}
        values = {}
        keys: dict[int, int] = {}
        always = {
            compat.storage_key(tensor)
            for node, desc in self.program.inputs.items()
            if desc.kind in ("param", "buffer")
            for tensor in compat.fake_values(node)
        }
        for node in self.graph.nodes:
            if node.name not in names:
                continue
            found = compat.fake_values(node)
            if len(found) != 1:
                raise ProgramError(f"{where(node)} crosses between programs, but isn't one tensor")
            tensor = found[0]
            key = keys.setdefault(compat.storage_key(tensor), len(keys))
            values[node.name] = ValueInfo(
                node.name,
                tuple(tensor.shape),
                tuple(tensor.stride()),
                tensor.dtype,
                key,
                tensor.numel() * tensor.element_size(),
                0 if compat.storage_key(tensor) in always else tensor.untyped_storage().nbytes(),
            )
        return values


def _shape(node: fx.Node) -> tuple[tuple[int, ...], torch.dtype]:
    value = compat.fake_values(node)[0]
    return tuple(value.shape), value.dtype


def _nothing(_inputs: list[object]) -> tuple[object, ...]:
    return ()
