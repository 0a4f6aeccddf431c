"""On a GPU a token has the same bits in any batch: published sizes, both tiers, 4 to 32 bits, adapters."""

import pytest
import torch
from same_bits import differences, results
from shapes import CAPPED, LIMITED

from moe_aiter import Experts, LoRAExperts, MoE, make_plan, quantize, use
from moe_aiter.bench.problem import SHAPES, Shape
from moe_aiter.invariance import invariant
from moe_aiter.kernels.base.activations import ACTIVATIONS

pytestmark = pytest.mark.gpu
TOKENS = (1, 2, 7, 8, 31, 32, 100, 256, 1000, 1024, 4096, 8192)
ALL = 32768  # tokens, of which the others are some
NAMES = ("A", "B", "C", "D", "E", "gpt-oss", "dsv3")
MODELS = {name: SHAPES[name] for name in NAMES} | {"Qwen3-Next": Shape(4096, 2048, 512, 512, 10)}
models = pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
tiers = pytest.mark.parametrize("tier", ["auto", "triton"])
LORA = {"rank": 16}
KINDS = {
    "16 bits": {},
    "recomputed": {"recompute": "z"},
    "in chunks": {"row_chunks": 4},
    "fp8": {"fp8": "e4m3"},
    "fp8, all products": {"fp8": "e4m3_all"},
    "fp8, blocks": {"fp8": "block"},
    "4 bits": {"format": "nf4"},
    "lora": {"lora": LORA},
    "4 bits, lora": {"format": "nf4", "lora": LORA},
    "8 bits for inference": {"format": "fp8"},
}


def build(shape, device="cuda", dtype=torch.bfloat16, format=None, lora=None, **options):
    """The experts of a layer, frozen but for adapters."""
    _, H, inner, E, _ = shape.sizes
    how = {"activation": shape.activation, "bias": shape.bias, "interleaved": shape.interleaved}
    experts = Experts(E, H, inner, **how, **options, device=device, dtype=dtype).requires_grad_(False)
    if format is not None:
        experts = quantize(experts, format)
    if lora is None:
        return experts
    experts = LoRAExperts(experts, **lora)
    for p in experts.parameters():
        if p.requires_grad:  # B is zeros at first
            torch.nn.init.normal_(p, std=0.1)
    return experts.requires_grad_(False)


def batch(shape, num_tokens=ALL, device="cuda", dtype=torch.bfloat16):
    """Tokens, routing weights, experts, and the gradient of the output."""
    x = torch.randn(num_tokens, shape.hidden, device=device, dtype=dtype, requires_grad=True)
    logits = torch.randn(num_tokens, shape.num_experts, device=device)
    logits[:, 0] += 2  # groups of different sizes
    weights, ids = logits.softmax(1).topk(shape.top_k)
    ids[::7, -1] = -1  # dropped
    return (x, weights.requires_grad_(), ids), torch.randn_like(x)


def given_routing(experts, shape):
    return lambda x, weights, ids: experts(x, weights, make_plan(ids, shape.num_experts))


def check(layer, leaves, dout, sizes=TOKENS):
    """Compare random tokens, in random places, with the same tokens of the whole batch."""
    device, wrong = dout.device if dout is not None else leaves[0].device, []
    whole = results(layer, leaves, dout, torch.arange(len(leaves[0]), device=device))
    for T in sizes:
        tokens = torch.randperm(len(leaves[0]), device=device)[:T]
        said = differences(results(layer, leaves, dout, tokens), whole, tokens)
        wrong += [f"T = {T}: {said}"] if said else []
        if dout is not None:  # inference has the bits of training
            said = differences(results(layer, leaves, None, tokens), whole, tokens)
            wrong += [f"T = {T}, inference: {said}"] if said else []
    assert not wrong, "\n".join(wrong)


@pytest.fixture(autouse=True)
def room(request):
    """A model of tens of gigabytes runs when no other one does."""
    shape = getattr(request.node, "callspec", None) and request.node.callspec.params.get("shape")
    if shape == SHAPES["dsv3"]:
        request.getfixturevalue("most_of_the_gpu")


@models
@tiers
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.pairwise
def test_given_routing(shape, tier, kind, no_debug):
    experts = build(shape, **kind)
    leaves, dout = batch(shape)
    trains = kind.get("format") != "fp8"
    with use(tier), invariant():
        check(given_routing(experts, shape), leaves, dout if trains else None)


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")


@pytest.mark.parametrize("activation", [*ACTIVATIONS, LIMITED, CAPPED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_few_rows_on_hopper(activation, dtype, hopper, no_debug):
    """The portable kernel of few rows and Hopper's own: a bias, and each activation."""
    shape = Shape(4096, 512, 256, 16, 2, bias=True, activation=activation)
    leaves, dout = batch(shape, 4096, dtype=dtype)
    leaves = leaves[0], leaves[1].detach(), leaves[2]
    with invariant():
        check(given_routing(build(shape, dtype=dtype), shape), leaves, dout, (1, 8, 64, 100, 1000))


@models
def test_hopper_needs_no_switch(shape, hopper, no_debug):
    """The forced tier of 16 bits and given routing; what is chosen for few tokens has bits of its own."""
    leaves, dout = batch(shape)
    with use("hopper"):
        check(given_routing(build(shape), shape), (leaves[0], leaves[1].detach(), leaves[2]), dout)


@models
@tiers
def test_with_its_router(shape, tier, no_debug):
    _, H, inner, E, k = shape.sizes
    how = {"activation": shape.activation, "interleaved": shape.interleaved}
    where = {"device": "cuda", "dtype": torch.bfloat16}
    moe = MoE(H, inner, E, k, **how, bias=shape.bias, batch_invariant=True, **where)
    (x, *_), dout = batch(shape)
    with use(tier):
        check(moe.requires_grad_(False), (x,), dout)


@pytest.mark.parametrize("name", ["C", "D", "gpt-oss"])
def test_in_a_graph(name, no_debug):
    """The tokens of a graph have the bits of the whole batch."""
    shape = MODELS[name]
    _, H, inner, E, k = shape.sizes
    where = {"device": "cuda", "dtype": torch.bfloat16}
    how = {"activation": shape.activation, "interleaved": shape.interleaved, "bias": shape.bias}
    moe = MoE(H, inner, E, k, **how, batch_invariant=True, **where)
    x = torch.randn(4096, H, **where)
    with torch.no_grad():
        whole = moe(x)
        for T in (1, 8, 64):
            static = x[:T].clone()
            moe(static)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = moe(static)
            static.copy_(x[100 : 100 + T])
            graph.replay()
            assert out.equal(whole[100 : 100 + T]), T


@models
def test_float32(shape, no_debug):
    few = Shape(4096, shape.hidden, shape.intermediate, min(shape.num_experts, 16), min(shape.top_k, 4))
    leaves, dout = batch(few, 4096, dtype=torch.float32)
    with invariant():
        layer = given_routing(build(few, dtype=torch.float32), few)
        check(layer, leaves, dout, [T for T in TOKENS if T <= 1024])


@pytest.mark.parametrize("on", [False, True], ids=["as it comes", "invariant"])
@pytest.mark.parametrize("router", [torch.bfloat16, torch.float32], ids=str)
def test_forced_hopper(router, on, hopper, no_debug):
    """A forced Hopper tier does not refuse the router's products, nor those of biases, which are float32."""
    where = {"device": "cuda", "dtype": torch.bfloat16}
    moe = MoE(512, 256, 16, 2, bias=True, batch_invariant=on, **where)
    moe.router.to(router)
    x, dout = torch.randn(2, 300, 512, **where)
    grads = []
    for tier in ("auto", "hopper"):
        with use(tier):
            leaf = x.clone().requires_grad_()
            out = moe(leaf)
            grads.append((out.detach(), *torch.autograd.grad(out, (leaf, *moe.parameters()), dout)))
    for ours, auto in zip(*reversed(grads), strict=True):
        torch.testing.assert_close(ours, auto, rtol=1e-2, atol=1e-2 * auto.abs().max().item())
