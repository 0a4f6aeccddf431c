"""Frozen weights of 4 and 8 bits: how they are stored, made and read back.

`FourBit` stands for a weight (E, N, K).

    nf4      w = CODES[code] * absmax           blocks of 64; QLoRA, Dettmers et al. 2023, arXiv 2305.14314
    mxfp4    w = e2m1(code) * 2 ** (scale - 127)   blocks of 32; OCP Microscaling Formats 1.0; 255: NaN
    int4     w = (code - zero) * scale          groups of 128, as AWQ and GPTQ have them
    fp8      w = e4m3 * scale                   128 rows of 128: `quantize_blocks`, DeepSeek-V3's checkpoints

Blocks are consecutive numbers along K.  All but the final rounding to the dtype of the weight is float32.
Products with 4 bits dequantise tiles of the weight; those with fp8 also have rows of 8 bits: see
../experts/adapted.py.

NF4 keeps absmax as float32 or, double-quantised, as bitsandbytes does: the 8-bit number of an entry of a
table, times a float32 for each 256 blocks of the whole weight (`nested`), plus a float32 for each expert
(`offset`, the mean of absmax).
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..base.check import check_axes, check_device, check_known, check_shape, check_whole_shape
from ..base.fp8 import ROW_BLOCK
from ..base.launch import bind_kernel, cdiv, jit_kernel, tl
from ..base.tile import dense
from .scale_blocks import dequantize


class Format(NamedTuple):
    """The layout of a format's codes: numbers of a block, and whether a byte's high half comes first."""

    block: int
    high_first: bool


FORMATS = {"nf4": Format(64, True), "mxfp4": Format(32, False), "int4": Format(128, False)}
FP8 = "fp8"  # the format whose codes are 8-bit floats
SCALE_N, SCALE_B = 64, 32  # rows and blocks of which a program expands the scales
NESTED = 256  # blocks of NF4 that share an entry of `nested`
LEAST_SCALE, MOST_SCALE = 2.0**-24, 65504.0  # of int4: the numbers of float16 above 0 lie between
SCALES = {  # the dtypes of `scales`
    "nf4": (torch.uint8, torch.float32),
    "mxfp4": (torch.uint8,),
    "int4": (torch.float16, torch.bfloat16),  # times a code of 4 bits, float32 holds them exactly
}
CODES = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "mxfp4": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
    "int4": tuple(map(float, range(16))),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class FourBit:
    """A frozen weight (E, N, K) of 4 or 8 bits in place of a tensor; `dtype` is what it is dequantised to."""

    packed: Tensor  # (E, N, K / 2) uint8; fp8: (E, N, K) float8_e4m3fn
    scales: Tensor  # (E, N, K / block), a dtype of SCALES; fp8: (E, N / 128, K / 128) float32, rounded up
    nested: Tensor | None  # (blocks / 256,) float32, of double-quantised NF4
    offset: Tensor | None  # NF4: (E,) float32, with `nested`; int4: the zeros (E, N, K / 128) uint8
    table: Tensor | None  # NF4: its codes (16,) float32, with `nested` followed by those of scales (256,)
    format: str
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        E, N, columns = self.packed.shape
        return torch.Size((E, N, columns * codes_in(self.format)))

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def is_meta(self) -> bool:
        return self.packed.is_meta

    @property
    def requires_grad(self) -> bool:
        return False

    @property
    def bits(self) -> int:
        """Of each number: 4 or 8."""
        return 8 // codes_in(self.format)

    @property
    def parts(self) -> tuple:
        """All that an op takes beside `packed`."""
        return self.scales, self.nested, self.offset, self.table, self.format

    def to(self, dtype: torch.dtype) -> "FourBit":
        """Return the same weight, to be dequantised to another dtype."""
        return dataclasses.replace(self, dtype=dtype)

    def plain(self) -> "FourBit":
        """Return the same weight with scales that are quantised once: those of NF4 in float32."""
        if self.nested is None:
            return self
        scales, _ = expanded_scales(self.packed, *self.parts)
        return dataclasses.replace(self, scales=scales, nested=None, offset=None, table=self.table[:16])

    def __getitem__(self, block) -> Tensor:
        """Return some experts, or some rows of some experts, of a `plain` weight, dequantised."""
        if self.format == FP8:
            experts, rows = block if isinstance(block, tuple) else (block, slice(None))
            scale = self.scales[experts].repeat_interleave(ROW_BLOCK, -2)[..., : self.packed.shape[1], :]
            return dequantize(self.packed[experts][..., rows, :], scale[..., rows, :], self.dtype)
        packed, offset = self.packed[block], None if self.offset is None else self.offset[block]
        scale = expanded_scales(packed, self.scales[block], None, offset, self.table, self.format)
        return dequantized(packed, *scale, self.table, self.format).to(self.dtype)

    def dequantize(self) -> Tensor:
        """Return the weight (E, N, K), whole, in its dtype."""
        plain = self.plain()
        return torch.cat([plain[e : e + 1] for e in range(max(len(self.packed), 1))])


# from codes to numbers


def codes_in(format: str) -> int:
    """Return how many numbers an element of `packed` holds."""
    return 1 if format == FP8 else 2


def check_four_bit(packed, scales, nested, offset, table, format: str) -> None:
    """Raise unless these are the parts of a `FourBit`."""
    check_known("format", format, (*FORMATS, FP8))
    if format == FP8:
        return check_fp8(packed, scales)
    check_axes(packed=(packed, "E, N, half"), scales=(scales, "E, N, blocks"))
    E, half, block = len(packed), packed.shape[2], FORMATS[format].block
    if 2 * half != scales.shape[2] * block:
        raise ValueError(
            f"packed is (E, N, K / 2={half}) but scales is (E, N, K / {block}={scales.shape[2]})"
        )
    double = format == "nf4" and scales.dtype == torch.uint8
    expected = {
        "packed": (packed, torch.uint8, packed.shape),
        "nested": (nested, torch.float32, (-(-scales.numel() // NESTED),) if double else None),
        "offset": (offset, torch.float32, (E,) if double else None),
        "table": (table, torch.float32, (16 + 256 * double,) if format == "nf4" else None),
    }
    if format == "int4":
        expected["offset"] = offset, torch.uint8, scales.shape
    for name, (t, dtype, shape) in expected.items():
        found = None if t is None else tuple(t.shape)
        if found != (None if shape is None else tuple(shape)):
            raise ValueError(f"{name} is {found}, but must be {shape and tuple(shape)} with {format}")
        if t is not None and t.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, not {t.dtype}")
    if scales.dtype not in SCALES[format]:
        raise TypeError(f"scales of {format} must be {SCALES[format]}, not {scales.dtype}")
    check_device(packed=packed, scales=scales, nested=nested, offset=offset, table=table)


def check_fp8(packed: Tensor, scales: Tensor, names: tuple[str, str] = ("packed", "scales")) -> None:
    """Raise unless these are 8-bit floats and the scales of their blocks, by these names in errors."""
    check_shape(names[0], packed, "E", "N", "K")
    if packed.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{names[0]} must be torch.float8_e4m3fn, not {packed.dtype}")
    E, N, K = packed.shape
    check_whole_shape(names[1], scales, (E, cdiv(N, ROW_BLOCK), cdiv(K, ROW_BLOCK)))
    if scales.dtype != torch.float32:
        raise TypeError(f"{names[1]} of {FP8} must be torch.float32, not {scales.dtype}")
    check_device(**dict(zip(names, (packed, scales), strict=True)))


def blocks_of(weight: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> FourBit:
    """Return the weight of `from_fp8`, of layers/four_bit.py."""
    check_shape("weight", weight, "E", "out", "in")
    check_shape("scale_inv", scale_inv, "E", "out / 128", "in / 128")
    if not scale_inv.is_floating_point():  # bytes of float8_e8m0fnu are no numbers
        raise TypeError(f"scale_inv must be float32 or float8_e8m0fnu, not {scale_inv.dtype}")
    scale = scale_inv.detach().float()
    if scale.shape[1:] == (1, 1):
        scale = scale.expand(-1, *(cdiv(size, ROW_BLOCK) for size in weight.shape[1:]))
    check_fp8(weight, scale, ("weight", "scale_inv"))
    return FourBit(weight.detach(), scale.contiguous(), None, None, None, FP8, dtype)


def expanded_scales(packed, scales, nested, offset, table, format: str) -> tuple[Tensor, Tensor | None]:
    """Return what codes are multiplied by, (E, N, blocks) float32, and what is subtracted from them first."""
    if format == "mxfp4":
        powers = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
        return powers.masked_fill(scales == 255, torch.nan), None
    if format == "int4":
        return scales.float(), offset.float()
    if nested is None:
        return scales, None
    each = nested.repeat_interleave(NESTED)[: scales.numel()].view(scales.shape)
    return single_scales(scales, each, offset, table), None


def single_scales(scales: Tensor, each: Tensor, offset: Tensor, table: Tensor) -> Tensor:
    """Return NF4's scales (E, N, blocks) in float32; `each` has the entry of `nested` of each block."""
    return table[16:][scales.int()] * each + offset[:, None, None]


def dequantized(packed: Tensor, scale: Tensor, zero: Tensor | None, table, format: str) -> Tensor:
    """Return the weight (..., K) in float32 from `packed` (..., K / 2) and `scale` (..., blocks)."""
    values = torch.tensor(CODES[format], device=packed.device) if table is None else table
    w = values[unpacked(packed, format).int()].unflatten(-1, (-1, FORMATS[format].block))
    w = w if zero is None else w - zero[..., None]
    return (w * scale[..., None]).flatten(-2)


def unpacked(packed: Tensor, format: str) -> Tensor:
    """(..., K / 2) -> (..., K): the codes."""
    low, high = packed & 15, packed >> 4
    return torch.stack((high, low) if FORMATS[format].high_first else (low, high), -1).flatten(-2)


def packed_codes(codes: Tensor, format: str) -> Tensor:
    """(..., K) -> (..., K / 2), uint8."""
    first, second = codes.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return (first << 4 | second) if FORMATS[format].high_first else (second << 4 | first)


# from scales as they are kept to float32, on GPUs


@jit_kernel
def expand_scales_kernel(
    scales_ptr,  # (G, rows, blocks), contiguous
    nested_ptr,  # (G * rows * blocks / 256,) float32, or None
    offset_ptr,  # (G,) float32, or the zeros (G, rows, blocks) uint8, or None
    table_ptr,  # (16 + 256,) float32
    scale_ptr,  # (G, blocks, rows) float32
    shift_ptr,  # (G, blocks, rows) float32, or None
    rows, blocks, tiles_n,
    FORMAT: tl.constexpr, NESTED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Write what values are multiplied by, and what is added then; neighbouring rows become neighbours."""
    pid, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    n = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    b = pid // tiles_n * BLOCK_B + tl.arange(0, BLOCK_B)[None, :]
    mask = (n < rows) & (b < blocks)
    at = (group * rows + n) * blocks + b
    scale = tl.load(scales_ptr + at, mask=mask, other=0)
    to = (group * blocks + b) * rows + n
    if FORMAT == "mxfp4":  # the number of a power of two, of which 2 ** -127 is not normal, or 255, a NaN
        bits = tl.where(scale == 0, 0x00400000, scale.to(tl.int32) << 23)
        scale = tl.where(scale == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    elif nested_ptr is not None:
        value = tl.load(table_ptr + 16 + scale.to(tl.int32), mask=mask, other=0.0)
        each = tl.load(nested_ptr + at // NESTED, mask=mask, other=0.0)
        scale = value * each + tl.load(offset_ptr + group)
    else:
        scale = scale.to(tl.float32)
    if shift_ptr is not None:
        zero = tl.load(offset_ptr + at, mask=mask, other=0).to(tl.float32)
        tl.store(shift_ptr + to, -zero * scale, mask=mask)
    tl.store(scale_ptr + to, scale, mask=mask)


def bind_expand_scales(i) -> Callable:
    """Return `expand(i)` for the `scale` and `shift` of a product's inputs, (G, blocks, rows) float32 each.

    The shift is None where the format has none.
    """
    (G, rows, blocks), shifted = i.scales.shape, i.format == "int4"
    tiles_n = cdiv(rows, SCALE_N)
    kernel = bind_kernel(
        expand_scales_kernel, (tiles_n * cdiv(blocks, SCALE_B), G), FORMAT=i.format, NESTED=NESTED,
        BLOCK_N=SCALE_N, BLOCK_B=SCALE_B, num_warps=4,
        enable_fp_fusion=False,  # or scales of NF4 differ from bitsandbytes' in their last bit
    )  # fmt: skip

    def expand(i):
        scale = i.scales.new_empty(G, blocks, rows, dtype=torch.float32)
        shift = torch.empty_like(scale) if shifted else None
        parts = dense(i.scales, i.nested, i.offset, i.table)
        kernel(*parts, scale, shift, rows, blocks, tiles_n)
        return scale, shift

    return expand


# from numbers to codes


def quantized(w: Tensor, format: str, whole: bool = True) -> FourBit:
    """Return `w` (E, N, K) in 4 bits, quantised one expert at a time.

    `whole`: it is a whole weight, not some experts of one; NF4's absmax is then quantised too.

    Codes are the nearest; MXFP4's scale is 2 ** (floor(log2(largest)) - 2), and ties go to even codes; int4's
    scale and zero cover 0 and the group's range.  On the meta device the result has no numbers either.
    Raises ValueError unless K is a multiple of the block, and for numbers without 4 bits: NaN, infinity, what
    float32 cannot hold, a group of int4 that spans more than 982560 (15 scales of float16), what becomes
    infinite in the dtype of `w` when it is read back, and a whole weight of which nothing but zeros is left.
    """
    check_shape("w", w, "E", "N", "K")
    block = FORMATS[format].block
    if w.shape[2] % block:
        raise ValueError(f"{format} needs rows of a multiple of {block} numbers, not {tuple(w.shape)}")
    if not w.is_meta and not all(e.float().isfinite().all() for e in w.detach().unbind()):
        raise ValueError("w holds NaN or infinity, or what float32 cannot hold, which have no 4 bits")
    quantize = {"nf4": nf4_block, "mxfp4": mxfp4_block, "int4": int4_block}[format]

    def in_codes(experts: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        codes, scale, zero = quantize(experts.contiguous().float().unflatten(-1, (-1, block)))
        return packed_codes(codes.flatten(-2), format), scale, zero

    # one part for each expert, and one without any where there is none
    packed, scales, zeros = zip(*map(in_codes, w.detach().split(1)), strict=True)
    packed, scales, nested, table = torch.cat(packed), torch.cat(scales), None, None
    offset = None if zeros[0] is None else torch.cat(zeros)
    if format == "nf4":
        table = torch.tensor(CODES["nf4"], device=w.device)
        if whole:
            scales, nested, offset, more = double_quantized(scales)
            table = torch.cat([table, more])
    weight = FourBit(packed, scales, nested, offset, table, format, w.dtype)
    if not w.is_meta:
        plain = weight.plain()
        if not all(plain[e].isfinite().all() for e in range(len(w))):
            most = float(w.detach().abs().max())
            raise ValueError(f"w is up to {most:.6g}, which {format} rounds past what {w.dtype} can hold")
        if whole and w.any() and not any(plain[e].any() for e in range(len(w))):  # experts alone may be dead
            most = float(w.detach().abs().max())
            raise ValueError(f"w is up to {most:.6g}, all of which {format} rounds to 0: use nf4, or scale w")
    return weight


def nf4_block(w: Tensor) -> tuple[Tensor, Tensor, None]:
    """(N, blocks, 64) -> codes, absmax."""
    values = torch.tensor(CODES["nf4"], device=w.device)
    absmax = w.abs().amax(-1)
    scaled = w / torch.where(absmax == 0, 1, absmax)[..., None]
    return torch.bucketize(scaled, (values[1:] + values[:-1]) / 2), absmax, None


def mxfp4_block(w: Tensor) -> tuple[Tensor, Tensor, None]:
    """(N, blocks, 32) -> codes, exponents + 127."""
    exponent = (torch.frexp(w.abs().amax(-1)).exponent.to(torch.int32) - 3).clamp(-127, 127)
    middles = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), device=w.device)
    # a tie at these goes up, to an even code
    middles[1::2] = torch.nextafter(middles[1::2], middles.new_zeros(()))
    scaled = torch.ldexp(w, -exponent[..., None])
    codes = torch.bucketize(scaled.abs(), middles) + 8 * torch.signbit(scaled)
    return codes, (exponent + 127).to(torch.uint8), None


def int4_block(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(N, blocks, 128) -> codes, scale in float16, zero."""
    low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)
    scale = (high - low) / 15
    if not w.is_meta and (scale > MOST_SCALE).any():
        raise ValueError(
            f"int4 takes groups of 128 numbers that span {15 * MOST_SCALE:.0f} at most, not "
            f"{15 * float(scale.max()):.6g}: use nf4 or mxfp4"
        )
    # those that are not normal are rounded up, or the largest numbers would have no code
    scale = torch.where(scale < 2.0**-14, (scale / LEAST_SCALE).ceil().clamp(min=1) * LEAST_SCALE, scale)
    scale = scale.to(torch.float16)
    zero = (-low / scale.float()).round().clamp(0, 15)
    codes = ((w / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15)
    return codes, scale, zero.to(torch.uint8)


def double_quantized(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(E, N, blocks) float32 -> 8-bit numbers, `nested`, `offset` and the table of the 8 bits."""
    table = absmax_table(absmax.device)
    offset = absmax.mean() if absmax.numel() else absmax.new_zeros(())
    rest = (absmax - offset).flatten()
    groups = torch.nn.functional.pad(rest, (0, -len(rest) % NESTED)).view(-1, NESTED)
    nested = groups.abs().amax(1)
    scaled = groups / torch.where(nested == 0, 1, nested)[:, None]
    numbers = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2).to(torch.uint8)
    return numbers.flatten()[: len(rest)].view_as(absmax), nested, offset.repeat(len(absmax)), table


def rounded_scales(absmax: Tensor) -> Tensor:
    """Return the absmax (E, N, blocks) of NF4 in float32, rounded as double quantisation does."""
    numbers, nested, offset, table = double_quantized(absmax)
    table = torch.cat([table.new_zeros(len(CODES["nf4"])), table])
    return expanded_scales(None, numbers, nested, offset, table, "nf4")[0]


def absmax_table(device: torch.device) -> Tensor:
    """The 256 values that double quantisation rounds to: 0, 1, and 2 ** i steps in [0.1, 1] * 10 ** (i - 6).

    Source: Dettmers 2015, arXiv 1511.04561, the dynamic tree with 7 bits of exponent.
    """
    values = [0.0, 1.0]
    for i in range(7):
        ends = torch.linspace(0.1, 1, 2**i + 1, device="cpu")
        steps = (10.0 ** (i - 6) * ((ends[1:] + ends[:-1]) / 2)).tolist()
        values += steps + [-v for v in steps]
    return torch.tensor(sorted(values), device=device)
