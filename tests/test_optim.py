"""Muon for stacked experts: as torch's Muon on each matrix, AdamW for the rest, and sharded as whole."""

import warnings

import pytest
import torch
from check import error
from torch import nn

from moe_aiter import MoE, optim
from moe_aiter.config import interpret
from moe_aiter.distributed import expert_mesh, load_sharded, parallelize, save_sharded
from moe_aiter.optim import Muon, muon_groups, orthogonal

from .distributed.ranks import run, whole

H, E = 16, 4


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(50, H), nn.Linear(H, 50, bias=False)
        options = {"shared_intermediate": 8, "bias": True} | options
        self.blocks = nn.ModuleList([MoE(H, 24, E, 2, **options) for _ in range(2)])
        self.out, self.positions = nn.Linear(H, H), nn.Embedding(H, H)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.out(x))


def loss_of(model, ids):
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def batch(step, count=4):
    return torch.randint(50, (count, 9), generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])  # of CPUs, and of GPUs
@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 5, 40), (2, 40, 5), (1, 1, 7), (0, 4, 3), (2, 2, 6, 9)])
def test_orthogonal(shape, dtype, monkeypatch):
    """The singular vectors stay, the values are near 1, whatever the size of the matrix."""
    monkeypatch.setattr(optim, "dtype_on", lambda device: dtype)
    u = torch.randn(shape) * 1e-5
    x = orthogonal(u, 5)
    assert x.shape == u.shape and x.dtype == dtype
    if u.numel():
        left, _, right = torch.linalg.svd(u, full_matrices=False)
        inner = left.mT @ x.float() @ right.mT
        values = inner.diagonal(dim1=-2, dim2=-1)
        assert values.min() > 0.3 and values.max() < 1.4
        assert error(inner, values.diag_embed()) < (0.05 if dtype == torch.bfloat16 else 0.01)
    assert orthogonal(torch.zeros(shape), 5).isfinite().all()


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("halves", [None, "rows", "interleaved"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_each_matrix_as_by_torch(adjust_lr_fn, halves, nesterov):
    w = nn.Parameter(torch.randn(3, 12, 10))
    given = {"adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov}
    ours = Muon([{"params": [w], "halves": halves}], lr=0.05, weight_decay=0.1, **given)
    parts = {None: [slice(None)], "rows": [slice(6), slice(6, 12)]}
    parts["interleaved"] = [slice(0, None, 2), slice(1, None, 2)]
    each = [(e, i) for e in range(3) for i in range(len(parts[halves]))]
    theirs = {(e, i): nn.Parameter(w[e, parts[halves][i]].detach().clone()) for e, i in each}
    torchs = torch.optim.Muon(theirs.values(), lr=0.05, weight_decay=0.1, **given)
    for step in range(3):
        w.grad = torch.randn(w.shape, generator=torch.Generator().manual_seed(step))
        for (e, i), p in theirs.items():
            p.grad = w.grad[e, parts[halves][i]].clone()
        ours.step()
        torchs.step()
    for (e, i), p in theirs.items():
        torch.testing.assert_close(w[e, parts[halves][i]], p, rtol=1e-2, atol=2e-3)


def test_groups():
    """Each parameter once: matrices by Muon; embeddings, the head, routers and vectors by AdamW."""
    model = Model()
    model.out.bias.requires_grad_(False)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = muon_groups(model, adamw=["out.*"])
    found = {names[id(p)]: (g["muon"], g["halves"]) for g in groups for p in g["params"]}
    assert found.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert found["blocks.0.experts.gate_up"] == (True, "rows")
    assert found["blocks.0.experts.down"] == (True, None)
    assert found["blocks.1.shared.gate_up.weight"] == (True, "rows")
    for name in ("tokens.weight", "head.weight", "blocks.0.router.weight", "out.weight"):
        assert found[name] == (False, None), name
    every = [(names[id(p)], g["muon"]) for g in muon_groups(model) for p in g["params"]]
    assert ("out.weight", True) in every and (
        "head.weight",
        False,
    ) in every  # both are as large as an embedding
    interleaved = muon_groups(MoE(H, 8, E, 2, interleaved=True))
    assert [g["halves"] for g in interleaved if g["muon"]] == ["interleaved", None]
    assert {g["halves"] for g in muon_groups(MoE(H, 8, E, 2, activation="gelu"))} == {None}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Muon(groups)
        Muon([p for p in model.parameters() if p.dim() < 3])
    for params in (model.parameters(), list(model.named_parameters())):
        with pytest.warns(UserWarning, match="muon_groups") as warned:
            Muon(params)
        assert [w.filename for w in warned] == [__file__]
    biases = [p for g in groups for p in g["params"] if p.dim() < 2]
    assert biases and all(not g["muon"] or p.dim() >= 2 for g in groups for p in g["params"] if p.dim() != 2)


def test_other_parameters_as_by_adamw():
    model, other = Model(), Model()
    patterns = ["*"]
    ours = Muon(muon_groups(model, adamw=patterns), lr=1e-2, weight_decay=0.1)
    decayed = [p for p in other.parameters() if p.dim() >= 2]
    rest = [{"params": [p for p in other.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    theirs = torch.optim.AdamW([{"params": decayed}, *rest], lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
    for step in range(3):
        for m, optimizer in ((model, ours), (other, theirs)):
            loss_of(m, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        if "experts" not in name or name.endswith("bias"):
            torch.testing.assert_close(p, q, msg=name)


def test_training_learns_and_resumes(tmp_path):
    """A saved optimizer goes on as one that was not interrupted, to the bit."""
    model = Model()
    optimizer = Muon(muon_groups(model), lr=1e-2)
    first = loss_of(model, batch(0)).item()
    for step in range(6):
        loss_of(model, batch(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "saved.pt")
    assert loss_of(model, batch(0)).item() < first - 0.5
    other = Model()
    again = Muon(muon_groups(other), lr=1e-2)
    for module, state in zip((other, again), torch.load(tmp_path / "saved.pt"), strict=True):
        module.load_state_dict(state)
    for _ in range(3):
        loss_of(other, batch(0)).backward()
        again.step(lambda: None)
        again.zero_grad()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def sharded(rank, world, folder):
    for ep in (1, 2):
        alone, model = Model(), parallelize(Model(), expert_mesh("cpu", ep))
        optimizers = [Muon(muon_groups(m), lr=1e-2) for m in (alone, model)]
        for step in range(2):
            loss_of(alone, batch(step)).backward()
            loss_of(model, batch(step).chunk(world)[rank]).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(p), q.detach(), rtol=1e-2, atol=2e-3, msg=f"{ep}, {name}")
        save_sharded(folder / str(ep), model, optimizers[1])
        other = parallelize(Model(), expert_mesh("cpu", 3 - ep))
        loaded = Muon(muon_groups(other), lr=1e-2)
        load_sharded(folder / str(ep), other, loaded)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(whole(p), whole(q))
            for key, value in optimizers[1].state[p].items():
                assert torch.equal(whole(value), whole(loaded.state[q][key])), key


@pytest.mark.skipif(interpret, reason="nothing here runs Triton")
def test_two_processes(tmp_path):
    run(2, sharded, tmp_path)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"lr": -1.0}, "lr must"),
        ({"momentum": float("nan")}, "momentum must"),
        ({"ns_steps": 0}, "ns_steps must"),
        ({"adjust_lr_fn": "none"}, "unknown adjust_lr_fn 'none'; known: match_rms_adamw, original"),
        ({"betas": (0.9, 1.0)}, "betas must"),
    ],
)
def test_errors(given, message):
    with pytest.raises(ValueError, match=message):
        Muon([torch.ones(2, 2, requires_grad=True)], **given)


def test_errors_of_groups():
    odd = [torch.ones(3, 5, 2, requires_grad=True)]
    with pytest.raises(ValueError, match=r"a parameter \(3, 5, 2\) has odd rows"):
        Muon([{"params": odd, "halves": "rows"}])
    with pytest.raises(ValueError, match="unknown halves 'columns'"):
        Muon([{"params": odd, "halves": "columns"}])
    with pytest.raises(TypeError, match="adamw must be patterns"):
        muon_groups(Model(), adamw="*")
