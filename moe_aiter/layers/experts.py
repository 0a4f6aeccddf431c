"""E expert MLPs with stacked weights, and the expert that every token goes to."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import private_api
from ..invariance import batch_invariant
from ..kernels.base.activations import get_activation
from ..kernels.base.check import (
    check_parameter_dtype,
    check_shape,
    check_sizes,
    checked,
    linear,
)
from ..kernels.base.fixed_rows import each_number
from ..kernels.dense.gemm import multiply_linear
from ..kernels.experts.fp8 import QuantizedTokens
from ..kernels.experts.glu import glu
from ..kernels.experts.mlp import mix_experts
from ..kernels.experts.options import ExpertOptions, ExpertWeights
from ..private_api import LINEAR, has_hooks
from ..routing.plan import RoutePlan
from .loading import Loading

Weights = tuple[Any, ...]  # of experts, as they compute with them: a Tensor, a FourBit or None each
Within = Callable[..., Tensor]  # what `through` calls in a forward pass
Part = TypeVar("Part", Tensor, Tensor | None)


def option(name: str) -> Any:
    """Return a property of a module: a field of its `options`, which are replaced where the field is set."""

    def change(module: Any, value: Any) -> None:
        module.options = replace(module.options, **{name: value})

    return property(lambda module: getattr(module.options, name), change)


class WithOptions(Loading):
    """A module with `ExpertOptions`, whose fields are attributes too."""

    options: ExpertOptions = ExpertOptions()  # of a subclass with an __init__ of its own
    activation: str = option("activation")
    interleaved: bool = option("interleaved")
    row_chunks: int | None = option("row_chunks")
    recompute: str = option("recompute")
    fp8: str | None = option("fp8")

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "options" not in state:  # pickled by 0.1, which kept each option apart
            names = [name for name in asdict(ExpertOptions()) if name in state]
            state = state | {"options": ExpertOptions(**{name: state.pop(name) for name in names})}
        super().__setstate__(state)  # type: ignore[no-untyped-call]


class Experts(WithOptions):
    """E two-layer MLPs, gated or plain, of which each token sees its own few.

        out[t] = sum_j s[t, j] * (down[e] @ act(gate_up[e] @ x[t] + gate_up_bias[e]) + down_bias[e])

    with e the expert of choice (t, j) and s = `routing_weights` (Shazeer et al. 2017, arXiv 1701.06538).

    Parameters: gate_up (E, 2I, H), or (E, I, H) for a plain activation, and down (E, H, I); with `bias` also
    gate_up_bias (E, 2I or I) and down_bias (E, H).  All are initialised as E nn.Linear layers would be.

    `expert_mlp` says what `activation`, `interleaved` (the order of gate and up), `row_chunks` and
    `recompute` (time for memory) and `fp8` (precision for time) are.  You may set each of them later, as an
    attribute.  `keep_fp8_weights` keeps quantised weights for the micro-batches of an optimizer step.

    A weight with a `main_grad` attribute, a tensor of its shape and usually float32, gets its gradient added
    there, without a rounding between micro-batches, and its `.grad` stays None: see `use_main_grad`.

    `dispatcher`, which `moe_aiter.distributed` sets, computes the experts on several ranks.
    """

    dispatcher: Callable[..., Tensor] | None = None

    @checked
    def __init__(
        self, num_experts: int, hidden: int, intermediate: int, *, activation: str = "swiglu",
        bias: bool = False, interleaved: bool = False, row_chunks: int | None = None, recompute: str = "none",
        fp8: str | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        check_parameter_dtype(dtype)
        check_sizes(num_experts=num_experts, hidden=hidden, intermediate=intermediate)
        self.options = ExpertOptions(activation, interleaved, row_chunks, recompute, fp8)
        self.options.check()
        self.num_experts, self.hidden, self.intermediate = num_experts, hidden, intermediate
        width = get_activation(activation).projections * intermediate

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        self.gate_up = new(width, hidden)
        self.gate_up_bias = new(width) if bias else None
        self.down = new(hidden, intermediate)
        self.down_bias = new(hidden) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight, bias in ((self.gate_up, self.gate_up_bias), (self.down, self.down_bias)):
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def forward(
        self, x: Tensor, routing_weights: Tensor, plan: RoutePlan, *, within: Within | None = None
    ) -> Tensor:
        """Send `x` (T, H) through the experts of `plan`; add up, weighted by `routing_weights` (T, k).

        Returns (T, H) in the dtype of `x`, which must be that of the weights; under torch.autocast, in its
        dtype, as from nn.Linear.  `within` is for `through`.  Raises ValueError and TypeError as `expert_mlp`
        does.
        """
        if within is not None:
            return within(x, routing_weights, plan)
        check_shape("x", x, "T", "H")
        if self.dispatcher is not None:
            return self.dispatcher(self, x, routing_weights, plan)
        weights = self.gate_up, self.down, self.gate_up_bias, self.down_bias
        return self.compute(x, routing_weights, plan, weights)

    def local_weights(self) -> Weights:
        """Return gate_up, down and their biases, for sharded ones the part of this rank."""
        return tuple(map(local_weight, (self.gate_up, self.down, self.gate_up_bias, self.down_bias)))

    def main_grads(self) -> tuple[Tensor | None, Tensor | None]:
        """Return where gradients of gate_up and down are added, if they are trained and have such a place."""
        weights = self.gate_up, self.down
        gate_up, down = (getattr(w, "main_grad", None) if w.requires_grad else None for w in weights)
        return local_part(gate_up), local_part(down)

    def kernel_options(self) -> ExpertOptions | None:
        """Return what `expert_mlp` computes these experts with, or None if a subclass computes them."""
        return self.options if type(self).compute is Experts.compute else None  # which FSDP2's class keeps

    def compute(
        self, x: Tensor | QuantizedTokens, routing_weights: Tensor, plan: RoutePlan, weights: Weights,
        save_z: bool = True, lent: bool = False, guests: Weights = (),
    ) -> Tensor:  # fmt: skip
        """Return the experts' output as `forward` does, on this rank, with these weights as parameters.

        Without `save_z` backward computes the pre-activations again, whatever `recompute` says.  Weights that
        other ranks have `lent` get their gradients from autograd, not in a main gradient of this rank's.
        The last groups of the plan are those of `guests`, weights as `lent` ones: see kernels/base/lent.py.
        """
        whole = ExpertWeights(*weights, *(() if lent else self.main_grads()))
        whole = whole.with_guests(*guests) if guests else whole
        options = self.options if save_z else replace(self.options, recompute="z")
        return mix_experts(x, whole, routing_weights, plan, options)

    def extra_repr(self) -> str:
        sizes = f"{self.num_experts}, hidden={self.hidden}, intermediate={self.intermediate}"
        rest = f"bias={self.down_bias is not None}, interleaved={self.interleaved}"
        memory = f"row_chunks={self.row_chunks}, recompute={self.recompute!r}, fp8={self.fp8!r}"
        shared = "" if self.dispatcher is None else f", {self.dispatcher}"
        return f"{sizes}, activation={self.activation!r}, {rest}, {memory}{shared}"


class SteppedExperts(nn.Module):
    """Experts whose weights are parameters and buffers of `owners`, modules that hooks may hide.

    `dispatcher` is that of `Experts`; `local_weights` and `compute` are as there.
    """

    dispatcher: Callable[..., Tensor] | None = None
    owners: Callable[[], Iterable[nn.Module]]
    local_weights: Callable[[], Weights]
    compute: Callable[..., Tensor]

    def forward(
        self, x: Tensor, routing_weights: Tensor, plan: RoutePlan, *, within: Within | None = None
    ) -> Tensor:
        """Do as `Experts.forward`: (T, H) -> (T, H)."""
        if within is not None:
            return within(x, routing_weights, plan)
        check_shape("x", x, "T", "H")
        if self.dispatcher is not None:
            return self.dispatcher(self, x, routing_weights, plan)
        return through(self.owners(), self.compute_here, x, routing_weights, plan)

    def compute_here(self, x: Tensor, routing_weights: Tensor, plan: RoutePlan) -> Tensor:
        return self.compute(x, routing_weights, plan, self.local_weights())


def local_part(t: Part) -> Part:
    """Return the part of a DTensor that this rank has, and another tensor as it is."""
    if t is None or type(t) in (Tensor, nn.Parameter):
        return t
    from torch.distributed.tensor import DTensor  # here, since it takes long to import

    return t.to_local() if isinstance(t, DTensor) else t


def whole_part(t: Tensor) -> Tensor:
    """Return a DTensor's numbers of all ranks, who all must call this, and another tensor as it is."""
    if local_part(t) is t:
        return t
    whole: Tensor = t.full_tensor()  # type: ignore[attr-defined]  # as DTensor has
    return whole


def local_weight(p: Part) -> Part:
    """Return the part of a parameter that this rank has.  A `main_grad` takes all of its gradient, so that
    autograd, which may send zeros for none, is not asked."""
    local = local_part(p)
    if p is None or local is None or not hasattr(p, "main_grad"):
        return local
    return local.detach().requires_grad_(p.requires_grad)


def through(owners: Iterable[nn.Module], fn: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return `fn(*args)`, called in the forward passes of modules whose parameters `fn` reads.

    FSDP2, ZeRO-3 and offloading gather a module's parameters for its own forward pass alone, by hooks or by
    another `forward`.  Modules without either are not called.  A hook of such a module gets these arguments,
    and the result of all as the module's.
    """
    hooked = [module for module in owners if is_hooked(module)]
    if not hooked:
        return fn(*args)
    out: Tensor = hooked[0](*args, within=partial(through, hooked[1:], fn))
    return out


def is_hooked(module: nn.Module) -> bool:
    return has_hooks(module) or "forward" in vars(module)


def apply_linear(module: nn.Module, x: Tensor, adapter_ids: Tensor | None = None) -> Tensor:
    """Return `module(x)`; by nn.Linear, a NaN or infinity of one token stays in its row on every CPU.

    A `LoRALinear` gets `adapter_ids` too, if there are any.  With batch invariance, `gemm` multiplies.
    """
    if batch_invariant():
        with ByGemm():
            out: Tensor = module(x, *ids_for(module, adapter_ids))
            return out
    if private_api.AMX and x.is_cpu and type(module) is nn.Linear and not is_hooked(module):
        return linear(x, module.weight, module.bias)
    out = module(x, *ids_for(module, adapter_ids))
    return out


class ByGemm(TorchFunctionMode):
    """Inside, `gemm` multiplies in place of F.linear, wherever a module calls it, and hooks still run."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        plain = all(type(t) in (Tensor, nn.Parameter, type(None)) for t in (*args, *kwargs.values()))
        multiply = multiply_linear if func is LINEAR and plain else func
        return multiply(*args, **kwargs)


def ids_for(module: nn.Module, adapter_ids: Tensor | None) -> tuple[Tensor, ...]:
    """Return the adapter ids as arguments for a `LoRALinear` or `LoRAExperts`, none for another module."""
    return () if adapter_ids is None or not hasattr(module, "num_adapters") else (adapter_ids,)


def parts_to_draw(whole: Any, path: str = "") -> list[Any]:
    """Return the parts of a module whose `reset_parameters` draw its own; TypeError if one has none."""
    found = [(name, part) for name in whole.drawn_parts if (part := getattr(whole, name)) is not None]
    for name, part in found:
        if not hasattr(part, "reset_parameters"):
            raise TypeError(
                f"{path}{name} is a {type(part).__name__}, which has no reset_parameters: call it before you "
                "add adapters or quantise, or on the other parts"
            )
        if hasattr(part, "drawn_parts"):
            parts_to_draw(part, f"{path}{name}.")
    return [part for _, part in found]


class SharedExpert(Loading):
    """A dense MLP, gated or plain: down(act(gate_up(x))), times sigmoid(gate(x)) with `gate`."""

    takes_adapter_ids = True  # which torch's wrappers of modules have as well
    drawn_parts = "gate_up", "down", "gate"

    def __init__(
        self, hidden: int, intermediate: int, *, activation: str = "swiglu", bias: bool = False,
        interleaved: bool = False, gate: bool = False, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        check_sizes(shared_intermediate=intermediate)
        self.activation, self.interleaved = activation, interleaved
        where = {"device": device, "dtype": dtype}
        width = get_activation(activation).projections * intermediate
        self.gate_up = nn.Linear(hidden, width, bias=bias, **where)
        self.down = nn.Linear(intermediate, hidden, bias=bias, **where)
        self.gate = nn.Linear(hidden, 1, bias=False, **where) if gate else None

    def reset_parameters(self) -> None:
        """Draw every parameter anew; TypeError, and nothing is changed, if a part cannot."""
        for part in parts_to_draw(self):
            part.reset_parameters()

    def forward(self, x: Tensor, adapter_ids: Tensor | None = None) -> Tensor:
        """(T, H) -> (T, H); layers with adapters get `adapter_ids` (T,)."""
        inner = glu(apply_linear(self.gate_up, x, adapter_ids), self.activation, self.interleaved)
        out = apply_linear(self.down, inner, adapter_ids)
        return (
            out
            if self.gate is None
            else out * each_number(torch.sigmoid, apply_linear(self.gate, x, adapter_ids))
        )

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, interleaved={self.interleaved}"


def new_shared(hidden: int, intermediate: int, gate: bool, mlp: dict[str, Any]) -> SharedExpert | None:
    if gate and not intermediate:
        raise ValueError("shared_gate=True, but shared_intermediate is 0: there is no shared expert to gate")
    return SharedExpert(hidden, intermediate, gate=gate, **mlp) if intermediate else None


def new_latent(hidden: int, latent: int, where: dict[str, Any]) -> tuple[nn.Linear | None, nn.Linear | None]:
    """Return the projections to and from vectors of the width `latent`, if that is not 0."""
    if latent == 0:
        return None, None
    check_sizes(latent=latent)
    to_latent = nn.Linear(hidden, latent, bias=False, **where)
    return to_latent, nn.Linear(latent, hidden, bias=False, **where)
