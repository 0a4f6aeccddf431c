"""Expert parallelism as a plan of torch's `parallelize_module`."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..kernels.base.check import checked
from ..layers import Experts, LoRAExperts
from ..layers.four_bit import FourBitExperts, FourBitWeight
from .experts import ExpertDispatcher, check_dispatch_options

AnyExperts = Experts | FourBitExperts | LoRAExperts


class ExpertParallel(ParallelStyle):
    """Share the experts of an `Experts`, perhaps one of 4 bits, or a `LoRAExperts` among a mesh's ranks.

        parallelize_module(model, mesh["ep"], {"blocks.*.mlp.experts": ExpertParallel()})

    Each parameter becomes a DTensor that is sharded on its first axis, the experts, under the same name.  Its
    gradient is that of the sum of all ranks' losses: divide by their number if each loss is a mean of its
    own, as `parallelize` does.  Codes and scales of weights of 4 bits become DTensors too; NF4's scales are
    float32 then, 4.5 bits a weight.  The keyword arguments are those of `ExpertDispatcher`.
    Raises TypeError for another module, ValueError for a mesh of several axes, if a rank would have no
    expert, for several adapters of experts that the ranks do not divide, and for guests with several
    adapters.
    """

    @checked
    def __init__(
        self, *, rows: float = 2.0, max_tokens: int | None = None, keep_x: bool = False,
        transport: str = "auto", guests: int | str = 0,
    ):  # fmt: skip
        super().__init__()
        check_dispatch_options(rows, max_tokens, keep_x, transport, guests)
        self.options: dict[str, Any] = {"rows": rows, "max_tokens": max_tokens, "guests": guests}
        self.options |= {"keep_x": keep_x, "transport": transport}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, AnyExperts):
            raise TypeError(f"ExpertParallel takes Experts or LoRAExperts, not {type(module).__name__}")
        if device_mesh.ndim != 1:
            raise ValueError(f"ExpertParallel takes a mesh of one axis, but this one has {device_mesh.ndim}")
        if module.dispatcher is not None:
            raise ValueError("these experts are shared among ranks already")
        if self.options["guests"] and isinstance(module, LoRAExperts) and module.num_adapters > 1:
            raise ValueError("guests: experts with several adapters cannot be lent, only those with one")
        group = device_mesh.get_group()
        module.dispatcher = ExpertDispatcher(group, groups_of(module, group.size()), **self.options)

        def shard(t: Tensor) -> Tensor:
            return distribute_tensor(t.detach(), device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)

        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                setattr(part, name, nn.Parameter(shard(parameter), requires_grad=parameter.requires_grad))
            if isinstance(part, FourBitWeight):
                part.shard(shard)
        return module


def groups_of(experts: AnyExperts, ranks: int) -> int:
    """Return the groups of rows of a plan: one for each expert, or for each adapter and for none of them."""
    num_experts = num_experts_of(experts)
    adapters = experts.num_adapters if isinstance(experts, LoRAExperts) else 1
    if adapters == 1:
        return num_experts
    if num_experts % ranks:
        given = f"{num_experts} experts with {adapters} adapters each"
        raise ValueError(f"{given} cannot be divided among {ranks} ranks: use ranks that divide the experts")
    return num_experts * (adapters + 1)


def num_experts_of(experts: AnyExperts) -> int:
    """Return E, of experts that are shared or not."""
    return (experts.base if isinstance(experts, LoRAExperts) else experts).num_experts
