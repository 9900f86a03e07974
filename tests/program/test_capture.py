"""Capture: one joint program, and nothing of the model has run or moved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import WIDTH, WORDS, Auxiliary, Chain, NormChain, TiedEnds, build, cross_entropy, squares, summed
from pipeloom.program import compat
from pipeloom.program.annotations import module_of
from pipeloom.program.capture import CaptureError, capture
from pipeloom.program.ir import CHUNK, ROLE, OpRole


def dense(samples: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, WIDTH), torch.randn(samples, WIDTH)


# ---- nothing runs, nothing moves ------------------------------------------------------------------------------------


class _Counting(NormChain):
    """Says whether real numbers went through it."""

    def __init__(self) -> None:
        super().__init__(2)
        self.saw_real_tensors = False

    def forward(self, x: Tensor) -> Tensor:
        self.saw_real_tensors |= type(x) is Tensor
        return F.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_exactly_as_it_was(training: bool) -> None:
    model = _Counting()
    model.layers[1].eval()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {n: t.detach().clone() for n, t in tensors.items()}
    modes = [m.training for m in model.modules()]
    attributes = {n: set(m.__dict__) for n, m in model.named_modules()}
    example = dense()
    state = torch.get_rng_state()
    capture(model, squares, example=example, training=training)
    assert not model.saw_real_tensors
    assert {**dict(model.named_parameters()), **dict(model.named_buffers())}.keys() == tensors.keys()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor is tensors[name]
        assert torch.equal(tensor, values[name])
        assert getattr(tensor, "grad", None) is None
    assert [m.training for m in model.modules()] == modes
    assert {n: set(m.__dict__) for n, m in model.named_modules()} == attributes
    assert torch.equal(state, torch.get_rng_state())
    assert torch.backends.mkldnn.is_available() == torch._C._get_mkldnn_enabled()


class _Fails(NormChain):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * x.sum().item()


def test_the_model_is_left_as_it_was_after_an_exception_and_the_next_capture_works() -> None:
    model = _Fails(1)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for _ in range(2):
        with pytest.raises(CaptureError):
            capture(model, squares, example=dense())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor is tensors[name]
    assert "forward" not in model.__dict__
    assert torch.equal(model.layers[0][1].running_mean, torch.zeros(WIDTH))
    assert capture(Chain(2), squares, example=dense()).loss.meta["val"].shape == ()


def test_a_forward_that_the_user_had_set_is_put_back() -> None:
    model = Chain(1)
    own: Callable[[Tensor], Tensor] = lambda x: model.layers[0](x) * 2  # noqa: E731
    model.forward = own  # type: ignore[method-assign]
    capture(model, squares, example=dense())
    assert model.forward is own


# ---- what an example may be -----------------------------------------------------------------------------------------


def signature(program: object) -> list[tuple[str, str]]:
    return [(str(n.target), str(n.meta["val"])) for n in program.ops()]  # type: ignore[attr-defined]


def test_real_meta_and_size_examples_give_the_same_program() -> None:
    model, (x, y) = Chain(2), dense()
    real = signature(capture(model, squares, example=(x, y)))
    assert signature(capture(model, squares, example=(x.to("meta"), y.to("meta")))) == real
    assert signature(capture(model, squares, example=(x.shape, y.shape))) == real


def test_a_model_on_meta_is_captured_without_a_weight() -> None:
    with torch.device("meta"):
        model = TiedEnds()
    tokens = torch.zeros(4, 6, dtype=torch.int64)
    program = capture(model, cross_entropy, example=(tokens, tokens))
    assert {compat.fake_values(n)[0].device.type for n in program.inputs} == {"cpu"}


def test_arguments_keywords_and_nested_batches() -> None:
    case = build("arguments")
    program = capture(case.model, case.loss_fn, example=case.example)
    assert sum(desc.kind == "input" for desc in program.inputs.values()) == 4
    positional = (case.inputs["pair"], case.inputs["mask"])
    same = capture(case.model, case.loss_fn, example=(positional, case.targets))
    targets = {str(n.target) for n in same.ops()}
    assert "aten.tanh.default" in targets  # the default of `how`
    assert "aten.sin.default" not in targets


def test_a_model_may_return_its_loss() -> None:
    class Own(Auxiliary):
        def forward(self, x: Tensor, y: Tensor | None = None) -> object:
            output, balance = super().forward(x)
            loss = balance if y is None else F.mse_loss(output, y) + balance
            return self.how(loss, output)

        how: Callable[[Tensor, Tensor], object]

    class Output:
        def __init__(self, loss: Tensor) -> None:
            self.loss = loss

    model = Own()
    for how, has_weight in (
        (lambda loss, _: loss, False),
        (lambda loss, output: (loss, output), False),
        (lambda loss, _: {"loss": loss}, False),
        (lambda loss, _: Output(loss), False),
        (lambda loss, _: loss.reshape(1), False),
        (lambda loss, _: (loss, 7), True),
    ):
        model.how = how  # type: ignore[assignment]
        program = capture(model, None, example=dense())
        assert program.loss.meta["val"].shape == ()
        assert program.has_weight == has_weight
        assert (program.weight is not None) == has_weight
    assert capture(model, None, example=(dense()[0], None)).loss is not None


def test_a_loss_may_come_with_its_weight() -> None:
    tokens = torch.zeros(4, 6, dtype=torch.int64)
    program = capture(TiedEnds(), summed, example=(tokens, tokens))
    assert program.weight is not None
    assert program.weight.meta["val"].dtype == torch.float32


# ---- what the program says ------------------------------------------------------------------------------------------


def test_inputs_and_outputs_have_the_models_names() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    program = capture(model, squares, example=dense())
    named = {(d.kind, d.name) for d in program.inputs.values()}
    assert named == {
        *(("param", n) for n, _ in model.named_parameters()),
        *(("buffer", n) for n in ("1.running_mean", "1.running_var", "1.num_batches_tracked")),
        ("input", "0"),
        ("input", "1"),
        ("tangent", "0"),
    }
    assert {name for _, name in program.gradients()} == {n for n, _ in model.named_parameters()}
    assert {name for _, name in program.buffer_updates()} == {n for n, _ in model.named_buffers()}


def test_tied_parameters_have_their_first_name() -> None:
    case = build("tied")
    program = capture(case.model, case.loss_fn, example=case.example)
    assert program.aliases["head.weight"] == "embedding.weight"
    assert {d.name for d in program.inputs.values() if d.kind == "param"} == {
        n for n, _ in case.model.named_parameters()
    }


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    for name, without in (("frozen_prefix", "layers.0.weight"), ("no_weights", "unused.weight")):
        case = build(name)
        program = capture(case.model, case.loss_fn, example=case.example)
        assert without not in {n for _, n in program.gradients()}


def test_every_op_has_a_role_and_its_module() -> None:
    case = build("chain")
    program = capture(case.model, case.loss_fn, example=case.example)
    assert {n.meta[ROLE] for n in program.ops()} == {OpRole.FORWARD, OpRole.BACKWARD}
    products = [n for n in program.ops() if n.target is torch.ops.aten.addmm.default]
    assert [module_of(n) for n in products] == [f"layers.{i}" for i in range(4)]


def test_a_program_prints_one_op_a_line() -> None:
    program = capture(Chain(1), squares, example=dense())
    text = str(program)
    lines = text.splitlines()
    assert lines[0] == f"Program: {len(program.ops())} ops, 1 chunk"
    assert "  param       primals_1 = layers.0.weight  float32[8, 8]" in lines
    addmm = next(line for line in lines if "aten.addmm" in line)
    assert addmm.startswith("  forward   - addmm = aten.addmm.default(")
    assert addmm.endswith("float32[4, 8]  # layers.0")
    assert sum(line.startswith("  backward") for line in lines) == sum(
        n.meta[ROLE] == OpRole.BACKWARD for n in program.ops()
    )
    assert lines[-1].startswith("  return output 0: ")
    program.ops()[0].meta[CHUNK] = 3
    assert "  forward   3 " in str(program)


def test_evaluation_is_forward_only_and_has_the_models_outputs() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    program = capture(model, squares, example=dense(), training=False)
    assert {n.meta[ROLE] for n in program.ops()} == {OpRole.FORWARD}
    assert not program.gradients()
    assert not program.buffer_updates()
    assert [n.meta["val"].shape for n in program.model_outputs] == [(4, WIDTH)]
    assert not any("dropout" in str(n.target) or "bernoulli" in str(n.target) for n in program.ops())


def test_autocast_is_a_choice_of_capture() -> None:
    model = Chain(1)
    plain = capture(model, squares, example=dense())
    mixed = capture(model, squares, example=dense(), autocast=torch.bfloat16)
    assert torch.bfloat16 not in {t.dtype for n in plain.ops() for t in compat.fake_values(n)}
    product = next(n for n in mixed.ops() if n.target is torch.ops.aten.addmm.default)
    assert product.meta["val"].dtype == torch.bfloat16
    with torch.no_grad():  # whoever calls may be inside a step
        assert len(capture(model, squares, example=dense()).gradients()) == 2


def test_other_shapes_and_widths_of_words() -> None:
    model = TiedEnds()
    for samples, time in ((1, 1), (3, 5)):
        tokens = torch.zeros(samples, time, dtype=torch.int64)
        program = capture(model, cross_entropy, example=(tokens, tokens), training=False)
        assert program.model_outputs[0].meta["val"].shape == (samples, time, WORDS)
