"""Clip gradients of parameters on several meshes, which torch's own function refuses."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from ..kernels.base.check import check_tensor, checked
from ..layers.experts import local_part
from .parallelize import mesh_of


@torch.no_grad()
@checked
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0,
    error_if_nonfinite: bool = False, foreach: bool | None = None,
) -> Tensor:  # fmt: skip
    """Scale the gradients so that their norm, as of one vector, is at most `max_norm`; return it before that.

    As torch.nn.utils.clip_grad_norm_, for parameters that are plain tensors, or DTensors on any meshes.  The
    norm is that of the whole model, the same scalar on each rank if gradients of plain tensors are: with
    `parallelize(fsdp=False)`, call `reduce_gradients` first.  All ranks must call it, with gradients of the
    same parameters.  No synchronisation with the host unless
    `error_if_nonfinite`, which raises RuntimeError then.
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    elif not isinstance(parameters, Iterable):
        raise TypeError(f"parameters must be tensors, not {type(parameters).__name__}")
    if not max_norm >= 0:
        raise ValueError(f"max_norm must not be negative, but it is {max_norm}")
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0, but it is {norm_type}")
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        check_tensor("an element of parameters", parameter)
        grads = by_mesh.setdefault(mesh_of(parameter), [])  # the same order on all ranks
        grads += [] if parameter.grad is None else [parameter.grad]
    by_mesh = {mesh: grads for mesh, grads in by_mesh.items() if grads}
    if not by_mesh:
        return torch.tensor(0.0)
    norms = [get_total_norm(grads, norm_type, False, foreach) for grads in by_mesh.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    together = torch.stack([norm.to(norms[0].device) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(together, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {total.item()}")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grads in by_mesh.values():
        for grad in grads:
            local = local_part(grad)
            local.mul_(scale.to(local.device))
    return total
