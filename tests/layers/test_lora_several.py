"""Several adapters of several ranks at once, beside a loop over tokens and beside layers of a single one."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from moe_aiter import Experts, LoRAExperts, LoRALinear, MoE, make_plan, quantize
from moe_aiter.optim import Muon, muon_groups

from .test_lora import CHANNELS, E, H, randomized, routed

RANKS, ALPHAS = [4, 1, 2], [3.0, 5.0, None]
N = len(RANKS)
IDS = torch.tensor([1, -1, 0, 1, 0])  # of the tokens of `routed`; the last adapter has none


def linear(dtype=torch.float64, **lora):
    lora = {"rank": RANKS, "alpha": ALPHAS} | lora
    return randomized(LoRALinear(nn.Linear(H, 10, dtype=dtype), N, **lora))


def experts(dtype=torch.float64, format=None, how=None, **lora):
    lora = {"rank": RANKS, "alpha": ALPHAS} | lora
    moe = MoE(64, 64, E, 2, dtype=dtype, **how or {})
    if format is None:
        return randomized(LoRAExperts(Experts(E, H, CHANNELS, dtype=dtype, **how or {}), N, **lora))
    return randomized(LoRAExperts(quantize(moe, format).experts, N, **lora))


def factors(lora, n, pairs):
    """c B A of an adapter, as its rank and alpha say, for each of the pairs."""
    rank = RANKS[n]
    scaling = (rank if ALPHAS[n] is None else ALPHAS[n]) / (rank**0.5 if lora.rslora else rank)
    return [scaling * lora.B[p][:, :rank] @ lora.A[p][:rank] for p in pairs]


def token_loop(layer, x, s, plan, ids, weights):
    """Each token of each expert by its own weights, with its own adapter."""
    base, (order, _, sizes) = layer.base, plan
    changes = [
        [factors(lora, n, range(n, E * N, N)) for n in range(N)]
        for lora in (layer.gate_up_lora, layer.down_lora)
    ]
    out = [torch.zeros_like(row) for row in x]
    experts_of = torch.arange(E).repeat_interleave(sizes).tolist()
    for e, c in zip(experts_of, order.tolist(), strict=False):
        t, n = c // 2, int(ids[c // 2])
        up, down = (w[e] if n < 0 else w[e] + changes[i][n][e] for i, w in enumerate(weights))
        z = up @ x[t] + (0 if base.gate_up_bias is None else base.gate_up_bias[e])
        gate, linear = z.chunk(2)
        y = down @ (F.silu(gate) * linear) + (0 if base.down_bias is None else base.down_bias[e])
        out[t] = out[t] + s[t, c % 2] * y
    return torch.stack(out)


def same(got, expected, leaves, **how):
    """The result, and the gradients of these tensors."""
    torch.testing.assert_close(got, expected, **how)
    dout = torch.randn_like(got)
    both = (torch.autograd.grad(y, leaves, dout) for y in (got, expected))
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b, **how)


def trained(layer):
    return [p for p in layer.parameters() if p.requires_grad]


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ids", [IDS, IDS.int(), IDS.clamp(min=0), torch.full((5,), -1)])
@pytest.mark.pairwise
def test_experts_beside_a_loop_over_tokens(rslora, bias, ids):
    layer, (x, s, plan) = experts(how={"bias": bias}, rslora=rslora), routed()
    x, s = x.requires_grad_(), s.requires_grad_()
    expected = token_loop(layer, x, s, plan, ids, (layer.base.gate_up, layer.base.down))
    same(layer(x, s, plan, ids), expected + 0 * sum(p.sum() for p in trained(layer)), [x, s, *trained(layer)])


@pytest.mark.parametrize("format", ["nf4", "mxfp4"])
def test_experts_of_4_bits(format):
    layer, (_, s, plan) = experts(torch.float32, format), routed(dtype=torch.float32)
    x = torch.randn(5, 64, requires_grad=True)
    weights = layer.base.gate_up.dequantize(), layer.base.down.dequantize()
    expected = token_loop(layer, x, s, plan, IDS, weights)
    same(layer(x, s, plan, IDS), expected, [x, *trained(layer)], rtol=1e-5, atol=1e-4)


def test_linear_beside_a_loop_over_tokens():
    layer, x = linear(), torch.randn(5, H, dtype=torch.float64, requires_grad=True)
    weights = [layer.base.weight + factors(layer.lora, n, [n])[0] for n in range(N)] + [layer.base.weight]
    expected = torch.stack([F.linear(x[t], weights[n], layer.base.bias) for t, n in enumerate(IDS)])
    same(layer(x, IDS), expected, [x, *trained(layer)])


@pytest.mark.parametrize("n", range(N))
def test_one_adapter_for_all_tokens(n):
    """As a layer of this adapter alone, whose factors it takes from PEFT's format and gives back."""
    inputs = routed(dtype=torch.float32)
    for several, given in ((linear(torch.float32), inputs[:1]), (experts(torch.float32), inputs)):
        one = type(several)(several.base, rank=RANKS[n], alpha=ALPHAS[n])
        state = several.peft_state_dict(adapter=n)
        one.load_peft_state_dict(state)
        torch.testing.assert_close(several(*given, torch.full((5,), n)), one(*given), rtol=1e-6, atol=1e-6)
        assert all(torch.equal(t, state[name]) for name, t in one.peft_state_dict().items())


def ragged(layer):
    """Where factors are padding."""
    return [
        (p, torch.stack([torch.arange(max(RANKS)) >= rank for rank in RANKS]).repeat(len(p) // N, 1))
        for p in trained(layer)
    ]


OPTIMIZERS = {
    "adamw": lambda layer: torch.optim.AdamW(trained(layer), lr=0.1, weight_decay=0.1),
    "sgd": lambda layer: torch.optim.SGD(trained(layer), lr=0.1, momentum=0.9, weight_decay=0.1),
    "muon": lambda layer: Muon(muon_groups(layer), lr=0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("new", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("make", [linear, experts])
def test_padding_stays_zero(make, new):
    layer, inputs = make(), routed()
    for p, padding in ragged(layer):
        p.data.mul_(~(padding[..., None] if p.shape[1] == max(RANKS) else padding[:, None]))
    optimizer = new(layer)
    for _ in range(3):
        optimizer.zero_grad()
        layer(*(inputs if make is experts else inputs[:1]), IDS.roll(1)).square().sum().backward()
        optimizer.step()
    for p, padding in ragged(layer):
        where = (padding[..., None] if p.shape[1] == max(RANKS) else padding[:, None]).expand_as(p)
        assert not p[where].any() and not p.grad[where].any() and p[~where].all()


@pytest.mark.parametrize("make", [linear, experts])
def test_an_adapter_without_tokens_is_not_touched(make):
    layer, inputs = make(), routed()
    before = layer.peft_state_dict(adapter=2), layer.peft_state_dict(adapter=0)
    optimizer = torch.optim.AdamW(trained(layer), lr=0.1, weight_decay=0)
    for _ in range(3):
        optimizer.zero_grad()
        layer(*(inputs if make is experts else inputs[:1]), IDS).square().sum().backward()
        optimizer.step()
    after = layer.peft_state_dict(adapter=2), layer.peft_state_dict(adapter=0)
    assert all(torch.equal(after[0][name], t) for name, t in before[0].items())
    assert not any(torch.equal(after[1][name], t) for name, t in before[1].items())


@pytest.mark.parametrize("make", [linear, experts])
@pytest.mark.parametrize("how", [{"alpha": 7.0}, {"alpha": 7.0, "rslora": True}, {}])
def test_a_smaller_rank_in_a_layer_of_a_larger_one(make, how):
    """Its scaling is its own, a state dict keeps it, and a cast to bfloat16 and back does."""
    small, layer, inputs = make(rank=2, alpha=None), make(rank=5, alpha=3.0), routed()
    scaling = how.get("alpha", 3.0) / (2**0.5 if how.get("rslora") else 2)
    given = (*(inputs if make is experts else inputs[:1]), torch.full((5,), 1))
    layer.base.load_state_dict(small.base.state_dict())
    others = layer.peft_state_dict(adapter=0)
    state = small.peft_state_dict(adapter=1)
    layer.load_peft_state_dict(state, adapter=1, **how)
    expected = type(small)(small.base, rank=2, alpha=2 * scaling)
    expected.load_peft_state_dict(state)
    torch.testing.assert_close(layer(*given), expected(*given[:-1]))
    again = make(rank=5, alpha=3.0)
    again.load_state_dict(layer.state_dict())
    again = again.bfloat16().double()
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(*given), layer(*given))
    for whole, part in (
        (layer.peft_state_dict(adapter=1), state),
        (layer.peft_state_dict(adapter=0), others),
    ):
        assert whole.keys() == part.keys() and all(torch.equal(whole[name], part[name]) for name in part)
    scales = [name for name in layer.state_dict() if name.endswith("scales")]
    assert scales and not any(name in scales for name in small.state_dict())


@pytest.mark.parametrize("make", [linear, experts])
def test_a_state_of_before_a_smaller_adapter(make):
    layer, small = make(rank=4, alpha=None), make(rank=2, alpha=None)
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    layer.load_peft_state_dict(small.peft_state_dict())
    layer.load_state_dict(before)
    assert layer.state_dict().keys() == before.keys()
    state = make().state_dict()
    with pytest.raises(RuntimeError, match="scales"):
        make().load_state_dict({name: t for name, t in state.items() if not name.endswith("scales")})


def test_pickles_of_before_ranks():
    """Of whole layers."""
    layers = linear(rank=2, alpha=3.0), LoRAExperts(Experts(E, H, CHANNELS), rank=2, alpha=3.0)
    old = copy.deepcopy(layers)
    for factors_of in (old[0].lora, old[1].gate_up_lora, old[1].down_lora):
        for name in ("adapters", "ranks", "alphas"):
            delattr(factors_of, name)
        del factors_of._buffers["scales"]
    for layer, again in zip(layers, pickle.loads(pickle.dumps(old)), strict=True):
        assert again.num_adapters == layer.num_adapters
        n = layer.num_adapters - 1
        assert again.peft_state_dict(adapter=n).keys() == layer.peft_state_dict(adapter=n).keys()
        again.load_peft_state_dict(layer.peft_state_dict(adapter=n), adapter=n)
        assert again.state_dict().keys() == layer.state_dict().keys()


def test_scales_stay_exact_in_bfloat16():
    layer = linear(alpha=[1.0, 1 / 3, 3.0]).bfloat16()
    assert layer.lora.scales.dtype == torch.float64 and layer.lora.scales[1, 0].item() == 1 / 3


@pytest.mark.parametrize("make", [linear, experts])
def test_loads_that_are_refused_change_nothing(make):
    layer, larger = make(rank=[2, 1, 2], alpha=None), make(rank=4, alpha=None)
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    state = larger.peft_state_dict()
    name = next(name for name in state if name.endswith("lora_A.weight"))
    with pytest.raises(ValueError, match=rf"{name} is .* but the adapter has rows for .*1 to 2"):
        layer.load_peft_state_dict(state)
    with pytest.raises(ValueError, match="alpha must be finite, not inf"):
        layer.load_peft_state_dict(layer.peft_state_dict(), alpha=float("inf"))
    if make is linear:
        with pytest.raises(ValueError, match="lora_magnitude_vector, an adapter with DoRA"):
            layer.load_peft_state_dict(linear(dora=True).peft_state_dict(1))
    with pytest.raises(IndexError, match=f"adapter is {N}, but the adapters are 0 to {N - 1}"):
        layer.load_peft_state_dict(layer.peft_state_dict(), adapter=N)
    with pytest.raises(KeyError, match=r"state has no .*lora_A.weight', but 'model.*give the prefix"):
        layer.load_peft_state_dict({f"model.{name}": t for name, t in layer.peft_state_dict().items()})
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())


def test_dora_of_several_ranks():
    layer, x = linear(dora=True), torch.randn(5, H, dtype=torch.float64)
    rows = []
    for row, n in zip(x, IDS.tolist(), strict=True):
        full = layer.base.weight + (factors(layer.lora, n, [n])[0] if n >= 0 else 0)
        full = full if n < 0 else full * (layer.lora.magnitude[n] / full.norm(dim=1))[:, None]
        rows.append(F.linear(row, full, layer.base.bias))
    torch.testing.assert_close(layer(x, IDS), torch.stack(rows))


def test_merge_of_one_adapter():
    layer, inputs = experts(), routed()
    expected = layer(*inputs, torch.full((5,), 1))
    layer.merge(1)
    torch.testing.assert_close(layer(*inputs), expected)
    with pytest.raises(ValueError, match="adapter_ids cannot choose another"):
        layer(*inputs, IDS)
    layer.unmerge()
    assert not torch.equal(layer(*inputs, IDS), expected)


def test_a_single_adapter_for_some_tokens():
    layer, inputs = experts(), routed()
    one = randomized(LoRAExperts(layer.base, rank=2))
    expected = torch.where((IDS >= 0)[:, None], one(*inputs), layer.base(*inputs))
    torch.testing.assert_close(one(*inputs, IDS.clamp(max=0)), expected)
    with pytest.raises(ValueError, match="a single adapter with dora"):
        LoRAExperts(layer.base, rank=2, dora=True)(*inputs, IDS)


def test_rank_dropout():
    """Half of the ranks of each adapter, the others twice as much: on average the same."""
    layer, inputs = experts(rank_dropout=0.5), routed()
    scales = torch.stack([layer.gate_up_lora.local_factors(layer.base.gate_up)[2] for _ in range(200)])
    assert {*(scales[:, 0, 0] / layer.gate_up_lora.scales[0, 0]).tolist()} == {0.0, 2.0}
    assert not torch.equal(layer(*inputs, IDS), layer(*inputs, IDS))
    assert torch.equal(layer.eval()(*inputs, IDS), layer(*inputs, IDS))


def adapted_moe(dtype=torch.float32):
    moe = MoE(H, CHANNELS, E, 2, shared_intermediate=4, latent=4, dtype=dtype)
    moe.experts = LoRAExperts(moe.experts, N, rank=RANKS)
    moe.shared.down = LoRALinear(moe.shared.down, N, rank=RANKS)
    moe.from_latent = LoRALinear(moe.from_latent, N, rank=RANKS)
    return randomized(moe)


def test_in_a_moe():
    """Ids of tokens or of sequences; each sequence as in a batch of its own, with an adapter of its own."""
    moe, x = adapted_moe(), torch.randn(3, 5, H)
    ids = torch.tensor([1, -1, 0])
    whole = moe(x, adapter_ids=ids)
    assert torch.equal(moe(x, adapter_ids=ids[:, None].expand(3, 5)), whole)
    for i in range(3):
        torch.testing.assert_close(moe(x[i], adapter_ids=ids[i].expand(5)), whole[i])
    other = moe(x, adapter_ids=torch.tensor([1, -1, 2]))
    assert torch.equal(other[:2], whole[:2]) and not torch.equal(other[2], whole[2])
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1, 2:] = False
    masked = moe(x, mask=mask, adapter_ids=ids)
    torch.testing.assert_close(masked[mask], whole[mask])
    assert not masked[~mask].any()


@pytest.mark.parametrize(
    "wrap", [checkpoint_wrapper, lambda m: torch.compile(m, backend="eager")], ids=["checkpoint", "compile"]
)
@pytest.mark.parametrize("n", [1, 2])
def test_a_wrapped_shared_expert_gets_the_ids(n, wrap):
    moe = MoE(H, 8, num_experts=E, top_k=2, shared_intermediate=8)
    moe.shared.gate_up = LoRALinear(moe.shared.gate_up, n, rank=2)
    randomized(moe)
    x, ids = torch.randn(5, H), torch.tensor([-1, 0, -1, 0, 0])
    expected = moe(x, adapter_ids=ids)
    moe.shared = wrap(moe.shared)
    torch.testing.assert_close(moe(x, adapter_ids=ids), expected)


def test_checkpointing_and_autocast():
    moe, x, ids = adapted_moe(), torch.randn(2, 5, H, requires_grad=True), torch.tensor([1, 0])

    def call(x):
        return moe(x, adapter_ids=ids)

    want = call(x)
    same(checkpoint(call, x, use_reentrant=False), want, [x, *trained(moe.experts)])
    for module in moe.experts.modules():  # as FSDP2 and offloading have them
        module.register_forward_pre_hook(lambda *_: None)
    same(call(x), call(x), [x, *trained(moe.experts)])
    torch.testing.assert_close(call(x), want)
    with torch.autocast("cpu", torch.bfloat16):
        low = moe(x, adapter_ids=ids)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(dtype):
    """As near to float64 as a layer of one adapter."""
    exact, inputs = experts(alpha=8.0), routed()
    low = experts(dtype, alpha=8.0)
    low.load_state_dict(exact.state_dict())
    given = [t.to(dtype) if isinstance(t, torch.Tensor) else t for t in inputs]
    got, want = low(*given, IDS), exact(*inputs, IDS)
    torch.testing.assert_close(got.double(), want, rtol=0.05, atol=0.05 * want.abs().max().item())


@pytest.mark.parametrize(
    "wrong, kind, message",
    [
        ({"rank": [2, 3]}, ValueError, r"rank has 2 numbers for 3 adapters: \[2, 3\]"),
        ({"rank": [2, 0, 1]}, ValueError, "rank must be at least 1, not 0"),
        ({"rank": [2, 1.5, 1]}, TypeError, "rank must be an int, not float"),
        ({"rank": 2, "alpha": [1.0]}, ValueError, "alpha has 1 numbers for 3 adapters"),
        ({"rank": 2, "alpha": [1.0, "2", 3.0]}, TypeError, "alpha must be a number, not str"),
        ({"rank": 2, "dora": True}, ValueError, "dora=True, but num_adapters is 3"),
        ({"rank": 2, "num_adapters": 0}, ValueError, "num_adapters must be at least 1, not 0"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(wrong, kind, message):
    with pytest.raises(kind, match=message):
        LoRAExperts(Experts(E, H, CHANNELS), **{"num_adapters": N, **wrong})


@pytest.mark.parametrize(
    "ids, kind, message",
    [
        (None, ValueError, "adapter_ids must say which of 3 adapters"),
        (IDS[:4], ValueError, r"x is \(T=5, H\) but adapter_ids is \(T=4,\)"),
        (IDS[:, None], ValueError, r"adapter_ids must be \(T\)"),
        (IDS.double(), TypeError, "adapter_ids must be int32 or int64"),
        (IDS.tolist(), TypeError, "adapter_ids must be a tensor"),
        (IDS + 2, ValueError, "adapter_ids holds 3 but there are 3 adapters"),
    ],
)  # fmt: skip
def test_bad_ids_are_named(ids, kind, message):
    with pytest.raises(kind, match=message):
        experts()(*routed(), ids)


@pytest.mark.parametrize("ids", [torch.tensor(1), torch.tensor([0, 1, 0])])
def test_bad_ids_of_a_moe_are_named(ids):
    with pytest.raises(ValueError, match=r"adapter_ids is .* but x is \(2, 5, 8\)"):
        adapted_moe()(torch.randn(2, 5, H), adapter_ids=ids)
    moe = MoE(H, CHANNELS, E, 2, dense_router_gradient=True)
    moe.experts = LoRAExperts(moe.experts, N, rank=2)
    with pytest.raises(ValueError, match="dense_router_gradient"):
        moe(torch.randn(5, H), adapter_ids=IDS)


def test_no_tokens():
    layer, x = experts(), torch.zeros(0, H, dtype=torch.float64, requires_grad=True)
    plan = make_plan(torch.zeros(0, 2, dtype=torch.int64), E)
    layer(x, x.new_zeros(0, 2), plan, torch.zeros(0, dtype=torch.int64)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in trained(layer))


@pytest.mark.gpu
def test_a_cuda_graph_takes_other_adapters(no_debug):
    layer, ids = experts(torch.float32).cuda(), IDS.cuda()
    x, s, plan = routed("cuda", torch.float32)

    def run():
        out = layer(x, s, plan, ids)
        return out, *torch.autograd.grad(out.sum(), trained(layer))

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for shift in range(3):
        ids.copy_(IDS.roll(shift))
        graph.replay()
        got = [t.clone() for t in results]
        assert all(torch.equal(a, b) for a, b in zip(got, run(), strict=True))
