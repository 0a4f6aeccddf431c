"""The references of ops as functions of an op's inputs; what is left out has its default, or is None."""

import functools
import typing
from collections.abc import Callable

from moe_aiter.kernels.dense import gemm
from moe_aiter.kernels.experts import adapted, cpu, down, glu, up
from moe_aiter.kernels.grouped import gmm, masked_gmm, scaled_gemm, segment_gmm, segments, tgmm
from moe_aiter.kernels.quantize import blocks, layouts, rows, scale_blocks
from moe_aiter.kernels.rows import permute, sums, topk
from moe_aiter.kernels.sparse import gemm as sparse


def of_inputs(reference: Callable) -> Callable:
    kind = reference.__annotations__["i"]
    inputs = next(iter(typing.get_args(kind)), kind)  # the first of several

    @functools.wraps(reference)
    def run(*args):
        rest = set(inputs._fields[len(args) :]) - inputs._field_defaults.keys()
        return reference(inputs(*args, **dict.fromkeys(rest)))

    return run


for module in (
    *(gemm, scaled_gemm, adapted, cpu, down, glu, up, gmm, masked_gmm, segment_gmm, segments, tgmm),
    *(blocks, layouts, rows, scale_blocks, permute, sums, topk, sparse),
):
    for name, fn in vars(module).items():
        if name.endswith("_reference") and "i" in fn.__annotations__:
            globals()[name] = of_inputs(fn)
