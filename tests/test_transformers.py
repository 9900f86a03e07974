"""Models of transformers by class, labels given, the loss made inside: the whole batch's loss and gradients, for every
cut; and SmolLM2 fine-tuned on two ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom
from hub_kinds import HUB, causal
from parity import Outcome, pipe_outcome, pipeline
from pipeloom.strategy import Strategy

PLANS = (("1F1B", 2, 1), ("ZBV", 2, 2))
#: in make test; the others are nightly
QUICK = {"llama"}
#: transformers takes the logits of some to float32 before the loss
BOUND = 1e-6


class Model:
    """A model that returns its loss, as `parity.pipeline` takes it."""

    loss_fn = None

    def __init__(self, model: nn.Module) -> None:
        self.model = model


def batch_of(make: Callable[[int], dict[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in make(6).items()}


def whole(model: nn.Module, batch: dict[str, Tensor]) -> Outcome:
    """Plain PyTorch on the whole batch."""
    model = copy.deepcopy(model)
    loss = model(**batch).loss
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Outcome(loss.detach(), gradients, loss.detach())


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=[pytest.mark.slow, pytest.mark.nightly]) for n in HUB]
)
def test_a_model_by_class_is_eager_pytorch(name: str) -> None:
    make, batch = HUB[name]
    experts = name in ("mixtral", "qwen2-moe")  # their product exists in float32 only
    model = make() if experts else make().double()
    data = batch_of(batch, torch.float32 if experts else torch.float64)
    reference = whole(model, data)
    for schedule, stages, chunks in PLANS:
        strategy = Strategy(
            schedule_mode=schedule, pp_degree=stages, vpp_degree=chunks, costs="roofline", accumulate_steps=3
        )
        pipe = pipeline(Model(model), strategy, data)
        outcome = pipe_outcome(pipe, (data,))
        outcome.gradients = {
            n: g for n, g in outcome.gradients.items() if n in reference.gradients or g.any()
        }
        assert outcome.error(reference) <= (1e-5 if experts else BOUND), (schedule, stages, chunks)
        with torch.no_grad():
            expected = copy.deepcopy(model).eval()(**data).loss
        assert float(pipe.eval(data).loss) == pytest.approx(float(expected), rel=1e-5)


def test_no_mask_is_made_where_none_is_needed() -> None:
    """Without positions and masks attention stays causal by itself, which fast kernels need."""
    hub = pytest.importorskip("transformers")
    before = (hub.masking_utils.is_tracing, hub.masking_utils.find_packed_sequence_indices)
    make, _ = HUB["llama"]
    program = pipeloom.capture(make(), example=batch_of(causal, torch.float32))
    attention = [n for n in program.ops() if "scaled_dot_product" in str(n.target)]
    assert len(attention) == 4, "two layers, forward and backward"
    assert not any(n.kwargs.get("attn_mask") for n in attention)
    assert (hub.masking_utils.is_tracing, hub.masking_utils.find_packed_sequence_indices) == before


@pytest.mark.nightly
@pytest.mark.slow
def test_an_adapter_of_peft() -> None:
    peft = pytest.importorskip("peft")
    make, batch = HUB["llama"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = peft.get_peft_model(make(), config).double()
    data = batch_of(batch, torch.float64)
    reference = whole(model, data)
    assert all("lora" in name for name in reference.gradients)
    strategy = Strategy(schedule_mode="ZBV", pp_degree=2, vpp_degree=2, costs="roofline", accumulate_steps=3)
    outcome = pipe_outcome(pipeline(Model(model), strategy, data), (data,))
    assert outcome.error(reference) <= BOUND


# ---- SmolLM2, fine-tuned

STEPS, TEXTS, SAMPLES, LENGTH = 20, 4, 4, 64


def smollm2() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """The model and twenty batches: four of Python's own documentation, again and again."""
    import pydoc_data.topics

    hub = pytest.importorskip("transformers")
    folder: Path = pytest.importorskip("pipeloom.generation.smollm2").fetched()
    tokenizer = hub.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = "\n".join(sorted(pydoc_data.topics.topics.values()))[:200_000]
    ids = torch.tensor(tokenizer(text)["input_ids"])[: TEXTS * SAMPLES * LENGTH].view(TEXTS, SAMPLES, LENGTH)
    model = hub.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).train()
    batches = []
    for step in range(STEPS):
        tokens = ids[step % TEXTS]
        labels = tokens.clone()
        for i in range(SAMPLES):
            labels[i, : 10 * i] = -100  # prompts that aren't learnt, of different lengths
        batches.append({"input_ids": tokens.clone(), "labels": labels})
    return model, batches


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-5)


def tuned_by_ranks(_rank: int, size: int) -> list[float]:
    model, batches = smollm2()
    pipe = pipeloom.compile(
        model,
        example=batches[0],
        strategy=Strategy(pp_degree=size, accumulate_steps=2, max_norm=1.0, costs="roofline"),
        optimizer=adamw,
    )
    losses = [float(pipe.step(batch).loss) for batch in batches]
    pipe.close()
    return losses


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_smollm2_fine_tuned_on_two_ranks_has_the_losses_of_one_process(
    ranks: Callable[..., list[Any]],
) -> None:
    piped = ranks(tuned_by_ranks, 2, timeout=1200)
    model, batches = smollm2()
    optimizer = adamw(model.parameters())
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert piped[0] == piped[1]
    assert piped[0] == pytest.approx(losses, rel=1e-4)
    assert sum(losses[-TEXTS:]) < 0.9 * sum(losses[:TEXTS]), "nothing was learnt"
