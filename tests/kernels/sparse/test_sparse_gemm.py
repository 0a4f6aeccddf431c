"""sparse_gemm: every layout of torch's against the dense product, in any pattern."""

import pytest
import torch
import torch.nn.functional as F

from moe_aiter import SparsePattern, sparse_gemm
from moe_aiter.derived import CACHE, forget
from moe_aiter.kernels.sparse import gemm as file

from ...check import assert_output_as_good

N, K, BLOCK = 64, 96, (16, 8)
KINDS = ["csr", "coo", "block"]


def twice(w):
    """A COO tensor with every entry in two parts, out of order."""
    where, values = w.nonzero().T, w[w != 0]
    order = torch.randperm(2 * len(values), device=w.device)
    indices = torch.cat([where, where], 1)[:, order]
    return torch.sparse_coo_tensor(indices, torch.cat([0.25 * values, 0.75 * values])[order], w.shape)


def shuffled(w):
    """A CSR tensor whose rows are not in order, with int32 indices."""
    start = w.ne(0).sum(1).cumsum(0)
    rows = [row.nonzero().flatten()[torch.randperm(int(row.ne(0).sum()))] for row in w.cpu()]
    col = torch.cat(rows).to(w.device)
    row = torch.repeat_interleave(torch.arange(len(w), device=w.device), w.ne(0).sum(1))
    start = F.pad(start, (1, 0)).int()
    return torch.sparse_csr_tensor(start, col.int(), w[row, col], w.shape)


LAYOUTS = {
    "dense": torch.clone,
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
    "coo": torch.Tensor.to_sparse_coo,
    "bsr": lambda w: w.to_sparse_bsr(BLOCK),
    "bsc": lambda w: w.to_sparse_bsc(BLOCK),
    "coo, repeated": twice,
    "csr, not in order": shuffled,
}


def matrix(device="cpu", dtype=torch.float32):
    """Half of its blocks, and one row of them that is empty."""
    mask = torch.rand(N // BLOCK[0], K // BLOCK[1]) < 0.5
    mask[1] = False
    mask = mask.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    return torch.where(mask, torch.randn(N, K), 0.0).to(device, dtype)


def gradients(out, *leaves):
    return torch.autograd.grad(
        out, leaves, torch.arange(out.numel(), device=out.device).cos().to(out).view_as(out)
    )


@pytest.mark.parametrize("transpose_weight", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, None])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.pairwise
def test_any_layout_in_any_pattern(device, layout, kind, transpose_weight):
    """The second time with what was kept from the first; gradients in the weight's layout and places."""
    if (layout, kind) == ("dense", None):
        pytest.skip("a dense weight says nothing of its pattern")
    dense = matrix(device)
    weight = LAYOUTS[layout](dense).detach().requires_grad_()
    x = torch.randn(2, 3, K if transpose_weight else N, device=device, requires_grad=True)
    bias = torch.randn(N if transpose_weight else K, device=device, requires_grad=True)
    exact = [t.detach().double().requires_grad_() for t in (x, dense, bias)]
    plain = [t.detach().requires_grad_() for t in (x, dense, bias)]
    results = []
    for x_, w_, bias_ in (exact, plain):
        out = F.linear(x_, w_ if transpose_weight else w_.T, bias_)
        results.append([out, *gradients(out, x_, w_, bias_)])
    for _ in range(2):
        out = sparse_gemm(x, weight, kind, bias=bias, transpose_weight=transpose_weight)
        dx, dweight, dbias = gradients(out, x, weight, bias)
        assert dweight.layout == weight.layout and dweight.shape == weight.shape
        dense_dweight = dweight.to_dense()
        there = dense_dweight != 0
        assert there[dense != 0].all()
        found = [out, dx, dense_dweight, dbias]
        for i, (ours, truth, theirs) in enumerate(zip(found, *results, strict=True)):
            keep = there if i == 2 else torch.ones_like(ours, dtype=torch.bool)
            ours, theirs, truth = ours[keep], theirs[keep], truth[keep]
            assert_output_as_good(f"result {i}", ours, theirs, truth, floor=5e-7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_where_the_weight_is(layout):
    dense = matrix()
    weight = LAYOUTS[layout](dense).detach().requires_grad_()
    (dweight,) = gradients(sparse_gemm(torch.randn(5, K), weight, "csr"), weight)
    assert torch.equal(dweight.to_dense() != 0, dense != 0)


@pytest.mark.parametrize("blocksize", [16, (32, 8), 7, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_any_size(device, layout, blocksize):
    dense = matrix(device)
    x = torch.randn(5, K, device=device)
    out = sparse_gemm(x, LAYOUTS[layout](dense), "block", blocksize=blocksize)
    torch.testing.assert_close(out, x @ dense.T, atol=1e-4, rtol=1e-4)


def test_values_with_a_pattern(device):
    """Both ways, and with gradients, without anything that has to be computed again."""
    dense = matrix(device)
    pattern = SparsePattern.from_dense(dense, BLOCK)
    values = pattern.take(dense).requires_grad_()
    for transpose_weight in (True, False):
        x = torch.randn(4, K if transpose_weight else N, device=device)
        out = sparse_gemm(x, values, pattern, transpose_weight=transpose_weight)
        torch.testing.assert_close(out, x @ (dense.T if transpose_weight else dense), atol=1e-4, rtol=1e-4)
        (dvalues,) = gradients(out, values)
        assert dvalues.shape == values.shape


def test_one_vector(device):
    dense = matrix(device)
    x = torch.randn(K, device=device)
    torch.testing.assert_close(sparse_gemm(x, dense, "csr"), dense @ x, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_of_zeros(device, kind):
    weight, x = torch.zeros(N, K, device=device), torch.randn(4, K, device=device)
    bias = torch.randn(N, device=device)
    assert torch.equal(sparse_gemm(x, weight, kind, bias=bias), bias.expand(4, N))
    assert not sparse_gemm(x, weight.to_sparse_coo(), kind).any()


@pytest.fixture
def counted(monkeypatch):
    """How often a pattern was read."""
    forget()
    calls = []
    for name in ("lists_of", "pattern_of_compressed", "regroup", "coalesce"):
        function = getattr(file, name)
        monkeypatch.setattr(file, name, lambda *a, f=function, n=name: calls.append(n) or f(*a))
    return calls


def around_the_same_indices(w, values):
    if w.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(w._indices(), values, w.shape, is_coalesced=w.is_coalesced())
    start = w.ccol_indices() if w.layout in file.COLUMNS else w.crow_indices()
    other = w.row_indices() if w.layout in file.COLUMNS else w.col_indices()
    return torch.sparse_compressed_tensor(start, other, values, w.shape, layout=w.layout)


@pytest.mark.no_interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "dense"])
def test_patterns_are_read_once(layout, kind, counted):
    """Also where an optimizer has made a step, and other values have the same indices."""
    weight, x = LAYOUTS[layout](matrix()), torch.randn(4, K)
    sparse_gemm(x, weight, kind)
    first = list(counted)
    assert first
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    torch.optim.SGD([parameter], lr=0.1).step()
    values = weight._values() if weight.layout == torch.sparse_coo else weight.values()
    other = around_the_same_indices(weight, torch.randn_like(values))
    out = sparse_gemm(x, other, kind)
    assert counted == first
    torch.testing.assert_close(out, x @ other.to_dense().T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("block", [BLOCK, (1, 1)])
def test_a_weight_of_a_pattern_is_read_once(block, counted):
    """Built in each step, with other values, around what the pattern keeps."""
    pattern = SparsePattern.from_dense(matrix(), block)
    for _ in range(3):
        values = torch.randn_like(pattern.take(matrix()), requires_grad=True)
        x = torch.randn(4, K)
        out = sparse_gemm(x, pattern.to_sparse(values))
        torch.testing.assert_close(out, x @ pattern.to_dense(values).T, atol=1e-4, rtol=1e-4)
        assert gradients(out, values)[0].shape == values.shape
        assert counted == ["pattern_of_compressed"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_write_in_place_is_noticed(layout):
    weight, x = LAYOUTS[layout](matrix()), torch.randn(4, K)
    for _ in range(2):
        out = sparse_gemm(x, weight, "csr")
        torch.testing.assert_close(out, x @ weight.to_dense().T, atol=1e-4, rtol=1e-4)
        dense, coo = weight.layout == torch.strided, weight.layout == torch.sparse_coo
        (weight if dense else weight._values() if coo else weight.values()).normal_()


def test_weights_that_share_an_index_are_told_apart():
    """Two with the columns of one, in other rows."""
    forget()
    x, values = torch.randn(4, 3), torch.randn(3)
    col = torch.tensor([0, 1, 2])
    for start in (torch.tensor([0, 3, 3]), torch.tensor([0, 1, 3])):
        weight = torch.sparse_csr_tensor(start, col, values, (2, 3))
        torch.testing.assert_close(sparse_gemm(x, weight), x @ weight.to_dense().T)
    weight = torch.sparse_csr_tensor(start, col, values, (2, 3))
    weight.crow_indices()[1] = 2
    torch.testing.assert_close(sparse_gemm(x, weight), x @ weight.to_dense().T)


def test_nothing_outlives_the_weight():
    forget()
    weight = matrix().to_sparse_csr()
    sparse_gemm(torch.randn(4, K), weight)
    assert CACHE.entries
    del weight
    assert not CACHE.entries


@pytest.mark.gpu
def test_a_step_with_a_weight_of_a_pattern_does_not_wait(no_debug):
    dense = matrix("cuda", torch.bfloat16)
    pattern = SparsePattern.from_dense(dense, BLOCK)
    values = pattern.take(dense).requires_grad_()
    x = torch.randn(32, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            gradients(sparse_gemm(x, pattern.to_sparse(values)), x, values)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_warm_call_does_not_wait(layout, no_debug):
    weight = LAYOUTS[layout](matrix("cuda", torch.bfloat16)).detach().requires_grad_(layout != "dense")
    x = torch.randn(32, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            out = sparse_gemm(x, weight, "block" if layout in ("bsr", "bsc", "dense") else "csr")
            gradients(out, *([x, weight] if weight.requires_grad else [x]))
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_compiled():
    """Values with a pattern, in one graph."""
    pattern = SparsePattern.from_dense(matrix(), BLOCK)
    values, x = pattern.take(matrix()).requires_grad_(), torch.randn(4, K, requires_grad=True)

    def run(x, values):
        out = sparse_gemm(x, values, pattern)
        return out, *gradients(out, x, values)

    compiled = torch.compile(lambda x, v: sparse_gemm(x, v, pattern), fullgraph=True, backend="aot_eager")
    out = compiled(x, values)
    for ours, theirs in zip((out, *gradients(out, x, values)), run(x, values), strict=True):
        torch.testing.assert_close(ours, theirs)


X, W = torch.ones(4, 8), torch.eye(8)
DOUBLED = torch.sparse_csr_tensor([0, 2], [1, 1], [1.0, 2], (1, 8), check_invariants=False)
PATTERN = SparsePattern.from_mask(torch.eye(2), 4)


@pytest.mark.parametrize(
    "error, words, arguments, named",
    [
        (ValueError, "unknown sparsity_pattern 'bsr'; known: csr, coo, block", (X, W, "bsr"), {}),
        (ValueError, "sparsity_pattern must be csr, coo, block", (X, W), {}),
        (ValueError, r"input is \(..., K=8\) but weight is \(N, K=7\)", (X, torch.ones(8, 7), "csr"), {}),
        (ValueError, r"weight is \(K=7, N\)", (X, torch.ones(7, 8), "csr"), {"transpose_weight": False}),
        (ValueError, "weight must be", (X, torch.ones(2, 8, 8), "csr"), {}),
        (ValueError, "must not be hybrid", (X, torch.ones(8, 8, 2).to_sparse(2), "coo"), {}),
        (ValueError, "input must be dense", (X.to_sparse(), W, "csr"), {}),
        (ValueError, "blocksize is for", (X, W, "csr"), {"blocksize": 4}),
        (ValueError, "blocksize must be at least 1", (X, W, "block"), {"blocksize": 0}),
        (ValueError, "blocksize is part of", (X, torch.ones(2, 4, 4), PATTERN), {"blocksize": 4}),
        (ValueError, r"weight is \(2, 4, 5\)", (X, torch.ones(2, 4, 5), PATTERN), {}),
        (ValueError, r"bias is \(3,\)", (X, W, "csr"), {"bias": torch.ones(3)}),
        (ValueError, "two entries in one place", (X, DOUBLED), {}),
        (TypeError, "input is torch.float32 but weight is torch.float64", (X, W.double(), "csr"), {}),
        (TypeError, "input must be a tensor", ([1.0], W, "csr"), {}),
        (TypeError, "weight must be a tensor", (X, 1.0, "csr"), {}),
    ],
)  # fmt: skip
@pytest.mark.no_interpreter
def test_bad_input(error, words, arguments, named):
    with pytest.raises(error, match=words):
        sparse_gemm(*arguments, **named)
