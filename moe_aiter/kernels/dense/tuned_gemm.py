"""The product of an nn.Linear, `x @ weight.mT + bias`, by the implementation that was the fastest.

A user's file of AITER's tuned products says which implementation that is: see tuning/aiter_csv.py.  If the
file has no row for a product, our own table chooses, as for `gemm`.  `tuned_gemm` keeps the answer for
tensors of the same shapes and dtypes, and calls torch's own product directly, so it adds little time on the
host.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...config import settings
from ...derived import derived
from ...invariance import batch_invariant, summing_tokens
from ...op import (
    IMPLS,
    ORDER,
    binds,
    bound,
    decisions,
    define_op,
    forced,
    gradients,
    is_transformed,
    keep,
    log,
    may_be_forced,
    no_autocast,
    pick,
    runs,
)
from ...private_api import any_autocast
from ...tuning.aiter_csv import GemmKey, TunedRow, current_device, find_tuned, record, this_device
from ...tuning.candidates import Config, candidates
from ...tuning.choice import choose_backend
from ...tuning.store import remembered
from .. import hopper
from ..base.check import (
    FLOATS,
    cast_as_linear,
    check_device,
    check_flags,
    check_float,
    check_floating,
    check_shape,
    check_size,
    check_tensor,
    linear,
    needs_grad,
)
from ..base.choice import FEW, unmeasured
from ..base.fp8 import FP8
from ..base.gemm_row import GemmInputs
from ..base.shuffle import unshuffle_weight
from ..grouped.masked_gmm import masked_gmm
from ..grouped.scaled_gemm import scaled_gemm
from .gemm import gemm, multiply_linear, product_inside

# choice of the implementation


LIBRARIES = {  # AITER's `libtype` -> the backend here
    **dict.fromkeys(("torch", "hipblaslt", "asm", "skinny", "flydsl", "opus"), "torch"),
    **{"triton": "triton", "hopper": "hopper"},
}
# whose tile a row may name: the `tiles` of the launchers
TILED = ("gemm", "gemm_row", "hopper_gemm", "hopper_few_rows")
DEFAULT = {"solidx": 0, "splitK": 0, "kernelName": ""}  # beside the libtype, where there is no row


def choose_product(problem: GemmKey, i: GemmInputs) -> str:
    """Return what computes a product: torch, triton or hopper, maybe with "/" and a tile."""
    device = i.x.device
    row = find_tuned(problem, this_device(device)) if forced() == "auto" else None
    record(problem)
    if row is not None:
        backend = backend_of(row.libtype, i) + tile_suffix(row)
    elif problem.shuffled:  # only a file's row can say that a copy in the usual order is faster
        backend = "triton" if forced() != "torch" and is_here("triton", i) else "torch"
    else:
        backend = usual_backend(i)
    if settings.log_tuned_config:
        said = "no row" if row is None else f"the row of M={row.problem.M} says {row.libtype}"
        log.info("%s on %s: %s, %s multiplies", text_of(problem), device, said, backend)
    return backend


def usual_backend(i: GemmInputs) -> str:
    """Return what multiplies without a row: as for `gemm`, but torch where a forced tier has no kernel."""
    if forced() != "auto":
        return backend_of(forced(), i)
    implementation = pick("gemm", i)
    return next(name for name, impl in IMPLS["gemm"].items() if impl is implementation)


def backend_of(libtype: str, i: GemmInputs) -> str:
    """Our name for AITER's library, or torch where there is no such thing here."""
    backend = LIBRARIES.get(libtype, "torch")
    backend = backend if is_here(backend, i) else "torch"
    if backend != libtype:
        note(libtype, backend)
    return backend


def tile_suffix(row: TunedRow) -> str:
    """The tile that a row of ours names, or nothing."""
    name = row.cells.get("kernelName", "")
    return f"/{name}" if any(named_tile(op, name) for op in TILED) else ""


@remembered
def named_tile(op: str, tile: str) -> Config | None:
    return next((config for config in candidates(op) if str(config) == tile), None) if op in TILED else None


def tile_option(launch: Callable, tile: str) -> dict[str, Config]:
    """Return the keyword arguments that give a launcher of `gemm` the tile of that name; none if it has none.

    The tile is an argument and no global setting, so products of other threads keep their own tiles.
    """
    configs = (named_tile(op, tile) for op in getattr(launch, "tiles", ()) if tile)
    return next(({"config": config} for config in configs if config), {})


def is_here(backend: str, i: GemmInputs) -> bool:
    """Whether this implementation of `gemm` takes these inputs."""
    usable = backend in (*ORDER.get(i.x.device.type, ()), "torch")
    return usable and backend in IMPLS["gemm"] and runs(IMPLS["gemm"][backend], i)


@remembered
def note(libtype: str, backend: str) -> None:
    log.warning("tuned products of %s are computed by %s here", libtype, backend)


def text_of(problem: GemmKey) -> str:
    M, N, K = problem[:3]
    flags = [name for name in ("bias", "scaled", "shuffled") if getattr(problem, name)]
    return ", ".join([f"M={M}, N={N}, K={K}", f"{problem.dtype} -> {problem.out_dtype}", *flags])


def tuned_config(problem: GemmKey) -> dict:
    """The cells of this device's row for a product, or the `libtype` that it gets without one; a dict of the
    caller's own."""
    device = current_device()
    row = find_tuned(problem, this_device(device))
    return {"libtype": usual(problem, device), **DEFAULT} if row is None else row.config()


def usual(problem: GemmKey, device: torch.device) -> str:
    """Return the backend for products without a row in the files."""
    if device.type == "cpu" or torch.float64 in (problem.dtype, problem.out_dtype):
        return "torch"
    if problem.shuffled or problem.dtype != problem.out_dtype:
        return "triton"
    M, N, K, bias = problem[:4]
    x = torch.empty(0, dtype=problem.dtype, device=device)
    epilogue, otherwise = "bias" if bias else "none", unmeasured((M, K), N * K, x.itemsize)
    backend = choose_backend("gemm", x, "nt", epilogue, M, N, K, otherwise)
    fits = hopper.is_hopper(device) and K % 8 == 0 and (M <= FEW or N % 8 == 0)
    return backend if backend != "hopper" or fits else "torch"


# product

TORCHS_OWN = "F.linear"  # torch, where nothing has to be cast
EIGHT_BITS = (torch.int8, *FP8)
PARAMETERS = {Tensor, torch.nn.Parameter}


class NotSupportedError(RuntimeError):
    """A product that moe_aiter cannot compute; torch may be able to."""


# op


class TunedInputs(NamedTuple):
    """The inputs of the op `tuned_gemm`: x @ weight.mT + bias."""

    x: Tensor  # (M, K)
    weight: Tensor  # (N, K)
    bias: Tensor | None  # (N,)
    dtype: torch.dtype | None
    scaled: torch.dtype | None  # of a result that is scaled after this
    backend: str  # of the op gemm, maybe with "/" and a tile; "": chosen now, when M is known


def new_tuned_gemm(i: TunedInputs) -> Tensor:
    check_linear_product(i.x, i.weight, i.bias)
    return i.x.new_empty(i.x.shape[0], i.weight.shape[0], dtype=i.dtype)


def check_linear_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_shape("weight", weight, "N", "K")
    N, K = weight.shape
    check_size("x is (..., K={})", x.shape[-1], "weight is (N, K={})", K)
    check_float(x=x, weight=weight)
    check_floating("bias", bias, (N,), f"(N={N},)")
    check_device(x=x, weight=weight, bias=bias)


def check_axis(x: Tensor) -> None:
    if x.dim() == 0:
        raise ValueError("x must be (..., K), but it is one number")


def gemm_inputs(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> GemmInputs:
    return GemmInputs(x[None], weight.mT[None], bias, None, "", 1.0, 0.0, dtype, False)


@binds
def bind_tuned_gemm(i: TunedInputs) -> Callable:
    inputs, backend = gemm_inputs(i.x, i.weight, i.bias, i.dtype), i.backend
    if not backend:
        said = i.x.dtype, i.scaled or i.dtype, i.scaled is not None
        backend = choose_product(GemmKey(i.x.shape[0], *i.weight.shape, i.bias is not None, *said), inputs)
    backend, _, tile = backend.partition("/")
    impl = IMPLS["gemm"][backend]
    if not runs(impl, inputs):  # of other strides than when it was chosen
        impl = IMPLS["gemm"][usual_backend(inputs)]
    launch = bound(impl, inputs, **tile_option(impl, tile))

    def launch_tuned(out, i):
        launch((out[None], out.new_empty(0)), gemm_inputs(i.x, i.weight, i.bias, i.dtype))

    return launch_tuned


def save_tuned_gemm(ctx, i: TunedInputs, output):
    ctx.save_for_backward(i.x, i.weight)
    ctx.bias_dtype = None if i.bias is None else i.bias.dtype


def backward_tuned_gemm(ctx, dout):
    x, weight = ctx.saved_tensors
    needs = TunedInputs(*ctx.needs_input_grad)
    dbias = dout.sum(0).to(ctx.bias_dtype) if needs.bias else None
    dout = dout.to(x.dtype)
    product = gemm if forced() == "auto" else multiply_inside
    dx = product(dout, weight) if needs.x else None
    with summing_tokens():
        dweight = product(dout.mT, x) if needs.weight else None
    return gradients(TunedInputs, x=dx, weight=dweight, bias=dbias)


def multiply_inside(x, w):
    """Return x @ w by what every forced tier has."""
    return product_inside(x, w, x.dtype)


tuned_gemm_op = define_op(
    "tuned_gemm", TunedInputs, new=new_tuned_gemm,
    torch=bind_tuned_gemm,  # which asks the backends of gemm
    backward=backward_tuned_gemm, save=save_tuned_gemm,
)  # fmt: skip


# public


def tuned_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None,
    x_scale: Tensor | float | None = None, w_scale: Tensor | float | None = None,
    out_scale: Tensor | float | None = None, is_shuffled: bool | None = None,
) -> Tensor:  # fmt: skip
    """`x @ weight.mT + bias` for x (..., K) of any rank and strides and weight (N, K); returns (..., N).

    bias: (N,) of any floating dtype.
    out_dtype: dtype of the result, that of `x` unless given.  Sums are float32, rounded once, or float64.
    x_scale, w_scale, out_scale: factors of the operands, and of the result with its bias: a number or one
        element; or for each row x_scale (..., 1) or (M,), and w_scale (N,), (N, 1) or (1, N).
    is_shuffled: whether `weight` is in the order of `shuffle_weight`; unless given, as its attribute
        `is_shuffled` says.  On a GPU it is multiplied as it is, without bias and gradients and unless a row
        for shuffled weights names torch; else by way of a copy in the usual order, which `derived` keeps.

    `x` and `weight` may also be both int8 or both 8-bit floats: then `scaled_gemm` multiplies them, into
    bfloat16 unless `out_dtype` is given, and without gradients.

    Where a tier is forced that cannot multiply these (`use`), torch does, and the log says so once.
    Differentiable in x, weight, bias and scales.  Under torch.autocast, operands are cast to its dtype.

    Raises ValueError for shapes, devices and malformed files of tuned products, FileNotFoundError where of
    several none is there, TypeError for dtypes, NotSupportedError for what torch alone could do.
    Source: AITER's `tuned_gemm.gemm_a16w16`.
    """
    if isinstance(x, Tensor) and x.dtype in EIGHT_BITS:
        return multiply_8_bits(x, weight, bias, out_dtype, (x_scale, w_scale, out_scale), is_shuffled)
    if x_scale is not None or w_scale is not None or out_scale is not None:
        return scaled_product(x, weight, bias, out_dtype, (x_scale, w_scale, out_scale), is_shuffled)
    return product_of(x, weight, bias, out_dtype, is_shuffled)


def product_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None, is_shuffled: bool | None,
    scaled: torch.dtype | None = None,  # the dtype of a result that is scaled after this
) -> Tensor:  # fmt: skip
    check_tensor("x", x)
    check_tensor("weight", weight)
    if bias is not None:
        check_tensor("bias", bias)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"out_dtype must be a floating dtype, not {dtype!r}")
    if is_shuffled is not None:
        check_flags(is_shuffled=is_shuffled)
    else:
        is_shuffled = getattr(weight, "is_shuffled", False) is True
    if is_shuffled and cast_as_linear(x, weight)[1] is not weight:  # the order is that of a dtype
        weight, is_shuffled = usual_order(weight), False
    x, weight, bias = cast_as_linear(x, weight, bias)
    if batch_invariant() and PARAMETERS.issuperset((type(x), type(weight))):
        return multiply_linear(x, usual_order(weight) if is_shuffled else weight, bias, dtype)
    if torch.compiler.is_compiling():
        return traced(x, unshuffle_weight(weight) if is_shuffled else weight, bias, dtype, scaled)
    key = (
        type(x), x.shape, x.dtype, x.device, type(weight), weight.shape, weight.dtype, weight.device,
        None if bias is None else (bias.shape, bias.dtype, bias.device), dtype, is_shuffled, scaled,
        # a row of the CPU is of so many threads
        forced(), decisions(), None if x.is_cuda else torch.get_num_threads(),
    )  # fmt: skip
    backend = backends.get(key)
    if backend is None:
        backend = choice_for(x, weight, bias, dtype, is_shuffled, scaled)
        keep(backends, key, backend)
    if is_shuffled:
        if backend == "triton" and bias is None and not needs_grad(x, weight) and not is_transformed():
            return as_it_lies(x, weight)
        return product_of(x, usual_order(weight), bias, dtype, False, scaled)
    if backend != TORCHS_OWN:
        return by_op(x, weight, bias, dtype, scaled, backend)
    if any_autocast():
        with no_autocast(x):
            return linear(x, weight, bias)
    return linear(x, weight, bias)


backends: dict[tuple, str] = {}  # shapes and dtypes -> the backend that multiplies


def choice_for(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None, is_shuffled: bool,
    scaled: torch.dtype | None,
) -> str:  # fmt: skip
    """Check the operands, and return what multiplies them."""
    check_axis(x)
    own = dtype in (None, x.dtype) and (bias is None or bias.dtype == x.dtype)
    if not PARAMETERS.issuperset((type(x), type(weight))):
        if is_shuffled or scaled or not own:
            kinds = f"{type(x).__name__} and {type(weight).__name__}"
            raise NotSupportedError(f"a product of {kinds} is torch's own: neither scaled, shuffled nor cast")
        return TORCHS_OWN
    check_linear_product(x, weight, bias)
    dtype = dtype or x.dtype
    if dtype not in FLOATS:
        raise TypeError(f"out_dtype must be a floating dtype, not {dtype}")
    rows = as_matrix(x)
    out_dtype = scaled or dtype
    problem = GemmKey(
        rows.shape[0], *weight.shape, bias is not None, x.dtype, out_dtype, scaled is not None, is_shuffled
    )
    backend = choose_product(problem, gemm_inputs(rows, weight, bias, dtype))
    if is_shuffled:  # the kernel for shuffled weights rounds to their dtype
        return backend.partition("/")[0] if own else "torch"
    return TORCHS_OWN if backend == "torch" and own else backend


def as_matrix(x: Tensor) -> Tensor:
    """x (..., K) as (M, K)."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def by_op(x, weight, bias, dtype, scaled: torch.dtype | None, backend: str) -> Tensor:
    if not torch.compiler.is_compiling() and is_transformed():
        raise NotSupportedError(f"{backend} kernels have gradients by torch.autograd only, not by torch.func")
    out = tuned_gemm_op(as_matrix(x), weight, bias, dtype or x.dtype, scaled, backend)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.shape[0])


def traced(x, weight, bias, dtype, scaled: torch.dtype | None) -> Tensor:
    """The function that torch.compile traces: torch's product, or an op that reads the files and logs."""
    own = dtype in (None, x.dtype) and (bias is None or bias.dtype == x.dtype)
    asks = settings.config_gemm_bf16 or settings.tune_gemm or settings.log_tuned_config
    if asks or may_be_forced() or not own:
        return by_op(x, weight, bias, dtype, scaled, "")
    with no_autocast(x):
        return linear(x, weight, bias)


# shuffled weights


def usual_order(weight: Tensor) -> Tensor:
    if needs_grad(weight):
        return unshuffle_weight(weight)
    return derived(weight, "usual order", lambda: unshuffle_weight(weight))


def as_it_lies(x: Tensor, weight: Tensor) -> Tensor:
    """The product with a shuffled weight, by the kernel that reads one."""
    rows = as_matrix(x)
    out = rows.new_empty(1, rows.shape[0], len(weight))
    masked_gmm(out, rows[None], weight[None], shuffled=True)
    return out.view(*x.shape[:-1], len(weight))


# scales


def multiply_8_bits(x, weight, bias, dtype, scales: tuple, is_shuffled: bool | None) -> Tensor:
    """Multiply by `scaled_gemm`, without a look at the files."""
    check_shape("weight", weight, "N", "K")
    check_axis(x)
    x_scale, w_scale, out_scale = scales
    if isinstance(x_scale, Tensor) and x_scale.shape in (x.shape[:-1], (*x.shape[:-1], 1)):
        x_scale = x_scale.reshape(-1)
    if is_shuffled or (is_shuffled is None and getattr(weight, "is_shuffled", False) is True):
        weight = usual_order(weight)
    dtype = dtype or torch.bfloat16
    wide = dtype if out_scale is None else torch.float32
    out = scaled_gemm(as_matrix(x), weight.mT, x_scale, w_scale, bias, out_dtype=wide)
    out = out if out_scale is None else (out * factor("out_scale", out_scale, ())).to(dtype)
    return out.view(*x.shape[:-1], len(weight))


def scaled_product(x, weight, bias, dtype, scales: tuple, is_shuffled: bool | None) -> Tensor:
    """Multiplied back in float32, or float64 if that is asked for, and rounded once."""
    check_tensor("x", x)
    check_shape("weight", weight, "N", "K")
    check_floating("bias", bias, (len(weight),), f"(N={len(weight)},)")
    if dtype not in (None, *FLOATS):
        raise TypeError(f"out_dtype must be a floating dtype, not {dtype}")
    check_device(x=x, bias=bias)
    for name, scale in zip(("x_scale", "w_scale", "out_scale"), scales, strict=True):
        if isinstance(scale, Tensor):
            check_device(x=x, **{name: scale})
    x_scale, w_scale, out_scale = scales
    lead, N = x.shape[:-1], len(weight)
    M = math.prod(lead)
    factors = (
        factor("x_scale", x_scale, (*lead, 1), (*lead, 1), lead, (M,), (M, 1)),
        factor("w_scale", w_scale, (N,), (N,), (N, 1), (1, N)),
    )
    dtype = dtype or x.dtype
    wide = torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32)
    out = product_of(x, weight, None, wide, is_shuffled, dtype)
    for one in factors:
        out = out if one is None else out * one
    out = out if bias is None else out + bias
    last = factor("out_scale", out_scale, ())
    out = out if last is None else out * last
    return out.to(dtype)


def factor(name: str, scale: Tensor | float | None, result: tuple[int, ...], *shapes: tuple[int, ...]):
    """A scale as it broadcasts to the product: one number, or of the shape `result`."""
    if not isinstance(scale, Tensor):
        return scale
    if scale.numel() == 1:
        return scale.reshape(())
    if tuple(scale.shape) not in shapes:
        allowed = " or ".join(map(str, shapes)) or "one number"
        raise ValueError(f"{name} must be one number or {allowed}, but it has shape {tuple(scale.shape)}")
    return scale.reshape(result)
