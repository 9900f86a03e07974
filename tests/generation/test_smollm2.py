"""SmolLM2-135M on real ranks: the tokens of transformers' own `generate`, for eight prompts with different stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipeloom import Strategy
from pipeloom.generation import GenerationError, compile
from pipeloom.generation.smollm2 import fetched

pytestmark = pytest.mark.nightly

PROMPTS = [
    ("The capital of France is", 24, ()),
    ("Once upon a time, in a small village by the sea, there lived", 16, ()),
    ("Hello", 1, ()),
    ("def fibonacci(n):", 20, ("return",)),
    ("Water boils at", 7, ()),
    ("Q: What is 2 + 2?\nA:", 24, ("\n",)),
    ("Dear Sir or Madam,", 12, ()),
    ("In 1969, people first", 3, ()),
]
DRAWN = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1}


def asked() -> list[dict[str, Any]]:
    return [{"prompt": text, "max_new_tokens": new, "stop": list(stop)} for text, new, stop in PROMPTS]


def by_ranks(_rank: int, size: int) -> list[Any]:
    from pipeloom.generation.transformers import hub_spec, open_folder

    model, words, weights = open_folder(fetched())
    gen = compile(model, hub_spec(model), Strategy(pp_degree=size), words=words, weights=weights)
    found: list[Any] = [
        [list(r.tokens) for r in gen.generate(asked())],
        [list(r.tokens) for r in gen.generate(asked(), seed=7, in_flight=3, **DRAWN)],
    ]
    found.append(gen.stages[0].weight_bytes)
    gen.close()
    return found


def by_transformers() -> list[list[list[int]]]:
    hub = pytest.importorskip("transformers")
    folder = fetched()
    model = hub.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = hub.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    found = []
    for options in ({"do_sample": False}, {"do_sample": True, **DRAWN}):
        texts = []
        for number, (text, new, stop) in enumerate(PROMPTS):
            given = tokenizer(text, return_tensors="pt")
            torch.manual_seed(7 + number)
            more = {"stop_strings": list(stop), "tokenizer": tokenizer} if stop else {}
            made = model.generate(**given, max_new_tokens=new, **options, **more)
            texts.append(made[0, given["input_ids"].shape[1] :].tolist())
        found.append(texts)
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.timeout(900)
def test_tokens_are_transformers_own(ranks: Callable[..., list[Any]], size: int) -> None:
    try:
        fetched()
    except GenerationError as error:
        pytest.skip(str(error))
    wanted = by_transformers()
    assert len({len(tokens) for tokens in wanted[0]}) > 4
    found = ranks(by_ranks, size, timeout=600)
    for greedy, drawn, nbytes in found:
        assert greedy == wanted[0]
        assert drawn == wanted[1]
        assert (
            nbytes < 0.75 * 4 * 134_515_008
        )  # not the whole model (the first stage and the last share a matrix)
