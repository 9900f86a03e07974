"""What a model may not hold, checked before it is traced: each refusal names the module and says what to do."""

from __future__ import annotations

import torch
from torch import nn

from . import compat

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class ModelError(ValueError):
    """A model with something that a captured program would lose or change silently."""


def check_model(model: nn.Module, *, training: bool) -> None:
    """Raises ModelError for hooks, modules that can't be captured, and parameters of unsupported kinds."""
    for name, module in model.named_modules():
        where = f"{name or 'the model'} ({type(module).__name__})"
        for what in compat.hooks_of(module):
            raise ModelError(
                f"{where} has a {what}: a captured program doesn't run hooks, so it would be lost silently. "
                "Remove it, or move what it does into the module's forward."
            )
        if (
            isinstance(module, _BATCH_NORMS)
            and training
            and module.training
            and module.track_running_stats
            and module.momentum is None
        ):
            raise ModelError(
                f"{where} has momentum=None (a cumulative average), whose factor is read from a tensor at run time "
                "and can't be captured. Give it a number, like momentum=0.1."
            )
        if (
            isinstance(module, nn.RNNBase)
            and training
            and module.training
            and module.dropout > 0
            and module.num_layers > 1
        ):
            raise ModelError(
                f"{where} has dropout={module.dropout} between {module.num_layers} layers: torch's decomposition drops "
                "that dropout silently. Stack one-layer modules with nn.Dropout between them."
            )
    for name, buffer in model.named_buffers():
        if isinstance(buffer, nn.parameter.UninitializedBuffer):
            raise ModelError(
                f"buffer {name} has no shape yet (a lazy module). Run the model once on an example first."
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(
                f"parameter {name} has no shape yet (a lazy module). Run the model once on an example first."
            )
        if "DTensor" in (type(parameter.data).__name__, type(parameter).__name__):
            raise ModelError(
                f"parameter {name} is a DTensor (FSDP2 or tensor parallel): pipeloom doesn't cut sharded parameters "
                "yet. Compile the plain model first."
            )


def kept_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that a module itself holds as plain attributes (no parameters, no buffers), by attribute."""
    return {name: value for name, value in module.__dict__.items() if isinstance(value, torch.Tensor)}
