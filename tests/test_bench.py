"""The benchmark's parts: contenders do the same work on two ranks, and figures are right. Nothing is about speed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

BENCH = str(Path(__file__).parent.parent / "bench")


@pytest.fixture(scope="module", autouse=True)
def bench():
    """The benchmark's modules can be imported, here and in the ranks that it starts."""
    sys.path.insert(0, BENCH)
    yield
    sys.path.remove(BENCH)


def load(name):
    return importlib.import_module(name)


def small(**more):
    sizes = {"width": 16, "layers": 2, "heads": 2, "sequence": 8, "vocabulary": 32, "micro_batches": 2}
    return load("setting").Setting(**sizes, **more)


def test_the_parts_of_a_model_are_the_model():
    setting = small()
    model = setting.model()
    parts = [
        load("setting").Part(model, layers, first=i == 0, last=i == 1)
        for i, layers in enumerate(setting.equal_parts(2))
    ]
    tokens, _ = setting.batch()
    assert torch.equal(parts[1](parts[0](tokens)), model(tokens))
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]


def test_layers_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="2 layers don't divide into 4 equal parts"):
        small().equal_parts(4)


@pytest.mark.slow
def test_two_ranks_time_the_same_work_and_the_table_has_every_contender():
    setting = small(pairs=("1F1B",))
    listed = [n for n in load("contenders").names(setting.pairs) if "automatic" not in n]
    found = load("start").both_ranks(load("rounds").time_steps, setting, listed, 2, 1, timeout=120)
    for rank in found:
        assert list(rank["seconds"]) == listed
        assert all(len(times) == 2 and min(times) > 0 for times in rank["seconds"].values())
        assert set(rank["errors"]) == set(listed) - {"alone"}
        assert max(rank["errors"].values()) <= load("rounds").TOLERANCE
        assert all(0 < b < 1 for bubbles in rank["measured"].values() for b in bubbles)
    table = load("tables").time_table(found[0], setting.pairs)
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == [
        "no pipeline: each rank half of the batch",
        "1F1B torch",
        "1F1B ours, equal cuts",
        "1F1B ours, equal cuts, no clocks",
    ]
    assert len({len(line) for line in table.splitlines()}) == 1


def test_other_work_is_refused():
    class Contender:
        def __init__(self, gradient, loss):
            self.gradient, self.value = torch.tensor(gradient), loss

        def backward(self):
            pass

        def zero(self):
            pass

        def gradients(self):
            return {"weight": self.gradient}

        def loss(self):
            return self.value

    compare = load("rounds").compare_work
    alone = Contender([3.0, 4.0], 1.0)
    assert compare({"alone": alone, "same": Contender([3.0, 4.0], None)}) == {"same": 0.0}
    with pytest.raises(ValueError, match=r"off: the gradient of weight is 1\.0e-03 away"):
        compare({"alone": alone, "off": Contender([3.0, 4.005], 1.0)})
    with pytest.raises(ValueError, match=r"off: the gradient of weight is nan away"):
        compare({"alone": alone, "off": Contender([3.0, float("nan")], 1.0)})
    with pytest.raises(ValueError, match=r"off: the loss is 1\.1, the plain model's is 1\.0"):
        compare({"alone": alone, "off": Contender([3.0, 4.0], 1.1)})
    trained = {"a": Contender([0.0], 1.0), "b": Contender([0.0], 1.0), "c": Contender([0.0], 1.01)}
    with pytest.raises(ValueError, match=r"c: after the same steps"):
        load("rounds").compare_drift(trained)


def test_ratios_are_of_medians_and_their_spread_is_of_rounds():
    tables = load("tables")
    ours, theirs = [1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 2.0, 2.0, 2.0, 10.0]
    assert tables.ratio(ours, theirs) == "1.500 (0.500–1.800)"
    assert tables.spread([7.0]) == (7.0, 7.0)


def test_results_are_appended_with_their_command(tmp_path):
    file = tmp_path / "RESULTS.md"
    file.write_text("# Results\n")
    load("against_torch").append(file, "| a |", ["--pairs", "1F1B,VPP", "--write", "a b"])
    text = file.read_text()
    assert text.startswith("# Results\n\n## 2")
    assert "`python bench/against_torch.py --pairs 1F1B,VPP --write 'a b'`" in text
    assert text.endswith("\n\n| a |\n")


def test_a_rank_that_fails_ends_both():
    with pytest.raises(Exception, match="don't divide"):
        load("start").both_ranks(
            load("rounds").time_steps, small(pairs=("VPP",)), ["alone", "torch VPP"], 1, 0, timeout=60
        )


def test_a_forecast_says_by_how_much_it_is_off():
    forecast = load("forecast")
    predictions = {"1F1B": {"step": 0.1, "peak": [1e6, 2e6]}, "ZBV": {"step": 0.12, "peak": [3e6, 4e6]}}
    found = [
        {"seconds": {"1F1B": [0.05, 0.1, 0.4], "ZBV": [0.1]}, "peak": {"1F1B": 1e6, "ZBV": 3e6}},
        {"seconds": {}, "peak": {"1F1B": 4e6, "ZBV": 4e6}},
    ]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in forecast.table(predictions, found).splitlines()
    ]
    assert rows[2] == [
        "1F1B",
        "100.0",
        "100.0 (50.0–400.0)",
        "+0.0%",
        "+0.0%",
        "1.00, 2.00",
        "1.00, 4.00",
        "+0.0%, -50.0%",
    ]
    assert rows[3][:5] == ["ZBV", "120.0", "100.0 (100.0–100.0)", "+20.0%", "+20.0%"]
    errors = forecast.errors_of(predictions, found)
    found[0]["seconds"]["1F1B"] = [0.2]
    errors = [errors, forecast.errors_of(predictions, found)]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in forecast.summary(errors).splitlines()
    ]
    assert rows[2] == ["1F1B", "+0.0%, -50.0%", "-25.0%", "+0.0%", "-50.0%"]
    assert rows[3] == ["ZBV", "+20.0%, +20.0%", "+20.0%", "+80.0%", "+0.0%"]


@pytest.mark.slow
def test_what_was_predicted_is_run_and_memory_is_near():
    setting = load("setting").Setting(
        width=64, layers=4, heads=4, sequence=64, vocabulary=256, micro_batches=4
    )
    foresight, both_ranks = load("foresight"), load("start").both_ranks
    predictions = both_ranks(foresight.predict, setting, 2, 1, 1.0, timeout=300)[0]
    assert list(predictions) == ["1F1B", "VPP", "ZBV", "auto"]
    found = both_ranks(foresight.measure, setting, predictions, 1, 1, timeout=300)
    for name, prediction in predictions.items():
        assert prediction["step"] > 0
        # The plan lets go of what is sent at once, a rank only when it knows that it has arrived: with several chunks
        # some messages more are alive, of a model this small 1.4% of all bytes each; most with auto, whose plan is
        # searched by the clock of a busy machine. The bench shows 3% at its own size.
        off = {"1F1B": 0.03, "auto": 0.2}.get(name, 0.1)
        for rank in range(2):
            assert found[rank]["peak"][name] == pytest.approx(prediction["peak"][rank], rel=off), name
