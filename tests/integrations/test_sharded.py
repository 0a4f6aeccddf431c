"""Adapters and weights of 4 bits of experts that transformers shares among processes: as in one process."""

import functools
import json
import os
import pathlib
import types

import forked
import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_aiter.config import interpret
from moe_aiter.distributed import clip_grad_norm_, parameter_groups
from moe_aiter.integrations import peft as our_peft
from moe_aiter.integrations.four_bit import load_gpt_oss, quantize_experts
from moe_aiter.integrations.lora import add_lora, load_lora, merge_lora, save_lora
from moe_aiter.integrations.sharded import shard_factors, share_published
from moe_aiter.integrations.transformers import (
    ADAPTERS,
    NAME,
    check,
    is_experts,
    parallel_interface,
    register,
)
from moe_aiter.kernels.quantize.four_bit import quantized
from moe_aiter.layers.four_bit import FourBitWeight

from ..distributed.ranks import gpus, leave, run, whole
from .families import WIDE_FAMILIES, WIDE_SIZES

if interpret:
    pytest.skip("nothing here runs Triton", allow_module_level=True)
pytest.importorskip("transformers", reason="transformers is not installed")
if parallel_interface() is None:
    pytest.skip("this transformers has no ep_implementation", allow_module_level=True)

from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

peft = pytest.importorskip("peft", reason="PEFT is not installed")

WORLD, STEPS = 2, 50
LORA = {"rank": 4, "alpha": 8}
CASES = {  # the family, its weights in 4 bits, the adapters, the mesh, and the dispatcher's options
    "lora": ("qwen3_moe", None, {}, {}, {}),
    "transposed, windows": ("gpt_oss", None, {"rslora": True}, {}, {"rows": 0.2, "max_tokens": 80}),
    "dora": ("gpt_oss", None, {"dora": True}, {}, {}),
    "no kernel has its gate": ("qwen3_moe", None, {}, {}, {}),
    "transformers' dispatcher": (
        "gpt_oss", "published", {"targets": ("down_proj",)}, {"ep_implementation": "all_to_all"}, {},
    ),
    "fsdp alone": ("qwen3_moe", None, {"dora": True}, {"ep_size": 1}, {}),
    "mxfp4": ("gpt_oss", "published", {}, {}, {}),
    "mxfp4, fsdp alone": ("gpt_oss", "published", {}, {"ep_size": 1}, {}),
    "nf4": ("qwen3_moe", "nf4", {}, {}, {}),
    "nf4, dora": ("qwen3_moe", "nf4", {"dora": True}, {}, {}),
    "nf4, fsdp alone": ("qwen3_moe", "nf4", {}, {"ep_size": 1}, {}),
    "nf4, dora, fsdp alone": ("qwen3_moe", "nf4", {"dora": True}, {"ep_size": 1}, {}),
    "quantised to mxfp4, fsdp alone": ("gpt_oss", "mxfp4", {}, {"ep_size": 1}, {}),
}  # fmt: skip
LOADED = "lora", "nf4"
TRAINED = "lora", "nf4", "mxfp4"


def batch(world: int = WORLD) -> torch.Tensor:
    return torch.randint(32, (world, 2, 16), generator=torch.Generator().manual_seed(1))


def load(folder: pathlib.Path, case: str, adapted: bool = True, seed: int = 3, **options):
    family, bits, lora, _, _ = CASES[case]
    if bits == "published":
        model = load_gpt_oss(folder / "published", dtype=torch.float32, **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            folder / family, experts_implementation=NAME, dtype=torch.float32, **options
        )
    if bits in ("nf4", "mxfp4"):
        quantize_experts(model, bits)
    for experts in filter(is_experts, model.modules()) if case == "no kernel has its gate" else ():
        experts.act_fn = nn.Tanh()
    torch.manual_seed(seed)
    if adapted:
        adapt(model, LORA | lora)
    return model


def adapt(model, lora: dict) -> None:
    add_lora(model, **lora)
    for p in adapters(model):  # as after some training
        torch.manual_seed(p.dim())
        p.data += 0.1 * like(torch.randn(p.shape).to(p.device), p)


def adapters(model) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if ADAPTERS in name]


def like(t: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Shard `t` as `p` is."""
    if not hasattr(p, "placements"):
        return t
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(t, p.device_mesh, p.placements, src_data_rank=None)


def step(model, tokens: torch.Tensor) -> dict:
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    grads = {n: whole(p.grad) for n, p in model.named_parameters() if p.requires_grad}
    return {"loss": loss.detach(), "norm": clip_grad_norm_(model.parameters(), 1e9), **grads}


def train(model, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of each step."""
    optimizer, losses = torch.optim.Adam(parameter_groups(model), 1e-2), []
    for _ in range(STEPS):
        losses.append(step(model, tokens)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def meshes(**sizes) -> dict:
    sizes = {"fsdp_size": WORLD, "ep_size": WORLD, "ep_implementation": NAME} | sizes
    return {"distributed_config": DistributedConfig(**sizes)}


def one_rank(rank: int, folder: pathlib.Path) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD)
    tokens, results = batch()[rank], {}
    for case, (_, _, _, sizes, options) in CASES.items():
        register(**{"rows": 2.0, "max_tokens": 10**3} | options)
        model = load(folder, case, **meshes(**sizes))
        if case.startswith("nf4"):
            model.load_state_dict(model.state_dict())
        results[case] = step(model, tokens)
        if case.startswith("nf4"):
            codes = [m.packed for m in model.modules() if isinstance(m, FourBitWeight)]
            assert [len(t.to_local()) for t in codes] == [2, 2] and [len(t) for t in codes] == [4, 4]
        if case == "transposed, windows":
            results["check"] = check(model)
            save_lora(model, folder / "stacked")
            save_lora(model, folder / "per expert", per_expert=True)
            merge_lora(model)
            results["merged"] = model(tokens).logits.detach()
    for case in LOADED:
        model = load(folder, case, adapted=False, **meshes())
        load_lora(model, folder / "written")
        results[case, "loaded"] = step(model, tokens)
        save_lora(model, folder / f"read {case}")
    load(folder, "mxfp4", adapted=False, **meshes()).save_pretrained(folder / "again")
    for four_bits, shape in (("after", (WORLD,)), ("before", (WORLD,)), ("", (WORLD,)), ("", (WORLD, 1))):
        experts_as_units(folder, tokens, four_bits, shape)
    refused(folder, tokens)
    torch.save(results, folder / f"{rank}.pt")
    leave()


def experts_as_units(folder: pathlib.Path, tokens: torch.Tensor, four_bits: str, shape: tuple) -> None:
    """A model that its user shards by FSDP2: the units of its experts have no other parameters.

    four_bits: whether experts get 4 bits before FSDP2, which then leaves their codes whole, or after it.
    """
    from torch.distributed.fsdp import fully_shard

    sharded, alone = (load(folder, "lora", adapted=False) for _ in range(2))
    if four_bits == "before":
        quantize_experts(sharded, "mxfp4")
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
    for unit in [*filter(is_experts, sharded.modules()), sharded]:
        fully_shard(unit, mesh=mesh)
    for model in (sharded, alone):
        quantize_experts(model, "mxfp4") if four_bits else None
        torch.manual_seed(3 + dist.get_rank() * (model is sharded and len(shape) == 2))
        adapt(model, LORA)
    for p, q in zip(adapters(sharded), adapters(alone), strict=True):
        q.data.copy_(whole(p.detach()))
    for _ in range(2):
        torch.testing.assert_close(sharded(tokens).logits, alone(tokens).logits)
    got, want = step(sharded, tokens), step(alone, batch().flatten(0, 1))
    for name in want.keys() - {"loss"}:
        close(got[name], want[name])


def refused(folder: pathlib.Path, tokens: torch.Tensor) -> None:
    model = load(folder, "lora", adapted=False, **meshes(fsdp_size=1, tp_size=2, ep_size=1))
    with pytest.raises(ValueError, match="is sharded, but not by experts: load without tp_size or with an"):
        quantize_experts(model)
    our_peft.register()
    for how in (NAME, "all_to_all"):
        model = load(folder, "lora", adapted=False, **meshes(ep_implementation=how))
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=[], target_parameters=names))
        with pytest.raises(ValueError, match="this rank has 2 of 4 experts, but PEFT's adapters are not sha"):
            model(tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    register()
    for family, sizes in WIDE_FAMILIES.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **WIDE_SIZES | sizes | {"num_hidden_layers": 1})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for p in model.parameters():
            nn.init.normal_(p, std=0.2)
        model.save_pretrained(folder / family)
    publish(folder / "gpt_oss", folder / "published")
    save_lora(load(folder, "lora"), folder / "written")
    return folder


def publish(source: pathlib.Path, folder: pathlib.Path) -> None:
    """Write gpt-oss as it is published, its experts in MXFP4."""
    state = load_file(source / "model.safetensors")
    for name in [n for n in state if n.endswith(("gate_up_proj", "down_proj"))]:
        w = quantized(state.pop(name).mT, "mxfp4")
        state |= {f"{name}_blocks": w.packed.unflatten(2, (-1, 16)), f"{name}_scales": w.scales}
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))


ON_CPUS = torch.accelerator.current_accelerator() is None  # or transformers has one rank on each accelerator
on_cpus = pytest.mark.skipif(not ON_CPUS, reason="transformers uses the accelerator")


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    if not ON_CPUS:
        pytest.skip("transformers uses the accelerator")
    forked.call(one_rank, WORLD, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


def as_one(model, got: list[dict], tokens: torch.Tensor, most: float = 1e-5) -> None:
    want = step(model, tokens)
    close(torch.stack([results["loss"] for results in got]).mean(), want["loss"], most)
    for results in got:
        assert results.keys() == want.keys()
        for name in want.keys() - {"loss"}:
            close(results[name], want[name], most)


def close(got: torch.Tensor, want: torch.Tensor, most: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, rtol=most, atol=most * want.abs().max().item())


@pytest.mark.parametrize("case", CASES)
def test_as_one_process(folder, ranks, case):
    as_one(load(folder, case), [results[case] for results in ranks], batch().flatten(0, 1))


def test_saved_and_merged(folder, ranks):
    """The files are those of one process, tensor by tensor."""
    model = load(folder, "transposed, windows")
    for kind in ("stacked", "per expert"):
        save_lora(model, folder / "alone", per_expert=kind == "per expert")
        got, want = (load_file(folder / name / "adapter_model.safetensors") for name in (kind, "alone"))
        assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
        got, want = ((folder / name / "adapter_config.json").read_text() for name in (kind, "alone"))
        assert got == want
    merge_lora(model)
    for results, tokens in zip(ranks, batch(), strict=True):
        assert {path.path for path in results["check"].values()} == {"two products"}
        close(results["merged"], model(tokens).logits)


@pytest.mark.parametrize("case", LOADED)
def test_loaded(folder, ranks, case):
    model = load(folder, case, adapted=False)
    load_lora(model, folder / "written")
    as_one(model, [results[case, "loaded"] for results in ranks], batch().flatten(0, 1))
    names = f"read {case}", "written"
    got, want = (load_file(folder / name / "adapter_model.safetensors") for name in names)
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def test_published_weights_are_saved_as_published(folder, ranks):
    got, want = (load_file(folder / name / "model.safetensors") for name in ("again", "published"))
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def test_what_cannot_be_shared():
    config = types.SimpleNamespace(tp_size=2)
    model = types.SimpleNamespace(_mesh_manager=True, config=types.SimpleNamespace(distributed_config=config))
    weight = types.SimpleNamespace(placements=(types.SimpleNamespace(dim=1),))
    with pytest.raises(ValueError, match="need whole experts, but tp_size=2 divides each of them"):
        shard_factors(None, model, weight)
    experts, three = nn.Module(), types.SimpleNamespace(size=lambda: 3)
    experts.register_buffer("down_proj_blocks", torch.zeros(4, 2, 1, 16))
    with pytest.raises(ValueError, match="Module has 4 experts, which ep_size=3 does not divide"):
        share_published(experts, three)


def trained(rank: int, world: int, folder: pathlib.Path, mesh: dict, device: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)  # by which transformers chooses the device
    register(max_tokens=10**3)
    tokens, results = batch(world)[rank].to(device), {}
    for case in TRAINED:
        seed = 100 if "dp_replicate_size" in mesh and rank > 1 else 3  # the first copy's adapters are for all
        model = load(folder, case, seed=seed, **meshes(**mesh))
        results[case] = step(model, tokens)
        model.zero_grad()
        results[case, "losses"] = train(model, tokens)
    torch.save(results, folder / f"trained {rank}.pt")


def check_training(folder: pathlib.Path, world: int, mesh: dict, device: str, backend: str, most: float):
    """The losses of 50 steps."""
    (folder / "store").unlink(missing_ok=True)
    run(world, functools.partial(trained, mesh=mesh, device=device), folder, backend)
    ranks = [torch.load(folder / f"trained {rank}.pt", map_location=device) for rank in range(world)]
    for case in TRAINED:
        model = load(folder, case, device_map=device)
        tokens = batch(world).flatten(0, 1).to(device)
        as_one(model, [results[case] for results in ranks], tokens, most)
        model.zero_grad()
        want = train(model, tokens)
        losses = torch.stack([results[case, "losses"] for results in ranks]).mean(0)
        torch.testing.assert_close(losses, want, rtol=most, atol=most)
        assert losses[-1] < 0.8 * losses[0]


@on_cpus
@pytest.mark.full
@pytest.mark.parametrize(
    "world, mesh",
    [(2, {}), (4, {"fsdp_size": 4}), (4, {"dp_replicate_size": 2}), (2, {"ep_size": 1})],
    ids=["ep 2", "ep 2, efsdp 2", "ep 2, replicated", "fsdp alone"],
)
def test_training(folder, world, mesh):
    check_training(folder, world, mesh, "cpu", "gloo", 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(gpus() < 2, reason="there are no two GPUs")
def test_training_on_gpus(folder):
    check_training(folder, WORLD, {}, "cuda", "nccl", 1e-3)
