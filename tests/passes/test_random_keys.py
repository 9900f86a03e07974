"""Random draws are pure functions of (key, index): what eager PyTorch draws with the same seeds, for any cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import WIDTH, Case, build, squares
from oracle import KeyedDraws, capture_case, cut, eager, leaves_of, prepared, run_programs, worst_error
from pipeloom.passes import apply_passes, build_pass
from pipeloom.passes.random_keys import draws, key_of, mix, preserved_generators
from pipeloom.program.capture import capture
from pipeloom.program.ir import ProgramError


def test_keys_differ_by_seed_step_and_micro_batch() -> None:
    keys = {int(key_of(s, t, m)) for s in range(4) for t in range(4) for m in range(4)}
    assert len(keys) == 64
    assert all(0 <= k < 2**63 for k in keys)
    assert key_of(1, 2, 3).dtype == torch.int64
    assert int(key_of(1, 2, 3)) == int(key_of(1, 2, 3))


def test_mix_spreads_neighbouring_numbers() -> None:
    seeds = [mix(7, i) for i in range(1000)]
    assert len(set(seeds)) == 1000
    for bit in range(64):
        assert 380 < sum(s >> bit & 1 for s in seeds) < 620


def test_dropout_masks_are_those_of_the_eager_oracle() -> None:
    case = build("chain_dropout")
    case.model.layers = nn.ModuleList(nn.Identity() for _ in range(2))
    case.model.extra = nn.Parameter(torch.ones(()))
    case.loss_fn = lambda output, target: (output * target).sum() * case.model.extra
    case.inputs = torch.full((4, WIDTH), 3.0)
    key = key_of(1, 0, 0)
    programs = cut(capture_case(case), 1)
    assert programs.draws == 2
    result = run_programs(programs, case.model, leaves_of(case), key)
    expected = eager(case, key)
    assert torch.equal(result.loss, expected.loss)
    with preserved_generators(torch.device("cpu")), KeyedDraws(key) as draw:
        output = case.model(case.inputs)
    assert draw.count == 2
    assert 0 < int((output == 0).sum()) < output.numel()
    assert torch.equal(result.loss, (output * case.targets).sum())


@pytest.mark.parametrize("name", ["chain_dropout", "gpt_dropout"])
def test_other_keys_draw_other_masks_and_cuts_do_not_matter(name: str) -> None:
    case, program = prepared(name)
    losses = {}
    for chunks in (1, 3):
        programs = cut(program, chunks)
        for m in range(3):
            result = run_programs(programs, case.model, leaves_of(case), key_of(0, 0, m))
            assert float(result.loss) == float(eager(case, key_of(0, 0, m)).loss)
            losses[chunks, m] = float(result.loss)
    assert len({losses[1, m] for m in range(3)}) == 3
    assert all(losses[1, m] == losses[3, m] for m in range(3))


class _Noise(nn.Module):
    """Draws of many kinds, in place and not, with and without a tensor to be like."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x + torch.rand_like(x) + torch.randn(x.shape, dtype=x.dtype))
        x = x * torch.bernoulli(torch.sigmoid(x)) + torch.empty_like(x).uniform_()
        x = self.layers[1](F.alpha_dropout(x, 0.3, True))[:, torch.randperm(WIDTH)]
        x = F.gumbel_softmax(x) * torch.randint(1, 3, (WIDTH,))
        return F.dropout1d(self.layers[2](x), 0.4, True) + torch.normal(0.0, 1.0, (WIDTH,)).to(x)


def test_every_kind_of_draw_is_keyed() -> None:
    case = Case(_Noise(), squares, torch.randn(4, WIDTH), torch.randn(4, WIDTH)).double()
    program = capture_case(case)
    key = key_of(3, 1, 4)
    expected = eager(case, key)
    state = torch.get_rng_state()
    for chunks in (1, 3):
        result = run_programs(cut(program, chunks), case.model, leaves_of(case), key)
        assert torch.equal(result.loss, expected.loss)
        assert worst_error(result.gradients, expected.gradients) <= 1e-10
    assert torch.equal(state, torch.get_rng_state())


def test_draws_are_numbered_in_program_order() -> None:
    program = prepared("gpt_dropout")[1]
    indices = [n.args[1] for n in program.ops() if str(n.target).startswith("pipeloom.")]
    assert indices == list(range(program.draws))
    assert program.draws == 6  # two layers; attention, its projection and the feed-forward part in each


def test_a_program_without_draws_has_no_key() -> None:
    program = prepared("chain")[1]
    assert program.draws == 0
    assert "key" not in {desc.kind for desc in program.inputs.values()}


def test_fused_attention_without_dropout_does_not_draw() -> None:
    program = prepared("gpt")[1]
    attention = [n for n in program.ops() if "scaled_dot_product" in str(n.target)]
    assert attention
    assert not any(draws(n) for n in attention)


def test_a_generator_is_refused() -> None:
    generator = torch.Generator()
    case = build("chain")

    def noisy(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output + torch.rand(output.shape, generator=generator), target)

    program = capture(case.model, noisy, example=case.example)
    with pytest.raises(ProgramError, match=r"aten.rand.*draws from a generator of its own.*Drop generator="):
        apply_passes(program, [build_pass("random_keys")])


def test_the_check_finds_a_draw_without_a_key() -> None:
    case = build("chain_dropout")
    program = capture(case.model, case.loss_fn, example=case.example)
    keys = build_pass("random_keys")
    with pytest.raises(ProgramError, match="still draws without a key"):
        keys.check(program)
    apply_passes(program, [keys])
    keys.check(program)


def test_preserved_generators_put_the_callers_state_back_after_an_error() -> None:
    def fails() -> None:
        with preserved_generators(torch.device("cpu")):
            torch.manual_seed(5)
            torch.rand(3)
            raise KeyError

    state = torch.get_rng_state()
    with pytest.raises(KeyError):
        fails()
    assert torch.equal(state, torch.get_rng_state())
