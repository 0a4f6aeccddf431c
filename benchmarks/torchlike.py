"""Attention and convolution, for `python -m benchmarks gemm`: wrappers beside the calls of torch's in them.

What torch has no kernel for, as windows, it is given as a mask of all pairs, as its users do.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_aiter.bench.cases import gaussian
from moe_aiter.layers.attention import agree, attention, band
from moe_aiter.layers.convolution import conv2d

from .products import Compared, Comparison

SEED = "float32", "bfloat16", "float16"  # the documents' examples are of float32
HALVES = "bfloat16", "float16"
GOALS = {"torch": 0.97}


def attended(sizes: tuple[int, ...], padded: bool, how: dict, **kind) -> Compared:
    """`attention` with the options `how`, and keys of other lengths in each sequence if `padded`."""
    B, Hq, Hk, Sq, Sk, D = sizes
    q = gaussian(B, Hq, Sq, D, **kind)
    k, v = (gaussian(B, Hk, Sk, D, **kind) for _ in range(2))
    mask = None
    if padded:
        mask = torch.arange(Sk, device=q.device) < torch.randint(Sk // 2, Sk, (B, 1), device=q.device)
    call, *_ = agree(q, k, v, None, how.get("is_causal", False), None, 0.0, how.get("window"))
    square = call.is_torchs_causal
    shown = mask[:, None, None] if padded else band(call) if call.is_banded and not square else None

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, shown, is_causal=square, enable_gqa=Hq != Hk)

    contenders = {"moe_aiter": lambda: attention(q, k, v, mask, **how), "torch": lambda: torchs(*call[:3])}
    exact = lambda: torchs(*(t.double() for t in call[:3]))  # noqa: E731
    return Compared(contenders, exact, contenders["torch"])


def pairs(Sq: int, Sk: int, is_causal: bool = False, window: tuple[int, int] = (-1, -1)) -> int:
    """Return the number of pairs of a query and a key that the query sees."""
    left, right = window[0], 0 if is_causal else window[1]
    positions = range(Sk - Sq, Sk)
    first = (max(position - left, 0) if left >= 0 else 0 for position in positions)
    last = (min(position + right, Sk - 1) if right >= 0 else Sk - 1 for position in positions)
    return sum(max(b - a + 1, 0) for a, b in zip(first, last, strict=True))


def attention_case(
    name: str, *sizes: int, padded: bool = False, dtypes: tuple[str, ...] = HALVES, **how
) -> Comparison:
    B, Hq, Hk, Sq, Sk, D = sizes
    return Comparison(
        name,
        f"{B}x{Hq}/{Hk}x{Sq}/{Sk}x{D}",
        functools.partial(attended, sizes, padded, how),
        flops=4 * B * Hq * pairs(Sq, Sk, **how) * D,
        bytes=2 * getattr(torch, dtypes[0]).itemsize * B * D * (Hq * Sq + Hk * Sk),
        goals=GOALS,
        dtypes=dtypes,
    )


def convolved(N: int, C: int, size: int, filters: int, **kind) -> Compared:
    """A kernel of 3 by 3 over pictures; torch's also by way of channels last, and back."""
    x = gaussian(N, C, size, size, **kind)
    w = gaussian(filters, C, 3, 3, **kind, scale=(9 * C) ** -0.5)
    bias = gaussian(filters, **kind)

    def through_channels_last() -> Tensor:
        last = [t.to(memory_format=torch.channels_last) for t in (x, w)]
        return F.conv2d(*last, bias, padding=1).contiguous()

    def exact() -> Tensor:
        results = (F.conv2d(batch.double(), w.double(), bias.double(), padding=1) for batch in x.split(4))
        return torch.cat(list(results))

    contenders = {
        "moe_aiter": lambda: conv2d(x, w, bias, padding=1),
        "torch": lambda: F.conv2d(x, w, bias, padding=1),
        "torch, by way of channels last": through_channels_last,
    }
    return Compared(contenders, exact, contenders["torch"])


def convolution_case(name: str, *sizes: int, dtypes: tuple[str, ...] = ("float16", "bfloat16")) -> Comparison:
    N, C, size, filters = sizes
    return Comparison(
        name,
        f"{N}x{C}x{size}x{size}*{filters}x{C}x3x3",
        functools.partial(convolved, *sizes),
        flops=2 * 9 * N * C * filters * size**2,
        goals=GOALS,
        dtypes=dtypes,
    )


CASES = [
    attention_case("attention, guide", 32, 8, 8, 512, 512, 64, dtypes=SEED),
    attention_case("attention, prefill", 2, 32, 8, 4096, 4096, 128, is_causal=True),
    attention_case("attention, a later part", 2, 32, 8, 512, 4096, 128, is_causal=True),
    attention_case("attention, decoding", 64, 32, 8, 1, 4096, 128, is_causal=True),
    attention_case("attention, decoding padded", 64, 32, 8, 1, 4096, 128, padded=True),
    attention_case("attention, window", 1, 16, 4, 8192, 8192, 128, is_causal=True, window=(1024, 0)),
    attention_case(
        "attention, decoding in a window", 64, 32, 8, 1, 4096, 128, is_causal=True, window=(512, 0)
    ),
    attention_case("attention, padded", 16, 16, 16, 1024, 1024, 64, padded=True),
    convolution_case("convolution, guide", 32, 3, 224, 64, dtypes=SEED),
    convolution_case("convolution, 112", 32, 64, 112, 128),
    convolution_case("convolution, 56", 32, 128, 56, 256),
    convolution_case("convolution, 28", 32, 256, 28, 512),
]
