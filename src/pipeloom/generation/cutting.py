"""A model's step, captured and cut for a number of stages: what every rank works out for itself, alike.

Takes the model, its spec and the strategy; gives the chunk programs of each graph when they are first asked for, and
the Stage of one rank, with that rank's weights alone. The model itself isn't kept: a copy of it without memory
serves later captures.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..strategy import Strategy
from .chunks import ChunkProgram, cut, owners, place, place_like
from .spec import GenerationError, GenerationSpec
from .stage import Stage
from .step_graph import StepGraph, capture_step, first_names

#: reads weights by name, of a model that has none itself (on the meta device)
ReadWeights = Callable[[Sequence[str]], Mapping[str, Tensor]]


class Graphs:
    """The graphs of a model's step, captured when they are first asked for (that takes seconds)."""

    def __init__(self, model: nn.Module, spec: GenerationSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self._skeleton = _skeleton(model)
        self._graphs: dict[tuple[bool, bool], StepGraph] = {}

    def get(self, prompt: bool, several: bool) -> StepGraph:
        """prompt: for two ids or more; else for one. several: for more rows than one. Raises GenerationError."""
        key = (prompt and self._has_prompts, several)
        if key not in self._graphs:
            self._graphs[key] = capture_step(
                self._skeleton, self.spec, prompt=key[0], several=several, device=self.device
            )
        return self._graphs[key]

    @property
    def _has_prompts(self) -> bool:
        """Whether there is room for a prompt of two ids at all."""
        return (self.spec.window or self.spec.max_len or 2) > 1


class Cutting:
    """The chunk programs of a model's generation, for all stages. Raises GenerationError for a model that can't be
    captured or cut."""

    def __init__(self, graphs: Graphs, strategy: Strategy) -> None:
        if strategy.chunks != strategy.pp_degree:
            raise GenerationError(
                f"strategy: vpp_degree is {strategy.vpp_degree}: a token goes through the stages one after another, so "
                "several chunks a stage would only add messages. Leave it 1."
            )
        self.graphs = graphs
        self.stages = strategy.pp_degree
        self._programs: dict[tuple[bool, bool], list[ChunkProgram]] = {}
        decode = graphs.get(False, False)
        self.points = place(decode, self.stages, strategy.cuts)
        self.owners = owners(decode)
        self._programs[False, False] = cut(decode, self.stages)

    def programs(self, prompt: bool, several: bool) -> list[ChunkProgram]:
        """The programs of one graph, by stage."""
        key = (prompt, several)
        if key not in self._programs:
            graph = self.graphs.get(prompt, several)
            place_like(graph, self.stages, self.points)
            where = owners(graph)
            moved = [leaf for leaf, chunk in self.owners.items() if where.get(leaf, chunk) != chunk]
            if moved:
                raise GenerationError(
                    f"{moved[0]} lies in chunk {self.owners[moved[0]]} for one token, but in chunk {where[moved[0]]} "
                    "elsewhere: cut the model between whole layers (Strategy.cuts)"
                )
            self._programs[key] = cut(graph, self.stages)
        return self._programs[key]

    def constants(self, prompt: bool, several: bool) -> Mapping[str, Tensor]:
        """Tensors that a graph holds itself."""
        device = self.graphs.device
        return {n: t.to(device) for n, t in self.graphs.get(prompt, several).constants.items()}

    def stage(self, index: int, read: ReadWeights) -> Stage:
        """The stage of one rank. read: gives the weights by name; called once, for this stage's."""
        own = [leaf for leaf, chunk in self.owners.items() if chunk == index]
        needed: dict[str, None] = {}
        for prompt in (False, True):
            constants = self.constants(prompt, False)
            program = self.programs(prompt, False)[index]
            names = (*program.names("param"), *program.names("buffer"))
            needed.update((n, None) for n in names if n not in constants)
        found = read(list(needed))
        absent = [n for n in needed if n not in found or found[n].is_meta]
        if absent:
            raise GenerationError(
                f"the weight {absent[0]!r} of stage {index} has no value: the model is on the meta device; pass "
                "weights=…, which reads them by name"
            )
        tensors = {n: found[n].detach().to(self.graphs.device) for n in needed}

        def graph(prompt: bool, several: bool) -> tuple[ChunkProgram, Mapping[str, Tensor]]:
            return self.programs(prompt, several)[index], self.constants(prompt, several)

        return Stage(index, self.stages, self.graphs.spec, self.graphs.device, own, tensors, graph)


def weights_of(model: nn.Module) -> ReadWeights:
    """Reads from a model that is here."""
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    first = first_names(model)

    def read(names: Sequence[str]) -> Mapping[str, Tensor]:
        return {name: tensors[first.get(name, name)] for name in names if name in tensors}

    return read


def _skeleton(model: nn.Module) -> nn.Module:
    """A copy of the model on the meta device: its structure without its memory; tied weights stay tied."""
    memo: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        twin = tensor.detach().to("meta")
        memo[id(tensor)] = (
            nn.Parameter(twin, requires_grad=tensor.requires_grad)
            if isinstance(tensor, nn.Parameter)
            else twin
        )
    return copy.deepcopy(model, memo).eval()
