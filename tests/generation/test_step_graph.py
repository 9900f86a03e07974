"""The step as a graph: the same numbers as the module, for any length; sizes from inputs alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_lms import CACHED, STATIC, WORDS, Cached, Static, cached_step, greedily, new_cache
from torch import Tensor, nn

from pipeloom.generation import GenerationError, GenerationSpec, recomputing
from pipeloom.generation.chunks import cut, owners, place
from pipeloom.generation.step_graph import capture_step


def test_every_size_comes_from_the_inputs() -> None:
    graph = capture_step(Cached().eval(), CACHED, prompt=False)
    program = graph.program
    sizes = {node for node, desc in program.inputs.items() if desc.name in ("batch", "q", "past")}
    assert len(sizes) == 3
    live = program.live()
    assert not [n for n in live if "sym_size" in str(n.target)]
    assert sizes & live  # the mask is as long as the cache
    assert graph.leaves[:2] == ("cache[0][0]", "cache[0][1]")


def test_no_weight_is_touched_and_the_model_is_as_before() -> None:
    model = Cached().train()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    capture_step(model, CACHED, prompt=True)
    assert model.training
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_a_model_without_memory_can_be_captured() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS))
    graph = capture_step(model, recomputing(), prompt=True)
    assert {d.name for d in graph.program.inputs.values() if d.kind == "param"} == {
        "0.weight",
        "1.weight",
        "1.bias",
    }


def test_each_leaf_has_the_chunk_that_reads_and_writes_it() -> None:
    graph = capture_step(Cached().eval(), CACHED, prompt=False)
    place(graph, 3, ["layers.1", "layers.2"])
    assert owners(graph) == {f"cache[{layer}][{part}]": layer for layer in range(3) for part in range(2)}
    for chunk, program in enumerate(cut(graph, 3)):
        assert program.names("cache") == [f"cache[{chunk}][0]", f"cache[{chunk}][1]"]
        assert len(program.receives) == (chunk > 0)  # the hidden state alone
        assert len(program.sends) == (chunk < 2)


def test_a_leaf_of_two_chunks_is_named() -> None:
    model = Cached(shared=True).eval()
    graph = capture_step(model, CACHED, prompt=False)
    place(graph, 2, ["layers.2"])
    with pytest.raises(GenerationError, match=r"cache\[0\]\[0\] is needed by chunks 0 and 1: by .*cat"):
        owners(graph)


def test_a_static_cache_is_changed_in_place_and_has_one_owner() -> None:
    graph = capture_step(Static().eval(), STATIC, prompt=False)
    assert {d.name for _, d in graph.program.outputs if d.kind == "written"} == {"cache[0]", "cache[1]"}
    place(graph, 2, None)
    assert owners(graph) == {"cache[0]": 0, "cache[1]": 1}
    for chunk, program in enumerate(cut(graph, 2)):
        assert program.names("cache") == [f"cache[{chunk}]"]
        assert not [o for o in program.outputs if o.kind == "cache"]


def lengths(model: Any, ids: Tensor, start: Tensor, cache: Any, consts: Any) -> Any:
    del start, consts
    if ids.sum() > 3:
        return model(ids)[:, -1], cache
    return model(ids)[:, -1] + 1, cache


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids))


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (lengths, "can't capture a step of Plain.*depends on"),
        (
            lambda m, i, _s, c, _k: (m(i), c),
            r"step returned a tensor of shape \(1, .*, 61\), where the last position",
        ),
        (lambda m, i, _s, c, _k: (m(i)[:, -1], [c[0]]), "a cache of another form"),
        (lambda m, i, _s, c, _k: (m(i)[:, -1], [c[0], 3]), r"returned int as cache\[1\]"),
    ],
)
def test_a_step_that_can_t_be_run_is_refused(step: Any, says: str) -> None:
    spec = GenerationSpec(step, lambda b, *_: [torch.zeros(b, 0, 2), torch.zeros(b, 0, 2)], grow_dim=1)
    with pytest.raises(GenerationError, match=f"(?s){says}"):
        capture_step(Plain(), spec, prompt=True)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda *_: [3], r"init_cache: cache\[0\] is int"),
        (lambda *_: torch.zeros(2, 0, 3), r"shape \(2, 0, 3\) for a batch of 1"),
        (lambda b, *_: torch.zeros(b), "it has no dimension grow_dim=1"),
        (lambda b, *_: torch.zeros(b, 4, 3), "a new cache has no positions yet, so dimension 1 must be 0"),
    ],
)
def test_what_can_t_be_a_cache_is_refused(make: Any, says: str) -> None:
    spec = GenerationSpec(cached_step, make, grow_dim=1)
    with pytest.raises(GenerationError, match=says):
        spec.new_cache(1, torch.device("cpu"))


def test_a_window_is_for_models_without_a_cache() -> None:
    with pytest.raises(GenerationError, match="window is for a model without a cache"):
        GenerationSpec(cached_step, new_cache(1, 4, 2), window=3)
    with pytest.raises(GenerationError, match="max_len=0: write a whole number"):
        recomputing(max_len=0)


def test_the_oracle_is_not_constant() -> None:
    assert len(set(greedily(Cached().eval(), [1, 2, 3], 12))) > 3
