"""Expert parallelism as a plan of torch's `parallelize_module`."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..kernels.base.check import checked
from ..layers import Experts, LoRAExperts
from .experts import ExpertDispatcher, check_options

KINDS = Experts, LoRAExperts


class ExpertParallel(ParallelStyle):
    """Share the experts of an `Experts` or `LoRAExperts` among the ranks of a mesh with one axis.

        parallelize_module(model, mesh["ep"], {"blocks.*.mlp.experts": ExpertParallel()})

    Each parameter becomes a DTensor that is sharded on its first axis, the experts, under the same name.  Its
    gradient is that of the sum of all ranks' losses: divide by their number if each loss is a mean of its
    own, as `parallelize` does.  The keyword arguments are those of `ExpertDispatcher`.
    Raises TypeError for another module, ValueError for a mesh of several axes and if a rank would have no
    expert.
    """

    @checked
    def __init__(
        self,
        *,
        rows: float = 2.0,
        max_tokens: int | None = None,
        keep_x: bool = False,
        transport: str = "auto",
    ):
        super().__init__()
        check_options(rows, max_tokens, transport)
        self.options = {"rows": rows, "max_tokens": max_tokens, "keep_x": keep_x, "transport": transport}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, KINDS):
            raise TypeError(f"ExpertParallel takes Experts or LoRAExperts, not {type(module).__name__}")
        if isinstance(module, LoRAExperts) and module.has_four_bits:
            raise ValueError("experts of 4 bits cannot be shared among ranks: keep them in 16 bits")
        if device_mesh.ndim != 1:
            raise ValueError(f"ExpertParallel takes a mesh of one axis, but this one has {device_mesh.ndim}")
        if module.dispatcher is not None:
            raise ValueError("these experts are shared among ranks already")
        num_experts = next(module.parameters()).shape[0]
        module.dispatcher = ExpertDispatcher(device_mesh.get_group(), num_experts, **self.options)
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                sharded = distribute_tensor(
                    parameter.detach(), device_mesh, [Shard(0)], src_data_rank=self.src_data_rank
                )
                setattr(part, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        return module
