"""Projections of one input as one product, under their old names."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_aiter.layers import fuse
from moe_aiter.layers.fuse import FusedLinear, FusedPart, fuse_gate_up, fuse_projections, fuse_qkv, unfuse

D, D_KV, F = 16, 8, 24
NAMES = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


class Block(nn.Module):
    """Calls its projections one by one, as transformers' models do."""

    def __init__(self, bias=True, **kind):
        super().__init__()
        for name, size in zip(NAMES, (D, D_KV, D_KV, F, F), strict=True):
            setattr(self, name, nn.Linear(D, size, bias=bias, **kind))
        self.out = nn.Linear(D + 2 * D_KV + F, D, bias=bias, **kind)

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        gated = nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.out(torch.cat([q, k, v, gated], -1))


def fused(bias=True, trainable=None, **kind):
    """A block, and the same with its projections fused."""
    block = Block(bias, **kind)
    other = copy.deepcopy(block)
    assert fuse_projections(other, trainable=trainable) == 2
    return block, other


def grads(block, x):
    """Of the old names."""
    x = x.detach().requires_grad_()
    block(x).square().sum().backward()
    unfused = copy.deepcopy(block)
    for name in NAMES:
        part = getattr(block, name)
        if isinstance(part, FusedPart):
            linear = part.to_linear()
            for what, t in linear.named_parameters():
                t.grad = getattr(part.fused, what).grad[part.rows]
            setattr(unfused, name, linear)
        else:
            setattr(unfused, name, part)
    unfused.out = block.out
    return [x.grad] + [t.grad for _, t in sorted(unfused.named_parameters())]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (0,), ()])
def test_results_and_gradients_are_those_of_separate_projections(bias, shape, device):
    block, other = fused(bias, dtype=torch.float64, device=device)
    x = torch.randn(*shape, D, dtype=torch.float64, device=device)
    torch.testing.assert_close(other(x), block(x))
    for mine, theirs in zip(grads(other, x), grads(block, x), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_fused_module_multiplies_once(monkeypatch):
    _, other = fused()
    calls, multiply = [], fuse.multiply
    monkeypatch.setattr(fuse, "multiply", lambda x, *rest: calls.append(len(rest[0])) or multiply(x, *rest))
    x = torch.randn(5, D)
    q, k, v = other.q_proj.fused(x)
    assert calls == [D + 2 * D_KV]
    torch.testing.assert_close((q, k, v), (other.q_proj(x), other.k_proj(x), other.v_proj(x)))
    assert calls[1:] == [D, D_KV, D_KV]


def test_there_is_one_parameter_and_an_optimizer_trains_it():
    block, other = fused()
    names = [name for name, _ in other.named_parameters()]
    assert names == [
        "q_proj.fused.weight", "q_proj.fused.bias", "gate_proj.fused.weight", "gate_proj.fused.bias",
        "out.weight", "out.bias",
    ]  # fmt: skip
    x, target = torch.randn(50, D), torch.randn(50, D)
    for model in (block, other):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            optimizer.zero_grad()
            (model(x) - target).square().mean().backward()
            optimizer.step()
    for (name, mine), theirs in zip(other.state_dict().items(), block.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)


@pytest.mark.parametrize("trainable", [False, True])
def test_state_dicts_have_the_old_names_both_ways(trainable):
    block, other = fused(trainable=trainable)
    state = other.state_dict()
    assert list(state) == list(block.state_dict())
    assert all(torch.equal(t, u) for t, u in zip(state.values(), block.state_dict().values(), strict=True))
    new = Block()
    other.load_state_dict(new.state_dict())
    x = torch.randn(5, D)
    torch.testing.assert_close(other(x), new(x))
    block.load_state_dict(other.state_dict())
    torch.testing.assert_close(block(x), new(x))


def test_a_state_dict_s_mistakes_are_reported():
    _, other = fused()
    state = other.state_dict()
    state["k_proj.scale"] = state.pop("k_proj.bias")
    with pytest.raises(RuntimeError, match=r"Missing key.*k_proj.bias.*\n.*Unexpected key.*k_proj.scale"):
        other.load_state_dict(state)
    found = other.load_state_dict(state, strict=False)
    assert found.missing_keys == ["k_proj.bias"]
    with pytest.raises(RuntimeError, match=r"size mismatch for v_proj.weight: \(3, 3\).*\(8, 16\)"):
        other.load_state_dict(other.state_dict() | {"v_proj.weight": torch.zeros(3, 3)})


def test_frozen_projections_are_buffers_that_no_state_dict_has_twice():
    block = Block().requires_grad_(False)
    fuse_projections(block)
    assert [name for name, _ in block.named_parameters()] == ["out.weight", "out.bias"]
    assert "q_proj.fused.weight" in dict(block.named_buffers())
    assert list(block.state_dict()) == list(Block().state_dict())
    x = torch.randn(5, D, requires_grad=True)
    block(x).sum().backward()
    assert x.grad.abs().sum() > 0


def test_memory_is_not_doubled():
    block, other = fused()
    sizes = [sum(t.numel() for t in (*m.parameters(), *m.buffers())) for m in (block, other)]
    assert sizes[0] == sizes[1]
    weight = other.q_proj.fused.weight
    assert other.v_proj.weight.data_ptr() == weight[D + D_KV :].data_ptr()


def test_unfuse_is_the_way_back():
    block, other = fused()
    x = torch.randn(5, D)
    expected = other(x)
    assert unfuse(other) == 5 and unfuse(other) == 0
    assert all(type(getattr(other, name)) is nn.Linear for name in NAMES)
    assert [n for n, _ in other.named_parameters()] == [n for n, _ in block.named_parameters()]
    torch.testing.assert_close(other(x), expected)
    frozen = Block().requires_grad_(False).eval()
    fuse_projections(frozen)
    unfuse(frozen)
    assert not any(t.requires_grad for t in frozen.parameters()) and not frozen.k_proj.training


def test_the_pages_names_split_one_product():
    q, k, v = fuse_qkv(nn.Linear(D, D), nn.Linear(D, D_KV), nn.Linear(D, D_KV))
    x = torch.randn(2, 3, D)
    for whole, part in zip(q.fused(x), (q, k, v), strict=True):
        torch.testing.assert_close(whole, part(x))
        assert (part.in_features, part.out_features) == (D, whole.shape[-1]) == part.weight.shape[::-1]
    gate, up = fuse_gate_up(nn.Linear(D, F), nn.Linear(D, F))
    a, b = gate.fused(x)
    torch.testing.assert_close(nn.functional.silu(a) * b, nn.functional.silu(gate(x)) * up(x))


def test_gradcheck():
    q, k, v = fuse_qkv(*(nn.Linear(3, n).double() for n in (4, 2, 2)))
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x, *_: (q(x), k(x), v(x)), (x, q.fused.weight, q.fused.bias))


@pytest.mark.parametrize("write", ["data", "numpy", "in place", "inference"])
def test_each_call_sees_the_input_as_it_is_then(write):
    q, k, _ = fuse_qkv(*(nn.Linear(D, n) for n in (D, D_KV, D_KV)))
    with torch.inference_mode(write == "inference"), torch.no_grad():
        x = torch.randn(5, D)
        for rows, part in ((slice(0, D), q), (slice(D, D + D_KV), k)):
            expected = nn.functional.linear(x, q.fused.weight[rows], q.fused.bias[rows])
            torch.testing.assert_close(part(x), expected)
            if write == "numpy":
                x.numpy()[:] = 7
            else:
                (x.data if write == "data" else x).fill_(7)


def test_each_call_sees_the_weight_as_it_is_then():
    q, k, _ = fuse_qkv(*(nn.Linear(D, n) for n in (D, D_KV, D_KV)))
    x = torch.randn(5, D)
    q(x)
    q.fused.weight.data.mul_(3)
    torch.testing.assert_close(k(x), nn.functional.linear(x, k.weight, k.bias))
    with torch.no_grad():
        q(x)
    assert k(x).requires_grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    block, other = fused(dtype=torch.float64)
    x = torch.randn(5, D, dtype=torch.float64)
    expected = grads(block, x)
    wrapped = copy.deepcopy(other)
    forward = wrapped.forward
    wrapped.forward = lambda x: checkpoint(forward, x, use_reentrant=reentrant)
    x = x.requires_grad_()
    wrapped(x).square().sum().backward()
    torch.testing.assert_close(x.grad, expected[0])
    theirs = torch.cat([getattr(block, name).weight.grad for name in NAMES[:3]])
    torch.testing.assert_close(wrapped.q_proj.fused.weight.grad, theirs)


def test_copies_and_pickles_share_among_themselves():
    _, other = fused()
    for again in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert again.k_proj.fused is again.q_proj.fused is not other.q_proj.fused
        x = torch.randn(5, D)
        torch.testing.assert_close(again(x), other(x))


def test_moves_and_casts_reach_every_part():
    _, other = fused()
    other.to(torch.bfloat16)
    assert other.v_proj.weight.dtype == torch.bfloat16
    assert other(torch.randn(5, D, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("trainable", [False, True])
def test_one_projection_is_not_frozen_alone(trainable):
    _, other = fused(trainable=trainable)
    for name in NAMES:
        with pytest.raises(ValueError, match=r"of one projection.* before fusing, or after unfuse"):
            getattr(other, name).requires_grad_(not trainable)
        assert getattr(other, name).requires_grad_(trainable) is getattr(other, name)
        assert getattr(other, name).weight.requires_grad == trainable
    other.requires_grad_(False)  # all of them
    assert not any(getattr(other, name).weight.requires_grad for name in NAMES)
    other.requires_grad_(True)
    assert all(getattr(other, name).weight.requires_grad == trainable for name in NAMES)


@pytest.mark.parametrize("gone", [("q_proj",), ("k_proj",), ("q_proj", "v_proj")])
@pytest.mark.parametrize("how", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_projections_stay_whole_without_the_others(gone, how):
    """As an adapter takes the place of one: the others are still the model's."""
    block, other = fused()
    for name in gone:
        for model in (block, other):
            setattr(model, name, nn.Linear(D, D if name == "q_proj" else D_KV))
        getattr(other, name).load_state_dict(getattr(block, name).state_dict())
    other, x = how(other), torch.randn(5, D)
    for model in (block, other):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(x).square().sum().backward()
        optimizer.step()
    for (name, mine), theirs in zip(other.state_dict().items(), block.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)
    assert {t.dtype for t in other.double().state_dict().values()} == {torch.float64}
    unfuse(other)
    torch.testing.assert_close(other(x.double()), block.double()(x.double()))


def test_the_weight_is_written_in_place():
    _, other = fused()
    with torch.no_grad():
        other.k_proj.weight.zero_()
        other.k_proj.bias.fill_(2)
    assert torch.equal(other.k_proj(torch.randn(5, D)), torch.full((5, D_KV), 2.0))
    with pytest.raises(KeyError, match="weight"):
        other.k_proj.weight = nn.Parameter(torch.zeros(D_KV, D))


def test_compiled_whole():
    block, other = fused()
    x = torch.randn(5, D)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), block(x))
    compiled(x).sum().backward()
    block(x).sum().backward()
    theirs = torch.cat([block.gate_proj.weight.grad, block.up_proj.weight.grad])
    torch.testing.assert_close(other.gate_proj.fused.weight.grad, theirs)


def test_under_autocast_results_are_lower():
    block, other = fused()
    x = torch.randn(5, D)
    with torch.autocast("cpu", torch.bfloat16):
        assert other(x).dtype == torch.bfloat16
        torch.testing.assert_close(other(x), block(x))


class Odd(nn.Linear):
    pass


@pytest.mark.parametrize(
    "q, message",
    [
        (lambda: Odd(D, D), "only plain nn.Linear are fused, not Odd"),
        (lambda: nn.Linear(D + 1, D), "of 16 features but another of 17"),
        (lambda: nn.Linear(D, D, bias=False), "2 of 3 projections have a bias"),
        (lambda: nn.Linear(D, D).double(), "dtype is torch.float64 of one projection but torch.float32"),
        (lambda: nn.Linear(D, D).requires_grad_(False), "requires_grad is False of one"),
        (lambda: nn.Linear(D, D, device="meta"), "device is meta of one"),
    ],
)
def test_what_does_not_fit_is_refused_and_left_alone(q, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fuse_qkv(q(), nn.Linear(D, D_KV), nn.Linear(D, D_KV))
    block = Block()
    block.q_proj = q()
    before = block.k_proj
    assert fuse_projections(block) == 1 and block.k_proj is before


def test_hooks_and_shared_weights_are_left_alone():
    block = Block()
    block.q_proj.register_forward_hook(lambda *args: None)
    block.up_proj.weight = block.out.weight2 = nn.Parameter(torch.randn(F, D))
    assert fuse_projections(block) == 0
    twice = nn.ModuleList([Block(), Block()])
    twice[1].k_proj = twice[0].k_proj
    assert fuse_projections(twice) == 2, "the gates alone"


def test_other_names_can_be_given():
    block = Block()
    assert fuse_projections(block, groups=[("k_proj", "v_proj")]) == 1
    assert isinstance(block.k_proj.fused, FusedLinear) and type(block.q_proj) is nn.Linear


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral"])
def test_transformers_models_run_as_they_are(family, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    other = copy.deepcopy(model)
    assert fuse_projections(other) == 4
    ids = torch.randint(0, 97, (2, 9))
    losses = [m(ids, labels=ids).loss for m in (model, other)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    theirs = [getattr(model.model.layers[1].self_attn, name).weight.grad for name in NAMES[:3]]
    torch.testing.assert_close(other.model.layers[1].self_attn.q_proj.fused.weight.grad, torch.cat(theirs))
    generated = [m.eval().generate(ids, max_new_tokens=4, do_sample=False) for m in (model, other)]
    assert torch.equal(*generated)
    other.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(t, again[name]) for name, t in model.state_dict().items())


def test_data_parallel_is_refused():
    """It copies modules, which go on to share the weight of the first device."""
    q, _ = fuse_gate_up(nn.Linear(D, D), nn.Linear(D, D_KV))
    with pytest.raises(RuntimeError, match=r"not for nn.DataParallel"):
        q._replicate_for_data_parallel()(torch.randn(2, D))
