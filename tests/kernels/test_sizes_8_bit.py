"""8 bits where each size in turn is 0 and 1: experts, what is laid out for them, and what Hopper takes."""

import pytest
import torch

from moe_aiter.config import interpret
from moe_aiter.kernels import hopper
from moe_aiter.kernels.experts.fp8 import BLOCK, RECIPES, QuantizedInputs, quantized_experts
from moe_aiter.kernels.quantize import blocks, layouts
from moe_aiter.kernels.quantize.rows import quantize_rows
from moe_aiter.kernels.rows.sort import sort_by_expert
from moe_aiter.op import IMPLS, INPUTS, runs

from .. import references
from ..check import as_tuple
from ..samples import of_blocks
from ..shapes import in_turn
from .experts.test_experts import make
from .experts.test_experts_fp8 import compare, definition, run
from .quantize.test_quantize import same
from .test_sizes import IDS

SIZES = dict(T=6, H=5, I=4, E=3, k=2)
WAYS = [(fp8, recompute) for fp8 in RECIPES for recompute in ("none", "z")]
REFUSED = {"E": 0, "k": 0}.items()  # by sort_by_expert


@pytest.mark.parametrize("fp8, recompute", WAYS[:: len(WAYS) - 1] if interpret else WAYS)
@pytest.mark.parametrize("size", [s for s in in_turn(**SIZES) if not s.items() & REFUSED], ids=str)
@pytest.mark.pairwise
def test_experts(device, size, fp8, recompute):
    inputs = make(device, **size)
    x, gate_up, down, s, *biases = inputs
    ids = IDS[: len(x), : s.shape[1]].clamp(max=len(down) - 1).to(device)
    options, dout = (ids, "swiglu", False), torch.randn(x.shape).to(device)
    exact = definition(*options, fp8, dout.double(), *(t.double() for t in inputs))
    compare(run(*options, fp8, dout, *inputs, recompute=recompute), exact, 1e-5)
    if fp8 == BLOCK:  # no format of `quantize`
        return
    kept = [(*quantize_rows(w), bias) for w, bias in zip((gate_up, down), biases, strict=True)]
    out = quantized_experts(x, *kept, s, sort_by_expert(ids, len(down)), *options[1:])
    compare([out], exact[:1], 2**-13 if hopper.is_hopper(device) else 1e-5)  # tensor cores keep some 14 bits


@pytest.mark.parametrize("size", in_turn(M=260, K=4, G=2), ids=str)
def test_layouts(device, size):
    M, K, G = size.values()
    x, w, factor = (torch.randn(s).abs().to(device) for s in ((M, K), (G, M, K), (G, K)))
    sizes = torch.tensor([M // 2, 1][:G], dtype=torch.int32, device=device)
    order = torch.randperm(M).to(device, torch.int32)
    (x8, scale), (w8, w_scale) = quantize_rows(x), quantize_rows(w)
    _, row_blocks = blocks.plan_row_blocks(sizes, M)
    for module, name, *inputs in (
        (blocks, "plan_row_blocks", sizes, M),
        (layouts, "quantize_folded", x, factor, sizes, "e4m3"),
        (layouts, "quantize_transposed", w, w_scale, "e4m3"),
        (layouts, "transpose_rows8", w8),
        (blocks, "quantize_row_blocks", x, scale, order, 1, row_blocks, "e4m3"),
        (blocks, "transpose_row_blocks", x8, order, 1, row_blocks),
    ):
        there = (
            (row_blocks[:, 0] < row_blocks[:, 1])
            if name.endswith("_row_blocks") and name != "plan_row_blocks"
            else slice(None)
        )
        got, want = (
            as_tuple(getattr(of, f"{name}_{way}")(*inputs))
            for of, way in ((module, "op"), (references, "reference"))
        )
        want = [t.to(o.dtype) for t, o in zip(want, got, strict=True)]
        assert same([t[there] for t in got], [t[there] for t in want]), name


FITS = dict(T=4, H=256, I=64, E=2)


@pytest.mark.parametrize("size", [FITS, *(s for s in in_turn(**FITS) if 0 in s.values())], ids=str)
@pytest.mark.no_interpreter
def test_hopper_is_for_what_has_elements(size, monkeypatch):
    """TMA copies nothing of a tensor that has none."""
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    T, H, I, E = size.values()  # noqa: E741
    shapes = (T, H), (T, 2 * I), (T, I), (E, 2 * I, H), (E, H, I)
    x, z, a, gate_up, down = (torch.zeros(shape).bfloat16() for shape in shapes)
    x8, a8, up8, down8, columns8 = map(quantize_rows, (x, a, gate_up, down, down.mT))
    plan, s = [torch.zeros(n, dtype=torch.int32) for n in ((T,), (T, 1), (E,))], torch.zeros(T, 1)
    for op, *inputs in (
        ("gmm", x, gate_up.mT, plan[2], None),
        ("expert_up", x, gate_up, None, *plan, "swiglu", False, True, 0, None),
        ("expert_up_fp8", *x8, *up8, None, *plan, "swiglu", False, True, x.dtype),
        ("gmm_unpermute_fp8", *a8, *down8, plan[2], None, *plan[:2], s, 2**30, False, a.dtype),
        ("gmm_fp8", *of_blocks(x, gate_up, plan[2])),
        ("expert_down_grad", x, z, down, s, *plan, "swiglu", False, True),
        ("expert_down_grad_fp8", *x8, z, *columns8, s, *plan, "swiglu", False, True),
        ("quantized_experts", x, (*up8, None), (*down8, None), s, plan, "swiglu", False),
    ):
        i = (INPUTS | {"quantized_experts": QuantizedInputs})[op](*inputs)
        assert runs(IMPLS[op]["hopper"], i) == (size == FITS), op
