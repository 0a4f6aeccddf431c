"""The losses that a layer attaches: several at once, over micro-batches and ranks, without padding."""

import copy
import pickle

import forked
import pytest
import torch
from check import few
from torch.utils.checkpoint import checkpoint

from moe_aiter import Capacity, MoE, balance_step, load_balance_loss, sequence_balance_loss, z_loss
from moe_aiter.routing.router import Router

H, WIDTH, E, K, B, S = 16, 8, 6, 2, 3, 5
COEFS = {
    "load_balance_coef": 0.3,
    "sequence_balance_coef": 0.2,
    "global_balance_coef": 0.5,
    "z_loss_coef": 0.05,
}


def build(device="cpu", **options):
    return MoE(H, WIDTH, E, K, device=device, **options)


def tokens(device="cpu", dtype=torch.float32):
    return torch.randn(B, S, H, device=device, dtype=dtype)


def padding(device):
    mask = torch.ones(B, S, dtype=torch.bool, device=device)
    mask[0, 3:], mask[2, 1:] = False, False
    return mask


def losses_by_hand(routing, load, names, mask):
    """Each from its own function, with its coefficient; `load` is that of the global one."""
    keep = slice(None) if mask is None else mask.flatten()
    scores, ids = routing.scores, routing.expert_ids
    losses = {
        "load_balance_coef": load_balance_loss(scores[keep], ids[keep]),
        "sequence_balance_coef": sequence_balance_loss(scores, ids, S, None if mask is None else keep),
        "global_balance_coef": load_balance_loss(scores[keep], group_sizes=load),
        "z_loss_coef": z_loss(routing.logits[keep]),
    }
    return sum(COEFS[name] * losses[name] for name in names)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("names", [*((name,) for name in COEFS), tuple(COEFS)], ids=str)
def test_attached_losses_are_added_losses(device, names, masked):
    """Over two micro-batches: the output to the bit, and every gradient that of out + sum of coef * loss."""
    attached = build(device, score="sigmoid", **{name: COEFS[name] for name in names})
    plain = build(device, score="sigmoid")
    plain.load_state_dict(attached.state_dict())
    mask = padding(device) if masked else None
    load = torch.zeros(E, dtype=torch.int64, device=device)
    for _ in range(2):
        x = tokens(device)
        out = attached(x, mask=mask)
        want, (routing, plan) = plain(x, mask=mask, return_routing=True)
        assert torch.equal(out, want)
        load += plan.group_sizes
        out.square().sum().backward()
        (want.square().sum() + losses_by_hand(routing, load, names, mask)).backward()
    for got, expected in zip(attached.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad)


SHAPES = [(32,), (1, 32), (4, 8)]
HOWS = [(how, shape) for how in ("eager", "capacity", "compile") for shape in SHAPES]


@pytest.mark.parametrize("how, shape", few(HOWS, *HOWS[:6], HOWS[-1], several=True))
def test_packed_sequences(device, shape, how):
    """Of lengths 5, 20 and 7: the layer's loss is the mean of theirs."""
    options = {"capacity": Capacity(1.0, "position")} if how == "capacity" else {}
    moe = build(device, sequence_balance_coef=1.0, **options)
    x, mask = torch.randn(32, H, device=device), torch.ones(32, dtype=torch.bool, device=device)
    mask[3] = False
    given = {"mask": mask.view(shape), "cu_seqlens": torch.tensor([0, 5, 25, 32], device=device).int()}
    torch.compiler.reset()
    call = torch.compile(moe, fullgraph=True, backend="aot_eager", dynamic=True) if how == "compile" else moe
    call(x.view(*shape, H), **given).mul(0).sum().backward()
    plain = build(device)
    plain.load_state_dict(moe.state_dict())
    loss = 0
    for part, keep in zip(x.split([5, 20, 7]), mask.split([5, 20, 7]), strict=True):
        _, (routing, _) = plain(part[keep], return_routing=True)
        loss = loss + load_balance_loss(routing.scores, routing.expert_ids) / 3
    loss.backward()
    torch.testing.assert_close(moe.router.weight.grad, plain.router.weight.grad)
    with torch.no_grad():
        moe.eval()(x.view(*shape, H), **given)


def test_packed_sequences_that_cannot_be(device):
    moe, x = build(device), torch.randn(8, H, device=device)
    for cu_seqlens, error, text in (
        (torch.zeros(2, 2, dtype=torch.int32, device=device), ValueError, r"cu_seqlens must be \(B \+ 1\)"),
        (torch.zeros(2, device=device), TypeError, "cu_seqlens must be int32 or int64"),
        (torch.tensor([0, 9], device=device), ValueError, "cu_seqlens must begin with 0"),  # in debug mode
        ([0, 8], TypeError, "cu_seqlens must be a tensor, not list"),
    ):
        with pytest.raises(error, match=text):
            moe(x, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_nothing(device, use_reentrant):
    moe, x = build(device, **COEFS), tokens(device)
    twin = copy.deepcopy(moe)
    for layer, run in ((moe, moe), (twin, lambda x: checkpoint(twin, x, use_reentrant=use_reentrant))):
        for part in (x, 2 * x):
            run(part.clone().requires_grad_()).square().sum().backward()
        assert layer.load.sum() == 2 * B * S * K
    for a, b in zip(moe.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_one_graph(device):
    torch.compiler.reset()
    moe, mask = build(device, **COEFS), padding(device)
    twin = copy.deepcopy(moe)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager", dynamic=True)
    for _ in range(2):
        x = tokens(device)
        grads = []
        for fn, layer in ((compiled, moe), (twin, twin)):
            out = fn(x, mask=mask)
            grads.append((out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)
    assert torch.equal(moe.load, twin.load) and moe.load.sum() == 2 * int(mask.sum()) * K
    balance_step(moe)
    assert moe.load.count_nonzero() == 0


@pytest.mark.parametrize("shared", [0, 4])
def test_padding_goes_to_no_expert(device, shared):
    moe, mask, x = build(device, shared_intermediate=shared), padding(device), tokens(device)
    out, (routing, plan) = moe(x, mask=mask, return_routing=True)
    assert plan.group_sizes.sum() == mask.sum() * K
    assert (routing.expert_ids.view(B, S, K)[~mask] == -1).all()
    assert not out[~mask].any()
    torch.testing.assert_close(out[mask], moe(x)[mask])


def test_padding_and_a_router_of_ones_own(device):
    class Mine(Router):
        def forward(self, x):
            return super().forward(x)

    moe, mask, x = build(device), padding(device), tokens(device)
    want = moe(x, mask=mask)
    mine = Mine(H, E, K, device=device)
    mine.load_state_dict(moe.router.state_dict())
    moe.router = mine
    torch.testing.assert_close(moe(x, mask=mask), want)


def one_rank(rank, folder, world):
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    torch.manual_seed(0)
    group = torch.distributed.group.WORLD
    moe = build(global_balance_coef=0.5, global_balance_group=group)
    moe = copy.deepcopy(moe)  # shares the group, of which there is one
    assert moe.global_balance_group is group
    moe = pickle.loads(pickle.dumps(moe))  # with the group's name
    other = copy.deepcopy(moe)
    other.global_balance_group = "of another job"
    with pytest.raises(RuntimeError, match="the process group 'of another job', which this process does not"):
        other(torch.randn(1, 4, H))
    torch.manual_seed(1 + rank)
    x = torch.randn(1, 4 + rank, H)  # uneven
    moe(x).sum().backward()
    torch.save((x, moe.router.weight.grad, moe.state_dict()), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.ranks
def test_the_global_loss_counts_over_ranks(tmp_path):
    forked.call(one_rank, 2, str(tmp_path), 2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    moe = build()
    moe.load_state_dict(ranks[0][2])
    results = [moe(x, return_routing=True) for x, *_ in ranks]
    load = sum(plan.group_sizes for _, (_, plan) in results)
    for (out, (routing, _)), (_, grad, _) in zip(results, ranks, strict=True):
        loss = out.sum() + 0.5 * load_balance_loss(routing.scores, group_sizes=load)
        torch.testing.assert_close(torch.autograd.grad(loss, moe.router.weight)[0], grad)


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda x, m: build()(x, mask=m[:2]), ValueError, r"mask is \(2, 5\) but x is \(3, 5, 16\)"),
        (lambda x, m: build()(x, mask=m.flatten()), ValueError, r"mask is \(15,\) but x is"),
        (lambda x, m: build()(x, mask=m.int()), TypeError, "mask must be bool, not torch.int32"),
        (lambda x, m: build()(x, mask=[True]), TypeError, "mask must be a tensor, not list"),
        (
            lambda x, m: build(global_balance_group=object()),
            ValueError,
            "global_balance_group is given, but global_balance_coef is 0",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call(tokens(), padding("cpu"))


@pytest.mark.parametrize("name", COEFS)
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_coefficient_that_cannot_be_meant(name, value):
    with pytest.raises(ValueError, match=f"{name} must be at least 0 and finite, not {value}"):
        MoE(8, 8, 4, 2, **{name: value})
    with pytest.raises(TypeError, match=f"{name} must be a number, not str"):
        MoE(8, 8, 4, 2, **{name: "0.1"})


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_cannot_be_meant(scale):
    with pytest.raises(ValueError, match=f"scale must be above 0 and finite, not {scale}"):
        MoE(8, 8, 4, 2, scale=scale)
