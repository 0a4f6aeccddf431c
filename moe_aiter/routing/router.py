"""The router: which experts a token goes to, and with what weight."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..invariance import batch_invariant, refuse_batch
from ..kernels.base.check import (
    check_device,
    check_flags,
    check_float,
    check_parameter_dtype,
    check_positive,
    check_range,
    check_shape,
    check_size,
    check_sizes,
    checked,
    packed,
)
from ..kernels.base.gemm_row import GemmInputs
from ..kernels.dense.gemm import product_inside
from ..kernels.rows.route import choose_experts, decide
from ..kernels.rows.route_few import (
    RouteFewInputs,
    bind_few_logits,
    bind_split_logits,
    route_few_op,
    takes_few,
    takes_few_logits,
    takes_split_logits,
)
from ..kernels.rows.topk import topk
from ..op import binds, define_op, fill, gradients, is_unwatched, no_autocast, saved_tensors
from ..replay import ALONE, current_pass
from .choices import Choice
from .losses import check_mask
from .plan import RoutePlan
from .scores import FUSED, Scored, check_score, scores_of


class Routing(NamedTuple):
    """A router's decision for T tokens, each of which chose k of E experts.

    Everything but the ids is float32 (float64 if the logits are), whatever the model's dtype.
    """

    expert_ids: Tensor  # (T, k) int64, the best first
    routing_weights: Tensor  # (T, k) what each expert's output is multiplied by
    scores: Tensor | None  # (T, E) for losses: softmax or sigmoid of the logits, before any choice
    logits: Tensor  # (T, E)


def route(
    logits: Tensor, top_k: int, *, score: str = "softmax", renormalize: bool | None = None,
    scale: float = 1.0, need_scores: bool = True, choice: Choice | None = None,
    selection_bias: Tensor | None = None, mask: Tensor | None = None,
) -> Routing:  # fmt: skip
    """Choose `top_k` experts for each row of `logits` (T, E) and weigh them.  Ties go to the lower expert.

    score          scores, choice and weights                                 used by
    softmax        p = softmax(z) over E; top-k of p; weights p               Mixtral, Qwen-MoE, OLMoE
    topk_softmax   top-k of z; weights softmax over the k chosen z            gpt-oss
    sigmoid        p = sigmoid(z); top-k of p; weights p                      DeepSeek-V3, MiniMax-M2
    sqrt_softplus  p = sqrt(log(1 + exp(z))); top-k of p; weights p           DeepSeek-V4

    `renormalize` divides the weights of a token by their sum (plus 1e-20 where that can be 0), so that
    `softmax` becomes the same function as `topk_softmax`, whose weights always sum to 1.  None, the default,
    is True for top_k > 1 and False for top_k=1, where a renormalised weight is 1 and trains no router.
    `scale` multiplies the weights.  Without `need_scores` the result's `scores` may be None, which saves
    writing them: they are for losses.  `choice` takes the place of "top-k of p": see `GroupLimit`,
    `ExpertChoice`, `TopP`, `Sinkhorn`, `TokenRounding` and `Forced`.
    With `selection_bias` (E,) float experts are chosen by p + selection_bias, without a gradient, and weighed
    by p: DeepSeek-V3's balancing without a loss (arXiv 2408.15664).
    `mask` (T,), bool: tokens where it is False (padding) are not routed; their expert ids are -1, and their
    logits, which count as zeros, affect neither values nor gradients.
    All of it in float32, also under autocast; float64 stays float64.
    What activation checkpointing repeats chooses as it did at first: see replay.py.

    Raises ValueError for an unknown `score`, for `top_k` outside [1, E], for logits that are not (T, E), for
    `topk_softmax` with renormalize=False, which could change nothing, for renormalize=True or `topk_softmax`
    with top_k=1, which train no router, and for a `choice` that does not fit.
    """
    check_shape("logits", logits, "T", "E")
    check_sizes(top_k=top_k)
    check_float(logits=logits)
    check_router_choice(choice, top_k, logits.shape[1], "logits is (T, E={})", selection_bias is not None)
    check_mask(mask, "logits", logits)
    renormalize = check_score(score, renormalize, top_k, most_experts(choice, top_k, logits.shape[1]))
    logits = hide(logits.to(torch.promote_types(logits.dtype, torch.float32)), mask)
    if score in FUSED and choice is None and selection_bias is None:
        here = current_pass()  # in a repetition the experts of the first run: see replay.py
        scores, weights, expert_ids = choose_experts(
            logits, top_k, sigmoid=score == "sigmoid", renormalize=renormalize, scale=scale,
            need_scores=need_scores, fixed_ids=here.recall("experts", logits.shape[0], top_k),
        )  # fmt: skip
        here.keep("experts", expert_ids, logits.shape[1])
    else:
        check_flags(need_scores=need_scores)
        scored = Scored(logits, scores_of(logits, score), score, renormalize, scale)
        scores, weights, expert_ids = choose_by(scored, top_k, choice, selection_bias, mask)
    return Routing(without_padding(expert_ids, mask), weights, scores, logits)


def choose_by(
    scored: Scored, top_k: int, choice: Choice | None, selection_bias: Tensor | None, mask: Tensor | None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Scores, weights and experts; the latter by a choice or a selection bias."""
    ranked = rank(scored.scores, selection_bias)
    if choice is not None:
        ranked = scored.logits.detach() if choice.by_logits else ranked
        expert_ids, weights = choice.choose(scored, ranked, top_k, mask)
        return scored.scores, weights, expert_ids
    expert_ids = decide("experts", lambda: topk(ranked, top_k)[1], *ranked.shape)
    if scored.score == "sigmoid":  # one launch, and one for the gradient
        z, renormalize, scale = scored.logits, scored.renormalize, scored.scale
        return choose_experts(
            z, top_k, sigmoid=True, renormalize=renormalize, scale=scale, fixed_ids=expert_ids
        )
    return scored.scores, scored.weigh(expert_ids), expert_ids


def hide(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x` with zeros in the rows that `mask` hides, so that no NaN there enters a product or its gradient."""
    return x if mask is None else x.masked_fill(~mask[:, None], 0)


def without_padding(expert_ids: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return expert_ids
    check_mask(mask, "logits", expert_ids)
    return expert_ids.masked_fill(~mask[:, None], -1)


def rank(scores: Tensor, selection_bias: Tensor | None) -> Tensor:
    """Return the scores by which experts are chosen, without gradient."""
    if selection_bias is None:
        return scores.detach()
    check_shape("selection_bias", selection_bias, "E")
    check_float(selection_bias=selection_bias)
    check_device(logits=scores, selection_bias=selection_bias)
    what = "logits is (T, E={})", scores.shape[1]
    check_size(*what, "selection_bias is (E={},)", selection_bias.shape[0])
    return scores.detach() + selection_bias.detach()


def check_router_choice(choice: Choice | None, top_k: int, num_experts: int, what: str, biased: bool) -> None:
    if top_k > num_experts:
        raise ValueError(f"top_k is {top_k} but {what.format(num_experts)}")
    if choice is not None:
        if not isinstance(choice, Choice):
            raise TypeError(f"choice must be a Choice, as GroupLimit is one, not {type(choice).__name__}")
        choice.check(top_k, num_experts)
        choice.check_by_token()
        if biased and not choice.takes_bias:
            raise ValueError(f"a selection bias would change nothing for {choice}")


def most_experts(choice: Choice | None, top_k: int, num_experts: int) -> int:
    return top_k if choice is None else choice.most_experts(top_k, num_experts)


class LogitsInputs(NamedTuple):
    """The inputs of the op `router_logits`: x @ weight.T + bias (T, E), in float32."""

    x: Tensor  # (T, H)
    weight: Tensor  # (E, H)
    bias: Tensor | None  # (E,)


def accumulates(x: Tensor, weight: Tensor) -> bool:
    """Whether a 16-bit GEMM gives the float32 logits: its products are exact and its sums float32."""
    return x.is_cuda and x.dtype == weight.dtype and x.dtype in (torch.float16, torch.bfloat16)


MANY = 4096  # tokens for which the products of parts take less time than one of float32


def splits(x: Tensor, weight: Tensor) -> bool:
    """Whether 16-bit GEMMs multiply parts of a float32 weight: float32 has no matrix instructions."""
    kinds = x.is_cuda and x.dtype == torch.bfloat16 and weight.dtype == torch.float32
    return kinds and (batch_invariant() or x.shape[0] >= MANY)


def in_three(t: Tensor) -> list[Tensor]:
    """The float32 numbers of `t` as a sum of three of bfloat16, whose 24 bits are all that they have."""
    parts = []
    for _ in range(2):
        parts.append(t.to(torch.bfloat16))
        t = t - parts[-1]
    return [*parts, t.to(torch.bfloat16)]


def sum_of_three(t: Tensor, dim: int) -> Tensor:
    """The sum of products of `in_three`, which lie side by side along `dim`, the smallest first."""
    high, middle, low = t.chunk(3, dim)
    return high + (middle + low)


def new_logits(i: LogitsInputs) -> Tensor:
    check_shape("x", i.x, "T", "H")
    check_shape("weight", i.weight, "E", "H")
    check_float(x=i.x)
    check_float(weight=i.weight, bias=i.bias)
    check_device(**i._asdict())
    check_size("x is (T, H={})", i.x.shape[1], "the router's weight is (E, H={})", i.weight.shape[1])
    if i.bias is not None:
        check_shape("bias", i.bias, "E")
        check_size("bias is (E={},)", i.bias.shape[0], "the router's weight is (E={}, H)", i.weight.shape[0])
    dtype = torch.promote_types(torch.promote_types(i.x.dtype, i.weight.dtype), torch.float32)
    return i.x.new_empty(i.x.shape[0], i.weight.shape[0], dtype=dtype)


@binds
def bind_logits(i: LogitsInputs) -> Callable[[Tensor, LogitsInputs], None]:
    # neither way asks the op `gemm`; who registers a kernel for `router_logits` replaces both
    if splits(i.x, i.weight) and takes_split_logits(i):
        split = bind_split_logits(i)

        def fill_split(out: Tensor, i: LogitsInputs) -> None:
            split(out, i)
            if i.bias is not None:
                out += i.bias

        return fill_split
    return bind_few_logits(i) if takes_few_logits(i) and not batch_invariant() else fill_logits


def fill_logits(out: Tensor, i: LogitsInputs) -> None:
    if splits(i.x, i.weight):
        parts = i._replace(weight=torch.cat(in_three(i.weight)), bias=None)
        fill_logits(products := out.new_empty(out.shape[0], 3 * out.shape[1]), parts)
        out.copy_(sum_of_three(products, 1))
    elif batch_invariant():
        same = accumulates(i.x, i.weight)
        x, w = (i.x, i.weight) if same else (i.x.to(out.dtype), i.weight.to(out.dtype))
        inputs = GemmInputs(x[None], w.T[None], i.bias, None, "", 1.0, 0.0, out.dtype, False)
        return fill("inner_gemm", (out[None], out.new_empty(0)), inputs)
    elif accumulates(i.x, i.weight):
        x, w = packed(i.x, i.weight.T)
        torch.mm(x, w, out_dtype=out.dtype, out=out)
    else:
        x, w = i.x.to(out.dtype), i.weight.to(out.dtype).T
        torch.mm(*(packed(x, w) if x.is_cuda else (x, w)), out=out)
    if i.bias is not None:
        out += i.bias


def save_logits(ctx: Any, i: LogitsInputs, output: Tensor) -> None:
    ctx.x_shape, ctx.x_dtype, ctx.accumulates = i.x.shape, i.x.dtype, accumulates(i.x, i.weight)
    ctx.splits = splits(i.x, i.weight)
    ctx.save_for_backward(i.x if ctx.needs_input_grad[1] else None, i.weight)
    ctx.bias_dtype = None if i.bias is None else i.bias.dtype


def backward_logits(ctx: Any, dlogits: Tensor, dtokens: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """If the logits came from a 16-bit GEMM, dx and dweight do too, as for an nn.Linear of that dtype:
    dlogits is rounded to 16 bits first, the sums are float32.  dx is added to `dtokens`.

    Of products of parts, dweight has all; dx, of 16 bits, has those that matter to it.  They have no second
    derivative in torch, so where a graph of the gradient is made, products are of float32."""
    x, weight = saved_tensors(ctx)
    dtype = weight.dtype if ctx.accumulates else dlogits.dtype
    needs, dx, dweight, dbias = LogitsInputs(*ctx.needs_input_grad), None, None, None
    with no_autocast(weight):
        if ctx.splits and not torch.is_grad_enabled():
            high, middle, low = in_three(dlogits)
            if needs.x:
                above, below, _ = in_three(weight)
                left, right = torch.cat((high, middle, high), 1), torch.cat((above, above, below))
                dx = add_logits_product(dtokens, left, right, ctx.x_dtype)
            if needs.weight:
                parts, x = packed(torch.cat((high, middle, low), 1).T, x)
                dweight = sum_of_three(torch.mm(parts, x, out_dtype=torch.float32), 0)
        else:
            rounded = dlogits.to(dtype)
            if needs.x:
                dx = add_logits_product(dtokens, rounded, weight.to(dtype), ctx.x_dtype)
            if needs.weight:
                dweight = (rounded.T @ x.to(dtype)).to(weight.dtype)
    if needs.bias:
        dbias = dlogits.sum(0).to(ctx.bias_dtype)
    return gradients(LogitsInputs, x=dx, weight=dweight, bias=dbias)


def add_logits_product(out: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return out + a @ b, in the memory of `out` if one product can do that unnoticed."""
    if batch_invariant():
        product = product_inside(a, b, dtype)
    elif out is not None and a.dtype == out.dtype and is_unwatched(out):
        return out.addmm_(a, b)
    else:
        product = (a @ b).to(dtype)
    return product if out is None else out + product


router_logits = define_op(
    "router_logits", LogitsInputs, new=new_logits, torch=bind_logits, save=save_logits,
    backward=backward_logits,
)  # fmt: skip


class LogitsAndTokens(torch.autograd.Function):
    """The logits of tokens, and the tokens for the experts: a product adds up the two gradients of x.

    Autograd alone would add them in a launch of its own, which reads and writes all of them once more.
    The gradient that the experts give is overwritten, so it must be theirs alone.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = router_logits(x, weight, bias)
        save_logits(ctx, LogitsInputs(x, weight, bias), logits)
        ctx.set_materialize_grads(False)
        return logits, x.detach()  # no view for autograd: x may change where backward does not need it

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor | None, dtokens: Tensor | None) -> tuple[Tensor | None, ...]:
        if dlogits is None:
            return dtokens, None, None
        return backward_logits(ctx, dlogits, dtokens)


# without what is for torch.func, which `is_private` has ruled out
logits_and_tokens: Any = super(torch.autograd.Function, LogitsAndTokens).apply


class Router(nn.Module):
    """A linear map to one logit per expert, then `route`.

    Parameters `weight` (E, H) and, with bias=True, `bias` (E,), initialised as nn.Linear does.
    The logits are float32 for any dtype of `x` and `weight`, which may differ, and also under autocast.
    Two float16 or two bfloat16 tensors on a GPU are not upcast: a 16-bit GEMM sums in float32 and
    stores float32, the same numbers for half of the traffic.  A float32 weight of many bfloat16 tokens
    becomes three of bfloat16 for such GEMMs, with the precision of float32.  `score`, `renormalize`,
    `scale` and `choice` are those of `route`.

    With selection_bias=True there is a buffer `selection_bias` (E,), zeros at first and float32 whatever the
    module is cast to, by which `route` chooses; `balance_step` updates it.

    `jitter` above 0 multiplies, in training mode, each number that the router sees by one drawn from
    [1 - jitter, 1 + jitter] (Fedus et al. 2021, arXiv 2101.03961); the experts see x itself.
    """

    selection_bias: Tensor | None

    @checked
    def __init__(
        self, hidden: int, num_experts: int, top_k: int, *, score: str = "softmax",
        renormalize: bool | None = None, scale: float = 1.0, choice: Choice | None = None,
        selection_bias: bool = False, jitter: float = 0.0, bias: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        check_parameter_dtype(dtype)
        check_sizes(hidden=hidden, num_experts=num_experts, top_k=top_k)
        check_positive(scale=scale)
        check_router_choice(choice, top_k, num_experts, "num_experts is {}", selection_bias)
        renormalize = check_score(score, renormalize, top_k, most_experts(choice, top_k, num_experts))
        self.hidden, self.num_experts, self.top_k = hidden, num_experts, top_k
        self.score, self.renormalize, self.scale = score, renormalize, scale
        self.choice, self.jitter = choice, jitter
        check_range({"jitter": jitter}, lambda share: 0 <= share < 1, "from 0 to below 1")
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if bias else None
        chosen_by = torch.zeros(num_experts, device=device, dtype=torch.float32) if selection_bias else None
        self.register_buffer("selection_bias", chosen_by)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.hidden**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)
        if self.selection_bias is not None:
            nn.init.zeros_(self.selection_bias)

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        if name == "selection_bias" and isinstance(value, Tensor):  # load_state_dict(assign=True) comes here
            value = value.to(torch.float32)  # steps of 0.001 are lost in 16 bits
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        before = self.selection_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
        after = self.selection_bias
        if before is not None and after is not None and after.dtype != torch.float32:
            self.selection_bias = before.to(after.device)
        return self

    def forward(
        self, x: Tensor, *, need_scores: bool = True, mask: Tensor | None = None,
        by: Callable[[Tensor], Routing] | None = None,
    ) -> Routing:  # fmt: skip
        """Route each row of `x` (T, H); `need_scores` and `mask` as for `route`.

        `by` routes the logits (T, E), those of `x` without noise, in place of the router's choice.
        """
        check_shape("x", x, "T", "H")
        check_mask(mask, "x", x, "H")
        x = hide(x, mask)
        if by is not None:
            routing = by(router_logits(x, self.weight, self.bias))
            return routing._replace(expert_ids=without_padding(routing.expert_ids, mask))
        if self.adds_noise():
            x = self.with_noise(x)
        return self.choose(router_logits(x, self.weight, self.bias), need_scores, mask)

    def adds_noise(self) -> bool:
        noisy = self.jitter > 0 and self.training
        if noisy:
            refuse_batch(f"jitter is {self.jitter}, which is random noise")
        return noisy

    def with_noise(self, x: Tensor) -> Tensor:
        noise = torch.empty_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        return (x * noise.uniform_(1 - self.jitter, 1 + self.jitter)).to(x.dtype)

    def choose(self, logits: Tensor, need_scores: bool, mask: Tensor | None = None) -> Routing:
        return route(
            logits, self.top_k, score=self.score, renormalize=self.renormalize, scale=self.scale,
            need_scores=need_scores, choice=self.choice, selection_bias=self.selection_bias, mask=mask,
        )  # fmt: skip

    def pass_on(self, x: Tensor, need_scores: bool, mask: Tensor | None) -> tuple[Routing, Tensor]:
        """Return what `forward` does, and `x` for the experts: see `LogitsAndTokens`."""
        logits, x = logits_and_tokens(hide(x, mask), self.weight, self.bias)
        return self.choose(logits, need_scores, mask), x

    def plan_few(self, x: Tensor) -> tuple[Routing, RoutePlan | None]:
        """Return what `forward` does for tokens that need no gradient and no scores, and what `make_plan`
        returns for them, if one launch makes both."""
        logits = router_logits(x, self.weight, self.bias)
        fused = self.score in FUSED and self.choice is None and current_pass() is ALONE
        if fused and (self.selection_bias is None or self.score == "sigmoid"):
            renormalize = check_score(self.score, self.renormalize, self.top_k)
            how = self.top_k, self.score == "sigmoid", renormalize, self.scale
            i = RouteFewInputs(logits, self.selection_bias, *how)
            if takes_few(i):
                weights, ids, *plan = route_few_op(*i)
                return Routing(ids, weights, None, logits), RoutePlan(*plan)
        return self.choose(logits, need_scores=False), None

    def extra_repr(self) -> str:
        text = f"{self.hidden}, num_experts={self.num_experts}, top_k={self.top_k}, score={self.score!r}"
        text = f"{text}, renormalize={self.renormalize}, scale={self.scale}"
        text = text if self.choice is None else f"{text}, choice={self.choice}"
        text = text if self.selection_bias is None else f"{text}, selection_bias=True"
        text = f"{text}, jitter={self.jitter}" if self.jitter else text
        return f"{text}, bias={self.bias is not None}"
