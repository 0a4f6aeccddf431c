"""Experts of 4 bits: `quantize`, adapters on them, and weights in the formats of others."""

import copy
import json

import pytest
import torch
from check import Copies, Peak, error
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from moe_aiter import (
    Experts,
    LoRAExperts,
    MoE,
    Monitor,
    RoutePlan,
    make_plan,
    quantization_report,
    quantize,
    route,
    set_loss_scale,
)
from moe_aiter.config import interpret
from moe_aiter.kernels.quantize.four_bit import FORMATS, quantized
from moe_aiter.kernels.quantize.scale_blocks import quantize_blocks
from moe_aiter.layers import lora
from moe_aiter.layers.four_bit import (
    STATE,
    FourBitExperts,
    FourBitWeight,
    from_awq,
    from_bitsandbytes,
    from_fp8,
    from_gptq,
    from_mxfp4,
    join_weights,
    to_bitsandbytes,
)

from ..shapes import CAPPED

E, SIZE, T = 4, 128, 12
formats = pytest.mark.parametrize("format", FORMATS)
slow = pytest.mark.skipif(interpret, reason="interpreted kernels take minutes here")
EXPERTS = {
    "swiglu": {},
    "oai with biases": {"bias": True, "activation": "swiglu_oai", "interleaved": True},
    "soft caps": {"activation": CAPPED},
    "relu2": {"activation": "relu2"},
}


def dequantized(experts):
    """The `Experts` that `FourBitExperts` stand for."""
    full = Experts(
        E, SIZE, SIZE, activation=experts.activation, interleaved=experts.interleaved,
        bias=experts.down_bias is not None, dtype=experts.down.dtype, device=experts.down.packed.device,
    )  # fmt: skip
    state = {"gate_up": experts.gate_up.dequantize(), "down": experts.down.dequantize()}
    biases = {name: getattr(experts, name) for name in ("gate_up_bias", "down_bias")}
    full.load_state_dict(state | {name: b for name, b in biases.items() if b is not None})
    return full.requires_grad_(False)


def routed(device, dtype=torch.float32):
    x = torch.randn(T, SIZE, device=device, dtype=dtype).requires_grad_()
    weights = torch.rand(T, 2, device=device).requires_grad_()
    ids = torch.randint(-1, E - 1, (T, 2), generator=torch.Generator().manual_seed(1))
    return x, weights, make_plan(ids.to(device), E)


def run(module, x, weights, plan):
    """The output, and the gradients of x, routing weights and trainable parameters."""
    out = module(x, weights, plan)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    leaves = x, weights, *(p for p in module.parameters() if p.requires_grad)
    return out, *torch.autograd.grad(out, leaves, dout)


def assert_equal(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@formats
@pytest.mark.parametrize("options", EXPERTS.values(), ids=EXPERTS)
@pytest.mark.pairwise
def test_frozen_experts(device, format, options):
    experts = quantize(Experts(E, SIZE, SIZE, device=device, **options), format)
    assert type(experts) is FourBitExperts and not any(p.requires_grad for p in experts.parameters())
    inputs = routed(device)
    assert_equal(run(experts, *inputs), run(dequantized(experts), *inputs))


@formats
@pytest.mark.parametrize("options", EXPERTS.values(), ids=EXPERTS)
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.pairwise
def test_adapters(device, format, options, dora):
    torch.manual_seed(0)
    base = quantize(Experts(E, SIZE, SIZE, device=device, **options), format)
    layer, full = (LoRAExperts(experts, rank=3, dora=dora) for experts in (base, dequantized(base)))
    inputs = routed(device)
    assert_equal(layer(*inputs), base(*inputs))
    for name, p in layer.named_parameters():
        if name.endswith(("lora.B", "magnitude")):
            p.data += 0.1 * torch.randn_like(p)
    full.load_state_dict({n: p for n, p in layer.state_dict().items() if "lora" in n}, strict=False)
    assert_equal(run(layer, *inputs), run(full, *inputs))


class Sizes(TorchDispatchMode):
    """Notes the most numbers that a floating result has."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                self.most = max(self.most, t.numel())
        return out


@slow
@formats
def test_dora_needs_no_whole_weight(monkeypatch, format):
    monkeypatch.setattr(lora, "NORM_BLOCK", 5000)
    layer = LoRAExperts(quantize(Experts(E, SIZE, SIZE), format), rank=2, dora=True)
    inputs = routed("cpu")
    with Sizes() as sizes:
        layer(*inputs).square().sum().backward()
    assert 5000 <= sizes.most < SIZE * SIZE and layer.down_lora.magnitude.grad.any()


@slow
def test_a_layer_trains_its_adapters_and_router(device):
    torch.manual_seed(0)
    moe = quantize(MoE(SIZE, SIZE, E, 2, device=device), "nf4")
    moe.experts = LoRAExperts(moe.experts, rank=4)
    before = {name: t.clone() for name, t in moe.state_dict().items()}
    x, target = torch.randn(2, 64, SIZE, device=device)
    optimizer = torch.optim.Adam([p for p in moe.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (moe(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    after = moe.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    loras = {f"experts.{weight}_lora.{m}" for weight in ("gate_up", "down") for m in "AB"}
    assert changed == {"router.weight", *loras}


@formats
def test_memory(format):
    """Of bfloat16's at most 0.29, adapters apart, at sizes where biases do not count."""
    experts = Experts(2, 256, 256, dtype=torch.bfloat16)
    size = sum(p.nbytes for p in experts.parameters())
    packed = quantize(experts, format)
    assert sum(b.nbytes for b in packed.buffers()) <= 0.29 * size
    report = quantization_report(
        MoE(SIZE, SIZE, E, 2), quantize(MoE(SIZE, SIZE, E, 2), format), torch.randn(3, SIZE)
    )
    assert [layer.dtype for layer in report.layers] == [format]


@slow
@formats
def test_safetensors_round_trip(tmp_path, format):
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(0)
    moe = quantize(MoE(SIZE, SIZE, E, 2), format)
    moe.experts = LoRAExperts(moe.experts, rank=2)
    safetensors.save_file(moe.state_dict(), tmp_path / "moe.safetensors")
    other = quantize(MoE(SIZE, SIZE, E, 2), format)
    other.experts = LoRAExperts(other.experts, rank=2)
    x = torch.randn(5, SIZE)
    assert not torch.equal(other(x), moe(x))
    state = safetensors.load_file(tmp_path / "moe.safetensors")
    other.load_state_dict(state)
    assert torch.equal(other(x), moe(x))
    for name, rows in (("gate_up", 2 * SIZE), ("down", SIZE)):
        shapes = [state[f"experts.base.{name}.{part}"].shape for part in ("packed", "scales")]
        assert shapes == [(E, rows, SIZE // 2), (E, rows, SIZE // FORMATS[format].block)]
    for another in FORMATS.keys() - {format}:
        unlike = quantize(MoE(SIZE, SIZE, E, 2), another)
        unlike.experts = LoRAExperts(unlike.experts, rank=2)
        with pytest.raises(RuntimeError, match=r"size mismatch for experts.base.gate_up.scales"):
            unlike.load_state_dict(state)


def test_dtype_moves_no_code_and_no_scale():
    experts = quantize(Experts(E, SIZE, SIZE, bias=True), "nf4")
    before = {name: b.clone() for name, b in experts.named_buffers()}
    experts.bfloat16()
    assert experts.gate_up.dtype == experts.gate_up_bias.dtype == torch.bfloat16
    for name, b in experts.named_buffers():
        assert b.dtype == before[name].dtype and torch.equal(b, before[name])
    x, weights, plan = routed("cpu", torch.bfloat16)
    assert experts(x, weights, plan).dtype == torch.bfloat16
    why = r"x is torch\.float32 but the frozen weights stand for torch\.bfloat16: call \.to\(torch\.float32\)"
    with pytest.raises(TypeError, match=why):
        experts(x.float(), weights, plan)
    with torch.autocast("cpu", torch.bfloat16):
        assert experts(x.float(), weights, plan).dtype == torch.bfloat16


@slow
@pytest.mark.parametrize("adapted", [None, {}, {"dora": True}], ids=["frozen", "lora", "dora"])
def test_compiles_and_is_deterministic(device, adapted):
    moe = quantize(MoE(SIZE, SIZE, E, 2, device=device), "nf4")
    if adapted is not None:
        moe.experts = LoRAExperts(moe.experts, rank=2, **adapted)
    x = torch.randn(T, SIZE, device=device, requires_grad=True)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(fn(x).square().sum(), x)[0] for fn in (moe, moe, compiled)]
    assert torch.equal(grads[0], grads[1])
    torch.testing.assert_close(grads[2], grads[0])


def test_skip_and_copies():
    model = nn.ModuleDict({"a": MoE(SIZE, SIZE, E, 2), "b": MoE(SIZE, SIZE, E, 2)})
    other = quantize(model, "int4", skip=("a",))
    kinds = [type(other[name].experts) for name in "ab"]
    assert kinds == [Experts, FourBitExperts] and type(model["b"].experts) is Experts
    assert other["a"].experts.down.requires_grad and other["b"].router.weight.requires_grad
    twin = copy.deepcopy(other)
    x = torch.randn(3, SIZE)
    assert torch.equal(twin["b"](x), other["b"](x))


@formats
def test_quantising_needs_little_more_than_the_result(format):
    weight = torch.randn(32, 64, 256)
    with Peak() as peak:
        packed = quantized(weight, format).packed
    assert packed.nbytes <= peak.now() and peak.most < weight.nbytes + 4 * packed.nbytes


@formats
@pytest.mark.parametrize("shape", [(0, 64, 128), (3, 0, 128), (3, 64, 0), (0, 0, 0)], ids=str)
def test_a_weight_without_numbers(format, shape):
    for device in ("cpu", "meta"):
        weight = FourBitWeight(quantized(torch.empty(shape, device=device), format))
        assert tuple(weight.dequantize().shape) == shape
        assert lora.row_norms(weight.weight()).shape == shape[:2]
        weight.shard(lambda t: t)  # float32 scales
        assert tuple(weight.dequantize().shape) == shape
    if format == "nf4":
        weight = FourBitWeight(quantized(torch.empty(shape), format))
        state = to_bitsandbytes(weight, "w")
        assert json.loads(bytes(state[f"w.{STATE}"].tolist()))["nested_offset"] == 0
        assert from_bitsandbytes(state, "w", shape).state_dict().keys() == weight.state_dict().keys()


def test_weights_of_others_without_numbers():
    for E, N, K in ((0, 128, 128), (2, 0, 128), (2, 128, 0)):
        eight = from_fp8(torch.empty(E, N, K).to(torch.float8_e4m3fn), torch.ones(E, N // 128, K // 128))
        blocks, scales = (torch.empty(E, N, K // 32, *s, dtype=torch.uint8) for s in ((16,), ()))
        for weight in (eight, from_mxfp4(blocks, scales)):
            assert tuple(weight.dequantize().shape) == (E, N, K)
    of = lambda *sizes: torch.zeros(*sizes, dtype=torch.int32)  # noqa: E731
    for N, K in ((0, 128), (8, 0)):
        zeros, scales = of(K // 128, N // 8), torch.zeros(K // 128, N, dtype=torch.float16)
        for weight in (from_gptq(of(K // 8, N), zeros, scales), from_awq(of(K, N // 8), zeros, scales)):
            assert tuple(weight.dequantize().shape) == (1, N, K)


@pytest.mark.parametrize("format", [None, "int8", "bf16", *FORMATS])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_stack_without_experts_adds_nothing(format, adapted):
    """As the part of a rank may be, and as products of no groups do."""
    experts = Experts(1, SIZE, SIZE, bias=True)
    for name, p in experts.named_parameters():
        setattr(experts, name, nn.Parameter(p.detach()[:0]))
    experts.num_experts = 0
    layer = quantize(experts, format) if format else experts
    none = torch.full((T, 2), -1, dtype=torch.int32)
    inputs = [torch.randn(T, SIZE), torch.rand(T, 2), RoutePlan(none.flatten(), none, none[:0, 0])]
    if adapted and format in (None, *FORMATS):
        layer = LoRAExperts(layer, rank=2, dora=True)
        inputs[0].requires_grad_()
    out = layer(*inputs)
    assert out.shape == (T, SIZE) and not out.any()
    if inputs[0].requires_grad:
        out.sum().backward()
        assert not inputs[0].grad.any()


def test_the_original_stays_and_its_weights_are_not_copied():
    model = nn.ModuleDict({"a": MoE(SIZE, SIZE, E, 2, bias=True), "b": MoE(SIZE, SIZE, 2 * E, 2)})
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with Copies() as copies:
        other = quantize(model, "nf4", skip=["b"])
    assert (2 * E, SIZE, SIZE) in copies.sizes and (E, SIZE, SIZE) not in copies.sizes
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.requires_grad for p in model.parameters())
    theirs = {p.data_ptr() for p in model.parameters()}
    assert not theirs & {t.data_ptr() for t in other.state_dict().values()}


def test_a_weight_that_a_skipped_module_uses_too_is_copied():
    model = nn.ModuleDict({"a": Experts(E, SIZE, SIZE), "b": Experts(E, SIZE, SIZE)})
    model["b"].down = model["a"].down
    other = quantize(model, "nf4", skip=["b"])
    assert torch.equal(other["b"].down, model["b"].down) and other["b"].down is not model["b"].down


@slow
@formats
def test_an_empty_model_is_filled_from_a_state_dict(format):
    """So that no weight has to exist in 16 bits."""
    moe = quantize(MoE(SIZE, SIZE, E, 2), format)
    with torch.device("meta"):
        empty = quantize(MoE(SIZE, SIZE, E, 2), format)
    empty.load_state_dict(moe.state_dict(), assign=True)
    x = torch.randn(3, SIZE)
    assert torch.equal(empty(x), moe(x))


@slow
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("saved", ["float32", "double"])
def test_a_state_of_nf4_with_scales_of_the_other_form_is_loaded(saved, assign):
    """Ranks that share experts save float32 scales; one process then loads them, and its own again."""
    states, outputs, x = {}, {}, torch.randn(3, SIZE)
    for form in ("double", "float32"):
        moe = quantize(MoE(SIZE, SIZE, E, 2), "nf4")
        if form == "float32":
            for weight in moe.experts.owners():
                weight.shard(lambda t: t)
        states[form], outputs[form] = moe.state_dict(), moe(x)
    with torch.device("meta" if assign else "cpu"):
        other = quantize(MoE(SIZE, SIZE, E, 2), "nf4")
    forms = ["float32"] if saved == "float32" else ["float32", "double"]
    for form in forms:
        other.load_state_dict(states[form], assign=assign)
    assert torch.equal(other(x), outputs[saved])
    assert {n: t.dtype for n, t in other.state_dict().items()} == {
        n: t.dtype for n, t in states[saved].items()
    }


@slow
def test_a_layer_without_parameters():
    """A router of hashes and experts of 4 bits leave buffers alone: a monitor and a loss scale find them."""

    class Hash(nn.Module):
        def forward(self, x):
            return route(x.detach()[:, :E], 2)

    moe = quantize(MoE(SIZE, SIZE, E, 2, load_balance_coef=0.1), "nf4")
    moe.router = Hash()
    assert not [*moe.parameters()]
    set_loss_scale(moe, 0.5)
    with Monitor(moe) as monitor:
        moe.train()(torch.randn(3, SIZE, requires_grad=True)).sum().backward()
        assert next(iter(monitor.read().values())).tokens == 3
    assert moe.loss_scale == 0.5


@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-6])
def test_int4_takes_small_groups(size):
    """A code is off by half a step at most, and by what float16 rounds the scale by, 15 of them at an end."""
    w = size * torch.rand(2, 3, 128, generator=torch.Generator().manual_seed(0))
    step = w.amax(-1, keepdim=True) / 15
    assert ((quantized(w, "int4").dequantize() - w).abs() <= 0.5 * step + 15 * 2.0**-25).all()


@pytest.mark.parametrize("size", [2.0**-24, 21 * 2.0**-24, 2.0**-12])
def test_no_code_of_int4_saturates_where_scales_are_few(size):
    """Between neighbours of float16 that are not normal, the scale is the larger one."""
    w = torch.linspace(0, size, 128).repeat(1, 2, 1)
    w[:, 1] *= -1
    q = quantized(w, "int4")
    assert ((q.dequantize() - w).abs() <= 0.51 * q.scales.float()).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_int4_says_what_it_cannot_hold(sign):
    w = torch.zeros(2, 3, 256)
    w[1, 2, 200] = sign * 982_560
    assert torch.equal(quantized(w, "int4").dequantize(), w)
    for largest in (982_561, 3e38):
        w[1, 2, 200] = sign * largest
        with pytest.raises(ValueError, match=r"span 982560 at most, not .*: use nf4 or mxfp4"):
            quantized(w, "int4")
        assert quantized(w, "nf4", False).dequantize()[1, 2, 200] == w[1, 2, 200]
    w[1, 2, 0], w[1, 2, 1] = 500_000, -500_000  # together
    w[1, 2, 200] = 0
    with pytest.raises(ValueError, match="not 1e\\+06"):
        quantized(w, "int4")


def test_what_would_be_read_back_as_infinity_is_refused():
    """Largest numbers of float16 whose scale rounds up, and numbers that float32 cannot hold."""
    top = torch.zeros(1, 1, 128, dtype=torch.float16)
    top[..., 0] = 65504
    with pytest.raises(ValueError, match=r"w is up to 65504, which int4 rounds past what torch\.float16"):
        quantized(top, "int4")
    assert torch.equal(quantized(top, "nf4").dequantize(), top)
    assert quantized(top, "mxfp4").dequantize()[..., 0] == 6 * 2.0**13
    several = torch.zeros(1, 199, 64, dtype=torch.float16)  # the mean of absmax makes 99 % of the largest gap
    several[:, :100, 0] = 65504
    with pytest.raises(ValueError, match="w is up to 65504, which nf4 rounds past"):
        quantized(several, "nf4")
    for format in FORMATS:
        with pytest.raises(ValueError, match="what float32 cannot hold"):
            quantized(torch.full((1, 2, 128), 1e39, dtype=torch.float64), format)


def test_mistakes():
    shared = MoE(SIZE, SIZE, E, 2)
    shared.experts.dispatcher = object()
    with pytest.raises(ValueError, match="experts are shared among ranks: call quantize before"):
        quantize(shared, "nf4")
    with pytest.raises(ValueError, match="w holds NaN or infinity"):
        quantized(torch.full((1, 2, 128), torch.nan), "mxfp4")
    for made in ("int8", "mxfp4"):
        with pytest.raises(ValueError, match="the experts of MoE are quantised already: give the model as"):
            quantize(quantize(MoE(SIZE, SIZE, E, 2), made), "nf4")
    with pytest.raises(ValueError, match="Linear has no Experts, whose weights 'nf4' is for"):
        quantize(nn.Linear(8, 8), "nf4")
    with pytest.raises(ValueError, match="int4 needs rows of a multiple of 128 numbers"):
        quantize(Experts(2, 64, 64), "int4")
    base = quantize(Experts(2, 64, 64), "nf4")
    with pytest.raises(ValueError, match="the weights have 4 bits"):
        LoRAExperts(base, rank=2).merge()
    merged = LoRAExperts(Experts(2, 64, 64), rank=2)
    merged.merge()
    with pytest.raises(ValueError, match="unmerge them first"):
        quantize(merged, "nf4")


# formats of others


@pytest.mark.parametrize("double", [True, False])
def test_bitsandbytes_round_trip(double):
    """Tensors as bitsandbytes writes them come back bit by bit, and stand for what its formula says."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (E * 6 * 64, 1), generator=generator, dtype=torch.uint8)
    blocks = E * 6 * 2
    table = torch.randn(16, generator=generator)
    how = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [E, 6, 128]}
    if double:
        numbers = torch.randint(256, (blocks,), generator=generator, dtype=torch.uint8)
        nested, more = torch.rand(1, generator=generator), torch.rand(256, generator=generator)
        how |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
        absmax = more.double()[numbers.long()] * nested.double() + 0.25
        state = {"w.absmax": numbers, "w.nested_absmax": nested, "w.nested_quant_map": more}
    else:
        state = {"w.absmax": torch.rand(blocks, generator=generator)}
        absmax = state["w.absmax"].double()
    text = torch.tensor(list(json.dumps(how).encode()), dtype=torch.uint8)
    state |= {"w": codes, "w.quant_map": table, f"w.{STATE}": text}
    weight = from_bitsandbytes(state, "w", (E, 6, 128))
    high_then_low = torch.stack((codes >> 4, codes & 15), -1).flatten().long()
    expected = table.double()[high_then_low] * absmax.repeat_interleave(64)
    assert torch.equal(weight.dequantize().flatten(), expected.float().bfloat16())
    again = to_bitsandbytes(weight, "w")
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], t) for name, t in state.items())


# what quantize_4bit(w, quant_type="nf4", compress_statistics=True) of bitsandbytes 0.50 makes of the w below
ABSMAX, NESTED, OFFSET = [55, 15, 255], [61.66666793823242], 63.333332
CODES = bytes.fromhex(
    "04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c16d18e3b04c17e29f3b05d17e2af4c06d"
    "18e2a04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c16d18e3b04c17e29f3b05d17e2af"
)


def test_bitsandbytes_quantises_alike():
    w = (torch.arange(192) * 37 % 101 - 50).float().view(1, 3, 64) * torch.tensor([[1.0], [0.3], [2.5]])
    got = quantized(w, "nf4")
    assert got.scales.flatten().tolist() == ABSMAX and bytes(got.packed.flatten().tolist()) == CODES
    assert got.nested.tolist() == pytest.approx(NESTED, rel=1e-6)
    assert got.offset.tolist() == pytest.approx([OFFSET], rel=1e-6)
    table = [-0.9929687, -0.9789063, -0.00746875, 0.0, 5.5e-7, 0.2335937, 1.0]
    assert got.table[16:][[0, 1, 100, 127, 128, 200, 255]].tolist() == pytest.approx(table, rel=1e-6)


@pytest.mark.parametrize("double", [True, False])
def test_bitsandbytes_itself(double):
    """The package's NF4 weight has the same value here, and what we write the package reads."""
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    w = torch.randn(E, 6, 128, generator=torch.Generator().manual_seed(0))
    how = {"quant_type": "nf4", "compress_statistics": double}
    codes, state = functional.quantize_4bit(w, **how)
    written = {"w": codes} | {f"w.{name}": t for name, t in state.as_dict(packed=True).items()}
    weight = from_bitsandbytes(written, "w", (E, 6, 128))
    assert torch.equal(weight.dequantize(), functional.dequantize_4bit(codes, state))
    ours = {name: t for name, t in to_bitsandbytes(weight, "w").items() if name != "w"}
    again = functional.QuantState.from_dict(ours, device="cpu")
    assert torch.equal(functional.dequantize_4bit(codes, again), weight.dequantize())


@formats
def test_layers_of_experts_are_joined(format):
    """As in a checkpoint with a weight for gate, up and down of each expert."""
    torch.manual_seed(0)
    layers = {n: [torch.randn(1, SIZE, SIZE) * (3 + e) for e in range(E)] for n in ("gate", "up", "down")}
    found = {n: [FourBitWeight(quantized(w, format)) for w in ws] for n, ws in layers.items()}
    gate_up = join_weights(list(zip(found["gate"], found["up"], strict=True)))
    down = join_weights([[w] for w in found["down"]])
    whole = {n: torch.cat([w.dequantize() for w in ws]) for n, ws in found.items()}
    assert torch.equal(gate_up.dequantize(), torch.cat((whole["gate"], whole["up"]), 1))
    assert torch.equal(down.dequantize(), whole["down"])
    assert sum(b.nbytes for b in gate_up.buffers()) <= 0.29 * 2 * gate_up.weight().shape.numel()
    experts = quantize(Experts(E, SIZE, SIZE), format)
    experts.gate_up, experts.down = gate_up, down
    if not interpret:
        inputs = routed("cpu")
        assert_equal(run(experts, *inputs), run(dequantized(experts), *inputs))


def test_layers_that_do_not_fit_together():
    a, b = (FourBitWeight(quantized(torch.randn(1, rows, 128), "nf4")) for rows in (4, 8))
    with pytest.raises(ValueError, match=r"\[4, 8\] rows an expert"):
        join_weights([[a], [b]])
    with pytest.raises(ValueError, match=r"kinds .*int4.*nf4"):
        join_weights([[a], [FourBitWeight(quantized(torch.randn(1, 4, 128), "int4"))]])
    other = copy.deepcopy(a)
    other.table[3] += 1
    with pytest.raises(ValueError, match="different tables of codes"):
        join_weights([[a, other]])
    several = FourBitWeight(quantized(torch.randn(2, 4, 128), "nf4"))
    several.offset[1] += 1
    with pytest.raises(ValueError, match="w has 2 offsets"):
        to_bitsandbytes(several, "w")


def test_mxfp4_of_gpt_oss():
    """Against the definition of its two parts: e2m1 and e8m0."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (2, 6, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 132, (2, 6, 3), generator=generator, dtype=torch.uint8)
    scales[0, 0] = torch.tensor([0, 1, 252])
    weight = from_mxfp4(blocks, scales)
    assert weight.packed.data_ptr() == blocks.data_ptr() and weight.scales is scales
    expected = torch.empty(2, 6, 3, 32, dtype=torch.float64)
    for at in torch.cartesian_prod(*map(torch.arange, expected.shape)).tolist():
        code = int(blocks[(*at[:3], at[3] // 2)]) >> (4 * (at[3] % 2)) & 15
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        value = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
        expected[tuple(at)] = (-1) ** sign * value * 2.0 ** (int(scales[tuple(at[:3])]) - 127)
    assert torch.equal(weight.dequantize().double().view_as(expected), expected)
    scales[1, 5, 1] = 255
    expected[1, 5, 1] = torch.nan
    found = from_mxfp4(blocks, scales).dequantize().double().view_as(expected)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    with pytest.raises(ValueError, match=r"blocks is \(2, 6, 3, 8\) but must be \(2, 6, 3, 16\)"):
        from_mxfp4(blocks[..., :8], scales)
    with pytest.raises(TypeError, match=r"blocks must be torch\.uint8, not torch\.int8"):
        from_mxfp4(blocks.view(torch.int8), scales)


GROUPS, OUT = 3, 24


def int4_codes():
    """Codes (in, out), zero points and scales (groups, out), and the weight (out, in) that they stand for."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (GROUPS * 128, OUT), generator=generator)
    zeros = torch.randint(16, (GROUPS, OUT), generator=generator)
    scales = torch.rand(GROUPS, OUT, generator=generator).half()
    group = torch.arange(GROUPS * 128) // 128
    return codes, zeros, scales, ((codes - zeros[group]) * scales.double()[group]).T


def in_int32(codes, axis, order):
    """Put 8 neighbours of an axis into one number: order[i] in the bits from 4 * i on."""
    neighbours = codes.movedim(axis, -1).unflatten(-1, (-1, 8))
    numbers = sum(neighbours[..., place] << 4 * i for i, place in enumerate(order))
    return numbers.movedim(-1, axis).to(torch.int32)  # numbers from 2 ** 31 on become negative


def with_fp8(moe: MoE) -> MoE:
    """The layer with its experts' weights as an FP8 checkpoint has them."""
    other = quantize(moe, "nf4")
    for name in ("gate_up", "down"):
        weight = getattr(moe.experts, name)
        setattr(other.experts, name, from_fp8(*quantize_blocks(weight, True), weight.dtype))
    return other


@pytest.mark.parametrize("adapted", [None, {}, {"dora": True}], ids=["frozen", "lora", "dora"])
def test_fp8(device, adapted, tmp_path):
    moe = MoE(SIZE, 192, num_experts=E, top_k=2, device=device)
    small = with_fp8(moe)
    assert small.experts.gate_up.packed.dtype == torch.float8_e4m3fn
    whole = copy.deepcopy(moe).requires_grad_(False)
    for name in ("gate_up", "down"):
        getattr(whole.experts, name).copy_(getattr(small.experts, name).dequantize())
    if adapted is not None:
        small.experts, whole.experts = (LoRAExperts(m.experts, rank=4, **adapted) for m in (small, whole))
    x = torch.randn(T, SIZE, device=device).requires_grad_()
    y, expected = small(x), whole(x)
    torch.testing.assert_close(y, expected, rtol=0, atol=0.1 * expected.abs().max().item())
    y.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in small.parameters() if p.requires_grad)
    assert torch.equal(torch.compile(small, backend="aot_eager")(x), y)
    torch.save(small.state_dict(), tmp_path / "moe.pt")
    state = torch.load(tmp_path / "moe.pt")
    assert state[next(k for k in state if k.endswith("gate_up.packed"))].dtype == torch.float8_e4m3fn
    small.load_state_dict(state)
    assert small.to(torch.bfloat16).state_dict().keys() == state.keys()
    experts = small.experts if adapted is None else small.experts.base
    assert experts.gate_up.packed.itemsize == 1 and experts.gate_up.scales.dtype == torch.float32
    for dtype in (torch.float16, torch.bfloat16):
        x, weights, plan = routed(device, dtype)
        want = small.float().experts(x.float(), weights, plan)
        found = small.to(dtype).experts(x, weights, plan)
        assert found.dtype == dtype and error(found, want) < 0.05


def test_fp8_scales_of_whole_experts_and_mistakes():
    weight, scale = torch.randn(E, 130, 70).to(torch.float8_e4m3fn), torch.rand(E, 1, 1)
    for power in (scale, torch.rand(E, 1, 1).to(torch.float8_e8m0fnu)):
        exact = weight.float() * power.float()
        assert torch.equal(from_fp8(weight, power, torch.float32).dequantize(), exact)
    with pytest.raises(ValueError, match=r"scale_inv is \(4, 3, 1\) but must be \(4, 2, 1\)"):
        from_fp8(weight, torch.rand(E, 3, 1))
    with pytest.raises(TypeError, match=r"weight must be torch.float8_e4m3fn, not torch.float8_e5m2"):
        from_fp8(weight.float().to(torch.float8_e5m2), scale)
    with pytest.raises(ValueError, match=r"weight is on cpu but scale_inv is on meta"):
        from_fp8(weight, torch.rand(E, 1, 1, device="meta"))
    with pytest.raises(TypeError, match=r"scale_inv must be float32 or float8_e8m0fnu, not torch.uint8"):
        from_fp8(weight, power.view(torch.uint8))


def test_awq():
    codes, zeros, scales, expected = int4_codes()
    order = 0, 2, 4, 6, 1, 3, 5, 7
    weight = from_awq(in_int32(codes, 1, order), in_int32(zeros, 1, order), scales, torch.float32)
    assert weight.format == "int4" and torch.equal(weight.dequantize()[0].double(), expected)
    assert all(b.is_contiguous() for b in weight.buffers())
    half = from_awq(in_int32(codes, 1, order), in_int32(zeros, 1, order), scales)
    assert half.dtype == torch.float16


@pytest.mark.parametrize("format, less", [("gptq", 1), ("gptq_v2", 0)])
def test_gptq(format, less):
    codes, zeros, scales, expected = int4_codes()
    parts = in_int32(codes, 0, range(8)), in_int32(zeros - less & 15, 1, range(8)), scales
    assert (zeros == 0).any() and (zeros == 15).any()
    g_idx = torch.arange(GROUPS * 128, dtype=torch.int32) // 128
    weight = from_gptq(*parts, g_idx, torch.float32, format)
    assert all(b.is_contiguous() for b in weight.buffers())
    assert torch.equal(weight.dequantize()[0].double(), expected)
    whole = join_weights([[weight, weight]] * 2)
    assert torch.equal(whole.dequantize()[1, OUT:].double(), expected)
    for permuted in (g_idx.flip(0), g_idx[:-1]):
        with pytest.raises(ValueError, match=r"g_idx permutes the inputs \(desc_act=True\)"):
            from_gptq(*parts, permuted)


@pytest.mark.parametrize("says, stores, code", [("gptq", "gptq_v2", 8), ("gptq_v2", "gptq", 7)])
def test_a_symmetric_gptq_weight_in_the_other_format_is_refused(says, stores, code):
    """Every zero point of such a weight is 8, so one number more or less everywhere is no other weight."""
    codes, zeros, scales, _ = int4_codes()
    stored = torch.full_like(zeros, code)
    parts = in_int32(codes, 0, range(8)), in_int32(stored, 1, range(8)), scales
    with pytest.raises(ValueError, match=f"qzeros holds {code} alone, .* give checkpoint_format='{stores}'"):
        from_gptq(*parts, checkpoint_format=says)
    assert (from_gptq(*parts, checkpoint_format=stores).offset == 8).all()
    stored[1, 2] = 3  # zero points that differ are those of an asymmetric weight
    parts = parts[0], in_int32(stored, 1, range(8)), scales
    assert from_gptq(*parts, checkpoint_format=says).offset.unique().numel() == 2


def test_other_layouts_of_int4_are_refused():
    codes, zeros, scales, _ = int4_codes()
    awq = in_int32(codes, 1, range(8)), in_int32(zeros, 1, range(8)), scales
    gptq = in_int32(codes, 0, range(8)), *awq[1:]
    with pytest.raises(ValueError, match=r"qweight is \(48, 24\), but scales .* need \(384, 3\)"):
        from_awq(*gptq)
    with pytest.raises(ValueError, match=r"qweight is \(384, 3\), but scales .* need \(48, 24\)"):
        from_gptq(*awq)
    with pytest.raises(ValueError, match=r"qzeros is \(2, 3\), but scales in groups of 128 need \(3, 3\)"):
        from_awq(awq[0], awq[1][:2], scales)
    with pytest.raises(TypeError, match=r"qweight must be torch\.int32, not torch\.int64"):
        from_gptq(gptq[0].long(), *gptq[1:])
    with pytest.raises(TypeError, match="scales of int4 must be"):
        from_awq(*awq[:2], scales.float())
    with pytest.raises(TypeError, match=r"dtype must be .*not torch\.int32"):
        from_awq(*awq, torch.int32)
    with pytest.raises(ValueError, match="unknown checkpoint_format 'marlin'; known: gptq, gptq_v2"):
        from_gptq(*gptq, checkpoint_format="marlin")
