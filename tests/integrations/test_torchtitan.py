"""torchtitan's MoE with our routed experts beside its own, and both beside a plain loop in float64."""

import copy
import importlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from check import assert_output_as_good, error
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

pytest.importorskip("torchtitan.config.override", reason="torchtitan 0.3 or newer is not installed")

from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.utils import get_spmd_backend, set_spmd_backend
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from moe_aiter.integrations import torchtitan as file
from moe_aiter.integrations.torchtitan import Dispatcher, Experts, GptOssExperts, convert

NAME = "moe_aiter.integrations.torchtitan.experts"
FLAVORS = [("deepseek_v3", "debugmodel"), ("qwen3", "debugmodel_moe"), ("gpt_oss", "debugmodel")]
BATCH = 2, 24
PARTS = "model", "optimizer"
WEIGHTS = ["w1_EFD", "w3_EFD", "w2_EDF"]
flavors = pytest.mark.parametrize("flavor", FLAVORS, ids=[name for name, _ in FLAVORS])
kinds = pytest.mark.parametrize("kind", [FLAVORS[0], "local"], ids=["standard", "local"])


def spec_of(flavor, overridden):
    """A fresh specification; its routed experts replaced as the trainer does it."""
    name, size = flavor
    spec = importlib.import_module(f"torchtitan.models.{name}").model_registry(size)
    if overridden:
        assert apply_overrides(OverrideConfig(imports=[NAME]), spec.model)
    return spec


def moe_of(flavor=FLAVORS[0], overridden=True, dtype=torch.float32):
    """One MoE, whose weights bfloat16 can hold, and large enough that every product counts."""
    config = next(layer.moe for layer in spec_of(flavor, overridden).model.layers if layer.moe is not None)
    moe = config.build()
    torch.manual_seed(0)
    moe.init_states()
    with torch.no_grad():
        for p in moe.parameters():
            p.copy_((torch.randn(p.shape) * p.shape[-1] ** -0.5).bfloat16())
    return moe.to(dtype)


def tokens(moe, dtype=torch.float32):
    """In the shape that this version's MoE takes: (B, L, D), or (T, D) as since August 2026."""
    flat = "x_TD" in type(moe).forward.__annotations__
    x = torch.randn(*BATCH, moe.router.gate.weight.shape[-1]).bfloat16().to(dtype)
    return x.flatten(0, 1) if flat else x


def step(moe, x, dout):
    """The output, and the gradients by name."""
    moe.zero_grad()
    x = x.detach().requires_grad_()
    out = moe(x)
    out.backward(dout)
    grads = {name: p.grad for name, p in moe.named_parameters()}
    return {"out": out.detach(), "x": x.grad, **grads}


def exact(moe, x, dout):
    """The same in float64, expert by expert, as the formula says."""
    moe = copy.deepcopy(moe).double()

    def run(x, scores, ids, counts):
        inner, flat = moe.routed_experts.inner_experts, x.flatten(0, -2)
        out = torch.zeros_like(flat)
        scores, ids = scores.view(len(flat), -1), ids.view(len(flat), -1)
        for e in range(inner.num_experts):
            share = (scores * (ids == e)).sum(-1, keepdim=True)
            out = out + share * one_expert(inner, flat, e)
        return out.view_as(x)

    moe.routed_experts.forward = run
    return step(moe, x.double(), dout.double())


def one_expert(inner, x, e):
    if isinstance(inner, GptOssGroupedExperts):
        z = F.linear(x, inner.mlp1_weight_EGD[e], inner.mlp1_bias_EG[e])
        gate, up = z[:, ::2].clamp(max=inner.swiglu_limit), z[:, 1::2]
        up = up.clamp(-inner.swiglu_limit, inner.swiglu_limit)
        a = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        return F.linear(a, inner.mlp2_weight_EDF[e], inner.mlp2_bias_ED[e])
    w1, w3, w2 = (getattr(inner, name)[e] for name in WEIGHTS)
    return F.silu(x @ w1.T) * (x @ w3.T) @ w2.T


@flavors
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_as_good_as_torchtitan(flavor, dtype):
    """Router, shared experts and counters are theirs; out and every gradient beside float64."""
    narrow = torch.bfloat16 if flavor[0] == "gpt_oss" else dtype  # theirs runs in no other
    ours, theirs = moe_of(flavor, True, dtype), moe_of(flavor, False, narrow)
    assert type(ours.routed_experts.inner_experts) in (Experts, GptOssExperts)
    x = tokens(ours, dtype)
    dout = torch.randn_like(x).bfloat16().to(dtype)
    got, best = step(ours, x, dout), step(theirs, x.to(narrow), dout.to(narrow))
    truth = exact(theirs, x, dout)
    assert got.keys() == truth.keys()
    for name in truth:
        assert_output_as_good(name, got[name], best[name].to(dtype), truth[name])
    assert torch.equal(ours.tokens_per_expert_E, theirs.tokens_per_expert_E)


@flavors
def test_checkpoints_are_the_same(flavor):
    """Names, shapes, initial values; torchtitan's adapter to Hugging Face's names and back."""
    models = []
    for overridden in (False, True):
        spec = spec_of(flavor, overridden)
        model = spec.model.build()
        torch.manual_seed(0)
        model.init_states()
        models.append((model, spec.state_dict_adapter(spec.model, None)))
    (theirs, their_adapter), (ours, our_adapter) = models
    want, got = theirs.state_dict(), ours.state_dict()
    assert_same(got, want)
    on_disk = our_adapter.to_hf(got)
    assert_same(on_disk, their_adapter.to_hf(want))
    back = our_adapter.from_hf(on_disk)
    assert_same(back, {name: want[name] for name in back})
    if flavor[0] != "gpt_oss":  # whose adapter knows the published file in 4 bits
        experts = sum("inner_experts" in name for name in back)
        assert experts == 3 * sum(m.moe_enabled for m in ours.layers.values())
    theirs.load_state_dict(got), ours.load_state_dict(back, strict=False)


def assert_same(got, want):
    assert list(got) == list(want)
    for name in want:
        assert torch.equal(got[name], want[name]), name


@kinds
def test_convert_a_model_at_hand(kind):
    """In place, with the very same parameters, and the override's results to the bit."""
    moe, want = moe_of(overridden=False), moe_of()
    if kind == "local":
        moe.routed_experts.token_dispatcher = local_dispatcher(moe)
    before = dict(moe.named_parameters())
    assert convert(convert(moe)) is moe
    assert all(before[name] is p for name, p in moe.named_parameters()) and len(before) > 3
    assert type(moe.routed_experts.token_dispatcher) is Dispatcher
    x = tokens(moe)
    dout = torch.randn_like(x)
    assert_same(step(moe, x, dout), step(want, x, dout))


def test_guests():
    """By the override and by `convert`; a further call changes them only if it gives some."""
    spec = spec_of(FLAVORS[0], False)
    assert apply_overrides(OverrideConfig(imports=[(NAME, {"guests": 3})]), spec.model)
    dispatchers = [layer.moe.routed_experts.token_dispatcher for layer in spec.model.layers if layer.moe]
    assert dispatchers and all(type(d) is Dispatcher.Config and d.guests == 3 for d in dispatchers)
    config = next(layer.moe for layer in spec.model.layers if layer.moe).routed_experts
    for given, guests in ((0, 3), ("auto", "auto")):
        assert file.experts(config, guests=given).build().token_dispatcher.guests == guests
    moe = moe_of(overridden=False)
    for given, guests in ((0, 0), (2, 2), (0, 2), ("auto", "auto")):
        assert convert(moe, guests=given).routed_experts.token_dispatcher.guests == guests
    for guests, kind in ((-1, ValueError), ("x", ValueError), (True, TypeError), (1.5, TypeError)):
        for call in (convert, file.experts):
            with pytest.raises(kind, match="guests must be"):
                call({convert: moe, file.experts: config}[call], guests=guests)
        with pytest.raises(kind, match="guests must be"):
            Dispatcher.Config(num_experts=8, top_k=2, guests=guests).build()


def test_guests_need_our_dispatcher():
    from torchtitan.models.common.token_dispatcher import TorchAOTokenDispatcher

    other = TorchAOTokenDispatcher.Config(num_experts=8, top_k=2, pad_multiple=16)
    config = spec_of(FLAVORS[0], False).model.layers[-1].moe.routed_experts
    config.token_dispatcher = other
    assert file.experts(config).token_dispatcher is other
    with pytest.raises(ValueError, match=r"guests=2, but TorchAOTokenDispatcher.Config lends nothing"):
        file.experts(config, guests=2)
    moe = moe_of(overridden=False)
    moe.routed_experts.token_dispatcher = other.build()
    before = type(moe.routed_experts.inner_experts)
    with pytest.raises(ValueError, match=r"guests='auto', but TorchAOTokenDispatcher lends nothing"):
        convert(moe, guests="auto")
    assert type(moe.routed_experts.inner_experts) is before
    assert convert(moe) is moe


def local_dispatcher(moe):
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    old = moe.routed_experts.token_dispatcher
    return LocalTokenDispatcher(LocalTokenDispatcher.Config(num_experts=old.num_experts, top_k=old.top_k))


def test_rows_of_a_dispatcher():
    """Rows sorted by expert, an expert without any, and rows past the last, which come out as zeros."""
    ours, theirs = (moe_of(overridden=o).routed_experts.inner_experts for o in (True, False))
    counts = torch.tensor([5, 0, 9, 1, 0, 3, 2, 0])
    used = int(counts.sum())
    rows = torch.randn(used + 6, theirs.w1_EFD.shape[-1]).bfloat16().float()
    rows[used:] = float("nan")
    dout = torch.randn_like(rows).bfloat16().float()
    results = []
    for experts, n in ((ours, len(rows)), (theirs, used)):
        x = rows[:n].clone().requires_grad_()
        out = experts(x, counts)
        out.backward(dout[:n])
        results.append([out.detach(), x.grad, *(getattr(experts, name).grad for name in WEIGHTS)])
    got, want = results
    for tail in (got[0][used:], got[1][used:]):
        assert (tail == 0).all()
    for name, a, b in zip(["out", "x", *WEIGHTS], got, want, strict=True):
        assert error(a[:used], b) < 1e-2, name
        assert name not in WEIGHTS or (a[counts == 0] == 0).all()


@pytest.mark.parametrize("policy", [FullAC, SelectiveAC])
def test_activation_checkpointing(policy):
    moe = moe_of()
    x = tokens(moe)
    dout = torch.randn_like(x)
    want = step(moe, x, dout)
    wrapped = policy(policy.Config())._wrap_block(moe, base_fqn="layers.0.moe")
    got = {name.replace("_checkpoint_wrapped_module.", ""): t for name, t in step(wrapped, x, dout).items()}
    assert_same(got, want)


def test_compiles_in_one_graph():
    moe = moe_of()
    x = tokens(moe)
    dout = torch.randn_like(x)
    want = step(moe, x, dout)
    moe.compile(fullgraph=True, backend="aot_eager")
    for name, t in step(moe, x, dout).items():
        assert error(t, want[name]) < 1e-5, name


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = get_spmd_backend()
    set_spmd_backend("partial_dtensor")  # the other wants meshes that only its trainer makes
    yield
    set_spmd_backend(before)
    dist.destroy_process_group()


@pytest.mark.parametrize("most_ranks", [0, 8], ids=["theirs", "ours"])
def test_expert_parallel_dispatch(one_rank, monkeypatch, most_ranks):
    """With a mesh, our dispatcher; in a larger one torchtitan's makes rows, which the experts take."""
    monkeypatch.setattr(file, "MOST_RANKS", most_ranks)
    ours, theirs = moe_of(), moe_of(overridden=False)
    x = tokens(ours)
    dout = torch.randn_like(x).bfloat16().float()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    for moe in (ours, theirs):
        moe.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    assert (ours.routed_experts.token_dispatcher.shared is not None) == (most_ranks > 0)
    got, best, truth = step(ours, x, dout), step(theirs, x, dout), exact(moe_of(), x, dout)
    for name in truth:
        assert_output_as_good(name, got[name], best[name], truth[name])


@pytest.mark.parametrize("flavor", FLAVORS[::2], ids=["deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fsdp(one_rank, reduce_dtype, flavor):
    """FSDP2 around the experts, with its mixed precision as the user of it would have it by default."""
    moe, sharded = moe_of(flavor), moe_of(flavor)
    x = tokens(moe)
    dout = torch.randn_like(x).bfloat16().float()
    want = step(moe, x, dout)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    fully_shard(sharded.routed_experts.inner_experts, mesh=mesh, mp_policy=policy)
    for name, t in step(sharded, x, dout).items():
        assert error(t.full_tensor() if hasattr(t, "full_tensor") else t, want[name]) < 1e-2, name


def trained(moe, optimizer, x, steps):
    for _ in range(steps):
        moe(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return moe(x).detach()


@pytest.mark.parametrize("flavor", [FLAVORS[0], FLAVORS[2]], ids=["deepseek_v3", "gpt_oss"])
def test_resume_from_a_distributed_checkpoint(flavor, tmp_path):
    """Training with ours, saved and resumed by torchtitan's own path; its own experts read the file too."""
    moes = [moe_of(flavor, overridden, torch.bfloat16) for overridden in (True, True, False)]
    optimizers = [torch.optim.AdamW(moe.parameters(), 1e-3) for moe in moes]
    x = tokens(moes[0], torch.bfloat16)
    trained(moes[0], optimizers[0], x, 2)
    dcp.save(dict(zip(PARTS, get_state_dict(moes[0], optimizers[0]), strict=True)), checkpoint_id=tmp_path)
    outs = [trained(moes[0], optimizers[0], x, 2)]
    for moe, optimizer in zip(moes[1:], optimizers[1:], strict=True):
        state = dict(zip(PARTS, get_state_dict(moe, optimizer), strict=True))
        dcp.load(state, checkpoint_id=tmp_path)
        set_state_dict(moe, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        outs.append(trained(moe, optimizer, x, 2))
    assert torch.equal(outs[1], outs[0]) and error(outs[2], outs[0]) < 2e-2


def test_ranks_that_share_an_expert_of_gpt_oss_add_its_bias_once(monkeypatch):
    """Each of two has half of the bias, and all of its gradient, as torchtitan's."""
    experts = moe_of(FLAVORS[2]).routed_experts.inner_experts
    rows, counts = torch.randn(8, experts.mlp1_weight_EGD.shape[-1]), torch.full((experts.num_experts,), 1)
    nn.init.zeros_(experts.mlp2_weight_EDF)
    whole = experts(rows, counts)
    whole.sum().backward()
    grad, experts.mlp2_bias_ED.grad = experts.mlp2_bias_ED.grad, None
    monkeypatch.setattr(file, "tensor_parallel_size", lambda weight: 2)
    part = experts(rows, counts)
    part.sum().backward()
    assert whole.abs().sum() > 0 and torch.equal(part, whole / 2)
    assert torch.equal(experts.mlp2_bias_ED.grad, grad)


def test_what_it_is_not_for():
    kinds = importlib.import_module("torchtitan.components.quantization.mx")
    kind = kinds._get_mxfp8_grouped_experts_cls(file.GroupedExperts)
    moe = moe_of(overridden=False)
    moe.routed_experts.inner_experts.__class__ = kind
    with pytest.raises(TypeError, match=r"no moe_aiter experts for .*MXFP8GroupedExperts.* leave out"):
        convert(moe)
    config = spec_of(FLAVORS[0], False).model.layers[-1].moe.routed_experts
    config.inner_experts = file.derive(config.inner_experts, kind.Config)
    with pytest.raises(TypeError, match=r"no moe_aiter experts for .*MXFP8GroupedExperts.* leave out"):
        file.experts(config)
    with pytest.raises(ValueError, match="Linear has no RoutedExperts"):
        convert(torch.nn.Linear(2, 2))
    moe = moe_of(overridden=False)
    moe.routed_experts._parallelized = True
    with pytest.raises(ValueError, match="before it is parallelised"):
        convert(moe)
    assert isinstance(moe.routed_experts, RoutedExperts)
