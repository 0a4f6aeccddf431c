"""What only a GPU can show of `offload`: no waiting host, no race of copies and kernels, little memory."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_aiter import LoRAExperts, MoE, offload, quantize
from moe_aiter.layers import offloaded

pytestmark = pytest.mark.gpu

H, WIDTH, E, K, T, LAYERS = 512, 256, 16, 4, 1024, 6
CYCLES = 5_000_000  # some milliseconds


class Model(nn.Module):
    def __init__(self, repeat=None):
        super().__init__()
        self.layers, self.repeat, self.lag = nn.ModuleList(), repeat, False

    def forward(self, x):
        for moe in self.layers:
            run = (
                moe
                if self.repeat is None
                else lambda x, moe=moe: checkpoint(moe, x, use_reentrant=self.repeat)
            )
            x = x + run(Lag.apply(x) if self.lag else x)
        return x


class Lag(torch.autograd.Function):
    """Keeps the layers' stream behind the host and the copies."""

    @staticmethod
    def forward(ctx, x):
        torch.cuda._sleep(CYCLES)
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        torch.cuda._sleep(CYCLES)
        return dx


def build(kind="bf16", repeat=None, device="cpu"):
    """A model with adapters on frozen weights."""
    torch.manual_seed(0)
    model = Model(repeat)
    for _ in range(LAYERS):
        moe = MoE(H, WIDTH, E, K, dtype=torch.bfloat16, device=device)
        model.layers.append(moe if kind == "bf16" else quantize(moe, kind))
        moe = model.layers[-1]
        moe.experts = LoRAExperts(moe.experts.requires_grad_(False), rank=8)
        nn.init.normal_(moe.experts.down_lora.B, std=0.1)
    return model


def step(model, x):
    x = x.detach().requires_grad_()
    out = model(x)
    trained = [p for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    out.float().square().mean().backward()  # reentrant checkpoints refuse torch.autograd.grad
    return [out.detach(), x.grad, *(p.grad for p in trained)]


def tokens():
    return torch.randn(T, H, device="cuda", dtype=torch.bfloat16)


def pair(**options):
    """The same model with offloaded experts, and on the GPU."""
    model = build(**options)
    other = copy.deepcopy(model).to("cuda")
    offload(model)
    return model.to("cuda"), other


@pytest.mark.parametrize("kind", ["bf16", "nf4"])
@pytest.mark.parametrize("repeat", [None, True, False], ids=["", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("lag", [False, True], ids=["", "lag"])
def test_copies_and_kernels_do_not_race(no_debug, kind, repeat, lag):
    model, other = pair(kind=kind, repeat=repeat)
    model.lag = lag
    for seed in range(3):
        torch.manual_seed(seed)
        x = tokens()
        for got, expected in zip(step(model, x), step(other, x), strict=True):
            assert torch.equal(got, expected)


def test_another_stream(no_debug):
    model, other = pair()
    x, side = tokens(), torch.cuda.Stream()
    expected = step(other, x)
    for _ in range(2):
        got = step(model, x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            again = step(model, x)
        torch.cuda.current_stream().wait_stream(side)
        assert all(
            torch.equal(a, e) and torch.equal(b, e) for a, b, e in zip(got, again, expected, strict=True)
        )


@pytest.mark.parametrize("kind", ["bf16", "nf4"])
@pytest.mark.parametrize("repeat", [None, False])
def test_the_host_never_waits(no_debug, kind, repeat):
    model, _ = pair(kind=kind, repeat=repeat)
    x = tokens()
    step(model, x)  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(model, x)
        with torch.no_grad():
            model(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def peak(model, x):
    """Bytes in use at most in a step, and before it."""
    step(model, x)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(model, x)
    return torch.cuda.max_memory_allocated(), before


@pytest.mark.parametrize("repeat", [None, False])
def test_memory(no_debug, repeat):
    """Of the weights two layers are on the GPU, whatever a forward pass saves."""
    x = tokens()
    model = build(repeat=repeat, device="cuda")
    weights = [t for moe in model.layers for t in moe.experts.base.parameters()]
    size = sum(t.nbytes for t in weights)
    resident, held = peak(model, x)
    offload(model)
    gc.collect()
    offloaded, rest = peak(model, x)
    saved = size - 2 * size // LAYERS
    assert held - rest >= 0.99 * saved and resident - offloaded >= 0.99 * saved
    assert all(t.is_pinned() and t.device.type == "cpu" for t in weights)


def test_a_weight_that_loads_is_copied_anew(no_debug):
    model, other = pair()
    x = tokens()
    for assign in (False, True):
        state = {name: torch.randn_like(t) * 0.05 for name, t in other.state_dict().items()}
        step(model, x)
        model.load_state_dict({n: t.cpu() if ".base." in n else t for n, t in state.items()}, assign=assign)
        other.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(step(model, x), step(other, x), strict=True))
    assert all(p.is_pinned() for moe in model.layers for p in moe.experts.base.parameters())


def test_ending_and_freeing(no_debug, monkeypatch):
    unlocked = []
    unlock = offloaded.unlock
    monkeypatch.setattr(offloaded, "unlock", lambda *where: unlocked.append(where[0]) or unlock(*where))
    model, other = pair()
    x, weights = tokens(), [p.data_ptr() for m in model.layers for p in m.experts.base.parameters()]
    step(model, x)
    del model
    gc.collect()
    assert sorted(unlocked) == sorted(weights)
    model = copy.deepcopy(other).cpu()
    end = offload(model)
    model.to("cuda")
    end()
    model.to("cuda")
    assert len(unlocked) == 2 * len(weights)
    assert all(torch.equal(a, b) for a, b in zip(step(model, x), step(other, x), strict=True))


def test_a_cuda_graph_is_refused(no_debug):
    model, _ = pair()
    x = tokens()
    with torch.no_grad():
        model(x)
        words = pytest.raises(RuntimeError, match=r"layers.0.experts is offloaded: a CUDA graph cannot")
        with words, torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(x)
