"""`offload`: the same bits as without it, the right copies at the right time, and clear refusals."""

import contextlib
import copy
import io
import math
import pickle

import pytest
import torch
from check import Hidden
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_aiter import (
    Experts,
    LoRAExperts,
    MoE,
    OptimizedMoELayer,
    keep_fp8_weights,
    make_plan,
    offload,
    quantize,
)
from moe_aiter.config import interpret
from moe_aiter.derived import forget
from moe_aiter.layers.offloaded import KINDS, WeightPool, layers_to_offload
from moe_aiter.private_api import top_hooks

if interpret:
    pytest.skip("the interpreted kernels have tests of their own", allow_module_level=True)

H, E, K, LAYERS = 64, 4, 2, 5


class Model(nn.Module):
    """Some layers with a residual; each, or each pair, may be checkpointed."""

    def __init__(self, device, layers=LAYERS, dtype=torch.float32, **options):
        super().__init__()
        moes = (MoE(H, H, E, K, device=device, dtype=dtype, **options) for _ in range(layers))
        self.layers = nn.ModuleList(moes)
        self.order, self.repeat, self.together = list(range(layers)), None, 1

    def forward(self, x):
        for start in range(0, len(self.order), self.together):
            numbers = self.order[start : start + self.together]
            run = lambda x, numbers=numbers: self.run(x, numbers)  # noqa: E731
            x = run(x) if self.repeat is None else checkpoint(run, x, use_reentrant=self.repeat)
        return x

    def run(self, x, numbers):
        for number in numbers:
            x = x + self.layers[number](x)
        return x


def frozen(device, kind="lora", **options):
    """A model with frozen experts: with adapters, of 4 bits with adapters, alone, or of 8 bits."""
    torch.manual_seed(0)
    model = Model(device, **options)
    if kind == "nf4":
        model = quantize(model, "nf4")
    for moe in model.layers:
        moe.experts.requires_grad_(False)
        if kind in ("lora", "nf4"):
            moe.experts = LoRAExperts(moe.experts, rank=3)
            nn.init.normal_(moe.experts.down_lora.B, std=0.1)
    return quantize(model, "int8", skip=()) if kind == "int8" else model


def step(model, x):
    """The output, and the gradients of the input and of all that is trained."""
    x = x.detach().clone().requires_grad_()
    out = model(x)
    out.square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": x.grad, **gradients}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, t in expected.items():
        assert torch.equal(got[name], t), name


def tokens(device, T=12, dtype=torch.float32):
    return torch.randn(T, H, device=device, dtype=dtype)


def pool_of(model):
    experts = next(m for m in model.modules() if isinstance(m, KINDS))
    return experts.forward.args[1].__self__


def copies(monkeypatch):
    """The numbers of the layers whose weights are copied, in their order."""
    seen, fill = [], WeightPool.fill

    def watched(pool, layer):
        before = {slot: list(slot.states) for slot in pool.slots if slot.layer is layer}
        slot = fill(pool, layer)
        if before.get(slot) != slot.states:
            seen.append(layer.index)
        return slot

    monkeypatch.setattr(WeightPool, "fill", watched)
    return seen


def test_merged_weights_are_copied_again():
    model, x = frozen(torch.device("cpu"), layers=1), tokens("cpu")
    offload(model, "cpu")
    apart = model(x)
    model.layers[0].experts.merge()
    torch.testing.assert_close(model(x), apart)


@pytest.mark.parametrize("kind", ["lora", "nf4", "plain"])
@pytest.mark.parametrize("repeat", [None, True, False], ids=["", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("ahead", [1, 2, 9])
def test_training_is_the_same_to_the_bit(device, kind, repeat, ahead):
    model, x = frozen(device, kind), tokens(device)
    other = copy.deepcopy(model)
    model.repeat = other.repeat = repeat
    offload(model, device, ahead=ahead)
    for _ in range(2):  # two micro-batches, whose gradients add up
        assert_same(step(model, x), step(other, x))
        x = x + 1


def test_one_layer_and_no_tokens(device):
    model = frozen(device, "nf4", layers=1)
    other = copy.deepcopy(model)
    offload(model, device, ahead=3)
    assert len(pool_of(model).slots) == 1
    for T in (1, 0):
        x = tokens(device, T)
        assert_same(step(model, x), step(other, x))


def test_the_router_may_still_add_to_the_gradient_of_the_experts(device):
    """Else gradients would have other bits on a GPU."""
    moe, x = MoE(H, H, E, K, device=device), tokens(device).requires_grad_()
    moe.experts.requires_grad_(False)
    assert moe.is_private(x)
    offload(moe, device)
    assert moe.is_private(x)


@pytest.mark.parametrize("kind", ["lora", "nf4", "plain", "int8"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_is_the_same_to_the_bit(device, kind, mode):
    model, x = frozen(device, kind).eval(), tokens(device)
    with mode():
        expected = model(x)
        offload(model, device)
        assert torch.equal(model(x), expected) and torch.equal(model(x), expected)


def test_layers_of_any_kind_and_size(device):
    def build():
        torch.manual_seed(0)
        experts = [
            Experts(E, H, 32, bias=True, device=device),
            Experts(2, H, H, activation="relu2", device=device, dtype=torch.float64),
            Experts(E, H, 24, activation="swiglu_oai", interleaved=True, recompute="z", device=device),
        ]
        down = experts[0].down
        down.data = down.data.mT.contiguous().mT  # strides as in gpt-oss
        return nn.ModuleList(experts).requires_grad_(False)

    def run(experts):
        results = []
        for layer in experts:
            torch.manual_seed(1)
            ids = torch.randint(-1, 2, (7, K)).to(device)
            weights = torch.rand(7, K, device=device).requires_grad_()
            x = torch.randn(7, H, device=device, dtype=layer.down.dtype).requires_grad_()
            out = layer(x, weights, make_plan(ids, layer.num_experts))
            results += [out, *torch.autograd.grad(out.square().sum(), (x, weights))]
        return dict(enumerate(results))

    plain, other = build(), build()
    offload(plain, device)
    assert_same(run(plain), run(other))
    assert plain[0].down.stride() == other[0].down.stride()


def test_optimized_layer(device):
    layer = OptimizedMoELayer(H, E, 32, device=device, dtype=torch.float32).requires_grad_(False)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.1)
    x, ids = tokens(device).requires_grad_(), torch.arange(24, device=device).view(12, K) % E

    def gradient():
        out = layer(x, ids, torch.full((12, K), 0.5, device=device))
        return torch.autograd.grad(out.square().sum(), x)[0]

    expected = gradient()
    offload(layer, device)  # the model itself is the experts
    assert torch.equal(gradient(), expected)


def test_each_layer_is_copied_once_a_pass(device, monkeypatch):
    model, x = frozen(device), tokens(device)
    offload(model, device)
    seen = copies(monkeypatch)
    step(model, x)
    assert seen == [0, 1, 2, 3, 4, 2, 1, 0]  # backward starts with the two that forward used last
    seen.clear()
    step(model, x)
    assert seen == [2, 3, 4, 2, 1, 0]
    model.repeat = False
    seen.clear()
    step(model, x)
    assert seen == [2, 3, 4, 2, 1, 0]  # a repeated forward pass and its backward pass share a copy


def test_the_next_layers_are_copied_before_they_run(device, monkeypatch):
    model, after = frozen(device), []
    offload(model, device, ahead=2)
    seen = copies(monkeypatch)
    for moe in model.layers:
        moe.register_forward_hook(lambda *_: after.append(list(seen)))
    model(tokens(device))
    assert after[0] == [0, 1, 2] and after[1] == [0, 1, 2, 3] and after[4] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("order", [[3, 1, 0, 4, 2], [0, 1, 1, 2, 1, 4], [4, 3, 2, 1, 0], [2]], ids=str)
@pytest.mark.parametrize("repeat", [None, False])
def test_any_order(device, order, repeat):
    """Layers out of turn, twice in a step, or not at all."""
    model, x = frozen(device), tokens(device)
    other = copy.deepcopy(model)
    for m in (model, other):
        m.order, m.repeat = order, repeat
    offload(model, device)
    assert_same(step(model, x), step(other, x))


def test_checkpoints_of_several_layers(device):
    model, x = frozen(device), tokens(device)
    other = copy.deepcopy(model)
    for m in (model, other):
        m.repeat, m.together = False, 3
    offload(model, device)
    assert_same(step(model, x), step(other, x))


def test_forward_passes_between_forward_and_backward(device):
    """Pipelined micro-batches, and an evaluation in between: no saved weight may be that of another layer."""
    model = frozen(device)
    other, inputs = copy.deepcopy(model), [tokens(device), tokens(device)]
    offload(model, device)
    results = []
    for m in (model, other):
        outs = [m(x) for x in inputs]
        with torch.no_grad():
            m(inputs[0])
        for out in reversed(outs):
            out.square().mean().backward(retain_graph=True)
        outs[0].sum().backward()
        results.append({name: p.grad for name, p in m.named_parameters() if p.grad is not None})
    assert_same(*results)


def test_autograd_keeps_no_weight(device):
    """Each node asks the pool for its weights: the walk from the output to the input fetches every layer."""
    model = frozen(device, "plain")
    offload(model, device)
    pool = pool_of(model)
    buffers = {slot.data.untyped_storage().data_ptr() for slot in pool.slots}
    nodes, found = [model(tokens(device).requires_grad_()).grad_fn], 0
    for node in nodes:
        saved = [t for t in getattr(node, "saved_tensors", ()) if t is not None]
        found += sum(t.untyped_storage().data_ptr() in buffers for t in saved)
        nodes += [n for n, _ in node.next_functions if n is not None and n not in nodes]
    assert found >= 2 * LAYERS and 0 in {slot.layer.index for slot in pool.slots}


def test_outer_hooks_see_all_but_the_weights(device):
    model, x, seen = frozen(device), tokens(device), []
    offload(model, device)

    def pack(t):
        seen.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x.requires_grad_()).sum().backward()
    pointers = {slot.data.untyped_storage().data_ptr() for slot in pool_of(model).slots}
    found = {t.untyped_storage().data_ptr() for t in seen}
    assert not pointers & found and any(t.shape == (12 * K, H) for t in seen)


def test_a_change_in_place_is_an_error(device):
    """torch itself checks no version of a tensor with hooks."""
    model = MoE(H, H, E, K, device=device)
    model.experts.requires_grad_(False)
    model.experts = LoRAExperts(model.experts, rank=2)
    offload(model, device)
    x = tokens(device)
    out = model(x)
    x += 1
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*Tensor \[12, 64\]"):
        out.sum().backward()


def test_the_state_dict_keeps_its_names_and_loads(device):
    model, other = frozen(device), frozen(device)
    for p in other.parameters():
        nn.init.normal_(p, std=0.2)
    names, x = list(model.state_dict()), tokens(device)
    offload(model, device)
    step(model, x)  # the buffers hold the old weights
    assert list(model.state_dict()) == names
    out = model(x.requires_grad_())
    model.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match="have changed since the forward pass"):
        out.sum().backward()
    assert_same({"out": model(x)}, {"out": other(x)})
    for p in other.parameters():
        nn.init.normal_(p, std=0.2)
    model.load_state_dict({name: t.clone() for name, t in other.state_dict().items()}, assign=True)
    model.zero_grad()
    assert_same(step(model, x), step(other, x))
    back = frozen(device)
    back.load_state_dict(model.state_dict())
    assert_same({"out": back(x)}, {"out": other(x)})


def twice_and_forget(model):
    for p in model.parameters():
        p.data.mul_(2)
    forget()


@pytest.mark.parametrize("write", [twice_and_forget, lambda m: Hidden(m.parameters()).step()])
def test_a_write_without_a_trace(write, device, monkeypatch):
    model, x = frozen(device, "plain", layers=2), tokens(device)
    other = copy.deepcopy(model)
    offload(model, device)
    for _ in range(2):
        assert_same(step(model, x), step(other, x))
        write(model), write(other)
    y = x.clone().requires_grad_()
    outs = [m(y).sum() for m in (model, other)]
    write(model), write(other)  # autograd sees it neither here nor there
    got, want = (torch.autograd.grad(out, y)[0] for out in outs)
    assert torch.equal(got, want)
    step(model, x)
    seen = copies(monkeypatch)
    router = model.layers[0].router
    torch.optim.SGD(router.parameters(), 0.1).step()
    step(model, x)
    assert seen == []


OTHER_WEIGHTS = {
    "bfloat16": lambda t: t.bfloat16(),
    "float64": lambda t: t.double(),
    "columns first": lambda t: t.mT.contiguous().mT,
    "in a larger block": lambda t: torch.cat([t, t])[len(t) :],
}


@pytest.mark.parametrize("by", ["load_state_dict", "hand"])
@pytest.mark.parametrize("layers", [[0, 1, 2], [1]], ids=["all", "one"])
@pytest.mark.parametrize("change", OTHER_WEIGHTS.values(), ids=OTHER_WEIGHTS)
def test_other_weights_have_other_places(change, layers, by, device):
    """Weights of another dtype or layout: the same bits as without `offload`, in buffers of their size."""
    model, x = frozen(device, "plain", layers=3), tokens(device)
    other = copy.deepcopy(model)
    offload(model, device)
    y = x.clone().requires_grad_()
    before = model(y)  # the buffers hold the old weights
    for m in (model, other):
        for number in layers:
            moe = m.layers[number]
            weights = {name: change(t.clone()) for name, t in moe.state_dict().items() if t.dim() > 1}
            moe.router.to(next(iter(weights.values())).dtype)
            if by == "hand":
                experts = {k.removeprefix("experts."): t for k, t in weights.items() if "experts." in k}
                for name, t in experts.items():
                    setattr(moe.experts, name, nn.Parameter(t, requires_grad=False))
            else:
                moe.load_state_dict(weights, assign=True, strict=False)
    with pytest.raises(RuntimeError, match="have changed since the forward pass"):
        before.sum().backward()
    model.zero_grad()
    for moe, expected in zip(model.layers, other.layers, strict=True):
        z = x.to(moe.experts.down.dtype)
        assert_same(step(moe, z), step(expected, z))
    pool = pool_of(model)
    assert {slot.data.nbytes for slot in pool.slots} == {max(layer.size for layer in pool.layers)}


def test_weights_of_another_shape(device):
    model, x = frozen(device, "plain", layers=2), tokens(device)
    other = frozen(device, "plain", layers=2)
    offload(model, device)
    model(x)
    for m in (model, other):
        experts = m.layers[1].experts
        for name, size in {"gate_up": (E, 6 * H, H), "down": (E, H, 3 * H)}.items():
            numbers = torch.linspace(-0.1, 0.1, math.prod(size), device=device)
            setattr(experts, name, nn.Parameter(numbers.view(size), requires_grad=False))
    assert_same(step(model, x), step(other, x))


def test_a_subclass_that_loads_is_refused(device):
    class Wrapped(torch.Tensor):
        pass

    model = frozen(device, "plain", layers=1)
    offload(model, device)
    experts = model.layers[0].experts
    weights = {name: t.as_subclass(Wrapped) for name, t in experts.state_dict().items()}
    with pytest.raises(ValueError, match=r"of layers.0.experts is Wrapped, but must be a whole weight"):
        for name, t in weights.items():
            experts._parameters[name] = t
        model(tokens(device))


def test_a_weight_in_the_memory_of_an_earlier_one(device):
    """Address and version are those of the weight that was copied."""
    model, x = frozen(device, "plain", layers=2), tokens(device)
    other = frozen(device, "plain", layers=2)
    offload(model, device)
    for number in range(12):
        w = torch.randn(E, H, H, device=device)
        for moe in [*model.layers, *other.layers]:
            moe.experts.down = nn.Parameter(w.clone(), requires_grad=False)
        if number % 2:
            assert_same({"out": model(x)}, {"out": other(x)})


def test_buffers_that_inference_mode_made(device):
    """They have versions, by which `keep_fp8_weights` goes."""
    torch.manual_seed(0)
    model = Model(device, fp8="e4m3").requires_grad_(False)
    other, x = copy.deepcopy(model), tokens(device)
    with torch.inference_mode():
        offload(model, device)
    with keep_fp8_weights():
        assert_same(step(model, x), step(other, x))


def test_moving_and_ending(device):
    model = frozen(device, "nf4").to("cpu")
    other, x = copy.deepcopy(model).to(device), tokens(device)
    end = offload(model, device)
    weights = dict(model.layers[1].experts.base.named_buffers())
    pointers = {name: t.data_ptr() for name, t in weights.items()}
    model.to(device).double().float()
    moved = dict(model.layers[1].experts.base.named_buffers())
    assert {name: t.data_ptr() for name, t in moved.items()} == pointers
    assert all(t.device.type == "cpu" for t in moved.values())
    assert all(p.device.type == device.type for p in model.parameters())
    assert_same(step(model, x), step(other, x))
    end()
    end()  # changes nothing
    again = copy.deepcopy(model).to(device)
    again.zero_grad(), other.zero_grad()
    assert all(t.device.type == device.type for t in again.state_dict().values())
    assert_same(step(again, x), step(other, x))
    offload(again, device)  # again


def test_what_is_derived_of_a_weight_is_not_that_of_another_layer(device):
    """`keep_fp8_weights` goes by the version of a buffer, which inference mode alone would not change."""
    torch.manual_seed(0)
    model = Model(device, fp8="e4m3").requires_grad_(False)
    other, x = copy.deepcopy(model), tokens(device)
    offload(model, device)
    with keep_fp8_weights():
        assert_same(step(model, x), step(other, x))
        with torch.inference_mode():
            model(x)
        model.order = other.order = [LAYERS - 1]  # still in its buffer
        assert_same(step(model, x), step(other, x))


def test_a_compiled_graph_ends_before_the_experts(device):
    model, x = frozen(device, "plain"), tokens(device)
    expected = model(x)
    offload(model, device)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="experts are offloaded to host memory"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(x), expected)


def test_refusals(device):
    moe = MoE(H, H, E, K, device=device)
    refusals = {
        r"gate_up of experts requires a gradient, .* call requires_grad_\(False\)": moe,
        "Linear has no experts": nn.Linear(2, 2),
        "on the meta device": MoE(H, H, E, K, device="meta").requires_grad_(False),
    }
    shared = nn.ModuleList(Experts(E, H, H, device=device).requires_grad_(False) for _ in range(2))
    shared[1].down = shared[0].down
    refusals["down of 0 belongs to other modules too"] = shared
    ranks = Experts(E, H, H, device=device).requires_grad_(False)
    ranks.dispatcher = lambda *_: None
    refusals["ranks share the experts of the model"] = ranks
    for words, model in refusals.items():
        with pytest.raises(ValueError, match=words):
            offload(model, device)
        assert "forward" not in {key for m in model.modules() for key in vars(m)}
    model = frozen(device)
    for ahead in (0, -1):
        with pytest.raises(ValueError, match="ahead must be at least 1"):
            offload(model, device, ahead=ahead)
    with pytest.raises(ValueError, match="device must be a CPU or a GPU that torch can use, not meta"):
        offload(model, "meta")
    offload(model, device)
    with pytest.raises(ValueError, match=r"layers.0.experts is offloaded already"):
        offload(model, device)
    for copies in (copy.deepcopy, pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(
            TypeError, match="cannot be copied or pickled: copy it first, or save its state_dict"
        ):
            copies(model)
    experts = model.layers[0].experts.base
    experts.gate_up.requires_grad_(True)
    with pytest.raises(ValueError, match="only frozen weights can be offloaded"):
        model(tokens(device))
    experts.gate_up.requires_grad_(False)
    nn.utils.parametrizations.weight_norm(experts, "gate_up")
    with pytest.raises(
        RuntimeError, match=r"gate_up of layers.0.experts is offloaded, but something has repl"
    ):
        model(tokens(device))


def test_an_error_in_a_layer_leaves_its_weights_in_place(device):
    model = frozen(device)
    offload(model, device)
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(TypeError, match="plan must be"):
        model.layers[0].experts(tokens(device)[:, :3], None, None)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert top_hooks(True) is None and step(model, tokens(device))


def test_places_do_not_overlap():
    model = frozen(torch.device("cpu"), "nf4")
    (layer, *_) = layers_to_offload(model)
    data = torch.zeros(layer.size, dtype=torch.uint8)
    for place in layer.places:
        view = place.view(data)
        assert view.data_ptr() % 16 == data.data_ptr() % 16 and not view.view(torch.uint8).any()
        view.view(torch.uint8).fill_(1)
    assert data.sum() == sum(t.nbytes for t in layer.weights())
    state = layer.module.base.state_dict()
    assert {t.data_ptr() for t in layer.weights()} == {t.data_ptr() for t in state.values()}  # no adapters


class FakeStream:
    """Writes down what it is asked to wait for, and takes an event for its position."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append((self.name, "waits for", other.name))

    def wait_event(self, event):
        self.log.append((self.name, "waits for copy", event.number))


class FakeEvent:
    def __init__(self, log):
        self.log, self.number = log, None

    def record(self):
        self.number = sum(what == "copies" for _, what, *_ in self.log)
        self.log.append(("side", "copies", self.number))


def test_who_waits_for_whom(monkeypatch):
    """Without a GPU: a layer waits for its copy, and a copy for the streams that have used the buffer."""
    log, model = [], frozen(torch.device("cpu"), "plain", layers=3)
    offload(model, "cpu")
    pool, layers = pool_of(model), FakeStream("layers", log)
    pool.stream = FakeStream("side", log)
    for slot in pool.slots:
        slot.ready = FakeEvent(log)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: layers)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    with torch.no_grad():
        model(tokens("cpu"))
    copy_of = lambda number: ("side", "copies", number)  # noqa: E731
    waits = lambda number: ("layers", "waits for copy", number)  # noqa: E731
    assert log == [
        copy_of(0), waits(0), copy_of(1),  # layer 0, and ahead layer 1
        waits(1), ("side", "waits for", "layers"), copy_of(2),  # layer 2 into the buffer of layer 0
        waits(2),
    ]  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"layers.0.experts is offloaded: a CUDA graph cannot contain it"):
        model(tokens("cpu"))
