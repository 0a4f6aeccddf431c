"""Muon for stacked experts: as torch's Muon on each matrix, AdamW for the rest, and sharded as whole."""

import copy
import warnings
from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from moe_aiter import LoRAExperts, LoRALinear, MoE, OptimizedMoELayer, fuse_projections, quantize
from moe_aiter.config import interpret
from moe_aiter.distributed import expert_mesh, load_sharded, parallelize, save_sharded
from moe_aiter.optim import HALVES, Muon, muon_groups

from .distributed.ranks import run, whole
from .integrations.families import CONVERTED, FUSED, LAYOUTS, LONGCAT, tiny_config

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


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("halves", [None, "rows", "interleaved", "transposed", "transposed interleaved"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_each_matrix_as_by_torch(adjust_lr_fn, halves, nesterov, dtype=torch.float32):
    w = nn.Parameter(torch.randn(3, 12, 10, dtype=dtype))
    given = {"adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov}
    ours = Muon([{"params": [w], "halves": halves}], lr=0.05, weight_decay=0.1, **given)
    parts = {None: [slice(None)], "rows": [slice(6), slice(6, 12)], "transposed": [slice(5), slice(5, 10)]}
    parts["interleaved"] = parts["transposed interleaved"] = [slice(0, None, 2), slice(1, None, 2)]

    def matrix(t, e, part):
        return t[e].mT[part] if halves and "transposed" in halves else t[e, part]

    each = [(e, part) for e in range(3) for part in parts[halves]]
    theirs = [nn.Parameter(matrix(w, *which).detach().clone()) for which in each]
    torchs = torch.optim.Muon(theirs, lr=0.05, weight_decay=0.1, **given)
    for step in range(3):
        w.grad = torch.randn(w.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
        for which, p in zip(each, theirs, strict=True):
            p.grad = matrix(w.grad, *which).clone()
        ours.step()
        torchs.step()
    for which, p in zip(each, theirs, strict=True):
        torch.testing.assert_close(matrix(w, *which), p, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("halves", [None, "transposed interleaved"])
def test_float64_as_by_torch(halves):
    test_each_matrix_as_by_torch("match_rms_adamw", halves, True, torch.float64)


@pytest.mark.parametrize("shape", [(0, 4, 6), (3, 0, 6), (3, 4, 0), (0, 6), (6, 0), (0, 0), (0,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parameters_of_no_numbers(shape, dtype):
    """They are updated beside others, by either method, and have their state."""
    for halves in (None, *HALVES):
        for adjust_lr_fn in ("original", "match_rms_adamw"):
            w, other = (nn.Parameter(torch.ones(s, dtype=dtype)) for s in (shape, (2, 4, 4)))
            muon = Muon([{"params": [w, other], "halves": halves}], lr=1.0, adjust_lr_fn=adjust_lr_fn)
            w.grad, other.grad = torch.ones_like(w), torch.ones_like(other)
            muon.step()
            assert muon.state[w] and not torch.equal(other, torch.ones_like(other))


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
    for g, stored in zip(groups, Muon(groups).param_groups, strict=True):
        assert g["param_names"] == stored["param_names"] == [names[id(p)] for p in g["params"]]


EMBEDDINGS = "*embed_tokens.weight", "model.embeddings.weight", "*.wte.weight", "lm_head.weight"
GATES = "*.mlp.gate.weight", "*.mixer.gate.weight", "*.router.*", "*.shared_expert_gate.weight"
NORMS = "*norm.weight", "*norm_?.weight", "*norm.?.weight"
VECTORS = *NORMS, "*bias", "*.conv1d.weight", "*.A_log", "*.sinks", "*scale", "*_hc.*", "*.hc_head.*"
STACKED = ("transformer.*.experts.mlp.*",)  # (E I, H), of Dbrx
GATE_UP = "*.gate_up_proj", "*mlp.input_linear.weight"
TRANSPOSED = {"gpt_oss": "transposed interleaved", "llama4_text": "transposed", "aria_text": "transposed"}


@pytest.mark.parametrize("family", [*CONVERTED, *FUSED, *LONGCAT, *LAYOUTS])
def test_groups_of_transformers(family):
    """By AdamW are embeddings, routers, gates and vectors, by Muon all else, gate and up apart."""
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    groups = muon_groups(model)
    found = {name: g for g in groups for name in g["param_names"]}
    assert found.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    for name, group in found.items():
        other = any(fnmatchcase(name, pattern) for pattern in EMBEDDINGS + GATES + VECTORS + STACKED)
        gate_up = any(fnmatchcase(name, pattern) for pattern in GATE_UP)
        kind = TRANSPOSED.get(family, "rows") if gate_up else None
        assert (group["muon"], group["halves"]) == ((False, None) if other else (True, kind)), name
        vector = fnmatchcase(name, "*bias") or "shared_expert_gate" in name
        if vector and model.get_parameter(name).dim() > 1:
            assert group["weight_decay"] == 0, name
        else:
            assert "weight_decay" not in group, name


def kinds(model, **given):
    """What Muon does with each parameter: how gate and up lie, "matrix", "no decay" or "adamw"."""
    return {
        name: (g["halves"] or "matrix") if g["muon"] else "no decay" if "weight_decay" in g else "adamw"
        for g in muon_groups(model, **given)
        for name in g["param_names"]
    }


class Part(nn.Module):
    """A module of parameters and modules, under a class name of its own."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            shape = isinstance(part, tuple)
            setattr(self, name, nn.Parameter(torch.ones(part)) if shape else part)


class Conv1D(Part):
    """As transformers' linear layer (in, out)."""


class GroupedExperts(Part):
    """As torchtitan's."""


class SparseMoELayer(Part):
    """As in many models of one file."""


class TopKRouter(Part):
    """As transformers'."""


def linear(rows, columns=8):
    return nn.Linear(columns, rows, bias=False)


FOREIGN = {  # parts of models of other packages, and what becomes of their parameters
    "linear": (Conv1D(weight=(8, 24), bias=(24,)), {"weight": "matrix", "bias": "adamw"}),
    "attention": (
        nn.MultiheadAttention(8, 2, bias=False, add_bias_kv=True),
        {"in_proj_weight": "matrix", "out_proj.weight": "matrix", "bias_k": "no decay", "bias_v": "no decay"},
    ),
    "stacks": (GroupedExperts(w1=(4, 6, 8), w2=(4, 8, 6)), {"w1": "matrix", "w2": "matrix"}),
    "stacks beside a router": (
        SparseMoELayer(router=(4, 8), wi=(4, 6, 8), wo=(4, 8, 6), shared=Part(w1=(6, 8))),
        {"router": "adamw", "wi": "matrix", "wo": "matrix", "shared.w1": "matrix"},
    ),
    "vectors of experts": (
        Part(experts=Part(up=(4, 6, 8), offset=(4, 6), shift=(4, 1, 6), up_scales=(4, 6, 2))),
        {
            "experts.up": "matrix", "experts.offset": "no decay", "experts.shift": "no decay",
            "experts.up_scales": "no decay",
        },
    ),
    "no experts": (
        Part(conv=nn.Conv1d(6, 6, 4, groups=6, bias=False), positions=(3, 5, 8), query=(5, 8), fn=(4, 16)),
        {"conv.weight": "adamw", "positions": "adamw", "query": "adamw", "fn": "adamw"},
    ),
    "routers": (
        Part(router=TopKRouter(weight=(4, 8), e_score_correction_bias=(1, 4)), gate=Part(wg=linear(4))),
        {
            "router.weight": "adamw", "router.e_score_correction_bias": "no decay", "gate.wg.weight": "adamw",
        },
    ),
    "gates": (
        Part(shared_gate=linear(1), attention_gate=linear(8), norm=nn.LayerNorm((3, 8), bias=False)),
        {"shared_gate.weight": "no decay", "attention_gate.weight": "adamw", "norm.weight": "no decay"},
    ),
    "an MLP": (
        Part(gate=linear(6), up=linear(6), down=linear(8, 6)),
        {"gate.weight": "matrix", "up.weight": "matrix", "down.weight": "matrix"},
    ),
    "a fused MLP": (
        Part(gate_up_proj=linear(12), down_proj=linear(8, 6)),
        {"gate_up_proj.weight": "rows", "down_proj.weight": "matrix"},
    ),
    "an MLP without a gate": (
        Part(gate_up_proj=linear(6), down_proj=linear(8, 6)),
        {"gate_up_proj.weight": "matrix", "down_proj.weight": "matrix"},
    ),
    "each expert a module": (
        Part(experts=nn.ModuleList([Part(w1=linear(6), w2=linear(8, 6))]), gate=linear(4)),
        {"experts.0.w1.weight": "matrix", "experts.0.w2.weight": "matrix", "gate.weight": "adamw"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_groups_of_parts(case):
    part, expected = FOREIGN[case]
    assert kinds(part) == expected
    assert kinds(nn.ModuleDict({"mlp": part})) == {f"mlp.{name}": kind for name, kind in expected.items()}


def test_groups_of_own_layers():
    found = kinds(MoE(8, 6, 4, 2, bias=True, shared_intermediate=6, shared_gate=True, latent=4))
    assert found == {
        "router.weight": "adamw", "router.bias": "adamw", "experts.gate_up": "rows", "experts.down": "matrix",
        "experts.gate_up_bias": "no decay", "experts.down_bias": "no decay", "to_latent.weight": "matrix",
        "from_latent.weight": "matrix", "shared.gate_up.weight": "rows", "shared.gate_up.bias": "adamw",
        "shared.down.weight": "matrix", "shared.down.bias": "adamw", "shared.gate.weight": "no decay",
    }  # fmt: skip
    for activation, kind in (("gelu", "matrix"), ("swiglu", "transposed")):
        layer = OptimizedMoELayer(8, 4, 6, activation=activation)
        assert kinds(layer) == {"w1": kind, "w2": "matrix"}
    fused = nn.ModuleDict({"gate_proj": linear(6), "up_proj": linear(6), "down_proj": linear(8, 6)})
    assert fuse_projections(fused) == 1
    assert kinds(fused) == {"gate_proj.fused.weight": "rows", "down_proj.weight": "matrix"}


def test_groups_of_adapters():
    """Factors are matrices and magnitudes vectors; frozen weights, also those of 4 bits, have no group."""
    moe = MoE(64, 64, 4, 2, shared_intermediate=6)
    moe.experts = LoRAExperts(moe.experts, rank=2, dora=True)
    moe.shared.gate_up = LoRALinear(moe.shared.gate_up, 3, rank=2)
    found = kinds(moe)
    assert found.pop("router.weight") == "adamw" and found.pop("shared.down.weight") == "matrix"
    vectors = {name: kind for name, kind in found.items() if name.endswith("magnitude")}
    assert vectors == dict.fromkeys(
        ["experts.gate_up_lora.magnitude", "experts.down_lora.magnitude"], "no decay"
    )
    parts = "experts.gate_up_lora", "experts.down_lora", "shared.gate_up.lora"
    assert found == vectors | {f"{part}.{factor}": "matrix" for part in parts for factor in "AB"}
    assert kinds(quantize(moe, "nf4")) == kinds(moe)


def test_groups_of_peft():
    """Factors of one layer are matrices; PEFT has those of all experts in one, which AdamW gets."""
    peft = pytest.importorskip("peft")
    model = Part(attention=Part(q_proj=linear(8)), experts=Part(up=(4, 6, 8), down=(4, 8, 6)))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.up", "experts.down"])
    found = kinds(peft.get_peft_model(model, config))
    assert len(found) == 6
    for name, kind in found.items():
        assert kind == ("matrix" if "q_proj" in name else "adamw"), name


def test_output_layers():
    """By name, or by shape if no name says so; tied embeddings are none of Muon's, whatever comes first."""
    body = {"first": linear(50), "last": linear(50)}
    assert set(kinds(Part(tokens=nn.Embedding(50, 8), **body)).values()) == {"adamw"}
    named = kinds(Part(tokens=nn.Embedding(50, 8), **body, lm_head=linear(50), score=linear(3)))
    assert [name for name, kind in named.items() if kind == "matrix"] == ["first.weight", "last.weight"]
    assert kinds(Part(body=linear(8), lm_head=linear(50))) == {
        "body.weight": "matrix",
        "lm_head.weight": "adamw",
    }
    tied = Part(up_proj=linear(50), tokens=nn.Embedding(50, 8))
    tied.up_proj.weight = tied.tokens.weight
    assert kinds(tied) == {"up_proj.weight": "adamw"}
    assert kinds(tied, adamw=["tokens.*"]) == {"up_proj.weight": "adamw"}


def test_the_log_says_who_gets_what(caplog):
    with caplog.at_level("INFO", "moe_aiter"):
        muon_groups(Model(shared_gate=True))
    said = [record.getMessage() for record in caplog.records]
    assert (
        "Muon, halves 'rows': 4 parameters, blocks.*.experts.gate_up, blocks.*.shared.gate_up.weight" in said
    )
    vectors = "blocks.*.experts.gate_up_bias, blocks.*.experts.down_bias, blocks.*.shared.gate.weight"
    assert f"AdamW, no weight decay: 6 parameters, {vectors}" in said


def test_experts_are_apart_and_vectors_do_not_decay():
    """The gradient of one expert's biases changes no update of another; vectors never decay."""

    def after(factor, steps=2):
        torch.manual_seed(0)
        moe = MoE(H, 8, E, 2, bias=True, shared_intermediate=8, shared_gate=True).double()
        optimizer = Muon(muon_groups(moe), lr=0.1, weight_decay=0.5)
        for p in moe.parameters():
            p.grad = torch.randn_like(p) * (factor is not None)
        for bias in (moe.experts.gate_up_bias, moe.experts.down_bias):
            bias.grad[1] *= factor or 0
        for _ in range(steps):
            optimizer.step()
        return moe

    one, other = after(1.0), after(-3.0)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q) or p.shape[0] == E
    for p, q in (
        (one.experts.gate_up_bias, other.experts.gate_up_bias),
        (one.experts.down_bias, other.experts.down_bias),
    ):
        assert [torch.equal(*pair) for pair in zip(p, q, strict=True)] == [True, False, True, True]
    before, still = after(None, steps=0), after(None)
    for (name, p), q in zip(still.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q) == (name.endswith("bias") or name == "shared.gate.weight"), name


def test_other_parameters_as_by_adamw():
    model, other = Model(), Model()
    patterns = ["*"]
    ours = Muon(muon_groups(model, adamw=patterns), lr=1e-2, weight_decay=0.1)
    matrices = [p for name, p in other.named_parameters() if p.dim() >= 2 and not name.endswith("bias")]
    decayed = {id(p) for p in matrices}
    rest = [{"params": [p for p in other.parameters() if id(p) not in decayed], "weight_decay": 0.0}]
    theirs = torch.optim.AdamW([{"params": matrices}, *rest], lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
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
        assert kinds(model) == kinds(alone)
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
        for group, saved in zip(loaded.param_groups, optimizers[1].param_groups, strict=True):
            assert group["param_names"] == saved["param_names"]
        keys = FileSystemReader(folder / str(ep)).read_metadata().state_dict_metadata
        assert not any("param_names" in key for key in keys)  # each parameter would have all names
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(whole(p), whole(q))
            for key, value in optimizers[1].state[p].items():
                assert torch.equal(whole(value), whole(loaded.state[q][key])), key


@pytest.mark.skipif(interpret, reason="nothing here runs Triton")
@pytest.mark.ranks
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
    with pytest.raises(ValueError, match=r"a parameter \(3, 2, 5\) has odd columns"):
        Muon([{"params": [odd[0].detach().mT], "halves": "transposed"}])
    with pytest.raises(TypeError, match="adamw must be patterns"):
        muon_groups(Model(), adamw="*")


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, getattr(torch.optim, "Muon", None)])
@pytest.mark.parametrize("named", [False, True])
def test_the_state_of_another_optimizer_is_refused(make, named):
    """Also if its groups are those of `muon_groups`, whose keys torch keeps."""
    if make is None:
        pytest.skip("this torch has no Muon")
    weights = [torch.ones(2, 2, requires_grad=True)]
    group = {"params": weights, "muon": True, "halves": None} if named else {"params": weights}
    other, optimizer = make([group], lr=0.1), Muon(weights, lr=0.2)
    for each in (other, optimizer):
        weights[0].grad = torch.ones(2, 2)
        each.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"the state's groups lack .*: it is that of another optimizer"):
        optimizer.load_state_dict(other.state_dict())
    assert str(optimizer.state_dict()) == str(before)
    optimizer.load_state_dict(before)
    optimizer.step()


@pytest.mark.parametrize("muon", [False, True])
def test_sparse_gradients_are_refused_before_anything_changes(muon):
    model = nn.Sequential(nn.Linear(4, 5), nn.Embedding(5, 4, sparse=True))
    optimizer = Muon(model.parameters() if muon else muon_groups(model), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    (model[0](torch.ones(4)).sum() + model[1](torch.tensor([1])).sum()).backward()
    with pytest.raises(RuntimeError, match="Muon does not support sparse gradients: make embeddings with"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters())) and not optimizer.state
