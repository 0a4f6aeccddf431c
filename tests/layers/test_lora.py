"""LoRALinear and LoRAExperts, beside a layer whose weight has the product of the factors in it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moe_aiter import Experts, LoRAExperts, LoRALinear, MoE, make_plan
from moe_aiter.layers import lora as file
from moe_aiter.op import use

from ..check import assert_as_good_as_torch, error
from ..shapes import CAPPED

E, H, CHANNELS, RANK = 3, 8, 6, 2
KINDS = {
    "lora": {},
    "alpha": {"alpha": 7.0},
    "rslora": {"alpha": 7.0, "rslora": True},
    "dora": {"alpha": 7.0, "dora": True},
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def randomized(layer):
    """The layer, its adapters as after some training."""
    for name, p in layer.named_parameters():
        if "lora" in name:
            p.data.add_(0.3 * torch.randn_like(p))
    return layer


def make_linear(kind, num_adapters=1, bias=True, device="cpu", dtype=torch.float64):
    base = nn.Linear(H, 10, bias=bias, device=device, dtype=dtype)
    return randomized(LoRALinear(base, num_adapters, rank=RANK, **kind))


def make_experts(kind, device="cpu", dtype=torch.float64, **experts):
    base = Experts(E, H, CHANNELS, device=device, dtype=dtype, **experts)
    return randomized(LoRAExperts(base, rank=RANK, **kind))


def routed(device="cpu", dtype=torch.float64):
    """x, routing weights and a plan, which drops a choice."""
    x, weights = torch.randn(5, H, device=device, dtype=dtype), torch.rand(5, 2, device=device, dtype=dtype)
    ids = torch.tensor([[0, 1], [1, 2], [2, -1], [1, 1], [0, 2]], device=device)
    return x, weights, make_plan(ids, E)


def adapted_weight(weight, lora, n):
    """As the papers write it."""
    full = weight + lora.scaling * lora.B[n] @ lora.A[n]
    if lora.magnitude is None:
        return full
    return lora.magnitude[n][:, None] * full / full.detach().norm(dim=1, keepdim=True)


def linear_reference(layer, x, ids):
    """Row by row."""
    base = layer.base
    weights = [adapted_weight(base.weight, layer.lora, n) for n in range(len(layer.lora.A))] + [base.weight]
    rows = [F.linear(r, weights[i], base.bias) for r, i in zip(x, ids, strict=True)]
    return torch.stack(rows)


@kinds
@pytest.mark.parametrize("few", [0, 256])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.pairwise
def test_each_row_has_its_own_adapter(kind, few, bias, monkeypatch):
    monkeypatch.setattr(file, "FEW_ROWS", few)
    layer = make_linear(kind, 3, bias)
    x, ids = torch.randn(7, H, dtype=torch.float64), torch.tensor([2, -1, 0, 1, 2, 0, -1])
    expected, got = linear_reference(layer, x, ids.tolist()), layer(x, ids)
    torch.testing.assert_close(got, expected)
    leaves = list(layer.lora.parameters())
    dout = torch.randn_like(got)
    for a, b in zip(*(torch.autograd.grad(y, leaves, dout) for y in (got, expected)), strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(layer(x, ids)[1], layer.base(x)[1])


@kinds
def test_ways_to_name_adapters(kind):
    layer = make_linear(kind, 3)
    x, ids = torch.randn(4, 5, H, dtype=torch.float64), torch.tensor([2, -1, 0, 1])
    expected = linear_reference(layer, x.flatten(0, 1), ids.repeat_interleave(5).tolist()).view(4, 5, -1)
    torch.testing.assert_close(layer(x, ids), expected)
    torch.testing.assert_close(layer(x, ids[:, None].expand(4, 5)), expected)
    lens, of_segments = torch.tensor([5, 0, 5, 3, 7]), torch.tensor([2, 1, -1, 0, 1])
    rows = of_segments.repeat_interleave(lens).tolist()
    expected = linear_reference(layer, x.flatten(0, 1), rows).view(4, 5, -1)
    torch.testing.assert_close(layer(x, of_segments, lens), expected)


@kinds
def test_one_adapter_need_not_be_named(kind):
    layer = make_linear(kind)
    x = torch.randn(4, 5, H, dtype=torch.float64)
    expected = F.linear(x, adapted_weight(layer.base.weight, layer.lora, 0), layer.base.bias)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x[0, 0]), expected[0, 0])


EXPERTS = {
    "swiglu": {},
    "biases": {"bias": True},
    "oai": {"bias": True, "activation": "swiglu_oai", "interleaved": True},
    "soft caps": {"activation": CAPPED},
    "relu2": {"activation": "relu2"},
}


@kinds
@pytest.mark.parametrize("experts", EXPERTS.values(), ids=EXPERTS)
def test_experts(kind, experts):
    """Against Experts with weights of which each has its adapter's product in it."""
    layer = make_experts(kind, **experts)
    inputs = routed()
    full = Experts(E, H, CHANNELS, dtype=torch.float64, **experts)
    full.load_state_dict(layer.base.state_dict())
    weights = {}
    for name, lora in (("gate_up", layer.gate_up_lora), ("down", layer.down_lora)):
        weight = getattr(layer.base, name)
        weights[name] = torch.stack([adapted_weight(weight[e], lora, e) for e in range(E)])
    expected = torch.func.functional_call(full, weights, inputs)
    got = layer(*inputs)
    torch.testing.assert_close(got, expected)
    leaves = [p for p in layer.parameters() if p.requires_grad]
    dout = torch.randn_like(got)
    for a, b in zip(*(torch.autograd.grad(y, leaves, dout) for y in (got, expected)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["alpha", "rslora"])
def test_gradcheck(kind):
    """Not with DoRA's factors: its gradient takes the norm as a constant, which it is not."""
    linear, experts, (x, weights, plan) = make_linear(KINDS[kind], 2), make_experts(KINDS[kind]), routed()
    ids = torch.tensor([1, 0, 1, -1, 0])
    for layer, rest, names in (
        (linear, (ids,), "lora"),
        (experts, (weights, plan), "gate_up_lora down_lora"),
    ):
        leaves = {f"{n}.{f}": getattr(getattr(layer, n), f) for n in names.split() for f in "AB"}

        def call(x, *values, layer=layer, rest=rest, leaves=leaves):
            return torch.func.functional_call(layer, dict(zip(leaves, values, strict=True)), (x, *rest))

        assert torch.autograd.gradcheck(call, (x.clone().requires_grad_(), *leaves.values()))


def test_gradcheck_of_magnitudes():
    layer, ids = make_linear(KINDS["dora"], 2), torch.tensor([1, 0, 1, -1])
    x = torch.randn(4, H, dtype=torch.float64, requires_grad=True)

    def call(x, magnitude):
        return torch.func.functional_call(layer, {"lora.magnitude": magnitude}, (x, ids))

    assert torch.autograd.gradcheck(call, (x, layer.lora.magnitude))


@kinds
def test_a_new_adapter_changes_nothing(kind):
    base = nn.Linear(H, 10)
    x = torch.randn(4, H)
    torch.testing.assert_close(LoRALinear(base, rank=RANK, **kind)(x), base(x))
    experts, inputs = Experts(E, H, CHANNELS, dtype=torch.float64), routed()
    torch.testing.assert_close(LoRAExperts(experts, rank=RANK, **kind)(*inputs), experts(*inputs))


@pytest.mark.parametrize("layer", [make_linear, make_experts])
def test_small_magnitudes_are_as_exact_as_a_merged_weight(layer):
    """Where m is a hundredth of |W + c B A|, what DoRA takes away cancels all but a hundredth."""
    ours = layer({"dora": True}, bias=False)
    with torch.no_grad():
        for name, p in ours.named_parameters():
            p.mul_(0.01 if name.endswith("magnitude") else 1.0)
    given = (torch.randn(64, H, dtype=torch.float64),) if layer is make_linear else routed()
    exact, ours = ours(*given), ours.bfloat16()
    given = [t.bfloat16() if isinstance(t, torch.Tensor) else t for t in given]
    apart = error(ours(*given), exact)
    ours.merge()
    assert apart <= 2 * error(ours(*given), exact)


@kinds
def test_merge_and_unmerge(kind):
    linear, experts, inputs = make_linear(kind, 2), make_experts(kind), routed()
    x = torch.randn(4, H, dtype=torch.float64)
    before = [p.clone() for p in (*linear.parameters(), *experts.parameters())]
    y, z = linear(x, torch.ones(4, dtype=torch.int64)), experts(*inputs)
    weights = linear.base.weight, experts.base.gate_up, experts.base.down
    versions = [w._version for w in weights]  # by which copies of weights are kept
    linear.merge(1)
    experts.merge()
    assert all(w._version > version for w, version in zip(weights, versions, strict=True))
    torch.testing.assert_close(linear(x), y)
    torch.testing.assert_close(experts(*inputs), z)
    for layer in (linear, experts):
        with pytest.raises(ValueError, match="already merged"):
            layer.merge()
    with pytest.raises(ValueError, match="adapter_ids cannot choose another"):
        linear(x, torch.ones(4, dtype=torch.int64))
    linear.unmerge()
    experts.unmerge()
    after = (*linear.parameters(), *experts.parameters())
    assert all(map(torch.equal, before, after))
    with pytest.raises(ValueError, match="no adapter is merged"):
        linear.unmerge()


@kinds
def test_the_base_is_frozen_and_its_gradient_not_computed(kind, monkeypatch):
    product = "moe_aiter.kernels.grouped.gmm.weight_gradient"
    monkeypatch.setattr(product, lambda *_: pytest.fail("of the base"))
    layer, (x, weights, plan) = make_experts(kind, bias=True), routed()
    layer(x.requires_grad_(), weights.requires_grad_(), plan).sum().backward()
    assert all(p.grad is None for p in layer.base.parameters())
    assert all(p.grad is not None for name, p in layer.named_parameters() if "lora" in name)
    assert x.grad is not None and weights.grad is not None


def test_rank_dropout():
    """Whole ranks of a step, for all rows alike, and none when the layer is not in training."""
    layer = make_linear({"rank_dropout": 0.5}, bias=False)
    layer.lora.A.data.fill_(0)
    layer.lora.A.data[0, :, :RANK] = torch.eye(RANK)
    layer.lora.B.data.fill_(1)
    layer.base.weight.data.zero_()
    x = torch.zeros(3, H, dtype=torch.float64)
    x[:, :RANK] = torch.tensor([1.0, 10.0])
    seen = {tuple(layer(x)[:, 0].tolist()) for _ in range(100)}
    assert seen == {(v,) * 3 for v in (0.0, 2.0, 20.0, 22.0)}
    assert torch.equal(layer.eval()(x), x.new_full((3, 10), 11.0))


def test_dtypes_and_autocast():
    layer = make_linear({}, 2, dtype=torch.float32)
    x, ids = torch.randn(4, H), torch.tensor([0, 1, -1, 0])
    expected = layer(x, ids)
    layer.base.bfloat16()
    assert layer(x.bfloat16(), ids).dtype == torch.bfloat16  # factors in float32 above a base in bfloat16
    torch.testing.assert_close(layer(x.bfloat16(), ids).float(), expected, rtol=0.05, atol=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x, ids).dtype == torch.bfloat16


def test_in_a_moe():
    moe = MoE(H, CHANNELS, E, 2)
    x = torch.randn(2, 5, H)
    y = moe(x)
    moe.experts = LoRAExperts(moe.experts, rank=RANK)
    torch.testing.assert_close(moe(x), y)
    moe(x).sum().backward()
    assert moe.experts.down_lora.B.grad is not None and moe.experts.base.down.grad is None


def test_peft_layout_of_a_linear_layer():
    layer, other = make_linear(KINDS["dora"], 2), make_linear(KINDS["dora"], 2)
    state = layer.peft_state_dict(1, "q_proj.")
    names = "q_proj.lora_A.weight", "q_proj.lora_B.weight", "q_proj.lora_magnitude_vector"
    assert {k: tuple(v.shape) for k, v in state.items()} == dict(
        zip(names, ((RANK, H), (10, RANK), (10,)), strict=True)
    )
    other.load_peft_state_dict(state, 0, "q_proj.")
    assert torch.equal(other.lora.A[0], layer.lora.A[1])
    assert torch.equal(other.lora.magnitude[0], layer.lora.magnitude[1])


def test_peft_layout_of_experts():
    """A is expert-major, B is rank-major."""
    layer, other = make_experts({}), make_experts({})
    state = layer.peft_state_dict("mlp.experts.")
    assert {k: tuple(v.shape) for k, v in state.items()} == {
        "mlp.experts.base_layer.lora_A.weight": (E * RANK, H),
        "mlp.experts.base_layer.lora_B.weight": (2 * CHANNELS, RANK * E),
        "mlp.experts.lora_A.weight": (E * RANK, CHANNELS),
        "mlp.experts.lora_B.weight": (H, RANK * E),
    }
    for name, lora in (("base_layer.", layer.gate_up_lora), ("", layer.down_lora)):
        A, B = (state[f"mlp.experts.{name}lora_{f}.weight"] for f in "AB")
        for e in range(E):
            delta = B.view(-1, RANK, E)[:, :, e] @ A.view(E, RANK, -1)[e]
            torch.testing.assert_close(delta, lora.B[e] @ lora.A[e])
    other.load_peft_state_dict(state, "mlp.experts.")
    trained = [name for name in layer.state_dict() if "lora" in name]
    assert all(torch.equal(layer.state_dict()[name], other.state_dict()[name]) for name in trained)


def test_peft_refusals():
    layer = make_experts({})
    state = layer.peft_state_dict()
    with pytest.raises(KeyError, match=r"x.base_layer.lora_A.weight"):
        layer.load_peft_state_dict(state, "x.")
    with pytest.raises(ValueError, match=r"lora_B.weight is \(6, 8\) but the adapter needs \(8, 6\)"):
        layer.load_peft_state_dict(state | {"lora_B.weight": state["lora_B.weight"].mT})
    with pytest.raises(ValueError, match="PEFT has no DoRA for experts"):
        make_experts(KINDS["dora"]).peft_state_dict()


@pytest.mark.parametrize(
    "given, kind, message",
    [
        ((), ValueError, "adapter_ids must say which of 2 adapters"),
        ((torch.zeros(5, dtype=torch.int64),), ValueError, r"adapter_ids is \(5,\) but x is \(4, 8\)"),
        ((torch.zeros(4, 8, dtype=torch.int64),), ValueError, r"adapter_ids is \(4, 8\) but x is \(4, 8\)"),
        ((torch.zeros(4),), TypeError, "adapter_ids must be int32 or int64"),
        (([0, 1, 0, 1],), TypeError, "adapter_ids must be a tensor"),
        ((None, torch.tensor([4])), ValueError, "adapter_ids must say"),
        ((torch.tensor([0, 1]), torch.tensor([4])), ValueError, r"1 segments but adapter_ids is \(2,\)"),
    ],
)  # fmt: skip
def test_bad_input_is_named(given, kind, message):
    with pytest.raises(kind, match=message):
        make_linear({}, 2)(torch.zeros(4, H, dtype=torch.float64), *given)


@pytest.mark.parametrize(
    "wrong, kind, message",
    [
        ({"rank": 0}, ValueError, "rank must be at least 1, not 0"),
        ({"rank_dropout": 1.0}, ValueError, "rank_dropout must be at least 0 and less than 1, not 1.0"),
        ({"num_adapters": 0}, ValueError, "num_adapters must be at least 1"),
    ],
)
def test_bad_settings_are_named(wrong, kind, message):
    with pytest.raises(kind, match=message):
        LoRALinear(nn.Linear(4, 4), **{"rank": 2, **wrong})


def test_compiles_without_graph_breaks():
    linear, experts, inputs = make_linear({}, 2), make_experts({}), routed()
    several = randomized(LoRAExperts(experts.base, 2, rank=[3, 1]))
    ids = torch.tensor([0, 1, -1, 0, 1])
    for layer, args in ((linear, (inputs[0], ids)), (experts, inputs), (several, (*inputs, ids))):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*args), layer(*args))


@pytest.mark.gpu
@kinds
def test_experts_on_a_gpu(kind):
    def run(x, weights, *plan):
        return layer.to(x.dtype)(x, weights, plan)

    def reference(*inputs):
        with use("torch"):
            return run(*inputs)

    layer = make_experts(kind, "cuda", torch.bfloat16)
    x, weights, plan = routed("cuda", torch.bfloat16)
    assert_as_good_as_torch(run, reference, x, weights, *plan)
