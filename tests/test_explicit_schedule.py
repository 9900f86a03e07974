"""A schedule of the user's own: lists, a function, a file; verified, run, and marked where it isn't ascending."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pipeloom
from parity import Deep, deep, eager_outcome, pipe_outcome, pipeline
from pipeloom.planning.errors import PlanError
from pipeloom.schedules import Job, Schedule, build
from pipeloom.strategy import Strategy, StrategyError

ONE_F_ONE_B = [
    ["F0.0", "F0.1", "X0.0", "X0.1"],
    ["F1.0", "X1.0", "F1.1", "X1.1"],
]


def strategy_of(mode: Any = ONE_F_ONE_B, **fields: Any) -> Strategy:
    return Strategy(**{"pp_degree": 2, "schedule_mode": mode, "costs": "roofline", **fields})


def case() -> Deep:
    return deep("chain")


def jobs_of(plan: pipeloom.Plan) -> list[list[str]]:
    return [[str(job) for job in jobs if isinstance(job, Job)] for jobs in plan.jobs]


def backwards_first(stages: int, chunks: int, micro_batches: int) -> list[list[str]]:
    """F in order, X in the reverse order of micro-batches."""
    del chunks
    up, down = range(micro_batches), range(micro_batches - 1, -1, -1)
    return [[f"F{c}.{m}" for m in up] + [f"X{c}.{m}" for m in down] for c in range(stages)]


# ---- what is run


def test_lists_run_as_written_and_give_the_gradients_of_the_named_schedule() -> None:
    own = pipeline(case(), strategy_of(), case().batch(4))
    named = pipeline(case(), strategy_of("1F1B", accumulate_steps=2), case().batch(4))
    assert jobs_of(own.plan) == ONE_F_ONE_B
    assert own.plan.ascending
    ours, theirs = pipe_outcome(own, case().batch(4)), pipe_outcome(named, case().batch(4))
    assert ours.loss == theirs.loss
    assert all((gradient == theirs.gradients[name]).all() for name, gradient in ours.gradients.items())


def test_jobs_and_schedules_are_taken_like_strings() -> None:
    as_jobs = [[Job.parse(text) for text in jobs] for jobs in ONE_F_ONE_B]
    assert strategy_of(as_jobs).schedule_mode == strategy_of().schedule_mode
    zbv = build("ZBV", stages=2, chunks=2, micro_batches=3)
    strategy = strategy_of(zbv, vpp_degree=2)
    assert strategy.own_schedule(3) is zbv
    assert strategy.accumulate_steps == 3
    assert strategy.own_placement == (0, 1, 1, 0)


def test_an_order_that_is_not_ascending_is_allowed_and_said() -> None:
    pipe = pipeline(case(), strategy_of(backwards_first, accumulate_steps=3), case().batch(6))
    assert not pipe.plan.ascending
    assert "equal to other plans' to rounding only" in pipe.plan.describe()
    found = pipe_outcome(pipe, case().batch(6))
    expected = eager_outcome(case(), case().batch(6), [2, 2, 2])
    assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-6)
    for name, gradient in found.gradients.items():
        assert (gradient - expected.gradients[name]).norm() <= 1e-5 * expected.gradients[name].norm()


def test_a_function_is_asked_for_each_number_of_micro_batches() -> None:
    pipe = pipeline(case(), strategy_of(backwards_first, micro_batch_size=2), case().batch(6))
    assert pipe.plan.micro_batches == 3
    pipe.step(*case().batch(10))
    assert pipe.stages[0].planner.schedule(5).micro_batches == 5


def test_a_list_serves_fewer_micro_batches_too() -> None:
    schedule = strategy_of(micro_batch_size=2).own_schedule(1)
    assert [list(map(str, jobs)) for jobs in schedule.jobs] == [["F0.0", "X0.0"], ["F1.0", "X1.0"]]


def test_chunks_may_lie_on_any_stages() -> None:
    """Chunks 0 and 1 on stage 1, 2 and 3 on stage 0: no schedule of the catalogue has that."""
    lists = [["F2.0", "F3.0", "X3.0", "X2.0"], ["F0.0", "F1.0", "X1.0", "X0.0"]]
    strategy = strategy_of(lists, vpp_degree=2, placement=[1, 1, 0, 0])
    pipe = pipeline(case(), strategy, case().batch(2))
    assert pipe.plan.placement == (1, 1, 0, 0)
    assert strategy_of(lists, vpp_degree=2).own_placement == (1, 1, 0, 0)
    found, expected = pipe_outcome(pipe, case().batch(2)), eager_outcome(case(), case().batch(2), [2])
    assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-6)
    assert float(pipe.eval(*case().batch(2)).loss) == pytest.approx(float(expected.loss), rel=1e-6)


def test_a_file_is_read_and_run(tmp_path: Path) -> None:
    plan = pipeline(case(), strategy_of("ZBV", vpp_degree=2, accumulate_steps=3), case().batch(6)).plan
    (tmp_path / "zbv.csv").write_text(plan.to_csv())
    (tmp_path / "run.toml").write_text(
        f"[strategy]\npp_degree = 2\nvpp_degree = 2\ncosts = 'roofline'\nschedule_file = '{tmp_path / 'zbv.csv'}'\n"
    )
    strategy = Strategy.from_toml(tmp_path / "run.toml")
    assert (strategy.accumulate_steps, strategy.schedule_name) == (3, "zbv.csv")
    again = pipeline(case(), strategy, case().batch(6)).plan
    assert again.digest() == plan.digest()
    assert again.schedule == "zbv.csv"


# ---- what is refused, and in which words


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([["F0.0", "X0.0"], ["F1.0"]], "missing: [BW]1.0 on stage 1, [BW]1.0 on stage 1"),
        ([["F0.0", "X0.0", "X0.0"], ["F1.0", "X1.0"]], "stage 0 has B0.0 twice: entries 1 .* and 2"),
        ([["F0.0", "X0.0", "X1.0"], ["F1.0"]], "X1.0 is on stage 0, but chunk 1 lives on stage 1"),
        ([["X0.0", "F0.0"], ["F1.0", "X1.0"]], r"stage 0: X0.0 \(entry 0\) needs F0.0"),
        (
            [["F0.0", "X0.0", "F0.1", "X0.1"], ["F1.0", "F1.1", "X1.0", "X1.1"]],
            "own can't run in this order: stage 0: X0.0 waits for X1.0; stage 1: F1.1 waits for F0.1",
        ),
    ],
)
def test_the_verifier_s_errors_reach_the_user(lists: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        pipeline(case(), strategy_of(lists, placement=[0, 1]), case().batch(4))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule_mode": [["F0.0", "Q"], []]}, "schedule_mode, stage 0, entry 1: 'Q' is not a job"),
        ({"schedule_mode": [["F0.0", 3], []]}, "schedule_mode, stage 0, entry 1: 3 is not a job"),
        ({"schedule_mode": 7}, "schedule_mode: there is no schedule 7"),
        ({"schedule_mode": [["F0.0", "X0.0"]]}, "lists for 1 stages, but pp_degree is 2"),
        ({"schedule_mode": [[], []]}, "schedule_mode has no job"),
        (
            {"schedule_mode": [["F0.0", "X0.0"], ["F2.0"]]},
            "names 3 chunks, but pp_degree 2 × vpp_degree 1 make 2",
        ),
        ({"schedule_mode": [["F0.0"], ["F2.0"]], "vpp_degree": 2}, "names 3 chunks, .* make 4"),
        ({"schedule_mode": [["F0.0"], ["F3.0"]], "vpp_degree": 2}, "has no job of chunk 1"),
        (
            {"schedule_mode": ONE_F_ONE_B, "accumulate_steps": 4},
            "for 2 micro-batches, but accumulate_steps is 4",
        ),
        ({"schedule_mode": ONE_F_ONE_B, "placement": [1, 1]}, "leaves stage 0 without a chunk"),
        ({"schedule_mode": "file"}, 'schedule_mode "file" goes with schedule_file'),
        ({"schedule_file": "nowhere.csv"}, "schedule_file nowhere.csv: can't be read"),
        ({"schedule_mode": "ZBH1", "schedule_file": "a.csv"}, "was given beside schedule_mode='ZBH1'"),
        ({"schedule_mode": "module:function"}, "names a function, which can't be read from text"),
    ],
)
def test_what_a_strategy_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        Strategy(pp_degree=2, **fields)


def test_more_micro_batches_than_listed_are_refused() -> None:
    with pytest.raises(ValueError, match="a schedule for 2 micro-batches, but the batch makes 3"):
        pipeline(case(), strategy_of(micro_batch_size=2), case().batch(6))


def test_what_a_function_gives_is_checked() -> None:
    def short(stages: int, chunks: int, micro_batches: int) -> list[list[str]]:
        return backwards_first(stages, chunks, micro_batches - 1)

    with pytest.raises(ValueError, match=r"short\(2, 1, 3\) gave a schedule for 2 micro-batches"):
        strategy_of(short).own_schedule(3)
    with pytest.raises(ValueError, match="schedule_mode <lambda> is NoneType: give one list"):
        strategy_of(lambda *_: None).own_schedule(3)
    zbv = build("ZBV", stages=2, chunks=2, micro_batches=3)
    with pytest.raises(ValueError, match=r"chunks on stages \[0, 1, 1, 0\], not \[0, 1, 0, 1\]"):
        strategy_of(lambda *_: zbv, vpp_degree=2, placement="loop").own_schedule(3)


# ---- in and out


def test_lists_survive_plain_values() -> None:
    strategy = strategy_of()
    values = strategy.to_dict()
    assert values["schedule_mode"] == ONE_F_ONE_B
    assert Strategy.from_dict(values) == strategy
    assert strategy.replace(seed=3).schedule_mode == strategy.schedule_mode
    assert strategy.replace(schedule_mode="1F1B", accumulate_steps=5).split_backward is False


def test_a_function_is_kept_by_replace_and_named_in_plain_values() -> None:
    strategy = strategy_of(backwards_first)
    assert strategy.replace(seed=3).schedule_mode is backwards_first
    values = strategy.to_dict()
    assert values["schedule_mode"] == f"{__name__}:backwards_first"
    with pytest.raises(StrategyError, match="can't be read from text"):
        Strategy.from_dict(values)


def test_a_schedule_of_one_s_own_is_not_changed() -> None:
    mine = Schedule.from_jobs("mine", [0, 1], 2, ONE_F_ONE_B)
    strategy = strategy_of(mine)
    assert mine.name == "mine"
    assert strategy.own_schedule(2).name == "mine"
