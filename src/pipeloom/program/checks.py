"""What a model may not hold, checked before it is traced: each refusal names the module and says what to do."""

from __future__ import annotations

import torch
from torch import nn

from . import compat

#: wrappers that run a model in a way of their own
_WRAPPERS = {
    "DataParallel": "the mesh's other dimensions are for replicas",
    "DistributedDataParallel": "the mesh's other dimensions are for replicas",
    "FullyShardedDataParallel": "its parameters are sharded already",
    "OptimizedModule": "torch.compile would trace it a second time",
}
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class ModelError(ValueError):
    """A model with something that a captured program would lose or change silently."""


def check_model(model: nn.Module, *, training: bool) -> None:
    """Raises ModelError for hooks, modules that can't be captured, and parameters of unsupported kinds."""
    for kind in type(model).__mro__:
        if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
            raise ModelError(
                f"the model is wrapped in {kind.__name__} ({_WRAPPERS[kind.__name__]}): pass the plain model that is "
                "inside."
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
            raise ModelError(
                f"{name} has no shape yet: it belongs to a lazy module. Run the model once on an example first."
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"{name or 'the model'} is a TorchScript module, whose ops can't be traced. Pass the Python module "
                "that it was made from."
            )
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
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        lazy = isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer))
        if not lazy and tensor.layout != torch.strided:
            raise ModelError(
                f"{name} is a sparse tensor ({tensor.layout}): make it dense (tensor.to_dense())."
            )
        for what in compat.tensor_hooks(tensor):
            raise ModelError(
                f"parameter {name} has a {what}: a captured program doesn't run hooks, so it would be lost silently. "
                "Remove it, and change the gradient after step(update=False), or in the forward."
            )
    for name, parameter in model.named_parameters():
        if "DTensor" in (type(parameter.data).__name__, type(parameter).__name__):
            raise ModelError(
                f"parameter {name} is a DTensor (FSDP2 or tensor parallel): pipeloom doesn't cut sharded parameters "
                "yet. Compile the plain model first."
            )


def check_surroundings(device: torch.device) -> None:
    """Raises ModelError under `torch.autocast`, which a captured program would not see."""
    if torch.is_autocast_enabled(device.type):
        dtype = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
        raise ModelError(
            "torch.autocast is on around this call, but a captured program doesn't see it: leave it out, and give "
            f'Strategy(autocast="{dtype}").'
        )


def kept_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that a module itself holds as plain attributes (no parameters, no buffers), by attribute."""
    return {name: value for name, value in module.__dict__.items() if isinstance(value, torch.Tensor)}
