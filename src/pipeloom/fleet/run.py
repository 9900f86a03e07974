"""Running a graph of one's own: on real ranks, or all ranks in this process.

load = TaskNode(0, 0, 8, lambda scope: {"x": torch.randn(4)}, name="load")
double = TaskNode(1, 1, 8, lambda scope: scope.root.setdefault("sums", []).append(float(scope["x"].sum())))
connect(load, double, carries=("x",))
root = run(Graph([load, double]))              # the same lines on each rank; root["sums"] on rank 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..runtime import launch
from ..runtime.distributed import DEFAULT_TIMEOUT
from ..runtime.stepping import drive, finish
from ..runtime.transport import MemoryTransport
from .bus import connect_bus
from .carrier import Carrier, Event
from .graph import Graph
from .scope import Scope


def run(
    graph: Graph,
    root: Scope | None = None,
    *,
    mesh: DeviceMesh | None = None,
    observe: Callable[[Event], None] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Scope:
    """Runs this rank's tasks; the root scope, where programs leave what is to outlive a micro-batch.

    A collective call of all ranks: those of the default process group, or of the mesh's dimension "pp". timeout:
    seconds that a rank waits for a message. Raises what a program of this rank raised, as TaskError; PeerError, which
    names the rank, task and scope, where another rank failed or is gone; GraphError, ValueError where the ranks don't
    fit the graph.
    """
    grad = torch.is_grad_enabled()
    place = launch.join(graph.ranks, mesh=mesh, timeout=timeout)
    bus = connect_bus(place.transport, timeout)
    try:
        work = Carrier(graph, bus, root, observe, grad).work()
        if place.watch is None:
            return finish(work)
        place.watch.also_closes(bus.abort)
        with place.watch.guard():
            found = finish(work)
            bus.flush()
            return found
    finally:
        bus.close()
        place.transport.close()


def run_here(
    graph: Graph,
    roots: Sequence[Scope] | None = None,
    *,
    observe: Callable[[Event], None] | None = None,
) -> list[Scope]:
    """Runs all ranks in this process, in turn and without threads; each rank's root scope. Raises TaskError,
    StuckError."""
    grad = torch.is_grad_enabled()
    roots = [Scope() for _ in range(graph.ranks)] if roots is None else roots
    transports = MemoryTransport.group(graph.ranks)
    carriers = [
        Carrier(graph, connect_bus(transport), root, observe, grad)
        for transport, root in zip(transports, roots, strict=True)
    ]
    return drive([carrier.work() for carrier in carriers])
