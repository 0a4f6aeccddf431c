"""gemm, its epilogue and its gradients, on every backend that can run here."""

import pytest
import torch

from moe_aiter import tuning
from moe_aiter.config import interpret
from moe_aiter.kernels import hopper
from moe_aiter.kernels.base.gemm_row import GemmInputs, splits_of
from moe_aiter.kernels.dense.gemm import ACTIVATIONS, gemm
from moe_aiter.op import IMPLS, ORDER, pick, use
from moe_aiter.tuning import choice, store
from moe_aiter.tuning.candidates import HOPPER_TILES, candidates

from ...check import assert_as_good_as_torch, error, with_gradients
from ...references import gemm_reference
from ...shapes import LAYOUTS, MATRICES, transposed

DTYPES = [torch.float32, torch.float16] if interpret else [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.no_host  # Hopper's kernel has tests of its own
NAMES = [None, *ACTIVATIONS]
CUDA = torch.device("cuda", 0)


def make(device, M=19, K=24, N=40, dtype=torch.float32, batch=()):
    """x (..., M, K), w (..., K, N), bias (N,) and c (M, N)."""
    x, w = torch.randn(*batch, M, K), torch.randn(*batch, K, N) / max(K, 1) ** 0.5
    return [t.to(device, dtype) for t in (x, w, torch.randn(N), torch.randn(M, N))]


def plain(x, w, bias=None, c=None, activation=None, alpha=1.0, beta=0.0, dtype=None):
    """The meaning, with torch's own broadcasting."""
    out = gemm_reference(x, w, bias, c, activation or "", alpha, beta, dtype)[0]
    return out


def compare(*inputs, gradients=True, floor=1e-7, **options):
    """gemm against `plain`: results and all gradients."""

    def ours(x, w, bias=None, c=None):
        return gemm(x, w, bias, c=c, **options)

    def theirs(x, w, bias=None, c=None):
        renamed = {"dtype" if k == "out_dtype" else k: v for k, v in options.items()}
        return plain(x, w, bias, c, **renamed)

    if gradients:
        ours, theirs = with_gradients(ours), with_gradients(theirs)
    # the gradient behind an activation is rounded before it is multiplied, as torch's own steps round it
    slack = 3.0 if gradients and options.get("activation") else 2.0
    assert_as_good_as_torch(ours, theirs, *inputs, floor=floor, slack=slack)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K, N", MATRICES.values(), ids=MATRICES)
@pytest.mark.parametrize("M", [1, 16, 50])
@pytest.mark.pairwise
def test_products(device, backend, dtype, M, K, N):
    x, w, bias, _ = make(device, M, K, N, dtype)
    compare(x, w)
    compare(x, transposed(w), bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", NAMES)
def test_epilogues(device, backend, dtype, activation):
    compare(*make(device, dtype=dtype), activation=activation, alpha=0.7, beta=-1.5)
    compare(*make(device, dtype=dtype)[:3], activation=activation)
    compare(*make(device, dtype=dtype)[:2], activation=activation, alpha=2.0)


@pytest.mark.parametrize("activation", NAMES)
def test_the_result_does_not_depend_on_whether_a_gradient_is_to_come(device, backend, activation):
    x, w, bias, _ = make(device)
    assert torch.equal(
        gemm(x, w, bias, activation=activation), gemm(x.requires_grad_(), w, bias, activation=activation)
    )


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(device, backend, layout):
    x, w, bias, c = make(device)
    few = 5e-7  # where all rows are one, few roundings average out
    compare(layout(x), w, bias, c, beta=1.0, floor=few)
    compare(x, layout(w), bias, layout(c), beta=1.0, floor=few)
    compare(x, w, torch.stack([bias, bias], 1)[:, 0], floor=few)


@pytest.mark.parametrize(
    "x, w",
    [
        ((2, 3, 19, 24), (24, 40)),
        ((24,), (24, 40)),
        ((3, 19, 24), (3, 24, 40)),
        ((19, 24), (3, 24, 40)),
        ((3, 19, 24), (1, 24, 40)),
        ((2, 1, 19, 24), (3, 24, 40)),
        ((0, 19, 24), (24, 40)),
        ((0, 19, 24), (0, 24, 40)),
        ((19, 24), (1, 1, 24, 40)),
    ],
    ids=str,
)
def test_leading_axes_are_broadcast(device, backend, x, w):
    x, w = torch.randn(x, device=device), torch.randn(w, device=device)
    got = gemm(x, w, activation="relu")
    assert got.shape == (x @ w).shape
    compare(x, w, gradients=x.numel() > 0)


@pytest.mark.parametrize("shape", [(), (1,), (40,), (19, 1), (1, 40), (3, 1, 1), (3, 19, 40)], ids=str)
def test_c_is_broadcast(device, backend, shape):
    x, w, bias, _ = make(device, batch=(3,))
    compare(x, w, bias, torch.randn(shape, device=device), beta=0.5)


@pytest.mark.parametrize("M, K, N", [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0)])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_empty_axes(device, backend, M, K, N, activation):
    x, w, bias, c = make(device, M, K, N)
    compare(x, w, bias, c, beta=2.0, activation=activation)
    if K == 0:
        assert torch.equal(gemm(x, w, bias), bias.expand(M, N))


def test_c_is_not_read_where_beta_is_0(device, backend):
    x, w, _, c = make(device)
    c.fill_(float("nan"))
    assert torch.equal(gemm(x, w, c=c, alpha=3.0), gemm(x, w, alpha=3.0)) and c.isnan().all()


def test_nothing_past_an_end_is_read(device, backend):
    """NaN beside the operands reaches nothing."""
    x, w, bias, c = make(device)
    around = [torch.nn.functional.pad(t, (3,) * 2 * t.dim(), value=float("nan")) for t in (x, w, bias, c)]
    inside = [t[(slice(3, -3),) * t.dim()] for t in around]
    torch.testing.assert_close(gemm(*inside[:3], c=inside[3], beta=1.0), gemm(x, w, bias, c=c, beta=1.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_sums_in_parts(device, backend, dtype, activation):
    """Few tiles share a long sum, the last part of it shorter."""
    x, w, bias, c = make(device, 5, 1100, 24, dtype)
    compare(x, w, bias, c, beta=0.5, activation=activation)
    compare(*make(device, 5, 1100, 24, dtype, batch=(2,))[:3], activation=activation)


def test_parts_cover_a_sum():
    for tiles in (1, 7, 64, 66, 67, 500):
        for K in (0, 1, 64, 1000, 65536):
            splits, part = splits_of(tiles, K, 64, 132)
            assert splits == 1 or (tiles <= 66 and part % 64 == 0 and (splits - 1) * part < K)
            assert splits * part >= K and part > 0 and splits * tiles <= max(132, tiles)
    assert splits_of(64, 4096, 64, 132)[0] == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_wider_result(device, backend, dtype):
    if interpret and dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts bfloat16 off instead of rounding it")
    inputs = make(device, dtype=dtype)
    compare(*inputs, out_dtype=torch.float32, beta=1.0, activation="gelu")
    got = gemm(*inputs[:3], out_dtype=torch.float32)
    assert got.dtype == torch.float32 and error(got, plain(*(t.double() for t in inputs[:3]))) < 1e-6


def test_a_bias_of_another_dtype(device, backend):
    x, w, bias, c = make(device, dtype=torch.float16)
    got = gemm(x, w, bias.float(), c=c.float(), beta=1.0)
    assert got.dtype == torch.float16
    exact = plain(x.double(), w.double(), bias.double(), c.double(), beta=1.0)
    assert error(got, exact) < 5e-4


@pytest.mark.parametrize("activation", NAMES)
def test_gradcheck(activation):
    torch.manual_seed(1)  # no pre-activation near 0, where relu has a corner
    x, w, bias, c = (t.double().requires_grad_() for t in make("cpu", 3, 4, 5))

    def run(*inputs):
        return gemm(*inputs[:3], activation=activation, alpha=0.7, beta=-1.3, c=inputs[3])

    torch.autograd.gradcheck(run, (x, w, bias, c))
    torch.autograd.gradgradcheck(run, (x, w, bias, c))


def test_a_frozen_operand_has_no_gradient(device):
    x, w, bias, _ = make(device)
    gemm(x.requires_grad_(), w, bias, activation="gelu").sum().backward()
    assert x.grad is not None and w.grad is None and bias.grad is None


def test_compiled_is_the_same():
    x, w, bias, _ = make("cpu")
    run = torch.compile(lambda x: gemm(x, w, bias, activation="gelu"), fullgraph=True, backend="aot_eager")
    assert torch.equal(run(x), gemm(x, w, bias, activation="gelu"))


@pytest.mark.no_interpreter
def test_autocast_is_a_cast(device):
    x, w, bias, _ = make(device)
    with torch.autocast(device.type, torch.bfloat16):
        lowered = gemm(x, w, bias)
    assert torch.equal(lowered, gemm(x.bfloat16(), w.bfloat16(), bias.bfloat16()))


@pytest.mark.parametrize(
    "change, kind, message",
    [
        ({"beta": 1.0}, ValueError, "beta is 1.0 but c is None"),
        (
            {"activation": "tanh"},
            ValueError,
            "activation must be None, relu, gelu, gelu_tanh, silu, not 'tanh'",
        ),
        ({"alpha": torch.ones(())}, TypeError, "alpha must be a number, not Tensor"),
        ({"w": torch.ones(23, 40)}, ValueError, r"x is \(..., K=24\) but w is \(..., K=23, N\)"),
        ({"w": torch.ones(24)}, ValueError, r"x must be \(..., M, K\) and w \(..., K, N\)"),
        (
            {"x": torch.ones(2, 19, 24), "w": torch.ones(3, 24, 40)},
            ValueError,
            "leading axes of x and w do not fit",
        ),
        ({"w": torch.ones(24, 40).double()}, TypeError, "x is torch.float32 but w is torch.float64"),
        ({"bias": torch.ones(39)}, ValueError, r"bias must be floating \(40,\)"),
        ({"bias": torch.ones(40).int()}, ValueError, "but it is torch.int32"),
        ({"c": torch.ones(20, 40), "beta": 1.0}, ValueError, r"c is \(20, 40\) but the result is \(19, 40\)"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype must be a floating dtype, not torch.int32"),
        ({"x": 1.0}, TypeError, "x must be a tensor, not float"),
        ({"bias": torch.ones(40, device="meta")}, ValueError, "x is on cpu but bias is on meta"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
@pytest.mark.no_interpreter
def test_refusals(change, kind, message):
    x, w, bias, _ = make("cpu")
    with pytest.raises(kind, match=message):
        gemm(**({"x": x, "w": w, "bias": bias} | change))


@pytest.mark.parametrize("backend", ["hopper", "triton", "torch"])
def test_what_the_table_names_is_picked(backend, monkeypatch):
    """The portable kernel, the one of Hopper, or torch; and torch where nothing was measured."""
    x, w, *_ = make("cpu", 1, 64, 64, torch.bfloat16, (1,))
    row = store.Row(choice.ChoiceKey("gemm", 16, "nt", None, 1, 64, 64), backend, {})
    monkeypatch.setattr(choice, "find_row", store.find_row.__wrapped__)
    monkeypatch.setattr(store, "load", lambda table, name: (row,))
    monkeypatch.setitem(ORDER, "cpu", ("hopper", "triton", "torch"))
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    impls, rest = IMPLS["gemm"], (None, None, "", 1.0, 0.0, None, False)
    monkeypatch.setattr(impls["triton"], "takes", (torch.bfloat16,))  # the interpreter's lacks it
    assert pick("gemm", GemmInputs(x, w.mT, *rest)) is impls[backend]
    assert pick("gemm", GemmInputs(x, w, *rest)) is impls["torch"], "another layout"
    wider = None, None, "", 1.0, 0.0, torch.float32, False
    assert pick("gemm", GemmInputs(x, w.mT, *wider)) is impls["triton"], "whatever the table says"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize(
    "M, K, N, batch",
    [
        *((1, 64, 8, ()), (300, 328, 520, ()), (1000, 512, 264, ()), (130, 320, 136, (3,))),
        *((16, 4096, 4096, ()), (3, 8192, 136, (5,)), (9, 8, 2200, ())),  # few rows, with sums that are split
    ],
)
@pytest.mark.pairwise
def test_on_hopper(M, K, N, batch, rows, activation, dtype):
    if not hopper.is_hopper(CUDA):
        pytest.skip("no Hopper GPU")
    x, w, bias, c = make(CUDA, M, K, N, dtype, batch)
    w = transposed(w) if rows else w
    with use("hopper"):
        compare(x, w, gradients=False, activation=activation)
        compare(x, w, bias, c, gradients=False, activation=activation, alpha=0.5, beta=2.0)
        out = gemm(x.requires_grad_(), w, bias, activation=activation)
        assert torch.equal(out, gemm(x.detach(), w, bias, activation=activation))


@pytest.mark.gpu
@pytest.mark.parametrize("op", [op for op in HOPPER_TILES if op.startswith("hopper_gemm")])
def test_every_tile_on_hopper(op):
    """Of which every program has several, and an uneven number."""
    if not hopper.is_hopper(CUDA):
        pytest.skip("no Hopper GPU")
    x, w, bias, c = make(CUDA, 3000, 328, 3208, torch.bfloat16)
    inputs, options = (x, transposed(w), bias), {"activation": None if op == "hopper_gemm" else "gelu"}
    if op == "hopper_gemm_full":
        inputs, options = (*inputs, c), options | {"beta": 2.0}
    for tile in candidates(op):
        with use("hopper"), tuning.choose(lambda key, tile=tile: tile if key.op == op else None):
            compare(*inputs, gradients=False, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["hopper", "triton", "torch"])
def test_more_than_2_to_the_31_weights(most_of_the_gpu, name):
    """As the first layer behind an image has them: offsets are 64-bit."""
    if name == "hopper" and not hopper.is_hopper(CUDA):
        pytest.skip("no Hopper GPU")
    N, K = 3000, 750_000
    weight = torch.zeros(N, K, device=CUDA, dtype=torch.bfloat16)
    weight[-1, -8:] = 1
    x = torch.ones(2, K, device=CUDA, dtype=torch.bfloat16)
    with use(name):
        out = gemm(x, weight.mT)
    assert out[:, -1].eq(8).all() and not out[:, :-1].any()


@pytest.mark.gpu
def test_runs_and_a_graph_are_the_same_to_the_bit(no_debug):
    x, w, bias, _ = make(CUDA, 16, 8192, 1024, torch.bfloat16)
    with use("triton"):
        first = gemm(x, w, bias, activation="silu")
        assert all(torch.equal(gemm(x, w, bias, activation="silu"), first) for _ in range(5))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = gemm(x, w, bias, activation="silu")
        graph.replay()
        assert torch.equal(out, first)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_axes_of_one_number_in_torch(dtype):
    """The stride of such an axis can be any number, which cuBLAS may refuse."""
    for M, K, N in [(2, 1, 54), (1, 54, 2), (1, 2, 54), (54, 2, 1), (1, 1, 54), (1, 1, 1)]:
        x, w = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype)
        for by_rows in (x.cuda(), x.T.contiguous().cuda().T):
            for by_columns in (w.cuda(), w.T.contiguous().cuda().T):
                with use("torch"):
                    found = gemm(by_rows, by_columns), gemm(by_rows, by_columns, by_columns[0])
                for got, want in zip(found, (x @ w, x @ w + w[0]), strict=True):
                    torch.testing.assert_close(got.cpu(), want, rtol=2e-2, atol=1e-2)
