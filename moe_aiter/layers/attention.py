"""Attention by torch's kernels, with one meaning on all of them: masks, causality, windows, grouped heads.

Query i of Sq stands at the place of key i + Sk - Sq: the last query at the last key, as in decoding with a
cache ("lower right").  torch's own `is_causal` puts the first query at the first key.  A query that sees no
key gives zeros, with zero gradients.

`torch.ops.moe_aiter.mha_fwd` is the same attention in AITER's layout, with the logarithms of the softmax's
sums.  It consists of torch's own ops, whose gradients, fakes and compiled forms are its own.
"""

import logging
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.base.check import (
    cast_as_linear,
    check_axes,
    check_device,
    check_finite,
    check_flags,
    check_float,
    check_range,
    check_tensor,
)
from ..kernels.dense.attention_mask import lowest, mask_bias, zero_rows
from ..op import INTEGERS, check_backend, compose, is_plain, is_transformed, log, no_autocast
from ..private_api import any_autocast, attention_choice, attention_flash, attention_math
from ..switches import switches

BACKENDS = "auto", "flash", "sdpa", "math"
TORCHS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # what `torch._fused_sdp_choice` answers
HEAD_SIZE = 256  # the most that torch's flash kernel takes
logged: set[tuple[Any, ...]] = set()
# kinds of calls that are torch's as they come -> is_causal, enable_gqa
simple: dict[tuple[Any, ...], tuple[bool, bool]] = {}
MOST = 4096  # of them that are remembered
BYTES = 16  # what fused kernels load at a time
NARROWEST = 16  # the head size below which cuDNN's 16-bit kernels are not to be relied on
HALVES = torch.float16, torch.bfloat16


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: bool = False,
    scale: float | None = None, dropout_p: float = 0.0, window: tuple[int, int] | None = None,
    backend: str = "auto",
) -> Tensor:  # fmt: skip
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
    key = None if mask is not None else key_of_call(q, k, v, is_causal, dropout_p, window, backend)
    if key in simple:
        check_attention_options(is_causal, scale, dropout_p, window)  # a key holds 1 for True
        if scale is None or scale > 0:
            causal, shared = simple[key]
            return F.scaled_dot_product_attention(
                q, k, v, None, dropout_p, causal, scale=scale, enable_gqa=shared
            )
    call, dead, alive = agree(q, k, v, mask, is_causal, scale, dropout_p, window)
    chosen = choose_kernel(call, backend)
    report(chosen, call)
    remember(key, chosen, call, q)
    with no_autocast(call.q):  # which would lower what a kernel computes in float32
        out = KERNELS[chosen](call)
    if alive is not None:
        out = without_dead(out, alive)
    return F.pad(out, (0, 0, dead, 0)) if dead else out


def attention_backend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: bool = False,
    scale: float | None = None, dropout_p: float = 0.0, window: tuple[int, int] | None = None,
    backend: str = "auto",
) -> str:  # fmt: skip
    """Return what `attention` would run for these: "flash", "math", or "sdpa: " and torch's chosen kernel."""
    call, *_ = agree(q, k, v, mask, is_causal, scale, dropout_p, window)
    return name_of(choose_kernel(call, backend), call)


# the call: inputs that are checked, without the queries and keys that see nothing


class Call(NamedTuple):
    """The checked arguments of a kernel."""

    q: Tensor  # (B, Hq, Sq, D)
    k: Tensor  # (B, Hk, Sk, D)
    v: Tensor  # (B, Hk, Sk, Dv)
    mask: Tensor | None  # of bool or the dtype of q, each axis that of (B, Hq, Sq, Sk) or 1
    left: int  # how many keys before its place a query sees, and
    right: int  # how many behind it; -1: all
    dropout_p: float
    scale: float

    @property
    def is_banded(self) -> bool:
        return self.left >= 0 or self.right >= 0

    @property
    def is_causal(self) -> bool:
        return self.left < 0 and self.right == 0

    @property
    def is_torchs_causal(self) -> bool:
        """Whether torch's causal mask (first query at first key) equals ours (last query at last key)."""
        return concrete_bool(self.is_causal and self.q.shape[2] == self.k.shape[2])

    @property
    def group(self) -> int:
        """Heads of q that share a head of k."""
        return self.q.shape[1] // self.k.shape[1]


def agree(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool,
    scale: float | None, dropout_p: float, window: tuple[int, int] | None,
) -> tuple[Call, int, Tensor | None]:  # fmt: skip
    """The call without what no query sees, how many queries at the start see nothing, and which others."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, t)
    q, k, v = cast_as_linear(q, k, v)
    check_qkv(q, k, v)
    check_attention_options(is_causal, scale, dropout_p, window)
    Sq, Sk = q.shape[2], k.shape[2]
    mask = None if mask is None else shaped_mask(mask, q, Sk)
    left, right = seen(is_causal, window)
    # the first queries see nothing where there are fewer keys, and the first keys are behind all windows
    dead = min(max(Sq - Sk - right, 0), Sq) if right >= 0 else 0
    unseen = max(Sk - Sq - left, 0) if left >= 0 else 0
    if dead or unseen:
        q, k, v = q[:, :, dead:], k[:, :, unseen:], v[:, :, unseen:]
        if mask is not None:
            mask = mask[:, :, dead if mask.shape[2] > 1 else 0 :, unseen if mask.shape[3] > 1 else 0 :]
    left = -1 if left >= k.shape[2] - 1 else left
    right = -1 if right >= q.shape[2] - 1 else right
    scale = max(q.shape[3], 1) ** -0.5 if scale is None else scale
    if scale <= 0:  # torch's fused kernels hide keys by -inf and find the largest score before they scale
        q, scale = (-q, -scale) if scale < 0 else (q * scale, 1.0)
    call = Call(q, k, v, mask, left, right, dropout_p, scale)
    if mask is None:
        return call, dead, None
    mask = with_band(call)
    assert mask is not None  # as that of the call
    # along keys before it is computed with: torch would give a bias a stride of 0 there, and then refuse it
    mask = mask.expand(*mask.shape[:3], k.shape[2])
    mask, alive = with_all_or_some(mask, q)
    return call._replace(mask=mask, left=-1, right=-1), dead, alive


def with_all_or_some(mask: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The mask, and which queries it leaves a key.

    One without is given all of them, and its result is dropped: no kernel divides 0 by 0.
    """
    if mask.dtype == torch.bool:
        if q.is_cuda and not (torch.compiler.is_compiling() or is_transformed()):
            return mask_bias(mask, q.dtype)  # in one launch; a compiler fuses the steps below
        alive = mask.any(3, keepdim=True)
        return mask | ~alive, alive
    hidden = mask == -torch.inf
    alive = ~hidden.all(3, keepdim=True)
    if q.is_cuda:
        mask = mask.masked_fill(hidden, lowest(q.dtype))
    return mask.masked_fill(~alive, 0), alive


def check_attention_options(
    is_causal: bool, scale: float | None, dropout_p: float, window: tuple[int, int] | None
) -> None:
    check_flags(is_causal=is_causal)
    if scale is not None:
        check_finite(scale=scale)
    check_range({"dropout_p": dropout_p}, lambda p: 0 <= p < 1, "from 0 to below 1")
    if window is not None and (not isinstance(window, (tuple, list)) or len(window) != 2):
        raise ValueError(f"window is {window}: it takes how many keys before and how many behind")
    if not all(isinstance(n, INTEGERS) and not isinstance(n, bool) for n in window or ()):
        raise TypeError(f"window is {window}: it takes two ints")
    if window is not None and min(window) < -1:
        raise ValueError(f"window is {window}: it takes how many keys before and behind, or -1 for all")


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_axes(q=(q, "B, Hq, Sq, D"), k=(k, "B, Hk, Sk, D"), v=(v, "B, Hk, Sk, Dv"))
    check_float(q=q, k=k, v=v)
    check_device(q=q, k=k, v=v)
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, which {k.shape[1]} of k do not divide")


def shaped_mask(mask: Tensor, q: Tensor, Sk: int) -> Tensor:
    """A mask of four axes, of bool or the dtype of q."""
    B, H, Sq, _ = q.shape
    axes = {2: ("B", "Sk"), 3: ("B", "Sq", "Sk"), 4: ("B", "Hq", "Sq", "Sk")}
    if not isinstance(mask, Tensor) or mask.dim() not in axes:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask must be a tensor (B, Sk), (B, Sq, Sk) or (B, Hq, Sq, Sk), but it is {got}")
    check_device(q=q, mask=mask)
    if mask.dtype.is_complex:
        raise TypeError(f"mask must be of bool, integers or floats, not {mask.dtype}")
    sizes = {"B": B, "Hq": H, "Sq": Sq, "Sk": Sk}
    wanted = axes[mask.dim()]
    if any(size not in (1, sizes[axis]) for size, axis in zip(mask.shape, wanted, strict=True)):
        expected = ", ".join(f"{axis}={sizes[axis]}" for axis in wanted)
        raise ValueError(f"mask is {tuple(mask.shape)} but q and k are ({expected})")
    if mask.dtype != torch.bool:
        mask = mask.to(q.dtype) if mask.is_floating_point() else mask != 0
    if mask.dim() == 2:
        return mask[:, None, None, :]
    return mask[:, None] if mask.dim() == 3 else mask


def seen(is_causal: bool, window: tuple[int, int] | None) -> tuple[int, int]:
    left, right = (-1, -1) if window is None else window
    return left, 0 if is_causal else right


def band(call: Call) -> Tensor:
    """(Sq, Sk) bool: which keys the windows show."""
    Sq, Sk = call.q.shape[2], call.k.shape[2]
    key = torch.arange(Sk, device=call.q.device)
    place = torch.arange(Sk - Sq, Sk, device=call.q.device)[:, None]
    shown = place - key <= call.left if call.left >= 0 else place.new_ones((), dtype=torch.bool)
    return shown & (key - place <= call.right) if call.right >= 0 else shown


def with_band(call: Call) -> Tensor | None:
    """The mask with the windows in it."""
    if not call.is_banded:
        return call.mask
    shown = band(call)[None, None]
    if call.mask is None:
        return shown
    return call.mask & shown if call.mask.dtype == torch.bool else call.mask.masked_fill(~shown, -torch.inf)


def fitted(call: Call) -> Call:
    """Return the call in a form that fused kernels of a GPU can read; not all of them check this.

    Rows begin at multiples of 16 bytes: those of a part of a wider tensor need not.  Heads in 16 bits are of
    NARROWEST at least, filled up by zeros.
    """
    if not call.q.is_cuda:
        return call
    q, k, v = call[:3]
    if q.dtype in HALVES and min(q.shape[3], v.shape[3]) < NARROWEST:
        q, k, v = (F.pad(t, (0, max(NARROWEST - t.shape[3], 0))) for t in (q, k, v))
    q, k, v = (with_aligned_rows(t) for t in (q, k, v))
    same = q is call.q and k is call.k and v is call.v
    return call if same else call._replace(q=q, k=k, v=v)


def with_aligned_rows(t: Tensor) -> Tensor:
    """(B, H, S, D), or a copy whose rows begin at multiples of 16 bytes, if D lets them."""
    if has_aligned_rows(t) or t.shape[3] * t.itemsize % BYTES:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def has_aligned_rows(t: Tensor) -> bool:
    # torch.compile cannot ask for the offset; of a part of whole 16 bytes it is seldom another
    start = 0 if torch.compiler.is_compiling() else t.storage_offset()
    steps = [step for step, size in zip(t.stride()[:3], t.shape, strict=False) if size > 1]
    return t.stride(3) == 1 and not any(n * t.itemsize % BYTES for n in (start, *steps))


def concrete_bool(flag: bool) -> bool:
    """A bool also of sizes that torch.compile holds for dynamic, whose comparisons torch's kernels refuse."""
    if flag:  # noqa: SIM103  a branch is what makes the compiler decide, and bool() does not
        return True
    return False


def heads_to_rows(t: Tensor, group: int) -> Tensor:
    """(B, Hq, S, n) of heads that share a head of k: (B, Hk, group * S, n)."""
    return torch.unflatten(t, 1, (t.shape[1] // group, group)).flatten(2, 3)


def rows_to_heads(t: Tensor, group: int) -> Tensor:
    """The way back."""
    return torch.unflatten(t, 2, (group, t.shape[2] // group)).flatten(1, 2)


# checks that passed once, cached: they take the host as long as a small kernel takes the GPU


def key_of_call(q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[Any, ...] | None:
    """All that the choice depends on; None if torch or the log must see each call."""
    if torch.compiler.is_compiling() or any_autocast() or log.isEnabledFor(logging.INFO):
        return None
    if not type(q) is type(k) is type(v) is Tensor:
        return None
    kinds = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
    strides = q.stride(), k.stride(), v.stride()
    offsets = q.storage_offset() | k.storage_offset() | v.storage_offset()  # type: ignore[operator]  # ints
    start = offsets % 8  # 16 bytes or more
    return *kinds, *strides, start, *options, switches.fusion, switches.tensor_cores


def remember(key: tuple[Any, ...] | None, chosen: str, call: Call, q: Tensor) -> None:
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


def choose_kernel(call: Call, backend: str) -> str:
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
    """Return why torch's flash kernel cannot compute this call, or None."""
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
        return "needs a GPU of compute capability 8.0 or newer"
    if torch.version.hip is not None and call.is_banded and not call.is_torchs_causal:
        return "has no windows and no lower-right causality on AMD's GPUs"
    return None


def name_of(chosen: str, call: Call) -> str:
    if chosen != "sdpa":
        return chosen
    answer = torchs_choice(for_torch(call))
    return f"sdpa: {TORCHS.get(answer, answer)}"


def torchs_choice(call: Call) -> int:
    return attention_choice(*sdpa_arguments(call), **sdpa_options(call))


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
    out, lse, rng_state, *_ = attention_flash(
        *(q, k, v), *ragged, call.dropout_p, call.is_causal, with_mask,
        scale=call.scale, window_size_left=call.left, window_size_right=call.right,
    )  # fmt: skip
    return out[..., :D].transpose(1, 2), lse, rng_state


def rows_of_16_bytes(t: Tensor) -> Tensor:
    """(B, H, S, D) in whole 16 bytes: with D filled up by zeros to a multiple of 8, and aligned."""
    short = -t.shape[3] % 8
    return F.pad(t, (0, short)) if short else with_aligned_rows(t)


def run_sdpa(call: Call) -> Tensor:
    shared = for_torch(call)
    arguments = sdpa_arguments(shared)
    lower_right = shared.is_causal and shared.mask is None and not shared.is_torchs_causal
    if lower_right and call.q.is_cuda and not torch.compiler.is_compiling():  # torch cannot compile it
        from torch.nn.attention.bias import causal_lower_right  # which imports torch's compiler

        arguments[3] = causal_lower_right(shared.q.shape[2], shared.k.shape[2])
    out = F.scaled_dot_product_attention(*arguments, **sdpa_options(shared))
    out = out if shared.group == call.group else rows_to_heads(out, call.group)
    return out if shared.v.shape[3] == call.v.shape[3] else out[..., : call.v.shape[3]]


def sdpa_arguments(call: Call) -> list[Any]:
    """q, k, v, mask, dropout and is_causal as torch's own attention takes them."""
    causal = call.mask is None and call.is_torchs_causal
    return [*call[:3], None if causal else with_band(call), call.dropout_p, causal]


def sdpa_options(call: Call) -> dict[str, Any]:
    return {"scale": call.scale, "enable_gqa": concrete_bool(call.group > 1)}


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
    return attention_math(q, k, v, mask, dropout_p, causal, None, **sdpa_options(call))[0]


KERNELS = {"flash": run_flash, "sdpa": run_sdpa, "math": run_math}


# AITER's op


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


def mha_fwd(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`out, softmax_lse, S_dmask, rng_state` of q (B, Sq, Hq, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv).

    The `Options` follow.  out (B, Sq, Hq, Dv) is that of `attention`: the last query at the last key, windows
    of -1 for all, Hk dividing Hq, zeros where a query sees no key.  softmax_lse (B, Hq, Sq) float32, if asked
    for, else (0,): the logarithm of the sum of the exponentials of the scores, -inf without a key.  S_dmask
    (B, Hq, Sq, Sk) bool, if asked for, else (0,): the probabilities that dropout kept.  rng_state (2,) int64:
    seed and offset of the dropout in torch's flash kernel, zeros elsewhere.  out alone has a gradient.

    On a GPU torch's flash kernel where it can, unless S_dmask is asked for; else in single steps.

    Raises ValueError for shapes, windows, devices and a sink_size other than 0, TypeError for dtypes.
    """
    i = Options(*options)
    asked = "return_softmax_lse", "return_dropout_randval"
    check_flags(**{name: getattr(i, name) for name in asked})
    if i.sink_size != 0:
        raise ValueError(f"sink_size must be 0, not {i.sink_size}: torch's kernels have no sinks")
    qh, kh, vh = (t.transpose(1, 2) if t.dim() == 4 else t for t in (q, k, v))
    window = i.window_size_left, i.window_size_right
    call, dead, _ = agree(qh, kh, vh, None, i.is_causal, i.softmax_scale, i.dropout_p, window)
    kept, state = q.new_empty(0, dtype=torch.bool), q.new_zeros(2, dtype=torch.int64)
    is_flash = q.is_cuda and choose_kernel(call, "auto") != "math" and not flash_lacks(call)
    if is_flash and not i.return_dropout_randval:
        out, lse, seeds = flash(call)
        if call.dropout_p:  # else torch leaves them as the memory was
            state = seeds.view(torch.int64)
    else:
        out, lse, of_call = by_steps(call)
        if i.return_dropout_randval:
            # keys that no query sees were cut off at the start
            kept = F.pad(of_call, (k.shape[1] - of_call.shape[3], 0, dead, 0))
    out = F.pad(out, (0, 0, dead, 0)).transpose(1, 2)
    lse = F.pad(lse.detach(), (dead, 0), value=-torch.inf) if i.return_softmax_lse else lse.new_empty(0)
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
