"""What is asked of attention: its inputs, checked, without the queries and keys that see nothing."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.base.check import check_device, check_flags, check_float, check_real, check_shape, check_size
from ..kernels.dense.attention_mask import lowest, mask_bias
from ..op import INTEGERS, is_transformed

BYTES = 16  # what fused kernels load at a time
NARROWEST = 16  # the head size below which cuDNN's 16-bit kernels are not to be relied on
HALVES = torch.float16, torch.bfloat16


class Call(NamedTuple):
    """What is asked of a kernel, once all is checked."""

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
        """Where the first query and the first key mean what the last ones do."""
        return decided(self.is_causal and self.q.shape[2] == self.k.shape[2])

    @property
    def group(self) -> int:
        """Heads of q that share a head of k."""
        return self.q.shape[1] // self.k.shape[1]


def agree(q, k, v, mask, is_causal, scale, dropout_p, window) -> tuple[Call, int, Tensor | None]:
    """The call without what no query sees, how many queries at the start see nothing, and which others."""
    check_inputs(q, k, v)
    check_options(is_causal, scale, dropout_p)
    autocast = not q.is_meta and torch.is_autocast_enabled(q.device.type)  # torch knows none of meta tensors
    if autocast and q.dtype != torch.float64:
        q, k, v = (t.to(torch.get_autocast_dtype(q.device.type)) for t in (q, k, v))
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
    call = Call(q, k, v, mask, left, right, dropout_p, scale)
    if mask is None:
        return call, dead, None
    mask = with_band(call)
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


def check_options(is_causal: bool, scale: float | None, dropout_p: float) -> None:
    check_flags(is_causal=is_causal)
    if scale is not None:
        check_real("scale", scale)
        if not abs(scale) < math.inf:
            raise ValueError(f"scale must be finite, not {scale}")
    check_real("dropout_p", dropout_p)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be from 0 to below 1, not {dropout_p}")


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_shape("q", q, "B", "Hq", "Sq", "D")
    check_shape("k", k, "B", "Hk", "Sk", "D")
    check_shape("v", v, "B", "Hk", "Sk", "Dv")
    check_float(q=q, k=k, v=v)
    check_device(q=q, k=k, v=v)
    check_size("q is (B={}, ...)", q.shape[0], "k is (B={}, ...)", k.shape[0])
    check_size("q is (..., D={})", q.shape[3], "k is (..., D={})", k.shape[3])
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k is (B, Hk, Sk) = {tuple(k.shape[:3])} but v is {tuple(v.shape[:3])}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, which {k.shape[1]} of k do not divide")


def shaped_mask(mask: Tensor, q: Tensor, Sk: int) -> Tensor:
    """A mask of four axes, of bool or the dtype of q."""
    B, H, Sq, _ = q.shape
    axes = {2: ("B", "Sk"), 3: ("B", "Sq", "Sk"), 4: ("B", "Hq", "Sq", "Sk")}
    if not isinstance(mask, Tensor) or mask.dim() not in axes:
        given = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask must be a tensor (B, Sk), (B, Sq, Sk) or (B, Hq, Sq, Sk), but it is {given}")
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
    if window is not None and (not isinstance(window, (tuple, list)) or len(window) != 2):
        raise ValueError(f"window is {window}: it takes how many keys before and how many behind")
    left, right = (-1, -1) if window is None else window
    if not all(isinstance(n, INTEGERS) and not isinstance(n, bool) for n in (left, right)):
        raise TypeError(f"window is {window}: it takes two ints")
    if min(left, right) < -1:
        raise ValueError(f"window is {window}: it takes how many keys before and behind, or -1 for all")
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
    """The call as fused kernels of a GPU read it, who do not all look whether they can.

    Rows begin at multiples of 16 bytes: those of a part of a wider tensor need not.  Heads in 16 bits are of
    NARROWEST at least, filled up by zeros.
    """
    if not call.q.is_cuda:
        return call
    q, k, v = call[:3]
    if q.dtype in HALVES and min(q.shape[3], v.shape[3]) < NARROWEST:
        q, k, v = (F.pad(t, (0, max(NARROWEST - t.shape[3], 0))) for t in (q, k, v))
    q, k, v = (aligned(t) for t in (q, k, v))
    same = q is call.q and k is call.k and v is call.v
    return call if same else call._replace(q=q, k=k, v=v)


def aligned(t: Tensor) -> Tensor:
    """(B, H, S, D), or a copy whose rows begin at multiples of 16 bytes, if D lets them."""
    if is_aligned(t) or t.shape[3] * t.itemsize % BYTES:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def is_aligned(t: Tensor) -> bool:
    # torch.compile cannot ask for the offset; of a part of whole 16 bytes it is seldom another
    start = 0 if torch.compiler.is_compiling() else t.storage_offset()
    steps = [step for step, size in zip(t.stride()[:3], t.shape, strict=False) if size > 1]
    return t.stride(3) == 1 and not any(n * t.itemsize % BYTES for n in (start, *steps))


def decided(flag: bool) -> bool:
    """A bool also of sizes that torch.compile holds for dynamic, whose comparisons torch's kernels refuse."""
    if flag:  # noqa: SIM103  a branch is what makes the compiler decide, and bool() does not
        return True
    return False


def heads_to_rows(t: Tensor, group: int) -> Tensor:
    """(B, Hq, S, n) of heads that share a head of k: (B, Hk, group * S, n)."""
    return t.unflatten(1, (t.shape[1] // group, group)).flatten(2, 3)


def rows_to_heads(t: Tensor, group: int) -> Tensor:
    """The way back."""
    return t.unflatten(2, (group, t.shape[2] // group)).flatten(1, 2)
