"""Routing in one op: scores, choice and weights against torch, and both gradients, together and alone."""

import pytest
import torch
from check import assert_as_good_as_torch, with_gradients
from shapes import LAYOUTS

from moe_aiter.kernels.rows.route import EPSILON, choose_experts, route_backward_op, route_op
from moe_aiter.op import use

from ...references import topk_reference

SHAPES = {  # T, E, k
    "mixtral": (37, 8, 2),
    "qwen3": (19, 128, 8),
    "odd E": (23, 13, 5),
    "top 1": (9, 60, 1),
    "all experts": (17, 7, 7),
    "one expert": (5, 1, 1),
    "one token": (1, 16, 4),
    "many experts": (3, 520, 16),
}
MODES = {  # sigmoid, renormalize
    "softmax": (False, False),
    "softmax of the chosen": (False, True),
    "sigmoid": (True, False),
    "sigmoid renormalised": (True, True),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def draw(*shape, dtype=torch.float32, device="cpu", seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen).bfloat16().to(device, dtype)


def run(logits, top_k, mode, scale=1.0):
    return choose_experts(logits, top_k, sigmoid=mode[0], renormalize=mode[1], scale=scale)


def composed(logits, top_k, mode, scale=1.0):
    """The same from torch's own functions, by the definition."""
    sigmoid, renormalize = mode
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = logits.sigmoid() if sigmoid else logits.softmax(1)
    ids = logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    return scores, weights * scale, ids


def saved_by(logits, top_k, how):
    """weights, expert_ids and scores as the backward takes them."""
    scores, weights, ids = route_op(logits, top_k, *how, True)
    return weights, ids, None if how[:2] == (False, True) else scores


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@modes
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.pairwise
def test_values_and_gradients(backend, device, shape, mode, dtype):
    num_tokens, num_experts, top_k = shape
    logits = draw(num_tokens, num_experts, dtype=dtype, device=device)
    # a floor, because few elements may happen to be rounded well by torch
    inputs = logits, top_k, mode, 2.5
    assert_as_good_as_torch(with_gradients(run), with_gradients(composed), *inputs, floor=3e-7)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64], ids=str)
@modes
def test_given_experts(backend, device, mode, dtype):
    """Those that would be chosen weigh the same to the bit, of others each what the definition says."""
    logits = draw(37, 12, device=device).requires_grad_()
    how = {"sigmoid": mode[0], "renormalize": mode[1], "scale": 2.5}
    want = choose_experts(logits, 3, **how)
    got = choose_experts(logits, 3, **how, fixed_ids=want[2].to(dtype))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)) and got[2].dtype == torch.int64
    others = torch.rand(37, 12, device=device).argsort(1)[:, :3]
    _scores, weights, ids = choose_experts(logits, 3, **how, fixed_ids=others.T.to(dtype).contiguous().T)
    assert torch.equal(ids, others)
    exact = logits.detach().double().requires_grad_()
    with use("torch"):
        _, true, _ = choose_experts(exact, 3, **how, fixed_ids=others)
    chosen = exact.sigmoid() if mode[0] else exact.softmax(1)
    chosen = chosen.gather(1, others)
    torch.testing.assert_close(true, 2.5 * (chosen / chosen.sum(1, keepdim=True) if mode[1] else chosen))
    dweights = draw(37, 3, device=device, seed=1)
    (grad,) = torch.autograd.grad(weights, logits, dweights)
    with use("torch"):
        (true_grad,) = torch.autograd.grad(true, exact, dweights.double())
    torch.testing.assert_close(weights, true.float(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(grad, true_grad.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("far", [2**32 + 3, 2**31 + 3, 2**63 - 1, -(2**63), -(2**32) + 3, 12, -1])
@modes
def test_a_given_number_of_no_expert(backend, device, mode, far, no_debug):
    """It raises an error on a CPU; for a kernel it is no expert, and not that of its last 32 bits."""
    logits, ids = draw(5, 12, device=device).requires_grad_(), torch.tensor([[3, 1, 4]] * 5, device=device)
    how = {"sigmoid": mode[0], "renormalize": mode[1]}
    ids[2, 1], ids[0, 0] = far, far
    if backend != "triton":
        if device.type == "cpu":
            with pytest.raises(RuntimeError, match=r"index .* out of bounds"):
                choose_experts(logits, 3, **how, fixed_ids=ids)
        return
    _, weights, chosen = choose_experts(logits, 3, **how, fixed_ids=ids)
    (grad,) = torch.autograd.grad(weights, logits, torch.ones_like(weights))
    assert torch.equal(chosen, ids.where(ids != far, -1)) and (weights[ids == far] == 0).all()
    assert grad.isfinite().all()
    two = choose_experts(logits, 2, **how, fixed_ids=torch.tensor([[3, 4]] * 5, device=device))[1]
    torch.testing.assert_close(weights[2, [0, 2]], two[2])


def test_debug_checks_given_numbers(device):
    with pytest.raises(ValueError, match="fixed_ids holds 0 to 4294967299 but num_experts is 12"):
        choose_experts(draw(1, 12, device=device), 2, fixed_ids=torch.tensor([[0, 2**32 + 3]], device=device))


@modes
def test_without_scores(backend, device, mode):
    """The same weights, experts and gradients, to the bit."""
    logits = draw(37, 12, device=device).requires_grad_()
    _, weights, ids = run(logits, 3, mode)
    scores, *got = choose_experts(logits, 3, sigmoid=mode[0], renormalize=mode[1], need_scores=False)
    assert (scores is None) == (mode == (False, True))
    assert torch.equal(got[0], weights) and torch.equal(got[1], ids)
    dweights = draw(37, 3, device=device, seed=1)
    gradients = [torch.autograd.grad(w, logits, dweights)[0] for w in (got[0], weights)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("output", ["scores", "weights"])
@modes
def test_a_gradient_alone(backend, device, mode, output):
    """A dense one, and that of a sum, which has strides of 0."""
    i = ["scores", "weights"].index(output)
    logits = draw(21, 12, device=device)
    ours, theirs = (with_gradients(lambda z, fn=fn: fn(z, 3, mode, 0.5)[i]) for fn in (run, composed))
    assert_as_good_as_torch(ours, theirs, logits, floor=3e-7)
    logits.requires_grad_()
    got, want = (torch.autograd.grad(fn(logits, 3, mode)[i].sum(), logits)[0] for fn in (run, composed))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@modes
def test_hard_logits(backend, device, mode):
    """Ties, both zeros, infinities, NaN: the choice is top-k's, and NaN is where torch has it."""
    logits = draw(40, 24).mul(4).round() / 4
    logits = torch.where(logits.abs() < 0.5, 0.0, logits)
    logits[1::2, 12], logits[::3, 8], logits[2::5, -1] = -0.0, float("nan"), float("inf")
    logits[3::5], logits[4::7], logits[5::9] = float("-inf"), float("nan"), -200.0
    logits = logits.to(device)
    scores, weights, ids = run(logits, 7, mode)
    with use("torch"):
        want = run(logits.double(), 7, mode)
    by_logit = mode == (False, True)
    assert torch.equal(ids, topk_reference(logits if by_logit else scores, 7)[1])
    assert all(len(set(row)) == 7 for row in ids.tolist()) and ids.min() >= 0 and ids.max() < 24
    torch.testing.assert_close(scores, want[0].float(), equal_nan=True)
    torch.testing.assert_close(weights, want[1].float(), equal_nan=True)


@modes
def test_scores_that_underflow(backend, device, mode):
    """A renormalised softmax knows the order of experts whose probability is 0."""
    logits = torch.tensor([[-300.0, 0.0, -200.0, -100.0]], device=device)
    scores, weights, ids = run(logits, 4, mode)
    assert ids[0, 0] == 1 and weights.isfinite().all()
    assert mode != (False, True) or ids[0].tolist() == [1, 3, 2, 0]
    assert torch.equal(scores[0, [0, 2]].cpu(), torch.zeros(2))


@pytest.mark.parametrize("sigmoid", [False, True])
def test_weights_are_scores(backend, device, sigmoid):
    scores, weights, ids = run(draw(33, 40, device=device), 6, (sigmoid, False))
    assert torch.equal(weights, scores.gather(1, ids))


@modes
def test_a_scale_of_zero(backend, device, mode):
    logits = draw(6, 9, device=device).requires_grad_()
    _, weights, _ = run(logits, 3, mode, 0.0)
    assert not weights.any()
    (dlogits,) = torch.autograd.grad(weights, logits, draw(6, 3, device=device))
    assert not dlogits.any()


def differences(shares, d):
    """sum_i shares_i * (d_j - d_i), where only the terms can cancel; and the sum of their sizes."""
    terms = shares[:, None] * (d[:, :, None] - d[:, None])  # (T, j, i)
    return terms.sum(2), terms.abs().sum(2)


@pytest.mark.parametrize("gap", [0, 5, 10, 12, 16, 40, 80])
@pytest.mark.parametrize("top_k", [2, 8, 64])
@modes
@pytest.mark.pairwise
def test_logits_far_apart(backend, device, mode, top_k, gap):
    """No digit of the gradient is lost where one expert has nearly all of a token's weight."""
    (sigmoid, renormalize), scale, gen = mode, 3.0, torch.Generator().manual_seed(gap)
    logits, dweights = torch.randn(40, 72, generator=gen), torch.randn(40, top_k, generator=gen)
    dweights = 30 + dweights.mul(32).round() / 32  # times 3 without a rounding
    logits[:, 0] += gap
    if sigmoid:
        logits -= gap + 10  # there torch's sigmoid and its slope have all digits
    logits = logits.to(device).requires_grad_()
    _, weights, ids = run(logits, top_k, mode, scale)
    (got,) = torch.autograd.grad(weights, logits, dweights.to(device))

    z, ids, d = logits.detach().double().cpu(), ids.cpu(), dweights.double() * scale
    if sigmoid:
        p, size = z.sigmoid().gather(1, ids), d.abs()
        if renormalize:
            total = p.sum(1, keepdim=True) + EPSILON
            (d, size), rest = differences(p / total, d), d * EPSILON / total
            d, size = (d + rest) / total, (size + rest) / total
        want, size = (t * p * (1 - p) for t in (d, size))
    elif renormalize:
        p = z.gather(1, ids).softmax(1)
        want, size = (p * t for t in differences(p, d))
    else:
        p = z.softmax(1)
        want, size = ((p * t).gather(1, ids) for t in differences(p, torch.zeros_like(z).scatter(1, ids, d)))
    error = (got.double().cpu().gather(1, ids) - want).abs()
    of_exp = 1e-7 * gap  # exp rounds its argument
    assert (error <= (2e-6 + of_exp) * size + 1e-36).all(), (error / size).max()


@pytest.mark.parametrize("layout", LAYOUTS)
@modes
def test_any_strides(backend, device, mode, layout):
    spread, how = LAYOUTS[layout], (*mode, 1.5)
    logits, dscores, dweights = (draw(18, n, device=device, seed=n) for n in (21, 21, 4))
    logits = spread(logits)
    dense = logits.contiguous()
    for got, want in zip(route_op(logits, 4, *how, True), route_op(dense, 4, *how, True), strict=True):
        torch.testing.assert_close(got, want)
    saved, spread_grads = saved_by(dense, 4, how), (spread(dweights), spread(dscores))
    grads = tuple(g.contiguous() for g in spread_grads)
    if saved[2] is None:
        grads, spread_grads = (grads[0], None), (spread_grads[0], None)
    got, want = (route_backward_op(*saved, *g, 21, *how) for g in (spread_grads, grads))
    torch.testing.assert_close(got, want)


@modes
def test_no_tokens(backend, device, mode):
    logits = torch.empty(0, 8, device=device, requires_grad=True)
    scores, weights, ids = run(logits, 2, mode)
    assert scores.shape == (0, 8) and weights.shape == ids.shape == (0, 2)
    (weights.sum() + scores.sum()).backward()
    assert logits.grad.shape == (0, 8)


@modes
def test_twice_the_same_bits(backend, device, mode):
    logits = draw(70, 33, device=device)
    first, second = (with_gradients(run)(logits, 4, mode) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@modes
@pytest.mark.no_interpreter
def test_gradcheck(device, mode):
    logits = draw(5, 6, dtype=torch.float64, device=device).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: run(z, 3, mode, 0.5)[:2], logits)


def test_a_second_derivative_is_refused(device):
    logits = draw(5, 6, device=device).requires_grad_()
    weights = run(logits, 3, MODES["softmax"])[1]
    (dlogits,) = torch.autograd.grad(weights.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="route_backward has no gradient"):
        dlogits.sum().backward()


def test_the_softmax_of_the_chosen_keeps_no_scores(device):
    """(T, k) numbers for backward, as long as nobody has the scores."""
    logits = draw(5, 6, device=device).requires_grad_()
    _, weights, _ = run(logits, 3, MODES["softmax of the chosen"])
    assert [t.shape for t in weights.grad_fn.saved_tensors if t is not None] == [(5, 3)] * 2


@pytest.mark.parametrize("grad", [False, True])
@modes
def test_opcheck(device, mode, grad):
    logits, how = draw(6, 8, device=device), (*mode, 2.0)
    inputs = logits.clone().requires_grad_(grad), 3, *how, True
    torch.library.opcheck(torch.ops.moe_aiter.route.default, inputs)
    saved = saved_by(logits, 3, how)
    for dweights, dscores in ((saved[0], None), (None, logits), (saved[0], logits)):
        if dscores is None or saved[2] is not None:
            torch.library.opcheck(
                torch.ops.moe_aiter.route_backward.default, (*saved, dweights, dscores, 8, *how)
            )


@modes
def test_one_graph_for_any_number_of_tokens(device, mode):
    torch.compiler.reset()
    compiled = torch.compile(lambda z: run(z, 2, mode), fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for num_tokens in (3, 8, 21):
            logits = draw(num_tokens, 6, device=device).requires_grad_()
            got, want = compiled(logits), run(logits, 2, mode)
            assert torch.equal(got[2], want[2])
            grads = (torch.autograd.grad(out[1].square().sum(), logits)[0] for out in (got, want))
            torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    "logits, top_k, error, text",
    [
        (torch.rand(4, 8), 9, ValueError, r"top_k is 9 but logits is \(T, E=8\)"),
        (torch.rand(4, 8), 0, ValueError, r"top_k is 0 but logits is \(T, E=8\)"),
        (torch.rand(8), 2, ValueError, r"logits must be \(T, E\), but it has shape \(8,\)"),
        (torch.ones(4, 8).int(), 2, TypeError, "logits must be float16.* not torch.int32"),
    ],
)
@pytest.mark.no_interpreter
def test_errors(logits, top_k, error, text):
    with pytest.raises(error, match=text):
        choose_experts(logits, top_k)


@pytest.mark.parametrize(
    "dweights, dscores, renormalize, error, text",
    [
        (None, None, False, ValueError, "neither dweights nor dscores"),
        (draw(4, 3), None, False, ValueError, r"dweights is \(4, 3\) but it needs \(4, 2\)"),
        (None, draw(4, 9), False, ValueError, r"dscores is \(4, 9\) but it needs \(4, 8\)"),
        (None, draw(4, 8), True, ValueError, "which takes no dscores"),
        (
            draw(4, 2).double(),
            None,
            False,
            TypeError,
            "weights is torch.float32 but dweights is torch.float64",
        ),
    ],
)
def test_errors_of_the_backward(dweights, dscores, renormalize, error, text):
    how = (False, renormalize, 1.0)
    with pytest.raises(error, match=text):
        route_backward_op(*saved_by(draw(4, 8), 2, how), dweights, dscores, 8, *how)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(70_000, 128, 8), (4096, 512, 16), (3, 16384, 8)])
@modes
def test_large(shape, mode):
    num_tokens, num_experts, top_k = shape
    logits = torch.randn(num_tokens, num_experts, device="cuda")
    got = with_gradients(run)(logits, top_k, mode)
    with use("torch"):
        want = with_gradients(run)(logits, top_k, mode)
    by_logit = mode == (False, True)
    assert torch.equal(got[2], topk_reference(logits if by_logit else got[0], top_k)[1])
    same = (got[2] == want[2]).all(1)  # scores that differ by a rounding may be ordered differently
    assert same.float().mean() > 0.99
    for a, b in zip((got[0], got[1], got[3]), (want[0], want[1], want[3]), strict=True):
        torch.testing.assert_close(a[same], b[same], rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
def test_rows_past_two_billion_elements(most_of_the_gpu):
    logits = torch.randn(2**31 // 128 + 5, 128, device="cuda")
    how = (True, True, 1.0)

    def both(logits):
        weights, ids, scores = saved_by(logits, 2, how)
        return weights, ids, scores, route_backward_op(weights, ids, scores, weights, scores, 128, *how)

    for all_rows, last in zip(both(logits), both(logits[-7:]), strict=True):
        assert torch.equal(all_rows[-7:], last)
