"""Models that no rank builds whole: the same training as of a plain seeded build, in a rank's share of its memory; and
weights that go out as safetensors and come back."""

from __future__ import annotations

import ctypes
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import models
import pipeloom
from conftest import Ranks
from parity import Deep, text
from pipeloom.local import LocalPipeline, compile_local
from pipeloom.runtime.initial import WeightsError
from pipeloom.strategy import Strategy

PLANS: list[dict[str, Any]] = [
    {"pp_degree": 1},
    {"pp_degree": 3},
    {"pp_degree": 2, "vpp_degree": 2, "schedule_mode": "ZBV"},
]


class Rotary(models.TiedEnds):
    """With a buffer that isn't saved, a parameter that nothing reads, and weights drawn a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(models.WIDTH) / 7.0, persistent=False)
        self.register_buffer("seen", torch.zeros(()))
        self.unread = nn.Parameter(torch.randn(3))
        self.apply(lambda m: nn.init.trunc_normal_(m.weight, std=0.5) if isinstance(m, nn.Linear) else None)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.angles.cos().mean()  # type: ignore[no-any-return]


def plain(seed: int) -> Rotary:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Rotary()


def compiled(model: nn.Module, plan: dict[str, Any], **options: Any) -> LocalPipeline:
    case = Deep(model, models.cross_entropy, text)
    return compile_local(
        model,
        case.loss_fn,
        example=case.batch(4),
        strategy=Strategy(**{"accumulate_steps": 2, "costs": "roofline", **plan}),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        **options,
    )


def losses(pipe: LocalPipeline) -> list[float]:
    case = Deep(plain(0), models.cross_entropy, text)
    return [float(pipe.step(*case.batch(4, seed=seed)).loss) for seed in range(3)]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_deferred_model_trains_as_a_plain_one(plan: dict[str, Any], tmp_path: Path) -> None:
    pipe = compiled(pipeloom.deferred(Rotary, seed=7), plan)
    expected = compiled(plain(7), {"pp_degree": 1})
    assert losses(pipe) == losses(expected)
    for name, parameter in expected.parameters().items():
        assert torch.equal(pipe.parameters()[name], parameter), name
    for stage in pipe.stages:
        held = {n for n, p in stage.model.named_parameters(remove_duplicate=False) if not p.is_meta}
        assert held == set(stage.store.parameters)
        assert "unread" in held
    pipe.save(tmp_path / "saved")
    again = compiled(pipeloom.deferred(Rotary, seed=1), {"pp_degree": 1})
    again.load(tmp_path / "saved")
    assert losses(again) == losses(expected)


def test_replicas_of_a_deferred_model() -> None:
    pipe = compiled(pipeloom.deferred(Rotary, seed=7), {"pp_degree": 2, "accumulate_steps": 1}, replicas=2)
    assert losses(pipe) == pytest.approx(losses(compiled(plain(7), {"pp_degree": 1})), rel=1e-5)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_exported_weights_come_back_under_any_cut(plan: dict[str, Any], tmp_path: Path) -> None:
    pipe = compiled(plain(7), plan)
    losses(pipe)
    pipe.export(tmp_path / "out")
    found = {p.name for p in (tmp_path / "out").iterdir()}
    tensors: dict[str, Tensor] = {}
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        tensors |= load_file(file)
    expected = {n: t for n, t in plain(7).state_dict().items() if n != "head.weight"}
    assert tensors.keys() == expected.keys()  # tied weights once, and no buffer that isn't saved
    for name, parameter in pipe.parameters().items():
        assert torch.equal(tensors[name], parameter)
    if plan["pp_degree"] == 1:
        assert found == {"model.safetensors"}
    else:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == expected.keys()
        assert set(index["weight_map"].values()) | {"model.safetensors.index.json"} == found
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    with torch.device("meta"):
        empty = Rotary()
    with pytest.raises(WeightsError, match="'angles' is on the meta device and has no values"):
        compiled(empty, {"pp_degree": 2}, weights=tmp_path / "out")
    one, other = (
        compiled(model, {"pp_degree": 2}, weights=tmp_path / "out")
        for model in (pipeloom.deferred(Rotary, seed=3), plain(4))
    )
    assert losses(one) == losses(other)


class Configured(models.TiedEnds):
    class Config:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "config.json").write_text('{"model_type": "tied"}')

    def __init__(self) -> None:
        super().__init__()
        self.config = self.Config()


def test_an_export_is_in_files_of_bounded_size_with_the_models_config(tmp_path: Path) -> None:
    from pipeloom.runtime.export import export

    pipe = compiled(Configured(), {"pp_degree": 2})
    export(pipe.first, tmp_path / "out", file_bytes=300)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "tied"}
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert [f.name for f in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            sizes = [opened.get_tensor(key).nbytes for key in opened.keys()]  # noqa: SIM118
        assert len(sizes) == 1 or sum(sizes) <= 300


def test_transformers_loads_an_export(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = pipeloom.deferred(lambda: transformers.LlamaForCausalLM(config), seed=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        expected = transformers.LlamaForCausalLM(config)
    tokens = torch.arange(24).reshape(2, 12)
    pipe = compile_local(
        model,
        example={"input_ids": tokens, "labels": tokens},
        strategy=Strategy(pp_degree=2, accumulate_steps=2, costs="roofline"),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
    for name, parameter in expected.named_parameters():
        assert torch.equal(pipe.parameters()[name], parameter), name
    pipe.step({"input_ids": tokens, "labels": tokens})
    pipe.export(tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(pipe.parameters()[name], parameter), name
    batch = {"input_ids": tokens, "labels": tokens}
    assert float(loaded(**batch).loss.detach()) == pytest.approx(float(pipe.eval(batch).loss), rel=1e-5)


# ---- memory


WIDE, LAYERS = 1536, 16


class Wide(nn.Module):
    """LAYERS layers, of 9.4 MB each."""

    def __init__(self, width: int = WIDE) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def wide_pipe(size: int, width: int, seed: int, folder: str | None) -> pipeloom.Pipeline:
    example = (torch.Size([1, width]), torch.Size([1, width]))
    cuts = [f"layers.{LAYERS // size * (r + 1)}" for r in range(size - 1)]
    strategy = Strategy(pp_degree=size, costs="roofline", cuts=cuts)
    model = pipeloom.deferred(lambda: Wide(width), seed=seed)
    return pipeloom.compile(model, F.mse_loss, example=example, strategy=strategy, weights=folder)


def peak_of(rank: int, size: int, folder: str | None) -> Any:
    """How far the memory of this process grew at most while its pipeline was made, in bytes; its weights' sums."""
    give_back_what_is_freed()
    wide_pipe(size, 4, 0, None).close()  # what is imported, or kept, once
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
    before = _status("VmRSS")
    pipe = wide_pipe(size, WIDE, rank if folder else 0, folder)
    peak = _status("VmHWM") - before
    sums = {n: float(p.detach().double().sum()) for n, p in pipe.store.parameters.items()}
    pipe.close()
    return [peak, sums]


def give_back_what_is_freed() -> None:
    """glibc keeps blocks of up to 32 MB once one of their size was freed, and holes between them count as memory. With
    a bound of one's own, blocks above it are mapped by themselves and unmapped when freed."""
    M_MMAP_THRESHOLD = -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 22)
    gc.collect()


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="reads Linux's record of a process's memory"
)
@pytest.mark.parametrize("source", ["constructor", "files"])
def test_a_ranks_peak_is_its_share(ranks: Ranks, source: str, tmp_path: Path) -> None:
    """4 ranks: a quarter of the weights and as much of gradients each, one other tensor, and the graphs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        state = Wide().state_dict()
    if source == "files":
        save_file(state, tmp_path / "model.safetensors")
    whole = sum(tensor.nbytes for tensor in state.values())
    answers = ranks(peak_of, 4, str(tmp_path) if source == "files" else None, timeout=150)
    for peak, sums in answers:
        assert peak < 2 * whole / 4 + whole / LAYERS + 20e6 < whole
        assert len(sums) == 2 * LAYERS // 4
        assert sums == {name: float(state[name].double().sum()) for name in sums}
