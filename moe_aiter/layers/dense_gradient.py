"""A router's gradient as if every expert had computed every token, while each token visits its own few.

Yao et al. 2025 (DenseMixer), https://fengyao.notion.site/moe-posttraining: a straight-through estimator takes
the top-k for the identity in the backward pass.  With s the routing weights,

    out[t] = sum over the chosen e of s[t, e] * expert[e](x[t])       forward, unchanged
    ds[t, e] = <dout[t], expert[e](x[t])>                             backward, for all experts

The weight of an expert that was not chosen is scale * p[t, e], p the scores.  With `renormalize`, it is
divided by the sum of the chosen scores, a constant, as in the authors' code.  The other gradients are those
of the chosen experts alone.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..invariance import as_remembered, batch_invariant
from ..kernels.base.check import wide
from ..kernels.rows.route import EPSILON
from ..routing.plan import make_plan
from ..routing.router import Router, Routing


def with_dense_gradient(
    out: Tensor, x: Tensor, experts: nn.Module, routing: Routing, router: nn.Module
) -> Tensor:
    """Return `out`, what `experts` gave for `x`; its backward pass runs the other experts for the router.

    Tokens without any expert, at padding for example, have no others either.
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError("dense_router_gradient does not work under torch.compile")
    if getattr(experts, "dispatcher", None) is not None or hasattr(experts, "unshard"):
        raise NotImplementedError("dense_router_gradient does not work with experts that ranks share")
    if not isinstance(router, Router) or routing.scores is None:
        raise NotImplementedError(f"dense_router_gradient needs a Router, not {type(router).__name__}")
    ids, (num_tokens, num_experts) = routing.expert_ids, routing.logits.shape
    skipped = ids.new_zeros(num_tokens, num_experts + 1, dtype=torch.bool)
    skipped = skipped.scatter(1, ids.where(ids >= 0, num_experts).long(), True)[:, :-1]  # the chosen
    scores = routing.scores
    if router.renormalize and ids.shape[1] > 1:
        scores = scores / (scores.detach().where(skipped, 0).sum(1, keepdim=True) + EPSILON)
    skipped = skipped | (ids < 0).all(1, keepdim=True)
    others = (scores * router.scale).masked_fill(skipped, 0)  # (T, E)
    return DenseGradient.apply(out, others, x, skipped, experts)


class DenseGradient(torch.autograd.Function):
    """`out` itself, whose gradient also gives that of the weights of other experts."""

    apply: ClassVar[Callable[[Tensor, Tensor, Tensor, Tensor, nn.Module], Tensor]]

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, others: Tensor, x: Tensor, skipped: Tensor, experts: nn.Module
    ) -> Tensor:
        ctx.save_for_backward(x, skipped)
        ctx.batch_invariant = batch_invariant()
        ctx.experts, device = experts, x.device.type
        ctx.casts = not x.is_meta and torch.is_autocast_enabled(device)
        ctx.cast_dtype = torch.get_autocast_dtype(device) if ctx.casts else None
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    @as_remembered
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, skipped = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return dout, None, None, None, None
        dothers, ones = wide(dout).new_zeros(skipped.shape), wide(x).new_ones(len(x), 1)
        with torch.autocast(x.device.type, ctx.cast_dtype, enabled=ctx.casts):
            for e, skips in enumerate(skipped.unbind(1)):
                ids = torch.full_like(skips, e, dtype=torch.int32).masked_fill(skips, -1)
                y = ctx.experts(x, ones, make_plan(ids[:, None], skipped.shape[1]))  # (T, H), no gradient
                dothers[:, e] = (wide(y) * wide(dout)).sum(1)
        return dout, dothers, None, None, None
