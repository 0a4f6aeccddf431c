"""Every public product under torch.autocast: operands are cast, as for F.linear and torch.matmul."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from callables import OURS
from callables_compat import MORE
from torch import Tensor

import moe_aiter
from moe_aiter.config import interpret
from moe_aiter.op import IMPLS

if interpret:
    pytest.skip("nothing here runs Triton", allow_module_level=True)

CALLS = {name: (getattr(moe_aiter, name), given) for name, given in OURS.items()} | MORE
# what multiplies floats, inside of a call
OPS = {
    "gmm",
    "tgmm",
    "tgmm_into",
    "gmm_into",
    "gemm",
    "segment_gmm",
    "segment_gmm_out",
    "sparse_matmul",
    "tuned_gemm",
}
OPERANDS = {  # the arguments that are cast; those of float32 beside them are factors and sums
    "gemm": "x w bias c",
    "gmm": "lhs rhs bias",
    "ptgmm": "lhs rhs",
    "nptgmm": "lhs rhs",
    "tgmm": "x y",
    "grouped_gemm": "input weights bias",
    "segment_gmm": "x w",
    "sparse_gemm": "input weight bias",
    "expert_mlp": "x gate_up down",
    "linear_with_split_bias": "x weight bias",
    "SegmentGEMMWrapper.run": "x weights",
    "aiter.attention": "q k v",
    "aiter.batched_gemm": "a b",
    "aiter.cutlass_gemm": "a b c",
    "aiter.gemm_bias": "input weight bias",
    "aiter.gemm_gelu": "input weight bias",
    "aiter.gemm_relu": "input weight bias",
    "aiter.grouped_gemm": "input weights bias",
    "aiter.linear": "input weight bias",
    "aiter.matmul": "x y",
    "aiter.sparse_gemm": "input weight bias",
    "aiter.AITERLinear.forward": "input",
    "tuned_gemm.gemm_a16w16": "A B bias",
    "tuned_gemm.tgemm.mm": "inp weights bias",
    "LoRALinear.forward": "x",
    "LoRAExperts.forward": "x",
    "MoE.forward": "x",
    "Experts.forward": "x",
    "OptimizedMoELayer.forward": "x",
}
OUTPUTS = {
    "out",
    "existing_out",
    "bias_grad",
    "accumulate",
    "bias_grad_from",
}  # no autocast with them, as in torch
DTYPES = {"out_dtype", "preferred_element_type", "otype"}
NO_AUTOCAST = {
    "scaled_gemm": "8-bit operands",
    "flashinfer.grouped_mm_bf16": "operands of 16 bits, and a dtype for the result",
}


def valid(name: str, **changed) -> tuple:
    """A function and a valid call of it, without an output and without a dtype for it."""
    fn, given = CALLS[name]
    kwargs = {key: value for key, value in given().items() if key not in OUTPUTS | DTYPES}
    return fn, kwargs | changed


def operands(name: str, kwargs: dict) -> dict[str, Tensor]:
    return {key: kwargs[key] for key in OPERANDS[name].split() if isinstance(kwargs.get(key), Tensor)}


def first(out) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_operands_are_cast(name, dtype):
    """The result, its dtype and gradients are those of operands that are cast by hand."""
    fn, kwargs = valid(name)
    leaves = {
        key: t.clone().requires_grad_(name != "tgmm")  # which has no gradient
        for key, t in operands(name, kwargs).items()
    }
    with torch.autocast("cpu", dtype):
        out = first(fn(**kwargs | leaves))
    assert out.dtype == dtype
    if out.requires_grad:
        for key, grad in zip(
            leaves, torch.autograd.grad(out.sum(), leaves.values(), allow_unused=True), strict=True
        ):
            assert grad is None or grad.dtype == torch.float32, key
    if "." not in name or not name.endswith("forward"):
        by_hand = fn(**kwargs | {key: t.to(dtype) for key, t in leaves.items()})
        assert torch.equal(out, first(by_hand))


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_of_several_dtypes(name):
    fn, kwargs = valid(name)
    found = operands(name, kwargs)
    for key, t in found.items():
        with torch.autocast("cpu", torch.bfloat16):
            assert first(fn(**kwargs | {key: t.to(torch.bfloat16)})).dtype == torch.bfloat16, key


@pytest.mark.parametrize("name", OPERANDS)
def test_float64_stays(name):
    fn, kwargs = valid(name)
    if "forward" in name:
        pytest.skip("its weights are float32")
    with torch.autocast("cpu", torch.bfloat16):
        out = fn(**kwargs | {key: t.double() for key, t in operands(name, kwargs).items()})
    assert first(out).dtype == torch.float64


@pytest.mark.parametrize("name", ["gmm", "ptgmm", "segment_gmm", "SegmentGEMMWrapper.run"])
def test_nothing_is_cast_into_an_output(name):
    """torch.mm(out=) knows no autocast either."""
    fn, given = CALLS[name]
    kwargs = given()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out = fn(**kwargs)
    again = torch.zeros(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        torch.mm(again, again, out=again)
    assert out.dtype == again.dtype == torch.float32


def test_an_explicit_dtype_stays():
    for name, key in (
        ("gmm", "preferred_element_type"),
        ("gemm", "out_dtype"),
        ("tuned_gemm.gemm_a16w16", "otype"),
    ):
        fn, kwargs = valid(name, **{key: torch.float32})
        with torch.autocast("cpu", torch.bfloat16):
            assert fn(**kwargs).dtype == torch.float32, name


def test_a_compiled_product():
    fn = torch.compile(lambda x, w: moe_aiter.gemm(x, w), fullgraph=True, backend="eager")
    x, w = torch.randn(4, 8), torch.randn(8, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fn(x, w), moe_aiter.gemm(x.bfloat16(), w.bfloat16()))


def test_a_step_of_a_model_of_the_documents():
    from moe_aiter.compat import aiter

    model = torch.nn.Sequential(aiter.AITERLinear(8, 16), torch.nn.GELU(), aiter.AITERLinear(16, 4))
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.mse_loss(model(torch.randn(3, 8)), torch.zeros(3, 4))
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def test_every_product_is_here(monkeypatch):
    """Every public callable that reaches a product is one of OPERANDS, or says why not."""
    used: set[str] = set()

    def noting(op, fn):
        def noted(*args, **kwargs):
            used.add(op)
            return fn(*args, **kwargs)

        return noted

    for op in OPS & IMPLS.keys():
        for backend, fn in list(IMPLS[op].items()):
            monkeypatch.setitem(IMPLS[op], backend, noting(op, fn))
    reached = set()
    for name, (fn, given) in CALLS.items():
        kwargs = given()
        if not inspect.isclass(fn) and any(
            isinstance(t, Tensor) and t.is_floating_point() for t in kwargs.values()
        ):
            used.clear()
            fn(**kwargs)
            if used:
                reached.add(name)
    assert reached <= OPERANDS.keys() | NO_AUTOCAST.keys()
