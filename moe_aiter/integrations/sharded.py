"""Adapters and weights of 4 bits of experts that transformers shares among ranks.

transformers shards a model while it loads it: each rank of the axis `ep` of a mesh has the parameters of some
of the experts, as DTensors, and FSDP2 shards these over `efsdp` and all other parameters over `fsdp`.
Adapters, which are made afterwards, are sharded here in the same way.  Weights of 4 bits are shared over
`ep`, as buffers that FSDP2 leaves alone; without expert parallelism, FSDP2 shards them as frozen parameters.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..kernels.quantize.four_bit import quantized, rounded_scales
from ..layers.experts import local_part
from ..layers.four_bit import FourBitWeight
from ..layers.lora import LoRAFactors
from ..layers.training import is_fsdp
from ..private_api import leave_fsdp, own_buffers, own_modules, own_parameters

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__: list[str] = []

BLOCKS, SCALES = "_blocks", "_scales"  # how the parts of a weight in MXFP4 are called, after its name
EP = "ep"


def kept(module: nn.Module, name: str) -> Tensor | None:
    """Return the tensor in which experts keep a weight, or its codes of 4 bits; None without this weight.

    Its first axis has the experts of all ranks.
    """
    weight = own_modules(module).get(name)
    if isinstance(weight, FourBitWeight):
        return weight.packed
    blocks = own_buffers(module).get(name + BLOCKS)
    return own_parameters(module).get(name) if blocks is None else blocks


def ep_mesh_of(t: Tensor | None) -> "DeviceMesh | None":
    """Return the mesh of the ranks that share the experts of a weight."""
    mesh = getattr(t, "device_mesh", None)
    return mesh[EP] if mesh is not None and EP in (mesh.mesh_dim_names or ()) else None


def part_of(t: Tensor, mesh: "DeviceMesh") -> Tensor:
    """Return a DTensor of which this rank has its experts' part of `t` (E, ...), which is whole."""
    return from_part(t.detach().chunk(mesh.size())[mesh.get_local_rank()].clone(), mesh)


def from_part(t: Tensor, mesh: "DeviceMesh") -> Tensor:
    """Return the DTensor of which `t` is this rank's part."""
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(t, mesh, [Shard(0)], run_check=False)


# adapters


def shard_factors(factors: LoRAFactors, model: nn.Module, weight: Tensor) -> None:
    """Shard the adapters of `weight` as transformers, or the user by FSDP2, has sharded the weight, in place.

    They are whole, and the same on all ranks but for random numbers.  Options of FSDP2 that the model has are
    not for them: they stay on the device, and in their dtype until products take them in that of the weight.
    """
    meshes = getattr(model, "_mesh_manager", None)
    if meshes is None:
        if not hasattr(weight, "placements"):  # FSDP2 leaves codes whole that were buffers when it came
            weight = next((p for p in model.parameters() if fsdp_mesh_of(p) is not None), weight)
        return shard_alike(factors, weight)
    config = model.config.distributed_config
    if any(getattr(placement, "dim", 0) for placement in getattr(weight, "placements", ())):
        raise ValueError(f"adapters need whole experts, but tp_size={config.tp_size} divides each of them")
    own, ep = own_parameters(factors), ep_mesh_of(weight)
    replicas = meshes.get_mesh("dp_replicate").get_group() if config.dp_replicate_size > 1 else None
    for name, p in own.items():
        if p is not None and replicas is not None:
            dist.broadcast(p.data, group=replicas, group_src=0)
        if p is not None and ep is not None:
            own[name] = nn.Parameter(part_of(p, ep), requires_grad=p.requires_grad)
    if config.dp_size == 1:
        return
    from torch.distributed.fsdp import fully_shard

    axes = (*(("dp_replicate",) if replicas else ()), "fsdp" if ep is None else "efsdp")
    mesh = meshes.get_mesh(axes)
    unit = fully_shard(factors, mesh=mesh, reshard_after_forward=True)
    if ep is None:
        return
    # gradients are sums over the ranks of `ep` already
    if mesh.size() == 1:  # FSDP2 would divide by a factor twice, unless it reduces in float32 or bfloat16
        unit.set_all_reduce_hook(functools.partial(divide, config.dp_size))
        return
    unit.set_gradient_divide_factor(float(config.dp_size))
    if config.efsdp_size > 1:  # else it would divide twice; gloo multiplies no sum, nor NCCL in bfloat16
        unit.set_force_sum_reduction_for_comms(True)


def shard_alike(factors: LoRAFactors, weight: Tensor) -> None:
    """Let FSDP2 shard the adapters of a weight over the mesh over which the user has it shard the weight."""
    placements = getattr(weight, "placements", ())
    if not placements:
        return
    mesh = fsdp_mesh_of(weight)
    if mesh is None:
        raise ValueError(f"adapters need experts that FSDP2 shards by their first axis, not by {placements}")
    from torch.distributed.fsdp import fully_shard

    for axis in [axis for axis, placement in enumerate(placements) if placement.is_replicate()]:
        for p in factors.parameters():
            dist.broadcast(p.data, group=mesh.get_group(axis), group_src=0)
    fully_shard(factors, mesh=mesh, reshard_after_forward=True)


def divide(ranks: int, grads: Tensor) -> None:
    grads /= ranks


def gathered(rows: Tensor, weight: Tensor) -> Tensor:
    """Return (E, N) of all ranks, of which each has the rows of its part of a sharded weight (E, ., .)."""
    from torch.distributed.tensor import DTensor

    shape, stride = (weight.shape[0], rows.shape[1]), (rows.shape[1], 1)
    how = {"run_check": False, "shape": torch.Size(shape), "stride": stride}
    return DTensor.from_local(rows, weight.device_mesh, weight.placements, **how).full_tensor()


# weights of 4 bits


def share_published(module: nn.Module, mesh: "DeviceMesh") -> None:
    """Share the empty buffers of published weights in MXFP4, into which transformers then loads."""
    for name, buffer in own_buffers(module).items():
        if buffer is not None and name.endswith((BLOCKS, SCALES)):
            if (E := len(buffer)) % mesh.size():
                kind = type(module).__name__
                raise ValueError(f"{kind} has {E} experts, which ep_size={mesh.size()} does not divide")
            own_buffers(module)[name] = part_of(buffer, mesh)


def buffers_again(module: nn.Module) -> None:
    """Make buffers of published weights that transformers has loaded as parameters, as it does DTensors."""
    for name in [n for n in own_parameters(module) if n.endswith((BLOCKS, SCALES))]:
        p = own_parameters(module).pop(name)
        assert p is not None
        module.register_buffer(name, p.detach())


def fsdp_mesh_of(t: Tensor | None) -> "DeviceMesh | None":
    """Return the mesh over which FSDP2 alone shards a weight, by experts."""
    axes = [placement.dim for placement in getattr(t, "placements", ()) if placement.is_shard()]
    return t.device_mesh if t is not None and axes == [0] and ep_mesh_of(t) is None else None


def take_from_fsdp(module: nn.Module, names: tuple[str, str]) -> "DeviceMesh | None":
    """Take experts that ranks share out of FSDP2, and return the mesh of these ranks, None without any.

    Each parameter then has all numbers of this rank's experts.
    """
    mesh = ep_mesh_of(kept(module, names[0]))
    if mesh is not None and is_fsdp(module):
        leave_fsdp(module)
        for name, p in own_parameters(module).items():
            if p is not None and name not in names:  # a copy: FSDP2 may free the memory
                own_parameters(module)[name] = nn.Parameter(from_part(local_part(p.detach()).clone(), mesh))
    return mesh


def shard_codes(weight: FourBitWeight, mesh: "DeviceMesh") -> None:
    """Let FSDP2 shard the codes and scales of a weight, which is whole, by experts."""
    from torch.distributed.fsdp import fully_shard

    weight.shard(lambda t: nn.Parameter(t, requires_grad=False))
    fully_shard(weight, mesh=mesh, reshard_after_forward=True)


def quantized_weight(w: Tensor, format: str, mesh: "DeviceMesh | None") -> FourBitWeight:
    """Quantise a weight, or this rank's part (E / ranks, out, in) of one, as one process would the whole."""
    if mesh is None:
        return FourBitWeight(quantized(w, format))
    part = quantized(w, format, whole=False)
    if format == "nf4" and not w.is_meta:  # the 8 bits of a scale depend on all scales
        rounded = rounded_scales(from_part(part.scales, mesh).full_tensor())
        part = dataclasses.replace(part, scales=rounded.chunk(mesh.size())[mesh.get_local_rank()].clone())
    weight = FourBitWeight(part)
    weight.shard(lambda t: from_part(t, mesh))
    return weight


# tokens that several ranks have


def own_tokens(t: Tensor, mesh: "DeviceMesh", padding: int = 0) -> Tensor:
    """Return the tokens of this rank, of (T, ...) that all ranks of `mesh` have: as many on each rank.

    In backward, the gradients of all ranks come together.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from ..distributed.slots import pad

    t = pad(t, -(-len(t) // mesh.size()) * mesh.size(), padding)
    whole = DTensor.from_local(t, mesh, [Replicate()], run_check=False)
    return whole.redistribute(mesh, [Shard(0)]).to_local()


def all_tokens(t: Tensor, mesh: "DeviceMesh", tokens: int) -> Tensor:
    """The inverse of `own_tokens`, without the padding."""
    from torch.distributed.tensor import DTensor, Shard

    whole = DTensor.from_local(t, mesh, [Shard(0)], run_check=False).full_tensor()
    return whole[:tokens].clone()  # FSDP2 warns of views
