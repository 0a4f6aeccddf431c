"""The grouped products of a training step, for `moe-aiter tune`.

A table knows sizes and not activations: every shape is measured with SwiGLU, without biases.
"""

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..kernels import hopper
from ..kernels.base.check import take_rows
from ..kernels.experts.inputs import ExpertInputs, row_bytes
from ..kernels.grouped import tgmm_fp8
from ..kernels.grouped.gmm import column_chunks
from ..kernels.quantize.rows import quantize_rows
from ..kernels.rows.sort import sort_by_expert
from ..op import IMPLS, ORDER, runs
from .shapes import Shape
from .tiles import Product


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
        w, before, launch, fits = w.mT, (), ("gmm", "launch_gmm"), hopper.fits_home_fp8(x, w.mT)
    elif op == "expert_up":
        w, *after = rest
        before, launch = (), ("up", "launch_expert_up")
        fits = hopper.fits_up_fp8(x, None, w, None, *after, x.dtype)
    elif op == "expert_down_grad":
        z, w, *after = rest
        w, before, launch = w.mT, (z,), ("down_grad", "launch_down_grad")
        fits = hopper.fits_down_grad_fp8(x, None, z, w)
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
    launch = hopper.launcher(*launch)
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
