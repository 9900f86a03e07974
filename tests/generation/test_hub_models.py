"""Models of transformers: the tokens of their own `generate`, for every number of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_lms import by_hub, cut_for, gpt2, llama

from pipeloom import Strategy
from pipeloom.generation import GenerationError, LocalGenerator, compile_local

hub = pytest.importorskip("transformers")
hub_adapter = pytest.importorskip("pipeloom.generation.transformers")

PROMPTS = [[5, 9, 2, 33], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [60, 3]]
NEW = [1, 3, 7, 12]
MODELS = {"llama": llama, "gpt2": gpt2}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def gens(model: Any) -> dict[int, LocalGenerator]:
    return cut_for(model, hub_adapter.hub_spec(model), 1, 2, 3)


def asked(**more: Any) -> list[dict[str, Any]]:
    return [{"prompt": ids, "max_new_tokens": new, **more} for ids, new in zip(PROMPTS, NEW, strict=True)]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_greedy(model: Any, gens: dict[int, LocalGenerator], stages: int) -> None:
    wanted = [by_hub(model, ids, new) for ids, new in zip(PROMPTS, NEW, strict=True)]
    assert len({token for tokens in wanted for token in tokens}) > 5
    found = gens[stages].generate(asked())
    assert [list(result.tokens) for result in found] == wanted


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_drawn_with_a_seed(model: Any, gens: dict[int, LocalGenerator], stages: int) -> None:
    options = {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2}
    wanted = [
        by_hub(model, ids, new, seed=100 + i, **options)
        for i, (ids, new) in enumerate(zip(PROMPTS, NEW, strict=True))
    ]
    for in_flight in (1, 4):
        found = gens[stages].generate(asked(), seed=100, in_flight=in_flight, **options)
        assert [list(result.tokens) for result in found] == wanted


def test_end_tokens(model: Any, gens: dict[int, LocalGenerator]) -> None:
    free = by_hub(model, PROMPTS[3], 12)
    ends = [free[4], free[7]]
    wanted = by_hub(model, PROMPTS[3], 12, eos_token_id=ends)
    assert len(wanted) < 12
    (result,) = gens[2].generate([PROMPTS[3]], max_new_tokens=12, ends=ends)
    assert (list(result.tokens), result.stopped) == (wanted, "end")


def test_processors_and_criteria_of_one_s_own(model: Any, gens: dict[int, LocalGenerator]) -> None:
    generation = hub.generation
    processors = generation.LogitsProcessorList([generation.NoRepeatNGramLogitsProcessor(2)])

    def long_enough(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        del scores
        return torch.tensor([ids.shape[1] >= 8])

    wanted = by_hub(model, PROMPTS[0], 12, no_repeat_ngram_size=2)
    (result,) = gens[2].generate([PROMPTS[0]], max_new_tokens=12, processors=processors)
    assert list(result.tokens) == wanted
    criteria = generation.StoppingCriteriaList([long_enough])
    (result,) = gens[2].generate([PROMPTS[0]], max_new_tokens=12, processors=processors, criteria=criteria)
    assert (list(result.tokens), result.stopped) == (wanted[:4], "stop")


@pytest.mark.parametrize("batch", [2, 3, 4])
def test_several_prompts_in_a_scope_are_padded_on_the_left(
    model: Any, gens: dict[int, LocalGenerator], batch: int
) -> None:
    wanted = [by_hub(model, ids, new) for ids, new in zip(PROMPTS, NEW, strict=True)]
    for stages in (1, 3):
        found = gens[stages].generate(asked(), batch=batch)
        assert [list(result.tokens) for result in found] == wanted


def test_rows_of_a_scope_draw_for_themselves(model: Any, gens: dict[int, LocalGenerator]) -> None:
    wanted = [
        by_hub(model, ids, new, seed=5 + i) for i, (ids, new) in enumerate(zip(PROMPTS, NEW, strict=True))
    ]
    found = gens[2].generate(asked(temperature=1.0), seed=5, batch=4)
    assert [list(result.tokens) for result in found] == wanted


def test_only_the_hidden_state_crosses(gens: dict[int, LocalGenerator]) -> None:
    for stage in gens[3].stages:
        program, _ = stage._graph(True, False)
        assert len(program.sends) == (not stage.last)


def test_a_folder_is_read_a_stage_s_weights_at_a_time(tmp_path: Path, model: Any) -> None:
    model.save_pretrained(tmp_path)
    wanted = [by_hub(model, ids, new) for ids, new in zip(PROMPTS, NEW, strict=True)]
    with hub_adapter.weightless():
        empty = type(model)(model.config)
    assert all(p.is_meta for p in empty.parameters())
    assert not any(b.is_meta for b in empty.buffers())
    read: list[list[str]] = []
    reader = hub_adapter.read_folder(tmp_path, empty)

    def noted(names: list[str]) -> Any:
        read.append(names)
        return reader(names)

    gen = compile_local(empty.eval(), None, Strategy(pp_degree=2), weights=noted)
    assert [list(result.tokens) for result in gen.generate(asked())] == wanted
    first, second = (set(names) for names in read)
    assert len(first) > 8
    assert len(second) > 8
    assert len(first & second) <= 2  # the tied embedding, and the rotary buffer


def test_a_model_without_values_is_refused() -> None:
    with hub_adapter.weightless():
        empty = hub.LlamaForCausalLM(llama().config)
    with pytest.raises(GenerationError, match="has no value: the model is on the meta device; pass weights"):
        compile_local(empty, None, Strategy(pp_degree=2))


def test_a_model_without_keys_and_values_is_refused() -> None:
    config = hub.MambaConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, state_size=4)
    with pytest.raises(GenerationError, match=r"MambaForCausalLM isn.t known to keep a key and a value"):
        hub_adapter.hub_spec(hub.MambaForCausalLM(config))


def test_a_sliding_window_gets_its_mask() -> None:
    torch.manual_seed(0)
    config = hub.MistralConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=5,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.4,
    )
    mistral = hub.MistralForCausalLM(config).eval()
    gen = compile_local(mistral, None, Strategy(pp_degree=2))
    for ids in ([3, 4, 5, 6, 7, 8, 9, 10], [2]):
        (result,) = gen.generate([ids], max_new_tokens=10)
        assert list(result.tokens) == by_hub(mistral, ids, 10)


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(GenerationError, match=r"no model of transformers: it has no config\.json"):
        hub_adapter.open_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nothing_known"}')
    with pytest.raises(GenerationError, match="can't be opened as a causal language model"):
        hub_adapter.open_folder(tmp_path)
    with pytest.raises(GenerationError, match=r"has no model\.safetensors"):
        hub_adapter.read_folder(tmp_path, torch.nn.Linear(1, 1))
