"""The router: every score against its formula, float32 whatever the dtype, ties, gradients."""

import copy
import math

import pytest
import torch

from moe_aiter.invariance import invariant
from moe_aiter.op import use
from moe_aiter.routing import router as module
from moe_aiter.routing.router import MANY, Router, in_three, route, router_logits
from moe_aiter.routing.scores import SCORES

MODES = [("softmax", True), ("softmax", False), ("topk_softmax", True), ("sigmoid", True), ("sigmoid", False)]
modes = pytest.mark.parametrize("score, renormalize", MODES)


def draw(*shape, dtype=torch.float64, device="cpu", seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(
        device, dtype
    )


def by_hand(logits, top_k, score, renormalize, scale):
    """Experts and weights of one token, in Python floats."""
    largest = max(logits)
    p = [math.exp(z - largest) for z in logits]
    p = [v / sum(p) for v in p]
    if score == "sigmoid":
        p = [1 / (1 + math.exp(-z)) for z in logits]
    ids = sorted(range(len(p)), key=lambda e: (-logits[e], e))[:top_k]
    weights = [p[e] for e in ids]
    if score == "topk_softmax":
        weights = [math.exp(logits[e]) for e in ids]
    if renormalize:
        weights = [w / sum(weights) for w in weights]
    return ids, [w * scale for w in weights], p


@modes
@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.pairwise
def test_route_by_hand(device, score, renormalize, top_k):
    logits = draw(13, 8, device=device)
    how = {"score": score, "renormalize": renormalize, "scale": 2.5}
    if top_k == 1 and renormalize:
        with pytest.raises(ValueError, match="top_k=1 makes every routing weight 1"):
            route(logits, top_k, **how)
        return
    routing = route(logits, top_k, **how)
    ids, weights, scores = zip(
        *(by_hand(row, top_k, score, renormalize, 2.5) for row in logits.tolist()), strict=True
    )
    assert torch.equal(routing.expert_ids.cpu(), torch.tensor(ids))
    torch.testing.assert_close(routing.routing_weights.cpu(), torch.tensor(weights, dtype=torch.float64))
    torch.testing.assert_close(routing.scores.cpu(), torch.tensor(scores, dtype=torch.float64))
    assert torch.equal(routing.logits, logits)


@modes
def test_route_gradcheck(device, score, renormalize):
    logits = draw(5, 6, device=device).requires_grad_()

    def outputs(z):
        routing = route(z, 3, score=score, renormalize=renormalize, scale=0.5)
        return routing.routing_weights, routing.scores

    assert torch.autograd.gradcheck(outputs, logits)


def test_softmax_topk_renormalised_is_topk_softmax(device):
    logits = draw(64, 32, dtype=torch.float32, device=device).requires_grad_()
    dweights = draw(64, 4, dtype=torch.float32, device=device, seed=1)
    a, b = route(logits, 4, score="softmax"), route(logits, 4, score="topk_softmax")
    assert torch.equal(a.expert_ids, b.expert_ids)
    torch.testing.assert_close(a.routing_weights, b.routing_weights)
    (da,) = torch.autograd.grad(a.routing_weights, logits, dweights)
    (db,) = torch.autograd.grad(b.routing_weights, logits, dweights)
    torch.testing.assert_close(da, db)
    assert not torch.allclose(route(logits, 4, renormalize=False).routing_weights, a.routing_weights)


@pytest.mark.parametrize("score", SCORES)
def test_ties_go_to_the_lower_expert(device, score):
    routing = route(torch.zeros(3, 9, device=device), 4, score=score)
    assert routing.expert_ids.tolist() == [[0, 1, 2, 3]] * 3
    torch.testing.assert_close(routing.routing_weights, torch.full((3, 4), 0.25, device=device))


@pytest.mark.parametrize("score", SCORES)
def test_logits_that_are_not_numbers_still_name_distinct_experts(device, score):
    logits = draw(6, 8, dtype=torch.float32, device=device)
    logits[1], logits[2, 3], logits[4, ::2] = float("nan"), float("nan"), float("-inf")
    expert_ids = route(logits, 5, score=score).expert_ids
    assert expert_ids.min() >= 0 and expert_ids.max() < 8
    assert all(len(set(row)) == 5 for row in expert_ids.tolist())


def test_sigmoid_weights_that_underflow_are_zeros(device):
    routing = route(torch.full((2, 4), -200.0, device=device), 2, score="sigmoid")
    assert torch.equal(routing.routing_weights, torch.zeros(2, 2, device=device))


@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_float32_for_any_dtype(device, x_dtype, w_dtype):
    x, weight, bias = (
        draw(*s, dtype=d, device=device) for s, d in [((9, 64), x_dtype), ((6, 64), w_dtype), ((6,), w_dtype)]
    )
    x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
    logits = router_logits(x, weight, bias)
    assert logits.dtype == torch.float32
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(logits.square().sum(), (x, weight, bias))
    expected = torch.autograd.grad(exact.square().sum(), (x, weight, bias))
    for got, want in zip(grads, expected, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2 * want.abs().max().item())


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_does_not_lower_the_router(device, autocast):
    router = Router(64, 8, 2, score="sigmoid", bias=True, device=device)
    x = draw(16, 64, dtype=torch.float32, device=device).requires_grad_()

    def step():
        routing = router(x)
        return *routing, *torch.autograd.grad(routing.routing_weights.sum(), [x, *router.parameters()])

    plain = step()
    with torch.autocast(x.device.type, dtype=autocast):
        under = step()
    for a, b in zip(plain, under, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_a_frozen_router_gives_x_its_gradient(device):
    router = Router(16, 6, 2, device=device).requires_grad_(False)
    x = draw(4, 16, dtype=torch.float32, device=device).requires_grad_()
    router(x).logits.sum().backward()
    torch.testing.assert_close(x.grad, router.weight.sum(0).expand(4, 16))
    assert router.weight.grad is None


def test_no_tokens(device):
    router = Router(16, 6, 2, bias=True, device=device)
    routing = router(torch.empty(0, 16, device=device))
    assert routing.expert_ids.shape == routing.routing_weights.shape == (0, 2)
    routing.routing_weights.sum().backward()
    assert all(p.grad.count_nonzero() == 0 for p in router.parameters())


def test_strided_input(device):
    router = Router(16, 6, 2, device=device)
    x = draw(16, 8, dtype=torch.float32, device=device).T
    torch.testing.assert_close(router(x).logits, router(x.contiguous()).logits)


def test_one_graph_for_any_number_of_tokens(device):
    torch.compiler.reset()
    router = Router(16, 6, 2, score="sigmoid", bias=True, device=device)
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for num_tokens in (3, 8, 21):
            x = draw(num_tokens, 16, dtype=torch.float32, device=device).requires_grad_()
            for got, want in zip(compiled(x), router(x), strict=True):
                torch.testing.assert_close(got, want)
            got = torch.autograd.grad(compiled(x).routing_weights.square().sum(), router.weight)
            want = torch.autograd.grad(router(x).routing_weights.square().sum(), router.weight)
            torch.testing.assert_close(got, want)


def test_module_state(device):
    router = Router(16, 6, 2, bias=True, device=device)
    assert list(router.state_dict()) == ["weight", "bias"]
    assert list(Router(16, 6, 2).state_dict()) == ["weight"]
    twin = copy.deepcopy(router)
    x = draw(4, 16, dtype=torch.float32, device=device)
    assert torch.equal(twin(x).logits, router(x).logits)
    empty = Router(16, 6, 2, bias=True, device="meta").to_empty(device=device)
    empty.reset_parameters()
    assert 0 < empty.weight.abs().max() <= 0.25 and 0 < empty.bias.abs().max() <= 0.25
    assert "num_experts=6, top_k=2, score='softmax'" in repr(router)


@pytest.mark.parametrize(
    "make, text",
    [
        (
            lambda: route(torch.zeros(2, 4), 2, score="tanh"),
            "unknown score 'tanh'; known: softmax, topk_softmax, sigmoid, sqrt_softplus",
        ),
        (lambda: route(torch.zeros(2, 4), 5), r"top_k is 5 but logits is \(T, E=4\)"),
        (lambda: route(torch.zeros(4), 2), r"logits must be \(T, E\)"),
        (lambda: route(torch.zeros(2, 4), 2, score="topk_softmax", renormalize=False), "always sum to 1"),
        (lambda: Router(8, 4, 5), "top_k is 5 but num_experts is 4"),
        (lambda: Router(8, 4, 0), "top_k must be at least 1, not 0"),
        (lambda: Router(8, 4, 2, score="tanh"), "unknown score 'tanh'"),
        (
            lambda: Router(8, 4, 2)(torch.zeros(3, 9)),
            r"x is \(T, H=9\) but the router's weight is \(E, H=8\)",
        ),
        (lambda: Router(8, 4, 2)(torch.zeros(2, 3, 8)), r"x must be \(T, H\), but it has shape \(2, 3, 8\)"),
    ],
)
def test_errors(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_top_k_is_a_whole_number():
    for make in (lambda: Router(8, 4, 1.5), lambda: route(torch.zeros(2, 4), 1.5)):
        with pytest.raises(TypeError, match="top_k must be an int, not float"):
            make()


def test_integer_input():
    with pytest.raises(TypeError, match=r"x must be float16.* not torch.int64"):
        Router(8, 4, 2)(torch.zeros(3, 8, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gemm_sums_and_stores_float32(dtype):
    """Logits are nearly as exact as a float32 GEMM's; gradients as those of an nn.Linear of that dtype.

    Tensor cores truncate where they add, a relative error of 2e-6 over 2048 terms on an H200; rounding to
    16 bits would be 2e-3 or 2e-4.
    """
    x, weight = (
        draw(512, 2048, dtype=dtype, device="cuda"),
        draw(64, 2048, dtype=dtype, device="cuda", seed=1),
    )
    x.requires_grad_(), weight.requires_grad_()
    dlogits = draw(512, 64, dtype=torch.float32, device="cuda", seed=2)
    logits, exact = router_logits(x, weight, None), x.double() @ weight.double().T
    linear = x @ weight.T

    def distance(got, want):
        return ((got.double() - want.double()).norm() / want.double().norm()).item()

    assert logits.dtype == torch.float32 and distance(logits, exact) <= 1e-5
    ours, theirs, truth = (
        torch.autograd.grad(out, (x, weight), d)
        for out, d in ((logits, dlogits), (linear, dlogits.to(dtype)), (exact, dlogits.double()))
    )
    for a, b, c in zip(ours, theirs, truth, strict=True):
        assert a.dtype == dtype
        assert distance(a, c) <= 2 * distance(b, c)


@pytest.mark.gpu
@pytest.mark.parametrize("T, H, E", [(2, 1, 54), (1, 54, 2), (1, 2, 1), (3, 1, 1)])
def test_axes_of_one_number_in_float64(T, H, E):
    """The stride of such an axis can be any number, which cuBLAS may refuse."""
    x, weight = torch.randn(T, H, dtype=torch.float64), torch.randn(E, H, dtype=torch.float64)
    for by_columns in (weight.cuda(), weight.T.contiguous().cuda().T):
        torch.testing.assert_close(router_logits(x.cuda(), by_columns, None).cpu(), x @ weight.T)


def test_three_of_16_bits_are_all_of_float32():
    scale = torch.logspace(-20, 37, 58)
    t = torch.cat([torch.randn(1000, 1), torch.ones(1, 1), 2 - torch.tensor([[2.0**-23]])]) * scale / 4
    parts = in_three(t)
    assert all(part.dtype == torch.bfloat16 for part in parts)
    assert torch.equal(sum(part.double() for part in parts), t.double())


@pytest.mark.parametrize("T", [5, pytest.param(MANY, marks=pytest.mark.gpu)])
def test_second_derivatives_of_a_float32_router(device, T, monkeypatch):
    """Where products are of parts, as on a GPU for many tokens, a graph of the gradient can be made."""
    monkeypatch.setattr(module, "splits", lambda x, w: (x.dtype, w.dtype) == (torch.bfloat16, torch.float32))
    x = draw(T, 16, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = draw(6, 16, device=device, dtype=torch.float32, seed=1).requires_grad_()
    dlogits = draw(T, 6, device=device, dtype=torch.float32, seed=2).requires_grad_()

    def second(logits):
        first = torch.autograd.grad(logits, (x, weight), dlogits, create_graph=True)
        return torch.autograd.grad(sum(d.float().square().sum() for d in first), (x, weight, dlogits))

    got, want = second(router_logits(x, weight, None)), second(x.float() @ weight.T)
    for value, truth in zip(got, want, strict=True):
        torch.testing.assert_close(value, truth, rtol=2**-6, atol=2**-7 * truth.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("H, E", [(2048, 128), (77, 5)])
def test_a_float32_router_has_one_order_for_each_backend(backend, H, E):
    x = draw(1000, H, device="cuda", dtype=torch.bfloat16)
    weight = draw(E, H, device="cuda", dtype=torch.float32, seed=1)
    with invariant(), use(backend):
        whole = router_logits(x, weight, None)
        for T in (1, 16, 17, 256, 257):
            assert torch.equal(router_logits(x[:T], weight, None), whole[:T]), T


@pytest.mark.gpu
@pytest.mark.parametrize("on", [False, True], ids=["", "batch invariant"])
@pytest.mark.parametrize(
    "T, H, E", [(MANY, 512, 64), (MANY + 3, 77, 5), (MANY, 64, 1), (1, 512, 64), (0, 8, 2)]
)
def test_a_float32_router_of_16_bit_tokens_on_a_gpu(T, H, E, on):
    """Products of parts have the precision of float32, and are the same for a token alone."""
    x = draw(T, H, device="cuda", dtype=torch.bfloat16).requires_grad_()
    router = Router(H, E, 1, bias=True, device="cuda")
    dlogits = draw(T, E, device="cuda", dtype=torch.float32, seed=1)

    def logits_and_gradients(x, dlogits):
        logits = router_logits(x, router.weight, router.bias)
        return logits, *torch.autograd.grad(logits, (x, router.weight, router.bias), dlogits)

    with invariant(on):
        got = logits_and_gradients(x, dlogits)
        again = logits_and_gradients(x, dlogits)
        alone = logits_and_gradients(x[-1:], dlogits[-1:])
    w, tokens, d = (t.detach().double() for t in (router.weight, x, dlogits))
    exact = tokens @ w.T + router.bias.double(), d @ w, d.T @ tokens, d.sum(0)
    plain = (
        tokens.float() @ w.float().T + router.bias,
        (d @ w).bfloat16(),
        d.float().T @ tokens.float(),
        dlogits.sum(0),
    )
    floors = 1e-6, 1e-6, 4e-6, 1e-6  # tensor cores cut off what they add: 2e-6 over 4,096 tokens
    for value, same, truth, rounded, floor in zip(got, again, exact, plain, floors, strict=True):
        assert torch.equal(value, same) and value.dtype == rounded.dtype
        assert (value - truth).norm() <= 2 * (rounded - truth).norm() + floor * truth.norm()
    if on and T:
        assert all(torch.equal(value[-1:], one) for value, one in zip(got[:2], alone[:2], strict=True))
