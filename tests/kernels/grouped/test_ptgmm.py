"""gmm, ptgmm and nptgmm as AITER's guide documents them, and without its defects."""

import pytest
import torch
from check import assert_as_good_as_torch

from moe_aiter.config import interpret
from moe_aiter.kernels.grouped.gmm import gmm
from moe_aiter.kernels.grouped.ptgmm import nptgmm, ptgmm

from ...references import gmm_reference, group_sum_reference, tgmm_reference

DTYPES = [torch.float32, torch.float16] if interpret else [torch.float32, torch.bfloat16, torch.float16]
SMALL = [(10, 2, 3, 4), (32, 16, 8, 4)]  # M, K, N, G of AITER's tests
TILE = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_K": 16, "BLOCK_SIZE_N": 16, "GROUP_SIZE": 1}
TRANSPOSED = {"ptgmm": ptgmm, "nptgmm": nptgmm}
every_variant = pytest.mark.parametrize("variant", TRANSPOSED.values(), ids=TRANSPOSED)
VALUE = 777.0  # what poisons a buffer: equal to itself


def uniform(M, G):
    return [M // G + (g < M % G) for g in range(G)]


def make(device, shape, dtype=torch.float32, sizes=None, tail=0):
    """lhs (M, K), rhs (G, K, N), dout (M, N), bias (G, N) and group sizes; `tail` rows are in no group."""
    M, K, N, G = shape
    sizes = uniform(M - tail, G) if sizes is None else sizes
    tensors = torch.randn(M, K), torch.randn(G, K, N) / K**0.5, torch.randn(M, N), torch.randn(G, N)
    return *(t.to(device, dtype) for t in tensors), torch.tensor(sizes, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("shape", SMALL, ids=str)
@pytest.mark.pairwise
def test_gmm(device, shape, dtype, out_dtype):
    lhs, rhs, _, bias, sizes = make(device, shape, dtype)
    sizes = sizes.long()

    def reference(lhs, rhs, bias):
        wanted = lhs.dtype if lhs.dtype == torch.float64 else out_dtype
        return gmm_reference(lhs, rhs, sizes, bias, wanted)

    def fn(lhs, rhs, bias, rhs_is=None):
        rhs = rhs.mT.contiguous() if rhs_is else rhs
        return gmm(lhs, rhs, sizes, bias=bias, preferred_element_type=out_dtype, trans_rhs=rhs_is)

    floor = 2e-7
    assert_as_good_as_torch(fn, reference, lhs, rhs, bias, floor=floor)
    assert_as_good_as_torch(fn, reference, lhs, rhs, None, floor=floor)
    torch.testing.assert_close(fn(lhs, rhs, bias, True), fn(lhs, rhs, bias))


@every_variant
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("trans_lhs", [False, True])
@pytest.mark.parametrize("source", ["lhs", "rhs"])
@pytest.mark.pairwise
def test_transposed(device, variant, dtype, trans_lhs, source):
    """Both layouts of lhs, with and without a gradient of a bias, which is the same either way."""
    x, _, dout, _, sizes = make(device, (50, 24, 40, 5), dtype, [7, 0, 29, 1, 10], tail=3)
    lhs = x if trans_lhs else x.T.contiguous()
    of = dout if source == "rhs" else x
    bias_grad = torch.full((5, of.shape[1]), float("nan"), device=device)

    def fn(x, dout):
        return variant(lhs, dout, sizes, bias_grad=bias_grad, bias_grad_from=source)

    def reference(x, dout):
        return tgmm_reference(x, dout, sizes, None, 1, False)

    assert_as_good_as_torch(fn, reference, x, dout, floor=5e-7)
    exact = group_sum_reference(of.double(), sizes, None, 1, None)
    torch.testing.assert_close(bias_grad.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(variant(lhs, dout, sizes), fn(x, dout)), "sums change nothing"
    assert not fn(x, dout)[1].any() and not bias_grad[1].any()


@every_variant
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_accumulate_rounds_once_and_overwrites_bias_grad(device, variant, out_dtype):
    x, _, dout, _, sizes = make(device, (40, 24, 17, 3), DTYPES[-1], [9, 0, 30], tail=1)
    before = torch.randn(3, 24, 17, device=device).to(out_dtype)
    out, bias_grad = before.clone(), torch.full((3, 24), VALUE, device=device)
    got = variant(x.T, dout, sizes, existing_out=out, accumulate=True, bias_grad=bias_grad)
    assert got is out
    exact = before.double() + tgmm_reference(x.double(), dout.double(), sizes, None, 1, False)
    close = {"rtol": 2 * torch.finfo(out_dtype).eps, "atol": 1e-5}
    torch.testing.assert_close(out.double(), exact.to(out_dtype).double(), **close)
    assert torch.equal(out[1], before[1]), "a group without rows adds nothing"
    exact = group_sum_reference(x.double(), sizes, None, 1, None)
    torch.testing.assert_close(bias_grad.double(), exact, rtol=1e-5, atol=1e-5)


@every_variant
def test_existing_out_is_overwritten(device, variant):
    x, _, dout, _, sizes = make(device, (40, 24, 16, 3), sizes=[9, 0, 30])
    for dtype in (torch.float32, torch.float16):
        out = torch.full((3, 24, 16), float("nan"), dtype=dtype, device=device)
        assert variant(x.T, dout, sizes, existing_out=out) is out
        torch.testing.assert_close(out, variant(x.T, dout, sizes).to(dtype), rtol=2e-3, atol=2e-3)
        assert not out[1].any()


def test_persistent_or_not_the_bits_are_the_same(device):
    x, rhs, dout, bias, sizes = make(device, (70, 40, 33, 4), sizes=[33, 0, 30, 2])
    sums = [torch.empty(4, 40, device=device) for _ in range(3)]
    config = TILE | {"num_warps": 4, "num_stages": 1}
    one = nptgmm(x.T, dout, sizes, config=config, bias_grad=sums[0])
    for programs, total in zip((3, 500), sums[1:], strict=True):
        walking = ptgmm(x.T, dout, sizes, config=config, grid_dim=programs, bias_grad=total)
        assert torch.equal(walking, one) and torch.equal(total, sums[0])
    whole = gmm(x, rhs, sizes, bias=bias, config=config)
    assert torch.equal(gmm(x, rhs, sizes, bias=bias, config=config | {"GRID_DIM": 2}), whole)
    torch.testing.assert_close(gmm(x, rhs, sizes, bias=bias, grid_dim=3), whole)


def test_work_stealing_changes_nothing(device):
    x, rhs, _, bias, sizes = make(device, (70, 40, 33, 4), sizes=[33, 0, 30, 2])
    assert torch.equal(gmm(x, rhs, sizes, bias=bias, work_stealing=True), gmm(x, rhs, sizes, bias=bias))


@pytest.mark.parametrize("size", [8, 24])
def test_a_square_operand_is_as_documented(device, size):
    x, rhs, dout, _, sizes = make(device, (size, size, size, 2))
    expected = gmm_reference(x, rhs, sizes, None)
    torch.testing.assert_close(gmm(x, rhs, sizes), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gmm(x, rhs.mT.contiguous().mT, sizes), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        gmm(x, rhs.mT.contiguous(), sizes, trans_rhs=True), expected, rtol=1e-4, atol=1e-5
    )
    expected = tgmm_reference(x, dout, sizes, None, 1, False)
    torch.testing.assert_close(ptgmm(x.T, dout, sizes), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ptgmm(x, dout, sizes, trans_lhs=True), expected, rtol=1e-4, atol=1e-5)


def poisoned(view_of, device, dtype):
    """A buffer full of VALUE, and a view of that shape inside it, off its edges and with gaps."""
    buffer = torch.full([n + 4 for n in view_of], VALUE, device=device, dtype=dtype)
    return buffer, buffer[tuple(slice(2, n + 2) for n in view_of)]


@pytest.mark.parametrize("sizes", [[3, 0, 4, 2], [0, 0, 0, 0], [20, -3, 1, 0]], ids=str)
@pytest.mark.parametrize("grid_dim", [None, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.pairwise
def test_nothing_outside_the_groups_is_written(device, sizes, grid_dim, dtype, no_debug):
    lhs, rhs, dout, bias, sizes = make(device, (30, 24, 20, 4), dtype, sizes)
    ends = sizes.clamp(0, 30).cumsum(0)[-1]
    buffer, out = poisoned((30, 20), device, dtype)
    assert gmm(lhs, rhs, sizes, bias=bias, existing_out=out, grid_dim=grid_dim) is out
    torch.testing.assert_close(out[:ends], gmm(lhs, rhs, sizes, bias=bias)[:ends])
    assert (out[ends:] == VALUE).all(), "rows past the last group"
    out[:] = VALUE
    assert (buffer == VALUE).all(), "around it"
    assert not gmm(lhs, rhs, sizes, bias=bias)[ends:].any(), "in a fresh result they are zeros"
    buffer, out = poisoned((4, 24, 20), device, dtype)
    sums, bias_grad = poisoned((4, 24), device, torch.float32)
    ptgmm(lhs.T, dout, sizes, existing_out=out, bias_grad=bias_grad)
    assert (out != VALUE).all() and (bias_grad != VALUE).all()
    out[:], bias_grad[:] = VALUE, VALUE
    assert (buffer == VALUE).all() and (sums == VALUE).all()


def test_nothing_past_the_groups_is_read(device, no_debug):
    """Infinities in rows of no group, and in another group's, reach no result."""
    x, _, dout, _, sizes = make(device, (41, 24, 20, 3), sizes=[11, 3, 20])
    x[11:14], dout[34:] = float("inf"), float("nan")
    for lhs in (x.T, x.T.contiguous()):
        out = ptgmm(lhs, dout, sizes)
        assert out[[0, 2]].isfinite().all() and not out[1].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 4, 6, 3), (9, 4, 6, 3)], ids=str)
def test_no_rows(device, shape):
    lhs, rhs, dout, _, _ = make(device, shape)
    sizes, bias_grad = torch.zeros(3, dtype=torch.int64, device=device), torch.empty(3, 4, device=device)
    assert torch.equal(gmm(lhs, rhs, sizes), lhs.new_zeros(shape[0], 6))
    for variant in TRANSPOSED.values():
        assert torch.equal(variant(lhs.T, dout, sizes, bias_grad=bias_grad.fill_(9)), lhs.new_zeros(3, 4, 6))
        assert not bias_grad.any()


def test_the_pairing_that_gives_the_gradients_of_a_linear_layer(device):
    x, w, dout, bias, sizes = make(device, (30, 12, 20, 3), sizes=[9, 0, 21])
    w, bias = w.requires_grad_(), bias.requires_grad_()
    gmm(x, w, sizes, bias=bias).backward(dout)
    close = {"rtol": 1e-4, "atol": 1e-4}
    db = torch.empty(3, 20, device=device)
    torch.testing.assert_close(ptgmm(x.T, dout, sizes, bias_grad=db, bias_grad_from="rhs"), w.grad, **close)
    torch.testing.assert_close(db, bias.grad, **close)
    dw = ptgmm(dout.T, x, sizes, bias_grad=db.zero_())  # weights (G, out, in), as in nn.Linear
    torch.testing.assert_close(dw, w.grad.mT, **close)
    torch.testing.assert_close(db, bias.grad, **close)


def test_gradients_with_a_result_in_another_dtype(device):
    x, w, dout, bias, sizes = make(device, (30, 12, 20, 3), torch.float16, sizes=[9, 0, 21])
    leaves = [t.requires_grad_() for t in (x, w, bias)]
    out = gmm(*leaves[:2], sizes, bias=bias, preferred_element_type=torch.float32)
    assert out.dtype == torch.float32
    wide = torch.autograd.grad(out, leaves, dout.float())
    plain = torch.autograd.grad(gmm(*leaves[:2], sizes, bias=bias), leaves, dout)
    assert all(torch.equal(a, b) and a.dtype == torch.float16 for a, b in zip(wide, plain, strict=True))


def test_operands_stored_as_their_negatives(device):
    x, w, dout, bias, sizes = make(device, (30, 12, 20, 3))
    back = [t._neg_view() for t in (x, w, bias, dout)]
    expected = gmm(-x, -w, sizes, bias=-bias), ptgmm((-x).T, -dout, sizes)
    assert torch.equal(gmm(*back[:2], sizes, bias=back[2]), expected[0])
    assert torch.equal(ptgmm(back[0].T, back[3], sizes), expected[1])
    memory = torch.empty(30, 20, device=device)
    gmm(*back[:2], sizes, bias=back[2], existing_out=memory._neg_view())
    assert torch.equal(memory, -expected[0])


def test_an_existing_out_is_not_recorded(device):
    x, w, dout, _, sizes = make(device, (30, 12, 20, 3))
    out = gmm(x.requires_grad_(), w.requires_grad_(), sizes, existing_out=torch.empty(30, 20, device=device))
    assert not out.requires_grad and not ptgmm(x.T, dout, sizes).requires_grad


def test_compiles(device):
    x, w, dout, bias, sizes = make(device, (9, 5, 6, 3))

    def both(x, w, dout, sizes, bias):
        bias_grad, out = torch.empty(3, 5, device=x.device), torch.empty(9, 6, device=x.device)
        gmm(x, w, sizes, bias=bias, existing_out=out)
        return out, ptgmm(x.T, dout, sizes, bias_grad=bias_grad), bias_grad

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    inputs = x, w, dout, sizes, bias
    torch.testing.assert_close(compiled(*inputs), both(*inputs))


SIZES, E4M3 = torch.tensor([2, 3]), torch.float8_e4m3fn
OPERANDS = {"lhs": torch.zeros(4, 5), "rhs": torch.zeros(5, 6), "group_sizes": SIZES}
BAD = {
    "rows": (dict(rhs=torch.zeros(7, 6)), ValueError, r"lhs is \(K, M=5\) but rhs is \(M=7, N\)"),
    "dtypes": (
        dict(rhs=torch.zeros(5, 6).half()),
        TypeError,
        "lhs is torch.float32 but rhs is torch.float16",
    ),
    "no out": (dict(accumulate=True), ValueError, "accumulate=True adds to an existing_out"),
    "out shape": (dict(existing_out=torch.ones(2, 4, 5)), ValueError, r"\(G, K, N\) = \(2, 4, 6\), but"),
    "out dtype": (
        dict(existing_out=torch.ones(2, 4, 6), preferred_element_type=torch.float16),
        TypeError,
        "existing_out is torch.float32 but preferred_element_type is torch.float16",
    ),
    "out of 8 bits": (
        dict(existing_out=torch.ones(2, 4, 6).to(E4M3)),
        ValueError,
        "floating .* but it is torch",
    ),
    "out expanded": (dict(existing_out=torch.ones(1, 4, 6).expand(2, 4, 6)), ValueError, "is expanded"),
    "bias_grad overlapping": (
        dict(bias_grad=torch.ones(9).as_strided((2, 4), (3, 1))),
        ValueError,
        "bias_grad has strides that overlap",
    ),
    "result dtype": (dict(preferred_element_type=torch.int32), TypeError, "must be a floating dtype"),
    "bias_grad dtype": (dict(bias_grad=torch.ones(2, 4).half()), TypeError, "must be torch.float32"),
    "bias_grad shape": (dict(bias_grad=torch.ones(2, 6)), ValueError, r"\(G, K\) = \(2, 4\), but it has"),
    "bias_grad of rhs": (
        dict(bias_grad=torch.ones(2, 4), bias_grad_from="rhs"),
        ValueError,
        r"\(G, N\) = \(2, 6\), but it has",
    ),
    "bias_grad of whom": (dict(bias_grad_from="bias"), ValueError, "must be 'lhs' or 'rhs', not 'bias'"),
    "float sizes": (dict(group_sizes=torch.ones(2)), TypeError, "group_sizes must be int32 or int64"),
    "config": (dict(config={"BLOCK_SIZE_M": 48}), ValueError, "BLOCK_SIZE_M must be a power of two"),
    "key": (dict(config={"BLOCK_M": 64}), ValueError, "has no 'BLOCK_M'; known: "),
    "device": (dict(bias_grad=torch.ones(2, 4, device="meta")), ValueError, "lhs is on cpu but bias_grad is"),
}


@every_variant
@pytest.mark.parametrize("change, kind, message", BAD.values(), ids=BAD)
@pytest.mark.no_interpreter
def test_bad_input_is_named_and_nothing_written(variant, change, kind, message):
    given = OPERANDS | {"bias_grad": torch.ones(2, 4), "existing_out": torch.ones(2, 4, 6)} | change
    if "accumulate" in change or message == "must be a floating dtype":
        given.pop("existing_out")
    with pytest.raises(kind, match=message):
        variant(**given)
    written = given["bias_grad"], given.get("existing_out", torch.ones(1))
    assert all((t.float() == 1).all() for t in written if not t.is_meta)


DOORS = {  # a call's first arguments and its result's shape, and the tensor that may come fourth
    gmm: ((torch.rand(5, 4), torch.rand(2, 4, 6), SIZES), "bias", lambda: torch.rand(2, 6)),
    ptgmm: ((torch.rand(4, 5), torch.rand(5, 6), SIZES), "bias_grad", lambda: torch.zeros(2, 4)),
    nptgmm: ((torch.rand(4, 5), torch.rand(5, 6), SIZES), "bias_grad", lambda: torch.zeros(2, 4)),
}
doors = pytest.mark.parametrize("fn", DOORS, ids=lambda fn: fn.__name__)


@doors
@pytest.mark.no_interpreter
def test_the_fourth_argument_by_position_is_a_dtype_or_a_tensor(fn):
    """AITER's order of 2025 and that of 2026."""
    first, name, make = DOORS[fn]
    expected = fn(*first)
    assert torch.equal(fn(*first, None), expected)
    by_dtype = fn(*first, torch.float64)
    assert by_dtype.dtype == torch.float64
    assert torch.equal(by_dtype, fn(*first, preferred_element_type=torch.float64))
    one, other = make(), make()
    other.copy_(one)
    with_both = fn(*first, one, preferred_element_type=torch.bfloat16)
    assert torch.equal(with_both, fn(*first, preferred_element_type=torch.bfloat16, **{name: other}))
    assert torch.equal(one, other) and with_both.dtype == torch.bfloat16
    # a dtype in the fourth place leaves the tensor to its keyword
    assert torch.equal(fn(*first, torch.bfloat16, **{name: other}), with_both)


@doors
def test_what_else_comes_by_position_is_refused_with_the_names(fn):
    first, name, make = DOORS[fn]
    names = ".*".join(f"{n}=" for n in fn.__kwdefaults__)
    with pytest.raises(TypeError, match=f"the fourth {name} or preferred.* but 5 were given: .*{names}"):
        fn(*first, torch.float32, None)
    with pytest.raises(TypeError, match=f"{fn.__name__} must be {name}, a tensor, .*, not bool: .*{names}"):
        fn(*first, True)
    with pytest.raises(TypeError, match=f"{name} is given twice"):
        fn(*first, make(), **{name: make()})
    with pytest.raises(TypeError, match="preferred_element_type is given twice"):
        fn(*first, torch.float32, preferred_element_type=torch.float32)


def test_mistakes_by_name():
    with pytest.raises(ValueError, match="grid_dim must be at least 1, not 0"):
        gmm(torch.zeros(5, 4), torch.zeros(2, 4, 6), SIZES, grid_dim=0)
    for out in (torch.zeros(5, 4), torch.zeros(5, 6).to(E4M3)):
        with pytest.raises(ValueError, match=r"existing_out must be floating \(M, N\) = \(5, 6\)"):
            gmm(torch.zeros(5, 4), torch.zeros(2, 4, 6), SIZES, existing_out=out)
