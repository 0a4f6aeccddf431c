"""What every `MoE` of a model is told between steps: its balance and the scale of its losses."""

import torch
from torch import Tensor, nn

from ..kernels.base.check import check_group, check_not_negative, checked
from ..routing.balance import check_rule, selection_bias_step, sum_over_ranks
from .moe import MoE


@torch.no_grad()
@checked
def balance_step(
    model: nn.Module, rate: float = 1e-3, *, rule: str = "sign", zero_mean: bool = False, group=None
) -> None:
    """Move the selection bias of every `MoE` in `model` by its counted choices, and count from 0 again.

    To be called once per optimizer step, whatever the number of micro-batches:

        optimizer.register_step_post_hook(lambda *_: balance_step(model))

    With c[e] the choices of expert e since the last call, summed over the ranks of the process group `group`
    if given (one all-reduce for all layers), and v[e] = mean(c) - c[e]: bias[e] += rate * sign(v[e]), as
    DeepSeek-V3 does (arXiv 2408.15664), or with rule="proportional" bias[e] += rate * v[e] / mean(c).
    `zero_mean` takes the mean of these steps off them.  No synchronisation with the host.

    A layer with a `global_balance_coef` and no bias begins to count anew.

    Under DistributedDataParallel use broadcast_buffers=False, or the counts of rank 0 replace the others'.
    Raises ValueError for a model without such a layer, an unknown rule and a rate that is not above 0.
    """
    check_rule(rate, rule)
    check_group(group=group)
    layers = [m for m in model.modules() if isinstance(m, MoE) and m.load is not None]
    if not layers:
        raise ValueError(
            "the model has no MoE with selection_bias=True or a global_balance_coef: nothing to do"
        )
    loads = [layer.load for layer in layers]
    if group is not None:
        loads = sum_over_ranks(loads, group)
    for layer, load in zip(layers, loads, strict=True):
        bias = getattr(layer.router, "selection_bias", None)
        if bias is not None:
            bias += selection_bias_step(bias, load.to(bias.device), rate, rule, zero_mean)
        layer.load.zero_()


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
    axes, a number that is negative or not finite, and a model without `MoE`.
    """
    if isinstance(scale, Tensor):
        if scale.dim():
            raise ValueError(f"scale must be a scalar, but it has shape {tuple(scale.shape)}")
    else:
        check_not_negative(scale=scale)
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not layers:
        raise ValueError("the model has no MoE: there is no loss to scale")
    for layer in layers:
        # .data: a backward pass may have saved the scalar, and reads the newest value
        if isinstance(scale, Tensor):
            layer.loss_scale.data.copy_(scale)
        else:
            layer.loss_scale.data.fill_(scale)
