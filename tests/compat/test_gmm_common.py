"""The tensors of `gmm_common`: drawn as its names say, and checked."""

from functools import partial

import pytest
import torch

from moe_aiter import gmm, nptgmm, ptgmm
from moe_aiter.compat.aiter.ops.triton.utils import gmm_common
from moe_aiter.compat.aiter.ops.triton.utils.gmm_common import gen_group_sizes, gen_uniform_group_sizes


def test_uniform():
    sizes = gen_uniform_group_sizes(11, 4, device="cpu")
    assert sizes.tolist() == [3, 3, 3, 2] and sizes.dtype == torch.int32


def test_random():
    state = torch.get_rng_state()
    sizes = gen_group_sizes(1000, 16, device="cpu")
    assert sizes.sum() == 1000 and sizes.shape == (16,) and sizes.dtype == torch.int32
    assert torch.equal(sizes, gen_group_sizes(1000, 16, device="cpu")) and torch.equal(
        state, torch.get_rng_state()
    )
    assert not torch.equal(sizes, gen_group_sizes(1000, 16, device="cpu", rng_seed=1))
    assert 300 < gen_group_sizes(1000, 16, device="cpu", unused_tokens_prob=0.5).sum() < 700
    assert (gen_group_sizes(1000, 16, device="cpu", unused_experts_prob=0.5) == 0).sum() > 2
    assert gen_group_sizes(10, 3, device="cpu", unused_experts_prob=1.0).max() == 10
    assert (
        not gen_group_sizes(0, 3, device="cpu").any()
        and gen_group_sizes(5, 3, device="cpu", rng_seed=None).sum() == 5
    )
    for draw in (gen_group_sizes, gen_uniform_group_sizes):
        with pytest.raises(ValueError, match="G must be at least 1, not 0"):
            draw(3, 0, device="cpu")
        with pytest.raises(ValueError, match="M must be at least 0"):
            draw(-1, 2, device="cpu")
        assert draw(3, 2, torch.int64, "cpu").dtype == torch.int64
        with pytest.raises(TypeError, match=r"group_sizes_dtype must be int32 or int64, not torch.int16"):
            draw(3, 2, torch.int16, "cpu")


def test_shapes():
    sizes = torch.zeros(3, dtype=torch.int32)
    assert gmm_common.get_gmm_shape(torch.zeros(7, 4), torch.zeros(3, 4, 5), sizes) == (7, 4, 5, 3)
    assert gmm_common.get_gmm_shape(torch.zeros(7, 4), torch.zeros(3, 5, 4), sizes) == (7, 4, 5, 3)
    assert gmm_common.get_tgmm_shape(torch.zeros(7, 4), torch.zeros(7, 5), sizes) == (7, 4, 5, 3)
    assert gmm_common.get_tgmm_shape(torch.zeros(4, 7), torch.zeros(7, 5), sizes) == (7, 4, 5, 3)
    with pytest.raises(ValueError, match=r"lhs is \(M, K=4\) but rhs is \(G, K=6, N\)"):
        gmm_common.get_gmm_shape(torch.zeros(7, 4), torch.zeros(3, 6, 5), sizes)
    with pytest.raises(ValueError, match=r"lhs is \(K, M=7\) but rhs is \(M=8, N\)"):
        gmm_common.get_tgmm_shape(torch.zeros(4, 7), torch.zeros(8, 5), sizes)


def test_powers():
    assert [n for n in range(-2, 20) if gmm_common.is_power_of_2(n)] == [1, 2, 4, 8, 16]


def test_defaults():
    assert gmm_common.DTYPE == gmm_common.dtype_from_str(gmm_common.DTYPE_STR) == torch.bfloat16
    index_dtype = gmm_common.group_sizes_dtype_from_str(gmm_common.GROUP_SIZES_DTYPE_STR)
    assert index_dtype == gmm_common.GROUP_SIZES_DTYPE == torch.int32
    assert torch.device(gmm_common.DEVICE).type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert (gmm_common.RNG_SEED, gmm_common.NUM_GROUP_SIZES) == (0, 1)
    assert (gmm_common.TRANS_LHS, gmm_common.TRANS_RHS) == (False, False)


def test_names_of_dtypes():
    for name in gmm_common.SUPPORTED_DTYPES_STR:
        dtype = gmm_common.dtype_from_str(name)
        assert dtype in gmm_common.SUPPORTED_DTYPES and gmm_common.str_from_dtype(dtype) == name
        assert (
            gmm_common.dtype_from_str(f" I{name.upper()}") == gmm_common.dtype_from_str(f"o{name}") == dtype
        )
    for name in gmm_common.SUPPORTED_GROUP_SIZES_DTYPES_STR:
        dtype = gmm_common.group_sizes_dtype_from_str(f"{name.upper()} ")
        assert dtype in gmm_common.SUPPORTED_GROUP_SIZES_DTYPES
        assert gmm_common.str_from_group_sizes_dtype(dtype) == name
    with pytest.raises(ValueError, match="dtype_str must be one of fp16, bf16, not fp8"):
        gmm_common.dtype_from_str("fp8")
    with pytest.raises(ValueError, match=r"dtype must be one of .*, not torch.float64"):
        gmm_common.str_from_dtype(torch.float64)


def test_checks():
    x, w, sizes, bias = (
        torch.ones(7, 4),
        torch.ones(3, 4, 5),
        torch.zeros(3, dtype=torch.int64),
        torch.ones(3, 5),
    )
    gmm_common.check_input_device_dtype(x, w, sizes)
    gmm_common.check_input_device_dtype(x, w, sizes.int(), bias)
    gmm_common.check_bias_shape_stride(bias, 3, 5)
    gmm_common.check_group_sizes_dtype(torch.int64)
    for wrong in ((x.half(), w, sizes), (x, w, sizes.float()), (x, w, sizes, bias.half())):
        with pytest.raises(TypeError, match=r"lhs is torch|group_sizes must be int32 or int64"):
            gmm_common.check_input_device_dtype(*wrong)
    for wrong in ((x, w.to("meta"), sizes), (x, w, sizes, bias.to("meta"))):
        with pytest.raises(ValueError, match=r"lhs is on cpu but .* is on meta"):
            gmm_common.check_input_device_dtype(*wrong)
    with pytest.raises(TypeError, match="dtype must be int32 or int64"):
        gmm_common.check_group_sizes_dtype(torch.int16)
    for wrong in (bias, bias.mT.contiguous().mT):
        with pytest.raises(ValueError, match="bias must be"):
            gmm_common.check_bias_shape_stride(wrong, 3, 4 if wrong is bias else 5)


def test_several_group_sizes():
    draw = partial(gmm_common.gen_multiple_group_sizes, 3, 50, 4, torch.int64, "cpu")
    sizes = draw()
    assert [int(s.sum()) for s in sizes] == [50] * 3 and {s.dtype for s in sizes} == {torch.int64}
    assert not torch.equal(sizes[0], sizes[1]) and not torch.equal(sizes[1], sizes[2])
    assert all(map(torch.equal, sizes, draw()))
    first = torch.tensor([50, 0, 0, 0])
    again = draw(group_sizes_0=first)
    assert again[0] is first and all(map(torch.equal, again[1:], sizes[1:]))
    assert len(draw(rng_seed=None)) == 3
    for wrong in (first.int(), first[:3], first.to("meta")):
        with pytest.raises(ValueError, match=r"group_sizes_0 must be torch.int64 \(4,\) on cpu, but it is"):
            draw(group_sizes_0=wrong)


M, K, N, G = 11, 6, 8, 3
LAYOUTS = [  # trans, alt_trans; whether the operand is a view, and whether its last two axes are swapped
    (False, False, False, False),
    (False, True, False, False),
    (True, False, True, False),
    (True, True, False, True),
]


@pytest.mark.parametrize("trans, alt, view, swapped", LAYOUTS)
@pytest.mark.parametrize("uniform", [False, True])
def test_tensors_of_gmm(trans, alt, view, swapped, uniform):
    def draw(**more):
        return gmm_common.gen_gmm_tensors(
            M, K, N, G, 2, torch.float32, torch.float32, torch.int64, device="cpu", trans_lhs=True,
            trans_rhs=trans, alt_trans=alt, unif_group_sizes=uniform, use_bias=True, **more,
        )  # fmt: skip

    state = torch.get_rng_state()
    lhs, rhs, sizes, out, bias = draw()
    assert torch.equal(state, torch.get_rng_state())
    assert lhs.shape == (M, K) and rhs.shape == ((G, N, K) if swapped else (G, K, N))
    assert rhs.is_contiguous() != view and len(sizes) == 2 and sizes[0].dtype == torch.int64
    assert sizes[0].tolist() == [4, 4, 3] or not uniform
    assert out.shape == (M, N) and bias.shape == (G, N) and out.dtype == bias.dtype == torch.float32
    assert gmm_common.get_gmm_shape(lhs, rhs, sizes[0]) == (M, K, N, G)
    assert gmm_common.get_gmm_transposition(lhs, rhs, out) == (trans, K if trans else N)
    assert gmm(lhs, rhs, sizes[0], bias=bias, existing_out=out) is out
    want = torch.cat([x @ (w.mT if swapped else w) + b for x, w, b in zip(
        lhs.split(sizes[0].tolist()), rhs, bias, strict=True)])  # fmt: skip
    torch.testing.assert_close(out, want)
    again = draw()
    assert torch.equal(lhs, again[0]) and torch.equal(rhs, again[1]) and torch.equal(bias, again[4])
    assert not torch.equal(lhs, draw(rng_seed=1)[0])
    torch.manual_seed(5)
    first = draw(rng_seed=None)
    assert not torch.equal(first[0], draw(rng_seed=None)[0])
    torch.manual_seed(5)
    assert torch.equal(first[4], draw(rng_seed=None)[4])


@pytest.mark.parametrize("trans, alt, view, swapped", LAYOUTS)
@pytest.mark.parametrize("multiply", [ptgmm, nptgmm])
def test_tensors_of_tgmm(trans, alt, view, swapped, multiply):
    lhs, rhs, sizes, out, bias_grad = gmm_common.gen_tgmm_tensors(
        M, K, N, G, 2, torch.float32, torch.float32, device="cpu", trans_lhs=trans, trans_rhs=True,
        alt_trans=alt, use_bias=True,
    )  # fmt: skip
    assert lhs.shape == ((M, K) if swapped else (K, M)) and rhs.shape == (M, N)
    assert lhs.is_contiguous() != view and len(sizes) == 2
    assert out.shape == (G, K, N) and bias_grad.shape == (G, K) and bias_grad.dtype == torch.float32
    assert gmm_common.get_tgmm_shape(lhs, rhs, sizes[0]) == (M, K, N, G)
    assert gmm_common.get_tgmm_transposition(lhs, rhs, out) == (trans, K if trans else M)
    assert multiply(lhs, rhs, sizes[0], existing_out=out, bias_grad=bias_grad) is out
    rows = (lhs if swapped else lhs.mT).split(sizes[0].tolist())
    torch.testing.assert_close(bias_grad, torch.stack([x.sum(0) for x in rows]))
    want = [x.mT @ y for x, y in zip(rows, rhs.split(sizes[0].tolist()), strict=True)]
    torch.testing.assert_close(out, torch.stack(want))


def test_defaults_of_tensors():
    on_cpu = {"device": "cpu"}
    lhs, rhs, sizes, out, bias = gmm_common.gen_gmm_tensors(M, K, N, G, 1, **on_cpu)
    assert {x.dtype for x in (lhs, rhs, out)} == {torch.bfloat16} and bias is None
    assert sizes[0].dtype == torch.int32
    lhs, rhs, sizes, out, bias_grad = gmm_common.gen_tgmm_tensors(M, K, N, G, 1, **on_cpu)
    assert {x.dtype for x in (lhs, rhs, out)} == {torch.bfloat16} and bias_grad is None
    lhs, rhs, sizes = gmm_common.gen_gmm_input(0, K, N, G, **on_cpu)
    assert lhs.shape == (0, K) and not sizes.any()
    assert gmm_common.gen_tgmm_bias_grad(K, G, "cpu").shape == (0,)
    with pytest.raises(ValueError, match="N must be at least 1, not 0"):
        gmm_common.gen_gmm_input(M, K, 0, G, **on_cpu)
    with pytest.raises(TypeError, match=r"output_type must be a floating dtype, not torch.int8"):
        gmm_common.gen_tgmm_tensors(M, K, N, G, 1, torch.float16, torch.int8, **on_cpu)


@pytest.mark.parametrize(
    "get, sizes", [(gmm_common.get_gmm_output, (M, N)), (gmm_common.get_tgmm_output, (K, N, G))]
)
def test_outputs(get, sizes):
    shape = sizes if len(sizes) == 2 else (G, K, N)
    assert get(*sizes, "cpu").shape == shape and get(*sizes, "cpu").dtype == torch.bfloat16
    out = torch.ones(shape)
    assert get(*sizes, out.device, torch.float32, out) is out and (out == 1).all()
    for wrong in (torch.ones(shape[::-1]), out.half(), out.to("meta"), None):
        with pytest.raises((TypeError, ValueError), match=r"existing_out|device"):
            get(*sizes, "cpu" if wrong is not None else None, torch.float32, wrong)


def test_bias_gradients():
    get = gmm_common.get_tgmm_bias_grad
    assert get(K, G, "cpu").shape == (0,) and get(K, G, "cpu").dtype == torch.float32
    bias_grad = torch.ones(G, K)
    assert get(K, G, "cpu", bias_grad) is bias_grad and not bias_grad.any()
    kept = torch.ones(G, K)
    for wrong in (kept.mT, kept.half(), torch.ones(K, G).mT):
        with pytest.raises(ValueError, match="existing_bias_grad must be"):
            get(K, G, "cpu", wrong)
    assert (kept == 1).all()


def test_transposition_of_other_strides():
    lhs, rhs, out = torch.zeros(M, K), torch.zeros(G, K, N), torch.zeros(M, N)
    square = torch.zeros(G, K, K)
    assert gmm_common.get_gmm_transposition(lhs, square, torch.zeros(M, K)) == (False, K)
    assert gmm_common.get_gmm_transposition(lhs, square.mT, torch.zeros(M, K)) == (True, K)
    with pytest.raises(ValueError, match="rhs must be stored by rows or by columns"):
        gmm_common.get_gmm_transposition(lhs, torch.zeros(G, K, 2 * N)[:, :, ::2], out)
    with pytest.raises(ValueError, match="lhs must be row-major"):
        gmm_common.get_gmm_transposition(torch.zeros(K, M).mT, rhs, out)
    with pytest.raises(ValueError, match=r"out is \(M, N=9\)"):
        gmm_common.get_gmm_transposition(lhs, rhs, torch.zeros(M, N + 1))
    with pytest.raises(ValueError, match="out must be row-major"):
        gmm_common.get_tgmm_transposition(torch.zeros(K, M), out, torch.zeros(G, N, K).mT)
