"""Inside `keep_fp8_weights` quantised weights are kept, with the same results to the bit."""

import contextlib
import functools
import threading

import pytest
import torch
from torch.optim import optimizer
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moe_aiter import MoE, keep_fp8_weights
from moe_aiter.kernels.experts import fp8, keep_fp8

E, H, WIDTH, K, T = 6, 256, 64, 2, 24  # which fit Hopper's kernels
pytestmark = pytest.mark.no_interpreter
QUANTISE = "quantize_rows", "quantize_rows_and_amax", "quantize_by_amax"
QUANTISE += "quantize_transposed", "transpose_rows8", "quantize_blocks"


@pytest.fixture
def count(monkeypatch):
    """How often weights were quantised: a list of the names of what was called for (E, A, B)."""
    calls = []

    def watched(quantize, x, *rest):
        if x.dim() == 3:
            calls.append(quantize.__name__)
        return quantize(x, *rest)

    for name in QUANTISE:
        monkeypatch.setattr(fp8, name, functools.partial(watched, getattr(fp8, name)))
    return calls


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert not keep_fp8.OPEN


def build(device="cpu", **how):
    torch.manual_seed(0)
    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    return MoE(H, WIDTH, E, K, **{"fp8": "e4m3", **how}, device=device, dtype=dtype)


def batches(moe, count=3):
    torch.manual_seed(1)
    return torch.randn(count, T, H).to(moe.router.weight).requires_grad_().unbind()


def gradients(moe, run=None, count=3):
    """Of `count` micro-batches, added up in memory of their own: a graph of the compiler reuses its."""
    for p in moe.parameters():
        p.grad = torch.zeros_like(p)
    for x in batches(moe, count):
        torch.compiler.cudagraph_mark_step_begin()  # what a graph returned before may be written over
        (moe if run is None else run)(x).float().square().mean().backward()
    return [p.grad.clone() for p in moe.parameters()]


def same(got, want):
    return all(map(torch.equal, got, want))


def plainly(moe, x):
    return moe(x)


def checkpointed(moe, x, **how):
    return checkpoint(moe, x, **{"use_reentrant": False, **how})


def selectively(moe, x):
    policy = lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE  # noqa: E731
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpointed(moe, x, context_fn=contexts)


RUNS = {
    "plain": plainly,
    "checkpoint": checkpointed,
    "reentrant": functools.partial(checkpointed, use_reentrant=True),
    "selective": selectively,
}


CASES = [("plain", {}), ("plain", {"recompute": "z"}), ("checkpoint", {"bias": True}), ("reentrant", {}),
         ("selective", {"recompute": "z"}), ("checkpoint", {"fp8": "e4m3_all", "recompute": "z"}),
         ("reentrant", {"fp8": "e4m3_all"}), ("selective", {"fp8": "e4m3_all"}), ("plain", {"fp8": "block"}),
         ("checkpoint", {"fp8": "block", "recompute": "z"})]  # fmt: skip


FORWARD, BOTH = {"backward": False}, {"backward": True}


@pytest.mark.parametrize("kept", [FORWARD, BOTH], ids=["forward's order", "both orders"])
@pytest.mark.parametrize("run, how", CASES, ids=str)
def test_once_and_the_same_bits(run, how, kept, device, count):
    moe = build(device, **how)
    run = functools.partial(RUNS[run], moe)
    want = gradients(moe, run)
    without = len(count)
    count.clear()
    with keep_fp8_weights(**kept):
        assert same(gradients(moe, run), want)
    quantised = len(count)
    # both weights for forward; for backward once, or in each of three micro-batches
    assert quantised == (4 if kept == BOTH else 8) and without >= 12
    assert same(gradients(moe, run), want) and len(count) == quantised + without  # afterwards as before


def test_columns_side_by_side(device, count):
    """Weights whose columns' magnitudes nobody sees by the way."""
    moe = build(device)
    for name in ("gate_up", "down"):
        weight = getattr(moe.experts, name).detach()
        setattr(moe.experts, name, torch.nn.Parameter(weight.mT.contiguous().mT))
    want = gradients(moe)
    count.clear()
    with keep_fp8_weights(backward=True):
        assert same(gradients(moe), want)
    assert sorted(count) == ["quantize_rows"] * 3 + ["transpose_rows8"]


def test_steps_between(device, count):
    """A weight that changes is quantised again, whether the step is inside or outside of a block."""

    def train(around_step, around_all):
        moe = build(device)
        sgd = torch.optim.SGD(moe.parameters(), 0.5)
        with around_all():
            for _ in range(2):
                with around_step():
                    for x in batches(moe):
                        moe(x).float().square().sum().backward()
                sgd.step()
                sgd.zero_grad()
        return [p.detach() for p in moe.parameters()]

    nothing = contextlib.nullcontext
    want = train(nothing, nothing)
    assert not same(want, [p.detach() for p in build(device).parameters()])
    for around in ((keep_fp8_weights, nothing), (nothing, keep_fp8_weights), (keep_fp8_weights,) * 2):
        count.clear()
        assert same(train(*around), want) and len(count) == 16


@pytest.mark.parametrize("hidden", [False, True], ids=["in place", "a step through .data"])
def test_a_weight_that_changes_inside(hidden, device):
    class Halve(torch.optim.Optimizer):
        def step(self):
            for p in self.param_groups[0]["params"]:
                if hidden:
                    p.data.mul_(0.5)
                else:
                    p.detach().mul_(0.5)

    moe = build(device)
    (x,) = batches(moe, 1)
    with torch.no_grad(), keep_fp8_weights():
        before = moe(x)
        Halve([moe.experts.down], {}).step()
        after = moe(x)
    with torch.no_grad():
        assert torch.equal(after, moe(x)) and not torch.equal(after, before)


def kept_bytes():
    return sum(block.cache.size for block in keep_fp8.OPEN.values())


@pytest.mark.parametrize("recipe", ["e4m3", "e4m3_all", "block"])
@pytest.mark.parametrize("outer, inner", [(FORWARD, FORWARD), (FORWARD, BOTH), (BOTH, FORWARD)], ids=str)
def test_bytes_of_a_weight_until_the_end(outer, inner, recipe, device):
    """One for each number, or two if one of the open blocks keeps backward's order."""
    moe = build(device, fp8=recipe)
    weights = moe.experts.gate_up.numel() + moe.experts.down.numel()
    scales = 4 * E * (3 * WIDTH + 2 * H + H + WIDTH)  # of rows and columns; the columns' magnitudes
    hooks = len(optimizer._global_optimizer_post_hooks)
    with pytest.raises(KeyError), keep_fp8_weights(**outer):
        with keep_fp8_weights(**inner):
            gradients(moe)
        assert 0 <= kept_bytes() - (1 + (BOTH in (outer, inner))) * weights <= 2 * scales
        caches = [block.cache for block in keep_fp8.OPEN.values()]
        raise KeyError
    assert not keep_fp8.OPEN and not any(cache.entries for cache in caches)
    assert len(optimizer._global_optimizer_post_hooks) == hooks


def test_an_inner_block_asks_for_itself_alone(device):
    moe = build(device)
    weights = moe.experts.gate_up.numel() + moe.experts.down.numel()
    with keep_fp8_weights():
        with keep_fp8_weights(backward=True):
            pass
        gradients(moe)
        assert weights <= kept_bytes() < 1.5 * weights


@pytest.mark.parametrize("backward", [None, "no", 1])
def test_backward_is_a_bool(backward):
    with pytest.raises(TypeError, match="backward must be a bool"), keep_fp8_weights(backward=backward):
        pass


def test_blocks_of_several_threads(count):
    """That of one may end within that of another, and the backward pass runs in any."""
    moe, inside, ended = build(), threading.Event(), threading.Event()

    def other():
        with keep_fp8_weights():
            inside.set()
            ended.wait()
            gradients(moe)

    thread = threading.Thread(target=other)
    with keep_fp8_weights():
        thread.start()
        inside.wait()
        gradients(moe)
    ended.set()
    thread.join()
    assert len(count) == 2 + 2 * 6


def test_what_is_computed_anew_is_not_kept(count):
    """Under autocast a float32 weight is another tensor each time."""
    moe = build()
    with torch.autocast("cpu", torch.bfloat16):
        want = gradients(moe)
        without = len(count)
        with keep_fp8_weights():
            out = moe(batches(moe, 1)[0])
            assert kept_bytes() == 0  # though the graph holds this one's
            del out
            assert same(gradients(moe), want)
    assert len(count) == 2 * without + 2


def test_inference_mode(count):
    moe = build()
    (x,) = batches(moe, 1)
    want = gradients(moe, count=1)
    count.clear()
    with keep_fp8_weights():
        with torch.inference_mode():
            moe(x)
        assert same(gradients(moe, count=1), want)
    assert len(count) == 4


def test_a_compiled_layer(count):
    moe = build()
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    want = gradients(moe, compiled)
    count.clear()
    with keep_fp8_weights():
        assert same(gradients(moe, compiled), want)
    assert count == [
        "quantize_rows",
        "quantize_rows_and_amax",
    ]  # its backward pass quantises in its own graph


# on a GPU


@pytest.mark.gpu
def test_memory_on_a_gpu():
    moe = build("cuda")
    gradients(moe)
    moe.zero_grad()
    before = torch.cuda.memory_allocated()
    weights = moe.experts.gate_up.numel() + moe.experts.down.numel()
    for kept in (1, 2):
        with keep_fp8_weights(backward=kept == 2):
            gradients(moe)
            moe.zero_grad()
            assert kept * weights <= torch.cuda.memory_allocated() - before < (kept + 0.2) * weights
        assert torch.cuda.memory_allocated() == before


def on_side_stream(step):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)


def close(got, want):
    """A graph's products may be of other kernels: as in the tests of the layer's graphs."""
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * b.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [True, False], ids=["a block in a capture", "a capture in a block"])
def test_graphs(inside, no_debug, count):
    """Replays quantise the weights that they find, once or each time; nothing of a graph is used outside."""
    moe, graph = build("cuda"), torch.cuda.CUDAGraph()
    xs, parameters = batches(moe), list(moe.parameters())

    def step():
        losses = [moe(x).float().square().mean() for x in xs]
        return torch.autograd.grad(sum(losses), parameters)

    on_side_stream(step)
    count.clear()
    outer, inner = (contextlib.nullcontext, keep_fp8_weights)[:: 1 if inside else -1]
    with outer():
        if not inside:
            step()
            assert len(count) == 8
            count.clear()
        with torch.cuda.graph(graph), inner():
            captured = step()
        assert len(count) == (8 if inside else 12)
        with torch.no_grad():
            for p in moe.experts.parameters():
                p.mul_(1.25)
        for _ in range(2):
            graph.replay()
            close(captured, step())
    graph.replay()
    close(captured, step())


@pytest.mark.gpu
def test_graphs_of_the_compiler(no_debug):
    """They warm up and capture on a stream of their own."""
    moe = build("cuda")
    compiled = torch.compile(moe, mode="reduce-overhead", fullgraph=True)
    with keep_fp8_weights():
        for _ in range(4):
            close(gradients(moe, compiled), gradients(moe))
            with torch.no_grad():
                for p in moe.experts.parameters():
                    p.mul_(1.25)


@pytest.mark.gpu
def test_another_stream_quantises_itself(count):
    moe = build("cuda")
    want = gradients(moe)
    count.clear()
    with keep_fp8_weights(backward=True):
        gradients(moe)
        assert len(count) == 4
        on_side_stream(lambda: gradients(moe))
        assert len(count) == 16
        assert same(gradients(moe), want) and len(count) == 16
