"""`python -m benchmarks deepgemm`: the masked product of 8-bit floats, beside ours of bfloat16 and a copy.

A product has to read the weights; the copy reads and writes as many bytes.
"""

import argparse
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moe_aiter.bench import tiles
from moe_aiter.bench.command import Asked, Command, Contest, Error, Judge, errors_of
from moe_aiter.bench.measure import WHERE, Contender, count
from moe_aiter.bench.tiles import fits
from moe_aiter.kernels.base.fp8 import native_fp8
from moe_aiter.kernels.base.shuffle import shuffle_weight
from moe_aiter.kernels.grouped.masked_gmm import MaskedInputs, masked_gmm, masked_gmm_reference
from moe_aiter.op import IMPLS, ORDER, runs, use
from moe_aiter.tuning.candidates import candidates

from .products import KernelTimer, Product, copy_of

# by device: groups, N and K (on a GPU those of AITER's test), and most rows of a group
MASKED = {"cuda": (16, 4096, 7168), "cpu": (4, 128, 224)}
MAX_M = (16, 64, 256, 1024)


def options(parser: argparse.ArgumentParser) -> None:
    for name, *sizes in zip(("groups", "n", "k"), *MASKED.values(), strict=True):
        default = "[{} on a GPU, {} on a CPU]".format(*sizes)
        parser.add_argument(f"--{name}", type=count, metavar="N", help=default)
    rows = ", ".join(map(str, MAX_M))
    parser.add_argument(
        "--max-m", nargs="+", type=count, default=MAX_M, metavar="M", help=f"rows of a group [{rows}]"
    )
    parser.add_argument("--tiles", action="store_true", help="time every candidate tile, on a GPU")


def asked(args: argparse.Namespace, kind: str) -> Iterator[Asked]:
    if args.tiles and "triton" not in ORDER[kind]:
        raise ValueError("only a GPU has tiles")
    sizes = zip((args.groups, args.n, args.k), MASKED[kind], strict=True)
    groups, n, k = (mine or usual for mine, usual in sizes)
    for max_m in args.max_m:
        title = f"{groups} groups of up to {max_m} rows, K {k}, N {n}"
        make = functools.partial(contest, groups, max_m, n, k, args.tiles)
        yield Asked(title, {"groups": groups, "max_m": max_m, "n": n, "k": k}, make)


COMMAND = Command(
    [
        *WHERE,
        *("groups", "max_m", "rows", "n", "k"),
        *("contender", "tile", "us", "tflops", "gb_per_s", "copy_percent", "times_bf16", "error"),
    ],
    (
        *("{contender:<32} {tile:<46}", "{us:9.1f} us", "{tflops:7.1f} TFLOP/s", "{gb_per_s:6.0f} GB/s"),
        *("{copy_percent:4.0f} % of a copy", "{times_bf16:5.2f} x bfloat16"),
    ),
    options,
    asked,
)


def contest(G: int, M: int, N: int, K: int, every: bool, device: torch.device, dtype: torch.dtype) -> Contest:
    """bfloat16, then 8 bits in either order of the weights, and copies of the weights.

    With `every` each product also on every backend that runs it, as it chooses and at every candidate.
    """
    x, w = torch.randn(G, M, K, device=device), torch.randn(G, N, K, device=device)
    sizes = (torch.rand(G, device=device) * 0.3 * M + 0.7 * M).ceil().int()  # 70 to 100 % of the rows
    fp8 = (native_fp8() if device.type == "cuda" else ()) or (torch.float8_e4m3fn,)
    (x8, x_scale), (w8, w_scale) = quantized(x, fp8[0]), quantized(w, fp8[0])
    out = torch.empty(G, M, N, device=device, dtype=torch.bfloat16)
    narrow, scaled = (x.bfloat16(), w.bfloat16(), sizes), (x8, w8, sizes, x_scale, w_scale)
    truth = {str(inputs[0].dtype).removeprefix("torch."): exact(out, *inputs) for inputs in (narrow, scaled)}
    field = [*products("bfloat16", out, narrow, False, every), *products("8 bits", out, scaled, False, every)]
    if N % 16 == 0 and K % 32 == 0:
        shuffled = x8, shuffle_weight(w8), *scaled[2:]
        field += products("8 bits, shuffled", out, shuffled, True, every)
    for size in sorted({contender.bytes for contender in field}):
        field.append(copy_of(size, device, f"copy of {size} bytes", bytes=size, tile="", dtype=""))
    inside = torch.arange(M, device=device) < sizes[:, None]
    return Contest(field, by_present_rows(out, inside, truth), KernelTimer(device), compare)


def products(name: str, out: Tensor, inputs: tuple, shuffled: bool, every: bool) -> Iterator[Product]:
    x, w, sizes, *scales = inputs
    rows = int(sizes.sum())
    work = {"flops": 2 * rows * w[0].numel(), "bytes": w.nbytes}
    cells = {"rows": rows, "bytes": w.nbytes, "dtype": str(x.dtype).removeprefix("torch.")}

    def contender(name: str, run: Callable[[], None], tile: str = "") -> Product:
        return Product(name, run, ours=True, **work, cells=cells | {"tile": tile})

    def product(backend: str) -> tiles.Product:
        launch = functools.partial(forced, backend, shuffled, inputs)
        return tiles.Product(f"{name}, {backend}", launch, out, work["flops"])

    yield contender(name, product("auto").run)
    impls, more = IMPLS["masked_gmm"], (*scales, None, None)[:2]
    for backend in ORDER[x.device.type] if every else ():
        if backend == "torch" or backend not in impls:
            continue
        if runs(impls[backend], MaskedInputs(out, x, w, sizes, *more, shuffled)):
            one = product(backend)
            yield contender(one.name, one.run)
            for config in candidates(one.key().op):
                run = functools.partial(one.run_with, config)
                if fits(run):
                    yield contender(one.name, run, str(config))


def forced(backend: str, shuffled: bool, inputs: tuple, out: Tensor) -> None:
    with use(backend):
        masked_gmm(out, *inputs, shuffled=shuffled)


def by_present_rows(out: Tensor, inside: Tensor, truth: dict[str, Tensor]) -> Judge:
    """On the rows that are there; the others have to stay as they are."""

    @torch.no_grad()
    def judge(contender: Contender) -> list[Error]:
        if not contender.checked:
            return []
        out.fill_(float("nan"))
        contender.run()
        others = [Error("other rows", float("nan"), 0.0)] * (not out[~inside].isnan().all())
        return errors_of([out[inside]], [truth[contender.cells["dtype"]][inside].double()], None) + others

    return judge


def compare(rows: list[dict]) -> None:
    """Beside the copy of as many bytes, and the first product, of bfloat16."""
    copies = {row["bytes"]: row["us"] for row in rows if "tflops" not in row}
    bf16 = next((row["us"] for row in rows if row["contender"] == "bfloat16"), None)
    for row in rows:
        if "tflops" in row:
            row["copy_percent"] = 100 * copies[row["bytes"]] / row["us"]
            row |= {"times_bf16": bf16 / row["us"]} if bf16 else {}


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """8-bit floats, and what multiplies each row back."""
    scale = x.abs().amax(-1) / torch.finfo(dtype).max
    return (x / scale[..., None]).to(dtype), scale


def exact(out: Tensor, x: Tensor, w: Tensor, sizes: Tensor, *scales: Tensor) -> Tensor:
    whole = torch.zeros_like(out, dtype=torch.float32)
    masked_gmm_reference(MaskedInputs(whole, x, w, sizes, *(scales or (None, None)), False))
    return whole
