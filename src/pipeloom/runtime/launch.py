"""How a rank finds its pipeline: torchrun's environment, an existing process group, or a DeviceMesh with a
"pp" dimension and, for replicas of the pipeline, a "dp" dimension.

No launcher of our own: the processes are there already. Each pipeline gets a process group for itself, so
that its tags and its connections meet nobody else's; so do the replicas of each stage.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..program.compat import store_of
from .distributed import DEFAULT_TIMEOUT, DistributedTransport
from .failure import FailureWatch
from .replicas import Alone, DistributedReplicas, Replicas, tell
from .stepping import finish
from .transport import MemoryTransport, Transport


@dataclass
class Place:
    """Where this process stands: its stage, its device, its connections, and who watches over them.

    replicas: the same stage in the other pipelines. watch is None where the pipeline is one process."""

    stage: int
    device: torch.device
    transport: Transport
    watch: FailureWatch | None
    replicas: Replicas = field(default_factory=Alone)


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
    mine, same_stage = _ranks(stages, mesh)
    found = _device(device, dist.get_backend())
    group = _group(mine, timeout, local=mesh is not None)
    name = group.group_name  # the same on all of the group's ranks
    transport = DistributedTransport(group, found, timeout, ranks=mine if len(same_stage) > 1 else None)
    if len(same_stage) == 1:
        watch = FailureWatch(store_of(f"pipeloom/{name}"), transport)
        return Place(transport.rank, found, transport, watch)
    replicas = DistributedReplicas(_group(same_stage, timeout, local=True), same_stage, found, timeout)
    watch = FailureWatch(
        store_of(f"pipeloom/{finish(tell(replicas, name))}"), transport, len(mine) * len(same_stage)
    )
    watch.also_closes(replicas.abort)
    return Place(transport.rank, found, transport, watch, replicas)


def _group(ranks: list[int], timeout: float, *, local: bool) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(
        ranks, timeout=timedelta(seconds=timeout), use_local_synchronization=local
    )
    return group


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


def _ranks(stages: int, mesh: DeviceMesh | None) -> tuple[list[int], list[int]]:
    """The global ranks of this pipeline in stage order, and of this stage's replicas in their order."""
    if mesh is None:
        world = dist.get_world_size()
        if world != stages:
            raise ValueError(
                f"pp_degree is {stages}, but {world} ranks were started: start {stages}, or pass a DeviceMesh that "
                'names its pipeline dimension "pp" (and, for replicas of the pipeline, one "dp")'
            )
        return list(range(world)), [dist.get_rank()]
    names = mesh.mesh_dim_names or ()
    if "pp" not in names:
        raise ValueError(f'the mesh has dimensions {names}: one of them must be named "pp"')
    others = {n: mesh.size(i) for i, n in enumerate(names) if n not in ("pp", "dp") and mesh.size(i) > 1}
    if others:
        raise ValueError(
            f'the mesh has further dimensions ({others}): a pipeline takes "pp" and "dp" (replicas, each with a '
            "shard of the batch); tensor parallelism isn't built: pass a mesh of these two"
        )
    size = mesh.size(names.index("pp"))
    if size != stages:
        raise ValueError(f'pp_degree is {stages}, but dimension "pp" of the mesh has {size} ranks')
    mine = dist.get_process_group_ranks(mesh.get_group("pp"))
    return mine, dist.get_process_group_ranks(mesh.get_group("dp")) if "dp" in names else [dist.get_rank()]


def _device(device: torch.device | str | None, backend: str) -> torch.device:
    found = torch.device(device if device is not None else ("cuda" if backend == "nccl" else "cpu"))
    if str(found) == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return found
