"""The experts of transformers' FP8 checkpoints, `FP8Experts`: 8-bit floats or FP4 with scales of blocks."""

import torch
from torch import nn

from ..kernels.base.fp8 import ROW_BLOCK
from ..kernels.quantize.four_bit import FourBit, blocks_of
from ..layers.experts import local_part
from ..private_api import own_parameters
from .other_experts import NAME

__all__: list[str] = []

SCALE_INV = "_scale_inv"  # how the scales of a weight in FP8 are called, after its name


def fp8_interface() -> type | None:
    """transformers' registry of experts with FP8 weights, None in a version without one."""
    try:
        from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    except ImportError:
        return None
    return FP8ExpertsInterface


def fp8_of(module: nn.Module, name: str) -> FourBit | None:
    """Return a weight of FP8Experts: of FP8 in blocks of 128 x 128 or whole experts, or of FP4.

    None for a weight without scales.  Rows are quantised as they come, also where the checkpoint has static
    scales of activations.
    """
    own, kind = own_parameters(module), type(module).__name__
    scale_inv = local_part(own.get(name + SCALE_INV))
    if scale_inv is None:
        return None
    weight = local_part(own[name]).detach()
    dtype = getattr(module.config, "dtype", None) or torch.get_default_dtype()
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    four = weight.dtype == torch.int8
    if weight.element_size() > 1 or (four and scale_inv.element_size() > 1):
        raise TypeError(
            f"{name} of {kind} is {weight.dtype} and {name}{SCALE_INV} {scale_inv.dtype}: .to(dtype) or "
            ".half() changed what has 8 bits; load the model again, with from_pretrained(dtype=...)"
        )
    if four:
        exponents = scale_inv.detach().view(torch.uint8)
        return FourBit(weight.view(torch.uint8), exponents, None, None, None, "mxfp4", dtype)
    if module.block_size is not None and tuple(module.block_size) != (ROW_BLOCK, ROW_BLOCK):
        raise ValueError(
            f"{kind} has scales of blocks of {tuple(module.block_size)}; "
            f"experts_implementation={NAME!r} reads those of ({ROW_BLOCK}, {ROW_BLOCK}) and of whole experts"
        )
    half = weight.shape[1] // 2
    if module.block_size is not None and name == "gate_up_proj" and half % ROW_BLOCK > ROW_BLOCK // 2:
        raise ValueError(  # as many blocks whether gate and up have their own or share one, and other numbers
            f"{kind} has {half} rows of gates, so a block of {ROW_BLOCK} rows may have gates and ups: "
            f"experts_implementation={NAME!r} needs a multiple of {ROW_BLOCK} rows"
        )
    if module.block_size is None and scale_inv.shape[1:] == (2, 1):  # a scale for gate, one for up
        if half % ROW_BLOCK:
            raise ValueError(
                f"{kind} has one scale for {half} rows of gates and one for up: "
                f"experts_implementation={NAME!r} needs a multiple of {ROW_BLOCK} rows"
            )
        scale_inv = scale_inv.repeat_interleave(half // ROW_BLOCK, 1)
        scale_inv = scale_inv.expand(-1, -1, -(-weight.shape[2] // ROW_BLOCK))
    return blocks_of(weight, scale_inv, dtype)
