"""Merged adapters: the state of the layer, what is refused meanwhile, and whose weights they change."""

import copy
import io
import warnings

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from moe_aiter import LoRAExperts, LoRALinear, MoE, quantize

from .test_lora import KINDS, E, H, kinds, make_experts, make_linear, routed

MAKERS = {"linear": make_linear, "experts": make_experts}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def inputs_of(layer):
    return routed() if isinstance(layer, LoRAExperts) else (routed()[0],)


def cloned(state):
    return {name: t.clone() for name, t in state.items()}


def same(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(t, b[name]) and t.dtype == b[name].dtype for name, t in a.items()
    )


def by_pickle(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"itself": lambda layer: layer, "deepcopy": copy.deepcopy, "pickle": by_pickle}


@kinds
@makers
@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
def test_a_state_is_the_same_merged_or_not(make, kind, way):
    """It has the adapter once, in a layer that loads it and in a model around the layer."""
    layer = make(kind).eval()
    inputs, before = inputs_of(layer), cloned(layer.state_dict())
    want = layer(*inputs)
    layer.merge()
    layer = way(layer)
    for keep_vars in (False, True):
        assert same(layer.state_dict(keep_vars=keep_vars), before)
    around = nn.ModuleDict({"a": nn.Sequential(layer)}).state_dict(prefix="model.")
    assert same({name.removeprefix("model.a.0."): t for name, t in around.items()}, before)
    other = make(kind)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(*inputs), want)
    layer.unmerge()
    assert same(layer.state_dict(), before) and torch.equal(layer(*inputs), want)


@makers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_layer_changes_its_dtype_with_what_it_keeps(make, dtype):
    layer = make({})
    want = cloned(copy.deepcopy(layer).to(dtype).state_dict())
    layer.merge()
    layer.to(dtype)
    assert same(layer.state_dict(), want)
    layer.unmerge()
    assert same(layer.state_dict(), want)


@makers
def test_the_base_of_a_merged_layer_is_a_plain_layer(make):
    """It serves, is saved and is quantised alone."""
    layer = make({}).eval()
    inputs = inputs_of(layer)
    want, before = layer(*inputs), layer.state_dict()["base." + next(iter(layer.base.state_dict()))].clone()
    layer.merge()
    plain = copy.deepcopy(layer.base)
    torch.testing.assert_close(plain(*inputs), want)
    assert not torch.equal(next(iter(plain.state_dict().values())), before)
    plain.load_state_dict(layer.base.state_dict())
    assert len(quantize(nn.Sequential(layer.base), "int8").state_dict()) > 0
    again = type(layer)(layer.base, rank=1)  # which may be adapted anew, once the layer is gone
    del layer
    again.merge()
    again.unmerge()


@makers
def test_loading_into_a_merged_layer_is_refused(make):
    layer = make({}).eval()
    inputs, state, peft = inputs_of(layer), cloned(layer.state_dict()), layer.peft_state_dict()
    layer.merge()
    want, model = layer(*inputs), nn.Sequential(layer)
    other = {name: t + 1 for name, t in state.items()}
    calls = {
        "load_state_dict": lambda: layer.load_state_dict(other),
        "assign": lambda: layer.load_state_dict(other, assign=True),
        "of a model": lambda: model.load_state_dict({f"0.{name}": t for name, t in other.items()}),
        "some": lambda: layer.load_state_dict({next(iter(other)): next(iter(other.values()))}, strict=False),
        "peft": lambda: layer.load_peft_state_dict({name: t + 1 for name, t in peft.items()}),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=r"call unmerge\(\) first, and load then"):
            call()
        assert torch.equal(layer(*inputs), want) and same(layer.state_dict(), state), name
    model.load_state_dict({}, strict=False)  # of another part
    layer.unmerge()
    layer.load_state_dict(other)
    assert same(layer.state_dict(), other)


@makers
def test_training_a_merged_layer_warns(make):
    layer = make({})
    inputs = inputs_of(layer)
    layer.merge()
    with pytest.warns(UserWarning, match=r"training does not change it: call unmerge\(\) first"):
        want = layer(*inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            assert torch.equal(layer(*inputs), want)
        assert torch.equal(layer.eval()(*inputs), want)
        assert torch.equal(layer.train().requires_grad_(False)(*inputs), want)
    layer.base.requires_grad_(True)
    with pytest.warns(UserWarning, match="training does not change it"):
        layer(*inputs)
    layer.unmerge()
    layer.requires_grad_(True)(*inputs).sum().backward()
    assert all(p.grad is not None for name, p in layer.named_parameters() if "lora" in name)


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def pruned(base, name):
    torch.nn.utils.prune.l1_unstructured(base, name, amount=0.5)
    return base


def with_parametrization(base, name):
    parametrize.register_parametrization(base, name, Twice())
    return base


def new_linear():
    return nn.Linear(H, 10, dtype=torch.float64)


COMPUTED = {
    "parametrization": lambda: LoRALinear(with_parametrization(new_linear(), "weight"), rank=2),
    "weight_norm": lambda: LoRALinear(parametrizations.weight_norm(new_linear()), rank=2),
    "pruned": lambda: LoRALinear(pruned(new_linear(), "weight"), rank=2),
    "gate_up": lambda: LoRAExperts(with_parametrization(make_experts({}).base, "gate_up"), rank=2),
    "down": lambda: LoRAExperts(with_parametrization(make_experts({}).base, "down"), rank=2),
}


@pytest.mark.parametrize("make", COMPUTED.values(), ids=COMPUTED)
def test_a_weight_that_is_computed_is_not_merged_into(make):
    layer = make().eval()
    for name, p in layer.named_parameters():
        p.data.add_(0.3 if "lora" in name else 0)
    inputs = inputs_of(layer)
    want, state = layer(*inputs), cloned(layer.state_dict())
    with pytest.raises(ValueError, match=r"is no parameter of the .* itself"):
        layer.merge()
    assert torch.equal(layer(*inputs), want) and same(layer.state_dict(), state)


@makers
@pytest.mark.parametrize("tied", [False, True], ids=["one base", "one weight"])
@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
def test_a_weight_takes_one_adapter_at_a_time(make, tied, way):
    a = make({}).eval()
    base = copy.deepcopy(a.base) if tied else a.base
    for name, p in a.base.named_parameters():
        setattr(base, name, p)
    b = type(a)(base, rank=1).eval()
    for p in (*a.parameters(), *b.parameters()):
        p.data.add_(0.1)
    inputs, pair = inputs_of(a), nn.ModuleList([a, b])
    want, state = [layer(*inputs) for layer in pair], cloned(pair.state_dict())
    a.merge()
    pair = way(pair)
    with pytest.raises(
        ValueError, match="another layer has merged an adapter into this weight: unmerge that"
    ):
        pair[1].merge()
    with pytest.raises(ValueError, match=r"call unmerge\(\) first"):
        pair[1].load_state_dict(pair[1].state_dict())
    assert same(pair.state_dict(), state)
    torch.testing.assert_close(pair[0](*inputs), want[0])
    pair[0].unmerge()
    pair[1].merge()
    torch.testing.assert_close(pair[1](*inputs), want[1])
    pair[1].unmerge()
    assert all(torch.equal(layer(*inputs), y) for layer, y in zip(pair, want, strict=True))


def test_a_layer_pickled_merged_before_its_state_was_that_of_before():
    layer = make_linear(KINDS["alpha"])
    want = cloned(layer.state_dict())
    layer.merge()
    state = vars(layer) | {"original": layer.original[0]}  # as such a file has it
    other = LoRALinear.__new__(LoRALinear)
    other.__setstate__(copy.deepcopy(state))
    assert same(other.state_dict(), want)
    other.unmerge()
    assert same(other.base.state_dict(), {k[5:]: t for k, t in want.items() if k.startswith("base.")})


def test_a_merged_layer_compiles():
    for layer in (make_linear({}).eval(), make_experts({}).eval()):
        inputs = inputs_of(layer)
        layer.merge()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*inputs), layer(*inputs))


def test_in_a_moe():
    """A merged layer anywhere in a model leaves the model's state as it was."""

    def build():
        torch.manual_seed(0)
        moe = MoE(H, 4, E, 2, shared_intermediate=4)
        moe.experts, moe.shared.down = LoRAExperts(moe.experts, rank=2), LoRALinear(moe.shared.down, rank=2)
        for name, p in moe.named_parameters():
            p.data.add_(0.1 if "lora" in name else 0)
        return moe.eval()

    moe, other, x = build(), build(), torch.randn(5, H)
    want, state = moe(x), cloned(moe.state_dict())
    moe.experts.merge()
    moe.shared.down.merge()
    torch.testing.assert_close(moe(x), want)
    assert same(moe.state_dict(), state)
    other.load_state_dict(moe.state_dict())
    assert torch.equal(other(x), want)
