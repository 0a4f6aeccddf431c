"""What only a GPU can show of a monitor: no synchronisation until it is read, and CUDA graphs."""

import pytest
import torch
from layers.test_moe_on_gpu import no_synchronisation

from moe_aiter import Capacity, MoE, Monitor

pytestmark = pytest.mark.gpu

H, WIDTH, E, K, T = 256, 128, 16, 4, 512


def build(**options):
    return MoE(H, WIDTH, E, K, device="cuda", dtype=torch.bfloat16, **options)


def tokens():
    return torch.randn(T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("options", [{}, {"capacity": Capacity(0.8), "selection_bias": True}], ids=str)
def test_nothing_waits_until_it_is_read(no_debug, options):
    moe, x = build(**options), tokens()
    mask = torch.arange(T, device="cuda") > 9
    monitor = Monitor(moe)
    moe(x, mask=mask).sum().backward()  # compiles the kernels
    monitor.reset()
    with no_synchronisation():
        for _ in range(2):
            moe(x, mask=mask).sum().backward()
    assert monitor.read()["MoE"].tokens == 2 * (T - 10)
    with no_synchronisation(), pytest.raises(RuntimeError, match="synchroniz"):
        monitor.read()


def test_a_cuda_graph_counts_at_each_replay(no_debug):
    moe, x = build(capacity=Capacity(0.8)), tokens()
    monitor = Monitor(moe)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            moe(x).sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moe(x).sum().backward()
    for seed in (1, 2):
        monitor.reset()
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(tokens())
        graph.replay()
        replayed = monitor.read()["MoE"]
        monitor.reset()
        moe(x)
        eager = monitor.read()["MoE"]
        assert replayed.choices.tolist() == eager.choices.tolist() and replayed.tokens == T
        assert replayed.scalars() == pytest.approx(eager.scalars()) and replayed.drop_rate > 0


@pytest.mark.parametrize("moved", [False, True])
def test_cuda_graphs_of_torch_compile(no_debug, moved):
    """They are taken, which they would not be if what they write to could lie elsewhere next time."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    moe, x = build(), tokens()
    moe = moe.cpu() if moved else moe
    monitor = Monitor(moe)
    moe.cuda()
    moe(x)
    monitor.reset()
    compiled = torch.compile(moe, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            compiled(x)
    assert monitor.read()["MoE"].tokens == 5 * T
    assert counters["inductor"]["cudagraph_skips"] == 0
