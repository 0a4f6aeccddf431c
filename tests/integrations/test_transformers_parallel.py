"""Expert parallelism of transformers on our dispatcher: two processes beside one with the joined batch."""

import forked
import pytest
import torch
import torch.distributed as dist

from moe_aiter.config import interpret
from moe_aiter.distributed import clip_grad_norm_
from moe_aiter.integrations.transformers import NAME, check, parallel_interface, register, unregister

from ..distributed.ranks import leave
from .families import VOCAB, experts_of, tiny_model

if interpret:
    pytest.skip("nothing here runs Triton", allow_module_level=True)
pytest.importorskip("transformers", reason="transformers is not installed")
if torch.accelerator.current_accelerator() is not None:
    pytest.skip("transformers uses the accelerator, with one rank on each", allow_module_level=True)
if parallel_interface() is None:
    pytest.skip("this transformers has no ep_implementation", allow_module_level=True)

from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import EPImplementation

WORLD = 2
PLAN = [f"model.layers.*.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
CASES = {  # the family, changes of its configuration, of its experts, and the options of the dispatcher
    "qwen3_moe": ("qwen3_moe", {}, {}, {}),
    "gpt_oss": ("gpt_oss", {}, {}, {}),  # transposed, with biases
    "a gate of its own": ("gpt_oss", {}, {"limit": 5.0}, {}),
    "windows": ("qwen3_moe", {}, {}, {"rows": 0.2, "max_tokens": 80}),
}


SHARED = {  # the family, and how the ranks that have the same tokens divide the model
    "tensor and expert parallel": ("qwen3_moe", {"ep_size": WORLD}),
    "tensor parallel all-to-all": ("qwen3_moe", {"ep_size": WORLD, "ep_implementation": "all_to_all"}),
    **{
        family: (family, {"ep_size": 1})
        for family in ("mixtral", "deepseek_v3", "llama4_text", "longcat_flash")
    },
    "tensor parallel gpt_oss": ("gpt_oss", {"ep_size": 1}),
}


def batch() -> torch.Tensor:
    return torch.randint(VOCAB, (WORLD, 2, 32), generator=torch.Generator().manual_seed(1))


def shared_batch() -> torch.Tensor:
    """31 tokens, of which one rank gets one more."""
    return batch()[0, :1, :31]


def step(model, tokens: torch.Tensor, constants: dict, checkpoints: bool = False) -> dict:
    """The loss, all gradients, whole, and their norm."""
    for experts in experts_of(model):
        vars(experts).update(constants)
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    grads = {
        name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in model.named_parameters()
    }
    return {"loss": loss.detach(), "norm": clip_grad_norm_(model.parameters(), 1e9), **grads}


def load(folder: str, name: str, experts: str = NAME, **config):
    config = {"fsdp_size": WORLD, "ep_size": WORLD, "ep_implementation": NAME} | config
    return AutoModelForCausalLM.from_pretrained(
        f"{folder}/{name}", experts_implementation=experts, distributed_config=DistributedConfig(**config)
    )


def one_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD)
    tokens, results = batch()[rank], {}
    for name, (_, _, constants, options) in CASES.items():
        register(**options)
        model = load(folder, name)
        for experts in experts_of(model):
            for weight in experts.parameters():
                assert weight.to_local().shape[0] == weight.shape[0] // WORLD
        results[name] = step(model, tokens, constants)
        unregister()
    register()
    results["checkpoints"] = step(load(folder, "qwen3_moe"), tokens, {}, checkpoints=True)
    theirs = load(folder, "qwen3_moe", ep_implementation="all_to_all")
    results["all_to_all"] = step(theirs, tokens, {})
    results["experts replicated"] = step(load(folder, "qwen3_moe", ep_size=1), tokens, {})
    for case, (family, how) in SHARED.items():
        model = load(folder, family, fsdp_size=1, tp_size=WORLD, **how)
        results[case] = step(model, shared_batch(), {})
        assert {path.path for path in check(model).values()} == {"fused"}
    model = load(folder, "qwen3_moe")
    results["check"] = check(model)
    model.save_pretrained(f"{folder}/saved")
    with pytest.raises(ValueError, match="Qwen3MoeExperts runs 'eager': pass experts_implementation="):
        load(folder, "qwen3_moe", experts="eager")
    with pytest.raises(ValueError, match="ep_plan leaves weights of Qwen3MoeExperts whole"):
        load(folder, "qwen3_moe", ep_plan=dict.fromkeys(PLAN, "replicate"))
    torch.save(results, f"{folder}/{rank}.pt")
    leave()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The models' weights, and what both ranks made of them."""
    folder = tmp_path_factory.mktemp("models")
    models = {name: (family, changes) for name, (family, changes, _, _) in CASES.items()}
    models |= {family: (family, {}) for family, _ in SHARED.values() if family not in models}
    for name, (family, changes) in models.items():
        torch.manual_seed(0)
        tiny_model(family, **changes).save_pretrained(folder / name)
    forked.call(one_rank, WORLD, str(folder))
    return folder


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


@pytest.mark.parametrize("case", [*CASES, "checkpoints", "all_to_all", "experts replicated"])
def test_as_one_process(folder, ranks, case):
    name = case if case in CASES else "qwen3_moe"
    register()
    model = AutoModelForCausalLM.from_pretrained(folder / name, experts_implementation=NAME)
    want = step(model, batch().flatten(0, 1), CASES[name][2])
    got = [results[case] for results in ranks]
    close(torch.stack([results.pop("loss") for results in got]).mean(), want.pop("loss"))
    for results in got:
        assert results.keys() == want.keys()
        for name, gradient in want.items():
            close(results[name], gradient)


def test_the_class_that_transformers_gets():
    register()
    found = parallel_interface()._global_mapping[NAME]
    assert issubclass(found, EPImplementation) and not found.needs_shared_batch
    with pytest.raises(ValueError, match="with transformers' decorator, which Linear lacks"):
        found(torch.nn.Linear(2, 2), None, None)


@pytest.mark.parametrize("case", SHARED)
def test_ranks_with_the_same_tokens(folder, ranks, case):
    model = AutoModelForCausalLM.from_pretrained(folder / SHARED[case][0], experts_implementation="eager")
    want = step(model, shared_batch(), {})
    for results in ranks:
        assert results[case].keys() == want.keys()
        for name, gradient in want.items():
            close(results[case][name], gradient)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


def test_check_and_save(folder, ranks):
    for results in ranks:
        assert {path.path for path in results["check"].values()} == {"fused"}
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder / name).state_dict() for name in ("qwen3_moe", "saved")
    )
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
