"""What was saved under one cut loads under another, and training goes on as if nothing had happened."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from handmade import Chain, batch, fleet
from test_distributed import build, run
from torch.distributed.checkpoint import FileSystemReader, load

from pipeloom.runtime import checkpoint
from pipeloom.runtime.launch import join
from pipeloom.runtime.replicas import Alone
from pipeloom.runtime.update import LossScaler

ROWS = [3, 3, 2]
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}


class Stages(list):
    """The stages of an in-memory fleet, as checkpoint.py sees them."""

    def __init__(self, ranks, steps=0):
        super().__init__(
            SimpleNamespace(
                store=store,
                updater=updater,
                transport=updater.transport,
                replicas=Alone(),
                steps=steps,
                strategy=SimpleNamespace(seed=5),
            )
            for store, updater in zip(ranks.stores, ranks.updaters, strict=True)
        )


def make(placement, optimizer="adamw", **options):
    options = {"skip": True, "tied": True, "counted": True, "scheduler": slower} | options
    return fleet(placement, ROWS, True, OPTIMIZERS[optimizer], LossScaler, max_norm=0.5, **options)


def slower(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def weights(ranks):
    found = {}
    for store in ranks.stores:
        found |= {g.name: g.parameter.detach().clone() for g in store.gradients}
        found |= {name: buffer.clone() for name, buffer in store.buffers.items()}
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("before", "after"),
    [((0, 1, 0, 1), (0, 0, 0, 0)), ((0, 0, 0, 0), (0, 1, 2, 3)), ((0, 1, 2, 3), (0, 1, 1, 0))],
)
def test_training_goes_on_under_another_cut(before, after, optimizer, tmp_path):
    unbroken = make(before, optimizer)
    for step in range(2):
        unbroken.step(batch(ROWS, seed=step))
    checkpoint.save(Stages(unbroken, steps=2), tmp_path / "saved")
    for step in range(2, 4):
        expected = unbroken.step(batch(ROWS, seed=step))[0]

    resumed = make(after, optimizer)
    for store in resumed.stores:
        with torch.no_grad():
            for parameter in store.parameters.values():
                parameter.zero_()
    resumed.step(batch(ROWS, seed=9), update=False)  # leftover gradients must not survive a load
    stages = Stages(resumed)
    checkpoint.load(stages, tmp_path / "saved")
    assert [stage.steps for stage in stages] == [2] * len(stages)
    for step in range(2, 4):
        result = resumed.step(batch(ROWS, seed=step))[0]
    assert float(result.loss) == float(expected.loss)
    got = weights(resumed)
    assert all(torch.equal(value, got[name]) for name, value in weights(unbroken).items())
    assert float(resumed.updaters[0].optimizer.param_groups[0]["lr"]) == float(
        unbroken.updaters[0].optimizer.param_groups[0]["lr"]
    )


def test_a_saved_model_loads_into_plain_pytorch_and_shared_weights_are_there_once(tmp_path):
    ranks = make((0, 1, 2, 3))
    ranks.step(batch(ROWS))
    checkpoint.save(Stages(ranks), tmp_path / "saved")
    keys = set(FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata)
    assert {k for k in keys if k.startswith("model.")} == {"model.w0", "model.w1", "model.w2", "model.count"}
    assert "optimizer.state.w0.exp_avg" in keys
    plain = Chain(4, tied=True, counted=True)
    state = {"model": {k: v for k, v in plain.state_dict().items() if k != "w3"}}
    load(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    for name, value in state["model"].items():
        assert torch.equal(value, weights(ranks)[name])


def test_a_folder_appears_whole_and_is_replaced(tmp_path):
    ranks = make((0, 1, 1, 0))
    checkpoint.save(Stages(ranks, steps=1), tmp_path / "runs" / "saved")
    checkpoint.save(Stages(ranks, steps=2), tmp_path / "runs" / "saved")
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["saved"]
    (tmp_path / "runs" / "saved").rename(
        tmp_path / "runs" / ".saved.old"
    )  # a save cut off between its renames
    stages = Stages(ranks)
    checkpoint.load(stages, tmp_path / "runs" / "saved")
    assert stages[0].steps == 2


def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path):
    checkpoint.save(Stages(make((0, 1, 1, 0)), steps=1), tmp_path / "saved")
    ranks = make((0, 1, 1, 0), scheduler=lambda _: SimpleNamespace(state_dict=lambda: {"rule": object()}))
    with pytest.raises(ValueError, match="the scheduler's state can't be saved: object is not JSON"):
        checkpoint.save(Stages(ranks, steps=2), tmp_path / "saved")
    stages = Stages(make((0, 1, 1, 0)))
    checkpoint.load(stages, tmp_path / "saved")
    assert stages[0].steps == 1


def test_what_does_not_fit_is_refused(tmp_path):
    checkpoint.save(Stages(make((0, 1))), tmp_path / "saved")
    with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*nowhere"):
        checkpoint.load(Stages(make((0, 1))), tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no 'w1', which the model has"):
        checkpoint.load(Stages(make((0, 1, 1))), tmp_path / "saved")
    larger = make((0, 1))
    larger.stores[0].module.w0.data = torch.zeros(9, 9)
    with pytest.raises(ValueError, match=r"'w0' is \(4, 4\) in the checkpoint .*, and \(9, 9\) in the model"):
        checkpoint.load(Stages(larger), tmp_path / "saved")


def test_state_dicts_go_from_one_cut_to_another():
    before, after = make((0, 1, 2, 3)), make((0, 1, 1, 0))
    before.step(batch(ROWS))
    merged = {"model": {}, "optimizer": {"state": {}, "options": {}}}
    for stage in reversed(Stages(before, steps=7)):
        state = checkpoint.state_dict(stage)
        merged["model"] |= state["model"]
        merged["optimizer"]["state"] |= state["optimizer"]["state"]
        merged["optimizer"]["options"] |= state["optimizer"]["options"]
        merged["training"] = state["training"]
    stages = Stages(after)
    for stage in stages:
        checkpoint.load_state_dict(stage, merged)
    assert stages[1].steps == 7
    losses = [ranks.step(batch(ROWS, seed=4))[0].loss for ranks in (before, after)]
    assert losses[0] == losses[1]
    assert all(torch.equal(value, weights(after)[name]) for name, value in weights(before).items())


def test_making_state_for_a_new_optimizer_moves_no_weight():
    ranks = make((0, 1))
    before = weights(ranks)
    state = checkpoint.state_dict(Stages(ranks)[0])
    assert float(state["optimizer"]["state"]["w0.step"]) == 0
    assert float(ranks.updaters[0].optimizer.param_groups[0]["lr"]) == pytest.approx(0.01)
    assert all(torch.equal(value, before[name]) for name, value in weights(ranks).items())


def save_on_ranks(rank, size, folder):
    place = join(size)
    executor = build(rank, (0, 1, 1, 0), place.transport, tied=True)
    run(executor, batch(ROWS))
    stage = SimpleNamespace(
        store=executor._store,
        updater=executor._updater,
        transport=place.transport,
        replicas=place.replicas,
        steps=1,
        strategy=SimpleNamespace(seed=0),
    )
    checkpoint.save(stage, folder)
    saved = {name: p.detach().clone() for name, p in executor._store.parameters.items()}
    run(executor, batch(ROWS, seed=3))
    checkpoint.load(stage, folder)
    same = all(torch.equal(saved[name], p) for name, p in executor._store.parameters.items())
    return [same, stage.steps]


def test_ranks_save_and_load_together(ranks, tmp_path):
    assert ranks(save_on_ranks, 2, str(tmp_path / "saved")) == [[True, 1]] * 2
    single = fleet((0, 0, 0, 0), ROWS, True, OPTIMIZERS["momentum"], tied=True)
    checkpoint.load(Stages(single), tmp_path / "saved")
    expected = fleet(
        (0, 0, 0, 0), ROWS, True, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), None, 0.05, tied=True
    )
    expected.step(batch(ROWS))
    got = weights(single)
    assert all(torch.equal(value, got[name]) for name, value in weights(expected).items())


def test_nothing_of_the_users_is_pickled(tmp_path):
    ranks = make((0, 1))
    checkpoint.save(Stages(ranks, steps=3), tmp_path / "saved")
    metadata = FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    assert all(hasattr(value, "properties") for value in metadata.values())  # tensors alone, no byte blobs
    entry = {"training": torch.empty(metadata["training"].size, dtype=torch.uint8)}
    load(entry, checkpoint_id=tmp_path / "saved", no_dist=True)
    training = json.loads(bytes(entry["training"].numpy().tobytes()))
    assert (training["format"], training["steps"], training["seed"]) == (1, 3, 5)
