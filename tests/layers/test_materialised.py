"""Layers made on meta: whatever a state dict lacks is right after every way to give them memory."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import skip_init

from moe_aiter import MoE, Monitor, balance_step, set_loss_scale

H, E, K = 16, 6, 2
OPTIONS = {"selection_bias": True, "quantile_bins": 4, "score": "sigmoid", "load_balance_coef": 0.1}


@pytest.fixture(autouse=True)
def used_memory(monkeypatch):
    """Fresh memory holds what was there before, as it may anywhere."""
    empty_like = torch.empty_like

    def used(t, **options):
        fresh = empty_like(t, **options)
        return fresh if fresh.is_meta else fresh.fill_(3)

    monkeypatch.setattr(torch, "empty_like", used)


def build(device=None, **options):
    return MoE(H, 8, E, K, device=device, **OPTIONS | options)


def to_empty(device, state):
    moe = build("meta").to_empty(device=device)
    moe.load_state_dict(state)
    return moe


def to_empty_twice(device, state):
    moe = build().to_empty(device=device).to_empty(device=device)
    moe.load_state_dict(state)
    return moe


def module_by_module(device, state):
    moe = build("meta")
    for module in moe.modules():
        module.to_empty(device=device, recurse=False)
    moe.load_state_dict(state)
    return moe


def assign(device, state):
    moe = build("meta")
    set_loss_scale(moe, 1.0)
    moe.load_state_dict(state, assign=True)
    return moe


def assign_part_by_part(device, state):
    moe = build("meta")
    for name, part in moe.named_children():
        inner = {k.removeprefix(f"{name}."): v for k, v in state.items() if k.startswith(f"{name}.")}
        part.load_state_dict(inner, assign=True)
    return moe


def assign_to_weights_on_meta(device, state):
    """accelerate's init_empty_weights leaves buffers on the CPU."""
    moe = build("meta")
    for module in moe.modules():
        for name, buffer in [*module.named_buffers(recurse=False)]:
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    moe.load_state_dict(state, assign=True)
    return moe


def set_one_by_one(device, state):
    """As transformers' from_pretrained does, which gives other buffers memory that nothing has written."""
    moe = build("meta")
    for name, t in state.items():
        module, _, last = name.rpartition(".")
        t = nn.Parameter(t) if t.is_floating_point() and "selection_bias" not in name else t
        setattr(moe.get_submodule(module), last, t)
    for name in ("load", "margins"):
        setattr(moe, name, torch.empty_like(getattr(moe, name), device=device))
    return moe


def moved_with_counts_on_meta(device, state):
    """As accelerate's load_checkpoint_and_dispatch does, which then moves the model."""
    moe = build("meta")
    for name, t in state.items():
        module, _, last = name.rpartition(".")
        module = moe.get_submodule(module)
        if last in module._parameters:
            module._parameters[last] = nn.Parameter(t.cpu())
        else:
            module._buffers[last] = t.cpu()
    return moe.to(device)


def skipped(device, state):
    moe = skip_init(MoE, H, 8, E, K, **OPTIONS, device=device)
    moe.load_state_dict(state)
    return moe


WAYS = [
    to_empty, to_empty_twice, module_by_module, assign, assign_part_by_part, assign_to_weights_on_meta,
    set_one_by_one, moved_with_counts_on_meta, skipped,
]  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_ways(device, way, compiled):
    """Outputs, gradients, counts and steps of the bias are those of the layer that wrote the state."""
    want = build(device)
    want.router.selection_bias += torch.linspace(-0.1, 0.1, E, device=device)
    got = way(device, copy.deepcopy(want.state_dict()))
    call = torch.compile(got, fullgraph=True, backend="aot_eager") if compiled else got
    for _ in range(2):
        x = torch.randn(2, 5, H, device=device)
        outs = want(x), call(x)
        torch.testing.assert_close(*outs)
        for out in outs:
            out.square().sum().backward()
        assert torch.equal(got.load, want.load) and torch.equal(got.margins, want.margins)
    for p, q in zip(got.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    for moe in (got, want):
        balance_step(moe, rule="quantile", rate=0.5)
    torch.testing.assert_close(got.router.selection_bias, want.router.selection_bias)
    assert got.load.count_nonzero() == got.margins.count_nonzero() == 0
    assert {t.device for t in (*got.buffers(), got.loss_scale)} == {got.router.weight.device}


@pytest.mark.parametrize("way", [to_empty, assign, set_one_by_one, skipped])
def test_before_any_forward_pass(device, way):
    state = build(device).state_dict()
    moe = way(device, state)
    balance_step(moe)
    assert torch.equal(moe.router.selection_bias, state["router.selection_bias"])
    x = torch.randn(3, H, device=device)
    program = torch.export.export(way(device, state), (x,)).module()
    program(x)
    assert program.get_buffer("load").sum() == 3 * K
    moe = way(device, state)
    with Monitor(moe) as monitor:
        moe(x)
        assert next(iter(monitor.read().values())).tokens == 3


@pytest.mark.parametrize("way", ["to_empty", "assign", "reset"])
def test_the_loss_scale_of_a_layer_on_meta(device, way):
    """It is a number that no state dict has, and meta would lose it."""
    moe, state = build("meta"), build(device).state_dict()
    set_loss_scale(moe, 0.125)
    moe.train()(torch.randn(3, H, device="meta", requires_grad=True)).sum().backward()
    if way != "assign":
        moe.to_empty(device=device)
    moe.reset_parameters() if way == "reset" else moe.load_state_dict(state, assign=way == "assign")
    assert moe.loss_scale == 0.125 and moe.loss_scale.device == moe.router.weight.device
    assert moe.to("meta").to_empty(device=device).loss_scale == 0.125


def test_weights_on_meta_are_not_moved(device):
    with pytest.raises(NotImplementedError, match="to_empty"):
        build("meta").to(device)


def test_moves_keep_counts(device):
    moe = build()
    moe(torch.randn(5, H))
    before = moe.load.clone()
    for moved in (moe.to(device), copy.deepcopy(moe), moe.bfloat16(), moe.to("cpu"), moe.share_memory()):
        assert torch.equal(moved.load.cpu(), before) and before.sum() == 5 * K
    assert moe.load.is_shared() and moe.margins.sum() == 5 * E
    assert moe.to("meta").load.is_meta
    assert moe.to_empty(device=device).load.count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("how", ["assign", "copy", "cast", "buffer", "moved", "set", "data"])
def test_the_bias_stays_float32(device, dtype, how):
    """Whatever casts or loads it: a step of 1e-3 on a bias of 4 would vanish in 16 bits."""
    moe = build(device)
    state = {k: v.to(dtype) for k, v in build(device).state_dict().items()}
    state["router.selection_bias"] += 4
    if how in ("assign", "copy"):
        moe.load_state_dict(state, assign=how == "assign")
    else:
        moe.load_state_dict(state)
        if how == "cast":
            moe.to(dtype)
        elif how == "set":
            moe.router.selection_bias = moe.router.selection_bias.to(dtype)
        elif how in ("buffer", "moved"):  # as accelerate casts, which then may move the model
            moe.router._buffers["selection_bias"] = moe.router.selection_bias.to(dtype)
            if how == "moved":
                moe.to(device)
        else:  # as FSDP1 casts
            moe.router.selection_bias.data = moe.router.selection_bias.to(dtype)
    if how not in ("buffer", "data"):
        assert moe.router.selection_bias.dtype == torch.float32
    moe(torch.randn(5, H, device=device, dtype=moe.router.weight.dtype))
    load = moe.load.clone()
    balance_step(moe, 1e-3)
    step = moe.router.selection_bias - 4
    assert moe.router.selection_bias.dtype == torch.float32 or dtype == torch.float64
    torch.testing.assert_close(step, 1e-3 * (load.sum() / E - load).sign().to(step), rtol=1e-3, atol=1e-6)
    assert moe.state_dict()["router.selection_bias"].dtype == moe.router.selection_bias.dtype


def test_pickles_load_with_another_device(device):
    """The hook of a layer goes with it."""
    moe, file = build(device), io.BytesIO()
    torch.save(moe, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False).to("meta")
    twin.load_state_dict(moe.state_dict(), assign=True)
    twin(torch.randn(3, H, device=device))
    assert twin.load.sum() == 3 * K
