"""Generation on real ranks: the same tokens; where something fails, all ranks say what, and what was over is kept."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_lms import CACHED, Cached, by_hub, greedily, llama

from pipeloom import Strategy
from pipeloom.generation import Generator, StreamError, compile

PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7], [11, 12, 13, 14, 15, 16, 17, 18]]
NEW = [1, 3, 7, 20]


def asked(**more: Any) -> list[dict[str, Any]]:
    return [{"prompt": ids, "max_new_tokens": new, **more} for ids, new in zip(PROMPTS, NEW, strict=True)]


def generator(size: int, timeout: float = 20) -> Generator:
    return compile(Cached().eval(), CACHED, Strategy(pp_degree=size), timeout=timeout)


def everything(_rank: int, size: int) -> dict[str, Any]:
    gen = generator(size)
    found: dict[str, Any] = {}
    for in_flight in (1, 2, None):
        for refill in ("continuous", "batch"):
            results = gen.generate(asked(), in_flight=in_flight, refill=refill)
            found[f"{in_flight} {refill}"] = [list(r.tokens) for r in results]
    found["drawn"] = [list(r.tokens) for r in gen.generate(asked(), temperature=1.2, seed=4)]
    stream = gen.stream(asked())
    found["streamed"] = [[t.prompt, t.id] for t in stream]
    found["weights"] = [rank.weight_bytes for rank in stream.figures.ranks]
    found["left"] = [rank.left_bytes for rank in stream.figures.ranks]
    stream = gen.stream(asked())
    for token in stream:
        if token.prompt == 3 and token.position == 2:
            stream.cancel(3)
    found["cancelled"] = [[r.stopped, len(r.tokens)] for r in stream.results]
    with gen.stream(asked()) as stream:
        next(stream)
    found["left early"] = [bool(r.stopped) for r in stream.results]
    gen.close()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_agree_with_plain_pytorch(ranks: Callable[..., list[Any]], size: int) -> None:
    model = Cached().eval()
    wanted = [greedily(model, ids, new) for ids, new in zip(PROMPTS, NEW, strict=True)]
    found = ranks(everything, size, timeout=120)
    for result in found:
        assert all(result[name] == wanted for name in result if " " in name and name != "left early")
        assert result["left"] == [0] * size
        assert result["left early"] == [True] * 4
        (why, count) = result["cancelled"][3]
        assert why == "cancelled"
        assert 3 <= count < 20
        assert {name: v for name, v in result.items() if name not in ("weights",)} == {
            name: v for name, v in found[0].items() if name not in ("weights",)
        }
    assert len(found[0]["weights"]) == size


def hub_model(_rank: int, size: int) -> list[list[int]]:
    gen = compile(llama(), None, Strategy(pp_degree=size))
    results = gen.generate(PROMPTS, max_new_tokens=6, temperature=0.9, top_p=0.9, seed=3)
    gen.close()
    return [list(r.tokens) for r in results]


def test_a_model_of_transformers_on_two_ranks(ranks: Callable[..., list[Any]]) -> None:
    model = llama()
    wanted = [by_hub(model, ids, 6, seed=3 + i, temperature=0.9, top_p=0.9) for i, ids in enumerate(PROMPTS)]
    assert ranks(hub_model, 2, timeout=120) == [wanted, wanted]


class Boom:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        del ids
        self.calls += 1
        if self.calls == 6:
            raise ZeroDivisionError("boom")
        return scores


def caught(rank: int, size: int, what: str) -> dict[str, Any]:
    gen = generator(size)
    prompts = asked()
    if what == "task":
        prompts[3]["processors"] = [Boom()]
    stream = gen.stream(prompts)
    try:
        for token in stream:
            if what == "killed" and rank == size - 1 and token.prompt == 3 and token.position == 5:
                os.kill(os.getpid(), signal.SIGKILL)
    except StreamError as error:
        return {"error": str(error), "over": {r.index: [r.stopped, list(r.tokens)] for r in error.results}}
    return {}


def test_an_exception_is_told_to_every_rank(ranks: Callable[..., list[Any]]) -> None:
    model = Cached().eval()
    wanted = [greedily(model, ids, new) for ids, new in zip(PROMPTS, NEW, strict=True)]
    for result in ranks(caught, 2, "task"):
        assert "boom" in result["error"]
        assert "recv" in result["error"]
        assert "scope 3" in result["error"]
        assert [result["over"][str(i)][1] for i in (0, 1)] == wanted[:2]
        assert result["over"]["3"][0] == ""


def test_a_killed_rank_is_named_by_the_others(ranks: Any) -> None:
    outcomes = ranks.outcomes(caught, 3, "killed", timeout=60)
    assert outcomes[2].kind == "died"
    for outcome in outcomes[:2]:
        assert outcome.kind == "", outcome.error
        assert outcome.seconds < 30
        assert "rank 2" in outcome.value["error"]
        assert outcome.value["over"]["0"][0] == "length"


def differ(rank: int, size: int) -> str:
    gen = generator(size)
    try:
        gen.generate([[1, 2, 3 + rank]], max_new_tokens=2)
    except StreamError as error:
        return str(error)
    return ""


def test_ranks_with_other_prompts_are_told(ranks: Callable[..., list[Any]]) -> None:
    for text in ranks(differ, 2):
        assert "ranks 0 and 1 don't have the same prompts" in text
