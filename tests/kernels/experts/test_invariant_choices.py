"""Under batch invariance, what decides the bits of a product is the same for any number of tokens.

No GPU is needed: the launchers choose kernels and constants for tensors without memory.
"""

import functools

import pytest
import torch
from aot import TARGETS, compiling_for, ints, new

from moe_aiter import tuning
from moe_aiter.bench.problem import SHAPES, Shape
from moe_aiter.invariance import invariant
from moe_aiter.kernels import hopper
from moe_aiter.kernels.base.activations import get_activation
from moe_aiter.kernels.experts.fp8 import (
    DownGradFp8Inputs,
    GmmUnpermuteFp8Inputs,
    UpFp8Inputs,
    bind_down_grad,
    bind_gmm_unpermute_fp8,
    bind_up,
)
from moe_aiter.kernels.experts.tiers import HOPPER, PORTABLE, meta_experts, products, tier
from moe_aiter.kernels.experts.up import ZInputs
from moe_aiter.kernels.grouped.four_bit import FourBitInputs
from moe_aiter.kernels.grouped.scaled_gemm import ScaledGroupsInputs
from moe_aiter.kernels.grouped.segment_gmm import SegmentInputs
from moe_aiter.op import IMPLS, bound, runs, use
from moe_aiter.tuning import table_name

pytestmark = [pytest.mark.no_interpreter, pytest.mark.no_host]
TOKENS = (1, 2, 7, 8, 31, 32, 100, 256, 1000, 1024, 4096, 8192, 32768)
NAMES = ("A", "B", "C", "D", "E", "gpt-oss", "dsv3")
MODELS = {name: SHAPES[name] for name in NAMES} | {"Qwen3-Next": Shape(4096, 2048, 512, 512, 10)}
F32, E4M3 = torch.float32, torch.float8_e4m3fn
OWN = {"sm_90": ("h200", "sm90")}  # tables of a GPU, before that of its architecture


@pytest.fixture(params=[(HOPPER, "sm_90"), *((PORTABLE, target) for target in TARGETS)], ids="-".join)
def gpu(request, monkeypatch):
    """The backend and the target of a GPU that launchers choose for."""
    backend, target = request.param
    monkeypatch.setattr(hopper, "is_hopper", lambda device: backend == HOPPER)
    arch = TARGETS[target].gpu
    names = OWN.get(target, (table_name(arch.backend, arch.arch),))
    with tuning.tables_of(names), use("auto" if backend == HOPPER else "triton"):
        yield backend, target


def launches(target, impl, inputs, out):
    with compiling_for(TARGETS[target], compile=False) as found:
        bound(impl, inputs)(out, inputs)
    return found


def kind(launch, target):
    """What decides the bits of a product, beside its operands: the instruction, and the order of its sums."""
    named = {**dict(zip(launch.fn.arg_names, launch.args, strict=False)), **launch.options}
    by_hopper = "hopper" in launch.fn.__module__
    tile = tuple(named.get(f"BLOCK_{side}") for side in "MNK")
    rows = tile[1] if named.get("TRANSPOSED") else tile[0]  # of the left operand
    if by_hopper or (target == "sm_90" and rows is not None and rows >= 64 and named["num_warps"] % 4 == 0):
        instruction = "wgmma"
    else:
        instruction = "mma.sync" if target in ("sm_80", "sm_89", "sm_120", "sm_90") else tile
    dtypes = {getattr(getattr(a, "base", a), "dtype", None) for a in launch.args}
    if F32 in dtypes and not dtypes & {torch.bfloat16, torch.float16, E4M3}:
        instruction = tile  # of multiply-add instructions
    bias = named.get("bias_ptr")
    last = by_hopper or bool(named.get("BIAS_LAST"))
    activation = by_hopper or named.get("BIAS_LAST")  # whether its functions are Hopper's
    of_up = activation if "ACTIVATION" in named else None
    parts = named["ds_ptr"].shape[0] if "ds_ptr" in named else 1  # partial sums over columns
    return instruction, bias is not None and last, of_up, parts, named.get("SUMS", (0, False))


def kinds(target, impl, inputs, out):
    found = launches(target, impl, inputs, out)
    return [kind(launch, target) for launch in found if "ACTIVATION" in launch.options or is_product(launch)]


def is_product(launch):
    return launch.kernel.endswith("gmm_kernel")


def of_products(gpu, shape, num_tokens, dtype=torch.bfloat16):
    """Name -> what decides the bits of each product that has rows of tokens."""
    backend, target = gpu
    sizes = num_tokens, *shape.sizes[1:]
    how = {"interleaved": shape.interleaved, "bias": shape.bias, "dtype": dtype}
    i, found = meta_experts(sizes, shape.activation, **how), {}
    for name, product in products(i).items():
        if name.startswith("dW"):
            continue
        chosen = tier(product, "" if backend == HOPPER else "it is forced").name
        z, a = (new(len(i.order), columns, dtype=dtype) for columns in (shape.width, shape.intermediate))
        outs = {"up": (z, a), "down_grad": (z, a, new(*i.rank.shape, dtype=F32))}
        out = outs.get(name, getattr(product.inputs, "existing_out", None))
        impl = IMPLS[product.op]["hopper" if chosen == HOPPER else "triton"]
        found[name] = kinds(target, impl, product.inputs, out)
        assert len(found[name]) == 1
        if name == "down_grad":  # Hopper's kernel rounds in between
            found[name].append(chosen)
    return found


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, F32], ids=str)
def test_products_of_a_step(gpu, shape, dtype):
    if gpu[0] == HOPPER and dtype == F32:
        pytest.skip("float32 has no Hopper kernel")
    with invariant():
        first, *rest = (of_products(gpu, shape, T, dtype) for T in TOKENS)
    assert all(found == first for found in rest)


def test_without_the_switch_the_parts_of_a_sum_change(monkeypatch):
    gpu = PORTABLE, "sm_90"
    with tuning.tables_of(OWN["sm_90"]), use("triton"):
        few, many = (of_products(gpu, MODELS["A"], T) for T in (1, 8192))
    assert few.pop("down_grad") != many.pop("down_grad")
    assert few == many  # nothing else: it is so without the switch


@pytest.mark.parametrize("name", ["A", "gpt-oss", "D"])
def test_on_hopper_no_switch_is_needed(monkeypatch, name):
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    with tuning.tables_of(OWN["sm_90"]):
        first, *rest = (of_products((HOPPER, "sm_90"), MODELS[name], T) for T in TOKENS)
    assert all(found == first for found in rest)


def test_what_keeps_a_tile_knows_of_the_switch():
    before = tuning.decided_by()
    with invariant():
        assert tuning.decided_by() != before


# 8 bits


def plan(num_tokens, shape):
    R = num_tokens * shape.top_k
    return ints(R), ints(num_tokens, shape.top_k), ints(shape.num_experts)


def fp8_products(shape, num_tokens):
    """The implementations for 8-bit floats, their inputs and results."""
    _, H, inner, E, k = shape.sizes
    T, R, width = num_tokens, num_tokens * k, shape.width
    eight = functools.partial(new, dtype=E4M3)
    act, routing, scale = (shape.activation, shape.interleaved), plan(T, shape), new(R, dtype=F32)
    z, a, s = new(R, width), new(R, inner), new(T, k, dtype=F32)
    up = UpFp8Inputs(
        eight(T, H), new(T, dtype=F32), eight(E, width, H), new(E, width, dtype=F32), None,
        *routing, *act, True, torch.bfloat16,
    )  # fmt: skip
    order, rank, group_sizes = routing
    down = GmmUnpermuteFp8Inputs(
        eight(R, inner), scale, eight(E, H, inner), new(E, H, dtype=F32), group_sizes, None,
        order, rank, s, 2**62, False, torch.bfloat16,
    )  # fmt: skip
    grad = DownGradFp8Inputs(
        eight(T, H), new(T, dtype=F32), z, eight(E, inner, H), new(E, inner, dtype=F32), s, *routing, *act,
        True,
    )  # fmt: skip
    yield bind_up, up, (z, a)
    yield bind_gmm_unpermute_fp8, down, new(T, H)
    yield bind_down_grad, grad, (z, a, s)


@pytest.mark.parametrize("name", ["A", "B", "C", "D", "E"])
def test_8_bits(monkeypatch, name):
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    seen = set()
    with tuning.tables_of(OWN["sm_90"]), invariant():
        for T in TOKENS:
            of_step = list(fp8_products(MODELS[name], T))
            assert all(impl.fits(inputs) for impl, inputs, _ in of_step)
            seen.add(tuple(str(kinds("sm_90", *one)) for one in of_step))
    assert len(seen) == 1


def test_scaled_products_of_groups(monkeypatch):
    """Of 8-bit weights for inference, in sizes that the fused kernels refuse."""
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    shape, seen = MODELS["C"], set()
    _, H, inner, E, k = shape.sizes
    with tuning.tables_of(OWN["sm_90"]), invariant():
        for T in TOKENS:
            order, _, group_sizes = plan(T, shape)
            x, w = new(T, H, dtype=E4M3), new(E, inner, H, dtype=E4M3).mT
            scales = new(T, dtype=F32), new(E, inner, dtype=F32)
            i = ScaledGroupsInputs(x, w, group_sizes, *scales, None, order, k, torch.bfloat16)
            seen.add(bool(runs(IMPLS["scaled_gmm"]["hopper"], i)))
    assert seen == {True}


# 4 bits, and adapters


def four_bit(shape, num_tokens, transpose):
    _, H, _, E, k = shape.sizes
    R, (order, _, group_sizes) = num_tokens * k, plan(num_tokens, shape)
    packed, scales = new(E, shape.width, H // 2, dtype=torch.uint8), new(E, shape.width, H // 64, dtype=F32)
    parts = packed, scales, None, None, new(16, dtype=F32), "nf4"
    if transpose:
        bias = new(E, shape.width)
        return FourBitInputs(new(num_tokens, H), *parts, True, group_sizes, bias, order, k), shape.width
    return FourBitInputs(new(R, shape.width), *parts, False, group_sizes, None, None, 1), H


@pytest.mark.parametrize("transpose", [True, False])
def test_4_bits(gpu, transpose):
    backend, target = gpu
    shape, seen = MODELS["C"], set()
    with invariant():
        for T in TOKENS:
            inputs, columns = four_bit(shape, T, transpose)
            impls = IMPLS["four_bit_gmm"]
            by_hopper = backend == HOPPER and runs(impls["hopper"], inputs)
            assert by_hopper == (backend == HOPPER)
            impl = impls["hopper" if by_hopper else "triton"]
            seen |= {str(k) for k in kinds(target, impl, inputs, new(inputs.rows, columns))}
    assert len(seen) == 1


@pytest.mark.parametrize("rank", [8, 16, 64, 128])
@pytest.mark.parametrize("expand", [False, True])
def test_adapters(gpu, rank, expand):
    """The two products of an adapter, and their gradients, whose sums run over the same axes."""
    _, target = gpu
    shape, seen, E = MODELS["C"], set(), 128
    K, N = (rank, shape.hidden) if expand else (shape.hidden, rank)
    with invariant():
        for T in TOKENS:
            R = T * shape.top_k
            i = SegmentInputs(new(R, K), new(E, K, N), ints(E), None, None)
            assert not runs(IMPLS["segment_gmm"]["hopper"], i)
            (launch,) = launches(target, IMPLS["segment_gmm"]["triton"], i, new(R, N))
            tile = [launch.options[f"BLOCK_{side}"] for side in "MNK"]
            seen.add((launch.kernel, *tile, launch.options["num_warps"]))
    assert len(seen) == 1


@pytest.mark.parametrize("rank", [8, 16, 64])
def test_the_product_with_an_adapters_few_columns(gpu, rank):
    """Too few columns for the instructions that other tiles of few rows use."""
    backend, target = gpu
    shape, seen = MODELS["C"], set()
    _, H, _, E, _ = shape.sizes
    with invariant():
        for T in TOKENS:
            i = ZInputs(new(T, H), new(E, rank, H), None, *plan(T, shape), "relu", False)
            impl = IMPLS["expert_z"]["hopper"]
            by_hopper = backend == HOPPER and runs(impl, i) and impl.should_use(i)
            impl = impl if by_hopper else IMPLS["expert_z"]["triton"]
            (found,) = kinds(target, impl, i, new(len(i.order), rank))
            seen.add(found)
    assert len(seen) == 1 and not get_activation("relu").gated
