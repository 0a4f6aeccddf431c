"""`moe-aiter bench deepgemm`: the masked product of 8-bit floats, beside ours of bfloat16 and a copy.

Each is checked first.  A product has to read the weights; the copy reads and writes as many bytes.
"""

import argparse
import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from .. import tuning
from ..kernels.base.fp8 import native_fp8
from ..kernels.base.shuffle import shuffle_weight
from ..kernels.grouped.masked_gmm import masked_gmm, masked_gmm_reference
from ..op import IMPLS, ORDER, runs, use
from ..tuning import Config
from ..tuning.candidates import candidates
from .measure import (
    FLOOR,
    REPS,
    SLACK,
    append,
    columns,
    copier,
    count,
    distances,
    provenance,
    refuse,
    time_calls,
    time_graphs,
)
from .problem import MASKED, MAX_M

FIELDS = [
    *("date", "commit", "device", "torch", "triton", "dtype", "groups", "max_m", "rows", "n", "k"),
    *("contender", "tile", "us", "tflops", "gb_per_s", "copy_percent", "times_bf16", "error"),
]


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

    def check(self) -> tuple[float, bool]:
        """Its error on rows that are there, and whether it is wrong: too far, or elsewhere as well."""
        inside = torch.arange(self.out.shape[1], device=self.out.device) < self.inputs[2][:, None]
        self.out.fill_(float("nan"))
        self.run()
        got, exact = self.out[inside], self.exact[inside]
        error, bar = distances([got, exact.to(got.dtype)], [exact.double()] * 2)
        return error, not error <= SLACK * bar + FLOOR or not self.out[~inside].isnan().all()

    def weight_bytes(self) -> int:
        return self.inputs[1].nbytes

    def row(self, error: float, us: float, copies: dict[int, float], bf16: float | None) -> dict:
        x, w, sizes, *_ = self.inputs
        rows, size = int(sizes.sum()), self.weight_bytes()
        row = {"contender": self.name, "tile": str(self.config or ""), "us": us, "error": error}
        row |= {"dtype": str(x.dtype).removeprefix("torch."), "rows": rows}
        row |= {"tflops": 2 * rows * w[0].numel() / us / 1e6, "gb_per_s": size / us / 1e3}
        return row | {"copy_percent": 100 * copies[size] / us} | ({"times_bf16": bf16 / us} if bf16 else {})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, *sizes in zip(("groups", "n", "k"), *MASKED.values(), strict=True):
        default = "default {} on a GPU, {} on a CPU".format(*sizes)
        parser.add_argument(f"--{name}", type=count, metavar="N", help=default)
    rows = ", ".join(map(str, MAX_M))
    parser.add_argument(
        "--max-m", nargs="+", type=count, default=MAX_M, metavar="M", help=f"rows of a group; default {rows}"
    )
    parser.add_argument("--tiles", action="store_true", help="try every candidate for a table, on a GPU")


def run(args: argparse.Namespace) -> int:
    """Measure every number of rows asked for; 1 if a product was wrong."""
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        return refuse("bench deepgemm", "there is no GPU that torch can use")
    if args.out and args.out.is_file() and columns(args.out) != FIELDS:
        return refuse("bench deepgemm", f"{args.out} has other columns: {', '.join(columns(args.out))}")
    if args.tiles and "triton" not in ORDER[kind]:
        return refuse("bench deepgemm", "only a GPU has tiles")
    if args.out:
        append(args.out, [], FIELDS)
    device = torch.device(kind)
    torch.backends.cuda.matmul.allow_tf32 = False
    given = args.groups, args.n, args.k
    groups, n, k = (mine or usual for mine, usual in zip(given, MASKED[kind], strict=True))
    where = provenance(device, "", args.commit)
    print(", ".join(f"{name} {value}" for name, value in where.items() if value))
    wrong = False
    for max_m in args.max_m:
        print(f"\n{groups} groups of up to {max_m} rows, K {k}, N {n}")
        found = list(products(device, groups, max_m, n, k, args.tiles))
        rows, bad = measure(found, args.reps or REPS[kind])
        wrong = wrong or bad
        if args.out:
            sizes = {"groups": groups, "max_m": max_m, "n": n, "k": k}
            append(args.out, [where | sizes | row for row in rows], FIELDS)
    return int(wrong)


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


def measure(found: list[Product], reps: int) -> tuple[list[dict], bool]:
    """A row for each product that is right, and for the copies of their weights; whether one was not."""
    checked = list(check(found))
    good = [(p, error) for p, error, wrong in checked if not wrong]
    sizes = sorted({p.weight_bytes() for p, _ in good})
    device = found[0].out.device
    runs = [p.run for p, _ in good] + [copier(size, device) for size in sizes]
    times = time_graphs(runs, reps) if device.type == "cuda" else time_calls(runs, reps)
    copies = dict(zip(sizes, times[len(good) :], strict=True))
    bf16 = next((us for (p, _), us in zip(good, times, strict=False) if p.name == "bfloat16"), None)
    rows = [p.row(e, us, copies, bf16) for (p, e), us in zip(good, times, strict=False)]
    for size, us in copies.items():
        rows.append({"contender": f"copy of {size} bytes", "us": us, "gb_per_s": size / us / 1e3})
    for row in rows:
        show(row)
    for product, error, wrong in checked:
        if wrong:
            print(f"{product.name} {product.config or ''}: wrong, error {error:.1e}")
    return rows, len(good) < len(checked)


def check(found: list[Product]) -> Iterable[tuple[Product, float, bool]]:
    """Each with its error and whether it is wrong, but tiles that this GPU has no shared memory for."""
    too_big: tuple = ()
    if found[0].out.is_cuda:
        from triton.runtime.errors import OutOfResources

        too_big = (OutOfResources,)
    for product in found:
        try:
            yield product, *product.check()
        except too_big:
            if product.config is None:
                raise


def show(row: dict) -> None:
    cells = [f"{row['contender']:<32} {row.get('tile', ''):<46} {row['us']:9.1f} us"]
    cells += [f"{row['tflops']:7.1f} TFLOP/s"] if "tflops" in row else [" " * 15]
    cells += [f"{row['gb_per_s']:6.0f} GB/s"]
    cells += [f"{row['copy_percent']:4.0f} % of a copy"] if "copy_percent" in row else []
    cells += [f"{row['times_bf16']:5.2f} x bfloat16"] if "times_bf16" in row else []
    print(" ".join(cells), flush=True)
