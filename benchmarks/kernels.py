"""Time the kernels that have no tile to choose: those of routing, sums that return rows to token order, and,
where the GPU multiplies 8-bit floats, those that make them.

    python -m benchmarks kernels A B C D E --out benchmarks/results/kernels.csv

Each is checked first, against its reference in float64, or where it quantises against the reference's bits.
The sums are given slices of columns as a training step of the shape has them, one of each width, weighted as
forward and plain as backward, and stand beside a copy that reads and writes as many bytes.  `moe-aiter tune`
measures the products.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Callable

import torch
from torch import Tensor

from moe_aiter.bench.layer import shape_cells
from moe_aiter.bench.measure import (
    FLOOR,
    SLACK,
    append,
    check_columns,
    count,
    distances,
    provenance,
    refuse,
    time_graphs,
)  # fmt: skip
from moe_aiter.bench.problem import SHAPES, Shape
from moe_aiter.bench.tiles import distinct_column_slices
from moe_aiter.kernels.base.fp8 import native_fp8
from moe_aiter.kernels.quantize.blocks import plan_row_blocks
from moe_aiter.kernels.quantize.rows import quantize_rows
from moe_aiter.kernels.rows.sort import sort_by_expert
from moe_aiter.op import IMPLS, INPUTS, bound, poison, use

SOFTMAX = False, True, 1.0  # over E, renormalised, not scaled
FIELDS = [
    *("date", "commit", "device", "torch", "triton", "dtype"),
    *("shape", "tokens", "hidden", "intermediate", "experts", "top_k"),
    *("kernel", "columns", "us", "gb_per_s", "copy_percent", "error"),
]


@dataclasses.dataclass
class Kernel:
    """One op's launch by the portable tier, and the bytes that it has to read and write."""

    name: str
    op: str
    inputs: tuple
    read: tuple[Tensor, ...]
    columns: int | str = ""

    def __post_init__(self):
        self.out = self.results(self.inputs)
        self.bytes = sum(t.numel() * t.element_size() for t in (*self.read, *self.out))
        self.i = INPUTS[self.op](*self.inputs)
        self.launch = bound(IMPLS[self.op]["triton"], self.i)

    def results(self, inputs: list) -> tuple[Tensor, ...]:
        out = getattr(torch.ops.moe_aiter, self.op)(*inputs)
        return out if isinstance(out, tuple) else (out,)

    def run(self) -> None:
        self.launch(self.out if len(self.out) > 1 else self.out[0], self.i)

    def check(self) -> float:
        """Run on poisoned outputs; the worst of their errors.  Raises unless they are as good as torch's."""
        poison(self.out)
        self.run()
        exact = self.by_torch(lambda t: t.double() if t.is_floating_point() else t)
        theirs = self.by_torch(lambda t: t)
        errors = []
        for mine, other, truth in zip(self.out, theirs, exact, strict=True):
            if not truth.is_floating_point():
                if not torch.equal(mine, truth):
                    raise RuntimeError(f"{self.name}: integers differ from the reference's")
                continue
            error, bar = distances([mine, other], [truth, truth])
            if not error <= SLACK * bar + FLOOR:
                raise RuntimeError(f"{self.name}: error {error:.1e}, torch {bar:.1e}")
            errors.append(error)
        return max(errors, default=0.0)

    def by_torch(self, cast: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        with use("torch"):
            return self.results([cast(t) if isinstance(t, Tensor) else t for t in self.inputs])


@dataclasses.dataclass
class Quantising(Kernel):
    """The same for 8-bit floats, in a format that leaves no choice of bits; of row blocks those in use."""

    used: object = ...  # an index

    def check(self) -> float:
        poison(self.out)
        self.run()
        for mine, other in zip(self.out, self.by_torch(lambda t: t), strict=True):
            if not torch.equal(mine.float()[self.used], other.float()[self.used]):
                raise RuntimeError(f"{self.name}: not the reference's bits")
        return 0.0


def quantising(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Kernel]:
    """What a step under `fp8=` quantises: rows, weights both ways, and rows in row blocks."""
    torch.manual_seed(0)
    T, H, I, E, k = shape.sizes  # noqa: E741
    R = T * k

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype)

    order, _, sizes = sort_by_expert(normal(T, E).topk(k).indices, E)
    rows = {"x": normal(T, H), "a": normal(R, I), "dz": normal(R, 2 * I)}
    weights = {"gate_up": normal(E, 2 * I, H), "down": normal(E, H, I)}
    found = []

    def add(name: str, op: str, *inputs, used: object = ...) -> None:
        read = (inputs[0],)
        found.append(Quantising(name, op, inputs, read, inputs[0].shape[-1], used))

    for name, t in (rows | weights).items():
        add(f"rows of {name}", "quantize_rows", t, "e4m3")
    for name, w in weights.items():
        add(f"rows, maxima of {name}", "quantize_rows_and_amax", w, "e4m3")
        amax = w.abs().amax(-2).float()
        add(f"columns of {name}", "quantize_by_amax", w.mT, amax, "e4m3")
    gate_up = weights["gate_up"]
    w8, scale = quantize_rows(gate_up)
    add("gate_up by its rows, turned", "quantize_transposed", gate_up, scale, "e4m3")
    add("bytes of gate_up, turned", "transpose_rows8", w8)
    add("rows of dz and scales", "quantize_folded", rows["dz"], scale, sizes, "e4m3")
    _, row_blocks = plan_row_blocks(sizes, R)
    used = row_blocks[:, 0] < row_blocks[:, 1]
    x8, factor = quantize_rows(rows["x"])
    for name in ("a", "dz"):
        inputs = rows[name], factor, order, k, row_blocks, "e4m3"
        add(f"row blocks of {name}", "quantize_row_blocks", *inputs, used=used)
    add("row blocks of x8", "transpose_row_blocks", x8, order, k, row_blocks, used=used)
    return found


def kernels(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Kernel]:
    """Those of one layer, forward and backward; its losses need no scores."""
    torch.manual_seed(0)
    T, _H, _, E, k = shape.sizes
    logits, dweights = (torch.randn(T, n, device=device) for n in (E, k))
    route = Kernel("route", "route", (logits, k, *SOFTMAX, False), (logits,))
    _, weights, ids = route.out
    plan = Kernel("plan", "sort_by_expert", (ids, E), (ids,))
    order, rank, _ = plan.out
    grads = weights, ids, None, dweights, None, E, *SOFTMAX
    found = [
        route,
        plan,
        Kernel("dlogits", "route_backward", grads, (weights, ids, dweights)),
    ]
    sums = ("weighted sum", weights), ("sum", None)
    for (name, s), slices in zip(sums, distinct_column_slices(shape, dtype), strict=True):
        for n in slices:
            rows = torch.randn(T * k, n.stop - n.start, device=device, dtype=dtype)
            read = (rows, rank) if s is None else (rows, rank, s)
            found.append(Kernel(name, "unpermute", (rows, order, rank, s), read, rows.shape[1]))
    return found


def measure(shape: Shape, dtype: torch.dtype, reps: int) -> list[dict]:
    """A row for each kernel of a shape, and for each copy; a line of each is printed."""
    found = kernels(shape, torch.device("cuda"), dtype)
    if torch.float8_e4m3fn in native_fp8():
        found += quantising(shape, torch.device("cuda"), dtype)
    rows = [{"kernel": k.name, "columns": k.columns, "error": k.check()} for k in found]
    runs, sizes = [k.run for k in found], [k.bytes for k in found]
    route, plan = found[:2]
    rows.append({"kernel": "route and plan", "columns": ""})
    runs.append(lambda: (route.run(), plan.run()))
    sizes.append(route.bytes + plan.bytes)
    summed = [i for i, k in enumerate(found) if k.op == "unpermute"]
    for i in summed:
        source, target = torch.empty(2, sizes[i] // 2, dtype=torch.int8, device="cuda")
        rows.append({"kernel": f"copy as of {rows[i]['kernel']}", "columns": rows[i]["columns"]})
        runs.append(lambda source=source, target=target: target.copy_(source))
        sizes.append(sizes[i])
    times = time_graphs(runs, reps)
    for row, us, size in zip(rows, times, sizes, strict=True):
        row |= {"us": us, "gb_per_s": size / us / 1e3}
    for i, copied in zip(summed, times[-len(summed) :], strict=True):
        rows[i]["copy_percent"] = 100 * copied / times[i]
    for row in rows:
        share = f"{row['copy_percent']:4.0f} % of a copy" if "copy_percent" in row else ""
        print(
            f"{row['kernel']:<22} {row['columns']:>5} {row['us']:8.1f} us {row['gb_per_s']:6.0f} GB/s {share}"
        )
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)}; default A to E")
    parser.add_argument("--reps", type=count, default=25, metavar="N", help="timed runs of each; default 25")
    parser.add_argument("--out", type=pathlib.Path, metavar="CSV", help="append the figures to this file")
    parser.add_argument("--commit", help="what is measured, where git cannot say")
    parser.set_defaults(prog=parser.prog)


def main(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        return refuse(args, "there is no GPU that torch can use")
    if strangers := set(args.shapes) - SHAPES.keys():
        return refuse(args, f"unknown shape {', '.join(sorted(strangers))}; known: {', '.join(SHAPES)}")
    try:
        check_columns(args.out, FIELDS)
    except ValueError as mistake:
        return refuse(args, str(mistake))
    where = provenance(torch.device("cuda"), "bfloat16", args.commit)
    print(", ".join(f"{k} {v}" for k, v in where.items()))
    for name in args.shapes or ["A", "B", "C", "D", "E"]:
        print(f"\nshape {name}: T, H, I, E, k = {SHAPES[name]}")
        about = where | shape_cells(name, SHAPES[name])
        rows = [about | row for row in measure(SHAPES[name], torch.bfloat16, args.reps)]
        if args.out:
            append(args.out, rows, FIELDS)
    return 0
