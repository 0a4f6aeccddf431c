"""FlashInfer: `flashinfer.gemm` is `moe_aiter.compat.flashinfer.gemm`; nothing is compiled in advance."""

import contextlib
import types

from names import module

from moe_aiter.compat.flashinfer import gemm


def work(given: dict) -> int:
    """Of test_segment_gemm: the product, or the 1024 weights that it draws where indices choose them."""
    rows = given["batch_size"] * given["num_rows_per_batch"]
    return given["d_in"] * given["d_out"] * max(rows, 1024 * given["use_weight_indices"])


WORK = {"test_segment_gemm": work}


def install(checkout):
    module("flashinfer", bmm_fp8=gemm.bmm_fp8, gemm=gemm, autotune=lambda *_: contextlib.nullcontext())
    # the tests' helpers for other formats name it
    module("flashinfer", SfLayout=types.SimpleNamespace(layout_linear=types.SimpleNamespace(value=0)))
    module(
        "flashinfer.utils",
        # so that no backend is skipped: any name runs what moe_aiter has for the device
        determine_gemm_backend=lambda device: "sm90",
        get_compute_capability=lambda device: (10, 0),
        has_flashinfer_jit_cache=lambda: True,
        is_sm90a_supported=None,
    )
    module("flashinfer.jit.gemm", gen_gemm_module=None, gen_gemm_sm90_module=None)
