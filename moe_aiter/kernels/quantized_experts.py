"""The experts, forward only, with weights of 8 bits that were quantised once; tokens are as they come.

    out[t] = sum over j of s[t, j] * (down8 @ f(gate_up8 @ x8[t] + gate_up_bias) + down_bias)

with a scale for each row of a weight, of a token and of what the activation gives (`quantize_rows`).  On
Hopper they take the products of `experts_fp8`, whose epilogue applies the activation.
"""

import torch
from torch import Tensor

from ..op import IMPLS, pick
from . import hopper
from ._check import check_plan, check_tensor, refuse_gradient
from .experts_fp8 import expert_up_fp8_op, gmm_unpermute_fp8_op
from .glu import glu
from .permute import unpermute
from .quantize import quantize_rows
from .scaled_gmm import scaled_gmm

ALL_ROWS = 2**62  # bytes: the rows of the second product come in one chunk


def format_of(w8: Tensor) -> str:
    return "int8" if w8.dtype == torch.int8 else "e4m3"


def by_groups(x, gate_up, down, routing_weights, plan, activation, interleaved) -> Tensor:
    order, rank, group_sizes = plan
    format = format_of(gate_up[0])
    product = x.dtype if x.dtype != torch.float64 else torch.float32

    def multiply(rows: Tensor, weight: tuple, **gathered) -> Tensor:
        w8, w_scale, bias = weight
        x8, x_scale = quantize_rows(rows, format)
        beside = x_scale, w_scale, bias
        return scaled_gmm(x8, w8.mT, group_sizes, *beside, **gathered, out_dtype=product)

    z = multiply(x, gate_up, order=order, top_k=rank.shape[1])  # (R, parts * I)
    a = glu(z, activation, interleaved)
    del z
    return unpermute(multiply(a, down), order, rank, routing_weights).to(x.dtype)


def on_hopper(x, gate_up, down, routing_weights, plan, activation, interleaved) -> Tensor:
    order, rank, group_sizes = plan
    format = format_of(gate_up[0])
    x8 = quantize_rows(x, format)
    _, a = expert_up_fp8_op(*x8, *gate_up, *plan, activation, interleaved, False, x.dtype)
    w8, w_scale, bias = down
    home = group_sizes, bias, order, rank, routing_weights, ALL_ROWS, format, False
    return gmm_unpermute_fp8_op(a, w8, w_scale, *home)


def fits_hopper(x, gate_up, down, routing_weights, plan, activation, interleaved) -> bool:
    up, (w8, *_) = gate_up[0], down
    fits = hopper.fits_up_fp8(x, None, *gate_up, *plan, activation, x.dtype)
    fits = fits and w8.shape[2] % 16 == 0 and w8.shape[1] % 8 == 0
    return fits and hopper.multiplies(up, up) and hopper.multiplies(w8, w8)


on_hopper.takes, on_hopper.fits = hopper.DTYPES, fits_hopper
IMPLS["quantized_experts"] = {"hopper": on_hopper, "triton": by_groups, "torch": by_groups}


def quantized_experts(
    x: Tensor,
    gate_up: tuple[Tensor, Tensor, Tensor | None],
    down: tuple[Tensor, Tensor, Tensor | None],
    routing_weights: Tensor,
    plan: tuple[Tensor, Tensor, Tensor],
    activation: str,
    interleaved: bool,
) -> Tensor:
    """`expert_mlp` with weights as (8 bits, scale, bias), the bias or None.

    `gate_up` (E, 2I, H), (E, 2I), (E, 2I), `down` (E, H, I), (E, H), (E, H), as `quantize_rows` gives the
    first two; `x` (T, H) of any floating dtype, which the result (T, H) has.  Not differentiable.
    Raises ValueError for shapes and devices, TypeError for dtypes, RuntimeError where it would need a
    gradient.
    """
    check_tensor("x", x)
    check_plan(plan)
    refuse_gradient("a quantised layer", x, routing_weights)
    inputs = x, gate_up, down, routing_weights, plan, activation, interleaved
    return pick("quantized_experts", *inputs)(*inputs)
