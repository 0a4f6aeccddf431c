"""`aux_loss`: the losses as a tensor of the graph, whose gradients are those of attached losses."""

import copy
import gc
import io
import warnings
import weakref

import pytest
import torch
from check import few
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_aiter import Capacity, MoE, aux_loss, set_aux_loss, set_loss_scale

H, E, K = 16, 8, 2
COEFS = {"load_balance_coef": 0.3, "sequence_balance_coef": 0.2, "z_loss_coef": 0.1}


class Block(nn.Module):
    """A layer that runs twice, with or without activation checkpointing, and one that runs once."""

    def __init__(self, **options):
        super().__init__()
        self.first, self.last = (MoE(H, 8, E, K, **COEFS | options) for _ in range(2))
        self.repeats = False

    def forward(self, x):
        for layer in (self.first, self.last, self.first):
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.repeats else layer(x))
        return x


def models(device="cpu", **options):
    """A model that returns its losses, and a copy that attaches them."""
    torch.manual_seed(0)
    attached = Block(**options).to(device)
    returned = copy.deepcopy(attached)
    set_aux_loss(returned, "return")
    return returned, attached


def batch(device="cpu", *shape):
    return torch.randn(*(shape or (2, 7)), H, device=device)


def assert_same_gradients(one, two):
    for (name, p), other in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(p.grad, other[1].grad), name
    assert one.first.router.weight.grad.any()


@pytest.mark.parametrize("options", [{}, {"capacity": Capacity(1.0, "position")}, {"shared_intermediate": 8}])
@pytest.mark.parametrize("repeats", [False, True])
def test_the_gradients_are_those_of_attached_losses(device, options, repeats):
    returned, attached = models(device, **options)
    returned.repeats = attached.repeats = repeats
    for _ in range(2):
        x = batch(device)
        (returned(x).square().mean() + aux_loss(returned)).backward()
        attached(x).square().mean().backward()
    assert_same_gradients(returned, attached)


def test_micro_batches_need_no_factor(device):
    """n losses over n give the gradients of their mean, where an attached loss needs `set_loss_scale`."""
    returned, attached = models(device)
    micro_batches = batch(device, 8, 2, 7)
    for x in micro_batches:
        ((returned(x).square().mean() + aux_loss(returned)) / 8).backward()
    set_loss_scale(attached, 1 / 8)
    for x in micro_batches:
        (attached(x).square().mean() / 8).backward()
    assert_same_gradients(returned, attached)


def test_a_grad_scaler_needs_no_factor(device):
    returned, attached = models(device)
    optimizer = torch.optim.SGD(returned.parameters())
    scaler, x = torch.amp.GradScaler(device.type, init_scale=2.0**13), batch(device)
    scaler.scale(returned(x).square().mean() + aux_loss(returned)).backward()
    scaler.unscale_(optimizer)
    attached(x).square().mean().backward()
    for p, other in zip(returned.parameters(), attached.parameters(), strict=True):
        torch.testing.assert_close(p.grad, other.grad, rtol=1e-5, atol=1e-7)


def test_the_value(device):
    """Of every run of every layer in one pass; the same however often it is asked for."""
    returned, attached = models(device)
    x = batch(device)
    returned(x)
    value = aux_loss(returned)
    assert value.shape == () and value.dtype == torch.float32 and value.requires_grad
    assert aux_loss(returned) == value and aux_loss(returned).requires_grad
    parts = aux_loss(returned.first) + aux_loss(returned.last)
    torch.testing.assert_close(parts, value)
    one, other = returned.first, attached.first
    one(x)
    other(x)
    number = aux_loss(other)
    assert not number.requires_grad and number == aux_loss(one) > 0


def test_nothing_counts_twice(device):
    """The number of attached losses adds no gradient, also beside layers that return theirs."""
    returned, attached = models(device)
    set_aux_loss(returned.first, "attach")
    x = batch(device)
    for model in (returned, attached):
        out = model(x)
        (out.square().mean() + aux_loss(model)).backward()
    assert_same_gradients(returned, attached)
    set_aux_loss(returned, "attach")
    assert not any(module._forward_pre_hooks for module in returned.modules())


def test_evaluation_between(device):
    """Passes without gradients or in evaluation mode return 0 and take nothing away."""
    returned, attached = models(device)
    x = batch(device)
    out = returned(x)
    with torch.no_grad():
        returned(batch(device))
    returned.eval()
    returned(batch(device))
    assert aux_loss(returned) == 0 and not aux_loss(returned).requires_grad
    returned.train()
    (out.square().mean() + aux_loss(returned)).backward()
    attached(x).square().mean().backward()
    assert_same_gradients(returned, attached)
    fresh = models(device)[0]
    with torch.no_grad():
        fresh(x)
    assert aux_loss(fresh) == 0


def test_losses_that_nothing_reads_are_freed(device):
    returned, _ = models(device)
    layers, graphs = [returned.first, returned.last], []
    with pytest.warns(UserWarning, match=r"not followed by aux_loss\(model\)"):
        for _ in range(3):
            returned(batch(device))
            graphs += [weakref.ref(loss) for layer in layers for loss in layer.aux_losses.new]
    gc.collect()
    assert [graph() is not None for graph in graphs] == [False] * 6 + [True] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            aux_loss(returned)
            returned(batch(device))


def test_parts_of_the_model(device):
    """A loop that calls the layers by themselves reads after each step, and what was read does not return."""
    returned, attached = models(device)
    for _ in range(2):
        x = batch(device)
        (returned.first(x).square().mean() + aux_loss(returned)).backward()
        attached.first(x).square().mean().backward()
    for p, other in zip(returned.first.parameters(), attached.first.parameters(), strict=True):
        assert torch.equal(p.grad, other.grad)


BOTH = [(True, False), (True, True), (False, False), (False, True)]


@pytest.mark.parametrize("whole, repeats", few(BOTH, (True, True), (False, False), several=True))
def test_compiled(device, whole, repeats):
    """The model with checkpoints inside, or each layer inside of one; a second step compiles nothing anew."""
    torch.compiler.reset()
    returned, attached = models(device)
    returned.repeats = attached.repeats = repeats
    call, how = returned, {"fullgraph": True, "backend": "aot_eager"}
    if whole:
        call = torch.compile(returned, **how)
    else:
        for layer in (returned.first, returned.last):
            layer.compile(**how)
    allowed = {"skip_fwd_side_effects_in_bwd_under_checkpoint": whole and repeats}
    for step in range(3):
        x = batch(device)
        with torch._dynamo.config.patch(error_on_recompile=step > 0, **allowed):
            (call(x).square().mean() + aux_loss(returned)).backward()
        attached(x).square().mean().backward()
    for (name, p), other in zip(returned.named_parameters(), attached.parameters(), strict=True):
        torch.testing.assert_close(p.grad, other.grad, msg=name)


def test_a_compiled_step(device):
    """The model, its losses and their sum in one graph."""
    torch.compiler.reset()
    returned, attached = models(device)
    step = torch.compile(
        lambda x: returned(x).square().mean() + aux_loss(returned), fullgraph=True, backend="aot_eager"
    )
    for _ in range(2):
        x = batch(device)
        step(x).backward()
        attached(x).square().mean().backward()
    for (name, p), other in zip(returned.named_parameters(), attached.parameters(), strict=True):
        torch.testing.assert_close(p.grad, other.grad, msg=name)


def test_reentrant_checkpoints_raise(device):
    """In the first run, not only in the one that nothing may wait for."""
    layer = MoE(H, 8, E, K, **COEFS, device=device)
    x = batch(device).requires_grad_()
    checkpoint(layer, x, use_reentrant=True).sum().backward()  # attached losses are right there
    set_aux_loss(layer, "return")
    with pytest.raises(RuntimeError, match="pass use_reentrant=False, or call set_aux_loss"):
        checkpoint(layer, x, use_reentrant=True)
    layer.eval()
    checkpoint(layer, x, use_reentrant=True)


class Repeated(torch.autograd.Function):
    """Checkpointing of another package."""

    @staticmethod
    def forward(ctx, layer, x):
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, dout):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.layer(x)
        torch.autograd.backward(out, dout)
        return None, x.grad


def test_checkpoints_of_other_packages_raise(device):
    layer = MoE(H, 8, E, K, **COEFS, device=device)
    set_aux_loss(layer, "return")
    out = Repeated.apply(layer, batch(device).requires_grad_())
    with pytest.raises(RuntimeError, match="reentrant activation checkpointing"):
        out.sum().backward()


def test_copies_hold_no_loss(device):
    """A model in the middle of a step can be copied, stored and moved."""
    returned, _ = models(device)
    x = batch(device)
    returned(x)
    file = io.BytesIO()
    torch.save(returned, file)
    file.seek(0)
    stored = torch.load(file, weights_only=False)
    for copied in (copy.deepcopy(returned), stored):
        assert aux_loss(copied) == 0
        for _ in range(2):  # the copy's hook is for its own layers
            copied(x)
            value = aux_loss(copied)
        torch.testing.assert_close(value, aux_loss(returned))
    assert aux_loss(returned) > 0 and not any("aux" in key for key in returned.state_dict())
    returned.double()(x.double())
    assert aux_loss(returned).dtype == torch.float64


def test_without_coefficients_there_is_none(device):
    model = MoE(H, 8, E, K, device=device)
    for how in ("attach", "return"):
        set_aux_loss(model, how)
        model(batch(device))
        loss = aux_loss(model)
        assert loss == 0 and loss.device.type == device.type and not loss.requires_grad


def test_float16_autocast_warns_once(device):
    layer = MoE(H, 8, E, K, **COEFS, device=device)
    with torch.autocast(device.type, torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(batch(device))
    with torch.autocast(device.type, torch.float16), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer(batch(device))
        layer(batch(device))
        scaled = MoE(H, 8, E, K, **COEFS, device=device)
        set_loss_scale(scaled, 1024)
        scaled(batch(device))
        set_aux_loss(layer, "return")
        layer(batch(device))
    (warning,) = [w for w in caught if "auxiliary" in str(w.message)]
    assert "float16 autocast" in str(warning.message) and warning.filename == __file__


def test_accelerates_accumulation_warns():
    state = pytest.importorskip("accelerate.state")
    from accelerate.utils import GradientAccumulationPlugin

    layer = MoE(H, 8, E, K, **COEFS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(batch())
    state.GradientState(GradientAccumulationPlugin(num_steps=8))
    try:
        with pytest.warns(UserWarning, match="gradient_accumulation_steps=8, but the auxiliary losses"):
            layer(batch())
    finally:
        state.GradientState._reset_state()


@pytest.mark.gpu
def test_a_captured_step(no_debug):
    """The returned loss lives in the memory of the graph, where each replay writes a new one."""
    returned, attached = models("cuda")
    x = batch("cuda")

    def step():
        returned.zero_grad()
        (returned(x).square().mean() + aux_loss(returned)).backward()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    x.copy_(batch("cuda"))
    graph.replay()
    attached(x).square().mean().backward()
    assert_same_gradients(returned, attached)


def test_errors():
    model = MoE(H, 8, E, K, **COEFS)
    with pytest.raises(ValueError, match="how must be 'attach' or 'return', not 'both'"):
        set_aux_loss(model, "both")
    with pytest.raises(RuntimeError, match="has left an auxiliary loss: run the model first"):
        aux_loss(model)
    for call in (aux_loss, lambda m: set_aux_loss(m, "return"), lambda m: set_loss_scale(m, 1.0)):
        with pytest.raises(ValueError, match="the model has no MoE"):
            call(nn.Linear(2, 2))
    set_aux_loss(model, "return")
    with pytest.raises(ValueError, match="scale the training loss that aux_loss"):
        set_loss_scale(model, 0.5)
    with pytest.raises(NotImplementedError, match="an exported program returns no losses"):
        torch.export.export(model, (batch(),), strict=False)


@pytest.mark.filterwarnings("ignore:a forward pass in training mode was not followed")
def test_a_model_in_evaluation_mode_whose_layers_train(device):
    """The losses are those of the last pass, whatever mode the model itself is in."""
    returned, _ = models(device)
    x = batch(device)
    returned(x)
    want = aux_loss(returned)
    returned.training = False
    for _ in range(3):
        returned(x)
    assert torch.equal(aux_loss(returned), want)
