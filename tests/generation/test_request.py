"""Prompts and limits as a user writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeloom.generation import GenerationError, Limits, Writer
from pipeloom.generation.request import requests


class Letters:
    """a is 0, b is 1, …"""

    ends = frozenset([25])

    def encode(self, text: str) -> list[int]:
        return [ord(c) - ord("a") for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + i) for i in ids)

    def writer(self) -> Writer:
        raise NotImplementedError

    def stops(self, strings: Sequence[str]) -> Callable[[Tensor, Any], Tensor]:
        raise NotImplementedError


def test_texts_ids_tensors_and_mappings() -> None:
    given = [
        "ab",
        [3, 4],
        torch.tensor([[5]]),
        {"prompt": "z", "max_new_tokens": 3, "seed": 9, "ends": 7, "stop": "q"},
    ]
    found = requests(given, Letters(), {"seed": 40, "temperature": 1})
    assert [r.ids for r in found] == [(0, 1), (3, 4), (5,), (25,)]
    assert [r.limits.seed for r in found] == [40, 41, 42, 9]
    assert [r.limits.max_new_tokens for r in found] == [64, 64, 64, 3]
    assert [r.limits.ends for r in found] == [(25,), (25,), (25,), (7,)]
    assert found[3].limits.stop == ("q",)
    assert found[3].limits.temperature == 1


def test_one_prompt_needs_no_list() -> None:
    assert [r.ids for r in requests("abc", Letters(), {})] == [(0, 1, 2)]
    assert [r.ids for r in requests([4, 5], None, {})] == [(4, 5)]
    assert [r.ids for r in requests(torch.tensor([4, 5]), None, {})] == [(4, 5)]


@pytest.mark.parametrize(
    ("prompts", "options", "says"),
    [
        ([], {}, "no prompt was given"),
        (["ab"], {"max_new_token": 3}, "generate has no option 'max_new_token': did you mean max_new_tokens"),
        (["ab"], {"max_new_tokens": 0}, "generate: max_new_tokens=0: write a whole number of at least 1"),
        (["ab"], {"temperature": -1.0}, "temperature=-1.0: write 0 for the likeliest token"),
        (["ab"], {"top_p": 1.5}, "top_p=1.5"),
        (["ab"], {"top_k": True}, "top_k=True"),
        (["ab"], {"seed": -1}, "seed=-1"),
        (["ab"], {"stop": [""]}, "stop=.*texts that aren't empty"),
        (["ab", {"prompt": "a", "top_p": 0}], {}, "prompt 1: top_p=0: write a number above 0"),
        ([{"text": "a"}], {}, 'prompt 0 is a mapping without "prompt"'),
        ([3.5], {}, "prompt 0 is float: give a text"),
        ([torch.zeros(2, 2)], {}, r"prompt 0 is a tensor of shape \(2, 2\) and dtype torch.float32"),
    ],
)
def test_what_can_t_be_run_is_refused(prompts: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(GenerationError, match=says):
        requests(prompts, Letters(), options)


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(GenerationError, match="prompt 0 is text, and there is no tokenizer"):
        requests(["ab"], None, {})
    with pytest.raises(GenerationError, match="prompt 0: stop needs a tokenizer"):
        requests([[1]], None, {"stop": "x"})


def test_what_needs_nothing_of_transformers() -> None:
    assert Limits(temperature=0.7).plain
    assert not Limits(top_k=3).plain
    assert not Limits(top_p=0.9).plain
