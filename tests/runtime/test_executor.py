"""The executor against autograd, and against itself under other cuts, on hand-made programs."""

from __future__ import annotations

import pytest
import torch
from handmade import Chain, batch, eager, fleet, lowered, programs

from pipeloom.runtime.errors import JobError, StuckError
from pipeloom.runtime.executor import Executor
from pipeloom.runtime.parameters import ParameterStore
from pipeloom.runtime.stepping import finish
from pipeloom.runtime.transport import MemoryTransport
from pipeloom.schedules.jobs import Job, Phase, Transfer

PLACEMENTS = [(0, 0, 0, 0), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 3), (0, 0, 1, 2)]
VARIANTS = [
    {},
    {"skip": True},
    {"tied": True},
    {"skip": True, "tied": True},
    {"frozen": True},
    {"weighted": True},
    {"counted": True},
]
ROWS = (3, 3, 2)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "+".join(v) or "chain")
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: "".join(map(str, p)))
def test_losses_and_gradients_are_autograds(placement, variant, split):
    batches = batch(ROWS)
    expected_loss, expected, model = eager(placement, batches, **variant)
    ranks = fleet(placement, ROWS, split, **variant)
    results = ranks.step(batches, update=False)
    got = ranks.gradients()
    assert set(got) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-12, atol=1e-13)
    assert {float(r.loss) for r in results} == {float(results[0].loss)}
    assert float(results[0].loss) == pytest.approx(expected_loss, rel=1e-12)
    if variant.get("counted"):
        (store,) = [s for s in ranks.stores if "count" in s.buffers]
        assert float(store.buffers["count"]) == float(model.count) == 4.0
        assert store.module.count is store.buffers["count"]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "+".join(v) or "chain")
def test_every_cut_gives_the_same_bits_over_several_steps(variant):
    seen = []
    for placement in PLACEMENTS:
        ranks = fleet(
            placement,
            ROWS,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            max_norm=0.05,
            **variant,
        )
        losses = []
        for step in range(3):
            for update in (False, True):
                results = ranks.step(batch(ROWS, seed=step), update=update)
                losses += [float(results[0].loss)]
            losses.append(float(results[-1].grad_norm))
        weights = {}
        for store in ranks.stores:
            weights |= {g.name: g.parameter.detach() for g in store.gradients}
        seen.append((losses, weights))
    for losses, weights in seen[1:]:
        assert losses == seen[0][0]
        assert set(weights) == set(seen[0][1])
        assert all(torch.equal(w, seen[0][1][n]) for n, w in weights.items())


def test_scopes_are_empty_and_nothing_is_alive_at_the_end():
    ranks = fleet((0, 1, 0, 1), ROWS, split=True, skip=True)
    for executor in ranks.executors:
        assert executor.plan.live_bytes[-1] == 0
        assert executor.plan.peak_bytes >= max(executor.plan.live_bytes) > 0


def test_an_exception_in_a_job_names_rank_job_and_cause():
    ranks = fleet((0, 1, 0, 1), ROWS)
    broken = batch(ROWS)
    broken[1][1] = torch.randn(7, 7)
    with pytest.raises(JobError, match=r"rank 1: job F3\.1 failed: RuntimeError: .*size") as caught:
        ranks.step(broken)
    assert isinstance(caught.value.__cause__, RuntimeError)


def one_rank(jobs, stage=0, placement=(0, 1), count=1):
    model = Chain(len(placement))
    programs_ = programs(model, 3)
    store = ParameterStore(model, programs_, placement, stage)
    return Executor(stage, jobs, [programs_] * count, placement, store, MemoryTransport.group(2)[stage])


def test_lists_that_do_not_fit_the_programs_are_refused():
    with pytest.raises(ValueError, match=r"stage 1: job X1\.0 needs 'h2', which no earlier job"):
        one_rank([Job("X", 1, 0)], stage=1)
    with pytest.raises(
        ValueError, match=r"stage 0: send F0>1\.0 to stage 1 sends 'h1', which nobody has made"
    ):
        one_rank([Transfer("send", "F", 0, 1, 0, 1), Job("F", 0, 0)])
    with pytest.raises(
        ValueError, match=r"job F0\.1 is beyond the 1 micro-batches|F0\.1 is beyond the 1 micro"
    ):
        one_rank([Job("F", 0, 1)])
    with pytest.raises(ValueError, match=r"job F1\.0 needs param 'w1', which this stage doesn't hold"):
        one_rank([Transfer("post", "F", 0, 1, 0, 0), Transfer("recv", "F", 0, 1, 0, 0), Job("F", 1, 0)])


def test_a_step_checks_what_it_is_given():
    executor = one_rank([Job("F", 0, 0)])
    key, tangent = torch.tensor(0), torch.tensor(1.0)
    with pytest.raises(ValueError, match="batch has 2 entries for 1 micro-batches"):
        finish(executor.run(batch((3, 3)), [tangent], [key], weights=[3.0]))
    with pytest.raises(ValueError, match="weights are needed"):
        finish(executor.run(batch((3,)), [tangent], [key]))


def test_lists_that_wait_for_each_other_are_said_to_be_stuck():
    ranks = fleet((0, 1), (3,))
    sets = [programs(Chain(2), 3)]
    lists = lowered((0, 1), sets)
    kept = [j for j in lists[0] if not (isinstance(j, Transfer) and j.action == "send")]
    ranks.executors[0] = Executor(
        0, kept, sets, (0, 1), ranks.stores[0], ranks.executors[0]._transport, updater=ranks.updaters[0]
    )
    with pytest.raises(StuckError, match=r"rank 0 waits(.|\n)*rank 1 waits"):
        ranks.step(batch((3,)))


def test_evaluation_runs_forwards_alone_and_moves_no_gradient():
    placement = (0, 1)
    model_sets = [programs(Chain(2), 3)] * 2
    lists = lowered(placement, model_sets, train=False)
    assert not any(isinstance(j, Phase) for jobs in lists for j in jobs)
    ranks = fleet(placement, (3, 3))
    for stage in range(2):
        ranks.executors[stage] = Executor(
            stage, lists[stage], model_sets, placement, ranks.stores[stage], ranks.executors[stage]._transport
        )
    batches = batch((3, 3))
    results = ranks.step(batches)
    expected, _, _ = eager(placement, batches)
    assert float(results[0].loss) == float(results[1].loss) == pytest.approx(expected, rel=1e-12)
    assert all(g.view.abs().sum() == 0 for s in ranks.stores for g in s.gradients)


def test_a_step_of_total_weight_zero_is_skipped():
    ranks = fleet((0, 1), (3, 2), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), weighted=True)
    batches = batch((3, 2))
    for _, y in batches:
        y[:, 0] = -1
    before = [g.parameter.detach().clone() for s in ranks.stores for g in s.gradients]
    results = ranks.step(batches)
    assert [r.skipped for r in results] == [True, True]
    assert [float(r.weight) for r in results] == [0.0, 0.0]
    after = [g.parameter.detach() for s in ranks.stores for g in s.gradients]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
