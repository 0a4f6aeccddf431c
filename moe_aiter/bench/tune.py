"""`moe-aiter tune`: measure a few configurations of each kernel, and write what wins into this GPU's table.

A candidate has to compute what the default computes, and to be clearly faster.  All of them run in turn.
A table knows sizes and not activations: every shape is measured with SwiGLU, without biases.
"""

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .. import tuning
from ..backend import IMPLS, ORDER, runs
from ..kernels import hopper, tgmm_fp8
from ..kernels._expert_inputs import ExpertInputs
from ..kernels._groups import take_rows
from ..kernels._row_bytes import row_bytes
from ..kernels.gmm_unpermute import column_chunks
from ..kernels.quantize import quantize_rows
from ..kernels.sort import sort_by_expert
from ..tuning import Config
from ..tuning.candidates import OPS, candidates
from ..tuning.table import TABLES, Key, read, write
from . import tune_gemm
from .arguments import count, refuse
from .layer import provenance
from .shapes import DEFAULT, GROUPS, SHAPES, Shape, named
from .timing import time_graphs

FASTER = 0.97  # of the default's time
CLOSE = 2e-3  # relative distance from the default's result; rounding to bfloat16 alone is 1.7e-3 from exact
COMPILE, FLUSH, RATE = 1.5, 1e-4, 5e14  # s for a configuration, s before a run, FLOP/s: for the estimate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = f"of {', '.join(SHAPES)}; or a group: {', '.join(GROUPS)}"
    parser.add_argument("--shape", nargs="+", choices=[*SHAPES, *GROUPS], metavar="NAME", help=names)
    parser.add_argument("--tokens", nargs="+", type=count, metavar="T", help="in place of the shape's own")
    parser.add_argument(
        "--op",
        nargs="+",
        choices=OPS,
        metavar="OP",
        help=f"default: those that run here; of {', '.join(OPS)}",
    )
    parser.add_argument("--out", type=pathlib.Path, metavar="CSV", help="default: the table of this GPU")
    parser.add_argument("--reps", type=count, default=15, metavar="N", help="timed runs of each; default 15")
    text = "measure dense products, and write rows of AITER's files: see its --help"
    products = parser.add_subparsers(dest="product", metavar="gemm")
    tune_gemm.add_arguments(products.add_parser("gemm", help=text, description=text.partition(":")[0]))


@dataclasses.dataclass
class Product:
    """One launch of a training step: an implementation, its outputs and its inputs."""

    name: str
    launch: Callable
    out: Tensor | tuple[Tensor, ...]
    inputs: tuple
    flops: float

    def run(self) -> None:
        self.launch(self.out, *self.inputs)

    def run_with(self, config: Config) -> None:
        with tuning.choose(lambda key: config):
            self.run()

    def outs(self) -> tuple[Tensor, ...]:
        return self.out if isinstance(self.out, tuple) else (self.out,)

    def key(self) -> Key:
        """What its launcher looks up, found by a run."""
        keys: list[Key] = []
        with tuning.choose(keys.append):
            self.run()
        return keys[0]


def main(args: argparse.Namespace) -> int:
    """Tune every shape asked for; 1 if a candidate was wrong, 2 if nothing can be measured."""
    if args.product == "gemm":
        return tune_gemm.run(args)
    if not torch.cuda.is_available():
        return refuse("tune", "there is no GPU that torch can use")
    gpu = torch.cuda.get_device_name()
    out = args.out or TABLES / f"{tuning.gpu_table(gpu)}.csv"
    try:
        write(out, [])  # a table that cannot be written shows now, not after the measurement
        read(out)
    except ValueError as error:
        return refuse("tune", str(error))
    where = provenance(torch.device("cuda"), "bfloat16")
    where["gpu"] = where.pop("device")
    print(", ".join(f"{k} {v}" for k, v in where.items()), f"-> {out}")
    wrong, done = 0, set()
    for name in named(args.shape or DEFAULT["cuda"]):
        for tokens in args.tokens or [SHAPES[name].num_tokens]:
            shape = dataclasses.replace(SHAPES[name], num_tokens=tokens)
            print(f"\nshape {name}: T, H, I, E, k = {shape}")
            wrong += tune_shape(shape, args.op, args.reps, lambda row: write(out, [row | where]), done)
            torch.cuda.empty_cache()
    return int(wrong > 0)


def tune_shape(
    shape: Shape, ops: list[str] | None, reps: int, save: Callable[[dict], None], done: set[Key]
) -> int:
    """Tune each product of one shape, and print a line of it; how many candidates were wrong.

    Shapes that differ in the number of experts alone look up the same keys: the first of them speaks, and
    what is `done` is left out.
    """
    found = [(p, p.key()) for p in products(shape, torch.device("cuda"), torch.bfloat16, bool(ops))]
    found = [(p, key) for p, key in found if not ops or key.op in ops]
    if idle := sorted({*(ops or ())} - {key.op for _, key in found}):
        print(f"nothing here runs {', '.join(idle)}")
    if shared := [p.name for p, key in found if key in done]:
        print(f"as for a shape above: {', '.join(shared)}")
    found = [(p, key) for p, key in found if key not in done]
    done.update(key for _, key in found)
    work = [(p, len({tuning.default(key), *candidates(key.op)})) for p, key in found]
    total = sum(n for _, n in work)
    seconds = sum(n * reps * (p.flops / RATE + FLUSH) for p, n in work)
    print(f"{total} configurations: about {seconds:.0f} s, and up to {COMPILE * total:.0f} s of compiling")
    print(f"{'op':<24} {'product':<10} {'rows, n, k':<20} {'default us':>10} {'best us':>9}  choice")
    wrong = 0
    for product, key in found:
        default = tuning.default(key)
        good, bad = check(product, [default, *(c for c in candidates(key.op) if c != default)])
        wrong += len(bad)
        times = measure(product, good, reps)
        choice = pick(default, times)
        save(key._asdict() | dataclasses.asdict(choice) | figures(default, choice, times))
        sizes = f"{key.rows}, {key.n}, {key.k}"
        kept = " (default)" if choice == default else ""
        us, best = times[default], min(times.values())
        print(
            f"{key.op:<24} {product.name:<10} {sizes:<20} {us:10.1f} {best:9.1f}  {choice}{kept}", flush=True
        )
        for config in bad:
            print(f"WRONG, left out: {key.op} {config}")
    return wrong


def pick(default: Config, times: dict[Config, float]) -> Config:
    """The fastest, if it is clearly faster than the default."""
    best = min(times, key=times.__getitem__)
    return best if times[best] <= FASTER * times[default] else default


def figures(default: Config, choice: Config, times: dict[Config, float]) -> dict:
    return {"us": f"{times[choice]:.1f}", "default_us": f"{times[default]:.1f}"}


def check(product: Product, configs: list[Config]) -> tuple[list[Config], list[Config]]:
    """Those that compute what the first computes, and those that do not.  What does not fit is in neither."""
    from triton.runtime.errors import OutOfResources

    good, bad, expected = [], [], None
    for config in configs:
        for out in product.outs():
            out.fill_(float("nan"))
        try:
            product.run_with(config)
        except OutOfResources:
            if expected is None:
                raise
            continue
        if expected is None:
            expected = [out.clone() for out in product.outs()]
            if any(out.isnan().any() for out in expected):
                raise RuntimeError(f"{product.name}: NaN in the result of the default, {config}")
        right = all(is_close(got, want) for got, want in zip(product.outs(), expected, strict=True))
        (good if right else bad).append(config)
    return good, bad


def is_close(got: Tensor, want: Tensor) -> bool:
    """Within CLOSE in the Frobenius norm, in parts, since a copy in float32 might not fit."""
    parts = zip(got.flatten().split(2**26), want.flatten().split(2**26), strict=True)
    sums = [torch.stack([(a.float() - b.float()).square().sum(), b.float().square().sum()]) for a, b in parts]
    error, size = torch.stack(sums).double().sum(0).tolist()
    return error <= CLOSE**2 * size


def measure(product: Product, configs: list[Config], reps: int) -> dict[Config, float]:
    """Microseconds of each."""
    runs = [functools.partial(product.run_with, config) for config in configs]
    return dict(zip(configs, time_graphs(runs, reps), strict=True))


def products(shape: Shape, device: torch.device, dtype: torch.dtype, every: bool) -> Iterable[Product]:
    """The products of a training step on ragged routing, on the tier that runs them; on all where `every`.
    On Hopper those of 8-bit floats as well."""
    tiers = [b for b in ORDER[device.type] if b in ("hopper", "triton")]
    for name, op, weights, out, inputs in step(shape, device, dtype):
        there = [IMPLS[op][b] for b in tiers if b in IMPLS[op] and runs(IMPLS[op][b], *inputs)]
        for launch in there if every else there[:1]:
            yield Product(name, launch, out, inputs, weights * shape.forward_flops / 3)
        if device.type == "cuda" and hopper.is_hopper(device) and (small := of_8_bits(op, *inputs)):
            yield Product(name, small[0], out, small[1], weights * shape.forward_flops / 3)


def of_8_bits(op: str, x: Tensor, *rest) -> tuple[Callable, tuple] | None:
    """The same product of 8-bit floats, as under `fp8=`: what launches it, and its inputs.

    None for a product that stays as it is, and for sizes that do not fit the kernels.
    """
    if op == "gmm":
        w, *after = rest
        w, before, module, fits = w.mT, (), "gmm", hopper.fits_home_fp8(x, w.mT)
    elif op == "expert_up":
        w, *after = rest
        before, module, fits = (), "expert_up", hopper.fits_up_fp8(x, None, w, None, *after, x.dtype)
    elif op == "expert_down_grad":
        z, w, *after = rest
        w, before, module, fits = w.mT, (z,), "down_grad", hopper.fits_down_grad_fp8(x, None, z, w.mT)
    elif op == "tgmm":
        y, *plan, columns_first = rest
        if not hopper.fits_tgmm_fp8(x, None, y, *plan):
            return None
        operands = tgmm_fp8.lay_out(*quantize_rows(x), y, *plan, "e4m3")
        return lambda out, *given: tgmm_fp8.multiply(out.mT if columns_first else out, *given), operands
    else:
        return None
    if not fits:
        return None
    (x8, x_scale), (w8, w_scale) = quantize_rows(x), quantize_rows(w)
    launch = hopper.launcher(module, f"launch_{module}")
    if op == "gmm":
        launch = functools.partial(launch, x_scale=x_scale, w_scale=w_scale)
    else:
        order, rank = after[1:3]
        launch = functools.partial(launch, scales=(take_rows(x_scale, order, rank.shape[1]), w_scale))
    return launch, (x8, *before, w8 if op == "expert_up" else w8.mT, *after)


def distinct_chunks(shape: Shape, dtype: torch.dtype) -> list[list[slice]]:
    """Columns of the rows of Y and of dX: one chunk of each width that a training step has."""
    T, H, width, E, k = shape.sizes
    x, gate_up, down, order, rank, sizes = (
        torch.empty(size, dtype=dtype, device="meta")
        for size in ((T, H), (E, 2 * width, H), (E, H, width), T * k, (T, k), E)
    )
    experts, plan = (x, gate_up, None, down, None, rank), (order, rank, sizes)
    most_bytes = row_bytes(ExpertInputs(*experts, *plan, "swiglu", False, save_z=True), None)
    chunks = [column_chunks(H, T * k * dtype.itemsize, most) for most in most_bytes]
    return [list({n.stop - n.start: n for n in of_one}.values()) for of_one in chunks]


def step(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[tuple]:
    """(name, op, products of H x I weights, outputs, inputs) of each launch."""
    T, H, width, E, k = shape.sizes
    R, f32 = T * k, torch.float32

    def normal(*size: int, fan_in: int = 1) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype).mul_(fan_in**-0.5)

    def empty(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(size, device=device, dtype=dtype)

    torch.manual_seed(0)
    scores = torch.randn(T, E, device=device).softmax(1)
    weights, expert_ids = scores.topk(k)
    order, rank, sizes = plan = sort_by_expert(expert_ids, E)
    x, dout, z, dz, sa = (
        normal(T, H),
        normal(T, H),
        normal(R, 2 * width),
        normal(R, 2 * width),
        normal(R, width),
    )
    gate_up, down = normal(E, 2 * width, H, fan_in=H), normal(E, H, width, fan_in=width)
    act = "swiglu", False, True
    new_z, new_a = empty(R, 2 * width), empty(R, width)
    grad = new_z, new_a, empty(T, k, dtype=f32)

    def in_chunks(name: str, weights: int, x: Tensor, w: Tensor, chunks: list[slice]) -> Iterable[tuple]:
        for n in chunks:
            columns = n.stop - n.start
            yield name, "gmm", weights * columns / H, empty(R, columns), (x, w[:, :, n], sizes, None)

    chunks_of_y, chunks_of_dx = distinct_chunks(shape, dtype)
    return [
        ("up", "expert_up", 2, (new_z, new_a), (x, gate_up, None, *plan, *act, None)),
        *in_chunks("down", 1, sa, down.mT, chunks_of_y),
        ("dz", "expert_down_grad", 1, grad, (dout, z, down, weights, *plan, *act)),
        *in_chunks("dx", 2, dz, gate_up, chunks_of_dx),
        ("ddown", "tgmm", 1, empty(E, H, width), (dout, sa, sizes, order, k, False)),
        ("dgate_up", "tgmm", 2, empty(E, 2 * width, H), (x, dz, sizes, order, k, True)),
    ]
