"""Experts of transformers' models, lent for one call: two processes with guests beside the same without."""

import pathlib

import forked
import pytest
import torch
import torch.distributed as dist
from check import error
from torch import nn

from moe_aiter import use_main_grad
from moe_aiter.config import interpret
from moe_aiter.integrations.four_bit import quantize_experts
from moe_aiter.integrations.lora import add_lora
from moe_aiter.integrations.transformers import (
    ADAPTERS,
    NAME,
    experts_in,
    parallel_interface,
    register,
    unregister,
)

from ..distributed.ranks import every_loan_pays, leave, whole
from .families import WIDE_SIZES

if interpret:
    pytest.skip("nothing here runs Triton", allow_module_level=True)
pytest.importorskip("transformers", reason="transformers is not installed")
if torch.accelerator.current_accelerator() is not None:
    pytest.skip("transformers uses the accelerator, with one rank on each", allow_module_level=True)
if parallel_interface() is None:
    pytest.skip("this transformers has no ep_implementation", allow_module_level=True)

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

WORLD = 2
SAME_TOKENS = {"fsdp_size": 1, "tp_size": WORLD}
CASES = {  # of each family: whether experts are lent, and what is done with the model
    "plain": (True, {}),
    "windows": (True, {"options": {"rows": 0.2, "max_tokens": 80}}),
    "checkpoints": (True, {"checkpoints": True}),
    "same tokens": (True, {"sizes": SAME_TOKENS}),
    "main_grad": (True, {"sizes": SAME_TOKENS, "main_grad": True}),
    "lora": (True, {"lora": {}}),
    "dora": (True, {"lora": {"dora": True}}),
    "one adapter": (True, {"lora": {"targets": ("down_proj",)}}),
    "nf4": (True, {"bits": "nf4"}),
    "mxfp4, lora": (True, {"bits": "mxfp4", "lora": {}}),
    "no gradient": (True, {"no_grad": True}),
    "bfloat16": (True, {"dtype": torch.bfloat16}),
    "bfloat16, main_grad": (True, {"dtype": torch.bfloat16, "sizes": SAME_TOKENS, "main_grad": True}),
    "norm": (False, {"norm": True}),
    "no kernel has its gate": (False, {"gate": True}),
    "auto": (True, {"guests": "auto"}),
}
SHARDED = {  # how transformers shards experts whose gradients are to be added to a main_grad
    "our dispatcher": {},
    "theirs": {"ep_implementation": "all_to_all"},
    "slices of experts": {"ep_size": 1},
}
FAMILIES = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 64},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 64},  # transposed, with biases
}


def load(folder, family, sizes=None, dtype=torch.float32, bits=None, lora=None, norm=False, gate=False, **_):
    sizes = {"fsdp_size": WORLD, "ep_size": WORLD, "ep_implementation": NAME} | (sizes or {})
    model = AutoModelForCausalLM.from_pretrained(
        folder / family,
        experts_implementation=NAME,
        dtype=dtype,
        distributed_config=DistributedConfig(**sizes),
    )
    if bits is not None:
        quantize_experts(model, bits)
    if lora is not None:
        torch.manual_seed(3)
        add_lora(model, rank=4, **lora)
        for p in [p for name, p in model.named_parameters() if ADAPTERS in name]:
            p.data += 0.1 * p.data.norm() / p.numel() ** 0.5 + 0.01  # as after some training
    for experts in experts_in(model).values():
        if norm:
            experts.has_post_expert_norm, experts.post_expert_norm = True, Squares()
        if gate:
            experts._apply_gate = lambda z: z.chunk(2, -1)[0]
    return model


@torch.no_grad()
def prefer_first_rank(model) -> None:
    """Let one number of each token speak for the first two of four experts."""
    for name, p in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            p[:, 0] = 1
        elif name.endswith("post_attention_layernorm.weight"):
            p[0] = 1
        elif name.endswith(("mlp.gate.weight", "mlp.router.weight")):
            p[:2, 0], p[2:, 0] = 0.1, 0


class Squares(nn.Module):
    """A norm without parameters."""

    def forward(self, rows):
        return rows * rows.square().mean(-1, keepdim=True).add(1).rsqrt()


def step(model, tokens, main_grad=False, checkpoints=False, no_grad=False, **_) -> dict:
    """The logits and all gradients, whole, of two micro-batches."""
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    if no_grad:
        with torch.no_grad():
            return {"logits": model(tokens).logits}
    if main_grad:
        use_main_grad(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(2):
        found = model(tokens, labels=tokens)
        found.loss.backward()
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = {name: p.main_grad if hasattr(p, "main_grad") else p.grad for name, p in weights.items()}
    if main_grad:
        sums = [name for name, p in weights.items() if hasattr(p, "main_grad")]
        assert len(sums) == 2 and all(weights[name].grad is None for name in sums), sums
    return {"logits": found.logits.detach(), **{name: whole(d) for name, d in grads.items()}}


def one_rank(rank: int, folder: pathlib.Path) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD)
    batch = torch.randint(32, (WORLD, 2, 32), generator=torch.Generator().manual_seed(1))
    loans, results = every_loan_pays(pytest.MonkeyPatch()), {}
    for family in FAMILIES:
        for case, (_, how) in CASES.items():
            tokens = batch[0] if "sizes" in how else batch[rank]
            found = []
            for number in (0, how.get("guests", 2), how.get("guests", 2)):
                register(guests=number, **how.get("options", {}))
                found.append(step(load(folder, family, **how), tokens, **how))
                unregister()
                assert number or not loans, (family, case)
            want, got, again = found
            frozen = "no_grad" in how or ("bits" in how and "lora" not in how)
            assert got.keys() == want.keys() and any("down_proj" in name for name in want) != frozen
            assert all(torch.equal(got[name], again[name]) for name in got), (family, case)
            errors = {name: error(got[name], want[name]) for name in want}
            results[family, case] = {"errors": errors, "loans": sum(loans)}
            loans.clear()
        register()
        for case, sizes in SHARDED.items():
            how = [{"sizes": SAME_TOKENS | sizes, "main_grad": main_grad} for main_grad in (True, False)]
            got, want = (step(load(folder, family, **options), batch[0], **options) for options in how)
            results[family, case] = {name: error(got[name], want[name]) for name in want}
        model = load(folder, family, sizes=SAME_TOKENS)
        loss = model(batch[0], labels=batch[0]).loss
        with torch.no_grad():
            experts_in(model)["model.layers.0.mlp.experts"].down_proj.mul_(2)
        with pytest.raises(RuntimeError, match="a weight of shared experts was changed in place between"):
            loss.backward()
        unregister()
    register(guests=3)
    with pytest.raises(ValueError, match="guests=3, but the other ranks have only 2 experts to lend"):
        load(folder, "qwen3_moe")
    unregister()
    torch.save(results, folder / f"{rank}.pt")
    leave()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **WIDE_SIZES | FAMILIES[family] | {"num_hidden_layers": 1})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for p in model.parameters():
            nn.init.normal_(p, std=0.2)
        prefer_first_rank(model)
        model.save_pretrained(folder / family)
    forked.call(one_rank, WORLD, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_guests_change_only_the_rounding(ranks, family, case):
    lends, how = CASES[case]
    narrow = "dtype" in how  # then gradients of biases are but sums of roundings
    for results in ranks:
        found = results[family, case]
        assert (found["loans"] > 0) == lends
        for name, distance in found["errors"].items():
            if name == "logits" or "experts" in name or not narrow:
                assert distance < (2**-7 if narrow else 2e-6), (name, distance)


@pytest.mark.parametrize("case", SHARDED)
@pytest.mark.parametrize("family", FAMILIES)
def test_main_grad_of_sharded_experts(ranks, family, case):
    """Backward adds to it what autograd would have left in `.grad`, and leaves nothing there."""
    for results in ranks:
        for name, distance in results[family, case].items():
            assert distance < 2e-6, (name, distance)


@pytest.mark.parametrize(
    "guests, kind, message",
    [
        (-1, ValueError, "guests must be at least 0, or 'auto', not -1"),
        ("x", ValueError, "guests must be at least 0, or 'auto', not 'x'"),
        (True, TypeError, "guests must be an int or a str, not bool"),
        (1.5, TypeError, "guests must be an int or a str, not float"),
    ],
)
def test_what_register_refuses(guests, kind, message):
    with pytest.raises(kind, match=message):
        register(guests=guests)


def test_options_that_exclude_each_other():
    """Also if they come by two calls; the one that raises changes nothing."""
    register(keep_x=True)
    with pytest.raises(ValueError, match="keep_x=True keeps no weights of guests"):
        register(guests=2)
    register(keep_x=False)
    register(guests=2)
    register(guests=0)
