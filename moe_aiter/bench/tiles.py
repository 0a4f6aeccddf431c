"""How `moe-aiter tune` tunes a product: it checks and times each tile, and takes one.

The products are those of a training step, measured with SwiGLU and without biases, because a table does not
depend on them, and those of cases.py.  Where torch has a product too, the kernels with their best tiles
are timed beside torch, whose epilogue counts as well, and the fastest becomes a row of the table of choices.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .. import tuning
from ..kernels import hopper
from ..kernels.base.tile import column_slices
from ..kernels.experts import mlp as _experts_ops  # noqa: F401  defines the ops of a step
from ..kernels.experts.fp8 import DownGradFp8Inputs, GmmUnpermuteFp8Inputs, UpFp8Inputs
from ..kernels.experts.inputs import ExpertInputs, row_bytes
from ..kernels.grouped.four_bit import FourBitInputs
from ..kernels.grouped.tgmm_fp8 import TgmmFp8Inputs, bind_columns, lay_out, quantize_y
from ..kernels.quantize.blocks import plan_row_blocks
from ..kernels.quantize.four_bit import quantized
from ..kernels.quantize.rows import quantize_rows
from ..kernels.rows.sort import sort_by_expert
from ..op import IMPLS, INPUTS, ORDER, bound, poison, runs
from ..op import pick as pick_backend
from ..tuning import Config
from ..tuning.choice import ChoiceKey
from ..tuning.table import Key
from .command import errors_of
from .measure import Outputs, as_tuple, distances, time_graphs
from .problem import Shape

Launch = Callable[[Tensor | tuple[Tensor, ...]], None]  # of a kernel into these outputs
FASTER = 0.97  # of the default's time
CLOSE = 2e-3  # relative distance from the default's result; rounding to bfloat16 alone is 1.7e-3 from exact


@dataclasses.dataclass
class Product:
    """One launch of a kernel that looks a tile up."""

    name: str
    launch: Launch
    out: Tensor | tuple[Tensor, ...]
    flops: float
    accept: Callable[[tuple[Tensor, ...]], bool] | None = None  # else what is near the default's result
    rival: Callable[[], None] | None = None  # the Hopper kernel, if this is the portable one

    def run(self) -> None:
        self.launch(self.out)

    def run_with(self, config: Config) -> None:
        with tuning.choose(lambda key: config):
            self.run()

    def outs(self) -> tuple[Tensor, ...]:
        return as_tuple(self.out)

    def key(self) -> Key:
        """The key that the launcher looks up, found by running it."""
        keys: list[Key] = []
        with tuning.choose(keys.append):
            self.run()
        return keys[0]


@dataclasses.dataclass
class Kernel:
    """A product of cases.py by each backend that has it, into the same outputs."""

    name: str
    outs: Tensor | tuple[Tensor, ...]  # those of no elements do not count
    launches: dict[str, Launch]  # by backend
    flops: float
    by_torch: Callable[..., Outputs]  # what torch makes of it in a dtype, else in that of the inputs
    plain: bool = True  # whether the latter's error is the bar; else that of the truth, rounded
    case: ChoiceKey | None = None  # what the table of choices asks for, where torch is among the backends
    tiled: bool = True

    def products(self) -> dict[str, Product]:
        """Return the products of all backends but torch."""
        accept = functools.cache(self.judge)  # the truth is computed once, and only where a tile is checked
        return {
            backend: Product(self.name, launch, self.outs, self.flops, lambda outs: accept()(outs))
            for backend, launch in self.launches.items()
            if backend != "torch"
        }

    def judge(self) -> Callable[[tuple[Tensor, ...]], bool]:
        """Whether outputs are no further from the truth than SLACK times what plain torch's are."""
        exact = as_tuple(self.by_torch(torch.float64))
        bars = distances(as_tuple(self.by_torch()), exact) if self.plain else None

        def accept(outs: tuple[Tensor, ...]) -> bool:
            outs = tuple(out for out in outs if out.numel())
            outs = tuple(out.view(e.shape) for out, e in zip(outs, exact, strict=True))
            return all(error.of_the_bar <= 1 for error in errors_of(outs, exact, bars))

        return accept


def launch_into(impl: Callable, i: tuple, out: Tensor | tuple[Tensor, ...]) -> None:
    """Launch an implementation, which decides anew at each call."""
    bound(impl, i)(out, i)


def launches_of(op: str, inputs: tuple) -> dict[str, Launch]:
    """The backends of an op that take these inputs, torch among them."""
    i, there = INPUTS[op](*inputs), [b for b in ORDER[inputs[0].device.type] if b in ("hopper", "triton")]
    impls = {b: IMPLS[op][b] for b in (*there, "torch") if b in IMPLS[op]}
    return {b: functools.partial(launch_into, impl, i) for b, impl in impls.items() if runs(impl, i)}


def pick_tile(default: Config, times: dict[Config, float]) -> Config:
    """The fastest, if it is clearly faster than the default."""
    best = min(times, key=times.__getitem__)
    return best if times[best] <= FASTER * times[default] else default


def check_tiles(product: Product, configs: list[Config]) -> tuple[list[Config], list[Config]]:
    """Return the tiles with right results and those with wrong ones; tiles that do not fit are in neither."""
    good, bad, accept = [], [], product.accept
    for config in configs:
        poison(product.outs())
        if not fits(functools.partial(product.run_with, config)):
            if config is configs[0]:
                raise RuntimeError(f"{product.name}: there is no room for the default, {config}")
            continue
        accept = accept or like_the_default(product, config)
        (good if accept(product.outs()) else bad).append(config)
    return good, bad


def fits(call: Callable[[], object]) -> bool:
    """Whether this GPU has room for the tile of a call."""
    from triton.runtime.errors import OutOfResources

    try:
        call()
    except OutOfResources:
        return False
    return True


def like_the_default(product: Product, config: Config) -> Callable[[tuple[Tensor, ...]], bool]:
    expected = [out.clone() for out in product.outs()]
    if any(out.isnan().any() for out in expected):
        raise RuntimeError(f"{product.name}: NaN in the result of the default, {config}")
    return lambda outs: all(is_close(got, want) for got, want in zip(outs, expected, strict=True))


def is_close(got: Tensor, want: Tensor) -> bool:
    """Within CLOSE in the Frobenius norm, slice by slice, since a copy in float32 might not fit."""
    pairs = zip(got.flatten().split(2**26), want.flatten().split(2**26), strict=True)
    sums = [torch.stack([(a.float() - b.float()).square().sum(), b.float().square().sum()]) for a, b in pairs]
    error, size = torch.stack(sums).double().sum(0).tolist()
    return error <= CLOSE**2 * size


def time_tiles(product: Product, configs: list[Config], reps: int) -> dict[Config | None, float]:
    """Microseconds of each; None: of the rival."""
    runs = {config: functools.partial(product.run_with, config) for config in configs}
    if product.rival:
        runs[None] = product.rival
    return dict(zip(runs, time_graphs(list(runs.values()), reps), strict=True))


def step_products(shape: Shape, device: torch.device, dtype: torch.dtype, every: bool) -> Iterable[Product]:
    """The products of a training step on ragged routing, on the tier that runs them; on all where `every`.
    On Hopper those of 8-bit floats as well."""
    for name, op, weights, out, inputs in step(shape, device, dtype):
        launches, picked = launches_of(op, inputs), pick_backend(op, INPUTS[op](*inputs))
        launches.pop("torch", None)
        flops, first = weights * shape.forward_flops / 3, next(iter(launches.values()), None)
        for backend, launch in launches.items():
            if every or IMPLS[op][backend] is picked:
                rival = None if launch is first else functools.partial(first, out)
                yield Product(name, launch, out, flops, rival=rival)
        if device.type == "cuda" and hopper.is_hopper(device) and (small := launch_of_8_bits(op, inputs)):
            yield Product(name, small, out, flops)


def launch_of_8_bits(op: str, inputs: tuple) -> Launch | None:
    """Return the launch of the product in 8-bit floats, as under `fp8=`.

    None for a product that stays as it is, and for sizes that do not fit the kernels.
    """
    if op == "gmm":
        x, w, sizes, bias = inputs
        i = GmmUnpermuteFp8Inputs(x, None, w.mT, None, sizes, bias, None, None, None, 0, False, x.dtype)
        if not hopper.fits_gmm_unpermute_fp8(i):
            return None
        (x8, x_scale), (w8, w_scale) = quantize_rows(x), quantize_rows(w.mT)
        bind, size = hopper.launcher("gmm", "bind_product"), (*x8.shape, len(w8))
        operands = x8, w8.mT, sizes, bias, None, x_scale, w_scale
        return lambda out: bind(x8, w8.mT, size, x.dtype)(out, *operands)
    if op == "tgmm":
        x, y, *plan, columns_first = inputs
        group_sizes, order, top_k = plan
        row_blocks, x8 = plan_row_blocks(group_sizes, len(y)), quantize_rows(x)
        y8 = quantize_y(row_blocks, order, top_k, "e4m3", x8[1], y)
        i = TgmmFp8Inputs(*x8, *y8, *plan, 0, columns_first)
        if not hopper.fits_tgmm_fp8(i):
            return None
        operands, K = lay_out(i, slice(None)), i.x8.shape[1]
        return lambda out: bind_columns(i, K, (out if columns_first else out.mT).stride())(out, *operands)
    if op == "expert_up":
        x, w, *after, _, _, _ = inputs
        fits, i = hopper.fits_up_fp8, UpFp8Inputs(*quantize_rows(x), *quantize_rows(w), *after, x.dtype)
    elif op == "expert_down_grad":
        dout, z, w, *after, _ = inputs
        i = DownGradFp8Inputs(*quantize_rows(dout), z, *quantize_rows(w.mT), *after)
        fits = hopper.fits_down_grad_fp8
    else:
        return None
    return functools.partial(launch_into, IMPLS[f"{op}_fp8"]["hopper"], i) if fits(i) else None


def distinct_column_slices(shape: Shape, dtype: torch.dtype) -> list[list[slice]]:
    """Columns of the rows of Y and of dX: one slice of each width that a training step has."""
    T, H, width, E, k = shape.sizes
    x, gate_up, down, order, rank, sizes = (
        torch.empty(size, dtype=dtype, device="meta")
        for size in ((T, H), (E, 2 * width, H), (E, H, width), T * k, (T, k), E)
    )
    experts, plan = (x, gate_up, None, down, None, rank), (order, rank, sizes)
    most_bytes = row_bytes(ExpertInputs(*experts, *plan, "swiglu", False, save_z=True), None)
    columns = [column_slices(H, T * k * dtype.itemsize, most) for most in most_bytes]
    return [list({n.stop - n.start: n for n in of_one}.values()) for of_one in columns]


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
    order, _rank, sizes = plan = sort_by_expert(expert_ids, E)
    x, dout, z, dz = normal(T, H), normal(T, H), normal(R, 2 * width), normal(R, 2 * width)
    sa = normal(R, width)
    gate_up, down = normal(E, 2 * width, H, fan_in=H), normal(E, H, width, fan_in=width)
    act = "swiglu", False, True
    new_z, new_a = empty(R, 2 * width), empty(R, width)
    grad = new_z, new_a, empty(T, k, dtype=f32)

    def in_columns(name: str, weights: int, x: Tensor, w: Tensor, slices: list[slice]) -> Iterable[tuple]:
        for n in slices:
            columns = n.stop - n.start
            yield name, "gmm", weights * columns / H, empty(R, columns), (x, w[:, :, n], sizes, None)

    y_columns, dx_columns = distinct_column_slices(shape, dtype)
    return [
        ("up", "expert_up", 2, (new_z, new_a), (x, gate_up, None, *plan, *act, 0, None, None)),
        *in_columns("down", 1, sa, down.mT, y_columns),
        ("dz", "expert_down_grad", 1, grad, (dout, z, down, weights, *plan, *act, None)),
        *in_columns("dx", 2, dz, gate_up, dx_columns),
        ("ddown", "tgmm", 1, empty(E, H, width), (dout, sa, sizes, order, k, False)),
        ("dgate_up", "tgmm", 2, empty(E, 2 * width, H), (x, dz, sizes, order, k, True)),
    ]


def four_bit_products(
    shape: Shape, device: torch.device, dtype: torch.dtype, every: bool = False
) -> Iterable[Product]:
    """Return the products of a step with frozen 4-bit experts, on the tier that runs, or on `every` tier.

    In NF4: all formats share a table.
    """
    T, H, width, E, k = shape.sizes
    torch.manual_seed(0)
    _, expert_ids = torch.randn(T, E, device=device).topk(k)
    order, _, sizes = sort_by_expert(expert_ids, E)
    for name, transpose, weights, rows, columns in (
        ("up", True, 2, 2 * width, H),
        ("down", True, 1, H, width),
        ("da", False, 1, H, width),
        ("dx", False, 2, 2 * width, H),
    ):
        w = quantized(torch.randn(E, rows, columns, device=device, dtype=dtype), "nf4")
        K, N = (columns, rows) if transpose else (rows, columns)
        gathered = (order, k) if name == "up" else (None, 1)
        x = torch.randn(T if name == "up" else T * k, K, device=device, dtype=dtype)
        inputs = FourBitInputs(x, w.packed, *w.parts, transpose, sizes, None, *gathered)
        launches = launches_of("four_bit_gmm", inputs)
        del launches["torch"]
        for launch in list(launches.values())[: None if every else 1]:
            yield Product(name, launch, x.new_empty(T * k, N), weights * shape.forward_flops / 3)


CLEAR = 0.99  # of torch's time; between two launches of the same kernel there is less


def compare_backends(kernel: Kernel, tiles: dict[Key, Config], reps: int) -> tuple[dict, list[str]]:
    """The cells of a row, none where torch is alone, and the backends that are not as good as torch."""
    runs, wrong, accept, outs = {}, [], kernel.judge(), as_tuple(kernel.outs)
    for backend, run in launched(kernel, tiles).items():
        poison(outs)
        run()
        if accept(outs):
            runs[backend] = run
        else:
            wrong.append(backend)
    if "torch" not in runs or len(runs) == 1:
        return {}, wrong
    times = dict(zip(runs, time_graphs(list(runs.values()), reps), strict=True))
    backend, us = fastest(times)
    words = ", ".join(f"{name} {us:.1f}" for name, us in times.items())
    print(f"{kernel.name:<35} {words} us -> {backend}", flush=True)
    figures = {"us": f"{us:.1f}", "torch_us": f"{times['torch']:.1f}"}
    cells = {name: "" if cell is None else cell for name, cell in kernel.case._asdict().items()}
    return cells | {"backend": backend} | figures, wrong


def launched(kernel: Kernel, tiles: dict[Key, Config]) -> dict[str, Callable[[], None]]:
    """Return each backend's kernel with the tile that won, or with the tables' tile if none was measured."""
    runs = {}
    for backend, product in kernel.products().items():
        tile = tiles.get(product.key()) if kernel.tiled else None
        runs[backend] = functools.partial(product.run_with, tile) if tile else product.run
    return runs | {"torch": functools.partial(kernel.launches["torch"], kernel.outs)}


def fastest(times: dict[str, float]) -> tuple[str, float]:
    """The backend that is chosen, and the time of the fastest kernel: only what is clearly faster than torch
    is."""
    best = min((name for name in times if name != "torch"), key=times.__getitem__)
    return best if times[best] <= CLEAR * times["torch"] else "torch", times[best]
