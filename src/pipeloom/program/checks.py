"""What a model may not hold, checked before it is traced: each refusal names the module and says what to do."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_HOOKS = (
    ("_forward_hooks", "forward hook"),
    ("_forward_pre_hooks", "forward pre-hook"),
    ("_backward_hooks", "backward hook"),
    ("_backward_pre_hooks", "backward pre-hook"),
)


class ModelError(ValueError):
    """A model with something that a captured program would lose or change silently."""


def check_model(model: nn.Module, *, training: bool) -> None:
    """Raises ModelError for hooks, modules that can't be captured, and parameters of unsupported kinds."""
    for name, module in model.named_modules():
        where = f"{name or 'the model'} ({type(module).__name__})"
        for attribute, what in _HOOKS:
            if getattr(module, attribute, None):
                raise ModelError(
                    f"{where} has a {what}: a captured program doesn't run hooks, so it would be lost silently. Remove it, or move what it "
                    "does into the module's forward."
                )
        if (
            isinstance(module, _NormBase)
            and training
            and module.training
            and module.track_running_stats
            and module.momentum is None
        ):
            raise ModelError(
                f"{where} has momentum=None (a cumulative average), whose factor is read from a tensor at run time and can't be captured. "
                "Give it a number, like momentum=0.1."
            )
        if (
            isinstance(module, nn.RNNBase)
            and training
            and module.training
            and module.dropout > 0
            and module.num_layers > 1
        ):
            raise ModelError(
                f"{where} has dropout={module.dropout} between {module.num_layers} layers: torch's decomposition drops that dropout silently. "
                "Stack one-layer modules with nn.Dropout between them."
            )
    for name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor" or type(parameter).__name__ == "DTensor":
            raise ModelError(
                f"parameter {name} is a DTensor (FSDP2 or tensor parallel): pipeloom doesn't cut sharded parameters yet. Compile the plain "
                "model first."
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(
                f"parameter {name} has no shape yet (a lazy module). Run the model once on an example first."
            )


def kept_state(model: nn.Module, *, deep: bool = True) -> dict[tuple[int, str], torch.Tensor]:
    """Tensors that modules hold as plain attributes (no parameters, no buffers): (id(module), attribute) -> tensor."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    for module in model.modules() if deep else [model]:
        for attribute, value in module.__dict__.items():
            if isinstance(value, torch.Tensor):
                found[id(module), attribute] = value
    return found
