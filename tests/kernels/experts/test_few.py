"""Few tokens without gradients, by kernels of their own: the layer as for many tokens, for any weights."""

import pytest
import torch
from check import assert_as_good_as_torch
from shapes import CAPPED, KINDS, LIMITED

from moe_aiter.config import interpret
from moe_aiter.invariance import invariant
from moe_aiter.kernels import hopper
from moe_aiter.kernels.base.activations import get_activation
from moe_aiter.kernels.experts import few, mlp
from moe_aiter.kernels.experts.inputs import ExpertInputs
from moe_aiter.kernels.experts.mlp import BothInputs, both_reference, expert_mlp
from moe_aiter.kernels.rows.permute import rows_alone
from moe_aiter.kernels.rows.sort import sort_by_expert
from moe_aiter.op import IMPLS, bound, invalidate_decisions, register_kernel, use

MOST_TOKENS = few.MOST_TOKENS[True]
DTYPES = [torch.float32, torch.float16] if interpret else [torch.float32, torch.bfloat16, torch.float16]
SHAPES = {  # T, H, I, E, k
    "one token": (1, 32, 24, 40, 3),
    "few tokens": (3, 48, 16, 24, 4),
    "most tokens": (MOST_TOKENS, 16, 24, 64, 2),
    "one expert": (1, 24, 40, 1, 1),
    "odd": (2, 23, 37, 15, 3),
    "of one column": (2, 1, 1, 8, 2),
    "longer than a tile": (1, 130, 70, 3, 2),
}


@pytest.fixture(autouse=True)
def gpu_or_interpreter(device, monkeypatch):
    if device.type == "cpu" and not interpret:
        pytest.skip("kernels for GPUs")
    monkeypatch.setattr(few, "SHARED", 0)  # however many rows an expert has
    monkeypatch.setattr(few, "MOST_TOKENS", {True: MOST_TOKENS, False: MOST_TOKENS})
    invalidate_decisions()
    if interpret:  # several tiles at small sizes
        monkeypatch.setattr(few, "UP", {True: (8, 32, 1), False: (16, 16, 1)})
        monkeypatch.setattr(few, "DOWN", {True: (4, 128, 1), False: (8, 128, 1)})
        monkeypatch.setattr(few, "UP_DOT", (16, 32, 1))
        monkeypatch.setattr(few, "DOWN_DOT", (16, 128, 1))


def make(device, shape, kind=("swiglu", False), dtype=torch.float32, bias=True, by_rows=True):
    T, H, inner, E, k = shape
    width = get_activation(kind[0]).projections * inner

    def new(*size):
        return (torch.randn(size) * size[-1] ** -0.5).to(device, dtype)

    weights = new(E, width, H), new(E, H, inner)
    gate_up, down = weights if by_rows else (w.mT.contiguous().mT for w in weights)
    biases = (new(E, width), new(E, H)) if bias else (None, None)
    ids = torch.stack([torch.randperm(E)[:k] for _ in range(T)]).to(device)
    weights = torch.rand(T, k, device=device)
    x, plan = new(T, H) * H**0.5, sort_by_expert(ids, E)
    return ExpertInputs(x, gate_up, biases[0], down, biases[1], weights, *plan, *kind, False)


def both(i):
    return expert_mlp(
        i.x, i.gate_up, i.down, i.routing_weights, i[6:9], activation=i.activation,
        interleaved=i.interleaved, gate_up_bias=i.gate_up_bias, down_bias=i.down_bias,
    )  # fmt: skip


def forward(i):
    assert few.takes_few(i)
    with torch.no_grad():
        return both(i)


def assert_good(i, floor=3e-7):
    floats, rest = i[:6], i[6:]

    def reference(*floats):
        return both_reference(BothInputs(*floats, *rest, 0, 0))

    used = [t for t in floats if t is not None]
    places = [n for n, t in enumerate(floats) if t is not None]

    def with_none(fn):
        return lambda *args: fn(*(args[places.index(n)] if n in places else None for n in range(6)))

    ours = with_none(lambda *floats: forward(ExpertInputs(*floats, *rest)))
    assert_as_good_as_torch(ours, with_none(reference), *used, floor=floor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "columns"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.pairwise
def test_shapes(device, shape, bias, by_rows, dtype):
    few_numbers = shape[:3] == (2, 1, 1)  # two, each rounded twice, and torch's may be right by chance
    floor = torch.finfo(dtype).eps if few_numbers else 3e-7
    assert_good(make(device, shape, dtype=dtype, bias=bias, by_rows=by_rows), floor)


@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "columns"])
@pytest.mark.parametrize("kind", [*KINDS, (LIMITED, True), (CAPPED, False)], ids=str)
@pytest.mark.pairwise
def test_activations(device, kind, by_rows):
    assert_good(make(device, SHAPES["odd"], kind, by_rows=by_rows))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("kind", [("swiglu", False), ("swiglu_oai", True), ("relu2", False)], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.pairwise
def test_by_tensor_cores(device, monkeypatch, shape, kind, dtype):
    monkeypatch.setattr(few, "adds_as_many", lambda i: True)
    if interpret:  # which has no instructions of Hopper
        monkeypatch.setattr(hopper, "launcher", lambda *names: lambda act: act.triton_fns)
    with invariant():
        assert_good(make(device, shape, kind, dtype), torch.finfo(dtype).eps)


@pytest.mark.parametrize("dot", [False, True], ids=["", "tensor cores"])
def test_rows_without_weights(device, monkeypatch, dot):
    """Experts shared by ranks weigh a token's rows where they have travelled to."""
    monkeypatch.setattr(few, "adds_as_many", lambda i: True)
    if interpret:
        monkeypatch.setattr(hopper, "launcher", lambda *names: lambda act: act.triton_fns)
    i = make(device, (3, 48, 16, 24, 1), dtype=DTYPES[-1])
    with invariant(dot), rows_alone.set(True):
        alone = forward(i)
    with invariant(dot):
        weighed = forward(i._replace(routing_weights=torch.ones_like(i.routing_weights)))
    assert torch.equal(alone, weighed) and alone.any()


MODELS = {  # H, I, E, k
    "Qwen3-30B": (2048, 768, 128, 8),
    "OLMoE": (2048, 1024, 64, 8),
    "gpt-oss": (2880, 2880, 32, 4),
    "Llama 4": (1024, 1408, 16, 1),
    "six choices": (520, 200, 60, 6),
    "22 choices": (1024, 512, 128, 22),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
@pytest.mark.gpu
def test_the_bits_of_many_tokens(shape, dtype):
    """With batch invariance, on Hopper, whose large instructions add up as the small ones here do."""
    oai = shape == MODELS["gpt-oss"]
    i = make("cuda", (200, *shape), ("swiglu_oai", True) if oai else ("swiglu", False), dtype, bias=oai)
    ids = torch.stack([torch.randperm(shape[2])[: shape[3]] for _ in range(200)]).to("cuda")
    ids[3, -1] = -1

    def of_tokens(tokens):
        plan = sort_by_expert(ids[tokens], shape[2])
        plan = dict(zip(("order", "rank", "group_sizes"), plan, strict=True))
        return i._replace(x=i.x[tokens], routing_weights=i.routing_weights[tokens], **plan)

    with invariant(), torch.no_grad():
        every = of_tokens(slice(None))
        assert not few.takes_few(every)
        out = both(every)
        for tokens in ([7], [3], [2, 199], [100, 3, 5], list(range(40, 48))):
            own = of_tokens(tokens)
            assert few.takes_few(own) or not hopper.is_hopper(out.device)
            assert torch.equal(both(own), out[tokens]), tokens
        wide = own.x.repeat(1, 3)
        apart = wide[:, : shape[0]], wide.roll(1, 1)[:, 1 : shape[0] + 1]
        for x in (own.x.T.contiguous().T, *apart, own.x[:1].reshape(-1, 1).T):
            own = of_tokens(tokens[: len(x)])
            assert torch.equal(both(own._replace(x=x)), out[tokens[: len(x)]]), x.stride()


def test_dropped_choices(device):
    """They have no row; a token without any gets zeros."""
    i = make(device, SHAPES["few tokens"])
    ids = torch.tensor([[3, -1, 5, 3], [-1] * 4, [7, 5, -1, -1]], device=device)  # and one expert twice
    i = i._replace(**dict(zip(("order", "rank", "group_sizes"), sort_by_expert(ids, 24), strict=True)))
    assert_good(i)
    assert not forward(i)[1].any()


def test_strides(device):
    """Of weights that are parts of others, of one for all experts, and of tokens and choices."""
    i = make(device, SHAPES["few tokens"], bias=False)
    wide = torch.randn(24, 40, 100, device=device)
    x, s, rank = (t.T.contiguous().T for t in (i.x, i.routing_weights, i.rank))
    i = i._replace(x=x, routing_weights=s, rank=rank, gate_up=wide[:, 4:36, 1:97:2])
    assert_good(i._replace(down=wide[:1, :, :48].mT[:, :, 8:24].expand(24, -1, -1)))


def test_what_is_not_for_these_kernels(device, monkeypatch):
    """Others run with a gradient, with batch invariance in float32, and where a kernel is registered."""
    i, bound_few = make(device, SHAPES["few tokens"]), []
    monkeypatch.setattr(mlp, "bind_few", lambda i: bound_few.append(1) or few.bind_few(i))
    inputs = BothInputs(*i, 0, 0)
    bound(mlp.bind_expert_forward, inputs)
    assert bound_few
    bound_few.clear()
    with invariant():
        bound(mlp.bind_expert_forward, inputs)
    with use("hopper"):
        assert not few.takes_few(i)
    many = make(device, (MOST_TOKENS + 1, 16, 16, 64, 2))
    bound(mlp.bind_expert_forward, BothInputs(*many, 0, 0))
    expert_mlp(i.x.requires_grad_(), i.gate_up, i.down, i.routing_weights, i[6:9]).sum().backward()
    monkeypatch.setitem(IMPLS, "gmm_into", dict(IMPLS["gmm_into"]))
    register_kernel(op="gmm_into", backend="triton")(lambda *inputs: None)
    bound(mlp.bind_expert_forward, inputs)
    assert not bound_few and i.x.grad.any()


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 3])
def test_a_graph_follows_new_routing(device, no_debug, T):
    from moe_aiter import MoE

    if device.type == "cpu":
        pytest.skip("graphs of a GPU")
    moe = MoE(128, 64, 32, 4, bias=True, device=device, dtype=torch.bfloat16).eval()
    x = torch.randn(T, 128, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        moe(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = moe(x)
        for _ in range(3):
            x.normal_()
            graph.replay()
            assert torch.equal(out, moe(x)) and out.any()
            torch.testing.assert_close(out, moe(x, return_routing=True)[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_in_one_graph(device, dynamic):
    """The op itself sees how many tokens there are: one graph serves few and many."""
    i, many = (make(device, (T, 24, 16, 32, 2)) for T in (3, MOST_TOKENS + 2))

    def run(x, gate_up, down, routing_weights, *plan):
        return expert_mlp(x, gate_up, down, routing_weights, plan)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for given in (i, many) if dynamic else (i,):
        args = given.x, given.gate_up, given.down, given.routing_weights, *given[6:9]
        with torch.no_grad():
            assert torch.equal(compiled(*args), run(*args))
