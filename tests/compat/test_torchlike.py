"""AITER's names for what torch has as well: torch's results, under AITER's configuration, and its modules."""

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F

from moe_aiter.compat import aiter
from moe_aiter.compat.aiter import KERNELS
from moe_aiter.compat.aiter.tuned_gemm import gemm_a16w16
from moe_aiter.switches import switches

from ..check import assert_as_good_as_torch, error, with_gradients

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def restored():
    before, kernels = dataclasses.asdict(switches), dict(KERNELS)
    yield
    for name, value in before.items():
        setattr(switches, name, value)
    KERNELS.clear()
    KERNELS.update(kernels)


CONVOLUTIONS = [
    ((2, 3, 9, 11), (4, 3, 3, 3), {"padding": 1}),
    ((2, 4, 9, 11), (6, 2, 3, 2), {"stride": (2, 1), "padding": (1, 0), "groups": 2}),
    ((2, 3, 9, 11), (4, 3, 3, 3), {"dilation": (2, 3), "padding": "same"}),
    ((3, 9, 11), (4, 3, 1, 1), {"padding": "valid"}),
    ((0, 3, 9, 11), (4, 3, 3, 3), {}),
]


@pytest.mark.parametrize("shape, weight, options", CONVOLUTIONS)
@pytest.mark.parametrize("dtype", [F16, BF16, F32, torch.float64])
@pytest.mark.parametrize("fn", [aiter.conv2d, aiter.dynamic_conv2d])
@pytest.mark.pairwise
def test_conv2d_is_torchs(shape, weight, options, dtype, fn, device):
    x, w, bias = (torch.randn(s, device=device).to(dtype) for s in (shape, weight, weight[:1]))
    for b in (bias, None):
        assert torch.equal(fn(x, w, b, **options), F.conv2d(x, w, b, **options))
    ours = with_gradients(lambda *inputs: fn(*inputs, **options))
    theirs = with_gradients(lambda *inputs: F.conv2d(*inputs, **options))
    assert_as_good_as_torch(ours, theirs, x, w, bias, floor=1e-6)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"input": torch.zeros(3, 8)}, ValueError, r"input must be \(N, C, H, W\)"),
        ({"input": [1]}, TypeError, "input must be a tensor, not list"),
        ({"weight": torch.zeros(4, 3, 3)}, ValueError, r"weight must be \(O, C / groups, kH, kW\)"),
        ({"weight": torch.zeros(4, 2, 3, 3)}, ValueError, r"C=3, H, W\) but weight is \(O, C / groups=2"),
        ({"groups": 0}, ValueError, "groups must be at least 1, not 0"),
        ({"weight": torch.zeros(4, 1, 3, 3), "groups": 3}, ValueError, "which groups=3 does not divide"),
        ({"bias": torch.zeros(3)}, ValueError, r"bias is \(O=3,\) but weight is \(O=4"),
        ({"weight": torch.zeros(4, 3, 3, 3).half()}, TypeError, "input is torch.float32 but weight is"),
        ({"bias": torch.zeros(4, device="meta")}, ValueError, "input is on cpu but bias is on meta"),
    ],
)
def test_a_convolution_that_does_not_fit_is_refused(change, error, message):
    given = {"input": torch.zeros(1, 3, 8, 8), "weight": torch.zeros(4, 3, 3, 3)} | change
    for fn in (aiter.conv2d, aiter.dynamic_conv2d):
        with pytest.raises(error, match=message):
            fn(**given)


def test_dynamic_shapes_search_no_kernels(monkeypatch, device):
    seen = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(torch.backends.cudnn.benchmark)
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            seen.append(torch.backends.cudnn.benchmark)
            return dx

    convolve = F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda x, *rest: convolve(Watched.apply(x), *rest))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    x = torch.randn(2, 3, 8, 8, device=device, requires_grad=True)
    w = torch.randn(4, 3, 3, 3, device=device, requires_grad=True)
    for on in (True, False):
        seen.clear()
        aiter.enable_dynamic_shapes(on)
        aiter.dynamic_conv2d(x, w, padding=1).sum().backward()
        assert seen == [not on] * 2 and torch.backends.cudnn.benchmark is True
    expected = torch.autograd.grad(convolve(x, w, padding=1).sum(), (x, w))
    torch.testing.assert_close((x.grad / 2, w.grad / 2), expected)


OPERATIONS = {
    "matmul": ((6, 33), (33, 5)),
    "gemm_bias": ((6, 33), (5, 33), (5,)),
    "gemm_gelu": ((6, 33), (5, 33), (5,)),
    "gemm_relu": ((6, 33), (5, 33), (5,)),
    "batched_gemm": ((3, 6, 33), (3, 33, 5)),
    "cutlass_gemm": ((6, 33), (33, 5)),
    "sparse_gemm": ((6, 33), (5, 33)),
    "linear": ((6, 33), (5, 33), (5,)),
    "conv2d": ((2, 3, 9, 9), (4, 3, 3, 3), (4,)),
    "attention": ((2, 4, 6, 8), (2, 2, 7, 8), (2, 2, 7, 8)),
}


def inputs_of(name, device):
    return [torch.randn(shape, device=device) for shape in OPERATIONS[name]]


def plain(name):
    """torch's own in float64, to hold against."""
    attention = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)  # noqa: E731
    return {
        "conv2d": F.conv2d,
        "attention": attention,
        "matmul": torch.matmul,
        "batched_gemm": torch.bmm,
        "cutlass_gemm": torch.mm,
        "gemm_gelu": lambda *inputs: F.gelu(F.linear(*inputs)),
        "gemm_relu": lambda *inputs: F.relu(F.linear(*inputs)),
    }.get(name, F.linear)


def ours(name):
    if name == "sparse_gemm":
        return functools.partial(aiter.sparse_gemm, sparsity_pattern="csr")
    return getattr(aiter, name)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("precision, dtype", [("FP16", F16), ("BF16", BF16)])
def test_float32_in_16_bits_is_as_inexact_as_they_are(name, precision, dtype, device):
    fn, inputs = ours(name), inputs_of(name, device)
    exact = with_gradients(plain(name))(*(t.double() for t in inputs))
    aiter.set_default_precision("FP32")
    strict = fn(*inputs)
    aiter.set_default_precision(precision)
    got = with_gradients(fn)(*inputs)
    low = with_gradients(plain(name))(*(t.to(dtype) for t in inputs))
    for mine, theirs, truth in zip(got, low, exact, strict=True):
        assert mine.dtype == F32
        assert error(mine, truth) <= 2 * error(theirs, truth) + 1e-6
    assert error(got[0], exact[0]) > 10 * error(strict, exact[0])


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("precision, most", [("TF32", 3e-3), ("FP32", 2e-6)])
def test_float32_by_torchs_switches(name, precision, most, device):
    fn, inputs = ours(name), inputs_of(name, device)
    exact = with_gradients(plain(name))(*(t.double() for t in inputs))
    aiter.set_default_precision(precision)
    for mine, truth in zip(with_gradients(fn)(*inputs), exact, strict=True):
        assert mine.dtype == F32 and error(mine, truth) < most


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_without_tensor_cores_a_result_is_that_of_float32_rounded(name, dtype, device):
    fn, inputs = ours(name), [t.to(dtype) for t in inputs_of(name, device)]
    exact = with_gradients(plain(name))(*(t.double() for t in inputs))
    aiter.enable_tensor_cores(False)
    for mine, truth in zip(with_gradients(fn)(*inputs), exact, strict=True):
        assert mine.dtype == dtype and error(mine, truth) <= 1.1 * error(truth.to(dtype), truth) + 2e-6


@pytest.mark.parametrize("dtype, switch", [(BF16, "tensor cores"), (F32, "FP16"), (F32, "TF32")])
def test_a_shuffled_weight_is_multiplied_in_another_dtype_as_well(dtype, switch, device):
    x, w = (torch.randn(n, 64, device=device).to(dtype) for n in (5, 32))
    if switch == "tensor cores":
        aiter.enable_tensor_cores(False)
    else:
        aiter.set_default_precision(switch)
    exact, shuffled = x.double() @ w.double().T, aiter.shuffle_weight(w)
    assert error(gemm_a16w16(x, shuffled), exact) < 1e-2
    assert error(gemm_a16w16(x, shuffled.clone(), is_shuffled=True), exact) < 1e-2
    assert error(gemm_a16w16(x, w), exact) < 1e-2


# modules


def test_conv_module_is_the_guides(device):
    conv = aiter.AITERConv2d(3, 64, 3, stride=2, padding=1).to(device)
    assert isinstance(conv, torch.nn.Conv2d) and not conv.bias.any() and conv.weight.shape == (64, 3, 3, 3)
    assert abs(conv.weight.std().item() - 1) < 0.1
    x = torch.randn(2, 3, 9, 9, device=device)
    assert torch.equal(conv(x), F.conv2d(x, conv.weight, conv.bias, stride=2, padding=1))
    assert dict(conv.state_dict()).keys() == {"weight", "bias"}
    other = aiter.AITERConv2d(4, 8, (1, 3), dilation=2, groups=2, bias=False, dtype=BF16, device=device)
    assert other.bias is None and other.weight.shape == (8, 2, 1, 3) and other.weight.dtype == BF16
    assert other(torch.randn(1, 4, 9, 9, device=device).bfloat16()).shape == (1, 8, 9, 5)


def test_linear_module_is_the_guides(device):
    linear = aiter.AITERLinear(256, 100).to(device)
    assert isinstance(linear, torch.nn.Linear) and not linear.bias.any()
    assert abs(linear.weight.std().item() - 1) < 0.1
    x = torch.randn(2, 5, 256, device=device)
    assert_as_good_as_torch(linear.forward, lambda x: F.linear(x, linear.weight.to(x.dtype)), x)
    assert aiter.AITERLinear(4, 3, bias=False).bias is None


def test_a_weight_of_more_than_2_to_the_31_elements_needs_no_memory_until_it_is_real():
    linear = aiter.AITERLinear(64 * 224 * 224, 1000, device="meta")
    assert linear.weight.numel() == 3_211_264_000
    assert linear(torch.empty(32, 64 * 224 * 224, device="meta")).shape == (32, 1000)


@pytest.mark.gpu
def test_a_weight_of_more_than_2_to_the_31_elements(most_of_the_gpu):
    features, rows = 64 * 224 * 224, 700  # 2.25e9 elements, in bfloat16 4.2 GiB
    linear = aiter.AITERLinear(features, rows, device="cuda", dtype=BF16)
    x = torch.randn(3, features, device="cuda", dtype=BF16)
    with torch.no_grad():
        linear.weight[:, -1] = 0
        linear.weight[-1] = 0
        linear.weight[-1, -1] = 2
    out = linear(x)
    torch.testing.assert_close(out[:, -1], 2 * x[:, -1])
    best = (x[:, None].double() * linear.weight[-3:-1].double()).sum(2)
    torch.testing.assert_close(out[:, -3:-1].double(), best, rtol=1e-2, atol=1e-2 * features**0.5)


@pytest.mark.parametrize("mask", [None, 2, 4])
def test_attention_module_is_the_guides(mask, device):
    layer = aiter.AITERAttention(32, 4, dropout_prob=0.5).to(device)
    assert {name for name, _ in layer.named_children()} == {"query", "key", "value", "output", "dropout"}
    assert layer.head_size == 8 and layer.hidden_size == 32
    x = torch.randn(2, 6, 32, device=device)
    keep = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], device=device)
    given = {None: None, 2: keep, 4: torch.where(keep == 1, 0.0, -1e9)[:, None, None]}[mask]
    q, k, v = (p(x).view(2, 6, 4, 8).transpose(1, 2) for p in (layer.query, layer.key, layer.value))
    shown = None if mask is None else (keep == 1)[:, None, None]
    best = layer.output(F.scaled_dot_product_attention(q, k, v, shown).transpose(1, 2).reshape(2, 6, 32))
    torch.testing.assert_close(layer.eval()(x, given), best)
    dropped = layer.train()(x, given)
    zero = dropped == 0  # after the projection: elements of the result, not probabilities
    assert 0.2 < zero.float().mean() < 0.8
    torch.testing.assert_close(dropped[~zero], 2 * best[~zero])


def test_heads_must_divide_the_attention_modules_width():
    for heads in (3, 0):
        with pytest.raises(ValueError, match=f"hidden_size is 32, which num_heads={heads} does not divide"):
            aiter.AITERAttention(32, heads)


def test_modules_compile_into_one_graph_and_train(device):
    model = torch.nn.Sequential(aiter.AITERAttention(16, 2), aiter.AITERLinear(16, 4)).to(device)
    x = torch.randn(2, 5, 16, device=device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    compiled(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# what a program registers


def test_a_registered_kernel_is_the_function_itself():
    @aiter.register_kernel
    def cube(x):
        return x**3

    @aiter.register_kernel(name="twice")
    def double(x):
        return 2 * x

    assert aiter.get_kernel("cube") is cube and aiter.get_kernel("twice") is double
    assert aiter.list_kernels() == ["cube", "twice"]
    x = torch.tensor(2.0, requires_grad=True)
    cube(x).backward()
    assert x.grad == 12

    @aiter.register_kernel(name="cube")
    def again(x):
        return x * x * x

    assert aiter.get_kernel("cube") is again and aiter.list_kernels() == ["cube", "twice"]


def test_what_is_no_kernel_is_refused():
    with pytest.raises(TypeError, match="a kernel is a function, not int"):
        aiter.register_kernel(3)
    with pytest.raises(TypeError, match="name must be a str, not int"):
        aiter.register_kernel(name=3)(abs)
    with pytest.raises(ValueError, match="has no name"):
        aiter.register_kernel(torch.nn.ReLU())
    with pytest.raises(ValueError, match="unknown kernel 'square'; known: none"):
        aiter.get_kernel("square")


def test_gelu_and_version(device):
    x = torch.randn(3, 5, device=device)
    assert torch.equal(aiter.gelu(x), F.gelu(x))
    assert torch.equal(aiter.gelu(x, approximate="tanh"), F.gelu(x, approximate="tanh"))
    assert [int(part) for part in aiter.__version__.split(".")[:2]] >= [0, 1]
