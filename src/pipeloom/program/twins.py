"""A model whose tensors are replaced, for as long as it is traced, by fakes: shapes and dtypes without memory.

So no weight needs to be here, no BatchNorm statistics move, and nothing runs. Takes the modules that hold the
tensors, gives a context; tied parameters stay tied, and everything is put back when it closes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from . import compat


@contextlib.contextmanager
def twins(
    root: nn.Module, mode: Any, device: torch.device, *, training: bool, also: Sequence[nn.Module] = ()
) -> Iterator[None]:
    """While open, every parameter and buffer under `root` is its fake twin of `mode` on `device`.

    Not training: no parameter needs a gradient and every module, those of `also` included, is in eval mode.
    """
    made: dict[int, torch.Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    roots = [root, *also]
    modes = [(m, m.training) for r in roots for m in r.modules()]

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            fake = compat.fake_tensor(mode, tensor, device)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad and training)
            made[id(tensor)] = fake
        return made[id(tensor)]

    try:
        if not training:
            for r in roots:
                r.eval()
        for module in root.modules():
            for table in compat.tensor_tables(module):
                for name, tensor in table.items():
                    if tensor is not None:
                        replaced.append((table, name, tensor))
                        table[name] = twin(tensor)
        yield
    finally:
        for table, name, tensor in reversed(replaced):
            table[name] = tensor
        for module, was in modes:
            module.training = was
