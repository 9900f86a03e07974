"""A rank's tensors get their values from files, from the tape of `deferred`, or from their modules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import models
from pipeloom.program.deferred import deferred
from pipeloom.runtime.initial import Initial, Weights, WeightsError


def plain(seed: int = 0) -> models.TiedEnds:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return models.TiedEnds()


def on_meta(make=models.TiedEnds):
    with torch.device("meta"):
        return make()


def written(folder: Path, **renamed: str) -> dict[str, torch.Tensor]:
    """The plain model's weights in two files and an index; tied ones once, under the second name."""
    state = {n: t for n, t in plain().state_dict().items() if n != "embedding.weight"}
    state = {renamed.get(n.replace(".", "_"), n): t for n, t in state.items()}
    names = sorted(state)
    files = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for file, mine in files.items():
        save_file({n: state[n].clone() for n in mine}, folder / file)
    places = {n: file for file, mine in files.items() for n in mine}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return plain().state_dict()


def names_of(model: nn.Module) -> list[str]:
    return [n for n, _ in model.named_parameters()]


@pytest.mark.parametrize("given", ["folder", "index", "files"])
@pytest.mark.parametrize("build", [on_meta, lambda: deferred(models.TiedEnds, seed=3), lambda: plain(9)])
def test_files_give_every_tensor_whatever_the_model_held(tmp_path: Path, given: str, build) -> None:
    expected = written(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    path = {"folder": tmp_path, "index": str(index), "files": sorted(tmp_path.glob("*.safetensors"))}[given]
    model = build()
    values = Initial(model, path).values(names_of(model))
    assert values.keys() == set(names_of(model))
    assert all(torch.equal(value, expected[name]) for name, value in values.items())


def test_a_model_with_values_needs_none() -> None:
    model = plain()
    assert Initial(model).values(names_of(model)) == {}


def test_names_of_the_files_and_tensors_that_they_lack(tmp_path: Path) -> None:
    expected = written(tmp_path, layers_0_weight="old.layers.0.weight")
    model = deferred(models.TiedEnds, seed=4)
    with pytest.raises(
        WeightsError, match=r"no 'layers.0.weight' .*They have 'old.layers.0.weight': say so with"
    ):
        Initial(model, tmp_path).values(names_of(model))

    def name(own: str) -> str | None:
        if own == "layers.1.bias":
            return None
        return "old.layers.0.weight" if own == "layers.0.weight" else own

    values = Initial(model, Weights(tmp_path, name)).values(names_of(model))
    assert torch.equal(values["layers.0.weight"], expected["layers.0.weight"])
    assert torch.equal(values["layers.1.bias"], plain(4).layers[1].bias)


def test_values_take_the_models_dtype_and_must_have_its_shape(tmp_path: Path) -> None:
    save_file(
        {"weight": torch.full((2, 3), 1.5, dtype=torch.float64), "bias": torch.zeros(2)},
        tmp_path / "w.safetensors",
    )
    model = on_meta(lambda: nn.Linear(3, 2).bfloat16())
    values = Initial(model, tmp_path / "w.safetensors").values(["weight"])
    assert (values["weight"].dtype, float(values["weight"].sum())) == (torch.bfloat16, 9.0)
    with pytest.raises(
        WeightsError, match=r"'weight' is \(2, 3\) in .*w.safetensors, and 'weight' is \(2, 4\)"
    ):
        Initial(on_meta(lambda: nn.Linear(4, 2)), tmp_path).values(["weight"])


def test_what_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="has no safetensors files; other formats are pickled"):
        Initial(plain(), tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"bin isn't a safetensors file; other formats are pickled"):
        Initial(plain(), tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"there is no .*nowhere"):
        Initial(plain(), tmp_path / "nowhere")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "../w.safetensors"}}))
    with pytest.raises(
        WeightsError, match=r"says that 'w' is in '../w.safetensors', which isn't a file beside it"
    ):
        Initial(plain(), tmp_path)
    index.write_text("[]")
    with pytest.raises(WeightsError, match="isn't an index of safetensors files"):
        Initial(plain(), tmp_path)


def test_a_plain_meta_model_begins_by_its_modules_names() -> None:
    model, state = on_meta(), torch.get_rng_state()
    first = Initial(model, seed=1).values(names_of(model))
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in first.items():  # each by itself: whatever else the rank holds
        assert torch.equal(Initial(model, seed=1).values([name])[name], value)
    other = Initial(model, seed=2).values(names_of(model))
    assert not any(torch.equal(value, other[name]) for name, value in first.items())
    assert not torch.equal(first["layers.0.weight"], first["layers.1.weight"])
    assert first["layers.0.weight"].abs().max() <= 1 / models.WIDTH**0.5
    norm = on_meta(lambda: nn.Sequential(nn.BatchNorm1d(3)))
    values = Initial(norm).values(["0.running_var", "0.weight", "0.num_batches_tracked"])
    assert [v.tolist() for v in values.values()] == [[1.0] * 3, [1.0] * 3, 0]


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def test_what_nobody_can_give_values_is_named() -> None:
    with pytest.raises(
        WeightsError, match=r"'0.weight' is on the meta device and has no values: Bare has no reset_par"
    ):
        Initial(on_meta(lambda: nn.Sequential(Bare()))).values(["0.weight"])
    cast = deferred(models.TiedEnds).bfloat16()
    with pytest.raises(
        WeightsError, match=r"'layers.0.bias' was changed after pipeloom.deferred had made the model"
    ):
        Initial(cast).values(["layers.0.bias"])


def test_buffers_that_are_not_saved_come_from_the_constructor(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "w.safetensors")
    values = Initial(deferred(Bare), tmp_path).values(["weight", "table"])
    assert [v.tolist() for v in values.values()] == [[1, 1], [0, 1, 2]]
