"""torchtitan's expert parallelism on our dispatcher: two processes beside one with the joined batch."""

import forked
import pytest
import torch
import torch.distributed as dist
from check import assert_output_as_good, error
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from moe_aiter import use_main_grad
from moe_aiter.config import interpret

pytest.importorskip("torchtitan.config.override", reason="torchtitan 0.3 or newer is not installed")

from ..distributed.ranks import every_loan_pays, leave
from .test_torchtitan import (
    FLAVORS,
    FullAC,
    SelectiveAC,
    exact,
    moe_of,
    set_spmd_backend,
    step,
    tokens,
)

if interpret:
    pytest.skip("nothing here runs Triton", allow_module_level=True)

from moe_aiter.integrations import torchtitan as ours

WORLD = 2
LENDING = ["ours", "gpt_oss", "main_grad", "gpt_oss main_grad", "all recomputed", "some recomputed"]
CASES = [*LENDING, "their dispatcher", "compiled", *(f"{case}, guests" for case in LENDING)]
EXPERTS = "routed_experts.inner_experts."


def flavor_of(case: str) -> tuple[str, str]:
    return FLAVORS[2] if "gpt_oss" in case else FLAVORS[0]


def batch(moe: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x = torch.stack([tokens(moe) for _ in range(WORLD)])
    return x, torch.randn_like(x).bfloat16().float()


def shared(case: str, mesh) -> nn.Module:
    """A MoE whose experts are sharded as torchtitan shards them."""
    moe = moe_of(flavor_of(case))
    experts, dispatcher = moe.routed_experts.inner_experts, moe.routed_experts.token_dispatcher
    for name, _ in [*experts.named_parameters()]:
        weight = distribute_tensor(getattr(experts, name).detach(), mesh, [Shard(0)])
        setattr(experts, name, nn.Parameter(weight))
    ours.MOST_RANKS = 0 if case == "their dispatcher" else WORLD
    if "guests" in case:
        ours.convert(moe, guests=2)
    if "main_grad" in case:
        use_main_grad(moe, torch.optim.SGD(moe.parameters()))
    dispatcher.wire_meshes(ep_mesh=mesh)
    assert (dispatcher.shared is None) == (case == "their dispatcher")
    if case == "compiled":
        moe.compile(fullgraph=True, backend="aot_eager")
    if "recomputed" in case:
        policy = FullAC if "all" in case else SelectiveAC
        return policy(policy.Config())._wrap_block(moe, base_fqn="layers.0.moe")
    return moe


def one_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD)
    set_spmd_backend("partial_dtensor")
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
    results, loans = {}, every_loan_pays(pytest.MonkeyPatch())
    for case in CASES:
        x, dout = (t[rank] for t in batch(moe_of(flavor_of(case))))
        moe = shared(case, mesh)
        found = step(moe, x, dout)
        sums = {name: p.main_grad for name, p in moe.named_parameters() if hasattr(p, "main_grad")}
        assert len(sums) == {"main_grad": 3, "gpt_oss main_grad": 2}.get(case.removesuffix(", guests"), 0)
        assert all(found[name] is None for name in sums)
        results[case] = {
            name.replace("_checkpoint_wrapped_module.", ""): getattr(t, "full_tensor", lambda t=t: t)()
            for name, t in (found | sums).items()
        }
        assert (sum(loans) > 0) == ("guests" in case), (case, loans)
        loans.clear()
    dispatcher = ours.Dispatcher.Config(num_experts=8, top_k=2, guests=5).build()
    with pytest.raises(ValueError, match="guests=5, but the other ranks have only 4 experts to lend"):
        dispatcher.wire_meshes(ep_mesh=mesh)
    ours.MOST_RANKS = 1
    with pytest.raises(ValueError, match="guests=5, but 2 ranks share the experts, and more than 1 keep"):
        dispatcher.wire_meshes(ep_mesh=mesh)
    torch.save(results, f"{folder}/{rank}.pt")
    leave()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("torchtitan")
    forked.call(one_rank, WORLD, str(folder))
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("case", CASES)
def test_as_one_process(ranks, case):
    """As good as torchtitan's own experts, beside float64; gradients of experts are sums over ranks."""
    flavor = flavor_of(case)
    x, dout = (t.flatten(0, 1) for t in batch(moe_of(flavor)))
    theirs = moe_of(flavor, overridden="gpt_oss" in case)  # whose own experts run in bfloat16 alone
    best, truth = step(theirs, x, dout), exact(moe_of(flavor), x, dout)
    mine = [results[case] for results in ranks]
    assert mine[0].keys() == truth.keys()
    for name in truth:
        parts = [results[name] for results in mine]
        got = parts[0] if name.startswith(EXPERTS) else sum(parts)
        got = torch.cat(parts) if name in ("out", "x") else got
        assert_output_as_good(name, got, best[name], truth[name])
        assert not case.startswith("ours") or error(got, truth[name]) < 1e-2, name


@pytest.mark.parametrize("case", LENDING)
def test_guests_change_only_the_rounding(ranks, case):
    """What a guest computes is rounded to bfloat16 for itself, and then added."""
    for results in ranks:
        got, want = results[f"{case}, guests"], results[case]
        assert got.keys() == want.keys()
        for name in want:
            assert error(got[name], want[name]) < 2**-8, name
