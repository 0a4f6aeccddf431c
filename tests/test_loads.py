"""No product reads 16-bit numbers one by one where rows are whole numbers of 16 bytes, on any target.

Such a load can't be asynchronous, so the loop around it is not pipelined: three to thirty times as slow.
Biases are left out: they are read once, in the order of the sums.
"""

import pytest
import torch

from moe_aiter.config import interpret

if interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from aot import PRODUCTS, TARGETS, compiling_for, ints, new

from moe_aiter.kernels.base.gemm_row import GemmInputs
from moe_aiter.kernels.dense.gemm import bind_gemm
from moe_aiter.kernels.experts.down import DownGradInputs, bind_expert_down_grad
from moe_aiter.kernels.experts.up import UpInputs, bind_expert_up
from moe_aiter.kernels.grouped.gmm import GroupedInputs, bind_gmm
from moe_aiter.kernels.grouped.masked_gmm import MaskedInputs, bind_masked_gmm
from moe_aiter.kernels.grouped.segment_gmm import SegmentInputs, bind_segments
from moe_aiter.kernels.grouped.segments import SegmentTgmmInputs, bind_segment_tgmm
from moe_aiter.kernels.grouped.tgmm import TgmmInputs, bind_tgmm

E, ROWS, TOP_K = 32, 32768, 4
WIDTHS = {"64": (2880, 2880), "16": (1008, 720), "8": (1000, 360), "8 and 64": (2048, 1400)}  # multiples of
WEIGHTS = ["(E, out, in)", "(E, in, out)"]


def weight(transposed: bool, *shape: int) -> torch.Tensor:
    """(E, a, b), whose rows or whose columns lie side by side."""
    groups, a, b = shape
    return new(groups, b, a).mT if transposed else new(*shape)


def up(transposed, H, inner, activation, interleaved=False):
    x, plan, width = new(ROWS // TOP_K, H), plan_of(), inner * (1 if activation == "relu2" else 2)
    w = weight(transposed, E, width, H)
    i = UpInputs(x, w, None, *plan, activation, interleaved, True, 0, None)
    bind_expert_up(i)((new(ROWS, width), new(ROWS, inner)), i)


def plan_of() -> tuple[torch.Tensor, ...]:
    return ints(ROWS), ints(ROWS // TOP_K, TOP_K), ints(E)


def down_grad(transposed, H, inner, activation="swiglu", interleaved=False):
    weights = new(ROWS // TOP_K, TOP_K, dtype=torch.float32)
    x, z, w = new(ROWS // TOP_K, H), new(ROWS, 2 * inner), weight(transposed, E, H, inner)
    i = DownGradInputs(x, z, w, weights, *plan_of(), activation, interleaved, True)
    bind_expert_down_grad(i)((z, new(ROWS, inner), weights), i)


def gmm(transposed, K, N):
    i = GroupedInputs(new(ROWS, K), weight(not transposed, E, K, N), ints(E), None)
    bind_gmm(i)(new(ROWS, N), i)


def tgmm(transposed, K, N, order=True):
    x = new(ROWS // TOP_K if order else ROWS, K)
    i = TgmmInputs(x, new(ROWS, N), ints(E), ints(ROWS) if order else None, TOP_K, transposed)
    bind_tgmm(i)(weight(transposed, E, K, N), i)


def masked(transposed, K, N, M=512):
    i = MaskedInputs(new(8, M, N), new(8, M, K), weight(transposed, 8, N, K), ints(8), None, None, False)
    bind_masked_gmm(i)(i.out, i)


def segments(transposed, K, N):
    i = SegmentInputs(new(ROWS, K), weight(not transposed, E, K, N), ints(E), None, ints(E))
    bind_segments(i, torch.bfloat16)(new(ROWS, N), i)


def segment_tgmm(transposed, K, N):
    i = SegmentTgmmInputs(new(ROWS, K), new(ROWS, N), ints(2 * E), None, ints(2 * E), E, transposed)
    bind_segment_tgmm(i)(weight(transposed, E, K, N), i)


def gemm(transposed, K, N, M=4096):
    i = GemmInputs(new(1, M, K), weight(not transposed, 1, K, N), None, None, "", 1.0, 0.0, None, False)
    bind_gemm(i)((new(1, M, N), new(0)), i)


PRODUCT = {
    "up, halves": lambda *how: up(*how, "swiglu"),
    "up, interleaved": lambda *how: up(*how, "swiglu", True),
    "up, not gated": lambda *how: up(*how, "relu2"),
    "down_grad": down_grad,
    "down_grad, interleaved": lambda *how: down_grad(*how, interleaved=True),
    "gmm": gmm,
    "tgmm": lambda *how: tgmm(*how, order=False),
    "tgmm, gathered": tgmm,
    "masked": masked,
    "masked, few rows": lambda *how: masked(*how, M=32),
    "segments": segments,
    "segments, low rank": lambda transposed, K, N: segments(transposed, 24, N),
    "segment_tgmm": segment_tgmm,
    "gemm": gemm,
    "gemm, K split": lambda transposed, K, N: gemm(transposed, 8 * K, N, 128),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("layout", WEIGHTS)
@pytest.mark.parametrize("product", PRODUCT)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.pairwise
def test_loads_are_whole(target, product, layout, width):
    with compiling_for(TARGETS[target]) as launches:
        PRODUCT[product](layout == WEIGHTS[1], *WIDTHS[width])
    found = [launch for launch in launches if launch.kernel in PRODUCTS]
    assert found
    for launch in found:
        assert not launch.narrow_loads, f"{launch.kernel}: {launch.narrow_loads[:3]}, {launch.spilled()}"
        if target.startswith("sm"):
            assert "cp.async.commit_group" in launch.assembly, f"{launch.kernel} waits for each load"
