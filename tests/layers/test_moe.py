"""The MoE layer against the double loop: routing, experts, shared expert, and the losses it attaches."""

import copy
import io

import pytest
import torch
from check import assert_as_good_as_torch, with_gradients
from layers.double_loop import ACTIVATIONS, moe_loop

from moe_aiter import LoRAExperts, LoRALinear, quantize
from moe_aiter.layers.moe import MoE
from moe_aiter.routing.losses import load_balance_loss, load_statistics, z_loss
from moe_aiter.routing.router import Router

H, WIDTH, E, K, T = 12, 10, 6, 2, 13
MANY = 32  # experts where the router has a bias: six gradients are few, where roundings differ by chance
MODES = [("softmax", True), ("softmax", False), ("topk_softmax", True), ("sigmoid", True), ("sigmoid", False)]


def build(device="cpu", top_k=K, num_experts=E, **options):
    return MoE(H, WIDTH, num_experts, top_k, device=device, **options)


def compare(moe, x, floor=1e-7, **options):
    """Values, and the gradients of x and every parameter; `options` are those of `moe_loop`."""
    names = [name for name, p in moe.named_parameters() if p.requires_grad]
    fixed = {name: p for name, p in moe.named_parameters() if not p.requires_grad}

    def ours(x, *params):
        return torch.func.functional_call(moe, dict(zip(names, params, strict=True)), (x,))

    def loop(x, *params):
        rest = {name: p.to(x.dtype) for name, p in fixed.items()}
        return moe_loop(x, rest | dict(zip(names, params, strict=True)), moe.top_k, **options)

    params = [moe.get_parameter(name) for name in names]
    assert_as_good_as_torch(with_gradients(ours), with_gradients(loop), x, *params, floor=floor)


@pytest.mark.parametrize("top_k", [1, 2, E])
@pytest.mark.parametrize("score, renormalize", MODES)
@pytest.mark.pairwise
def test_every_score(device, score, renormalize, top_k):
    scoring = {"score": score, "renormalize": renormalize, "scale": 2.5}
    if top_k == 1 and renormalize:
        with pytest.raises(ValueError, match="top_k=1 makes every routing weight 1"):
            build(device, top_k, **scoring)
        return
    moe, x = build(device, top_k, **scoring), torch.randn(T, H, device=device)
    compare(moe, x, **scoring)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(device, activation, bias):
    moe = build(device, num_experts=MANY, activation=activation, bias=bias, shared_intermediate=7)
    compare(moe, torch.randn(8 * T, H, device=device), activation=activation)


@pytest.mark.parametrize("shared_gate", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_shared_expert(device, bias, shared_gate):
    options = {"shared_intermediate": 7, "shared_gate": shared_gate, "interleaved": True}
    moe = build(device, num_experts=MANY, bias=bias, **options)
    compare(moe, torch.randn(8 * T, H, device=device), interleaved=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(device, dtype):
    moe = build(device, shared_intermediate=7).to(dtype)
    compare(moe, torch.randn(T, H, device=device).to(dtype))


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_few_tokens(device, num_tokens):
    # one token's rounding errors are not averaged, and a router's gradient is a small difference
    compare(build(device), torch.randn(num_tokens, H, device=device), floor=5e-6)


def test_one_expert_takes_all(device):
    moe = build(device, top_k=1, bias=True)
    with torch.no_grad():
        moe.router.bias[4] = 100.0
    x = torch.randn(T, H, device=device)
    compare(moe, x)
    moe(x).sum().backward()
    idle = [0, 1, 2, 3, 5]
    assert all(p.grad[idle].count_nonzero() == 0 for p in moe.experts.parameters())


def test_gradcheck():
    moe = build(dtype=torch.float64, bias=True, shared_intermediate=4, shared_gate=True)
    inputs = [torch.randn(5, H, dtype=torch.float64), *moe.parameters()]
    inputs = [t.detach().requires_grad_() for t in inputs]
    names = [name for name, _ in moe.named_parameters()]

    def fn(x, *params):
        return torch.func.functional_call(moe, dict(zip(names, params, strict=True)), (x,))

    assert torch.autograd.gradcheck(fn, inputs, fast_mode=True)


@pytest.mark.parametrize("shape", [(H,), (T, H), (2, 5, H), (2, 0, H), (2, 1, 3, H)], ids=str)
def test_leading_axes(device, shape):
    moe = build(device, shared_intermediate=7)
    x = torch.randn(shape, device=device)
    out, (routing, plan) = moe(x, return_routing=True)
    assert out.shape == shape
    tokens = x.reshape(-1, H)
    torch.testing.assert_close(out.view(-1, H), moe(tokens))
    assert routing.expert_ids.shape == routing.routing_weights.shape == plan.rank.shape == (len(tokens), K)
    assert routing.scores.shape == routing.logits.shape == (len(tokens), E)
    assert plan.group_sizes.sum() == len(tokens) * K


def test_strided_input(device):
    moe = build(device)
    x = torch.randn(H, 5, 3, device=device).permute(2, 1, 0)
    torch.testing.assert_close(moe(x), moe(x.contiguous()))
    torch.testing.assert_close(moe(x[:1].expand(3, 5, H)), moe(x[:1]).expand(3, 5, H))


def test_routing_feeds_losses_and_statistics(device):
    moe = build(device)
    out, (routing, plan) = moe(torch.randn(T, H, device=device), return_routing=True)
    loss = out.square().mean() + load_balance_loss(routing.scores, group_sizes=plan.group_sizes)
    (loss + z_loss(routing.logits)).backward()
    assert moe.router.weight.grad.isfinite().all()
    assert load_statistics(plan.group_sizes).load.sum().item() == pytest.approx(1)


COEFS = {"load_balance_coef": 0.3, "z_loss_coef": 0.05}


class Doubled(Router):
    """A router that somebody wrote before ours took `need_scores`."""

    def forward(self, x):
        return super().forward(2 * x)


class Sparing(torch.nn.Module):
    """An `Experts` by another name: tokens times the sum of their weights."""

    def forward(self, x, routing_weights, plan):
        return x * routing_weights.sum(1, keepdim=True)


@pytest.mark.parametrize("coefs", [{}, COEFS], ids=["plain", "losses"])
def test_parts_of_ones_own(device, coefs):
    x = torch.randn(T, H, device=device)
    ours, theirs = build(device, **coefs), build(device, **coefs)
    theirs.router = Doubled(H, E, K, device=device)
    ours.router.weight.data = 2 * theirs.router.weight.data
    theirs.experts.load_state_dict(ours.experts.state_dict())
    torch.testing.assert_close(theirs(x), ours(x))
    theirs.experts = Sparing()
    torch.testing.assert_close(theirs(x), x)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("names", [("load_balance_coef",), ("z_loss_coef",), tuple(COEFS)], ids=str)
def test_attached_losses_are_added_losses(device, names, score):
    """The output is the same to the bit, and every gradient that of out.sum() + coef * loss."""
    coefs = {name: COEFS[name] for name in names}
    attached = build(device, score=score, bias=True, **coefs)
    plain = build(device, score=score, bias=True)
    plain.load_state_dict(attached.state_dict())
    x = torch.randn(T, H, device=device)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = attached(a)
    want, (routing, plan) = plain(b, return_routing=True)
    assert torch.equal(out, want)
    losses = {
        "load_balance_coef": load_balance_loss(routing.scores, group_sizes=plan.group_sizes),
        "z_loss_coef": z_loss(routing.logits),
    }
    out.square().sum().backward()
    (want.square().sum() + sum(coefs[name] * losses[name] for name in names)).backward()
    for got, expected in [(a, b), *zip(attached.parameters(), plain.parameters(), strict=True)]:
        torch.testing.assert_close(got.grad, expected.grad)
    alone = torch.autograd.grad(plain(b).square().sum(), plain.router.weight)[0]
    assert not torch.allclose(attached.router.weight.grad, alone, rtol=1e-3, atol=0)


def test_losses_are_attached_in_training_only(device):
    moe, plain = build(device, **COEFS).eval(), build(device)
    plain.load_state_dict(moe.state_dict())
    x = torch.randn(T, H, device=device)
    grads = [torch.autograd.grad(m(x).square().sum(), list(m.parameters())) for m in (moe, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    with torch.no_grad():
        assert torch.equal(moe.train()(x), plain(x))


def test_attached_losses_balance_the_load(device):
    moe = build(device, top_k=1, load_balance_coef=1.0)
    x = torch.randn(256, H, device=device) + 2
    optimizer = torch.optim.Adam([moe.router.weight], 0.03)
    imbalance = []
    for _ in range(60):
        out, (_, plan) = moe(x, return_routing=True)
        imbalance.append(load_statistics(plan.group_sizes).imbalance.item())
        (out * 0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert imbalance[0] > 1 and imbalance[-1] < 0.5


def test_no_tensor_stays_on_the_module(device):
    moe = build(device, shared_intermediate=7, **COEFS)
    before = [{k: v for k, v in m.__dict__.items() if not k.startswith("_")} for m in moe.modules()]
    moe(torch.randn(T, H, device=device)).sum().backward()
    after = [{k: v for k, v in m.__dict__.items() if not k.startswith("_")} for m in moe.modules()]
    assert before == after and not list(moe.buffers())


def test_state_dict(device):
    moe = build(device, bias=True, shared_intermediate=7, shared_gate=True)
    assert set(moe.state_dict()) == {
        *("router.weight", "router.bias"),
        *("experts.gate_up", "experts.gate_up_bias", "experts.down", "experts.down_bias"),
        *("shared.gate_up.weight", "shared.gate_up.bias", "shared.down.weight", "shared.down.bias"),
        "shared.gate.weight",
    }
    assert set(build().state_dict()) == {"router.weight", "experts.gate_up", "experts.down"}
    other = build(device, bias=True, shared_intermediate=7, shared_gate=True)
    other.load_state_dict(moe.state_dict())
    x = torch.randn(T, H, device=device)
    assert torch.equal(other(x), moe(x))


def test_copies(device):
    moe = build(device, shared_intermediate=7, **COEFS)
    x = torch.randn(T, H, device=device)
    file = io.BytesIO()
    torch.save(moe, file)
    file.seek(0)
    for twin in (copy.deepcopy(moe), torch.load(file, weights_only=False)):
        assert torch.equal(twin(x), moe(x))
        assert repr(twin) == repr(moe)
    assert "load_balance_coef=0.3, z_loss_coef=0.05" in repr(moe)


def test_from_the_meta_device(device):
    moe = MoE(H, WIDTH, E, K, bias=True, shared_intermediate=7, shared_gate=True, device="meta")
    assert all(p.is_meta for p in moe.parameters())
    moe(torch.zeros(2, T, H, device="meta")).sum().backward()
    assert all(p.grad.shape == p.shape for p in moe.parameters())
    moe.to_empty(device=device).reset_parameters()
    for p in moe.parameters():
        assert 0 < p.abs().max() <= 1
    compare(moe, torch.randn(T, H, device=device))


def adapted(moe, name):
    owner, _, last = name.rpartition(".")
    setattr(moe.get_submodule(owner), last, LoRALinear(moe.get_submodule(name), rank=2))


def with_adapted_experts(moe):
    moe.experts = LoRAExperts(moe.experts, rank=2)


def merged(moe):
    with_adapted_experts(moe)
    moe.experts.merge()


NOT_DRAWN = {
    "lora": (with_adapted_experts, "experts is a LoRAExperts"),
    "merged": (merged, "experts is a LoRAExperts"),
    **{
        name: (lambda moe, name=name: adapted(moe, name), f"{name} is a LoRALinear")
        for name in ("to_latent", "from_latent", "shared.gate_up", "shared.down", "shared.gate")
    },
    "nf4": (lambda moe: quantize(moe, "nf4"), "experts is a FourBitExperts"),
    "int8": (lambda moe: quantize(moe, "int8"), "experts is a QuantizedExperts"),
}


@pytest.mark.parametrize("change, message", NOT_DRAWN.values(), ids=NOT_DRAWN)
def test_all_parts_are_drawn_anew_or_none(change, message):
    moe = MoE(64, 64, 2, 1, latent=64, shared_intermediate=64, shared_gate=True, selection_bias=True)
    moe = change(moe) or moe
    moe.load.fill_(3)
    before = {name: t.clone() for name, t in [*moe.state_dict().items(), *moe.named_buffers()]}
    for part, name in ((moe, message), (moe.shared, message.removeprefix("shared."))):
        if part is moe or "shared." in message:
            with pytest.raises(TypeError, match=f"{name}, which has no reset_parameters: call it before"):
                part.reset_parameters()
    for name, t in [*moe.state_dict().items(), *moe.named_buffers()]:
        assert torch.equal(t, before[name]), name


def test_casts(device):
    x = torch.randn(T, H, device=device)
    moe = build(device, shared_intermediate=7)
    for cast in (moe.half, moe.bfloat16, moe.float):
        dtype = next(cast().parameters()).dtype
        out, (routing, _) = moe(x.to(dtype), return_routing=True)
        assert out.dtype == dtype
        assert routing.logits.dtype == routing.scores.dtype == routing.routing_weights.dtype == torch.float32


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: build(top_k=7), "top_k is 7 but num_experts is 6"),
        (lambda: build(activation="tanh"), "unknown activation 'tanh'"),
        (lambda: build(score="tanh"), "unknown score 'tanh'"),
        (lambda: build(shared_gate=True), "shared_gate=True, but shared_intermediate is 0"),
        (lambda: build(shared_intermediate=-3), "intermediate must be at least 1, not -3"),
        (lambda: build()(torch.zeros(3, 11)), r"x is \(3, 11\) but the layer needs \(\.\.\., H=12\)"),
        (lambda: MoE(0, WIDTH, E, K), "hidden must be at least 1, not 0"),
        (lambda: MoE(H, 0, E, K), "intermediate must be at least 1, not 0"),
        (lambda: MoE(H, WIDTH, 0, K), "num_experts must be at least 1, not 0"),
        (lambda: build(top_k=0), "top_k must be at least 1, not 0"),
        (lambda: build()(torch.zeros(())), r"x is \(\) but the layer needs \(\.\.\., H=12\)"),
    ],
)
def test_errors(make, text):
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: build(top_k=1.5), "top_k must be an int, not float"),
        (lambda: build(row_chunks=True), "row_chunks must be an int, not bool"),
        (lambda: MoE(H, "10", E, K), "intermediate must be an int, not str"),
        (lambda: build(shared_intermediate=7.0), "shared_intermediate must be an int, not float"),
        (lambda: build()([[0.0] * H]), "x must be a tensor, not list"),
    ],
)
def test_errors_of_type(make, text):
    with pytest.raises(TypeError, match=text):
        make()


def test_dtypes_must_agree(device):
    with pytest.raises(TypeError, match=r"x is torch.bfloat16 but gate_up is torch.float32"):
        build(device)(torch.zeros(3, H, dtype=torch.bfloat16, device=device))


def test_vmap_over_calls():
    """Each its own routing, and gradients as one by one; those by torch.func are refused, by name."""
    moe, xs = MoE(16, 12, 6, 2), torch.randn(3, 5, 16, requires_grad=True)
    parameters = list(moe.parameters())
    outs = torch.func.vmap(moe)(xs), torch.stack([moe(x) for x in xs])
    grads = [torch.autograd.grad(out.square().sum(), (xs, *parameters)) for out in outs]
    for got, want in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
        torch.testing.assert_close(got, want)
    for of_calls in (torch.func.jacrev(moe), torch.func.vmap(torch.func.grad(lambda x: moe(x).sum()))):
        with pytest.raises(NotImplementedError, match=r"by torch.autograd only.*once a sample"):
            of_calls(xs)
    with pytest.raises(NotImplementedError, match="takes one gradient at a time"):
        torch.autograd.functional.jacobian(moe, xs[0].detach(), vectorize=True)


def test_vmap_over_calls_with_losses():
    moe = MoE(16, 12, 6, 2, load_balance_coef=0.1)
    with pytest.raises(NotImplementedError, match=r"torch.func"):
        torch.func.vmap(moe)(torch.randn(3, 5, 16))
