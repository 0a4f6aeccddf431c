"""OptimizedMoELayer: the double loop, the example it comes from, and training it."""

import copy

import pytest
import torch
from check import assert_as_good_as_torch, with_gradients
from layers.double_loop import ACTIVATIONS, GATED, experts_loop
from torch.utils.checkpoint import checkpoint

from moe_aiter.kernels.experts.mlp import expert_mlp
from moe_aiter.layers.optimized import OptimizedMoELayer
from moe_aiter.routing.plan import make_plan

H, E, F, T, K = 12, 5, 10, 17, 2


def build(device="cpu", dtype=torch.float32, scaled=True, **options):
    layer = OptimizedMoELayer(H, E, F, device=device, dtype=dtype, **options)
    if scaled:  # so that an error of one weight in ten thousand would not drown
        with torch.no_grad():
            layer.w1.mul_(H**-0.5)
            layer.w2.mul_(F**-0.5)
    return layer


def draw(device, dtype=torch.float32):
    x = torch.randn(T, H).to(device, dtype)
    return x, torch.randint(E, (T, K)).to(device), torch.rand(T, K).to(device, dtype)


def compare(layer, *inputs):
    def ours(x, expert_ids, routing_weights, w1, w2):
        return torch.func.functional_call(layer, {"w1": w1, "w2": w2}, (x, expert_ids, routing_weights))

    def loop(x, expert_ids, routing_weights, w1, w2):
        params = {"gate_up": w1.mT, "down": w2.mT}
        return experts_loop(x, expert_ids, routing_weights, params, layer.activation)

    assert_as_good_as_torch(with_gradients(ours), with_gradients(loop), *inputs, layer.w1, layer.w2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_against_the_loop(device, activation, dtype):
    layer = build(device, dtype, activation=activation)
    assert layer.w1.shape == (E, H, 2 * F if activation in GATED else F) and layer.w2.shape == (E, F, H)
    compare(layer, *draw(device, dtype))


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "change",
    [
        lambda ids: torch.full_like(ids, 3),
        lambda ids: ids[:, :1].expand(-1, K),
        lambda ids: ids.where(ids > 1, -1),
        lambda ids: torch.full_like(ids, -1),
        lambda ids: ids[:0],
        lambda ids: ids[:, :1],
    ],
    ids=["one expert", "duplicates", "dropped", "all dropped", "no tokens", "top 1"],
)
def test_ids(device, change, ids_dtype):
    x, expert_ids, routing_weights = draw(device)
    expert_ids = change(expert_ids).to(ids_dtype)
    compare(
        build(device),
        x[: len(expert_ids)],
        expert_ids,
        routing_weights[: len(expert_ids), : expert_ids.shape[1]],
    )


def test_gradcheck():
    layer = build(dtype=torch.float64)
    x, expert_ids, routing_weights = draw("cpu", torch.float64)
    inputs = [t.detach().requires_grad_() for t in (x, routing_weights, layer.w1, layer.w2)]

    def fn(x, routing_weights, w1, w2):
        return torch.func.functional_call(layer, {"w1": w1, "w2": w2}, (x, expert_ids, routing_weights))

    assert torch.autograd.gradcheck(fn, inputs, fast_mode=True)


def test_the_example_it_comes_from():
    """Positional sizes, the defaults, `.forward`, (tokens, top_k) ids and weights; float16 on a GPU."""
    layer = OptimizedMoELayer(512, 8, 128)
    assert (layer.hidden_dim, layer.num_experts, layer.expert_dim) == (512, 8, 128)
    on_gpu = torch.cuda.is_available()
    assert layer.w1.device.type == ("cuda" if on_gpu else "cpu")
    assert layer.w1.dtype == layer.w2.dtype == (torch.float16 if on_gpu else torch.float32)
    assert layer.w1.std().item() == pytest.approx(1, rel=0.02)
    x = torch.randn(16, 512).to(layer.w1)
    expert_ids = torch.randint(0, 8, (16, 2), device=x.device)
    routing_weights = torch.rand(16, 2).to(x)
    out = layer.forward(x, expert_ids, routing_weights)
    assert out.shape == x.shape and out.dtype == x.dtype and out.isfinite().all()
    assert torch.equal(out, layer(x, expert_ids, routing_weights))
    want = experts_loop(
        *(t.double() if t.is_floating_point() else t for t in (x, expert_ids, routing_weights)),
        {"gate_up": layer.w1.mT.double(), "down": layer.w2.mT.double()},
        "gelu",
    )
    torch.testing.assert_close(out.double(), want, rtol=0, atol=0.005 * want.abs().max().item())


def test_default_device_is_obeyed():
    with torch.device("meta"):
        layer = OptimizedMoELayer(H, E, F)
    assert layer.w1.is_meta and layer.w1.dtype == torch.float16
    layer = layer.float().to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.w2.std().item() == pytest.approx(1, rel=0.1)
    assert OptimizedMoELayer(H, E, F, device="cpu").w1.dtype == torch.float32


def test_weights_are_used_in_place(device):
    """The transposed views that the experts read share the parameters' memory, and gradients their layout."""
    layer = build(device)
    layer(*draw(device)).sum().backward()
    for w in (layer.w1, layer.w2):
        assert w.grad.shape == w.shape


def test_main_grad(device):
    layer, inputs = build(device), draw(device)
    layer(*inputs).sum().backward()
    want = [w.grad for w in layer.parameters()]
    layer.zero_grad()
    for w in layer.parameters():
        w.main_grad = torch.zeros_like(w)
    for _ in range(2):
        layer(*inputs).sum().backward()
    for w, dw in zip(layer.parameters(), want, strict=True):
        assert w.grad is None
        torch.testing.assert_close(w.main_grad, 2 * dw)


def test_autocast(device):
    layer = build(device)
    x, expert_ids, routing_weights = draw(device)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        out = layer(x, expert_ids, routing_weights)
    half = copy.deepcopy(layer).bfloat16()
    assert out.dtype == torch.bfloat16 and torch.equal(out, half(x.bfloat16(), expert_ids, routing_weights))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_nothing(device, use_reentrant):
    layer, (x, *routing) = build(device), draw(device)
    x.requires_grad_()
    layer(x, *routing).square().sum().backward()
    want = [t.grad.clone() for t in (x, layer.w1, layer.w2)]
    for t in (x, layer.w1, layer.w2):
        t.grad = None
    checkpoint(layer, x, *routing, use_reentrant=use_reentrant).square().sum().backward()
    # not to the bit: without gradients the CPU keeps z elsewhere, and its products depend on the alignment
    for t, dt in zip((x, layer.w1, layer.w2), want, strict=True):
        torch.testing.assert_close(t.grad, dt)


def test_one_graph_for_any_number_of_tokens(device):
    torch.compiler.reset()
    layer = build(device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for num_tokens in (T, 8, 5):
            inputs = [t[:num_tokens].clone() for t in draw(device)]
            outs = [fn(*inputs) for fn in (compiled, layer)]
            torch.testing.assert_close(*outs)
            grads = [torch.autograd.grad(out.square().sum(), layer.parameters()) for out in outs]
            torch.testing.assert_close(*grads)


def test_learns(device):
    """Fixed routing, a target made by other experts: the loss falls to a tenth."""
    torch.manual_seed(1)
    layer, target = build(device), build(device)
    inputs = draw(device)
    want = target(*inputs).detach()
    optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (layer(*inputs) - want).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10


def test_8_bits(device):
    """The products of `expert_mlp` with 8 bits, of weights whose columns lie side by side."""
    layer, (x, ids, s) = build(device, fp8="e5m2"), draw(device)
    weights = layer.w1.mT.contiguous(), layer.w2.mT.contiguous()
    expected = expert_mlp(x, *weights, s, make_plan(ids, E), activation="gelu", fp8="e5m2")
    assert torch.allclose(layer(x, ids, s), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="unknown fp8 'e3m4'"):
        build(device, fp8="e3m4")


def test_state_dict(device):
    layer = build(device)
    assert list(layer.state_dict()) == ["w1", "w2"]
    other = build(device)
    other.load_state_dict(layer.state_dict())
    inputs = draw(device)
    assert torch.equal(other(*inputs), layer(*inputs))
    assert repr(layer) == "OptimizedMoELayer(12, num_experts=5, expert_dim=10, activation='gelu', fp8=None)"


@pytest.mark.parametrize(
    "change, error, text",
    [
        (lambda x, i, w: (x[1:], i, w), ValueError, r"x is \(T=16, H\) but expert_ids is \(T=17, k\)"),
        (lambda x, i, w: (x[None], i, w), ValueError, r"x must be \(T, H\), but it has shape \(1, 17, 12\)"),
        (lambda x, i, w: (x, i[:, 0], w), ValueError, r"expert_ids must be \(T, k\)"),
        (lambda x, i, w: (x, i.float(), w), TypeError, "expert_ids must be int32 or int64"),
        (lambda x, i, w: (x, i, w[:, 1:]), ValueError, r"routing_weights is \(17, 1\).* \(17, 2\)"),
        (lambda x, i, w: (x[:, 1:], i, w), ValueError, r"x is \(T, H=11\) but w1 is \(E, H=12, F\)"),
        (lambda x, i, w: (x.double(), i, w), TypeError, "x is torch.float64 but w1 is torch.float32"),
        (lambda x, i, w: (x, i + E, w), ValueError, "expert_ids holds [5-9] but num_experts is 5"),
    ],
)
def test_errors(device, change, error, text):
    with pytest.raises(error, match=text):
        build(device)(*change(*draw(device)))


@pytest.mark.parametrize(
    "sizes, text", [((0, 5, 8), "hidden_dim must be"), ((8, 5, 0), "expert_dim must be")]
)
def test_errors_of_sizes(sizes, text):
    with pytest.raises(ValueError, match=text):
        OptimizedMoELayer(*sizes)
