"""`LoRAExperts`, and experts of 4 bits, shared by two processes: as one process with the joined batch."""

import forked
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from moe_aiter import LoRAExperts, LoRALinear, MoE, quantize
from moe_aiter.config import interpret
from moe_aiter.distributed import (
    ExpertParallel,
    expert_mesh,
    export_safetensors,
    load_sharded,
    parallelize,
    save_sharded,
)
from moe_aiter.integrations.sharded import shard_codes

from .ranks import leave, whole
from .shared_memory import use_files

if interpret:
    pytest.skip("nothing here runs Triton", allow_module_level=True)

WORLD, T, H, E, K = 2, 96, 64, 8, 4
ADAPTED = "gate_up_lora.A", "gate_up_lora.B", "down_lora.A", "down_lora.B"
MAGNITUDES = "gate_up_lora.magnitude", "down_lora.magnitude"
MORE = {"bias": True, "activation": "gelu"}, {"dora": True, "rslora": True}
CASES = {  # of the MoE, its adapters and the dispatcher
    "lora": ({}, {}, {}),
    "dora": (*MORE, {}),
    "windows": (*MORE, {"rows": 0.5}),
    "padded": ({"interleaved": True}, {}, {"max_tokens": T + 3}),
    "tokens kept": (*MORE, {"keep_x": True}),
    "several": ({"bias": True}, {"num_adapters": 3, "rank": [4, 1, 2]}, {}),
    "several, nf4, windows": ({"format": "nf4"}, {"num_adapters": 3}, {"rows": 0.5}),
    "nf4": ({"format": "nf4", "bias": True}, {}, {}),
    "mxfp4, dora, windows": ({"format": "mxfp4"}, {"dora": True}, {"rows": 0.5}),
    "nf4, tokens kept": ({"format": "nf4"}, {}, {"keep_x": True}),
}
THROUGH_MEMORY = "lora", "dora", "windows", "several", "nf4"
FROZEN = {"format": "nf4", "bias": True}, None
SMALLER = {"format": "nf4"}, {"num_adapters": 2}  # with an adapter of a smaller rank


def build(moe: dict, lora: dict | None, num_experts: int = E) -> MoE:
    torch.manual_seed(0)
    moe, format = {k: v for k, v in moe.items() if k != "format"}, moe.get("format")
    model = MoE(H, 64 if format else 8, num_experts, min(K, num_experts), **moe)
    model = quantize(model, format) if format else model
    if lora is None:
        return model
    model.experts = LoRAExperts(model.experts, **{"rank": 4} | lora)
    for name, p in model.experts.named_parameters():
        if "lora" in name:
            p.data.add_(0.3 * torch.randn_like(p))
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, dout = torch.randn(2, WORLD, T, H, generator=generator)
    return x, dout


def step(model: nn.Module, x: torch.Tensor, dout: torch.Tensor) -> dict:
    x = x.clone().requires_grad_()
    several = getattr(getattr(model, "experts", None), "num_adapters", 1) > 1
    ids = {"adapter_ids": torch.arange(len(x)) % 4 - 1} if several else {}
    out = model(x, **ids)
    out.backward(dout)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    grads = {name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in grads.items()}
    return {"out": out.detach(), "dx": x.grad, **grads}


def one_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD)
    mesh = expert_mesh("cpu", WORLD)
    x, dout = (t[rank] for t in batch())
    results = {}

    def shared(moe, lora, options):
        return parallelize_module(build(moe, lora), mesh["ep"], {"experts": ExpertParallel(**options)})

    for name, case in CASES.items():
        results[name] = step(shared(*case), x, dout)

    with pytest.MonkeyPatch.context() as patch:
        use_files(folder, patch)
        for name in THROUGH_MEMORY:
            moe, lora, options = CASES[name]
            results["memory", name] = step(shared(moe, lora, options | {"transport": "symmetric"}), x, dout)

    model = shared(*CASES["dora"])
    compiled = step(torch.compile(model, fullgraph=True, backend="aot_eager"), x, dout)
    results["compiled"] = {name.removeprefix("_orig_mod."): t for name, t in compiled.items()}

    for name, compiles in (("four bits alone", False), ("four bits compiled", True)):
        model = shared(*FROZEN, {})
        model = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
        results[name] = {n.removeprefix("_orig_mod."): t for n, t in step(model, x, dout).items()}
    results["four bits"] = [
        (n, type(b).__name__, b.dtype) for n, b in model.named_buffers() if "gate_up" in n
    ]

    want = build({}, {}).experts.peft_state_dict()
    got = shared({}, {}, {}).experts.peft_state_dict()
    results["saved"] = [torch.equal(got[name], t) for name, t in want.items()]

    model = shared({}, MORE[1], {})
    before = [w.to_local().clone() for w in (model.experts.base.gate_up, model.experts.base.down)]
    model.experts.merge()
    results["merged"] = step(model, x, dout)
    results["merged state"] = of_a_merged_one(
        model.experts, f"{folder}/merged", shared({}, MORE[1], {}).experts
    )
    model.experts.unmerge()
    after = [w.to_local() for w in (model.experts.base.gate_up, model.experts.base.down)]
    results["unmerged"] = list(map(torch.equal, after, before))
    model = shared(*CASES["several"])
    with pytest.raises(ValueError, match="only a single adapter can be merged"):
        model.experts.merge()
    with pytest.raises(ValueError, match="7 experts with 3 adapters each cannot be divided among 2 ranks"):
        plan = {"experts": ExpertParallel()}
        parallelize_module(build(*CASES["several"][:2], num_experts=7), mesh["ep"], plan)
    model = shared({}, {}, {})
    with pytest.raises(ValueError, match="a single adapter with dora, or of shared experts"):
        model(x, adapter_ids=torch.zeros(T, dtype=torch.int64))

    for rows in (2.0, 0.5):
        model = shared({}, {"rank_dropout": 0.5}, {"rows": rows})
        torch.manual_seed(2)
        results["rank dropout", rows] = step(model, x, dout)

    for ep in (1, 2):
        model = parallelize(nn.Sequential(build(*MORE)), expert_mesh("cpu", ep))
        results["fsdp", ep] = step(model, x, dout)
        model[0].experts.merge()
        results["merged fsdp", ep] = model(x).detach()
        other = parallelize(nn.Sequential(build(*MORE)), expert_mesh("cpu", ep))
        results["merged state"] += of_a_merged_one(model, f"{folder}/merged-{ep}", other)
    for ep in (1, 2):
        results["four bits", ep] = four_bits_with_fsdp(expert_mesh("cpu", ep), x, dout, f"{folder}/nf4-{ep}")
    refused_where_weights_come_and_go()
    for ep in (1, 2):
        model = parallelize(smaller_rank(6), expert_mesh("cpu", ep))
        save_sharded(f"{folder}/ranks-{ep}", model)
        results["loaded", ep] = loaded(
            parallelize(smaller_rank(6, False), expert_mesh("cpu", ep)), f"{folder}/one"
        )
    model = nn.parallel.DistributedDataParallel(smaller_rank(6, False))
    load_sharded(f"{folder}/one", model)
    results["loaded", "ddp"] = dict(model.module.state_dict()) | {"shared": False}
    save_sharded(f"{folder}/ranks-ddp", model)
    if shards_integers(mesh["ep"]):
        model = smaller_rank(6, False)
        for weight in model[0].experts.base.owners():
            shard_codes(weight, mesh["ep"])
        results["loaded", "codes by fsdp"] = loaded(model, f"{folder}/one")
        save_sharded(f"{folder}/ranks-codes by fsdp", model)
    model = parallelize(nn.Sequential(build({}, {}, num_experts=1)), expert_mesh("cpu", 1))
    with pytest.raises(ValueError, match=r"gate_up is sharded by .*: merge needs whole experts"):
        model[0].experts.merge()
    torch.save(results, f"{folder}/{rank}.pt")
    leave()


def of_a_merged_one(model: nn.Module, path: str, other: nn.Module) -> list[bool]:
    """Whether the state of `model` and what is saved of it are the state of `other`, which is not merged."""
    want = {name: t.full_tensor() for name, t in other.state_dict().items() if hasattr(t, "placements")}
    same = [torch.equal(model.state_dict()[name].full_tensor(), t) for name, t in want.items()]
    save_sharded(path, model)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    save_sharded(f"{path}-zeros", other)
    with pytest.raises(ValueError, match=r"call unmerge\(\) first, and load then"):
        load_sharded(f"{path}-zeros", model)
    same += [torch.equal(model.state_dict()[name].full_tensor(), t) for name, t in want.items()]
    load_sharded(path, other)
    return same + [torch.equal(other.state_dict()[name].full_tensor(), t) for name, t in want.items()]


def refused_where_weights_come_and_go() -> None:
    """In what FSDP2 gathers for a while, an adapter would be lost."""
    mesh = expert_mesh("cpu", 1)["efsdp"]
    model = build({}, {}).experts
    early = build({}, {}).experts
    early.merge()
    linear = LoRALinear(nn.Linear(H, H), rank=2)
    for unit in (model, early, linear):
        fully_shard(unit, mesh=mesh)
    for call in (early.state_dict, early.unmerge):
        with pytest.raises(ValueError, match="sharded after an adapter was merged into it"):
            call()
    with pytest.raises(ValueError, match="the weight is sharded: merge the adapter before"):
        linear.merge()
    for unit, weight in ((model, "gate_up"), (linear, "weight")):
        unit.unshard()
        with pytest.raises(ValueError, match=rf"FSDP2 has gathered {weight} for a while: call reshard\(\)"):
            unit.merge()
        unit.reshard()
    model.merge()


def shards_integers(mesh) -> bool:
    """Whether FSDP2 takes integers, as that of torch 2.11 does not."""
    codes = nn.Module()
    codes.codes = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    try:
        fully_shard(codes, mesh=mesh)
    except RuntimeError as error:
        assert "only Tensors of floating point dtype can require gradients" in str(error)
        return False
    return True


def smaller_rank(num_experts: int, loaded: bool = True) -> nn.Module:
    """Experts of NF4: with 6 of them, 2 ranks share a number of their double-quantised scales."""
    model = nn.Sequential(build(*SMALLER, num_experts=num_experts))
    if loaded:
        other = build(SMALLER[0], {"rank": 2}, num_experts=num_experts)
        model[0].experts.load_peft_state_dict(other.experts.peft_state_dict(), adapter=1, alpha=9)
    else:
        for t in (*model.parameters(), *model.buffers()):
            t.data.zero_()
    return model


def loaded(model: nn.Module, path: str) -> dict:
    """All of a model, whole, and whether ranks share it, after it was loaded."""
    load_sharded(path, model)
    found = {name: whole(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    return found | {"shared": model[0].experts.base.gate_up.is_shared}


def four_bits_with_fsdp(mesh, x, dout, path) -> dict:
    """Of a model that is made on the meta device, and filled from the sharded checkpoint of another."""
    frozen = parallelize(nn.Sequential(build(*FROZEN)), mesh)
    with pytest.raises(ValueError, match="the experts are sharded: make the adapters first"):
        LoRAExperts(frozen[0].experts, rank=4)
    model = parallelize(nn.Sequential(build(*CASES["nf4"][:2])), mesh)
    save_sharded(path, model)
    export_safetensors(f"{path}.safetensors", model)
    with torch.device("meta"):
        other = parallelize(nn.Sequential(build(*CASES["nf4"][:2])), mesh)
    other.to_empty(device="cpu")
    load_sharded(path, other)
    return step(other, x, dout) | {"packed": whole(other[0].experts.base.down.packed)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("lora")
    save_sharded(folder / "one", smaller_rank(6))
    forked.call(one_rank, WORLD, str(folder))
    results = [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]
    return [one | {"folder": folder} for one in results]


def alone(moe: dict, lora: dict | None, merged: bool = False) -> dict:
    model = build(moe, lora)
    if merged:
        model.eval().experts.merge()
    x, dout = batch()
    return step(model, x.flatten(0, 1), dout.flatten(0, 1))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


def check(ranks: list[dict], want: dict) -> None:
    """Gradients of experts are sums over the ranks; those of the rest are a rank's own."""
    for name in ("out", "dx"):
        close(torch.cat([results[name] for results in ranks]), want[name])
    for results in ranks:
        assert results.keys() == want.keys()
    for name in set(want) - {"out", "dx"}:
        grads = [results[name] for results in ranks]
        close(grads[0] if name.startswith("experts.") else sum(grads), want[name])


@pytest.mark.parametrize("case", [*CASES, "compiled"])
def test_as_one_process(ranks, case):
    moe, lora, _ = CASES.get(case, CASES["dora"])
    want = alone(moe, lora)
    adapted = {f"experts.{name}" for name in ADAPTED + (MAGNITUDES if "dora" in lora else ())}
    assert {name for name in want if name.startswith("experts.")} == adapted
    check([results[case] for results in ranks], want)


@pytest.mark.parametrize("case", THROUGH_MEMORY)
def test_transports_have_the_same_bits(ranks, case):
    for results in ranks:
        for name, want in results[case].items():
            assert torch.equal(results["memory", case][name], want), name


def test_merged_adapters(ranks):
    check([results["merged"] for results in ranks], alone({}, MORE[1], merged=True))
    for results in ranks:
        assert all(results["unmerged"])
        assert results["merged state"] and all(results["merged state"])
    assert all(all(results["saved"]) for results in ranks)


def test_each_window_drops_the_same_ranks(ranks):
    for results in ranks:
        few, many = results["rank dropout", 2.0], results["rank dropout", 0.5]
        for name, want in few.items():
            close(many[name], want)
    assert not torch.allclose(ranks[0]["lora"]["out"], ranks[0]["rank dropout", 2.0]["out"])


@pytest.mark.parametrize("ep", [1, 2])
def test_with_fsdp(ranks, ep):
    """Gradients are the mean of the ranks'; dx is that of a rank's own loss."""
    want = alone(*MORE)
    for name in ("out", "dx"):
        close(torch.cat([results["fsdp", ep][name] for results in ranks]), want[name])
    for results in ranks:
        for name in set(want) - {"out", "dx"}:
            close(results["fsdp", ep][f"0.{name}"], want[name] / WORLD)
    close(torch.cat([results["merged fsdp", ep] for results in ranks]), alone(*MORE, merged=True)["out"])


@pytest.mark.parametrize("case", ["four bits alone", "four bits compiled"])
def test_frozen_experts_of_4_bits(ranks, case):
    want = alone(*FROZEN)
    assert not any(name.startswith("experts.") for name in want)
    check([results[case] for results in ranks], want)


@pytest.mark.parametrize("ep", [1, 2])
def test_4_bits_with_fsdp_and_checkpoints(ranks, ep):
    case = CASES["nf4"][:2]
    want, model = alone(*case), build(*case)
    for name in ("out", "dx"):
        close(torch.cat([results["four bits", ep][name] for results in ranks]), want[name])
    for results in ranks:
        assert torch.equal(results["four bits", ep]["packed"], model.experts.base.down.packed)
        for name in set(want) - {"out", "dx"}:
            close(results["four bits", ep][f"0.{name}"], want[name] / WORLD)
    saved = load_file(ranks[0]["folder"] / f"nf4-{ep}.safetensors")
    assert torch.equal(saved["0.experts.base.gate_up.packed"], model.experts.base.gate_up.packed)


@pytest.mark.parametrize("ep", [1, 2, "ddp", "codes by fsdp"])
def test_checkpoints_of_4_bits_and_smaller_ranks_move_between_1_and_2_ranks(ranks, ep):
    """Where ranks share the experts, double-quantised scales become float32, with the same bits."""
    if ("loaded", ep) not in ranks[0]:
        pytest.skip("FSDP2 of this torch shards no integers")
    double, single = smaller_rank(6), smaller_rank(6)
    for weight in single[0].experts.base.owners():
        weight.shard(lambda t: t)
    states = {True: single.state_dict(), False: double.state_dict()}
    for results in ranks:
        shared = results["loaded", ep].pop("shared")
        same(results["loaded", ep], states[shared])
    other = smaller_rank(6, loaded=False)
    load_sharded(ranks[0]["folder"] / f"ranks-{ep}", other)
    same(other.state_dict(), states[shared])
    x, ids = torch.randn(T, H), torch.arange(T) % 3 - 1
    assert torch.equal(other[0](x, adapter_ids=ids), double[0](x, adapter_ids=ids))


def same(got: dict, want: dict) -> None:
    assert {n: (t.shape, t.dtype) for n, t in got.items()} == {n: (t.shape, t.dtype) for n, t in want.items()}
    assert all(torch.equal(t, want[name]) for name, t in got.items())


def test_codes_and_scales_are_sharded(ranks):
    sharded = [("packed", "DTensor", torch.uint8), ("scales", "DTensor", torch.float32)]
    expected = [*sharded, ("table", "Tensor", torch.float32)]
    for results in ranks:
        assert [(name.rpartition(".")[2], *rest) for name, *rest in results["four bits"]] == expected
