"""Products of 8 bits and layers that are quantised, for `bench gemm`: see products.py."""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..kernels.base.choice import fits_blas
from ..kernels.dense.scaled_gemm import ScaledInputs, scaled_gemm
from ..kernels.grouped.masked_gmm import scaled_bmm
from ..layers.experts import Experts
from ..layers.quantized import quantize
from ..op import use
from ..routing.plan import make_plan
from ..tuning.choice import case_of
from .dense import normal
from .products import COPY, Case, Problem
from .tiles import Kernel, launches_of

CUBES = (512, 1024, 2048, 4096, 8192)
LARGE = 8192  # from which 8 bits have to be faster than 16
KINDS = {"int8": "torch._int_mm", "float8_e4m3fn": "torch._scaled_mm"}


def draw(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, device=device, dtype=dtype)
    return torch.randn(shape, device=device).to(dtype)


def product(M: int, N: int, K: int, device: torch.device, dtype: torch.dtype, seed: int) -> Problem:
    """Scales of 1, so that a peer that has none computes the same."""
    torch.manual_seed(seed)
    x, w = draw(M, K, device=device, dtype=dtype), draw(N, K, device=device, dtype=dtype).mT
    rows, columns, one = (torch.ones(n, device=device) for n in (M, N, 1))
    x16, w16, out = x.bfloat16(), w.bfloat16(), torch.bfloat16
    contenders = {
        "moe_aiter": lambda: scaled_gemm(x, w, one, one, out_dtype=out),
        "torch, bfloat16": lambda: x16 @ w16,
    }
    if dtype == torch.int8:
        contenders["torch._int_mm"] = lambda: torch._int_mm(x, w)
    else:
        call = functools.partial(torch._scaled_mm, x, w, out_dtype=out)
        contenders["torch._scaled_mm"] = lambda: call(one, one)
        contenders["moe_aiter, scales of rows"] = lambda: scaled_gemm(x, w, rows, columns, out_dtype=out)
        contenders["torch._scaled_mm, scales of rows"] = lambda: call(rows[:, None], columns[None])

    def kernels() -> Iterable[Kernel]:
        inputs = x, w, one.expand(M), one.expand(N), None, out
        case, launches = None, launches_of("scaled_gemm", *inputs)
        if fits_blas(ScaledInputs(*inputs)):
            case = case_of("scaled_fp8", x, "nt", "none", M, N, K)
        else:
            del launches["torch"]
        found = torch.empty(M, N, device=device, dtype=out)
        yield Kernel("scales", found, launches, 2 * M * N * K, exact=exact, case=case)

    def exact() -> Tensor:
        return x.double() @ w.double()

    return Problem(contenders, exact=exact, kernels=kernels)


def product_case(name: str, M: int, N: int, K: int, kind: str, **named) -> Case:
    goals = {KINDS[kind]: 0.97}
    if min(M, N, K) >= LARGE:
        goals["torch, bfloat16"] = 1.5
    if M <= 16:
        goals[COPY] = 0.85
    return Case(
        f"{'int8' if kind == 'int8' else 'fp8'}-{name}",
        f"{M}x{N}x{K}",
        functools.partial(product, M, N, K),
        flops=2 * M * N * K,
        bytes=M * K + N * K + 2 * M * N,
        goals=goals,
        dtypes=(kind,),
        **named,
    )


def batch(G: int, M: int, N: int, K: int, device: torch.device, dtype: torch.dtype, seed: int) -> Problem:
    torch.manual_seed(seed)
    x, w = draw(G, M, K, device=device, dtype=dtype), draw(G, N, K, device=device, dtype=dtype).mT
    one, x16, w16 = torch.ones(1, device=device), x.bfloat16(), w.bfloat16()
    contenders = {
        "moe_aiter": lambda: scaled_bmm(x, w, one, one, out_dtype=torch.bfloat16),
        "torch.bmm, bfloat16": lambda: x16 @ w16,
    }
    return Problem(contenders, exact=lambda: x.double() @ w.double())


def batch_case(G: int, M: int, N: int, K: int, **named) -> Case:
    return Case(
        f"bmm-fp8-{G}x{M}",
        f"{G} of {M}x{N}x{K}",
        functools.partial(batch, G, M, N, K),
        flops=2 * G * M * N * K,
        bytes=G * (M * K + N * K + 2 * M * N),
        goals={"torch.bmm, bfloat16": 1.0},
        dtypes=("float8_e4m3fn",),
        **named,
    )


def layers(layer: nn.Module, inputs: tuple, kind: str) -> Problem:
    """A layer, quantised, beside itself: both as far from the truth as the formula that quantises it is."""
    small, narrow = quantize(layer, kind), quantize(layer, "bf16")
    wide = [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in inputs]

    def plain() -> Tensor:
        with use("torch"):
            return small(*inputs)

    contenders = {"moe_aiter": lambda: small(*inputs), "bfloat16": lambda: narrow(*inputs)}
    return Problem(contenders, exact=lambda: layer.double()(*wide), plain=plain)


def linear(kind: str, M: int, N: int, K: int, device: torch.device, dtype: torch.dtype, seed: int) -> Problem:
    torch.manual_seed(seed)
    layer = nn.Linear(K, N, device=device, dtype=dtype)
    return layers(layer, (normal(M, K, device=device, dtype=dtype),), kind)


def experts(
    kind: str, sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype, seed: int
) -> Problem:
    T, H, I, E, top_k = sizes  # noqa: E741
    torch.manual_seed(seed)
    layer = Experts(E, H, I, device=device, dtype=dtype)
    plan = make_plan(torch.rand(T, E, device=device).argsort(1)[:, :top_k], E)
    weights = torch.rand(T, top_k, device=device)
    return layers(layer, (normal(T, H, device=device, dtype=dtype), weights, plan), kind)


def linear_case(kind: str, M: int, N: int, K: int, **named) -> Case:
    sizes, make = f"{M}x{N}x{K}", functools.partial(linear, kind, M, N, K)
    goals = {"bfloat16": 1.0}
    return Case(f"linear-{kind}-{M}", sizes, make, flops=2 * M * N * K, goals=goals, **named)


def experts_case(kind: str, *sizes: int, **named) -> Case:
    T, H, I, E, top_k = sizes  # noqa: E741
    name, make = f"experts-{kind}-{T}", functools.partial(experts, kind, sizes)
    shape = f"T {T}, H {H}, I {I}, E {E}, top {top_k}"
    return Case(name, shape, make, flops=6 * T * top_k * H * I, goals={"bfloat16": 1.0}, **named)


def usual(is_usual: bool) -> dict:
    """Each kernel is measured once, in half a minute, of which most compiles; the other cases by --shape."""
    return {} if is_usual else {"devices": ()}


CASES = [
    *(product_case(str(n), n, n, n, k, **usual(n in (1024, 4096, 8192))) for k in KINDS for n in CUBES),
    *(product_case("page", 1024, 2048, 512, kind) for kind in KINDS),
    *(product_case(f"decode-{m}", m, 4096, 4096, k, **usual(m != 16)) for k in KINDS for m in (1, 16, 64)),
    *(product_case(f"tall-{m}", m, 7424, 8192, k, **usual(m != 16)) for k in KINDS for m in (16, 64, 512)),
    *(product_case("toy", 20, 48, 32, kind, devices=()) for kind in KINDS),
    batch_case(16, 48, 80, 256),
    batch_case(16, 1024, 4096, 4096),
    batch_case(2, 5, 16, 32, devices=()),
    *(linear_case(kind, m, 4096, 4096, **usual(m > 16)) for kind in ("int8", "fp8") for m in (16, 4096)),
    *(
        experts_case(kind, t, 2048, 768, 64, 8, **usual(t > 16))
        for kind in ("int8", "fp8")
        for t in (16, 8192)
    ),
    *(linear_case(kind, 5, 32, 48, dtypes=("float32",), devices=()) for kind in ("int8", "fp8")),
    *(experts_case(kind, 20, 32, 24, 4, 2, dtypes=("float32",), devices=()) for kind in ("int8", "fp8")),
]
