"""`torch.ops.moe_aiter.mha_fwd`: attention in AITER's layout, with the logarithms of its softmax's sums.

It consists of torch's own ops, whose gradients, fakes and compiled forms are its own.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.base.check import check_flags
from ..op import compose
from .attention import choose, flash, flash_lacks
from .attention_call import Call, agree, band, heads_to_rows, rows_to_heads


class Options(NamedTuple):
    """In the order of the op's schema."""

    dropout_p: float
    softmax_scale: float
    is_causal: bool
    window_size_left: int
    window_size_right: int
    return_softmax_lse: bool
    return_dropout_randval: bool
    sink_size: int = 0


SCHEMA = (
    "mha_fwd(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool is_causal,"
    " int window_size_left, int window_size_right, bool return_softmax_lse, bool return_dropout_randval,"
    " int sink_size=0) -> (Tensor, Tensor, Tensor, Tensor)"
)


def mha_fwd(q: Tensor, k: Tensor, v: Tensor, *given) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`out, softmax_lse, S_dmask, rng_state` of q (B, Sq, Hq, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv).

    The `Options` follow.  out (B, Sq, Hq, Dv) is that of `attention`: the last query at the last key, windows
    of -1 for all, Hk dividing Hq, zeros where a query sees no key.  softmax_lse (B, Hq, Sq) float32, if asked
    for, else (0,): the logarithm of the sum of the exponentials of the scores, -inf without a key.  S_dmask
    (B, Hq, Sq, Sk) bool, if asked for, else (0,): the probabilities that dropout kept.  rng_state (2,) int64:
    seed and offset of the dropout in torch's flash kernel, zeros elsewhere.  out alone has a gradient.

    On a GPU torch's flash kernel where it can, unless S_dmask is asked for; else in single steps.

    Raises ValueError for shapes, windows, devices and a sink_size other than 0, TypeError for dtypes.
    """
    options = Options(*given)
    asked = "return_softmax_lse", "return_dropout_randval"
    check_flags(**{name: getattr(options, name) for name in asked})
    if options.sink_size != 0:
        raise ValueError(f"sink_size must be 0, not {options.sink_size}: torch's kernels have no sinks")
    heads_first = [t.transpose(1, 2) if t.dim() == 4 else t for t in (q, k, v)]
    window = options.window_size_left, options.window_size_right
    call, dead, _ = agree(
        *heads_first, None, options.is_causal, options.softmax_scale, options.dropout_p, window
    )
    kept, state = None, q.new_zeros(2, dtype=torch.int64)
    is_flash = q.is_cuda and choose(call, "auto") != "math" and not flash_lacks(call)
    if is_flash and not options.return_dropout_randval:
        out, lse, seeds = flash(call)
        if call.dropout_p:  # else torch leaves them as the memory was
            state = seeds.view(torch.int64)
    else:
        out, lse, kept = by_steps(call)
    out = F.pad(out, (0, 0, dead, 0)).transpose(1, 2)
    lse = F.pad(lse.detach(), (dead, 0), value=-torch.inf) if options.return_softmax_lse else lse.new_empty(0)
    if options.return_dropout_randval:
        # keys that no query sees were cut off at the start
        kept = F.pad(kept, (k.shape[1] - kept.shape[3], 0, dead, 0))
    else:
        kept = q.new_empty(0, dtype=torch.bool)
    return out, lse, kept, state


def by_steps(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """The result, the log of each softmax's sum, what dropout kept.  No head of k is repeated."""
    q, k, v = (t if t.dtype == torch.float64 else t.float() for t in call[:3])
    scores = rows_to_heads(heads_to_rows(q * call.scale, call.group) @ k.mT, call.group)
    if call.is_banded:
        scores = scores.masked_fill(~band(call), -torch.inf)
    lse = scores.logsumexp(3)
    p = (scores - lse[..., None]).exp()
    kept = torch.ones_like(p, dtype=torch.bool)
    if call.dropout_p:
        kept = torch.rand_like(p) >= call.dropout_p
        p = p * kept / (1 - call.dropout_p)
    out = rows_to_heads(heads_to_rows(p, call.group) @ v, call.group)
    return out.to(call.q.dtype), lse.float(), kept


compose(SCHEMA, mha_fwd)
