"""Every use of a parameter has a slot, in the order of the captured program."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models import WIDTH, Case, build, squares
from oracle import capture_case, cut, eager, leaves_of, prepared, run_programs, worst_error
from pipeloom.passes import apply_passes, build_pass
from pipeloom.passes.random_keys import key_of
from pipeloom.program.capture import capture
from pipeloom.program.compat import fake_values
from pipeloom.program.ir import Program


def uses(program: Program) -> dict[str, int]:
    found: dict[str, int] = {}
    for _, name, _ in program.slots():
        found[name] = found.get(name, 0) + 1
    return found


def test_a_parameter_that_is_used_once_has_one_slot() -> None:
    case, program = prepared("chain")
    assert uses(program) == {n: 1 for n, _ in case.model.named_parameters()}
    assert not program.gradients()


def test_a_module_that_is_used_twice_and_tied_weights_have_two() -> None:
    assert uses(prepared("used_twice")[1])["shared.weight"] == 2
    assert uses(prepared("used_twice")[1])["shared.bias"] == 2
    assert uses(prepared("tied")[1])["embedding.weight"] == 2
    assert uses(prepared("gpt_tied")[1])["words.weight"] == 2
    assert uses(prepared("decay")[1])["layers.0.weight"] == 2  # the layer, and the decay in the loss


def test_slots_are_numbered_as_the_backward_makes_them() -> None:
    for name in ("used_twice", "tied", "shared_view"):
        program = prepared(name)[1]
        order = {n: i for i, n in enumerate(program.graph.nodes)}
        by_parameter: dict[str, list[tuple[int, int]]] = {}
        for node, parameter, index in program.slots():
            by_parameter.setdefault(parameter, []).append((index, order[node]))
        for found in by_parameter.values():
            assert [i for i, _ in sorted(found)] == list(range(len(found)))
            assert [i for _, i in sorted(found)] == sorted(i for _, i in found)


def test_the_sum_of_the_slots_is_the_gradient_that_was_there() -> None:
    case = build("used_twice").double()
    key = key_of(0, 0, 0)
    plain = capture(case.model, case.loss_fn, example=case.example)
    gradients = {n: node for node, n in plain.gradients()}
    assert gradients["shared.weight"].target is torch.ops.aten.add.Tensor
    apply_passes(plain, [build_pass("gradient_merge")])
    assert uses(plain)["shared.weight"] == 2
    assert gradients["shared.weight"] not in plain.live()  # nobody makes the sum any more
    result = run_programs(cut(plain, 1), case.model, leaves_of(case), key)
    assert worst_error(result.gradients, eager(case, key).gradients) <= 1e-10


class _Sums(nn.Module):
    """Gradients that are sums for another reason than two uses: they must not be taken apart wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(1, WIDTH))
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.three = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.row + torch.tanh(self.row) * x  # two uses, summed to the row's shape
        x = x @ (self.matrix + self.matrix.t())  # the sum of a gradient and of its transpose
        return x * self.three + torch.sin(x + self.three) * self.three.detach() + self.three


def test_sums_of_every_kind_keep_their_value() -> None:
    case = Case(_Sums(), squares, torch.randn(4, WIDTH), torch.randn(4, WIDTH)).double()
    program, key = capture_case(case), key_of(0, 0, 0)
    assert uses(program)["three"] == 3
    expected = eager(case, key)
    for chunks in (1, 2, 3):
        result = run_programs(cut(program, chunks), case.model, leaves_of(case), key)
        assert worst_error(result.gradients, expected.gradients) <= 1e-10


def test_slots_have_the_parameters_shape_and_dtype() -> None:
    for name in ("shared_view", "gpt_autocast_tied", "gains"):
        case, program = prepared(name)
        parameters = dict(case.model.named_parameters())
        for node, parameter, _ in program.slots():
            value = fake_values(node)[0]
            assert (value.shape, value.dtype) == (parameters[parameter].shape, parameters[parameter].dtype)


def test_a_parameter_that_is_a_term_of_the_loss_has_the_seed_as_its_gradient() -> None:
    case, program = prepared("gains")
    assert uses(program)["log_variance"] == 2
    key = key_of(0, 0, 0)
    result = run_programs(cut(program, 2), case.model, leaves_of(case), key, tangent=0.5)
    expected = 0.5 * eager(case, key).gradients["log_variance"]
    torch.testing.assert_close(result.gradients["log_variance"], expected)
