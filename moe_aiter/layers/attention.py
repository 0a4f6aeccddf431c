"""Attention by torch's kernels, with one meaning on all of them: masks, causality, windows, grouped heads.

Query i of Sq stands at the place of key i + Sk - Sq: the last query at the last key, as in decoding with a
cache ("lower right").  torch's own `is_causal` puts the first query at the first key.  A query that sees no
key gives zeros, with zero gradients.
"""

import logging

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from ..kernels.dense.attention_mask import zero_rows
from ..op import check_backend, is_plain, is_transformed, log
from ..switches import switches
from .attention_call import (
    Call,
    agree,
    aligned,
    decided,
    fitted,
    heads_to_rows,
    rows_to_heads,
    with_band,
)

BACKENDS = "auto", "flash", "sdpa", "math"
TORCHS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # what `torch._fused_sdp_choice` answers
HEAD_SIZE = 256  # the most that torch's flash kernel takes
logged: set[tuple] = set()
# kinds of calls that are torch's as they come -> is_causal, enable_gqa
simple: dict[tuple, tuple[bool, bool]] = {}
MOST = 4096  # of them that are remembered


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window: tuple[int, int] | None = None,
    backend: str = "auto",
) -> Tensor:
    """`softmax(q @ k.T * scale + mask) @ v` for each head: (B, Hq, Sq, Dv).

    Args:
        q: (B, Hq, Sq, D).
        k: (B, Hk, Sk, D); Hk divides Hq, and Hq / Hk heads of q share one of k and v, without a copy.
        v: (B, Hk, Sk, Dv).
        mask: (B, Sk), (B, Sq, Sk) or (B, Hq, Sq, Sk), where any axis may be 1.  bool keeps where it is True,
            integers where they are not 0, and floats are added to the scores.
        is_causal: a query sees keys up to its own place, which is that of the last key for the last query.
        scale: 1 / sqrt(D) unless given.
        dropout_p: the share of probabilities that become 0.
        window: (left, right): a query sees so many keys before and behind its place; -1 for all.  With
            `is_causal` none behind.
        backend: "flash", torch's FlashAttention kernel; "sdpa", F.scaled_dot_product_attention, which chooses
            one of its kernels; "math", a product, a softmax and a product; or "auto": math where fusion or
            tensor cores are switched off, flash for what it alone does without a mask of all pairs, and sdpa.

    `attention_backend` of the same arguments says which one, and so does the log at INFO.  Differentiable in
    q, k, v and a mask of floats; on every device, in every floating dtype, under autocast in its own, and
    under torch.compile(fullgraph=True).

    Raises ValueError for shapes, windows and devices that do not fit and for what the backend that is asked
    for cannot do, TypeError for dtypes; nothing is computed then.
    """
    window = tuple(window) if isinstance(window, list) else window  # a key is hashed
    key = None if mask is not None else kind_of(q, k, v, is_causal, dropout_p, window, backend)
    if key in simple:
        causal, shared = simple[key]
        return F.scaled_dot_product_attention(
            q, k, v, None, dropout_p, causal, scale=scale, enable_gqa=shared
        )
    call, dead, alive = agree(q, k, v, mask, is_causal, scale, dropout_p, window)
    chosen = choose(call, backend)
    report(chosen, call)
    remember(key, chosen, call, q)
    out = KERNELS[chosen](call)
    if alive is not None:
        out = without_dead(out, alive)
    return F.pad(out, (0, 0, dead, 0)) if dead else out


def attention_backend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window: tuple[int, int] | None = None,
    backend: str = "auto",
) -> str:
    """What `attention` of these would run: "flash", "math", or "sdpa: " and torch's choice of its kernels."""
    call, *_ = agree(q, k, v, mask, is_causal, scale, dropout_p, window)
    return name_of(choose(call, backend), call)


# what need not be looked at again: that takes the host as long as a small kernel takes the GPU


def kind_of(q: Tensor, k: Tensor, v: Tensor, *options) -> tuple | None:
    """All that the choice depends on; None where torch or the log wants to hear of each call."""
    if torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled() or log.isEnabledFor(logging.INFO):
        return None
    if not type(q) is type(k) is type(v) is Tensor:
        return None
    kinds = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
    strides = q.stride(), k.stride(), v.stride()
    start = (q.storage_offset() | k.storage_offset() | v.storage_offset()) % 8  # 16 bytes or more
    return *kinds, *strides, start, *options, switches.fusion, switches.tensor_cores


def remember(key: tuple | None, chosen: str, call: Call, q: Tensor) -> None:
    plain = chosen == "sdpa" and call.q is q and call.mask is None and for_torch(call) is call
    if key is not None and plain and (not call.is_banded or call.is_torchs_causal):
        if len(simple) >= MOST:
            simple.clear()
        simple[key] = call.is_torchs_causal, call.group > 1


def without_dead(out: Tensor, alive: Tensor) -> Tensor:
    """The result with zeros for queries without keys: in place where no gradient needs what was there."""
    ours = out.is_cuda and not out.requires_grad and not torch.compiler.is_compiling()
    if not ours or is_transformed() or not is_plain((out,)):
        return torch.where(alive, out, 0)
    zero_rows(out, alive)
    return out


# which kernel


def choose(call: Call, backend: str) -> str:
    check_backend(backend, BACKENDS)
    empty = not all(t.numel() for t in call[:3])
    if backend == "auto":
        if empty or not (switches.fusion and switches.tensor_cores):
            return "math"
        needs_pairs = call.is_banded and not call.is_torchs_causal  # sdpa would be given a mask of them
        return "flash" if needs_pairs and call.q.is_cuda and not flash_lacks(call) else "sdpa"
    if backend == "flash" and (lack := flash_lacks(call)):
        raise ValueError(f"backend 'flash' {lack}; 'auto' takes another where it has to")
    return "math" if empty else backend


def flash_lacks(call: Call) -> str | None:
    """What keeps torch's flash kernel from this call."""
    q, _, v, mask = call[:4]
    if q.device.type == "cpu":
        fits = torchs_choice(call) == 1
        return None if fits else "has on a CPU no dropout, no v of another head size, no gradient of a mask"
    if not q.is_cuda:
        return f"is not there on {q.device.type}"
    if mask is not None:
        return "takes no mask on a GPU"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16 on a GPU, not {q.dtype}"
    if q.shape[3] != v.shape[3] or q.shape[3] > HEAD_SIZE:
        return f"takes head sizes that are equal and at most {HEAD_SIZE}, not {q.shape[3]} and {v.shape[3]}"
    if torch.version.hip is None and torch.cuda.get_device_properties(q.device).major < 8:
        return "wants a GPU of compute capability 8.0 or newer"
    if torch.version.hip is not None and call.is_banded and not call.is_torchs_causal:
        return "has no windows and no lower-right causality on AMD's GPUs"
    return None


def name_of(chosen: str, call: Call) -> str:
    if chosen != "sdpa":
        return chosen
    answer = torchs_choice(for_torch(call))
    return f"sdpa: {TORCHS.get(answer, answer)}"


def torchs_choice(call: Call) -> int:
    return torch._fused_sdp_choice(*sdpa_arguments(call), **sdpa_options(call))


def report(chosen: str, call: Call) -> None:
    """Once for each kind of call."""
    if torch.compiler.is_compiling() or not log.isEnabledFor(logging.INFO):
        return
    shapes = tuple(call.q.shape), tuple(call.k.shape), call.q.dtype, call.q.device
    kind = *shapes, chosen, call.mask is None, call.left, call.right
    if kind not in logged:
        logged.add(kind)
        log.info("attention of q %s, k %s, %s on %s: %s", *shapes, name_of(chosen, call))


# the kernels


def run_flash(call: Call) -> Tensor:
    if not call.q.is_cuda:
        return run_sdpa(call)
    return flash(call)[0]


def flash(call: Call) -> tuple[Tensor, ...]:
    """torch's kernel of a GPU: the result, the log of each softmax's sum (B, Hq, Sq), dropout's seed.

    A private op, as F.scaled_dot_product_attention has no windows and returns no logs.
    """
    D = call.q.shape[3]
    q, k, v = (rows_of_16_bytes(t).transpose(1, 2) for t in call[:3])
    ragged = None, None, q.shape[1], k.shape[1]  # where sequences of several lengths end: there is one length
    with_mask = False  # of what dropout took, for debugging
    out, lse, rng_state, *_ = torch.ops.aten._flash_attention_forward(
        *(q, k, v), *ragged, call.dropout_p, call.is_causal, with_mask,
        scale=call.scale, window_size_left=call.left, window_size_right=call.right,
    )  # fmt: skip
    return out[..., :D].transpose(1, 2), lse, rng_state


def rows_of_16_bytes(t: Tensor) -> Tensor:
    """(B, H, S, D) in whole 16 bytes: with D filled up by zeros to a multiple of 8, and aligned."""
    short = -t.shape[3] % 8
    return F.pad(t, (0, short)) if short else aligned(t)


def run_sdpa(call: Call) -> Tensor:
    shared = for_torch(call)
    arguments = sdpa_arguments(shared)
    lower_right = shared.is_causal and shared.mask is None and not shared.is_torchs_causal
    if lower_right and call.q.is_cuda and not torch.compiler.is_compiling():  # torch cannot compile it
        arguments[3] = causal_lower_right(shared.q.shape[2], shared.k.shape[2])
    out = F.scaled_dot_product_attention(*arguments, **sdpa_options(shared))
    out = out if shared.group == call.group else rows_to_heads(out, call.group)
    return out if shared.v.shape[3] == call.v.shape[3] else out[..., : call.v.shape[3]]


def sdpa_arguments(call: Call) -> list:
    """q, k, v, mask, dropout and is_causal as torch's own attention takes them."""
    causal = call.mask is None and call.is_torchs_causal
    return [*call[:3], None if causal else with_band(call), call.dropout_p, causal]


def sdpa_options(call: Call) -> dict:
    return {"scale": call.scale, "enable_gqa": decided(call.group > 1)}


def for_torch(call: Call) -> Call:
    return fitted(share_rows(call))


def share_rows(call: Call) -> Call:
    """Queries whose heads share a head of k as more queries of one head, where torch would repeat k and v.

    On a GPU, and where a query's row and head make no difference to what it sees: all do in decoding.
    """
    mask = call.mask
    if call.group == 1 or not call.q.is_cuda or call.is_banded:
        return call
    if not flash_lacks(call) or (mask is not None and (mask.shape[1] > 1 or mask.shape[2] > 1)):
        return call
    if not torch.compiler.is_compiling() and TORCHS.get(torchs_choice(call)) != "math":
        return call  # cuDNN repeats none; torch.compile cannot ask
    return call._replace(q=heads_to_rows(call.q, call.group))


def run_math(call: Call) -> Tensor:
    q, k, v, mask, dropout_p, causal = sdpa_arguments(call)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    # private, but sdpa_kernel(MATH), its public door, is a switch of the whole process
    math = torch.ops.aten._scaled_dot_product_attention_math
    return math(q, k, v, mask, dropout_p, causal, None, **sdpa_options(call))[0]


KERNELS = {"flash": run_flash, "sdpa": run_sdpa, "math": run_math}
