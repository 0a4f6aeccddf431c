"""The products that `moe-aiter tune` tunes beside those of a layer: dense, of 8 bits, and sparse.

`python -m benchmarks gemm` in the source tree compares them with their peers.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.base.activations import FUNCTIONS
from ..kernels.base.choice import fits_blas, question
from ..kernels.base.gemm_row import GemmInputs
from ..kernels.base.shuffle import shuffle_weight
from ..kernels.dense.gemm import ACTIVATIONS, new_gemm
from ..kernels.dense.scaled_gemm import ScaledInputs
from ..kernels.grouped.masked_gmm import MaskedInputs
from ..kernels.sparse.gemm import sparse_gemm  # noqa: F401  likewise
from ..kernels.sparse.pattern import SparsePattern
from ..op import IMPLS, ORDER, runs
from ..tuning.choice import case_of
from .measure import Outputs
from .tiles import Kernel, launches_of

FEW = 16  # rows up to which the weight is what takes time
ASKED = {"devices": ()}  # with --shape: each tile and epilogue takes seconds to compile


class Operands(NamedTuple):
    """The tensors of a product, what torch makes of them, and the kernels that compute it."""

    tensors: tuple
    by_torch: Callable[..., Outputs]  # in a dtype, else in their own
    kernels: Callable[[], Iterable[Kernel]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A product of some sizes."""

    name: str  # of which a family has one
    shape: str  # MxNxK, say
    make: Callable[..., Operands]  # of the sizes, a device and a dtype
    sizes: tuple = ()
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")  # torch's names, the usual one first
    devices: tuple[str, ...] = ("cuda",)  # where it is measured without being asked for


def listed(families: Mapping[str, Sequence[Case]]) -> str:
    """The names of all cases, by family."""
    return "; ".join(f"{family}: {', '.join(case.name for case in own)}" for family, own in families.items())


def chosen(
    families: Mapping[str, Sequence[Case]], words: list[str] | None, dtype: str | None, kind: str
) -> list[tuple[str, Case]]:
    """(family, case): those that the words name, or those for this device; of them those that take `dtype`.

    Raises ValueError if there is none.
    """
    found = []
    for family, case in ((family, case) for family, own in families.items() for case in own):
        wanted = kind in case.devices
        if words:
            wanted = any(word in (case.name, case.shape) or word in case.name for word in words)
        if wanted and dtype in (None, *case.dtypes):
            found.append((family, case))
    if found:
        return found
    dtypes = {dtype: None for own in families.values() for case in own for dtype in case.dtypes}
    if dtype not in (None, *dtypes):
        raise ValueError(f"there is no such case: --dtype is {dtype!r}; it takes {', '.join(dtypes)}")
    of = f" of {dtype}" if dtype else ""
    raise ValueError(f"there is no such case{of}; there are, of {listed(families)}")


# dense


def normal(*shape: int, device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype).mul_(scale)


def linear(
    M: int, K: int, N: int, activation: str, bias: bool, device: torch.device, dtype: torch.dtype
) -> Operands:
    """An nn.Linear, and what comes after it."""
    x = normal(M, K, device=device, dtype=dtype)
    weight = normal(N, K, device=device, dtype=dtype, scale=K**-0.5)
    any_bias = normal(N, device=device, dtype=dtype)
    by_torch = functools.partial(linear_by_torch, x, weight, any_bias if bias else None, activation)
    kernels = functools.partial(linear_kernels, x, weight, any_bias)
    return Operands((x, weight, any_bias if bias else None), by_torch, kernels)


def linear_by_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, dtype: torch.dtype | None = None
) -> Tensor:
    cast = [None if t is None else t.to(dtype or t.dtype) for t in (x, weight, bias)]
    return FUNCTIONS[activation or "identity"][0](F.linear(*cast))


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
    name = f"{epilogue}, by columns" if w.is_contiguous() else epilogue
    by_torch = functools.partial(linear_by_torch, x, w.mT, bias, activation)
    return gemm_kernel(name, by_torch, x[None], w[None], bias, None, activation, 1.0, 0.0, None, False)


def gemm_kernel(name: str, by_torch: Callable[..., Tensor], *inputs) -> Kernel:
    """Return the kernel of the op `gemm` for these inputs."""
    i, launches = GemmInputs(*inputs), launches_of("gemm", *inputs)
    (B, M, K), N = i.x.shape, i.w.shape[2]
    return Kernel(name, new_gemm(i), launches, 2 * B * M * N * K, by_torch, case=case_of(*question(i)))


def added(M: int, K: int, N: int, device: torch.device, dtype: torch.dtype) -> Operands:
    """alpha * a @ b + beta * c, as cutlass_gemm is called."""
    a, c = normal(M, K, device=device, dtype=dtype), normal(M, N, device=device, dtype=dtype)
    b = normal(K, N, device=device, dtype=dtype, scale=K**-0.5)

    def by_torch(kind: torch.dtype = dtype) -> Tensor:
        return torch.addmm(c.to(kind), a.to(kind), b.to(kind), alpha=0.5, beta=2.0)

    inputs = a[None], b[None], None, c[None], "", 0.5, 2.0, None, False
    return Operands(inputs, by_torch, lambda: [gemm_kernel("c", by_torch, *inputs)])


def batched(B: int, M: int, K: int, N: int, device: torch.device, dtype: torch.dtype) -> Operands:
    a, b = normal(B, M, K, device=device, dtype=dtype), normal(B, K, N, device=device, dtype=dtype)
    inputs = a, b, None, None, "", 1.0, 0.0, None, False

    def by_torch(kind: torch.dtype = dtype) -> Tensor:
        return a.to(kind) @ b.to(kind)

    return Operands(inputs, by_torch, lambda: [gemm_kernel("batches", by_torch, *inputs)])


def shuffled(M: int, K: int, N: int, device: torch.device, dtype: torch.dtype) -> Operands:
    """An nn.Linear's product with a weight as `shuffle_weight` orders it, beside torch's own."""
    x = normal(M, K, device=device, dtype=dtype)
    weight = normal(N, K, device=device, dtype=dtype, scale=K**-0.5)
    ordered = shuffle_weight(weight)
    by_torch = functools.partial(linear_by_torch, x, weight, None, "")

    def kernels() -> Iterable[Kernel]:
        launches = launches_of_shuffled(x, ordered) | {"torch": (into_linear, (x, weight))}
        case = case_of("gemm_shuffled", x, "nt", "none", M, N, K)
        yield Kernel("shuffled", x.new_empty(M, N), launches, 2 * M * N * K, by_torch, case=case, tiled=False)

    return Operands((x, ordered), by_torch, kernels)


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


def case(name: str, make: Callable[..., Operands], *sizes: int, **named) -> Case:
    return Case(name, "x".join(map(str, sizes)), make, sizes, **named)


def linear_case(name: str, *sizes: int, activation: str = "", bias: bool = True, **named) -> Case:
    return Case(name, "x".join(map(str, sizes)), linear, (*sizes, activation, bias), **named)


HALF = ("float16", "bfloat16", "float32")
EPILOGUES = "gelu", "gelu_tanh", "relu", "silu"
PROJECTIONS = {"4096": (4096, 4096), "8192": (8192, 8192), "up": (4096, 14336), "down": (14336, 4096)}
DENSE = [
    linear_case("square-512", 512, 512, 512, bias=False, devices=("cuda", "cpu")),
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
    *(linear_case(f"{a}-4096", 4096, 4096, 4096, activation=a) for a in EPILOGUES),
    linear_case("gelu-1024", 4096, 1024, 4096, activation="gelu"),
    linear_case("gelu-2048", 4096, 2048, 8192, activation="gelu", **ASKED),
    linear_case("gelu-up", 4096, 4096, 16384, activation="gelu"),
    linear_case("gelu-decode", 16, 4096, 16384, activation="gelu"),
    linear_case("linear-aiter", 16, 65536, 1000),
    *(case(f"shuffled-{m}", shuffled, m, 4096, 4096, **ASKED) for m in (1, 16, 64, 256, 1024)),
    case("cutlass-2048", added, 2048, 2048, 2048, **ASKED),
    case("cutlass-4096", added, 4096, 4096, 4096),
    case("batched-64", batched, 64, 512, 512, 512),
    case("batched-scores", batched, 256, 1024, 128, 1024),
    case("batched-small", batched, 512, 64, 128, 64),
    linear_case("matmul-10", 10, 10, 10, bias=False, dtypes=("float32",)),
    linear_case("matmul-guide", 1024, 1024, 1024, bias=False, dtypes=("float32",)),
    linear_case("linear-toy", 20, 24, 40, activation="gelu", dtypes=("float32", "bfloat16"), devices=()),
    linear_case("decode-toy", 2, 24, 40, dtypes=("float32", "float16"), devices=()),
    case("cutlass-toy", added, 20, 24, 40, dtypes=("float32", "float16"), devices=()),
    case("shuffled-toy", shuffled, 20, 64, 32, dtypes=("bfloat16", "float16"), devices=()),
    case("batched-toy", batched, 3, 20, 24, 40, dtypes=("float32", "float16"), devices=()),
]

# 8 bits


def draw(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, device=device, dtype=dtype)
    return torch.randn(shape, device=device).to(dtype)


def scaled(M: int, N: int, K: int, device: torch.device, dtype: torch.dtype) -> Operands:
    """Scales of 1, so that a peer that has none computes the same."""
    x, w = draw(M, K, device=device, dtype=dtype), draw(N, K, device=device, dtype=dtype).mT
    one, out = torch.ones(1, device=device), torch.bfloat16

    def by_torch(kind: torch.dtype) -> Tensor:
        return x.to(kind) @ w.to(kind)

    def kernels() -> Iterable[Kernel]:
        inputs = x, w, one.expand(M), one.expand(N), None, out
        asked, launches = None, launches_of("scaled_gemm", *inputs)
        if fits_blas(ScaledInputs(*inputs)):
            asked = case_of("scaled_fp8", x, "nt", "none", M, N, K)
        else:
            del launches["torch"]
        found = torch.empty(M, N, device=device, dtype=out)
        yield Kernel("scales", found, launches, 2 * M * N * K, by_torch, plain=False, case=asked)

    return Operands((x, w, one), by_torch, kernels)


def scaled_cases(name: str, *sizes: int, usual: bool = True) -> list[Case]:
    """A case of each kind; the `usual` take half a minute each, of which most compiles."""
    kinds, how = {"int8": "int8", "fp8": "float8_e4m3fn"}, {} if usual else ASKED
    return [case(f"{kind}-{name}", scaled, *sizes, dtypes=(dtype,), **how) for kind, dtype in kinds.items()]


SCALED = [
    *(
        c
        for n in (512, 1024, 2048, 4096, 8192)
        for c in scaled_cases(str(n), n, n, n, usual=n in (1024, 4096, 8192))
    ),
    *scaled_cases("page", 1024, 2048, 512),
    *(c for m in (1, 16, 64) for c in scaled_cases(f"decode-{m}", m, 4096, 4096, usual=m != 16)),
    *(c for m in (16, 64, 512) for c in scaled_cases(f"tall-{m}", m, 7424, 8192, usual=m != 16)),
    *scaled_cases("toy", 20, 48, 32, usual=False),
]

# sparse: a weight (N, N), of which so many percent of blocks are zeros

ROWS = 4096  # of x


def sparse_weight(N: int, percent: float, block: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    kept = (torch.rand(N // block, N // block, device=device) * 100 >= percent).to(dtype)
    kept[0, 0] = kept[-1, -1] = 1  # whose gradients are compared
    w = torch.randn(N, N, device=device, dtype=dtype).mul_((N * (100 - percent) / 100) ** -0.5)
    return w.mul_(kept.repeat_interleave(block, 0).repeat_interleave(block, 1))


def sparse(M: int, N: int, percent: int, block: int, device: torch.device, dtype: torch.dtype) -> Operands:
    x, w = torch.randn(M, N, device=device, dtype=dtype), sparse_weight(N, percent, block, device, dtype)
    by_torch = functools.partial(linear_by_torch, x, w, None, "")

    def kernels() -> Iterable[Kernel]:
        pattern = SparsePattern.from_dense(w, block)
        inputs = x, pattern.take(w), None, pattern.lists, *w.shape, False
        yield sparse_kernel("forward", x.new_empty(M, N), pattern, by_torch, "sparse_matmul", *inputs)

    return Operands((x, w), by_torch, kernels)


def sparse_step(
    M: int, N: int, percent: int, block: int, device: torch.device, dtype: torch.dtype
) -> Operands:
    """Forward and backward; the kernel is that of the values' gradient."""
    x, dout = torch.randn(2, M, N, device=device, dtype=dtype)
    w = sparse_weight(N, percent, block, device, dtype)
    pattern = SparsePattern.from_dense(w, block)

    def by_torch(kind: torch.dtype = dtype) -> Tensor:
        return pattern.take(dout.to(kind).T @ x.to(kind))

    def kernels() -> Iterable[Kernel]:
        out, inputs = x.new_empty(pattern.num_blocks, block, block), (dout, x, pattern.lists, block, block)
        yield sparse_kernel("gradient", out, pattern, by_torch, "sparse_matmul_grad", *inputs)

    return Operands((x, w, dout, pattern), by_torch, kernels)


def sparse_kernel(
    name: str, out: Tensor, pattern: SparsePattern, by_torch: Callable[..., Tensor], op: str, *inputs
) -> Kernel:
    a, b = pattern.blocksize
    launches = launches_of(op, *inputs)
    launches.pop("torch", None)
    return Kernel(name, out, launches, 2 * len(inputs[0]) * pattern.num_blocks * a * b, by_torch)


def sparse_cases(name: str, M: int, N: int, percent: int, block: int, **named) -> list[Case]:
    shape, sizes = f"{M}x{N}x{N}, {percent} % zeros in blocks of {block}", (M, N, percent, block)
    cases = [Case(name, shape, sparse, sizes, **named)]
    if percent == 90:  # steps are measured where the goals are
        cases.append(Case(f"{name}-step", f"{shape}, with gradients", sparse_step, sizes, **named))
    return cases


SPARSE = [
    *(
        case
        for block, percents in ((32, [90]), (64, [50, 80, 90, 95]), (128, [90]))
        for percent in percents
        for case in sparse_cases(f"block{block}-{percent}", ROWS, 4096, percent, block)
    ),
    *(case for b in (64, 128) for case in sparse_cases(f"block{b}-90-8192", ROWS, 8192, 90, b)),
    *sparse_cases("block-toy", 33, 64, 90, 16, dtypes=("float32", "bfloat16"), devices=()),
]
FAMILIES = {"dense": DENSE, "scaled": SCALED, "sparse": SPARSE}
