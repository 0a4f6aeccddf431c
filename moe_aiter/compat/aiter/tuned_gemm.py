"""AITER's `tuned_gemm`: see `moe_aiter/kernels/dense/tuned_gemm.py`."""

import torch
from torch import Tensor

from ...kernels.base.check import check_sizes, checked, renamed
from ...kernels.base.shuffle import unshuffle_weight
from ...kernels.dense.tuned_gemm import tuned_config, tuned_gemm
from ...switches import computed, keeps_dtypes
from ...tuning.aiter_csv import GemmKey, find_tuned, to_dtype
from .ops.gemm_op_a8w8 import gemm_a8w8

__all__ = ["TunedGemm", "gemm_a8w8", "gemm_a16w16", "get_GEMM_A16W16_config", "tgemm"]

product = computed(tuned_gemm, exact=("x_scale", "w_scale", "out_scale"))


@renamed(x="A", weight="B", out_dtype="otype", x_scale="scale_a", w_scale="scale_b", out_scale="scale_c")
def gemm_a16w16(
    A: Tensor, B: Tensor, bias: Tensor | None = None, otype: torch.dtype | None = None,
    scale_a: Tensor | None = None, scale_b: Tensor | None = None, scale_c: Tensor | None = None, *,
    is_shuffled: bool | None = None,
) -> Tensor:  # fmt: skip
    """Compute `A @ B.mT + bias` for A (..., K) and B (N, K), in `otype` or the dtype of `A`.

    The files of `AITER_CONFIG_GEMM_BF16` name the implementation for each size; without a row, the fastest
    known one runs.  Differentiable.  `B` may be shuffled by `shuffle_weight`: `is_shuffled` says whether it
    is, by default `B`'s attribute of that name.  For scales, errors and the rest see
    `moe_aiter.kernels.dense.tuned_gemm.tuned_gemm`.
    """
    if is_shuffled is None:
        is_shuffled = getattr(B, "is_shuffled", None)
    if is_shuffled and not keeps_dtypes():  # the order is that of its dtype, and no attribute survives a cast
        B, is_shuffled = unshuffle_weight(B), False
    scales = {"x_scale": scale_a, "w_scale": scale_b, "out_scale": scale_c}
    return product(A, B, bias, out_dtype=otype, is_shuffled=is_shuffled, **scales)


@checked
def get_GEMM_A16W16_config(
    M: int, N: int, K: int, bias: bool | int, dtype: torch.dtype | str, otype: torch.dtype | str,
    scaleAB: bool | int = False, bpreshuffle: bool | int = False,
) -> dict:  # fmt: skip
    """Return what AITER's files say of a product on this device: `libtype`, `solidx`, `splitK`, `us`...

    It is the row for M, or for the M to which AITER pads M; without a row, the dict names the backend that
    multiplies.  Dtypes by torch's names or AITER's: torch.bfloat16, "torch.bfloat16", "bf16".  Flags may be 0
    and 1.  The dict is a copy.  `libtype` names the backend; `solidx` and `splitK`, which choose a kernel
    of AITER's, have no effect here.
    Raises ValueError for malformed files and unknown dtypes, FileNotFoundError if there are several files and
    none exists.
    """
    check_sizes(M=M, N=N, K=K)
    for name, flag in (("bias", bias), ("scaleAB", scaleAB), ("bpreshuffle", bpreshuffle)):
        if flag not in (0, 1):
            raise ValueError(f"{name} must be True or False, 1 or 0, not {flag}")
    dtypes = to_dtype("dtype", dtype), to_dtype("otype", otype)
    return tuned_config(GemmKey(M, N, K, bool(bias), *dtypes, bool(scaleAB), bool(bpreshuffle)))


get_GEMM_A16W16_config.cache_info = find_tuned.cache_info
get_GEMM_A16W16_config.cache_clear = find_tuned.cache_clear


class TunedGemm:
    """`gemm_a16w16` as a method."""

    @renamed(A="inp", B="weights")
    def mm(
        self, inp: Tensor, weights: Tensor, bias: Tensor | None = None, otype: torch.dtype | None = None,
        scale_a: Tensor | None = None, scale_b: Tensor | None = None, scale_c: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return gemm_a16w16(inp, weights, bias, otype, scale_a, scale_b, scale_c)


tgemm = TunedGemm()
