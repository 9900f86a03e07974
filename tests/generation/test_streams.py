"""Generation with all stages in one process: the same tokens as plain PyTorch, however it is cut and filled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_lms import CACHED, STATIC, Cached, Static, cut_for, greedily

from pipeloom import Strategy
from pipeloom.generation import GenerationError, LocalGenerator, StreamError, compile_local, recomputing
from pipeloom.runtime.errors import JobError

PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7], [11, 12, 13, 14, 15, 16, 17, 18]]
NEW = [1, 3, 7, 20]


@pytest.fixture(scope="module")
def gens() -> dict[int, LocalGenerator]:
    model = Cached().eval()
    return cut_for(model, CACHED, 1, 2, 3)


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    model = Cached().eval()
    return [greedily(model, ids, new) for ids, new in zip(PROMPTS, NEW, strict=True)]


def asked() -> list[dict[str, Any]]:
    return [{"prompt": ids, "max_new_tokens": new} for ids, new in zip(PROMPTS, NEW, strict=True)]


@pytest.mark.parametrize("refill", ["continuous", "batch"])
@pytest.mark.parametrize("in_flight", [1, 2, 3, None])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_tokens_are_plain_pytorch_s(
    gens: dict[int, LocalGenerator], wanted: list[list[int]], stages: int, in_flight: int | None, refill: Any
) -> None:
    results = gens[stages].generate(asked(), in_flight=in_flight, refill=refill)
    assert [list(result.tokens) for result in results] == wanted
    assert [result.stopped for result in results] == ["length"] * 4
    assert [result.prompt for result in results] == [tuple(ids) for ids in PROMPTS]


def test_an_end_token_ends_one_prompt_alone(gens: dict[int, LocalGenerator], wanted: list[list[int]]) -> None:
    end = wanted[3][2]
    results = gens[2].generate(asked(), ends=[end])
    for result, full in zip(results, wanted, strict=True):
        cut = full.index(end) + 1 if end in full else len(full)
        assert list(result.tokens) == full[:cut]
        assert result.stopped == ("end" if end in full else "length")


def test_draws_don_t_depend_on_stages_nor_on_what_is_in_flight(gens: dict[int, LocalGenerator]) -> None:
    found = [
        [r.tokens for r in gens[stages].generate(asked(), temperature=1.3, seed=5, in_flight=in_flight)]
        for stages in (1, 2, 3)
        for in_flight in (1, 4)
    ]
    assert all(tokens == found[0] for tokens in found)
    assert found[0] != [r.tokens for r in gens[1].generate(asked(), temperature=1.3, seed=6)]


def test_a_stream_gives_each_prompt_s_tokens_in_order(gens: dict[int, LocalGenerator]) -> None:
    stream = gens[2].stream(asked())
    tokens = list(stream)
    for index, new in enumerate(NEW):
        own = [token for token in tokens if token.prompt == index]
        assert [token.position for token in own] == list(range(new))
        assert [bool(token.stopped) for token in own] == [False] * (new - 1) + [True]
        assert tuple(token.id for token in own) == stream.results[index].tokens
    assert stream.figures.tokens == sum(NEW)


def test_prompts_share_the_pipeline(gens: dict[int, LocalGenerator]) -> None:
    order = [
        token.prompt for token in gens[2].stream([[1, 2], [3, 4], [5, 6]], max_new_tokens=4, in_flight=2)
    ]
    assert order[:4] == [0, 1, 0, 1]
    assert order.index(2) > order.index(1)  # let in when one of the first two was over
    batches = [
        token.prompt
        for token in gens[2].stream(
            [{"prompt": [1], "max_new_tokens": 1}, {"prompt": [2], "max_new_tokens": 5}, [3], [4], [5]],
            max_new_tokens=2,
            in_flight=2,
            refill="batch",
        )
    ]
    assert batches == [
        0,
        1,
        1,
        1,
        1,
        1,
        2,
        3,
        2,
        3,
        4,
        4,
    ]  # a batch waits for the last one's longest; the last is short


def test_a_stage_holds_its_own_weights_and_caches(gens: dict[int, LocalGenerator]) -> None:
    whole = gens[1].stages[0]
    parts = gens[3].stages
    assert [leaf for stage in parts for leaf in stage.own] == list(whole.own)
    tied = 61 * 16 * 4  # the embedding, which the head shares: on the first stage and on the last
    assert sum(stage.weight_bytes for stage in parts) == whole.weight_bytes + tied
    assert all(stage.weight_bytes < whole.weight_bytes for stage in parts)


def test_caches_are_freed_when_a_scope_stops(gens: dict[int, LocalGenerator]) -> None:
    stream = gens[2].stream([[1, 2, 3], [4, 5, 6]], max_new_tokens=5, in_flight=1)
    list(stream)
    a_position = 2 * 16 * 4  # a key and a value
    layers = [len(stage.own) // 2 for stage in gens[2].stages]
    for rank, count in zip(stream.figures.ranks, layers, strict=True):
        assert (
            rank.cache_bytes == 7 * a_position * count
        )  # of one scope at a time: 3 ids and 4 of the 5 new ones
        assert rank.left_bytes == 0


def test_a_prompt_is_cancelled_midway(gens: dict[int, LocalGenerator], wanted: list[list[int]]) -> None:
    stream = gens[2].stream(asked())
    for token in stream:
        if token.prompt == 3 and token.position == 4:
            stream.cancel(3)
    results = stream.results
    assert [list(r.tokens) for r in results[:3]] == wanted[:3]
    assert results[3].stopped == "cancelled"
    assert list(results[3].tokens) == wanted[3][: len(results[3].tokens)]
    assert 5 <= len(results[3].tokens) <= 7  # what was under way comes back first
    with pytest.raises(GenerationError, match="there is no prompt 4 to cancel: they are 0 to 3"):
        stream.cancel(4)


def test_a_stream_that_is_left_is_brought_to_its_end(
    gens: dict[int, LocalGenerator], wanted: list[list[int]]
) -> None:
    with gens[3].stream(asked()) as stream:
        next(stream)
    assert [bool(r.stopped) for r in stream.results] == [True] * 4
    assert list(stream) == []
    next(gens[3].stream(asked()))  # left without being closed: the next run closes it
    assert [list(r.tokens) for r in gens[3].generate(asked())] == wanted


class Boom:
    """A logits processor that fails at its third token."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        del ids
        self.calls += 1
        if self.calls == 3:
            raise ZeroDivisionError("boom")
        return scores


def test_an_exception_names_the_task_and_keeps_what_was_over(
    gens: dict[int, LocalGenerator], wanted: list[list[int]]
) -> None:
    prompts = asked()
    prompts[3]["processors"] = [Boom()]
    with pytest.raises(StreamError, match=r"(?s)recv .*rank 1.*scope 3.*boom.*prompts were over") as caught:
        gens[2].generate(prompts)
    assert isinstance(caught.value.__cause__, JobError)
    results = {r.index: r for r in caught.value.results}
    assert [list(results[i].tokens) for i in (0, 1)] == wanted[:2]
    assert results[3].stopped == ""
    assert list(results[3].tokens) == wanted[3][:2]
    assert [list(r.tokens) for r in gens[2].generate(asked())] == wanted  # and the next run is as ever


@pytest.mark.parametrize(
    ("prompts", "options", "says"),
    [
        ([[1, 2], []], {"max_new_tokens": 3}, "prompt 1 is empty"),
        (
            [[1] * 30],
            {"max_new_tokens": 11},
            "prompt 0 is too long: 30 tokens and 11 new ones make 41.*40 positions.*to 10",
        ),
        ([[1]], {"batch": 2}, "batch=2: this model's spec has no scope_inputs"),
        ([[1]], {"in_flight": 0}, "in_flight=0"),
        ([[1]], {"refill": "sometimes"}, 'write "continuous" or "batch"'),
    ],
)
def test_bad_prompts_are_refused(
    gens: dict[int, LocalGenerator], prompts: Any, options: Any, says: str
) -> None:
    with pytest.raises(GenerationError, match=says):
        gens[2].stream(prompts, **options)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_static_cache(stages: int) -> None:
    model = Static().eval()
    gen = compile_local(model, STATIC, Strategy(pp_degree=stages))
    results = gen.generate([[1, 2, 3], [4]], max_new_tokens=9)
    for ids, result in zip([[1, 2, 3], [4]], results, strict=True):
        found: list[int] = []
        with torch.no_grad():
            for _ in range(9):
                cache = [torch.zeros(1, 24, 8) for _ in range(2)]
                logits = model(torch.tensor([[*ids, *found]]), torch.tensor(0), cache)
                found.append(int(logits[0, -1].argmax()))
        assert list(result.tokens) == found


def test_a_model_without_a_cache_is_recomputed() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(20, 8), torch.nn.Linear(8, 8), Sums(), torch.nn.Linear(8, 20)
    )
    for window in (None, 4):
        gen = compile_local(model, recomputing(window=window), Strategy(pp_degree=2, cuts=["2"]))
        for ids, result in zip(
            [[3, 1, 4], [5]], gen.generate([[3, 1, 4], [5]], max_new_tokens=10), strict=True
        ):
            text = list(ids)
            with torch.no_grad():
                for _ in range(10):
                    seen = text[-window:] if window else text
                    text.append(int(model(torch.tensor([seen]))[0, -1].argmax()))
            assert [*ids, *result.tokens] == text


class Sums(torch.nn.Module):
    """So that all ids count."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x.cumsum(1) * 3)


def test_several_chunks_a_stage_are_refused() -> None:
    with pytest.raises(GenerationError, match="vpp_degree is 2"):
        compile_local(Cached(), CACHED, Strategy(pp_degree=2, vpp_degree=2, schedule_mode="VPP"))


def test_a_module_without_a_spec_is_refused() -> None:
    with pytest.raises(GenerationError, match="Cached is no model of transformers"):
        compile_local(Cached())
