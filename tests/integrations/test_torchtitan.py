"""torchtitan's MoE with our routed experts beside its own, and both beside a plain loop in float64."""

import copy
import importlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from check import assert_output_as_good, error
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

pytest.importorskip("torchtitan.config.override", reason="torchtitan 0.3 or newer is not installed")

from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.utils import get_spmd_backend, set_spmd_backend
from torchtitan.models.common.moe import RoutedExperts

from moe_aiter.integrations import torchtitan as file
from moe_aiter.integrations.torchtitan import Dispatcher, Experts, convert

NAME = "moe_aiter.integrations.torchtitan.experts"
FLAVORS = [("deepseek_v3", "debugmodel"), ("qwen3", "debugmodel_moe")]
BATCH = 2, 24
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
    x = torch.randn(*BATCH, moe.routed_experts.inner_experts.w1_EFD.shape[-1]).bfloat16().to(dtype)
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
        for e, (w1, w3, w2) in enumerate(zip(*(getattr(inner, name) for name in WEIGHTS), strict=True)):
            share = (scores * (ids == e)).sum(-1, keepdim=True)
            out = out + share * (F.silu(flat @ w1.T) * (flat @ w3.T) @ w2.T)
        return out.view_as(x)

    moe.routed_experts.forward = run
    return step(moe, x.double(), dout.double())


@flavors
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_as_good_as_torchtitan(flavor, dtype):
    """Router, shared experts and counters are theirs; out and every gradient beside float64."""
    ours, theirs = moe_of(flavor, True, dtype), moe_of(flavor, False, dtype)
    assert type(ours.routed_experts.inner_experts) is Experts
    x = tokens(ours, dtype)
    dout = torch.randn_like(x).bfloat16().to(dtype)
    got, best, truth = step(ours, x, dout), step(theirs, x, dout), exact(theirs, x, dout)
    assert got.keys() == truth.keys()
    for name in truth:
        assert_output_as_good(name, got[name], best[name], truth[name])
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
    assert sum("inner_experts" in name for name in back) == 3 * sum(
        m.moe_enabled for m in ours.layers.values()
    )
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


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fsdp(one_rank, reduce_dtype):
    """FSDP2 around the experts, with its mixed precision as the user of it would have it by default."""
    moe, sharded = moe_of(), moe_of()
    x = tokens(moe)
    dout = torch.randn_like(x).bfloat16().float()
    want = step(moe, x, dout)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    fully_shard(sharded.routed_experts.inner_experts, mesh=mesh, mp_policy=policy)
    for name, t in step(sharded, x, dout).items():
        assert error(t.full_tensor() if hasattr(t, "full_tensor") else t, want[name]) < 1e-2, name


def test_what_it_is_not_for():
    gpt_oss = importlib.import_module("torchtitan.models.gpt_oss").model_registry("debugmodel").model
    with pytest.raises(TypeError, match="GptOssGroupedExperts"):
        apply_overrides(OverrideConfig(imports=[NAME]), gpt_oss)
    with pytest.raises(TypeError, match="no moe_aiter experts for GptOssGroupedExperts"):
        convert(next(layer.moe for layer in gpt_oss.layers).build())
    with pytest.raises(ValueError, match="Linear has no RoutedExperts"):
        convert(torch.nn.Linear(2, 2))
    moe = moe_of(overridden=False)
    moe.routed_experts._parallelized = True
    with pytest.raises(ValueError, match="before it is parallelised"):
        convert(moe)
    assert isinstance(moe.routed_experts, RoutedExperts)
