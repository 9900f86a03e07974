"""Capture: a model and its loss become one Program, and nothing runs.

The parameters, buffers and inputs are replaced by fake twins (shape, stride, dtype, no memory) while the graph is
traced, so that no weight needs to be here, no BatchNorm statistics move and no random number is drawn. Followed:
torch's ahead-of-time autograd (`aot_export_joint_with_descriptors`), one joint graph of forward and backward.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from . import compat
from .annotations import annotated_modules
from .batch import BatchForm, flatten_batch
from .checks import check_model, check_surroundings, kept_state
from .constants import lifted_constants
from .ctc import FixedCtc
from .gaussian import CheckedGaussian
from .ir import Program
from .layouts import PredictedLayouts
from .means import CountedMeans
from .outside import Outside
from .reasons import place, reason
from .twins import twins

LossFunction = Callable[[Any, Any], Any]


class CaptureError(RuntimeError):
    """The model can't be captured; the message names the module and says what to change."""


def capture(
    model: nn.Module,
    loss_fn: LossFunction | None = None,
    *,
    example: Any,
    training: bool = True,
    autocast: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Program:
    """The Program of `loss_fn(model(inputs), targets)`, or of the loss that the model returns when loss_fn is None.

    example: (inputs, targets) with a loss_fn, else inputs; tensors may be real, meta or fake; only their shapes,
    strides and dtypes count. training False: forward only, with the model's outputs, all modules in eval mode.
    A loss is a 0-dim float tensor; loss_fn may return (sum, weight) instead.

    Raises CaptureError (with the module where it happened) for what can't be traced, ValueError for a bad example.
    """
    inputs, targets = split_example(example, loss_fn)
    leaves, form = flatten_batch(inputs, targets)
    return capture_leaves(model, loss_fn, leaves, form, training=training, autocast=autocast, device=device)


def split_example(example: Any, loss_fn: LossFunction | None) -> tuple[Any, Any]:
    """(inputs, targets) of an example."""
    if loss_fn is None:
        if isinstance(example, tuple) and len(example) == 2 and example[1] is None:
            return example[0], None
        return example, None
    if not isinstance(example, (tuple, list)) or len(example) != 2:
        raise ValueError(
            f"with a loss_fn, example is a pair (inputs, targets); got {type(example).__name__}"
            + (f" of length {len(example)}" if isinstance(example, (tuple, list)) else "")
        )
    return example[0], example[1]


def capture_leaves(
    model: nn.Module,
    loss_fn: LossFunction | None,
    leaves: list[torch.Tensor],
    form: BatchForm,
    *,
    training: bool,
    autocast: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Program:
    """`capture` for a batch that is already flattened."""
    options: dict[str, Any] = {"training": training, "autocast": autocast, "device": device}
    try:
        return _captured(model, loss_fn, leaves, form, **options)
    except CaptureError as error:
        if not compat.left_in_place(error.__cause__):
            raise
    return _captured(model, loss_fn, leaves, form, lifting=True, **options)


def _captured(
    model: nn.Module,
    loss_fn: LossFunction | None,
    leaves: list[torch.Tensor],
    form: BatchForm,
    *,
    training: bool,
    autocast: torch.dtype | None,
    device: torch.device | None,
    lifting: bool = False,
) -> Program:
    """lifting: constants are lifted into the trace (see `constants`), which costs time, and is done where it must."""
    compat.check_torch_version()
    check_model(model, training=training)
    check_surroundings(device or _device_of(model, leaves))
    if isinstance(loss_fn, nn.Module) and next(loss_fn.parameters(), None) is not None:
        raise CaptureError(
            f"the loss {type(loss_fn).__name__} has parameters of its own: make it part of the model (return "
            "the loss from the model's forward) and pass loss_fn=None, so that they are trained and saved with it."
        )
    mode = compat.fake_mode()
    device = device or _device_of(model, leaves)
    step = _Step(model, loss_fn, form, training=training, autocast=autocast, device=device, lifting=lifting)
    fakes = [compat.fake_tensor(mode, leaf, device) for leaf in leaves]
    names = {id(m): n for n, m in model.named_modules()}
    try:
        with (
            twins(
                step,
                mode,
                device,
                training=training,
                also=[loss_fn] if isinstance(loss_fn, nn.Module) else [],
            ),
            annotated_modules(model, names),
            _untouched(model, loss_fn),
            _constant(loss_fn),
        ):
            graph, inputs, outputs = compat.export_joint(
                step, fakes, mode, packed=_may_be_packed(model, form)
            )
    except CaptureError:
        raise
    except Exception as error:
        where = "; ".join(getattr(error, "__notes__", [])) or "in its forward"
        line = place(error)
        at = f" ({line})" if line else ""
        raise CaptureError(f"can't capture {type(model).__name__}, {where}{at}: {reason(error)}") from error
    finally:
        step.outside.put_back()
    step.outside.check()
    first = _aliases(model)
    _check_ends(model, form, inputs, outputs)
    named = {n: _renamed(i, first) for n, i in inputs}
    return Program(
        graph,
        named,
        [(n, _renamed_output(o, first)) for n, o in outputs],
        training=training,
        aliases=first,
        has_weight=step.has_weight,
        output_count=step.output_count,
        output_form=step.output_form,
    )


def _may_be_packed(model: nn.Module, form: BatchForm) -> bool:
    """Whether several texts may lie in one row of the batch. A model of transformers takes position_ids then."""
    if not type(model).__module__.startswith("transformers."):
        return True
    args, kwargs, _ = form.rebuild([True] * len(form.tensors))
    given = inspect.signature(model.forward).bind_partial(*args, **kwargs)
    return given.arguments.get("position_ids") is not None


def _check_ends(
    model: nn.Module,
    form: BatchForm,
    inputs: list[tuple[fx.Node, compat.GraphInput]],
    outputs: list[tuple[fx.Node, compat.GraphOutput]],
) -> None:
    """Raises CaptureError for what goes into or comes out of the graph and can't be run in a pipeline."""
    model_name = type(model).__name__
    for node, desc in outputs:
        if desc.kind.startswith("mutated"):
            is_parameter = desc.kind == "mutated param"
            what = (
                f"parameter {desc.name.removeprefix('model.')!r}"
                if is_parameter
                else form.names[int(desc.name)]
            )
            raise CaptureError(
                f"{model_name} changes {what} in place in its forward ({node}). Work on a clone of it."
            )
        if desc.kind == "gradient" and compat.fake_values(node)[0].layout != torch.strided:
            name = desc.name.split(":", 1)[1].removeprefix("model.")
            raise CaptureError(
                f"the gradient of parameter {name!r} of {model_name} is sparse: gradients are summed in dense buffers. "
                "Build the embedding with sparse=False."
            )
    for _, given in inputs:
        if given.kind == "update's tangent":
            raise CaptureError(
                f"the new value that {model_name} writes into the buffer {given.name.removeprefix('model.')!r} needs a "
                "gradient. Detach what is written: buffer.copy_(new.detach())."
            )


class _Step(nn.Module):
    """What is traced: the model, then its loss. Parameters and buffers keep their names behind "model."."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        form: BatchForm,
        *,
        training: bool,
        autocast: torch.dtype | None,
        device: torch.device,
        lifting: bool,
    ) -> None:
        super().__init__()
        self.lifting = lifting
        self.model = model
        # hidden from nn.Module: the buffers of a loss (class weights) are constants of the program, no part
        # of the model
        self.hidden = (loss_fn,)
        self.outside = Outside(model, _modules(model, loss_fn))
        self.form = form
        self.train_graph = training
        self.autocast = autocast
        self.device_type = device.type
        self.has_weight = False
        self.output_count = 0
        self.output_form: Any = None

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs, targets = self.form.rebuild(leaves)
        (loss_fn,) = self.hidden
        buffers = dict(self.model.named_buffers())
        context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.autocast is not None:
            context = torch.autocast(self.device_type, dtype=self.autocast)
        self.outside.begin()
        lifted = lifted_constants() if self.lifting else contextlib.nullcontext()
        with context, PredictedLayouts(), CountedMeans(), FixedCtc(), CheckedGaussian(), lifted:
            output = self.model(*args, **kwargs)
            result = output if loss_fn is None else _called(loss_fn, output, targets)
        self.outside.end()
        lost = [n for n, b in self.model.named_buffers() if b is not buffers.get(n)]
        if lost:
            raise CaptureError(
                f"the forward of {type(self.model).__name__} assigns a new tensor to the buffer {lost[0]!r}: "
                "its update would be lost silently. Write into it in place (buffer.copy_(new))."
            )
        loss, weight = _loss_and_weight(result, loss_fn=loss_fn)
        self.has_weight = weight is not None
        found = [loss] if weight is None else [loss, weight]
        if not self.train_graph:
            flat, spec = compat.tree_flatten(_plain(output))
            outputs = [t for t in flat if isinstance(t, torch.Tensor)]
            self.output_form = (spec, tuple(None if isinstance(t, torch.Tensor) else t for t in flat))
            self.output_count = len(outputs)
            # an output that is an input or a weight itself would come out as an alias of it
            found += [t.clone() for t in outputs]
            found = [t.detach() for t in found]
        elif not loss.requires_grad:
            raise CaptureError(
                f"the loss of {type(self.model).__name__} needs no gradient: no parameter that requires one "
                "takes part in it. Unfreeze a parameter, or use eval."
            )
        return tuple(found)


def _called(loss_fn: LossFunction, output: Any, targets: Any) -> Any:
    try:
        return loss_fn(output, targets)
    except Exception as error:
        error.add_note("in the loss function")
        raise


def _plain(output: Any) -> Any:
    """dict-like outputs of model libraries, as a dict that flattens everywhere."""
    return dict(output) if isinstance(output, Mapping) else output


def _loss_and_weight(result: Any, loss_fn: LossFunction | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    source = "the model" if loss_fn is None else "loss_fn"
    weight: Any = None
    if isinstance(result, Mapping) and "loss" in result:
        result = result["loss"]
    elif not isinstance(result, (torch.Tensor, tuple)) and isinstance(
        getattr(result, "loss", None), torch.Tensor
    ):
        result = result.loss
    if isinstance(result, tuple):
        if len(result) == 2 and _is_number(result[1]):
            result, weight = result
        elif loss_fn is None and result:
            result = result[0]
    if not isinstance(result, torch.Tensor):
        raise CaptureError(
            f"{source} returned {type(result).__name__}, no loss. Return a 0-dim tensor, a pair (sum, weight), "
            "or an output with a "
            "`loss`" + ("; or pass loss_fn." if loss_fn is None else ".")
        )
    if result.numel() != 1 or not result.is_floating_point():
        raise CaptureError(
            f"{source} returned a tensor of shape {tuple(result.shape)} and dtype {result.dtype}, where a loss "
            "is one floating-point number. Reduce it: loss.mean(), or return (loss.sum(), number of items)."
        )
    if weight is None:
        return _scalar(result), None
    if not isinstance(weight, torch.Tensor):
        weight = torch.full((), float(weight), dtype=torch.float32, device=result.device)
    if weight.requires_grad:
        raise CaptureError(
            f"the weight that {source} returned needs a gradient: it must not depend on parameters. Detach it."
        )
    return _scalar(result), weight.to(torch.promote_types(result.dtype, torch.float32)).clone()


def _is_number(value: Any) -> bool:
    return value.dim() == 0 if isinstance(value, torch.Tensor) else isinstance(value, (int, float))


def _scalar(loss: torch.Tensor) -> torch.Tensor:
    return loss if loss.dim() == 0 else loss.reshape(())


def _modules(model: nn.Module, loss_fn: LossFunction | None) -> list[tuple[str, nn.Module]]:
    """All modules that take part, as messages name them."""
    found = [(name or type(model).__name__, module) for name, module in model.named_modules()]
    if isinstance(loss_fn, nn.Module):
        found += [(f"the loss's {name or type(loss_fn).__name__}", m) for name, m in loss_fn.named_modules()]
    return found


@contextlib.contextmanager
def _untouched(model: nn.Module, loss_fn: LossFunction | None) -> Iterator[None]:
    """Refuses a module that keeps a tensor of one forward for the next: a captured program couldn't see it change."""
    modules = _modules(model, loss_fn)
    before = {id(module): kept_state(module) for _, module in modules}
    try:
        yield
    finally:
        changed = []
        for name, module in modules:
            old = before[id(module)]
            for attribute, value in kept_state(module).items():
                if old.get(attribute) is not value:
                    changed.append(f"{name}.{attribute}")
                    del module.__dict__[attribute]
            module.__dict__.update(old)
    if changed:
        raise CaptureError(
            f"{changed[0]} is assigned in the forward: a module that keeps a tensor from one micro-batch to "
            "the next can't be run in a pipeline. Return the value, or register a buffer and write into it in place."
        )


@contextlib.contextmanager
def _constant(loss_fn: LossFunction | None) -> Iterator[None]:
    """Refuses a loss that changes its buffers, which are constants of the program; they are put back."""
    if not isinstance(loss_fn, nn.Module):
        yield
        return
    before = [
        (compat.tensor_tables(module)[1], f"{prefix}.{name}".lstrip("."), name, buffer, buffer.clone())
        for prefix, module in loss_fn.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    cause: Exception | None = None
    try:
        yield
    except Exception as error:
        cause = error
    changed = []
    for table, full_name, name, buffer, value in before:
        if table[name] is not buffer or not torch.equal(buffer, value):
            changed.append(full_name)
            buffer.copy_(value)
            table[name] = buffer
    if changed:
        raise CaptureError(
            f"the loss {type(loss_fn).__name__} changes its buffer {changed[0]!r}: a loss keeps nothing from one "
            "micro-batch to the next. Make it part of the model (return the loss from the model's forward) and pass "
            "loss_fn=None."
        ) from cause
    if cause is not None:
        raise cause


def _device_of(model: nn.Module, leaves: list[torch.Tensor]) -> torch.device:
    for tensor in (*model.parameters(), *model.buffers(), *leaves):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")


def _aliases(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {n: first.setdefault(id(t), n) for n, t in tensors}


def _renamed(desc: compat.GraphInput, first: dict[str, str]) -> compat.GraphInput:
    if desc.kind not in ("param", "buffer"):
        return desc
    return compat.GraphInput(desc.kind, _name(desc.name, first))


def _renamed_output(desc: compat.GraphOutput, first: dict[str, str]) -> compat.GraphOutput:
    if desc.kind == "gradient":
        kind, name = desc.name.split(":", 1)
        return compat.GraphOutput("gradient", f"{kind}:{_name(name, first)}")
    return compat.GraphOutput("buffer", _name(desc.name, first)) if desc.kind == "buffer" else desc


def _name(target: str, first: dict[str, str]) -> str:
    """The user's name of a parameter or buffer; of a tied one, the first of its names."""
    name = target.removeprefix("model.")
    return first.get(name, name)


__all__ = ["CaptureError", "LossFunction", "capture", "capture_leaves", "split_example"]
