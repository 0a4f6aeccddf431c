"""Gradients of the experts that add up in float32, for a training loop that knows only `.grad`."""

import functools
from collections.abc import Callable

import torch
from torch import nn

from .experts import Experts
from .optimized import OptimizedMoELayer

WEIGHTS = {Experts: ("gate_up", "down"), OptimizedMoELayer: ("w1", "w2")}


def use_main_grad(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Give each trained weight of the experts in `model` a float32 `main_grad`, and hand it to `optimizer`.

    The backward pass of every micro-batch adds to it in the product that makes the gradient.  Autograd alone
    would write each gradient, then read it and the sum to write the sum; and round that to the weight's
    dtype.  Float64 weights have a float64 one.

    `optimizer.step()` takes the sum as `.grad`: itself where the weight has its dtype, else rounded to that
    of the weight, and afterwards sets it to 0, as `optimizer.zero_grad()` does, after a step that was skipped
    say.  So a loop stays as it was, but for what looks at gradients before: call what is returned, which
    hands over what there is, ahead of clip_grad_norm_, and of GradScaler's unscale_ or, without that, step.

        hand_over = use_main_grad(model, optimizer)
        for micro_batch in batch:
            loss(model(micro_batch)).backward()
        hand_over()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    What autograd itself has put into `.grad`, of a penalty on a weight say, is added.  A weight that is
    frozen later is left alone.  It is for weights on one device: what reduces gradients as autograd gives
    them, DistributedDataParallel and FSDP, would wait for these in vain.  Raises ValueError if `model` has no
    such weight in `optimizer`.
    """
    weights = trained_weights(model, optimizer)
    if not weights:
        raise ValueError("the model has no experts whose weights the optimizer trains: nothing to do")
    for weight in weights:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        weight.main_grad = torch.zeros_like(weight, dtype=dtype, requires_grad=False)
    return hook_up(optimizer, weights)


def hook_up(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter]) -> Callable[[], None]:
    """Have the step of `optimizer` take the main gradients, and it and zero_grad clear them."""
    handed = {}  # what each weight was given; it may have been clipped since

    def hand_over() -> None:
        for weight in filter(is_trained, weights):
            own = None if weight.grad is handed.get(weight) else weight.grad  # autograd's
            if own is not None and own is not weight.main_grad:
                weight.main_grad += own
            weight.grad = handed[weight] = weight.main_grad.to(weight.dtype)

    def clear(*_) -> None:
        for weight in weights:
            weight.main_grad.zero_()
        handed.clear()

    def before_step(optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            return args[:1], kwargs | {"closure": handing_over(closure, hand_over)}
        trained = filter(is_trained, weights)
        if any(weight.grad is None or weight.grad is not handed.get(weight) for weight in trained):
            hand_over()

    def after_step(*_) -> None:
        clear()
        for weight in filter(is_trained, weights):
            weight.grad = None

    zero_grad = optimizer.zero_grad

    @functools.wraps(zero_grad)
    def zero_all(*args, **kwargs) -> None:
        zero_grad(*args, **kwargs)
        clear()

    optimizer.zero_grad = zero_all
    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)
    return hand_over


def trained_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The weights of the experts in `model` that `optimizer` trains."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [
        weight
        for module in model.modules()
        for kind, names in WEIGHTS.items()
        if isinstance(module, kind)
        for weight in (getattr(module, name) for name in names)
        if weight.requires_grad and id(weight) in known
    ]


def is_trained(weight: nn.Parameter) -> bool:
    return weight.requires_grad


def handing_over(closure: Callable, hand_over: Callable[[], None]) -> Callable:
    """What an optimizer calls for the loss and the gradients."""

    def run():
        with torch.enable_grad():
            loss = closure()
        hand_over()
        return loss

    return run
