"""Activation checkpointing repeats the first routing, whatever the repetition would have decided.

Experts are tied in pairs, exactly, and what the layer sees in the repetition is off by a thousandth, as after
an attention that sums in another order: the ties fall otherwise.
"""

import copy
import gc
import weakref

import pytest
import torch
from check import few
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moe_aiter import Capacity, ExpertChoice, GroupLimit, TokenRounding, TopP, route
from moe_aiter.layers.moe import MoE
from moe_aiter.replay import ALONE, STORED, current_pass
from moe_aiter.routing.choices import Choice

H, WIDTH, E, K, T = 16, 12, 6, 3, 23
FULL = {
    "bias": True,
    "shared_intermediate": 8,
    "selection_bias": True,
    "score": "sigmoid",
    "load_balance_coef": 0.1,
    "global_balance_coef": 0.1,
    "z_loss_coef": 0.01,
}
OPTIONS = {
    "softmax": {},
    "probabilities": {"renormalize": False, "load_balance_coef": 0.1},
    "sigmoid": {"score": "sigmoid", "scale": 2.5},
    "full": FULL,
    "jitter": {"jitter": 0.5},
    "capacity": {"capacity": Capacity(0.7, "probability")},
    "groups": {"choice": GroupLimit(3, 2, "max")},
    "top-p": {"choice": TopP(0.5)},
    "expert choice": {"choice": ExpertChoice(4), "renormalize": False},
    "rounding": {"choice": TokenRounding(4, "nearest", 2)},
}


@torch.library.custom_op("moe_aiter_tests::waver", mutates_args=())
def waver(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """x, and x + noise in a repetition."""
    return x.clone() if torch._C._current_graph_task_id() == -1 else x + noise


@waver.register_fake
def _(x, noise):
    return torch.empty_like(x)


waver.register_autograd(lambda ctx, grad: (grad, None))


class Wavering(nn.Module):
    def __init__(self, device, **options):
        super().__init__()
        self.moe = MoE(H, WIDTH, E, K, device=device, **options)
        noise = torch.zeros(T, H, device=device)
        noise[:, 0] = 1e-3 * torch.randn(T, device=device)
        self.register_buffer("noise", noise)
        with torch.no_grad():
            weight = self.moe.router.weight
            weight[1::2] = weight[::2]
            if self.moe.router.bias is not None:
                self.moe.router.bias[1::2] = self.moe.router.bias[::2]
            weight[:, 0] = torch.tensor([1.0, -1.0] * (E // 2), device=device)

    def forward(self, x):
        return self.moe(waver(x, self.noise))


def wavering(device, flavour, **options):
    torch.compiler.reset()
    net = Wavering(device, **options)
    if flavour.startswith("compiled") or flavour == "selective":
        net.noise *= 1e-3  # there other values of the first run stay too, which this hardly changes
    return net


def tokens(device, *leading):
    x = torch.randn(*leading, T, H, device=device)
    x[..., 0] = 0.0  # where the experts of a pair differ
    return x.requires_grad_()


def first_routing(net, x):
    """Of a copy, so that nothing is counted; and that of the repetition differs from it."""
    net = copy.deepcopy(net)
    with torch.no_grad():
        plans = [net.moe(t, return_routing=True)[1] for t in (x, x + net.noise)]
    assert not torch.equal(*(routing.expert_ids for routing, _ in plans)), "the noise changes nothing"
    return plans[0]


def wanted(net, x):
    """The output, and the gradients of what the layer sees in the repetition under the first routing."""
    expert_ids = first_routing(net, x).routing.expert_ids
    net = copy.deepcopy(net)
    shifted = (x + net.noise).detach().requires_grad_()
    out = net.moe(shifted, expert_ids=expert_ids)
    dout = 2 * copy.deepcopy(net).moe(x.detach())
    return [dout / 2, *torch.autograd.grad(out, [shifted, *net.parameters()], dout)]


def results(net, x, run):
    out = run(x)
    out.square().sum().backward()
    return [out, x.grad, *(p.grad for p in net.parameters())]


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def keep_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


def keeping_products():
    return create_selective_checkpoint_contexts(keep_products)


def compiled(fn):
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


FLAVOURS = {
    "reentrant": lambda net: lambda x: checkpoint(net, x, use_reentrant=True),
    "non-reentrant": lambda net: lambda x: checkpoint(net, x, use_reentrant=False),
    "selective": lambda net: lambda x: checkpoint(net, x, use_reentrant=False, context_fn=keeping_products),
    "compiled": lambda net: compiled(lambda x: checkpoint(net, x, use_reentrant=False)),
    "compiled selective": lambda net: compiled(
        lambda x: checkpoint(net, x, use_reentrant=False, context_fn=keeping_products)
    ),
    "of a compiled layer": lambda net: lambda x: checkpoint(compiled(net), x, use_reentrant=False),
    "of a compiled layer, reentrant": lambda net: lambda x: checkpoint(compiled(net), x, use_reentrant=True),
}
EAGER = ["reentrant", "non-reentrant", "selective"]
every_flavour = pytest.mark.parametrize("flavour", FLAVOURS)


def check_gradients(device, flavour, options):
    net, x = wavering(device, flavour, **options), tokens(device)
    want = wanted(net, x)
    assert_same(results(net, x, FLAVOURS[flavour](net)), want)
    if net.moe.load is not None:
        assert net.moe.load.sum() == T * K


ALL = [(flavour, options) for options in ("softmax", "full") for flavour in FLAVOURS]
FEW = [(flavour, options) for flavour, options in ALL if flavour in EAGER or options == "full"]


@pytest.mark.parametrize("flavour, options", few(ALL, *FEW, several=True))
def test_the_first_routing_holds(device, flavour, options):
    check_gradients(device, flavour, OPTIONS[options])


@pytest.mark.parametrize("flavour", EAGER)
@pytest.mark.parametrize("options", ["probabilities", "sigmoid", "groups", "top-p", "expert choice"])
def test_the_first_routing_holds_however_it_came(device, flavour, options):
    check_gradients(device, flavour, OPTIONS[options])


@pytest.mark.parametrize("flavour", EAGER)
@pytest.mark.parametrize("options", OPTIONS)
def test_the_experts_get_the_same_rows(device, flavour, options):
    """Of every router, with what it drew and what a capacity dropped."""
    net, x, seen = Wavering(device, **OPTIONS[options]), tokens(device), []
    net.moe.experts.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[2]))
    preserved = {} if flavour == "selective" else {"preserve_rng_state": False}
    context = {"context_fn": keeping_products} if flavour == "selective" else {}
    out = checkpoint(net, x, use_reentrant=flavour == "reentrant", **preserved, **context)
    out.square().sum().backward()
    first, again = seen
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)


class Twice(Wavering):
    def forward(self, x):
        return self.moe(waver(self.moe(waver(x, self.noise)) + x, self.noise))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_is_called_twice_in_a_region(device, reentrant):
    net, x, seen = Twice(device), tokens(device), []
    net.moe.experts.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[2].order))
    checkpoint(net, x, use_reentrant=reentrant).square().sum().backward()
    first, second, *again = seen
    assert not torch.equal(first, second)
    assert torch.equal(first, again[0]) and torch.equal(second, again[1])


class Far(Choice):
    """Chooses numbers that no expert has."""

    def pick(self, ranked, top_k, mask):
        row = torch.tensor([2**32 + 3, 2**16 + 3, -(2**16) + 3], device=ranked.device)
        return row.expand(len(ranked), 3)


def test_a_number_that_no_expert_has_stays_none(device):
    """In the repetition too, which is given the number in 16 bits."""
    seen = []

    def region(logits):
        routing = route(logits, 3, choice=Far())
        seen.append(routing.expert_ids)
        return routing.routing_weights + logits[:, :3] ** 2

    logits = torch.randn(4, E, device=device, requires_grad=True)
    checkpoint(region, logits, use_reentrant=False).sum().backward()
    first, again = seen
    assert all(((ids < 0) | (ids >= E)).all() for ids in (first, again))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("flavour", [*EAGER, "compiled", "of a compiled layer"])
def test_micro_batches_in_flight(device, flavour, order):
    net, batches = wavering(device, flavour), tokens(device, 3).detach()
    batches = [x.requires_grad_() for x in batches]
    want = [wanted(net, x) for x in batches]
    run = FLAVOURS[flavour](net)
    outs = [run(x) for x in batches]
    for i in order:
        outs[i].square().sum().backward()
        assert_same([outs[i], batches[i].grad], want[i][:2])
    for p, *grads in zip(net.parameters(), *(w[2:] for w in want), strict=True):
        torch.testing.assert_close(p.grad, sum(grads))


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_nested_regions(device, outer, inner):
    """Run again when the outer region is repeated, unless that stops early, and when the inner one is."""
    net, x, seen = Wavering(device), tokens(device), []
    want = wanted(net, x)
    net.moe.experts.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[2].order))

    def block(x):
        return checkpoint(net, x * 1.0, use_reentrant=inner) * 1.0

    assert_same(results(net, x, lambda x: checkpoint(block, x, use_reentrant=outer)), want)
    assert len(seen) > 1 and all(torch.equal(order, seen[0]) for order in seen)


@pytest.mark.parametrize("flavour", ["non-reentrant", "reentrant"])
def test_a_graph_that_is_kept(device, flavour):
    """Its second backward pass repeats the region once more."""
    net, x = Wavering(device), tokens(device)
    want = wanted(net, x)
    out = FLAVOURS[flavour](net)(x)
    for _ in range(2):
        x.grad = None
        net.zero_grad()
        out.square().sum().backward(retain_graph=True)
        assert_same([out, x.grad, *(p.grad for p in net.parameters())], want)


@pytest.mark.parametrize("flavour", ["non-reentrant", "reentrant"])
def test_after_an_exception(device, flavour):
    """What a pass decided that never came to its backward pass is not another's."""
    net, x = Wavering(device), tokens(device)

    def fails(x):
        net(x)
        raise InterruptedError

    other = tokens(device)
    with pytest.raises(InterruptedError):
        checkpoint(fails, other, use_reentrant=flavour == "reentrant")
    FLAVOURS[flavour](net)(other)  # and no backward pass
    want = wanted(net, x)
    assert_same(results(net, x, FLAVOURS[flavour](net)), want)


@pytest.mark.parametrize("flavour", ["non-reentrant", "reentrant"])
def test_nothing_stays(device, flavour):
    """The decisions go with the graph."""
    net, kept = Wavering(device), []

    def region(x):
        out = net(x)
        kept.extend(weakref.ref(t) for r in current_pass().first for t in getattr(r, STORED).taken["experts"])
        return out

    x = tokens(device)
    out = checkpoint(region, x, use_reentrant=flavour == "reentrant")
    (decision,) = kept
    assert decision().dtype == torch.int16 and decision().shape == (T, K)
    out.square().sum().backward()
    del out
    gc.collect()
    assert decision() is None


@pytest.mark.parametrize("flavour", EAGER)
def test_a_global_loss_is_of_what_was_counted_at_first(device, flavour):
    """And not of the micro-batches that came before the repetition."""
    moe = MoE(H, WIDTH, E, K, device=device, global_balance_coef=1.0)
    batches, grads = tokens(device, 3).detach(), []
    for run in (moe, FLAVOURS[flavour](moe)):
        moe.zero_grad()
        moe.load.zero_()
        outs = [run(x.clone().requires_grad_()) for x in batches]
        for out in outs:
            out.square().sum().backward()
        grads.append([p.grad for p in moe.parameters()])
        assert moe.load.sum() == 3 * T * K
    assert_same(*grads)


def test_other_shapes_are_decided_anew(device):
    """A region that is not the same function twice is left to torch's own checks."""
    moe = MoE(H, WIDTH, E, K, device=device)
    x, calls = torch.randn(T, H, device=device, requires_grad=True), []

    def region(x):
        calls.append(len(x))
        return moe(x[: T - len(calls)]).sum() + x.sum()

    checkpoint(region, x, use_reentrant=True).backward()
    assert calls == [T, T] and x.grad.isfinite().all()


def test_without_checkpointing_there_is_no_region(device):
    seen = []
    x = torch.randn(4, H, device=device, requires_grad=True)

    def look(x):
        seen.append(current_pass())
        return x * 1.0

    look(x)
    with torch.no_grad():
        look(x)
    with torch.inference_mode():
        look(x)
    assert all(found is ALONE for found in seen)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        look(x)
        checkpoint(look, x, use_reentrant=False)
        depth = len(seen[-1].first)
        look(x)
    assert not seen[3].first and depth == 1 and not seen[-1].first
