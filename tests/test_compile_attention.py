"""The kernels around torch's attention compile for every target: see test_compile_targets.py."""

import pytest
import torch

from moe_aiter.config import interpret
from moe_aiter.kernels.dense.attention_mask import launch_mask_bias, launch_zero_rows

if interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from aot import TARGETS, compiling_for
from test_compile_targets import check, new


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 4096])
@pytest.mark.parametrize("target", TARGETS)
def test_compiles(target, rows, dtype):
    mask, alive = new(64, 1, rows, 4096, dtype=torch.bool), new(64, 1, rows, 1, dtype=torch.uint8)
    bias, out = new(64, 1, rows, 4096, dtype=dtype), new(64, 32, rows, 128, dtype=dtype)
    with compiling_for(TARGETS[target]) as launches:
        launch_mask_bias((bias, alive), mask, dtype)
        launch_zero_rows(out, alive.view(torch.bool))
    check(TARGETS[target], launches)
    assert [launch.kernel for launch in launches] == ["mask_bias_kernel", "zero_rows_kernel"]
