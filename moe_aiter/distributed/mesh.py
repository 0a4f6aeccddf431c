"""The mesh of ranks that expert parallelism and FSDP2 share."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..kernels.base.check import check_device_name, check_sizes, checked

EFSDP, EP = "efsdp", "ep"  # its axes


@checked
def expert_mesh(device_type: str, ep: int) -> DeviceMesh:
    """Return a mesh (efsdp, ep) over all ranks: `ep` neighbours share the experts of a layer.

    The ranks of one `efsdp` group have the same experts, of which FSDP2 gives each a shard.  Without a
    process group, this makes one from the environment that torchrun sets.
    Raises ValueError unless `ep` divides the number of ranks.
    """
    check_sizes(ep=ep)
    check_device_name("device_type", device_type)
    if not dist.is_initialized():
        dist.init_process_group(dist.get_default_backend_for_device(device_type))
    world = dist.get_world_size()
    if world % ep:
        fit = ", ".join(f"ep={n}" for n in range(1, world + 1) if world % n == 0)
        raise ValueError(f"ep={ep} does not divide the world of {world} ranks: try {fit}")
    return init_device_mesh(device_type, (world // ep, ep), mesh_dim_names=(EFSDP, EP))
