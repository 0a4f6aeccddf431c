"""The routed experts of torchtitan's MoE, replaced by torchtitan's override mechanism:

    --override.imports moe_aiter.integrations.torchtitan.experts
    --override.imports 'moe_aiter.integrations.torchtitan.experts={"guests": 4}'

`convert(model)` does the same for a model that exists and is not parallelised yet.  Parameters keep their
names, shapes and values, so checkpoints, state-dict adapters, shardings and initialisers keep working.

torchtitan's router stays.  One `expert_mlp` takes the place of torchtitan's dispatcher and experts, and
tokens are not copied to rows.  Under expert parallelism, `ExpertDispatcher` sends tokens to the experts and
back.  It sends each token to all ranks of the group, so groups of more than `MOST_RANKS` ranks keep
torchtitan's dispatcher, as layers do that choose another one than the standard.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..distributed import ExpertDispatcher
from ..distributed.experts import check_guests
from ..kernels.base.activations import swiglu_limit
from ..kernels.base.check import checked
from ..kernels.base.host import saturated
from ..kernels.experts.mlp import mix_experts
from ..kernels.experts.options import ExpertOptions, ExpertWeights
from ..kernels.experts.split import split_expert_mlp
from ..layers.experts import Weights, local_part
from ..layers.route_replay import FINDERS, Foreign
from ..layers.training import WEIGHTS
from ..routing.plan import RoutePlan, make_plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

try:
    from torchtitan.config import derive, override
    from torchtitan.distributed.spmd_types import spmd_mesh_size
    from torchtitan.distributed.utils import get_spmd_backend
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward
except ImportError as error:
    raise ImportError(
        "moe_aiter.integrations.torchtitan needs torchtitan 0.3 or newer: pip install 'torchtitan>=0.3'"
    ) from error

__all__ = ["convert", "experts"]

MOST_RANKS = 8  # of one NVLink domain
WEIGHTS_IN_TURN = "w1_EFD", "w3_EFD", "w2_EDF"  # gate, up, down


@dataclass(frozen=True)  # no tuple: FSDP rounds the tensors in one to its own dtype, unless told not to
class Routing:
    """The routing that experts get with tokens; with rows, experts get each expert's number of rows."""

    weights: Tensor  # (T, k), float32
    plan: RoutePlan
    dispatcher: ExpertDispatcher | None = None  # if ranks share the experts; the plan is that of all experts


class Dispatcher(AllToAllTokenDispatcher):
    """Leaves tokens where they are; `Experts` sends them to other ranks.

    `guests` is that of `ExpertDispatcher`.
    """

    shared: ExpertDispatcher | None = None

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        guests: int | str = 0

    def __init__(self, config: Config):
        super().__init__(config)
        self.guests = check_guests(config.guests)

    def wire_meshes(self, *, ep_mesh: "DeviceMesh | None") -> None:
        super().wire_meshes(ep_mesh=ep_mesh)
        self.shared = None
        if ep_mesh is None:
            return
        if (ranks := ep_mesh.size()) <= MOST_RANKS:
            self.shared = ExpertDispatcher(ep_mesh.get_group(), self.num_experts, guests=self.guests)
        elif self.guests:
            raise ValueError(
                f"guests={self.guests!r}, but {ranks} ranks share the experts, and more than {MOST_RANKS} "
                "keep torchtitan's dispatcher, which lends nothing: leave out guests, or use fewer ranks"
            )

    def dispatch(self, x: Tensor, scores: Tensor, expert_ids: Tensor, counts: Tensor) -> tuple:
        if self.ep_mesh is not None and self.shared is None:
            return super().dispatch(x, scores, expert_ids, counts)
        return x, Routing(scores, make_plan(expert_ids, self.num_experts), self.shared), None

    def combine(self, out: Tensor, metadata, x: Tensor) -> Tensor:
        return out if metadata is None else super().combine(out, metadata, x)


class Fused:
    """What both kinds of experts do with tokens; products are in bfloat16, as torchtitan's.

    A weight with a `main_grad`, `use_main_grad`'s, gets its gradient added there.
    """

    def forward(self, x: Tensor, routing: Routing | Tensor) -> Tensor:
        """x (T, H) and their routing, or rows (R, H) sorted by expert and how many each has, (E,).

        Returns as many rows in the dtype of x: weighted sums, or rows as they are.  Rows past the last
        expert's, which a dispatcher may have, become zeros.
        """
        if not isinstance(routing, Routing):
            routing = each_row_once(len(x), routing)
        inputs = x.bfloat16(), routing.weights, routing.plan
        if routing.dispatcher is None:
            return self.compute(*inputs, self.local_weights()).type_as(x)
        return routing.dispatcher(self, *inputs).type_as(x)

    def main_grads(self) -> tuple[Tensor | None, ...]:
        """Return where gradients of the weights are added, for sharded ones the part of this rank."""
        return tuple(local_part(getattr(getattr(self, name), "main_grad", None)) for name in self.summed)


class Experts(Fused, GroupedExperts):
    """torchtitan's SwiGLU experts, as one `split_expert_mlp`."""

    summed = WEIGHTS_IN_TURN

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def local_weights(self) -> tuple[Tensor, ...]:
        """Return the weights, for sharded ones the part of this rank."""
        return tuple(local_part(getattr(self, name)) for name in WEIGHTS_IN_TURN)

    def compute(
        self, x: Tensor, routing_weights: Tensor, plan: RoutePlan, weights: Weights, save_z: bool = True,
        lent: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the output of this rank's experts, with these weights in place of the parameters.

        All windows of a dispatcher keep their pre-activations, whatever `save_z` says.
        """
        gate, up, down = (None,) * 3 if lent else self.main_grads()
        return split_expert_mlp(
            x, *weights, routing_weights, plan, gate_main_grad=gate, up_main_grad=up, down_main_grad=down
        )


class GptOssExperts(Fused, GptOssGroupedExperts):
    """torchtitan's experts of gpt-oss, as one `expert_mlp`: gate and up interleaved, limits and biases."""

    summed = "mlp1_weight_EGD", "mlp2_weight_EDF"

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    def local_weights(self) -> tuple[Tensor, ...]:
        """Return the weights and biases, for sharded ones the part of this rank."""
        weights = self.mlp1_weight_EGD, self.mlp2_weight_EDF, self.mlp1_bias_EG, self.mlp2_bias_ED
        gate_up, down, gate_up_bias, down_bias = map(local_part, weights)
        down_bias = ScaleBiasForward.apply(down_bias, tensor_parallel_size(weights[0]), down_bias.dtype)
        return gate_up, down, gate_up_bias, down_bias

    def kernel_options(self) -> ExpertOptions:
        """Do as `Experts.kernel_options` of moe_aiter."""
        act = swiglu_limit(self.swiglu_limit, self.swiglu_limit, alpha=1.702, up_offset=1.0)
        return ExpertOptions(act, interleaved=True)

    def compute(
        self, x: Tensor, routing_weights: Tensor, plan: RoutePlan, weights: Weights, save_z: bool = True,
        lent: bool = False, guests: Weights = (),
    ) -> Tensor:  # fmt: skip
        """Return the output of this rank's experts, with these weights in place of the parameters."""
        w = ExpertWeights(*weights, *(() if lent else self.main_grads()))
        w = w._replace(gate_up=w.gate_up.to(x.dtype), down=w.down.to(x.dtype))
        if guests:
            w = w.with_guests(*(t.to(x.dtype) for t in guests[:2]), *guests[2:])
        options = replace(self.kernel_options(), recompute="none" if save_z else "z")
        return mix_experts(x, w, routing_weights, plan, options)


def tensor_parallel_size(weight: Tensor) -> int:
    """Return how many ranks share each expert: their outputs are added, so each adds a part of the bias."""
    if get_spmd_backend() == "spmd_types":
        return spmd_mesh_size("tp")
    mesh = getattr(weight, "device_mesh", None)
    return mesh["tp"].size() if mesh is not None and "tp" in (mesh.mesh_dim_names or ()) else 1


WEIGHTS.update((kind, kind.summed) for kind in (Experts, GptOssExperts))
OURS = {GroupedExperts: Experts, GptOssGroupedExperts: GptOssExperts}
CONFIGS = {theirs.Config: ours.Config for theirs, ours in OURS.items()}


def routed_experts_of_torchtitan(module: nn.Module) -> Foreign | None:
    """For `record_routes` and `replay_routes`.  torchtitan knows no dropped choice, but the weight 0."""
    if not isinstance(module, RoutedExperts):
        return None
    return Foreign(2, 1, module.inner_experts.num_experts, dropped=lambda module: None)


FINDERS["torchtitan"] = routed_experts_of_torchtitan


def each_row_once(rows: int, group_sizes: Tensor) -> Routing:
    """The routing of rows that are sorted already: tokens of one choice each, whose weight is one."""
    group_sizes = saturated(group_sizes)
    order = torch.arange(rows, dtype=torch.int32, device=group_sizes.device)
    order = order.masked_fill(order >= group_sizes.sum(), -1)
    weights = torch.ones(rows, 1, device=group_sizes.device)
    return Routing(weights, RoutePlan(order, order[:, None], group_sizes))


STANDARD = LocalTokenDispatcher, AllToAllTokenDispatcher


@override(target=RoutedExperts.Config, description="Routed experts on moe_aiter's kernels.")
@checked
def experts(config: RoutedExperts.Config, *, guests: int | str = 0) -> RoutedExperts.Config:
    """Replace the routed experts of a layer: the override that torchtitan calls with their configuration.

    guests: how many experts a rank can borrow under expert parallelism, see `ExpertDispatcher`.  A
    `Dispatcher.Config` that is there already keeps its own unless another is given.
    Raises TypeError for experts of another kind, such as those of a converter for FP8 or MXFP8, and
    ValueError for guests with another dispatcher than torchtitan's standard.
    """
    check_guests(guests)
    ours = replacement(type(config.inner_experts), CONFIGS)
    changed = {"inner_experts": derive(config.inner_experts, ours)}
    kind = type(config.token_dispatcher)
    if kind in [kind.Config for kind in STANDARD] or (guests and kind is Dispatcher.Config):
        changed["token_dispatcher"] = derive(config.token_dispatcher, Dispatcher.Config, guests=guests)
    elif guests:
        raise ValueError(no_guests(guests, kind))
    return replace(config, **changed)


@checked
def convert(model: nn.Module, *, guests: int | str = 0) -> nn.Module:
    """Replace the experts of every MoE of `model` by these, in place; returns the model.

    Call it before the model is parallelised, compiled or checkpointed.  The parameters stay the same objects.
    Further calls change nothing but `guests`, if they give any.
    guests: how many experts a rank can borrow under expert parallelism, see `ExpertDispatcher`.
    Raises TypeError and ValueError as `experts` does, and ValueError for a model without an MoE or whose MoE
    is parallelised already.
    """
    check_guests(guests)
    found = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no RoutedExperts of torchtitan")
    for module in found:
        replacement(type(module.inner_experts), OURS)
        if module._parallelized:
            raise ValueError("convert the model before it is parallelised: its experts are wrapped already")
        if guests and type(module.token_dispatcher) not in (*STANDARD, Dispatcher):
            raise ValueError(no_guests(guests, type(module.token_dispatcher)))
    for module in found:
        module.inner_experts.__class__ = replacement(type(module.inner_experts), OURS)
        if type(old := module.token_dispatcher) in STANDARD:
            sizes = {"num_experts": old.num_experts, "top_k": old.top_k}
            module.token_dispatcher = Dispatcher(Dispatcher.Config(**sizes, guests=guests))
        elif guests:
            old.guests = guests
    return model


def no_guests(guests: int | str, kind: type) -> str:
    return (
        f"guests={guests!r}, but {kind.__qualname__} lends nothing: leave out guests, or use torchtitan's "
        "standard dispatcher, which ours replaces"
    )


def replacement(kind: type, known: dict[type, type]) -> type:
    """Return the class of ours that replaces `kind`, which may be one already."""
    if kind in known.values():
        return kind
    if kind not in known:
        names = ", ".join(theirs.__qualname__ for theirs in known)
        raise TypeError(
            f"no moe_aiter experts for {kind.__qualname__}, only for {names}: "
            "leave out moe_aiter's override, or the converter that makes these experts"
        )
    return known[kind]
