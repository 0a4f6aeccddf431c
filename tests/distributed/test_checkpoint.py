"""Sharded checkpoints of one process: no part is run, and an optimizer's state comes back as it was."""

import errno
import io
import os
import pickle
import random
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile import error_of, no_file, pickles
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from moe_aiter import LoRAExperts, LoRALinear, MoE, fuse_qkv, quantize
from moe_aiter.distributed import load_sharded, save_sharded
from moe_aiter.optim import Muon, muon_groups

pytestmark = pytest.mark.filterwarnings("error:torch.distributed is disabled")


class Net(nn.Module):
    """Layers that a step may leave out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.moe = (
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            MoE(8, 4, num_experts=4, top_k=2),
        )
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, uses=("first", "second", "moe"), **given):
        for name in uses:
            x = getattr(self, name)(x, **(given if name == "moe" else {}))
        return x


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 1e-2)


def muon(model):
    return Muon(muon_groups(model), lr=1e-2)


def step(model, optimizer, seed, *uses, **given):
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
    model(x, *([uses] if uses else []), **given).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def again(folder, make, loaded=None):
    """A model of other weights and its optimizer, with what `folder` holds."""
    model = Net()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    optimizer = make(model) if loaded is None else loaded(model)
    for group in optimizer.param_groups:
        group["lr"] = 5.0
    load_sharded(folder, model, optimizer)
    return model, optimizer


def assert_same(model, optimizer, other, others):
    for (name, p), q in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(p, q[1]), name
        mine, theirs = optimizer.state.get(p, {}), others.state.get(q[1], {})
        assert mine.keys() == theirs.keys(), name
        assert all(torch.equal(mine[key], theirs[key]) for key in mine), name
    for group, theirs in zip(optimizer.param_groups, others.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in theirs.items() if k != "params"
        }


ids = torch.tensor([[0, 1]] * 6)
UNUSED = {
    "a layer": lambda model, optimizer, seed: step(model, optimizer, seed, "first", "moe"),
    "experts": lambda model, optimizer, seed: step(model, optimizer, seed, "second"),
    "a router": lambda model, optimizer, seed: step(
        model, optimizer, seed, expert_ids=ids, routing_weights=torch.full((6, 2), 0.5)
    ),
    "all": lambda model, optimizer, seed: None,
}


@pytest.mark.parametrize("make", [adamw, muon])
@pytest.mark.parametrize("unused", UNUSED)
def test_training_goes_on_bit_for_bit_after_layers_without_gradients(unused, make, tmp_path):
    model = Net()
    optimizer = make(model)
    for seed in range(2):
        UNUSED[unused](model, optimizer, seed)
    save_sharded(tmp_path / "saved", model, optimizer)
    other, others = again(tmp_path / "saved", make)
    assert_same(model, optimizer, other, others)
    for seed in range(3):
        step(model, optimizer, 10 + seed)
        step(other, others, 10 + seed)
    assert_same(model, optimizer, other, others)


@pytest.mark.parametrize("thawed", [False, True])
def test_a_layer_that_was_frozen_after_some_steps_keeps_its_state(thawed, tmp_path):
    model = Net()
    optimizer = adamw(model)
    step(model, optimizer, 0)
    model.first.requires_grad_(False)
    step(model, optimizer, 1)
    save_sharded(tmp_path / "saved", model, optimizer)

    def frozen(model):
        model.first.requires_grad_(thawed)
        return adamw(model)

    other, others = again(tmp_path / "saved", adamw, frozen)
    assert all(p.requires_grad == thawed for p in other.first.parameters())
    assert_same(model, optimizer, other, others)
    for net, of in ((model, optimizer), (other, others)):
        net.first.requires_grad_(True)
        step(net, of, 2)
    assert_same(model, optimizer, other, others)


def test_a_layer_that_the_optimizer_did_not_have_gets_the_settings_of_its_group(tmp_path):
    model = Net()
    model.first.requires_grad_(False)  # the first of its group afterwards
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    step(model, optimizer, 0)
    save_sharded(tmp_path / "saved", model, optimizer)
    other, others = again(tmp_path / "saved", adamw)
    assert [group["lr"] for group in others.param_groups] == [1e-2]
    assert not any(p in others.state for p in other.first.parameters())
    assert len(others.state) == len(optimizer.state)
    step(other, others, 1)


def test_state_that_has_no_place_any_more_warns(tmp_path):
    model = Net()
    optimizer = adamw(model)
    step(model, optimizer, 0)
    save_sharded(tmp_path / "saved", model, optimizer)
    message = r"no place for, and that is left out: state.first.bias.exp_avg and 5 more"
    with pytest.warns(UserWarning, match=message):
        again(tmp_path / "saved", None, lambda model: adamw(nn.ModuleList([model.second, model.moe])))
    with pytest.warns(UserWarning, match="state.first.bias.exp_avg"):  # SGD has no state
        again(tmp_path / "saved", None, lambda model: torch.optim.SGD(model.parameters(), 1e-2))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        again(tmp_path / "saved", adamw)
        load_sharded(tmp_path / "saved", Net())  # the model alone is what was asked for


def test_what_an_optimizer_has_already_does_not_hide_what_is_saved(tmp_path):
    """torch would make no state for an optimizer that has some, nor beside a gradient."""
    model = Net()
    optimizer = adamw(model)
    step(model, optimizer, 0)
    save_sharded(tmp_path / "saved", model, optimizer)
    other = Net()
    others = adamw(other)
    step(other, others, 1, "first")
    other(torch.ones(1, 8)).sum().backward()
    gradient = other.second.weight.grad.clone()
    load_sharded(tmp_path / "saved", other, others)
    assert_same(model, optimizer, other, others)
    assert torch.equal(other.second.weight.grad, gradient)


@pytest.mark.parametrize("make", [adamw, lambda model: torch.optim.SGD(model.parameters(), 1e-2)])
def test_saving_and_loading_take_no_step(make, tmp_path):
    """A step with lr=0 has hooks, and counts in AdamW's state."""
    model = Net()
    optimizer = make(model)
    optimizer.register_step_post_hook(lambda *_: model.seen.add_(1))
    save_sharded(tmp_path / "saved", model, optimizer)
    assert not optimizer.state and model.seen == 0
    model.seen.fill_(7)
    load_sharded(tmp_path / "saved", model, optimizer)
    assert not optimizer.state and model.seen == 0


def test_a_checkpoint_without_an_optimizer(tmp_path):
    save_sharded(tmp_path / "saved", Net())
    with pytest.raises(ValueError, match="has no state of an optimizer: load the model alone"):
        again(tmp_path / "saved", adamw)


def test_a_checkpoint_of_an_earlier_version(tmp_path):
    """These had a state for each parameter, also where it was made to be saved."""
    model = Net()
    optimizer = adamw(model)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "saved")
    assert_same(model, optimizer, *again(tmp_path / "saved", adamw))


def adapters(smaller=False, seed=0, dora=False):
    """A layer with adapters, in experts too; with `smaller` one of each is of a smaller rank."""
    torch.manual_seed(seed)
    model = nn.Sequential(LoRALinear(nn.Linear(8, 8), 2, rank=4), MoE(8, 4, num_experts=4, top_k=2))
    model[1].experts = LoRAExperts(model[1].experts, *([] if dora else [2]), rank=4, dora=dora)
    for name, p in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(p)
    if smaller:
        small = LoRALinear(nn.Linear(8, 8), rank=2)
        model[0].load_peft_state_dict(small.peft_state_dict(), adapter=1, alpha=16)
        small = LoRAExperts(MoE(8, 4, num_experts=4, top_k=2).experts, rank=3)
        model[1].experts.load_peft_state_dict(small.peft_state_dict(), adapter=0, alpha=5)
    return model


def assert_same_state(model, other):
    mine, theirs = model.state_dict(), other.state_dict()
    assert {n: t.dtype for n, t in mine.items()} == {n: t.dtype for n, t in theirs.items()}
    assert all(torch.equal(t, theirs[name]) for name, t in mine.items())


WRAPPED = {
    "alone": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "checkpointed": lambda model: nn.Sequential(*map(checkpoint_wrapper, model)),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("smaller", [False, True])
def test_adapters_bring_their_ranks_and_scalings(smaller, wrapped, trained, tmp_path):
    model, other = adapters(smaller), adapters(not smaller, seed=1)
    save_sharded(tmp_path / "saved", model, *([adamw(model)] if trained else []))
    other_wrapped = WRAPPED[wrapped](other)
    load_sharded(tmp_path / "saved", other_wrapped, *([adamw(other_wrapped)] if trained else []))
    assert any("scales" in name for name in other.state_dict()) == smaller
    assert_same_state(model, other)
    x, ids = torch.randn(5, 8), torch.tensor([0, 1, -1, 1, 0])
    for layer, theirs in zip(model, other, strict=True):
        assert torch.equal(layer(x, adapter_ids=ids), theirs(x, adapter_ids=ids))


def four_bits(format, seed=0, single=False):
    """Experts of 4 bits; with `single`, NF4's scales are float32, as where ranks share the experts."""
    torch.manual_seed(seed)
    model = quantize(MoE(128, 128, num_experts=3, top_k=2), format)
    for weight in model.experts.owners() if single else ():
        weight.shard(lambda t: t)
    return model


@pytest.mark.parametrize("single", [(False, False), (False, True), (True, False), (True, True)])
def test_scales_of_nf4_come_in_the_form_that_was_saved(single, tmp_path):
    model, other = (four_bits("nf4", seed, of) for seed, of in enumerate(single))
    save_sharded(tmp_path / "saved", model)
    load_sharded(tmp_path / "saved", other)
    assert_same_state(model, other)
    x = torch.randn(5, 128)
    assert torch.equal(model(x), other(x))


FORMATS = "int8", "fp8", "fp16", "bf16", "nf4", "mxfp4", "int4"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("to", [*FORMATS, None])
def test_weights_of_another_format_are_refused(to, form, tmp_path):
    """Floats of 16 bits are cast, as load_state_dict does."""
    model, other = MoE(128, 128, num_experts=3, top_k=2), MoE(128, 128, num_experts=3, top_k=2)
    model, other = quantize(model, form), other if to is None else quantize(other, to)
    save_sharded(tmp_path / "saved", model)
    if form == to or {form, to} <= {"fp16", "bf16", None}:
        load_sharded(tmp_path / "saved", other)
        x = torch.randn(5, 128)
        torch.testing.assert_close(model(x), other(x), rtol=1e-2, atol=1e-2)
        return
    before = {name: t.clone() for name, t in other.state_dict().items()}
    with pytest.raises((ValueError, RuntimeError)) as caught:
        load_sharded(tmp_path / "saved", other)
    assert "\n" not in str(caught.value)
    if {form, to} <= {"int8", "fp8", "fp16", "bf16"}:
        assert "make the model in the format that was saved" in str(caught.value)
    assert all(torch.equal(t, before[name]) for name, t in other.state_dict().items())


class WithBuffer(nn.Module):
    def __init__(self, persistent):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("turns", torch.ones(2), persistent=persistent)


OPTIONS = {  # what was saved, what it is loaded into, and the tensor that has no place
    "bias": (lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4, bias=False), "bias"),
    "selection bias": (
        lambda: MoE(8, 4, num_experts=4, top_k=2, selection_bias=True),
        lambda: MoE(8, 4, num_experts=4, top_k=2),
        "router.selection_bias",
    ),
    "experts' bias": (
        lambda: MoE(8, 4, num_experts=4, top_k=2, bias=True),
        lambda: MoE(8, 4, num_experts=4, top_k=2),
        "experts.down_bias",
    ),
    "dora": (
        lambda: adapters(dora=True)[1].experts,
        lambda: LoRAExperts(MoE(8, 4, num_experts=4, top_k=2).experts, rank=4),
        "down_lora.magnitude",
    ),
    "fused": (
        lambda: nn.ModuleList(linears(True)),
        lambda: nn.ModuleList(fuse_qkv(*linears(False))),
        "0.bias",
    ),
}


def linears(bias):
    return [nn.Linear(4, 4, bias=bias) for _ in range(3)]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("below", [False, True])
def test_a_tensor_without_a_place_in_its_module_is_refused(below, option, tmp_path):
    saved, loaded, name = OPTIONS[option]
    model, other = saved(), loaded()
    if below:
        model, other, name = nn.ModuleDict({"it": model}), nn.ModuleDict({"it": other}), f"it.{name}"
    save_sharded(tmp_path / "saved", model)
    with pytest.raises(ValueError, match=rf"^{name} is saved, but the model's \w+ has no place for it"):
        load_sharded(tmp_path / "saved", other)


def test_modules_and_buffers_that_the_model_has_not_are_left_out(tmp_path):
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2), WithBuffer(True), nn.Linear(4, 4)])
    save_sharded(tmp_path / "saved", model)
    other = nn.ModuleList([nn.Linear(4, 4), nn.Identity(), WithBuffer(False)])
    load_sharded(tmp_path / "saved", other)
    assert torch.equal(model[0].weight, other[0].weight)


def plant(folder, key: str, content: bytes) -> None:
    """Put `content` in the place of what is saved under `key`."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == key)
    shard = folder / place.relative_path
    place.offset, place.length = shard.stat().st_size, len(content)
    shard.write_bytes(shard.read_bytes() + content)
    path.write_bytes(pickle.dumps(metadata))


@pytest.fixture
def saved(tmp_path):
    model = Net()
    optimizer = adamw(model)
    step(model, optimizer, 0)
    save_sharded(tmp_path / "saved", model, optimizer)
    return tmp_path / "saved"


@pytest.mark.parametrize("key", ["model.first.weight", "optimizer.param_groups.first.weight.lr"])
def test_no_entry_of_a_shard_is_run(key, saved):
    mark = saved / "mark"
    for name, content in pickles(mark).items():
        plant(saved, key, content)
        with pytest.raises(ValueError) as caught:
            again(saved, adamw)
        assert not mark.exists(), name
        assert "\n" not in str(caught.value) and "weights_only" not in str(caught.value), name
        if name == "torch.save":
            assert "names 'io.open', which is not run" in str(caught.value)


def test_a_setting_of_another_type(saved):
    text = io.BytesIO()
    torch.save("fast", text)
    plant(saved, "optimizer.param_groups.first.weight.lr", text.getvalue())
    with pytest.raises(ValueError, match=r"^optimizer\S*first.weight.lr is a str; it should be a float$"):
        again(saved, adamw)


@pytest.mark.parametrize("kept", [0, 100, 1000])
def test_a_damaged_shard_says_so_in_one_line(kept, saved):
    (shard,) = saved.glob("*.distcp")
    content = shard.read_bytes()
    shard.write_bytes(content[:kept] + random.Random(kept).randbytes(len(content) - kept))
    with pytest.raises((ValueError, OSError, RuntimeError)) as caught:
        again(saved, adamw)
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)


def test_a_full_disk(saved, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", "shard")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    with pytest.raises(OSError, match=r"No space left on device: 'shard'$"):
        save_sharded(saved.parent / "another", Net())


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "device", "folder", "socket"])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_what_is_no_plain_file_is_refused(kind, name, saved):
    (saved / name).unlink()
    with no_file(kind, saved / name):
        error = error_of(lambda: again(saved, adamw), saved / name)
    assert isinstance(error, OSError) and "\n" not in str(error)


def test_a_shard_that_is_a_link_out_of_the_folder(saved):
    (saved / "__0_0.distcp").rename(saved.parent / "elsewhere")
    (saved / "__0_0.distcp").symlink_to("../elsewhere")
    with pytest.raises(OSError, match="it is a link out of the folder, to /"):
        again(saved, adamw)
    (saved.parent / "elsewhere").rename(saved / "inside")
    os.unlink(saved / "__0_0.distcp")
    (saved / "__0_0.distcp").symlink_to("inside")
    again(saved, adamw)
