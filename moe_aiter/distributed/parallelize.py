"""A whole model on many GPUs: experts shared by expert parallelism, all parameters sharded by FSDP2."""

import dataclasses
import functools
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim import Optimizer

from ..kernels.base.check import checked
from ..layers import LoRAExperts
from ..layers.experts import local_part
from ..layers.training import is_fsdp
from ..private_api import flattened
from .experts import experts_of_a_rank
from .mesh import EFSDP, EP
from .style import AnyExperts, ExpertParallel, num_experts_of

CONTAINERS = nn.ModuleList, nn.ModuleDict, nn.Sequential


@checked
def parallelize(
    model: nn.Module, mesh: DeviceMesh, *, rows: float = 2.0, max_tokens: int | None = None,
    keep_x: bool = False, transport: str = "auto", guests: int | str = 0, fsdp: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None, reshard_after_forward: bool = True,
) -> nn.Module:  # fmt: skip
    """Share the experts of every `Experts` and `LoRAExperts`, also of 4 bits, and shard by FSDP2; in place.

        mesh = expert_mesh("cuda", ep=8)
        parallelize(model, mesh)
        optimizer = torch.optim.AdamW(parameter_groups(model), lr)    # after it
        loss.backward()                                               # a mean over this rank's tokens
        clip_grad_norm_(model.parameters(), 1.0)                      # ours, which takes several meshes
        optimizer.step()

    All ranks must hold the same weights before; or parameters on the meta device, which each rank then
    materialises by `to_empty` and loads.  Each rank has tokens of its own, and all gradients are those of the
    mean of the ranks' losses.

    mesh        from `expert_mesh`.  Experts are sharded over both axes, those of 4 bits over `ep` alone, and
                everything else over all ranks.
    rows, max_tokens, keep_x, transport, guests    see `ExpertDispatcher`.
    fsdp        False shares the experts only.  Then the gradients of an expert are those of the sum of the
                ranks' losses, and others those of a rank's own: `reduce_gradients` makes means of both.
    mp_policy, reshard_after_forward    those of `fully_shard`.  Routing weights stay float32.

    Units of FSDP2 are the experts, each member of an nn.ModuleList, nn.ModuleDict or nn.Sequential that
    contains experts, and the model.  Parameters are new ones afterwards: an optimizer that was made before
    trains nothing, of which a warning tells, and hooks and attributes of parameters are gone.
    Raises ValueError for a model without such experts or another mesh, for experts that cannot be divided,
    and for a parameter that two modules of experts share.
    """
    check_mesh(mesh)
    how: dict[str, Any] = {
        "max_tokens": max_tokens,
        "keep_x": keep_x,
        "transport": transport,
        "guests": guests,
    }
    style = ExpertParallel(rows=rows, **how)
    found = experts_to_share(model)
    if any(map(is_fsdp, model.modules())):
        raise ValueError("model is sharded by FSDP2 already: call parallelize once, on the whole model")
    efsdp, ep = mesh.shape
    replaced = list(model.parameters())
    for name, experts in found.items():
        check_divides(name, num_experts_of(experts), efsdp, ep)
    blocks = list(blocks_of(model))
    for experts in found.values() if ep > 1 else ():
        parallelize_module(experts, mesh[EP], style, src_data_rank=None)
    if fsdp:
        policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
        shard_all([*blocks, model], list(found.values()), mesh, policy, reshard_after_forward)
    warn_of_optimizers(model, replaced)
    return model


def shard_all(
    units: list[nn.Module], found: list[AnyExperts], mesh: DeviceMesh, policy: MixedPrecisionPolicy,
    reshard: bool,
) -> None:  # fmt: skip
    """Shard the experts that were found, and then the other units, each as a unit of FSDP2."""
    world = flattened(mesh, "fsdp")
    for experts in found:
        shard_experts(experts, mesh, policy, reshard)
    for unit in units:
        if unit not in found:
            fully_shard(unit, mesh=world, mp_policy=policy, reshard_after_forward=reshard)


def warn_of_optimizers(model: nn.Module, before: list[nn.Parameter]) -> None:
    """Warn of each optimizer that holds a tensor which was a parameter before, and is none any more."""
    lost = {id(p) for p in before} - {id(p) for p in model.parameters()}
    for optimizer in (o for o in gc.get_objects() if issubclass(type(o), Optimizer)):
        if any(id(p) in lost for group in optimizer.param_groups for p in group["params"]):
            warnings.warn(
                f"{type(optimizer).__name__} was made before parallelize and holds parameters that are the "
                "model's no more, so it trains nothing: make the optimizer after parallelize",
                stacklevel=4,
            )


def check_mesh(mesh: DeviceMesh) -> None:
    if mesh.mesh_dim_names != (EFSDP, EP):
        raise ValueError(
            f"mesh must have the axes (efsdp, ep), as from expert_mesh, not {mesh.mesh_dim_names}"
        )
    if mesh.size() != dist.get_world_size():
        raise ValueError(f"mesh has {mesh.size()} ranks, but the world {dist.get_world_size()}")


def check_divides(name: str, num_experts: int, efsdp: int, ep: int) -> None:
    """Raise ValueError if a rank would have no expert; FSDP2 shards the same number on each."""
    experts_of_a_rank(num_experts, ep)
    if efsdp > 1 and num_experts % ep:
        fit = [n for n in range(1, efsdp * ep + 1) if num_experts % n == 0 and efsdp * ep % n == 0]
        nearest = min(fit, key=lambda n: abs(n - ep))
        raise ValueError(f"{name} has {num_experts} experts, which ep={ep} does not divide: try ep={nearest}")


def experts_to_share(model: nn.Module) -> dict[str, AnyExperts]:
    """Return the modules of experts by name; ValueError without one, or if two share a parameter."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, AnyExperts)}
    inner = [module.base for module in found.values() if isinstance(module, LoRAExperts)]
    found = {name: module for name, module in found.items() if not any(module is base for base in inner)}
    if not found:
        raise ValueError("the model has no MoE layer: no Experts nor LoRAExperts to share")
    owners: dict[int, str] = {}
    for name, experts in found.items():
        for own, parameter in experts.named_parameters(prefix=name):
            other = owners.setdefault(id(parameter), own)
            if other != own:
                raise ValueError(f"{other} and {own} are one parameter: tied experts cannot be shared")
    return found


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of the outermost lists of modules that contain experts, those without experts too."""
    for child in model.children():
        holds = any(isinstance(module, AnyExperts) for module in child.modules())
        if isinstance(child, AnyExperts) or next(child.parameters(), None) is None:
            continue
        if isinstance(model, CONTAINERS) and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield child
        elif holds:
            yield from blocks_of(child)


def shard_experts(experts: AnyExperts, mesh: DeviceMesh, policy: MixedPrecisionPolicy, reshard: bool) -> None:
    """Shard this rank's experts over the ranks that have the same ones.

    Gradients of experts are sums over the ranks of `ep` already: with those over `efsdp`, FSDP2 divides them
    by the number of all ranks.  For a single rank of `efsdp`, FSDP2 would divide by its factor twice, unless
    it reduces in float32 or bfloat16.
    """
    efsdp, ep = mesh.shape
    few = efsdp * ep > num_experts_of(experts)  # then each rank has a part of each of its experts
    placement = functools.partial(within_experts, efsdp) if few else None
    policy = dataclasses.replace(policy, cast_forward_inputs=False)
    unit = fully_shard(
        experts, mesh=mesh[EFSDP], mp_policy=policy, reshard_after_forward=reshard,
        shard_placement_fn=placement,
    )  # fmt: skip
    if efsdp == 1:
        unit.set_all_reduce_hook(functools.partial(divide, mesh.size()))
        return
    unit.set_gradient_divide_factor(float(mesh.size()))
    # a group with a backend for each kind of device has gloo for CPUs
    if mesh.device_type == "cpu" or dist.get_backend(mesh.get_group(EFSDP)) == "gloo":
        unit.set_force_sum_reduction_for_comms(True)  # gloo multiplies no sum


def divide(ranks: int, grads: torch.Tensor) -> None:
    grads /= ranks


def within_experts(ranks: int, parameter: nn.Parameter) -> Shard:
    """Return the first axis within an expert that the ranks divide, or else that of the experts."""
    axes = (axis for axis in range(1, parameter.dim()) if parameter.shape[axis] % ranks == 0)
    return Shard(next(axes, 0))


@checked
def parameter_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Return groups of parameters for an optimizer, one for each mesh: fused optimizers take no mixture.

    `options` such as `lr` are set for all groups.
    """
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(mesh_of(parameter), []).append(parameter)
    return [{"params": parameters, **options} for parameters in groups.values()]


def mesh_of(t: torch.Tensor) -> DeviceMesh | None:
    """Return the mesh of a DTensor, None for another tensor."""
    return getattr(t, "device_mesh", None)


@torch.no_grad()
@checked
def reduce_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make the gradients those of the mean of all ranks' losses, after `parallelize(..., fsdp=False)`.

    Call it once after the backward passes of a step.  It averages `.grad`, and where a weight has one its
    `main_grad`, of parameters that are not shared over all ranks, and divides those of shared experts.  Every
    rank must have the same gradients.
    """
    check_mesh(mesh)
    efsdp, world = mesh.get_group(EFSDP), mesh.size()
    for parameter in model.parameters():
        group = dist.group.WORLD if mesh_of(parameter) is None else efsdp
        for grad in (parameter.grad, getattr(parameter, "main_grad", None)):
            if grad is not None:
                local = local_part(grad)
                mean = local.div(world).contiguous()  # first: a sum of float16 may be infinite
                if dist.get_world_size(group) > 1:
                    dist.all_reduce(mean, group=group)
                local.copy_(mean)
