"""The activation between an expert's two products, gated or not, and its gradient.

    gated   out = f(gate) * h(up)  z = gate | up, or their columns in turn if interleaved
    plain   out = f(z)

R rows, I intermediate channels; the width of z is 2I, or I for a plain activation.  `activations.py` lists f
and h; mostly h(up) = up.
"""

import functools
from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...op import binds, define_op, gradients, takes
from ..base.activations import Caps, Limits, get_activation, join_gate_up, split_gate_up, torch_cap
from ..base.check import Operand, check_fields, check_float, check_size
from ..base.fixed_rows import each_number
from ..base.host import HOST_DTYPES, array, ext, host, num_threads
from ..base.launch import bind_kernel, cdiv, jit_kernel, next_power_of_2, tl
from ..base.tile import in_units, unit_of

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = 2048  # elements of the output that a program of 4 warps makes


def torch_silu_limit_backward(dout: Tensor, x: Tensor, n: Limits) -> Tensor:
    y = x.clamp(max=n.gate_max)
    sig = torch.sigmoid(n.alpha * y)
    return (dout * (sig + n.alpha * (y * sig) * (1 - sig))).where(~(x > n.gate_max), 0)


def torch_cap_backward(dout: Tensor, x: Tensor, cap: float) -> Tensor:
    return torch.ops.aten.tanh_backward(dout, torch.tanh(x / cap))


def torch_silu_softcap_backward(dout: Tensor, x: Tensor, n: Caps) -> Tensor:
    sig = torch.sigmoid(x)
    dsig = torch.ops.aten.sigmoid_backward(dout * torch_cap(x, n.gate_cap), sig)
    return torch_cap_backward(dout * sig, x, n.gate_cap) + dsig


TORCH_GRADIENTS = {  # of f and h: (dout, x) -> dx, as autograd has it
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": functools.partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "relu": lambda dout, x: torch.ops.aten.threshold_backward(dout, x, 0),
    "relu2": lambda dout, x: 2 * F.relu(x) * dout,
    "silu_limit": torch_silu_limit_backward,
    "up_limit": lambda dout, x, n: dout.where(~(x.abs() > n.up_limit), 0),
    "silu_softcap": torch_silu_softcap_backward,
    "up_softcap": lambda dout, x, n: torch_cap_backward(dout, x, n.up_cap),
    "identity": lambda dout, x: dout,
}


class GluInputs(NamedTuple):
    """The inputs of the op `glu`: f(gate) * h(up), or f(z) for a plain activation."""

    z: Annotated[Operand, "R, width"]
    activation: str
    interleaved: bool


class GluBackwardInputs(NamedTuple):
    """The inputs of the op `glu_backward`: the gradient of z."""

    dout: Annotated[Tensor, "R, I"]
    z: Annotated[Operand, "R, width"]
    activation: str
    interleaved: bool


# reference
def glu_reference(i: GluInputs) -> Tensor:
    return get_activation(i.activation)(i.z, i.interleaved)


def glu_backward_reference(i: GluBackwardInputs) -> Tensor:
    act = get_activation(i.activation)
    if not act.gated:
        return each_number(TORCH_GRADIENTS[act.base], i.dout, i.z)

    def gradient(name: str, dout: Tensor, x: Tensor) -> Tensor:
        return each_number(lambda d, t: TORCH_GRADIENTS[name](d, t, *act.limits), dout, x)

    gate, up = split_gate_up(i.z, i.interleaved)
    dgate = gradient(act.base, i.dout * act.torch_up(up), gate)
    dup = gradient(act.up, i.dout * act.torch_fn(gate), up)
    return join_gate_up(dgate, dup, i.interleaved)


# kernel
@jit_kernel
def glu_kernel(
    z_ptr,  # (R, width)
    out_ptr,  # (R, I)
    R,
    I,  # noqa: E741
    z_strides,  # row, channel, from gate to up
    ACTIVATION: tl.constexpr, UP: tl.constexpr, UNIT: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
):  # fmt: skip
    I, z_strides = in_units((I, z_strides), UNIT)  # noqa: E741
    r = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
    i = (tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)).to(tl.int64)[None, :]
    mask = (r < R) & (i < I)
    z_ptrs = z_ptr + r * z_strides[0] + i * z_strides[1]
    out = ACTIVATION(tl.load(z_ptrs, mask=mask, other=0.0).to(tl.float32))[0]
    if UP is not None:
        out *= UP(tl.load(z_ptrs + z_strides[2], mask=mask, other=0.0).to(tl.float32))[0]
    tl.store(out_ptr + r * I + i, out.to(out_ptr.dtype.element_ty), mask=mask)


@jit_kernel
def glu_backward_kernel(
    dout_ptr,  # (R, I)
    z_ptr,  # (R, width)
    dz_ptr,  # (R, width)
    R,
    I,  # noqa: E741
    dout_strides,  # row, channel
    z_strides,  # row, channel, from gate to up
    dz_strides,  # the same
    ACTIVATION: tl.constexpr, UP: tl.constexpr, UNIT: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
):  # fmt: skip
    I, dout_strides, z_strides, dz_strides = in_units((I, dout_strides, z_strides, dz_strides), UNIT)  # noqa: E741
    r = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
    i = (tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)).to(tl.int64)[None, :]
    mask = (r < R) & (i < I)
    z_ptrs = z_ptr + r * z_strides[0] + i * z_strides[1]
    dz_ptrs = dz_ptr + r * dz_strides[0] + i * dz_strides[1]
    dout = tl.load(dout_ptr + r * dout_strides[0] + i * dout_strides[1], mask=mask, other=0.0).to(tl.float32)
    value, slope = ACTIVATION(tl.load(z_ptrs, mask=mask, other=0.0).to(tl.float32))
    if UP is not None:
        up, up_slope = UP(tl.load(z_ptrs + z_strides[2], mask=mask, other=0.0).to(tl.float32))
        tl.store(dz_ptrs + dz_strides[2], (dout * value * up_slope).to(dz_ptr.dtype.element_ty), mask=mask)
        slope *= up
    tl.store(dz_ptrs, (dout * slope).to(dz_ptr.dtype.element_ty), mask=mask)


# launcher
def new_glu(i: GluInputs | GluBackwardInputs) -> Tensor:
    check_fields(i)
    act = get_activation(i.activation)
    if i.interleaved and not act.gated:
        raise ValueError(f"interleaved is set but {i.activation} has no gate to interleave")
    if i.z.shape[1] % act.projections:
        raise ValueError(f"z has {i.z.shape[1]} columns but {i.activation} needs pairs of gate and up")
    return i.z.new_empty(i.z.shape[0], i.z.shape[1] // act.projections)


def new_glu_backward(i: GluBackwardInputs) -> Tensor:
    check_float(z=i.z, dout=i.dout)
    channels = new_glu(i).shape[1]
    check_size("dout is (R, I={})", i.dout.shape[1], f"z with {i.activation} gives I={{}}", channels)
    return i.z.new_empty(i.z.shape)


def channel_strides(z: Tensor, channels: int, interleaved: bool) -> tuple[int, int, int]:
    """From one row, one channel, and a channel's gate to its up, to the next."""
    row, column = z.stride()
    return (row, 2 * column, column) if interleaved else (row, column, channels * column)


def tile(rows: int, channels: int) -> tuple[tuple[int, int], dict]:
    """The grid, and the launch arguments that say a program's share."""
    block_i = min(512, next_power_of_2(channels))
    block_r = min(TILE // block_i, next_power_of_2(rows))
    return (cdiv(rows, block_r), cdiv(channels, block_i)), {
        "BLOCK_R": block_r,
        "BLOCK_I": block_i,
    }


@binds
@takes(*TRITON_DTYPES)
def bind_glu(i: GluInputs) -> Callable:
    act, rows = get_activation(i.activation), i.z.shape[0]
    channels = i.z.shape[1] // act.projections
    grid, blocks = tile(rows, channels)
    strides = channel_strides(i.z, channels, i.interleaved)
    unit, numbers = unit_of((channels,), strides), (rows, channels, strides)
    kernel = bind_kernel(glu_kernel, grid, **act.triton_fns, UNIT=unit, **blocks)
    return lambda out, i: kernel(i.z, out, *numbers)


@binds
@takes(*TRITON_DTYPES)
def bind_glu_backward(i: GluBackwardInputs) -> Callable:
    act, (rows, channels) = get_activation(i.activation), i.dout.shape
    grid, blocks = tile(rows, channels)
    like_dz = i.z.new_empty(0, i.z.shape[1])  # contiguous, as dz is
    z_strides = (channel_strides(t, channels, i.interleaved) for t in (i.z, like_dz))
    strides = i.dout.stride(), *z_strides
    unit, numbers = unit_of((channels,), *strides), (rows, channels, *strides)
    kernel = bind_kernel(glu_backward_kernel, grid, **act.triton_fns, UNIT=unit, **blocks)
    return lambda dz, i: kernel(i.dout, i.z, dz, *numbers)


@takes(*HOST_DTYPES)
def launch_glu_host(out: Tensor, i: GluInputs) -> None:
    act = get_activation(i.activation)
    ext.glu(array(i.z), array(out), *act.host_arguments, i.interleaved, num_threads())


@takes(*HOST_DTYPES)
def launch_glu_backward_host(dz: Tensor, i: GluBackwardInputs) -> None:
    act, arrays = get_activation(i.activation), map(array, (i.dout, i.z, dz))
    ext.glu_backward(*arrays, *act.host_arguments, i.interleaved, num_threads())


# op
def save_glu(ctx, i: GluInputs, output):
    ctx.activation, ctx.interleaved = i.activation, i.interleaved
    ctx.save_for_backward(i.z)


def backward_glu(ctx, dout):
    (z,) = ctx.saved_tensors
    return gradients(GluInputs, z=glu_backward_op(dout, z, ctx.activation, ctx.interleaved))


glu_op = define_op(
    "glu", GluInputs, new=new_glu, reference=glu_reference, triton=bind_glu, host=host(launch_glu_host),
    save=save_glu, backward=backward_glu,
)  # fmt: skip
glu_backward_op = define_op(
    "glu_backward", GluBackwardInputs, new=new_glu_backward, reference=glu_backward_reference,
    triton=bind_glu_backward, host=host(launch_glu_backward_host),
)  # fmt: skip


# public
def glu(z: Tensor, activation: str, interleaved: bool = False) -> Tensor:
    """Apply an expert's activation to `z`, (R, 2I) or (R, I); returns (R, I) in the dtype of `z`.

    swiglu, geglu, geglu_tanh, reglu (Shazeer 2020, arXiv 2002.05202), swiglu_oai (gpt-oss) and what
    `swiglu_limit` and `swiglu_softcap` return are gated: `z` is (R, 2I), its first I columns are the gate and
    the others up; with `interleaved`, gate and up alternate.  silu, gelu, relu and relu2 are plain: `z` is
    (R, I).
    `activations.py` has the formulas.
    Computed in float32, float64 for float64, and float16 for float16 on a CPU; differentiable; any strides.

    Raises ValueError for an unknown activation, an odd number of columns for a gated one, or `interleaved`
    for a plain one; TypeError for a dtype that is not floating.
    """
    return glu_op(z, activation, interleaved)
