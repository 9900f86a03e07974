"""How a rank finds its pipeline: torchrun's environment, an existing process group, or a DeviceMesh with a
"pp" dimension.

No launcher of our own: the processes are there already. Each pipeline gets a process group for itself, so
that its tags and its connections meet nobody else's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..program.compat import store_of
from .distributed import DEFAULT_TIMEOUT, DistributedTransport
from .failure import FailureWatch
from .transport import MemoryTransport, Transport


@dataclass
class Place:
    """Where this process stands: its stage, its device, its connections, and who watches over them.

    watch is None where the pipeline is one process."""

    stage: int
    device: torch.device
    transport: Transport
    watch: FailureWatch | None


def join(
    stages: int,
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Place:
    """Take this process's place in a pipeline of `stages` ranks. A collective call of all ranks, in one
    order.

    device None: the GPU of this local rank where the process group is NCCL's, else the CPU. timeout: seconds
    that one wait for a peer may take. Raises ValueError where the ranks that there are can't form the
    pipeline.
    """
    if stages == 1 and mesh is None:
        return Place(0, torch.device(device or "cpu"), MemoryTransport.group(1)[0], None)
    if not dist.is_initialized():
        _initialize(stages, device)
    ranks = _ranks(stages, mesh)
    backend = dist.get_backend()
    found = _device(device, backend)
    group = dist.new_group(
        ranks, timeout=timedelta(seconds=timeout), use_local_synchronization=mesh is not None
    )
    name = group.group_name  # the same on all of the group's ranks
    transport = DistributedTransport(group, found, timeout)
    watch = FailureWatch(store_of(f"pipeloom/{name}"), transport)
    return Place(transport.rank, found, transport, watch)


def _initialize(stages: int, device: torch.device | str | None) -> None:
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError(
            f"a pipeline of {stages} stages needs {stages} processes, and this is a single one: start the script "
            f"with `torchrun --nproc-per-node {stages} …`, or use pp_degree=1"
        )
    on_gpu = device is not None and torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(_device(device, "nccl"))
    dist.init_process_group("nccl" if on_gpu else "gloo")


def _ranks(stages: int, mesh: DeviceMesh | None) -> list[int]:
    """The global ranks of this pipeline, in stage order."""
    if mesh is None:
        world = dist.get_world_size()
        if world != stages:
            raise ValueError(
                f"pp_degree is {stages}, but {world} ranks were started: start {stages}, or pass a DeviceMesh that "
                'names its pipeline dimension "pp"'
            )
        return list(range(world))
    names = mesh.mesh_dim_names or ()
    if "pp" not in names:
        raise ValueError(f'the mesh has dimensions {names}: one of them must be named "pp"')
    others = {n: mesh.size(i) for i, n in enumerate(names) if n != "pp" and mesh.size(i) > 1}
    if others:
        raise ValueError(
            f"the mesh has further dimensions ({others}): data and tensor parallel replicas aren't built yet; pass "
            "a mesh of the pipeline alone"
        )
    size = mesh.size(names.index("pp"))
    if size != stages:
        raise ValueError(f'pp_degree is {stages}, but dimension "pp" of the mesh has {size} ranks')
    return dist.get_process_group_ranks(mesh.get_group("pp"))


def _device(device: torch.device | str | None, backend: str) -> torch.device:
    found = torch.device(device if device is not None else ("cuda" if backend == "nccl" else "cpu"))
    if str(found) == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return found
