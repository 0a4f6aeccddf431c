"""Under batch invariance the bits of a token depend on that token alone."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import moe_aiter
from moe_aiter import (
    Capacity,
    ExpertChoice,
    Experts,
    Forced,
    GroupLimit,
    LoRAExperts,
    MoE,
    OptimizedMoELayer,
    Router,
    Sinkhorn,
    TokenRounding,
    TopP,
    make_plan,
    op,
    patch_linear,
    quantize,
    route,
)
from moe_aiter.config import Settings
from moe_aiter.invariance import batch_invariant, invariant
from moe_aiter.torch_ops import TWIN

# the switch


@pytest.fixture(autouse=True)
def restored():
    before = moe_aiter.batch_invariance_enabled()
    yield
    moe_aiter.enable_batch_invariance(before)


def test_the_switch():
    assert not moe_aiter.batch_invariance_enabled()
    moe_aiter.enable_batch_invariance()
    assert moe_aiter.batch_invariance_enabled()
    moe_aiter.enable_batch_invariance(False)
    assert not moe_aiter.batch_invariance_enabled()


def test_the_environment():
    assert Settings.from_env({"MOE_AITER_BATCH_INVARIANT": "1"}).batch_invariant


class Witness(torch.nn.Module):
    """Experts that remember whether batch invariance is on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x, routing_weights, plan):
        self.seen.append(batch_invariant())
        return x * routing_weights.sum()


@pytest.mark.parametrize("on", [False, True])
def test_a_layer_has_its_own_answer(on):
    moe = MoE(8, 4, 4, 2, batch_invariant=on)
    moe.experts = Witness()
    moe(torch.randn(3, 8))
    assert moe.experts.seen == [on] and not batch_invariant()


def test_a_backward_pass_has_the_answer_of_its_forward_pass(monkeypatch):
    from moe_aiter.kernels.experts import cpu

    seen = []
    original = cpu.expert_loop_backward_op
    monkeypatch.setattr(
        cpu, "expert_loop_backward_op", lambda *i: (seen.append(batch_invariant()), original(*i))[1]
    )
    moe = MoE(8, 4, 4, 2)
    with invariant():
        out = moe(torch.randn(3, 8))
    out.sum().backward()
    assert seen == [True] and not batch_invariant()


# bits


SIZES = 1, 2, 7, 8, 31, 32, 100, 256, 1000, 1024
MANY, HIDDEN, EXPERTS, TOP_K = 4096, 64, 8, 2
DTYPES = torch.float32, torch.bfloat16, torch.float16
BITS = {4: torch.int32, 2: torch.int16}


def differing(fn, inputs, sizes=SIZES):
    """For each size and result of `fn`, how many rows have other bits than in a batch of all."""
    torch.manual_seed(1)
    inputs = [t.detach() for t in inputs]
    expected = fn(*(t.clone() for t in inputs))
    found = {}
    for size in sizes:
        rows = torch.randperm(len(inputs[0]))[:size]
        results = fn(*(t[rows].clone() for t in inputs))
        for number, (got, all_rows) in enumerate(zip(results, expected, strict=True)):
            kind = BITS[got.itemsize]
            others = got.contiguous().view(kind) != all_rows.contiguous().view(kind)[rows]
            if others.any():
                found[size, number] = int(others.flatten(1).any(1).sum())
    return found


def step(layer, wanted=True):
    """Return a function of x, dout and what the layer gets beside x: its result, in training and without
    gradients, and the gradients of x and of floats beside it."""

    def run(x, dout, *beside):
        with torch.no_grad():
            alone = layer(x, *beside)
        if not wanted:
            return [alone]
        leaves = [t.requires_grad_() for t in (x, *beside) if t.is_floating_point()]
        out = layer(x, *beside)
        out.backward(dout)
        return [out.detach(), alone, *(leaf.grad for leaf in leaves)]

    return run


def tokens(dtype, count=MANY):
    torch.manual_seed(0)
    return [torch.randn(count, HIDDEN).to(dtype) for _ in range(2)]


def routed(count=MANY):
    ids = torch.rand(count, EXPERTS).topk(TOP_K).indices
    return [ids, torch.rand(count, TOP_K)]


def small_moe(dtype=torch.float32, intermediate=40, **options):
    torch.manual_seed(0)
    return MoE(HIDDEN, intermediate, EXPERTS, TOP_K, dtype=dtype, batch_invariant=True, **options)


MOES = {
    "plain": {},
    "shared": {"bias": True, "shared_intermediate": 24, "shared_gate": True, "activation": "swiglu_oai"},
    "deepseek": {"score": "sigmoid", "choice": GroupLimit(4, 2), "selection_bias": True, "recompute": "z"},
    "latent": {"latent": 24, "score": "sqrt_softplus", "activation": "gelu"},
    "top-p": {"choice": TopP(0.6)},
    "dense gradient": {"dense_router_gradient": True},
    "fp8": {"fp8": "e4m3"},
    "fp8 blocks": {"fp8": "block", "score": "topk_softmax"},
}


@pytest.mark.parametrize(
    "name, dtype", [(name, DTYPES[(i + j) % 3]) for i, name in enumerate(MOES) for j in range(1 + (i < 2))]
)
def test_a_layer_with_its_router(name, dtype):
    assert differing(step(small_moe(dtype, **MOES[name])), tokens(dtype)) == {}


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="other libraries may sum in one order")
def test_bits_differ_without_it():
    moe = small_moe()
    moe.batch_invariant = False
    found = differing(step(moe), tokens(torch.float32), sizes=(1, 2))
    assert {number for _, number in found} == {0, 1, 2}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    moe = small_moe(torch.bfloat16)

    def layer(x):
        return checkpoint(moe, x, use_reentrant=use_reentrant) if torch.is_grad_enabled() else moe(x)

    inputs = tokens(torch.bfloat16, 256)
    assert differing(step(layer), inputs, sizes=(1, 7, 100)) == {}
    kept, again = (step(fn)(*(t.clone() for t in inputs)) for fn in (moe, layer))
    assert all(map(torch.equal, kept, again))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hooks_change_no_bits(dtype):
    """Such as those of FSDP2, which an engine has not."""
    moe, inputs = small_moe(dtype, shared_intermediate=24), tokens(dtype, 100)
    expected = step(moe)(*(t.clone() for t in inputs))
    moe.router.register_forward_hook(lambda *_: None)
    assert all(map(torch.equal, step(moe)(*(t.clone() for t in inputs)), expected))


def test_several_threads():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert differing(step(small_moe(shared_intermediate=24)), tokens(torch.float32), (1, 8, 100)) == {}
    finally:
        torch.set_num_threads(threads)


def lora(**options):
    torch.manual_seed(0)
    layer = LoRAExperts(Experts(EXPERTS, HIDDEN, 40), rank=4, **options)
    for factor in (layer.gate_up_lora.B, layer.down_lora.B):
        torch.nn.init.normal_(factor)
    return layer


def with_plan(layer):
    return lambda x, ids, weights: layer(x, weights, make_plan(ids, EXPERTS))


@pytest.mark.parametrize(
    "make, dtype",
    [
        (lambda: with_plan(lora()), torch.float32),
        (lambda: with_plan(lora(dora=True).bfloat16()), torch.bfloat16),
        (lambda: OptimizedMoELayer(HIDDEN, EXPERTS, 40, dtype=torch.float16), torch.float16),
        (lambda: OptimizedMoELayer(HIDDEN, EXPERTS, 40, activation="geglu"), torch.float32),
    ],
    ids=["lora", "dora", "optimized float16", "optimized geglu"],
)
def test_experts(make, dtype):
    layer = make()
    with invariant():
        assert differing(step(layer), [*tokens(dtype, 1024), *routed(1024)], sizes=(1, 7, 31, 100)) == {}


@pytest.mark.parametrize("kind", ["int8", "fp8", "nf4"])
def test_quantised_layers(kind):
    moe = small_moe(torch.bfloat16, 64, shared_intermediate=64).eval()
    quantize(moe, kind)
    assert differing(step(moe, wanted=kind == "nf4"), tokens(torch.bfloat16, 1024), (1, 8, 100)) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patched_linear_layers(dtype):
    linear, weight, original = nn.Linear(HIDDEN, HIDDEN, dtype=dtype), torch.randn(8, HIDDEN), F.linear
    with invariant(), patch_linear():
        assert differing(step(linear), tokens(dtype)) == {}
        assert differing(lambda x, _: [F.linear(x.float(), weight)], tokens(dtype)) == {}  # as a router's
    assert F.linear is original


def test_patched_linear_layers_of_float64():
    linear = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
    x = torch.randn(64, HIDDEN, dtype=torch.float64)
    with invariant(), patch_linear():
        assert all(torch.equal(linear(x[:size]), linear(x)[:size]) for size in (1, 2, 17))


def test_patched_linear_layers_under_autocast(monkeypatch):
    from moe_aiter.layers import linear as file

    original, seen = file.multiply_linear, []
    monkeypatch.setattr(file, "multiply_linear", lambda *i: (seen.append(i), original(*i))[1])
    with invariant(), patch_linear(), torch.autocast("cpu", torch.bfloat16):
        out = nn.Linear(HIDDEN, 8)(torch.randn(3, HIDDEN))
    assert seen and out.dtype == torch.bfloat16


def test_a_patched_product_with_a_vector():
    x, weight = torch.randn(3, HIDDEN), torch.randn(HIDDEN)
    expected = F.linear(x, weight)
    with invariant(), patch_linear():
        assert torch.equal(F.linear(x, weight), expected)


@pytest.mark.parametrize("switch", [False, True])
def test_a_graph_has_the_answer_of_its_layer(switch):
    moe, inputs = small_moe(torch.bfloat16), tokens(torch.bfloat16, 100)
    moe.batch_invariant = not switch
    moe_aiter.enable_batch_invariance(switch)
    torch._dynamo.reset()
    graphs = []

    def keep(graph, _):
        graphs.append(graph.code)
        return graph

    compiled = torch.compile(moe, fullgraph=True, backend="eager" if switch else "aot_eager", dynamic=True)
    whole = step(moe)(*(t.clone() for t in inputs))
    for size in (100, 3):
        few = step(compiled)(*(t[:size].clone() for t in inputs))
        assert all(torch.equal(a, b[:size]) for a, b in zip(few, whole, strict=True))
    torch.compile(moe, fullgraph=True, backend=keep)(inputs[0])
    assert TWIN in graphs[0] and batch_invariant() == switch


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_forced_tier_has_the_products_of_the_router(monkeypatch, compiled):
    moe, inputs = small_moe(bias=True, latent=24, shared_intermediate=24), tokens(torch.float32, 9)
    want = step(moe)(*(t.clone() for t in inputs))
    torch._dynamo.reset()
    forward = torch.compile(moe, fullgraph=True, backend="aot_eager") if compiled else moe
    monkeypatch.setattr(op._forced, "default", ("host", "MOE_AITER_BACKEND"))
    got = step(forward)(*inputs)
    torch.testing.assert_close(got, want)


@pytest.mark.full
def test_an_exported_graph_finds_its_ops(tmp_path):
    moe, x = small_moe(), torch.randn(9, HIDDEN)
    torch.export.save(torch.export.export(moe, (x,)), tmp_path / "moe.pt2")
    torch.save((x, moe(x)), tmp_path / "x.pt")
    program = """
import sys, torch
import moe_aiter

program, (x, out) = torch.export.load(sys.argv[1]), torch.load(sys.argv[2])
assert torch.equal(program.module()(x), out)
"""
    subprocess.run([sys.executable, "-c", program, tmp_path / "moe.pt2", tmp_path / "x.pt"], check=True)


# what cannot be invariant


@pytest.mark.filterwarnings("ignore:ExpertChoice")
@pytest.mark.parametrize("kind", [ExpertChoice, Forced, Sinkhorn, TokenRounding])
def test_a_choice_that_compares_tokens_is_refused(kind):
    choice = kind()
    reason = f"batch invariance is on, but {kind.__name__}.* own scores alone"
    with pytest.raises(ValueError, match=reason):
        MoE(8, 4, 4, 2, choice=choice, renormalize=False, batch_invariant=True)
    with invariant(), pytest.raises(ValueError, match=reason):
        route(torch.randn(6, 4), 2, choice=choice, renormalize=False)


@pytest.mark.parametrize("value", ["no", 1, None])
def test_only_a_flag_is_taken(value):
    moe = MoE(8, 8, 4, 2)
    with pytest.raises(TypeError, match="batch_invariant"):
        MoE(8, 8, 4, 2, batch_invariant=value)
    with pytest.raises(TypeError, match="batch_invariant"):
        moe.batch_invariant = value
    assert moe.batch_invariant is False


def test_capacity_is_refused():
    with pytest.raises(ValueError, match=r"batch invariance is on, but Capacity.* other tokens"):
        MoE(8, 4, 4, 2, capacity=Capacity(1.0), batch_invariant=True)
    moe = MoE(8, 4, 4, 2, capacity=Capacity(1.0))
    with invariant(), pytest.raises(ValueError, match="other tokens"):
        moe(torch.randn(3, 8))


def test_jitter_is_refused_in_training():
    alone = MoE(8, 4, 4, 2, jitter=0.1, batch_invariant=True)  # which an engine makes too
    with invariant():
        by_switch = MoE(8, 4, 4, 2, jitter=0.1), Router(8, 4, 2, jitter=0.1)
    for module in (alone, *by_switch):
        with invariant(module is not alone):
            module.eval()(torch.randn(3, 8))
            with pytest.raises(ValueError, match=r"is on, but jitter is 0\.1, which is random noise"):
                module.train()(torch.randn(3, 8))


@pytest.mark.parametrize("name", ["dropout", "rank_dropout"])
def test_dropout_of_adapters_is_refused_in_training(name):
    moe = MoE(8, 4, 4, 2)
    moe.experts = LoRAExperts(Experts(4, 8, 4), rank=2, **{name: 0.5})
    with invariant():
        moe.eval()(torch.randn(3, 8))
        with pytest.raises(ValueError, match=f"{name} .*0.5"):
            moe.train()(torch.randn(3, 8))
