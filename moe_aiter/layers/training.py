"""Functions for a whole model in a training loop: `balance_step`, `aux_loss`, `use_main_grad` and more."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..kernels.base.check import check_group, check_not_negative, checked
from ..private_api import hooks_before, version_of
from ..routing.balance import check_rule, selection_bias_step, sum_over_ranks
from ..routing.quantile import quantile_bias
from .auxiliary import NewPass
from .experts import Experts
from .moe import MoE, device_of
from .optimized import OptimizedMoELayer

WEIGHTS = {Experts: ("gate_up", "down"), OptimizedMoELayer: ("w1", "w2")}


@torch.no_grad()
@checked
def balance_step(
    model: nn.Module, rate: float | None = None, *, rule: str = "sign", zero_mean: bool = False,
    group: "torch.distributed.ProcessGroup | None" = None,
) -> None:  # fmt: skip
    """Update the selection bias of every `MoE` in `model` from its counted choices, and reset the counts.

    Call it once per optimizer step, whatever the number of micro-batches:

        optimizer.register_step_post_hook(lambda *_: balance_step(model))

    Let c[e] count the choices of expert e since the last call, and v[e] = mean(c) - c[e].

        rule="sign"          bias[e] += rate * sign(v[e])        DeepSeek-V3, arXiv 2408.15664
        rule="proportional"  bias[e] += rate * v[e] / mean(c)
        rule="quantile"      bias[e] += rate * (new[e] - bias[e])        Kimi K3: routing/quantile.py

    `rate` is 1e-3 by default, for rule="quantile" 1: Kimi K3's.  This rule needs layers with `quantile_bins`;
    their new bias is the one with which the tokens since the last call would have loaded the experts evenly.
    With `ZeroCompute`, real_share * sum(c) / E takes the place of mean(c), and experts without weights get no
    step.  LongCat-Flash's mu is then the rate of rule="proportional" times E / real_share.
    `zero_mean` subtracts the mean over experts from these steps.  With a process `group`, c is summed over
    its ranks, by one all-reduce for all layers.  No synchronisation with the host.  A layer with a
    `global_balance_coef` and no bias only resets its counts.

    Under DistributedDataParallel use broadcast_buffers=False; otherwise the counts of rank 0 replace those of
    all ranks.
    Raises ValueError for a model without such a layer, an unknown rule, and a rate that is not above 0.
    """
    rate = check_rule(rate, rule)
    check_group(group=group)
    layers = [m for m in model.modules() if isinstance(m, MoE) and m.load is not None]
    if not layers:
        raise ValueError(
            "the model has no MoE with selection_bias=True or a global_balance_coef: nothing to do"
        )
    for layer in layers:
        if layer.load is not None and layer.load.is_meta:  # nothing has run since the layer got its memory
            layer.follow(device_of(layer))
    loads = [layer.load for layer in layers if layer.load is not None]
    counted = loads if rule != "quantile" else list(map(margins_of, layers, loads))
    if group is not None:
        counted = sum_over_ranks(counted, group)
    for layer, load, counts in zip(layers, loads, counted, strict=True):
        bias = float32_bias(layer.router)
        if bias is not None and rule == "quantile":
            new = quantile_bias(bias, counts.to(bias.device).view(len(bias), -1), layer.top_k)
            bias += rate * (new - bias)
        elif bias is not None:
            how = rate, rule, zero_mean, layer.zero_compute
            bias += selection_bias_step(bias, counts.to(bias.device), *how)
        load.zero_()
        if layer.margins is not None:
            layer.margins.zero_()


def float32_bias(router: nn.Module) -> Tensor | None:
    """The selection bias, which becomes float32 again if something has cast the buffer itself."""
    bias = getattr(router, "selection_bias", None)
    if bias is not None and bias.itemsize < 4:
        router.selection_bias = bias = bias.float()
    return bias


def margins_of(layer: MoE, load: Tensor) -> Tensor:
    """The histogram of a layer, flat; its `load`, of which nothing is made, if it has no bias."""
    if getattr(layer.router, "selection_bias", None) is None:
        return load
    if layer.margins is None:
        raise ValueError("rule='quantile', but an MoE with a selection bias has no quantile_bins")
    return layer.margins.flatten()


@checked
def set_aux_loss(model: nn.Module, how: str) -> None:
    """Say how the auxiliary losses of every `MoE` in `model` reach the gradients.

        how="attach"   The backward pass of each layer adds them, as in a new layer.  If you scale the
                       training loss, call `set_loss_scale` with the same factor.
        how="return"   `aux_loss(model)` returns them, to be added to the training loss.

    Pass the module that your loop calls, and do so before `torch.compile` compiles it.  A forward pass of
    this module in training mode, with gradients, drops the losses of the one before.  Losses that nothing
    read are lost then; a warning says so, except from a compiled model.  If you call parts of the module
    instead, a layer keeps its losses until you read them.
    Raises ValueError for another word and for a model without `MoE`.
    """
    if how not in ("attach", "return"):
        raise ValueError(f"how must be 'attach' or 'return', not {how!r}")
    kept = [layer.aux_losses for layer in layers_of(model)]
    for losses in kept:
        losses.attached, losses.new, losses.seen = how == "attach", [], []
    for module in model.modules():
        hooks = hooks_before(module)
        for key in [key for key, hook in hooks.items() if isinstance(hook, NewPass)]:
            del hooks[key]
    if how == "return":
        model.register_forward_pre_hook(NewPass(kept))


@checked
def aux_loss(model: nn.Module) -> Tensor:
    """Return the sum of the auxiliary losses of every `MoE` in `model`, each times its coefficient: a scalar.

    After `set_aux_loss(model, "return")` this is a tensor of the graph, for the training loss:

        loss = criterion(model(x)) + aux_loss(model)
        (loss / n).backward()                               # n micro-batches; or scaler.scale(loss / n)

    The losses are those of the last forward pass of `model` in training mode with gradients; a layer that ran
    twice in the pass counts twice.  Further calls return the same.  0 if there are none.  If layers lie on
    several devices, the sum is on that of the last one.

    Otherwise the layers attach their losses, and this is a number for logs, without a graph: that of each
    layer's last forward pass.  A layer leaves none while it is compiled.
    Layers in evaluation mode count in neither case.
    Raises ValueError for a model without `MoE`, and RuntimeError if layers attach losses and none has left
    one.
    """
    layers = layers_of(model)
    trained = [layer for layer in layers if layer.training]
    losses = [loss for layer in trained for loss in layer.aux_losses.read()]
    if losses:
        device = losses[-1].device
        return torch.stack([loss.to(device) for loss in losses]).sum()
    if any(layer.aux_losses.attached and layer.has_coefs() for layer in trained):
        raise RuntimeError(
            "no forward pass in training mode has left an auxiliary loss: run the model first, and if it is "
            "compiled, call set_aux_loss(model, 'return') before"
        )
    return torch.zeros((), device=next(layers[0].parameters()).device)


def layers_of(model: nn.Module) -> list[MoE]:
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not layers:
        raise ValueError("the model has no MoE: there is no auxiliary loss")
    return layers


@torch.no_grad()
@checked
def set_loss_scale(model: nn.Module, scale: float | Tensor) -> None:
    """Multiply the gradients of the auxiliary losses of every `MoE` in `model` by `scale`.

    Pass the factor that you multiply the training loss by, before each backward pass in which it changes:

        set_loss_scale(model, 1 / n)                        # loss / n of n micro-batches
        set_loss_scale(model, num_tokens / total_tokens)    # micro-batches weighed by their tokens
        set_loss_scale(model, scaler.get_scale())           # torch.amp.GradScaler

    `scale` is a number or a scalar tensor; a tensor on the model's device costs no synchronisation.  The
    scale is 1 at first, stays until the next call, and is in no state_dict.  In Megatron-LM this is
    `MoEAuxLossAutoScaler.set_loss_scale`.  Raises TypeError for another kind, ValueError for a tensor with
    axes, a number that is negative or not finite, a model without `MoE`, and one whose losses `aux_loss`
    returns: they have the scale of the training loss already.
    """
    if isinstance(scale, Tensor):
        if scale.dim():
            raise ValueError(f"scale must be a scalar, but it has shape {tuple(scale.shape)}")
    else:
        check_not_negative(scale=scale)
    layers = layers_of(model)
    if not all(layer.aux_losses.attached for layer in layers):
        raise ValueError(
            "set_aux_loss(model, 'return') was called: scale the training loss that aux_loss(model) is part "
            "of, without set_loss_scale"
        )
    for layer in layers:
        # .data: a backward pass may have saved the scalar, and reads the newest value
        if isinstance(scale, Tensor):
            layer.loss_scale.data.copy_(scale)
        else:
            layer.loss_scale.data.fill_(scale)


# gradients of the experts that add up in float32, for a training loop that knows only `.grad`


def weights_of_layers(module: nn.Module) -> tuple[str, ...]:
    return next((names for kind, names in WEIGHTS.items() if isinstance(module, kind)), ())


# of a module: what those of its weights are called whose gradient its forward pass lets be added to a
# `main_grad`.  Integrations add theirs.
FINDERS: list[Callable[[nn.Module], tuple[str, ...]]] = [weights_of_layers]


@checked
def use_main_grad(model: nn.Module, optimizer: torch.optim.Optimizer) -> "Sums":
    """Give each trained weight of the experts in `model` a float32 `main_grad`, and hand it to `optimizer`.

    The backward pass of every micro-batch adds to `main_grad` within the product that makes the gradient.
    Autograd alone writes each gradient, reads it back to add it to the sum, and rounds both to the weight's
    dtype.  Float64 weights have a float64 `main_grad`.

        hand_over = use_main_grad(model, optimizer)
        for micro_batch in batch:
            loss(model(micro_batch)).backward()
        hand_over()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    `optimizer.step()` takes the sum as `.grad`, rounded to the weight's dtype, and then sets the sum to 0; so
    does `optimizer.zero_grad()`, for example after a skipped step.  The loop changes only if it reads
    gradients before the step: then call the returned function first, before clip_grad_norm_ and before
    GradScaler's unscale_, or before its step if you do not unscale.

    Gradients that autograd itself wrote to `.grad`, for example of a penalty on a weight, are added.  A
    weight that you freeze later is left alone.  DistributedDataParallel and FSDP reduce gradients that
    autograd produces, and these never arrive there.  With expert parallelism alone, call `reduce_gradients`
    of `moe_aiter.distributed` before handing over.

    It works for `Experts`, `OptimizedMoELayer`, and the experts of transformers' and torchtitan's models that
    run on these kernels.  transformers' experts with an adapter, or with a gate outside of the kernels, keep
    to `.grad`.
    For another optimizer of the same model, call this function again, or `hand_over.remove()`, which takes
    the main gradients away.  A step of an optimizer that did not get them raises RuntimeError.  A copied or
    pickled model has none.

    Raises ValueError if `optimizer` has no such weight of `model`, and for a model sharded by FSDP2.  If
    load_state_dict(assign=True), say, has replaced a weight since, `optimizer` would no longer train the
    model's weight: handing over raises RuntimeError.
    """
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [
        (weight, module, name)
        for module in model.modules()
        for finder in FINDERS
        for name in finder(module)
        if (weight := getattr(module, name)).requires_grad and id(weight) in trained
    ]
    if not found:
        raise ValueError("the model has no experts whose weights the optimizer trains: nothing to do")
    if any(is_fsdp(module) for module in model.modules()):
        raise ValueError(
            "FSDP2 shards this model and sums gradients itself: instead of use_main_grad, let it sum in "
            "float32 by fully_shard(..., mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))"
        )
    watch_optimizers()
    sums = Sums(found, optimizer.zero_grad)
    optimizer.zero_grad = sums.zero_grad  # type: ignore[method-assign]  # which is what it does from now on
    optimizer.register_step_pre_hook(sums.before_step)
    optimizer.register_step_post_hook(sums.after_step)
    return sums


def saved_state(weight: nn.Parameter) -> dict[str, Any]:
    """Return the attributes that pickle saves: a main gradient without its optimizer is of no use."""
    return {name: value for name, value in vars(weight).items() if name not in ("main_grad", "__getstate__")}


@functools.cache
def watch_optimizers() -> None:
    """Make every optimizer's step raise if it leaves gradients in a main gradient of `use_main_grad`."""
    register_optimizer_step_post_hook(check_step)


def check_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raise if a weight's main gradient has a sum still: it is another optimizer's."""
    for weight in (p for group in optimizer.param_groups for p in group["params"]):
        main_grad: Any = getattr(weight, "main_grad", None)
        if hasattr(main_grad, CLEAR) and getattr(main_grad, CLEAR) != version_of(main_grad):
            raise RuntimeError(
                f"{type(optimizer).__name__} did not train a weight whose gradients are in its main_grad, "
                "which use_main_grad gave to another optimizer: before the backward pass, call "
                "use_main_grad(model, optimizer) for this one, or remove() of what the former call returned"
            )


def is_fsdp(module: nn.Module) -> bool:
    """Whether torch's fully_shard was called on this module."""
    return "torch.distributed.fsdp" in sys.modules and isinstance(module, torch.distributed.fsdp.FSDPModule)


CLEAR = "moe_aiter_clear"  # of a main gradient: its version when it was last set to 0


class Sums:
    """The main gradients of weights, and when an optimizer sees and forgets them: see `use_main_grad`.

    Each weight comes with a module and what it is called there.
    """

    def __init__(self, found: list[tuple[nn.Parameter, nn.Module, str]], zero_grad: Callable[..., None]):
        self.found, self.zero_others = found, zero_grad
        self.main_grads: list[Tensor] = []
        for weight, *_ in found:
            dtype = torch.promote_types(weight.dtype, torch.float32)
            self.main_grads.append(torch.zeros_like(weight, dtype=dtype, requires_grad=False))
            # pickle asks an object for its state, rather than its class
            own = {"main_grad": self.main_grads[-1], "__getstate__": functools.partial(saved_state, weight)}
            vars(weight).update(own)
        # the gradient handed to each weight, which may have been clipped since, and the version of its sum
        self.handed: dict[nn.Parameter, tuple[Tensor, int]] = {}
        self.clear()

    def __call__(self) -> None:
        self.hand_over()

    def remove(self) -> None:
        """Undo `use_main_grad`, after a step: autograd writes gradients again.  Sums of no step are lost."""
        for (weight, *_), main_grad in zip(self.found, self.main_grads, strict=True):
            if vars(weight).get("main_grad") is main_grad:  # no later call's
                del vars(weight)["main_grad"], vars(weight)["__getstate__"]
        self.found, self.main_grads, self.handed = [], [], {}

    def trained(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the weights that are trained, and their main gradients."""
        weights = (weight for weight, *_ in self.found)
        return [(w, main) for w, main in zip(weights, self.main_grads, strict=True) if w.requires_grad]

    def check(self) -> None:
        """Raise unless the modules' weights are those of the optimizer and have the main gradients still."""
        for (weight, module, name), main_grad in zip(self.found, self.main_grads, strict=True):
            now = getattr(weight, "main_grad", None)
            if getattr(module, name) is not weight or now is None:
                raise RuntimeError(
                    f"{type(module).__name__}.{name} is not the tensor that use_main_grad was given: "
                    "something has replaced it, load_state_dict(assign=True) say.  Load first, then make the "
                    "optimizer and call use_main_grad; or load without assign, which copies"
                )
            if now is not main_grad:
                raise RuntimeError(
                    f"the main_grad of {type(module).__name__}.{name} is not the one that use_main_grad gave "
                    "it for this optimizer: another call, for another optimizer say, has replaced it"
                )

    def hand_over(self) -> None:
        self.check()
        for weight, main_grad in self.trained():
            given, _ = self.handed.get(weight, (None, None))
            own = None if weight.grad is given else weight.grad  # autograd's
            if own is not None and own is not main_grad:
                main_grad += own
            weight.grad = grad = main_grad.to(weight.dtype)
            self.handed[weight] = grad, version_of(main_grad)

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            return args[:1], kwargs | {"closure": functools.partial(self.evaluate, closure)}
        self.check()
        if not all(self.is_handed(*pair) for pair in self.trained()):
            self.hand_over()
        return None

    def is_handed(self, weight: nn.Parameter, main_grad: Tensor) -> bool:
        """Whether `hand_over` gave `weight` its gradient, and no backward pass has added to the sum since."""
        given, version = self.handed.get(weight, (None, None))
        return weight.grad is not None and weight.grad is given and version == version_of(main_grad)

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Run an optimizer's closure, hand the gradients over, and return the loss."""
        with torch.enable_grad():
            loss = closure()
        self.hand_over()
        return loss

    def after_step(self, *_: object) -> None:
        self.clear()
        for weight, _main_grad in self.trained():
            weight.grad = None

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.zero_others(*args, **kwargs)
        self.clear()

    def clear(self) -> None:
        for main_grad in self.main_grads:
            main_grad.zero_()
            setattr(main_grad, CLEAR, version_of(main_grad))
        self.handed.clear()
