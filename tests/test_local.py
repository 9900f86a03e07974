"""All stages in one process: what a LocalPipeline gives, and what a pipeline refuses, in which words."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import models
from parity import Deep, dense, made, pipe_outcome, pipeline, text
from pipeloom.api import Pipeline
from pipeloom.local import compile_local
from pipeloom.planner import Planner
from pipeloom.planning.errors import PlanError
from pipeloom.program.capture import CaptureError
from pipeloom.program.ir import ProgramError
from pipeloom.runtime.agreement import DisagreementError
from pipeloom.runtime.errors import JobError
from pipeloom.runtime.stepping import drive
from pipeloom.runtime.transport import MemoryTransport
from pipeloom.strategy import Strategy, StrategyError


@functools.cache
def case_of(name: str) -> Deep:
    if name == "tied":
        return made(lambda: Deep(models.TiedEnds(), models.cross_entropy, text))  # type: ignore[no-any-return]
    return made(lambda: Deep(models.Chain(), F.mse_loss, dense))  # type: ignore[no-any-return]


def strategy_of(**fields: Any) -> Strategy:
    return Strategy(**{"pp_degree": 2, "accumulate_steps": 2, "costs": "roofline", **fields})


# ---- what it gives


def test_the_users_model_is_not_changed() -> None:
    case = case_of("chain")
    before = copy.deepcopy(case.model.state_dict())
    parameters = dict(case.model.named_parameters())
    pipe = compile_local(
        case.model,
        case.loss_fn,
        example=case.batch(4),
        strategy=strategy_of(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
    pipe.step(*case.batch(4))
    assert all(p is parameters[n] and p.grad is None for n, p in case.model.named_parameters())
    assert all(torch.equal(t, before[n]) for n, t in case.model.state_dict().items())
    assert not any(torch.equal(p, before[n]) for n, p in pipe.parameters().items())


def test_each_stage_holds_its_own_parameters_and_no_others() -> None:
    case = case_of("tied")
    pipe = pipeline(case, strategy_of(pp_degree=3), case.batch(4))
    held = [{stage.store.first_name[n] for n in stage.store.parameters} for stage in pipe.stages]
    assert set.union(*held) == {n for n, _ in case.model.named_parameters()}
    assert held[0] & held[2] == {"embedding.weight"}
    assert not held[1] & (held[0] | held[2])
    for stage, names in zip(pipe.stages, held, strict=True):
        real = {n for n, p in stage.model.named_parameters() if not p.is_meta}
        assert real == names


def test_gradients_are_views_of_the_parameters_grad() -> None:
    case = case_of("chain")
    pipe = pipeline(case, strategy_of(), case.batch(4))
    pipe.step(*case.batch(4), update=False)
    for stage in pipe.stages:
        named = dict(stage.model.named_parameters())
        for name, gradient in stage.gradients().items():
            assert named[name].grad is gradient
            assert gradient.any()


def test_measured_and_timeline_after_a_step() -> None:
    case = case_of("chain")
    pipe = pipeline(case, strategy_of(), case.batch(4))
    assert pipe.measured is None
    pipe.step(*case.batch(4))
    measured = pipe.measured
    assert measured is not None
    assert measured.step_time > 0
    assert 0 <= measured.bubble_span <= measured.bubble_global < 1
    assert len(measured.peak_bytes) == 2
    timeline = pipe.timeline()
    assert timeline.ranks == 2
    ran = [(s.kind, s.chunk, s.micro_batch) for s in timeline.spans if s.kind in ("F", "X")]
    assert sorted(ran) == sorted((k, c, m) for k in ("F", "X") for c in (0, 1) for m in (0, 1))


def test_timelines_of_the_profiling_window_are_kept() -> None:
    case = case_of("chain")
    pipe = pipeline(case, strategy_of(profile=(1, 2)), case.batch(4))
    for _ in range(4):
        pipe.step(*case.batch(4))
    assert len(pipe.stages[0].timelines) == 2


def test_a_checkpoint_goes_on_with_other_stages(tmp_path: Path) -> None:
    case = case_of("tied")
    make = functools.partial(torch.optim.AdamW, lr=1e-2)
    unbroken = pipeline(case, strategy_of(), case.batch(4), make)
    for seed in (1, 2):
        unbroken.step(*case.batch(4, seed=seed))
    unbroken.save(tmp_path / "checkpoint")
    other = pipeline(case, strategy_of(pp_degree=2, vpp_degree=2, schedule_mode="ZBV"), case.batch(4), make)
    other.load(tmp_path / "checkpoint")
    for seed in (3, 4):
        batch = case.batch(4, seed=seed)
        assert torch.equal(unbroken.step(*batch).loss, other.step(*batch).loss)
    for name, parameter in unbroken.parameters().items():
        assert torch.equal(parameter, other.parameters()[name]), name


def test_blocking_sends_give_the_same_bits() -> None:
    case = case_of("tied")
    outcomes = [
        pipe_outcome(
            pipeline(
                case,
                strategy_of(vpp_degree=2, schedule_mode="VPP", enable_send_recv_overlap=o),
                case.batch(4),
            ),
            case.batch(4),
        )
        for o in (True, False)
    ]
    assert not outcomes[0].differences(outcomes[1])


# ---- what is refused


def compiled(case: Deep, samples: int = 4, **fields: Any) -> Any:
    return compile_local(
        case.model, case.loss_fn, example=case.batch(samples), strategy=strategy_of(**fields)
    )


def test_tensors_of_other_batch_sizes() -> None:
    case = case_of("chain")
    pipe = pipeline(case, strategy_of(), case.batch(4))
    inputs, targets = case.batch(4)
    for call in (pipe.step, pipe.eval):
        with pytest.raises(
            ValueError, match=r"input 0 has 4 samples and target leaf 0 has 3 \(shape \(3, 8\)\)"
        ):
            call(inputs, targets[:3])
    assert float(pipe.step(inputs, targets).weight) == 4, "nothing was sent: the pipeline goes on"


def test_a_batch_that_disagrees_with_the_strategy_shows_the_arithmetic() -> None:
    case = case_of("chain")
    pipe = pipeline(case, strategy_of(micro_batch_size=2), case.batch(4))
    with pytest.raises(
        StrategyError, match=r"micro_batch_size 2 × accumulate_steps 2 = 4 samples, but the batch has 6"
    ):
        pipe.step(*case.batch(6))


def test_an_empty_batch() -> None:
    case = case_of("chain")
    pipe = pipeline(case, strategy_of(), case.batch(4))
    inputs, targets = case.batch(4)
    with pytest.raises(StrategyError, match="the batch has 0 samples"):
        pipe.step(inputs[:0], targets[:0])


def test_a_batch_without_tensors() -> None:
    case = case_of("chain")
    with pytest.raises(ValueError, match="the batch holds no tensor"):
        pipeline(case, strategy_of(), case.batch(4)).step(3, None)


def test_an_example_without_targets() -> None:
    case = case_of("chain")
    with pytest.raises(ValueError, match=r"example is a pair \(inputs, targets\); got Tensor"):
        compile_local(case.model, case.loss_fn, example=torch.zeros(4, 8), strategy=strategy_of())


def test_more_chunks_than_ops() -> None:
    with pytest.raises(ProgramError, match=r"too few for 24 chunks .*lower pp_degree"):
        compiled(case_of("chain"), pp_degree=8, vpp_degree=3, schedule_mode="VPP")


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (["layers.7"], "cuts names 'layers.7', but no module of that name runs an op"),
        (["layers.0"], "the cut at 'layers.0' leaves the chunk before it empty"),
        ("blocks.*", r"cuts='blocks\.\*' gives 0 places to cut"),
    ],
)
def test_cuts_that_do_not_fit_the_model(cuts: Any, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        compiled(case_of("chain"), cuts=cuts)


def test_another_number_of_cuts() -> None:
    with pytest.raises(
        StrategyError, match="cuts has 2 names, but pp_degree 2 × vpp_degree 1 = 2 chunks need 1"
    ):
        strategy_of(cuts=["layers.1", "layers.2"])


def test_another_number_of_ranks() -> None:
    case = case_of("chain")
    planner = Planner(case.model, case.loss_fn, strategy_of(), torch.device("cpu"))
    stages = [Pipeline(planner, transport) for transport in MemoryTransport.group(3)]
    with pytest.raises(ValueError, match=r"pp_degree=2, but the pipeline has 3 rank\(s\)"):
        drive([stage.prepare(*case.batch(4)) for stage in stages])


def test_ranks_with_other_batches() -> None:
    case = case_of("chain")
    pipe = pipeline(case, strategy_of(), case.batch(4))
    with pytest.raises(DisagreementError, match=r"rank 1 was given a batch with other values than rank 0"):
        pipe.each(lambda stage: stage.step_work(*case.batch(4, seed=stage.stage)))


def test_ranks_with_batches_of_other_shapes() -> None:
    case = case_of("chain")
    pipe = pipeline(case, strategy_of(), case.batch(4))
    with pytest.raises(DisagreementError, match=r"rank 1 was given a batch of other shapes than rank 0"):
        pipe.each(lambda stage: stage.step_work(*case.batch(4 + 2 * stage.stage)))


def test_ranks_with_other_models() -> None:
    case = case_of("chain")
    planners = [
        Planner(models.Chain(layers), case.loss_fn, strategy_of(), torch.device("cpu")) for layers in (4, 5)
    ]
    stages = [Pipeline(p, t) for p, t in zip(planners, MemoryTransport.group(2), strict=True)]
    with pytest.raises(DisagreementError, match="ranks 0 and 1 don't have the same program") as raised:
        drive([stage.prepare(*case.batch(4)) for stage in stages])
    sides = re.findall(r"programs ([0-9a-f]+)", str(raised.value))
    assert len(sides) == 2
    assert sides[0] != sides[1]


def test_a_memory_limit_that_no_plan_keeps() -> None:
    with pytest.raises(PlanError, match="stage 0"):
        compiled(case_of("chain"), memory_limit=100)


def test_a_timeline_before_the_first_step() -> None:
    case = case_of("chain")
    with pytest.raises(ValueError, match="there is no timeline yet: run a step first"):
        pipeline(case, strategy_of(), case.batch(4)).timeline()


def test_a_loss_that_needs_no_gradient() -> None:
    model = made(lambda: models.Chain()).requires_grad_(False)
    with pytest.raises(CaptureError, match="the loss of Chain needs no gradient"):
        compile_local(model, F.mse_loss, example=dense(4), strategy=strategy_of())


def test_a_job_that_fails_names_rank_job_and_cause() -> None:
    case = case_of("tied")
    pipe = pipeline(case, strategy_of(), case.batch(4))
    tokens, targets = (t.clone() for t in case.batch(4))
    tokens[2:] = models.WORDS + 5  # the second micro-batch's words don't exist
    with pytest.raises(JobError, match=r"rank 0.*F0\.1.*index out of range"):
        pipe.step(tokens, targets)


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


def test_a_forward_that_branches_on_values_names_its_module() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Broken())
    with pytest.raises(CaptureError, match=r"can't capture Sequential.*\b1\b"):
        compile_local(model, F.mse_loss, example=dense(4), strategy=strategy_of())
