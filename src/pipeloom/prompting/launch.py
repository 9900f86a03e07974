"""Starting the ranks of `pipeloom generate`: a process a stage, or this one."""

from __future__ import annotations

import os

from ..training.launch import start_ranks
from ..training.rank import die_with_parent
from .order import Order
from .rank import run


def launch(order: Order) -> int:
    """Run an order to its end; the exit code (see `rank`)."""
    text = order.dump()
    if "RANK" in os.environ:
        die_with_parent(os.getppid())
        return run(text)
    if order.stages == 1:
        return run(text)
    return start_ranks("pipeloom.prompting.rank", order.stages, text)
