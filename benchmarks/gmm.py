"""`python -m benchmarks gmm`: grouped products beside torch's and AITER's: each is checked, then timed.

gmm     out[s:e] = x[s:e] @ w[g]       forward
ptgmm   dw[g] = x[s:e].T @ dout[s:e]   the weights' gradient; nptgmm the same by a program for each tile
"""

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moe_aiter.bench.command import Asked, Command, Contest, Error, Judge
from moe_aiter.bench.measure import (
    PEER_ERRORS,
    WHERE,
    Contender,
    PassTimer,
    add_contenders,
    add_list,
    skip,
)  # fmt: skip
from moe_aiter.bench.problem import SHAPES
from moe_aiter.kernels.grouped.gmm import GroupedInputs, gmm
from moe_aiter.kernels.grouped.ptgmm import nptgmm, ptgmm
from moe_aiter.kernels.grouped.tgmm import TgmmInputs
from moe_aiter.op import IMPLS, ORDER, runs, use

UNUSED = 0.1  # of the groups, as in AITER's benchmark
OPS = ("gmm", "ptgmm")
Size = tuple[int, int, int, int]  # M rows, K in, N out, G groups
AITER = {
    "deepseek-v2-16b": (49152, 1408, 2048, 64),
    "deepseek-v2-16b-8": (3145728, 2048, 1408, 8),
    "deepseek-v2-16b-64": (393216, 2048, 1408, 64),
    "mixtral-8x22b-up": (32768, 6144, 16384, 8),
    "mixtral-8x22b-down": (32768, 16384, 6144, 8),
    "odd": (267424, 1280, 2560, 32),
}


def ours() -> Iterator[tuple[str, Size]]:
    """Both products of the layers that `bench layer` measures by default."""
    for name in "ABCDE":
        T, H, width, E, k = SHAPES[name].sizes
        yield f"{name}-up", (T * k, H, 2 * width, E)
        yield f"{name}-down", (T * k, width, H, E)


SIZES = AITER | dict(ours()) | {"cpu": (8192, 512, 512, 32), "toy": (50, 16, 24, 5)}
DEFAULT = {"cuda": [name for name in SIZES if name not in ("cpu", "toy")], "cpu": ["cpu"]}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape",
        nargs="+",
        choices=SIZES,
        metavar="NAME",
        help="shapes, as --list prints them [all but the last two on a GPU, cpu on a CPU]",
    )
    add_list(parser, lambda: ", ".join(SIZES))
    parser.add_argument("--op", nargs="+", choices=OPS, default=OPS, help="products [both]")
    parser.add_argument(
        "--transposed",
        action="store_true",
        help="store weights as (G, N, K), and the first operand of ptgmm as (K, M)",
    )
    add_contenders(parser)


def asked(args: argparse.Namespace, kind: str) -> Iterator[Asked]:
    layout = "transposed" if args.transposed else "plain"
    for name in args.shape or DEFAULT[kind]:
        size = SIZES[name]
        for op in args.op:
            shape = ", ".join(map(str, size))
            cells = {"op": op, "layout": layout, "shape": name} | dict(zip("mkng", size, strict=True))
            make = functools.partial(contest, op, size, args.transposed)
            yield Asked(f"{op} {name}: M, K, N, G = {shape}", cells, make)


COMMAND = Command(
    [
        *WHERE,
        *("op", "layout", "shape", "m", "k", "n", "g"),
        *("contender", "ms", "p20", "p80", "tflops", "error", "torch_error"),
    ],
    ("{contender:<32}", "{ms:9.3f} ms", "{tflops:8.2f} TFLOP/s", "{error:9.1e}"),
    options,
    asked,
    demands=any,
)


class Product:
    """The operands that all contenders share; a round renews the rows and how they are grouped."""

    def __init__(self, op: str, size: Size, dtype: torch.dtype, device: torch.device, transposed: bool):
        M, K, N, G = size

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=dtype, device=device)

        self.op = op
        if op == "gmm":  # x (M, K) and w (G, K, N)
            w = normal(G, N, K).mT if transposed else normal(G, K, N)
            self.x, self.other = normal(M, K), w.mul_(K**-0.5)
        else:  # x (M, K) and dout (M, N)
            self.x, self.other = normal(K, M).T if transposed else normal(M, K), normal(M, N)
        sizes = (torch.zeros(G, dtype=torch.int32, device=device) for _ in range(2))
        self.group_sizes, self.ends = sizes  # (G,), and their running sum
        self.renew(0)

    def renew(self, seed: int) -> None:
        torch.manual_seed(seed)
        G = len(self.group_sizes)
        used = (torch.rand(G) >= UNUSED).nonzero().flatten()
        used = used if len(used) else torch.zeros(1, dtype=torch.int64)
        groups = used[torch.randint(len(used), (len(self.x),))]
        self.group_sizes.copy_(torch.bincount(groups, minlength=G))
        self.ends.copy_(self.group_sizes.cumsum(0))
        self.x.normal_()

    def exact(self, g: int, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return the right result for the rows of group `g`, computed in `dtype`."""
        x, other = self.x[start:end].to(dtype), self.other
        return x @ other[g].to(dtype) if self.op == "gmm" else x.T @ other[start:end].to(dtype)


def contest(op: str, size: Size, transposed: bool, device: torch.device, dtype: torch.dtype) -> Contest:
    product = Product(op, size, dtype, device, transposed)
    timer = PassTimer(product, 2 * math.prod(size[:3]))
    return Contest(list(runners(product)), by_group(product), timer)


def runners(p: Product) -> Iterator[Contender]:
    """Ours by each implementation here but the reference on a GPU, then torch's and AITER's."""
    variants = {"gmm": gmm} if p.op == "gmm" else {"ptgmm": ptgmm, "nptgmm": nptgmm}
    lhs = p.x if p.op == "gmm" else p.x.T
    for backend in implementations(p):
        for name, fn in variants.items():
            yield Contender(
                f"moe_aiter {name}, {backend}", functools.partial(forced, backend, fn, lhs, p), ours=True
            )
    yield Contender("torch grouped_mm", lambda: torch._grouped_mm(lhs, p.other, offs=p.ends))
    try:
        theirs = __import__("aiter.ops.triton.gmm", fromlist=list(variants))
    except PEER_ERRORS as error:
        skip("AITER", error)
        return
    for name in variants:
        fn = getattr(theirs, name)
        how = {"preferred_element_type": p.x.dtype}
        yield Contender(f"aiter {name}", functools.partial(fn, lhs, p.other, p.group_sizes, **how))


def implementations(p: Product) -> list[str]:
    """The backends that run this product here."""
    device = p.x.device.type
    inputs = p.x, p.other, p.group_sizes, None
    op, i = ("gmm", GroupedInputs(*inputs)) if p.op == "gmm" else ("tgmm", TgmmInputs(*inputs, 1, False))
    there = [b for b in ORDER[device] if b in IMPLS[op] and (b != "torch" or device == "cpu")]
    return [b for b in there if runs(IMPLS[op][b], i)]


def forced(backend: str, fn: Callable, lhs: Tensor, p: Product) -> Tensor:
    with use(backend), torch.no_grad():
        return fn(lhs, p.other, p.group_sizes)


def by_group(p: Product) -> Judge:
    """In the Frobenius norm of all groups, one group after another, to hold little."""

    @torch.no_grad()
    def judge(contender: Contender) -> list[Error]:
        out = contender.run()
        ends = [0, *p.ends.tolist()]
        squares = torch.zeros(3, dtype=torch.float64, device=p.x.device)  # its, torch's and the truth's
        for g, (start, end) in enumerate(itertools.pairwise(ends)):
            if start == end and p.op == "gmm":
                continue
            truth = p.exact(g, start, end, torch.float64)
            got = out[start:end] if p.op == "gmm" else out[g]
            if start == end:  # torch and AITER leave such a plane as they find it
                got = got if contender.ours else torch.zeros_like(got)
            terms = got.double() - truth, p.exact(g, start, end, p.x.dtype).double() - truth, truth
            squares += torch.stack([term.square().sum() for term in terms])
        error, torch_error, norm = squares.sqrt().tolist()
        return [Error("output", error / max(norm, 1e-30), torch_error / max(norm, 1e-30))]

    return judge
