"""A whole transformer block around the layer: compiled in one graph, a training step as one CUDA graph."""

import copy

import pytest
import torch
import torch.nn.functional as F
from check import few
from torch import nn

from moe_aiter import Capacity, balance_step, use_main_grad
from moe_aiter.layers.moe import MoE

H, HEADS, WIDTH, E, K = 32, 4, 24, 6, 2
OPTIONS = {
    "default": {},
    "capacity": {"capacity": Capacity(0.8, "probability")},
    "losses": {
        "load_balance_coef": 0.1,
        "sequence_balance_coef": 0.1,
        "global_balance_coef": 0.1,
        "z_loss_coef": 0.01,
    },
    "selection bias": {"selection_bias": True, "score": "sigmoid"},
    "shared": {"shared_intermediate": 16, "shared_gate": True, "bias": True},
}


class Block(nn.Module):
    def __init__(self, device, **options):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(H, device=device) for _ in range(2))
        self.qkv = nn.Linear(H, 3 * H, bias=False, device=device)
        self.out = nn.Linear(H, H, bias=False, device=device)
        self.moe = MoE(H, WIDTH, E, K, device=device, **options)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.moe(self.norms[1](x), mask=mask)


def gradients(fn, block, x, mask):
    if block.moe.load is not None:
        block.moe.load.zero_()
    x = x.detach().requires_grad_()
    out = fn(x, mask)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])]


def check_compiled(device, backend, options, masked):
    torch.compiler.reset()
    block = Block(device, **OPTIONS[options])
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    x = torch.randn(2, 11, H, device=device)
    mask = torch.rand(2, 11, device=device) < 0.8 if masked else None
    want = gradients(block, block, x, mask)
    load = None if block.moe.load is None else block.moe.load.clone()
    got = gradients(compiled, block, x, mask)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
    assert load is None or torch.equal(block.moe.load, load)


EITHER = [(options, masked) for masked in (True, False) for options in OPTIONS]


@pytest.mark.parametrize("options, masked", few(EITHER, *EITHER[: len(OPTIONS) + 1], several=True))
def test_one_graph(device, options, masked):
    check_compiled(device, "aot_eager", options, masked)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS)
def test_one_graph_by_inductor(options):
    check_compiled("cuda", "inductor", options, False)


@pytest.mark.gpu
@pytest.mark.parametrize("main_grad", [False, True])
def test_a_training_step_as_one_cuda_graph(no_debug, main_grad):
    """Forward, backward, AdamW and the balance, replayed on other batches: the same as without a graph."""
    block = Block("cuda", selection_bias=True, score="sigmoid", load_balance_coef=0.01)
    eager = copy.deepcopy(block)
    batches = torch.randn(5, 4, 64, H, device="cuda")
    batches[3] = batches[3, :1, :1]  # all tokens alike
    x = batches[0].clone()
    loads = []

    def new_step(block):
        optimizer = torch.optim.AdamW(block.parameters(), 1e-2, capturable=True)
        if main_grad:
            use_main_grad(block, optimizer)

        def step():
            optimizer.zero_grad()
            loss = block(x).square().mean()
            loss.backward()
            loads.append(block.moe.load.clone())
            optimizer.step()
            balance_step(block)
            return loss

        return step

    captured, plain = new_step(block), new_step(eager)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            captured()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = captured()
    load = loads[-1]
    for _ in range(3):
        plain()
    seen = set()
    for batch in batches:
        x.copy_(batch)
        graph.replay()
        torch.testing.assert_close(loss, plain(), rtol=1e-4, atol=0)
        assert torch.equal(load, loads[-1])
        seen.add(tuple(load.tolist()))
    assert len(seen) == len(batches)
    for p, q in zip(block.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
