"""`moe-aiter bench deepgemm`: the masked product of 8-bit floats, beside ours of bfloat16 and a copy.

A product has to read the weights; the copy reads and writes as many bytes.
"""

import argparse
import dataclasses
import functools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .. import tuning
from ..kernels.base.fp8 import native_fp8
from ..kernels.base.shuffle import shuffle_weight
from ..kernels.grouped.masked_gmm import masked_gmm, masked_gmm_reference
from ..op import IMPLS, ORDER, runs, use
from ..tuning import Config
from ..tuning.candidates import candidates
from .measure import Contender, count
from .problem import MASKED, MAX_M
from .products import Asked, Case, Command, Error, Judge, Problem, copy_of, errors_of
from .tiles import fits


@dataclasses.dataclass
class Product:
    """One masked product, and what it has to come near."""

    name: str
    out: Tensor
    inputs: tuple  # of masked_gmm, after out
    shuffled: bool
    exact: Tensor
    config: Config | None = None
    backend: str = "auto"

    def run(self) -> None:
        with tuning.choose(lambda key: self.config):
            self.launch()

    def launch(self) -> None:
        with use(self.backend):
            masked_gmm(self.out, *self.inputs, shuffled=self.shuffled)

    def backends(self) -> list[str]:
        """Those that have tiles and run it, the first choice first."""
        x, *rest = (*self.inputs, None, None)[:5]
        impls = IMPLS["masked_gmm"]
        tiled = [b for b in ORDER[x.device.type] if b in impls and b != "torch"]
        return [b for b in tiled if runs(impls[b], x, *rest, self.shuffled, self.out)]

    def key(self) -> tuning.Key:
        """What its launcher looks up, found by a run."""
        keys: list[tuning.Key] = []
        with tuning.choose(keys.append):
            self.launch()
        return keys[0]

    def contender(self) -> Contender:
        x, w, sizes, *_ = self.inputs
        rows = int(sizes.sum())
        cells = {"tile": str(self.config or ""), "rows": rows, "bytes": w.nbytes}
        cells["dtype"] = str(x.dtype).removeprefix("torch.")
        flops = 2 * rows * w[0].numel()
        return Contender(self.name, self.run, ours=True, flops=flops, bytes=w.nbytes, cells=cells)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, *sizes in zip(("groups", "n", "k"), *MASKED.values(), strict=True):
        default = "default {} on a GPU, {} on a CPU".format(*sizes)
        parser.add_argument(f"--{name}", type=count, metavar="N", help=default)
    rows = ", ".join(map(str, MAX_M))
    parser.add_argument(
        "--max-m", nargs="+", type=count, default=MAX_M, metavar="M", help=f"rows of a group; default {rows}"
    )
    parser.add_argument("--tiles", action="store_true", help="try every candidate for a table, on a GPU")


def asked(args: argparse.Namespace, kind: str) -> Iterator[Asked]:
    if args.tiles and "triton" not in ORDER[kind]:
        raise ValueError("only a GPU has tiles")
    sizes = zip((args.groups, args.n, args.k), MASKED[kind], strict=True)
    groups, n, k = (mine or usual for mine, usual in sizes)
    for max_m in args.max_m:
        title = f"{groups} groups of up to {max_m} rows, K {k}, N {n}"
        make = functools.partial(problem, groups, max_m, n, k, args.tiles)
        cells = {"groups": groups, "max_m": max_m, "n": n, "k": k}
        yield Asked(title, cells, Case(str(max_m), title, make))


COMMAND = Command(
    "deepgemm",
    [
        *("date", "commit", "device", "torch", "triton", "dtype", "groups", "max_m", "rows", "n", "k"),
        *("contender", "tile", "us", "tflops", "gb_per_s", "copy_percent", "times_bf16", "error"),
    ],
    (
        *("{contender:<32} {tile:<46}", "{us:9.1f} us", "{tflops:7.1f} TFLOP/s", "{gb_per_s:6.0f} GB/s"),
        *("{copy_percent:4.0f} % of a copy", "{times_bf16:5.2f} x bfloat16"),
    ),
    asked,
)


def problem(G: int, M: int, N: int, K: int, tiles: bool, device, dtype, seed: int) -> Problem:
    """Products of every dtype, and copies of their weights; of tiles, those that the GPU has room for."""
    found = [p for p in products(device, G, M, N, K, tiles) if p.config is None or fits(p.run)]
    field = [p.contender() for p in found]
    for size in sorted({c.bytes for c in field}):
        field.append(copy_of(size, device, f"copy of {size} bytes", bytes=size, tile="", dtype=""))
    return Problem(field, judge=functools.partial(by_present_rows, found), compare=compare)


def by_present_rows(found: list[Product]) -> Judge:
    """On the rows that are there; the others have to stay as they are."""

    @torch.no_grad()
    def judge(contender: Contender) -> list[Error]:
        if not contender.checked:
            return []
        p = next(p for p in found if p.run == contender.run)
        inside = torch.arange(p.out.shape[1], device=p.out.device) < p.inputs[2][:, None]
        p.out.fill_(float("nan"))
        contender.run()
        outside = [Error("other rows", float("nan"), 0.0)] * (not p.out[~inside].isnan().all())
        return errors_of([p.out[inside]], [p.exact[inside].double()], None) + outside

    return judge


def compare(rows: list[dict]) -> None:
    """Beside the copy of as many bytes, and the first product, of bfloat16."""
    copies = {row["bytes"]: row["us"] for row in rows if "tflops" not in row}
    bf16 = next((row["us"] for row in rows if row["contender"] == "bfloat16"), None)
    for row in rows:
        if "tflops" in row:
            row["copy_percent"] = 100 * copies[row["bytes"]] / row["us"]
            row |= {"times_bf16": bf16 / row["us"]} if bf16 else {}


def products(device: torch.device, G: int, M: int, N: int, K: int, tiles: bool) -> Iterable[Product]:
    """bfloat16, then 8 bits in either order of the weights.

    With `tiles` each also on every backend that runs it, as it chooses and at every candidate.
    """
    torch.manual_seed(0)
    x, w = torch.randn(G, M, K, device=device), torch.randn(G, N, K, device=device)
    sizes = (torch.rand(G, device=device) * 0.3 * M + 0.7 * M).ceil().int()  # 70 to 100 % of the rows
    fp8 = (native_fp8() if device.type == "cuda" else ()) or (torch.float8_e4m3fn,)
    (x8, x_scale), (w8, w_scale) = quantized(x, fp8[0]), quantized(w, fp8[0])
    out = torch.empty(G, M, N, device=device, dtype=torch.bfloat16)
    narrow, scaled = (x.bfloat16(), w.bfloat16(), sizes), (x8, w8, sizes, x_scale, w_scale)
    shuffled = (x8, shuffle_weight(w8), *scaled[2:]) if N % 16 == 0 and K % 32 == 0 else None
    of_16, of_8 = (exact(out, *inputs) for inputs in (narrow, scaled))
    found = [Product("bfloat16", out, narrow, False, of_16), Product("8 bits", out, scaled, False, of_8)]
    if shuffled:
        found.append(Product("8 bits, shuffled", out, shuffled, True, of_8))
    for product in found:
        yield product
        for backend in product.backends() if tiles else ():
            of_one = dataclasses.replace(product, name=f"{product.name}, {backend}", backend=backend)
            yield of_one
            for config in candidates(of_one.key().op):
                yield dataclasses.replace(of_one, config=config)


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """8-bit floats, and what multiplies each row back."""
    scale = x.abs().amax(-1) / torch.finfo(dtype).max
    return (x / scale[..., None]).to(dtype), scale


def exact(out: Tensor, x: Tensor, w: Tensor, sizes: Tensor, *scales: Tensor) -> Tensor:
    whole = torch.zeros_like(out, dtype=torch.float32)
    masked_gmm_reference(whole, x, w, sizes, *(scales or (None, None)), False)
    return whole
