"""Dense products, for `bench gemm`: see products.py."""

import functools
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.base.activations import FUNCTIONS
from ..kernels.base.choice import question
from ..kernels.base.gemm_row import GemmInputs
from ..kernels.base.shuffle import shuffle_weight
from ..kernels.dense.gemm import ACTIVATIONS, gemm, new_gemm
from ..kernels.dense.tuned_gemm import tuned_gemm
from ..kernels.grouped.grouped_gemm import grouped_gemm
from ..kernels.grouped.masked_gmm import MaskedInputs
from ..op import IMPLS, ORDER, runs, use
from ..tuning.choice import case_of
from .products import Case, Problem
from .tiles import Kernel, launches_of

FUSED = {"relu": False, "gelu_tanh": True}  # what cuBLASLt applies to x @ w + bias: torch's use_gelu


def normal(*shape: int, device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype).mul_(scale)


def grouped(T: int, K: int, N: int, E: int, top_k: int, device, dtype, seed: int) -> Problem:
    """Each token times the matrices of its experts, summed, as AITER's page has it."""
    torch.manual_seed(seed)
    x = normal(T, K, device=device, dtype=dtype)
    w = normal(E, K, N, device=device, dtype=dtype, scale=K**-0.5)
    ids = torch.randint(0, E, (T, top_k), device=device)

    def loop(kind: torch.dtype = dtype) -> Tensor:
        out = torch.zeros(T, N, device=device, dtype=kind)
        for e in range(E):
            token = (ids == e).nonzero()[:, 0]
            out.index_add_(0, token, x[token].to(kind) @ w[e].to(kind))
        return out

    contenders = {"moe_aiter": lambda: grouped_gemm(x, w, ids), "torch, loop over experts": loop}
    return Problem(contenders, exact=lambda: loop(torch.float64), plain=loop)


def grouped_case(name: str, *sizes: int, **named) -> Case:
    T, K, N, E, top_k = sizes
    return Case(
        name,
        f"T {T}, K {K}, N {N}, E {E}, top {top_k}",
        functools.partial(grouped, *sizes),
        flops=2 * T * top_k * K * N,
        bytes=2 * (T * K + E * K * N + T * N),
        goals={"torch, loop over experts": 3.0},
        **named,
    )


def linear(
    M: int, K: int, N: int, activation: str, with_bias: bool, device, dtype, seed: int
) -> Problem:  # fmt: skip
    """An nn.Linear, and what comes after it."""
    torch.manual_seed(seed)
    x = normal(M, K, device=device, dtype=dtype)
    weight = normal(N, K, device=device, dtype=dtype, scale=K**-0.5)
    bias = normal(N, device=device, dtype=dtype) if with_bias else None
    function = FUNCTIONS[activation or "identity"][0]

    def torchs(kind: torch.dtype = dtype) -> Tensor:
        cast = [None if t is None else t.to(kind) for t in (x, weight, bias)]
        return function(F.linear(*cast))

    ours = functools.partial(gemm, x, weight.mT, bias, activation=activation or None)
    contenders = ours_by_backend(
        ours, x[None], weight.mT[None], bias, None, activation, 1.0, 0.0, None, False
    )
    contenders["torch, unfused" if activation else "torch"] = torchs
    if activation in FUSED and with_bias:
        contenders["torch, fused"] = functools.partial(
            torch._addmm_activation, bias, x, weight.mT, use_gelu=FUSED[activation]
        )
    kernels = functools.partial(linear_kernels, x, weight, normal(N, device=device, dtype=dtype))
    return Problem(contenders, exact=lambda: torchs(torch.float64), plain=torchs, kernels=kernels)


def linear_kernels(x: Tensor, weight: Tensor, bias: Tensor) -> Iterable[Kernel]:
    """In few rows the plain product; in many every epilogue, and a weight that lies by columns."""
    w = weight.mT
    yield linear_kernel("none", x, w, None)
    if len(x) > FEW:
        yield linear_kernel("none", x, w.contiguous(), None)
        yield linear_kernel("bias", x, w, bias)
        for activation in sorted(ACTIVATIONS, key=lambda name: name != "gelu"):  # whose tile serves them all
            yield linear_kernel(activation, x, w, bias)


def linear_kernel(epilogue: str, x: Tensor, w: Tensor, bias: Tensor | None) -> Kernel:
    activation = epilogue if epilogue in ACTIVATIONS else ""

    def torchs(kind: torch.dtype = x.dtype) -> Tensor:
        y = F.linear(x.to(kind), w.mT.to(kind), None if bias is None else bias.to(kind))
        return FUNCTIONS[activation or "identity"][0](y)

    name = f"{epilogue}, by columns" if w.is_contiguous() else epilogue
    return gemm_kernel(name, torchs, x[None], w[None], bias, None, activation, 1.0, 0.0, None, False)


def gemm_kernel(name: str, torchs: Callable[..., Tensor], *inputs) -> Kernel:
    """Return the kernel of the op `gemm` for these inputs; `torchs` takes a dtype."""
    i = GemmInputs(*inputs)
    (B, M, K), N = i.x.shape, i.w.shape[2]
    return Kernel(
        name,
        new_gemm(i),
        launches_of("gemm", *inputs),
        flops=2 * B * M * N * K,
        exact=lambda: torchs(torch.float64),
        plain=torchs,
        case=case_of(*question(i)),
    )


def ours_by_backend(ours: Callable[[], Tensor], *inputs) -> dict[str, Callable[[], Tensor]]:
    """Return contenders: what a user gets, and on a GPU also each kernel that could be the fastest."""
    found, many = {"moe_aiter": ours}, inputs[0].shape[1] > FEW
    kernels = ("hopper", "triton") if many else ("triton",)
    for backend in kernels if inputs[0].is_cuda else ():
        if runs(IMPLS["gemm"][backend], GemmInputs(*inputs)):
            return found | {f"moe_aiter, {backend}": functools.partial(forced, backend, ours)}
    return found


def forced(backend: str, run: Callable[[], Tensor]) -> Tensor:
    with use(backend):
        return run()


def added(M: int, K: int, N: int, device, dtype, seed: int) -> Problem:
    """alpha * a @ b + beta * c, as cutlass_gemm is called."""
    torch.manual_seed(seed)
    a, c = normal(M, K, device=device, dtype=dtype), normal(M, N, device=device, dtype=dtype)
    b = normal(K, N, device=device, dtype=dtype, scale=K**-0.5)
    ours = functools.partial(gemm, a, b, alpha=0.5, beta=2.0, c=c)

    def torchs(kind: torch.dtype = dtype) -> Tensor:
        return torch.addmm(c.to(kind), a.to(kind), b.to(kind), alpha=0.5, beta=2.0)

    inputs = a[None], b[None], None, c[None], "", 0.5, 2.0, None, False
    contenders = ours_by_backend(ours, *inputs)
    return Problem(
        contenders | {"torch": torchs},
        exact=lambda: torchs(torch.float64),
        plain=torchs,
        kernels=lambda: [gemm_kernel("c", torchs, *inputs)],
    )


def batched(B: int, M: int, K: int, N: int, device, dtype, seed: int) -> Problem:
    torch.manual_seed(seed)
    a, b = normal(B, M, K, device=device, dtype=dtype), normal(B, K, N, device=device, dtype=dtype)
    inputs = a, b, None, None, "", 1.0, 0.0, None, False
    contenders = ours_by_backend(lambda: gemm(a, b), *inputs)
    contenders["torch"] = lambda: torch.bmm(a, b)
    contenders["torch, one after another"] = lambda: torch.stack([x @ y for x, y in zip(a, b, strict=True)])

    def torchs(kind: torch.dtype = dtype) -> Tensor:
        return a.to(kind) @ b.to(kind)

    return Problem(
        contenders,
        exact=lambda: torchs(torch.float64),
        plain=torchs,
        kernels=lambda: [gemm_kernel("batches", torchs, *inputs)],
    )


def shuffled(M: int, K: int, N: int, device, dtype, seed: int) -> Problem:
    """An nn.Linear's product with a weight as `shuffle_weight` orders it, beside torch's own."""
    torch.manual_seed(seed)
    x = normal(M, K, device=device, dtype=dtype)
    weight = normal(N, K, device=device, dtype=dtype, scale=K**-0.5)
    ordered = shuffle_weight(weight)

    def torchs(kind: torch.dtype = dtype) -> Tensor:
        return F.linear(x.to(kind), weight.to(kind))

    def kernels() -> Iterable[Kernel]:
        launches = launches_of_shuffled(x, ordered) | {"torch": (into_linear, (x, weight))}
        case = case_of("gemm_shuffled", x, "nt", "none", M, N, K)
        exact = functools.partial(torchs, torch.float64)
        out = x.new_empty(M, N)
        yield Kernel("shuffled", out, launches, 2 * M * N * K, exact, torchs, case, tiled=False)

    contenders = {"moe_aiter": lambda: tuned_gemm(x, ordered, is_shuffled=True), "torch": torchs}
    return Problem(contenders, exact=lambda: torchs(torch.float64), plain=torchs, kernels=kernels)


def into_linear(out: Tensor, x: Tensor, weight: Tensor) -> None:
    torch.mm(x, weight.mT, out=out)


def launches_of_shuffled(x: Tensor, weight: Tensor) -> dict[str, tuple[Callable, tuple]]:
    """Return the launches of the masked product, whose tile is in the tables of masked products."""
    impl, inputs = IMPLS["masked_gmm"]["triton"], (x[None], weight[None], None, None, None, True)

    def launch(out: Tensor, *inputs) -> None:
        i = MaskedInputs(out[None], *inputs)
        impl(i)(i.out, i)

    i = MaskedInputs(x.new_empty(1, len(x), len(weight)), *inputs)
    here = "triton" in ORDER[x.device.type] and runs(impl, i)
    return {"triton": (launch, inputs)} if here else {}


def linear_case(name: str, M: int, K: int, N: int, activation: str = "", bias: bool = True, **named) -> Case:
    """Behind GELU the goal is what its fusion saves; in few rows it is a copy of the weight."""
    least = 1.15 if activation.startswith("gelu") else 0.97
    goals = {"torch, unfused" if activation else "torch": least}
    if M <= FEW < N:
        goals["copy"] = 0.85
    make = functools.partial(linear, M, K, N, activation, bias)
    sizes = {"flops": 2 * M * K * N, "bytes": 2 * (M * K + K * N + M * N)}
    return Case(name, f"{M}x{K}x{N}", make, **sizes, goals=goals, **named)


def batched_case(name: str, B: int, M: int, K: int, N: int, **named) -> Case:
    make = functools.partial(batched, B, M, K, N)
    sizes = {"flops": 2 * B * M * K * N, "bytes": 2 * B * (M * K + K * N + M * N)}
    goals = {"torch": 1.0, "torch, one after another": 2.0}  # the latter is what AITER's page claims
    return Case(name, f"{B}x{M}x{K}x{N}", make, **sizes, goals=goals, **named)


def shuffled_case(name: str, M: int, K: int, N: int, **named) -> Case:
    make = functools.partial(shuffled, M, K, N)
    return Case(name, f"{M}x{K}x{N}", make, flops=2 * M * K * N, goals={"torch": 1.0}, **named)


def added_case(name: str, M: int, K: int, N: int, **named) -> Case:
    make = functools.partial(added, M, K, N)
    return Case(name, f"{M}x{K}x{N}", make, flops=2 * M * K * N, goals={"torch": 0.97}, **named)


FEW = 16  # rows up to which the weight is what takes time
CPU_TOO = ("cuda", "cpu")
HALF = ("float16", "bfloat16", "float32")
PROJECTIONS = {"4096": (4096, 4096), "8192": (8192, 8192), "up": (4096, 14336), "down": (14336, 4096)}
ASKED = {"devices": ()}  # with --shape: each tile and epilogue takes seconds to compile
CASES = [
    linear_case("square-512", 512, 512, 512, bias=False, devices=CPU_TOO),
    linear_case("square-1024", 1024, 1024, 1024, bias=False, devices=("cpu",)),
    linear_case("square-2048", 2048, 2048, 2048, bias=False, **ASKED),
    *(linear_case(f"square-{n}", n, n, n, bias=False) for n in (4096, 8192)),
    *(linear_case(f"{name}-4096", 4096, k, n, bias=False) for name, (k, n) in PROJECTIONS.items() if k != n),
    *(
        linear_case(f"decode-{name}-{m}", m, k, n, bias=False, **(ASKED if m == 4 else {}))
        for name, (k, n) in PROJECTIONS.items()
        for m in (1, 4, 16)
    ),
    linear_case("bias-aiter", 1024, 512, 2048, dtypes=HALF),
    linear_case("bias-4096", 4096, 4096, 4096),
    *(linear_case(f"bias-{n}", n, n, n, **ASKED) for n in (2048, 8192)),
    *(linear_case(f"{a}-4096", 4096, 4096, 4096, a) for a in ("gelu", "gelu_tanh", "relu", "silu")),
    linear_case("gelu-1024", 4096, 1024, 4096, "gelu"),
    linear_case("gelu-2048", 4096, 2048, 8192, "gelu", **ASKED),
    linear_case("gelu-up", 4096, 4096, 16384, "gelu"),
    linear_case("gelu-decode", 16, 4096, 16384, "gelu"),
    linear_case("linear-aiter", 16, 65536, 1000),
    *(shuffled_case(f"shuffled-{m}", m, 4096, 4096, **ASKED) for m in (1, 16, 64, 256, 1024)),
    added_case("cutlass-2048", 2048, 2048, 2048, **ASKED),
    added_case("cutlass-4096", 4096, 4096, 4096),
    batched_case("batched-64", 64, 512, 512, 512),
    batched_case("batched-scores", 256, 1024, 128, 1024),
    batched_case("batched-small", 512, 64, 128, 64),
    linear_case("matmul-10", 10, 10, 10, bias=False, dtypes=("float32",)),
    linear_case("matmul-guide", 1024, 1024, 1024, bias=False, dtypes=("float32",)),
    grouped_case("grouped-aiter", 4096, 512, 2048, 8, 2, dtypes=("float16", "bfloat16", "float32")),
    grouped_case("grouped-E", 4096, 2048, 1024, 64, 8),
    grouped_case("grouped-C", 32768, 2048, 768, 128, 8),
    linear_case("linear-toy", 20, 24, 40, "gelu", dtypes=("float32", "bfloat16"), devices=()),
    linear_case("decode-toy", 2, 24, 40, dtypes=("float32", "float16"), devices=()),
    added_case("cutlass-toy", 20, 24, 40, dtypes=("float32", "float16"), devices=()),
    shuffled_case("shuffled-toy", 20, 64, 32, dtypes=("bfloat16", "float16"), devices=()),
    batched_case("batched-toy", 3, 20, 24, 40, dtypes=("float32", "float16"), devices=()),
    grouped_case("grouped-toy", 48, 32, 24, 5, 2, dtypes=("float32", "bfloat16"), devices=()),
]
