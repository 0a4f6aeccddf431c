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
from ..kernels.grouped.masked_gmm import MaskedInputs
from ..kernels.grouped.scaled_gemm import ScaledInputs
from ..kernels.sparse.gemm import sparse_gemm  # noqa: F401  defines its ops
from ..kernels.sparse.pattern import SparsePattern
from ..op import IMPLS, ORDER, runs
from ..tuning.choice import case_of
from .measure import Outputs
from .tiles import Kernel, launch_into, launches_of

FEW = 16  # rows up to which the weight is what takes time
ASKED = {"devices": ()}  # with --shape: each tile and epilogue takes seconds to compile


class Tunable(NamedTuple):
    """The tensors of a product, what torch makes of them, and the kernels that compute it."""

    tensors: tuple
    by_torch: Callable[..., Outputs]  # in a dtype, else in their own
    kernels: Callable[[], Iterable[Kernel]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A product of some sizes."""

    name: str  # of which a family has one
    shape: str  # MxNxK, say
    make: Callable[..., Tunable]  # of the sizes, a device and a dtype
    sizes: tuple = ()
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")  # torch's names, the usual one first
    devices: tuple[str, ...] = ("cuda",)  # where it is measured without being asked for


Families = Mapping[str, Sequence[Case]]


def case_names(families: Families) -> str:
    """The names of all cases, by family."""
    return "; ".join(f"{family}: {', '.join(case.name for case in own)}" for family, own in families.items())


def select(
    families: Families, words: list[str] | None, dtype: str | None, kind: str
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
    raise ValueError(f"there is no such case{of}; there are, of {case_names(families)}")


# dense


def gaussian(*shape: int, scale: float = 1.0, **kind) -> Tensor:
    """`kind` is a device and a dtype."""
    return torch.randn(shape, **kind).mul_(scale)


def of_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None = None, c: Tensor | None = None, activation: str = "",
    alpha: float = 1.0, beta: float = 0.0,
) -> GemmInputs:  # fmt: skip
    return GemmInputs(x, w, bias, c, activation, alpha, beta, None, False)


def gemm_product(name: str, by_torch: Callable[..., Tensor], i: GemmInputs) -> Kernel:
    (B, M, K), N = i.x.shape, i.w.shape[2]
    launches, asked = launches_of("gemm", i), case_of(*question(i))
    return Kernel(name, new_gemm(i), launches, 2 * B * M * N * K, by_torch, case=asked)


def by_matmul(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return a.to(dtype=dtype) @ b.to(dtype=dtype)


def by_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, dtype: torch.dtype | None = None
) -> Tensor:
    cast = [None if t is None else t.to(dtype=dtype) for t in (x, weight, bias)]
    return FUNCTIONS[activation or "identity"][0](F.linear(*cast))


def a_linear(M: int, K: int, N: int, activation: str, has_bias: bool, **kind) -> Tunable:
    """An nn.Linear, and what comes after it."""
    x, weight, any_bias = gaussian(M, K, **kind), gaussian(N, K, scale=K**-0.5, **kind), gaussian(N, **kind)
    bias = any_bias if has_bias else None
    kernels = functools.partial(linear_kernels, x, weight, any_bias)
    return Tunable((x, weight, bias), functools.partial(by_linear, x, weight, bias, activation), kernels)


def linear_kernels(x: Tensor, weight: Tensor, bias: Tensor) -> Iterable[Kernel]:
    """In few rows the plain product; in many every epilogue, and a weight that lies by columns."""
    w = weight.mT
    epilogues = {"none": (w, None)}
    if len(x) > FEW:  # of the activations, the tile of the first serves them all
        epilogues |= {"none, by columns": (w.contiguous(), None), "bias": (w, bias)}
        epilogues |= dict.fromkeys(sorted(ACTIVATIONS, key=lambda name: name != "gelu"), (w, bias))
    for name, (w, bias) in epilogues.items():
        activation = name if name in ACTIVATIONS else ""
        by_torch = functools.partial(by_linear, x, w.mT, bias, activation)
        yield gemm_product(name, by_torch, of_gemm(x[None], w[None], bias, activation=activation))


def added(M: int, K: int, N: int, **kind) -> Tunable:
    """alpha * a @ b + beta * c, as cutlass_gemm is called."""
    a, c, b = gaussian(M, K, **kind), gaussian(M, N, **kind), gaussian(K, N, scale=K**-0.5, **kind)

    def by_torch(dtype: torch.dtype | None = None) -> Tensor:
        return torch.addmm(*(t.to(dtype=dtype) for t in (c, a, b)), alpha=0.5, beta=2.0)

    i = of_gemm(a[None], b[None], c=c[None], alpha=0.5, beta=2.0)
    return Tunable(i, by_torch, lambda: [gemm_product("c", by_torch, i)])


def batched(B: int, M: int, K: int, N: int, **kind) -> Tunable:
    i = of_gemm(gaussian(B, M, K, **kind), gaussian(B, K, N, **kind))
    by_torch = functools.partial(by_matmul, i.x, i.w)
    return Tunable(i, by_torch, lambda: [gemm_product("batches", by_torch, i)])


def shuffled(M: int, K: int, N: int, **kind) -> Tunable:
    """An nn.Linear's product with a weight as `shuffle_weight` orders it, beside torch's own."""
    x, weight = gaussian(M, K, **kind), gaussian(N, K, scale=K**-0.5, **kind)
    ordered, by_torch = shuffle_weight(weight), functools.partial(by_linear, x, weight, None, "")

    masked, rest = IMPLS["masked_gmm"]["triton"], (x[None], ordered[None], None, None, None, True)

    def kernels() -> Iterable[Kernel]:
        out, launches = x.new_empty(M, N), {"torch": lambda out: torch.mm(x, weight.mT, out=out)}
        if "triton" in ORDER[x.device.type] and runs(masked, MaskedInputs(out[None], *rest)):
            # its tile is in the tables of masked products
            launches["triton"] = lambda out: launch_into(masked, MaskedInputs(out[None], *rest), out[None])
        asked = case_of("gemm_shuffled", x, "nt", "none", M, N, K)
        yield Kernel("shuffled", out, launches, 2 * M * N * K, by_torch, case=asked, tiled=False)

    return Tunable((x, ordered), by_torch, kernels)


def case(name: str, make: Callable[..., Tunable], *sizes: int, **named) -> Case:
    return Case(name, "x".join(map(str, sizes)), make, sizes, **named)


def linear_case(name: str, *sizes: int, activation: str = "", bias: bool = True, **named) -> Case:
    return Case(name, "x".join(map(str, sizes)), a_linear, (*sizes, activation, bias), **named)


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


def scaled(M: int, N: int, K: int, **kind) -> Tunable:
    """Scales of 1, so that a peer that has none computes the same."""
    x, w = draw(M, K, **kind), draw(N, K, **kind).mT
    one, by_torch = torch.ones(1, device=x.device), functools.partial(by_matmul, x, w)

    def kernels() -> Iterable[Kernel]:
        i, asked = ScaledInputs(x, w, one.expand(M), one.expand(N), None, torch.bfloat16), None
        launches, out = launches_of("scaled_gemm", i), torch.empty(M, N, device=x.device, dtype=i.dtype)
        if fits_blas(i):
            asked = case_of("scaled_fp8", x, "nt", "none", M, N, K)
        else:
            del launches["torch"]
        yield Kernel("scales", out, launches, 2 * M * N * K, by_torch, plain=False, case=asked)

    return Tunable((x, w, one), by_torch, kernels)


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


def sparse_weight(N: int, percent: float, block: int, **kind) -> Tensor:
    kept = (torch.rand(N // block, N // block, device=kind["device"]) * 100 >= percent).to(kind["dtype"])
    kept[0, 0] = kept[-1, -1] = 1  # whose gradients are compared
    w = torch.randn(N, N, **kind).mul_((N * (100 - percent) / 100) ** -0.5)
    return w.mul_(kept.repeat_interleave(block, 0).repeat_interleave(block, 1))


def sparse(M: int, N: int, percent: int, block: int, **kind) -> Tunable:
    x, w = torch.randn(M, N, **kind), sparse_weight(N, percent, block, **kind)
    by_torch = functools.partial(by_linear, x, w, None, "")

    def kernels() -> Iterable[Kernel]:
        pattern = SparsePattern.from_dense(w, block)
        inputs = x, pattern.take(w), None, pattern.lists, *w.shape, False
        yield sparse_product("forward", x.new_empty(M, N), by_torch, "sparse_matmul", *inputs)

    return Tunable((x, w), by_torch, kernels)


def sparse_step(M: int, N: int, percent: int, block: int, **kind) -> Tunable:
    """Forward and backward; the kernel is that of the values' gradient."""
    x, dout = torch.randn(2, M, N, **kind)
    w = sparse_weight(N, percent, block, **kind)
    pattern = SparsePattern.from_dense(w, block)

    def by_torch(dtype: torch.dtype | None = None) -> Tensor:
        return pattern.take(by_matmul(dout.T, x, dtype))

    def kernels() -> Iterable[Kernel]:
        out, inputs = x.new_empty(pattern.num_blocks, block, block), (dout, x, pattern.lists, block, block)
        yield sparse_product("gradient", out, by_torch, "sparse_matmul_grad", *inputs)

    return Tunable((x, w, dout, pattern), by_torch, kernels)


def sparse_product(name: str, out: Tensor, by_torch: Callable[..., Tensor], op: str, *inputs) -> Kernel:
    launches, values = launches_of(op, inputs), out if name == "gradient" else inputs[1]
    launches.pop("torch", None)
    return Kernel(name, out, launches, 2 * len(inputs[0]) * values.numel(), by_torch)


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
