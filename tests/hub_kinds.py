"""Tiny random models of transformers by class, with batches that bring their labels.

make, batch = HUB["llama"]; model = make(); model(**batch(6)).loss

No dropout, so that plain PyTorch on the whole batch is the judge. Labels are ignored (-100) unevenly over the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

WORDS, TIME, IGNORED = 32, 7, -100
Batch = dict[str, Tensor]

SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def made(config: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        hub = pytest.importorskip("transformers")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            built: nn.Module = getattr(hub, model)(getattr(hub, config)(**{**SMALL, **options}))
        return built.train()

    return make


def words(samples: int, time: int = TIME) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(3, WORDS, (samples, time))
    labels = tokens.clone()
    for i in range(samples):
        labels[i, :i] = IGNORED
    return tokens, labels


def causal(samples: int) -> Batch:
    tokens, labels = words(samples)
    return {"input_ids": tokens, "labels": labels}


def padded(samples: int) -> Batch:
    tokens, labels = words(samples)
    mask = torch.ones_like(tokens)
    mask[::2, -2:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, IGNORED)}


def packed(samples: int) -> Batch:
    """Two texts in each row: positions begin anew."""
    tokens, labels = words(samples)
    return {
        "input_ids": tokens,
        "labels": labels,
        "position_ids": (torch.arange(TIME) % 4).repeat(samples, 1),
    }


def counted(samples: int) -> Batch:
    """With the number of items that count in the whole batch."""
    found = causal(samples)
    return {**found, "num_items_in_batch": (found["labels"][:, 1:] != IGNORED).sum()}


def translated(samples: int) -> Batch:
    return {"input_ids": words(samples, 6)[0], "labels": words(samples, 5)[1]}


def images(samples: int) -> Batch:
    return {"pixel_values": torch.randn(samples, 3, 8, 8), "labels": torch.randint(0, 4, (samples,))}


def pairs(samples: int) -> Batch:
    tokens, labels = words(samples)
    return {"input_ids": tokens, "labels": labels, "next_sentence_label": torch.randint(0, 2, (samples,))}


_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
_EXPERTS = {"num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
_BART = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "decoder_start_token_id": 2,
    "dropout": 0.0,
}


def checkpointed() -> nn.Module:
    model = HUB["llama"][0]()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


HUB: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "llama": (made("LlamaConfig", "LlamaForCausalLM", num_key_value_heads=1), causal),
    "llama, checkpointed": (checkpointed, causal),
    "llama, tied": (made("LlamaConfig", "LlamaForCausalLM", tie_word_embeddings=True), causal),
    "llama, padded": (made("LlamaConfig", "LlamaForCausalLM"), padded),
    "llama, packed": (made("LlamaConfig", "LlamaForCausalLM"), packed),
    "llama, items counted": (made("LlamaConfig", "LlamaForCausalLM"), counted),
    "gpt2": (made("GPT2Config", "GPT2LMHeadModel", **_GPT2), causal),
    "gpt2, padded": (made("GPT2Config", "GPT2LMHeadModel", **_GPT2), padded),
    "qwen2": (made("Qwen2Config", "Qwen2ForCausalLM", num_key_value_heads=1), causal),
    "qwen3": (made("Qwen3Config", "Qwen3ForCausalLM", num_key_value_heads=1, head_dim=8), causal),
    "mistral": (made("MistralConfig", "MistralForCausalLM", num_key_value_heads=1, sliding_window=4), causal),
    "gemma2": (
        made("Gemma2Config", "Gemma2ForCausalLM", num_key_value_heads=1, head_dim=8, sliding_window=4),
        causal,
    ),
    "mixtral": (made("MixtralConfig", "MixtralForCausalLM", **_EXPERTS), causal),
    "qwen2-moe": (
        made(
            "Qwen2MoeConfig",
            "Qwen2MoeForCausalLM",
            num_key_value_heads=1,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
        ),
        causal,
    ),
    "bert": (made("BertConfig", "BertForPreTraining", **_BERT), pairs),
    "t5": (made("T5Config", "T5ForConditionalGeneration", **_T5, dropout_rate=0.0), translated),
    "bart": (made("BartConfig", "BartForConditionalGeneration", **_BART), translated),
    "vit": (made("ViTConfig", "ViTForImageClassification", image_size=8, patch_size=4, num_labels=4), images),
}
