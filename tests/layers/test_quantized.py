"""quantize(model, dtype): what is converted and what is not, how far off it is, and what a copy can do."""

import copy
import io

import pytest
import torch
from torch import nn

from moe_aiter import Experts, LoRALinear, MoE, OptimizedMoELayer, make_plan, quantize
from moe_aiter.compat import aiter
from moe_aiter.layers.quantized import QuantizedExperts, QuantizedLinear, QuantizedMoELayer

from ..check import error

DTYPES = ["int8", "fp8", "fp16", "bf16"]
FAR = {"int8": 0.015, "fp8": 0.05, "fp16": 1e-3, "bf16": 1e-2}  # of one layer, relative, for normal numbers
WEIGHTS = dict(zip(DTYPES, [torch.int8, torch.float8_e4m3fn, torch.float16, torch.bfloat16], strict=True))

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
of_8_bits = pytest.mark.parametrize("dtype", DTYPES[:2])


def mlp(device="cpu", bias=True):
    return nn.Sequential(nn.Linear(64, 96, bias=bias), nn.ReLU(), nn.Linear(96, 32, bias=bias)).to(device)


def moe(device, **options):
    return MoE(64, 48, 8, 2, device=device, **options)


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@every_dtype
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.pairwise
def test_a_linear_layer(device, dtype, bias, of_x):
    layer = nn.Linear(64, 96, bias=bias, device=device)
    before, x = copy.deepcopy(layer), torch.randn(3, 50, 64, device=device).to(of_x)
    quantized = quantize(layer, dtype)
    assert type(layer) is nn.Linear and same(layer, before) and layer.weight.requires_grad
    assert type(quantized) is QuantizedLinear and quantized.weight.dtype == WEIGHTS[dtype]
    y = quantized(x)
    assert y.dtype == of_x and y.shape == (3, 50, 96) and not y.requires_grad
    assert error(y, layer.double()(x.double())) < FAR[dtype] + 2 * torch.finfo(of_x).eps
    assert torch.equal(quantized(x[0, 0]), quantized(x[0, :1])[0])
    assert quantized(x[:, :0]).shape == (3, 0, 96)


@of_8_bits
def test_its_numbers_are_those_of_the_formula(device, dtype):
    layer = nn.Linear(40, 24, device=device)
    quantized, x = quantize(layer, dtype), torch.randn(7, 40, device=device)
    most = 127 if dtype == "int8" else 448
    torch.testing.assert_close(quantized.scale, (layer.weight.abs().amax(1) / most).detach())
    assert (quantized.weight.float().abs().amax(1) == most).all()
    x_scale = x.abs().amax(1, keepdim=True) / most
    x8 = (x / x_scale).round() if dtype == "int8" else (x / x_scale).to(torch.float8_e4m3fn)
    y = (x8.double() @ quantized.weight.double().T) * x_scale * quantized.scale + layer.bias
    torch.testing.assert_close(quantized(x), y.float(), rtol=1e-4, atol=2e-3)


@of_8_bits
def test_rows_of_zeros_and_what_is_not_a_number(device, dtype):
    layer = nn.Linear(32, 16, device=device)
    with torch.no_grad():
        layer.weight[3], layer.weight[5] = 0, 1e-42
    x = torch.randn(6, 32, device=device)
    x[1], x[2, 3], x[4, 5] = 0, float("nan"), float("inf")
    y = quantize(layer, dtype)(x)
    assert torch.equal(y[1], layer.bias) and y[[0, 3, 5]].isfinite().all()
    assert y[[2, 4]].isnan().all()
    assert torch.equal(y[0, 3], layer.bias[3])


@every_dtype
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("size", [(0, 4), (4, 0), (0, 0)], ids=str)
def test_a_sum_of_nothing_is_the_bias(device, dtype, size):
    layer = nn.Linear(*size, device=device)
    quantized = quantize(layer, dtype)
    for shape in ((3,), (0,), (2, 3), ()):
        x = torch.ones(*shape, size[0], device=device)
        torch.testing.assert_close(quantized(x), layer(x).detach(), rtol=0.02, atol=0.05)


@every_dtype
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_experts(device, dtype, activation):
    experts = Experts(8, 64, 48, activation=activation, bias=True, device=device)
    quantized, x = quantize(experts, dtype), torch.randn(100, 64, device=device)
    ids, weights = torch.rand(100, 8, device=device).argsort(1)[:, :2], torch.rand(100, 2, device=device)
    ids[5, 0], ids[6] = -1, -1  # dropped
    plan = make_plan(ids, 8)
    assert type(quantized) is QuantizedExperts and quantized.gate_up.dtype == WEIGHTS[dtype]
    exact = experts.double()(x.double(), weights.double(), plan).detach()
    for of_x in (torch.float32, torch.bfloat16, torch.float64):
        y = quantized(x.to(of_x), weights, plan)
        assert y.dtype == of_x and y[6].eq(0).all()
        assert error(y, exact) < 2 * FAR[dtype] + 3 * torch.finfo(of_x).eps


@pytest.mark.gpu
@of_8_bits
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("of_x", [torch.bfloat16, torch.float16], ids=str)
def test_experts_of_sizes_that_hopper_knows(dtype, bias, of_x):
    experts = Experts(8, 512, 192, bias=bias, device="cuda")
    quantized, x = quantize(experts, dtype), torch.randn(700, 512, device="cuda")
    ids, weights = torch.rand(700, 8, device="cuda").argsort(1)[:, :2], torch.rand(700, 2, device="cuda")
    ids[5, 0], ids[6] = -1, -1  # dropped
    plan = make_plan(ids, 8)
    exact = experts.double()(x.double(), weights.double(), plan).detach()
    y = quantized(x.to(of_x), weights, plan)
    assert y.dtype == of_x and y[6].eq(0).all()
    assert error(y, exact) < 2 * FAR[dtype] + 3 * torch.finfo(of_x).eps


@every_dtype
def test_a_layer_of_aiters_example(device, dtype):
    layer = OptimizedMoELayer(64, 8, 48, device=device, dtype=torch.float32)
    x, ids = torch.randn(50, 64, device=device), torch.rand(50, 8, device=device).argsort(1)[:, :2]
    weights = torch.rand(50, 2, device=device)
    quantized = quantize(layer, dtype)
    assert type(quantized) is QuantizedMoELayer
    exact = layer.double()(x.double(), ids, weights.double()).detach()
    assert error(quantized(x, ids, weights), exact) < 2 * FAR[dtype]


@every_dtype
def test_a_mixture_of_experts(device, dtype):
    model = moe(device, shared_intermediate=32, selection_bias=True)
    quantized, x = quantize(model, dtype), torch.randn(4, 30, 64, device=device)
    assert type(quantized.router) is type(model.router) and same(quantized.router, model.router)
    assert type(quantized.experts) is QuantizedExperts and type(quantized.shared.down) is QuantizedLinear
    with torch.no_grad():
        assert error(quantized(x), model(x)) < 2.5 * FAR[dtype]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head.weight, self.second.weight = self.embed.weight, self.first.weight
        self.again = self.first

    def forward(self, ids):
        return self.head(self.again(self.second(self.first(self.embed(ids)))))


@of_8_bits
def test_what_is_tied_stays_tied(dtype):
    model = Tied()
    quantized = quantize(model, dtype)
    for copied in (quantized, copy.deepcopy(quantized), quantized.to(torch.float64)):
        assert copied.head.weight is copied.embed.weight and type(copied.head) is nn.Linear
        assert copied.second.weight is copied.first.weight and copied.second.scale is copied.first.scale
        assert copied.again is copied.first and copied.second.bias is not copied.first.bias
        assert copied.first.weight.dtype == WEIGHTS[dtype] and copied.first.scale.dtype == torch.float32


def test_what_stays_as_it_is():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.LayerNorm(4), nn.MultiheadAttention(16, 2), Own(4, 4),
        LoRALinear(nn.Linear(4, 4), rank=2),
    )  # fmt: skip
    quantized = quantize(model)
    assert [type(m) for m in quantized.modules()] == [type(m) for m in model.modules()]
    assert same(quantized, model) and not any(p.requires_grad for p in quantized.parameters())
    assert all(p.grad is None for p in quantized.parameters())


def test_names_to_skip():
    model = nn.ModuleDict({"a": mlp(), "b": nn.ModuleDict({"c": mlp(), "d": nn.Linear(4, 4)})})
    left = [name for name, m in quantize(model, skip=["a.0", "b.c"]).named_modules() if type(m) is nn.Linear]
    assert left == ["a.0", "b.c.0", "b.c.2"]
    assert type(quantize(model, skip="b")["b"]["d"]) is nn.Linear
    with pytest.raises(ValueError, match=r"skip names 'b.e', 'x', which the model has not"):
        quantize(model, skip=["x", "a", "b.e"])


@pytest.mark.parametrize("dtype", ["int2", "INT8", None, torch.int8])
def test_an_unknown_dtype(dtype):
    with pytest.raises(
        ValueError, match=r"dtype is .*; known formats: int8, fp8, fp16, bf16, nf4, mxfp4, int4"
    ):
        quantize(mlp(), dtype)
    with pytest.raises(TypeError, match="model must be a module, not Tensor"):
        quantize(torch.zeros(2))


@every_dtype
def test_saved_and_loaded(device, dtype):
    quantized, x, file = (
        quantize(nn.Sequential(moe("cpu", bias=True), mlp()), dtype),
        torch.randn(5, 64),
        io.BytesIO(),
    )
    torch.save(quantized.state_dict(), file)
    other = quantize(nn.Sequential(moe("cpu", bias=True), mlp()), dtype).to(device)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert same(other.cpu(), quantized) and torch.equal(other(x), quantized(x))


@every_dtype
def test_hooks_parametrizations_and_patched_layers(dtype):
    model, calls = mlp(), []
    model[0].register_forward_hook(lambda *_: calls.append("hook"))
    nn.utils.parametrizations.weight_norm(model[2])
    x, exact = torch.randn(9, 64), model
    quantized = quantize(model, dtype)
    assert type(quantized[2]) is QuantizedLinear and not list(quantized[2].children())
    assert error(quantized(x), exact(x).detach()) < 2 * FAR[dtype] and calls == ["hook", "hook"]
    model[0].forward = lambda x: x @ torch.ones(64, 96)
    assert type(quantize(model, dtype)[0]) is nn.Linear


@of_8_bits
def test_other_dtypes_change_biases_alone(dtype):
    model, x = quantize(nn.Sequential(mlp(), nn.LayerNorm(32)), dtype), torch.randn(5, 64)
    half, expected = copy.deepcopy(model).half(), model(x)
    assert half[1].weight.dtype == half[0][0].bias.dtype == torch.float16
    assert half[0][0].weight.dtype == WEIGHTS[dtype] and half[0][0].scale.dtype == torch.float32
    assert half(x.half()).dtype == torch.float16 and error(half(x.half()), expected) < 0.02
    with torch.autocast("cpu", torch.bfloat16):
        assert model[0](x).dtype == torch.bfloat16


@every_dtype
def test_an_encoder_of_torch(dtype):
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 7, 32)
    quantized = quantize(model, dtype)
    with torch.no_grad():
        assert error(quantized(x), model(x)) < 2 * FAR[dtype]


@of_8_bits
def test_a_gradient_is_refused(device, dtype):
    x = torch.randn(5, 64, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"a quantised layer has no gradient: call it under torch.no_grad"):
        quantize(mlp(device), dtype)(x)
    with pytest.raises(RuntimeError, match="a quantised layer has no gradient"):
        quantize(moe(device), dtype)(x)
    with torch.no_grad():
        assert not quantize(mlp(device), dtype)(x).requires_grad


@every_dtype
@pytest.mark.parametrize("kind", [mlp, moe])
def test_compile(device, dtype, kind):
    torch.compiler.reset()  # after tests of other layers, torch would refuse a ninth form
    model = quantize(kind(device), dtype)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (33, 20):
        x = torch.randn(rows, 64, device=device)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


def test_bad_inputs_are_named():
    with pytest.raises(ValueError, match=r"x is \(5, 63\) but the layer needs \(..., in=64\)"):
        quantize(mlp())(torch.randn(5, 63))
    with pytest.raises(TypeError, match=r"x must be float16, bfloat16, float32 or float64, not torch.int64"):
        quantize(mlp())(torch.zeros(5, 64, dtype=torch.int64))
    experts, plan = quantize(Experts(4, 64, 8)), make_plan(torch.zeros(5, 1, dtype=torch.int64), 4)
    with pytest.raises(ValueError, match=r"x is \(T, H=63\) but gate_up is \(E, 2I, H=64\)"):
        experts(torch.randn(5, 63), torch.ones(5, 1), plan)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_sixteen_bits_stay_so(dtype):
    """Also of experts with 8-bit products, and in pickles from before, which keep `fp8`."""
    experts, plan = Experts(4, 64, 64), make_plan(torch.zeros(5, 1, dtype=torch.int64), 4)
    args = torch.randn(5, 64), torch.ones(5, 1), plan
    expected = quantize(experts, dtype)(*args)
    experts.fp8 = "e4m3"
    quantized = quantize(experts, dtype)
    quantized.fp8 = experts.fp8
    assert torch.equal(quantized(*args), expected)


def test_the_example_of_the_guide(device):
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).to(device)
    quantized_model = aiter.quantize(model, dtype="int8")
    input_data = torch.randn(32, 1024, device=device)
    output = quantized_model(input_data)
    assert type(aiter.quantize(aiter.AITERLinear(8, 8))) is QuantizedLinear
    assert output.shape == (32, 1024) and error(output, model(input_data).detach()) < 0.03


@pytest.mark.parametrize("dtype", ["int8", "fp8", "fp16", "bf16"])
@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_cast_copy_computes_in_the_dtype_of_its_weights(dtype, cast):
    layer, x = nn.Linear(8, 4), torch.randn(3, 8)
    narrow = quantize(layer, dtype).to(cast)
    assert narrow.bias.dtype == cast
    torch.testing.assert_close(narrow(x), layer(x), rtol=0.1, atol=0.1)
