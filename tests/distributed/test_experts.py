"""Experts shared by 2 and by 4 ranks against one process that has all tokens and all experts."""

import contextlib
import copy
import functools
import pickle

import pytest
import torch
import torch.distributed as dist
from check import error, few
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moe_aiter import Experts, MoE, make_plan, use
from moe_aiter.config import interpret, settings
from moe_aiter.distributed import ExpertDispatcher, ExpertParallel, expert_mesh, transport
from moe_aiter.kernels.base.host import ext
from moe_aiter.kernels.experts.inputs import ExpertInputs
from moe_aiter.kernels.experts.mlp import by_layer
from moe_aiter.op import IMPLS

from ..references import expert_loop_reference
from .ranks import of_all_ranks, run, whole
from .shared_memory import use_files

if interpret:
    pytest.skip("nothing here runs Triton", allow_module_level=True)

E, K, T, H, I = 16, 4, 96, 64, 32  # noqa: E741  tokens of each rank
BACKENDS = ["torch"] if ext is None else ["host", "torch"]


def distinct(shares, tokens):
    return torch.multinomial(shares.expand(tokens, -1), K) if tokens else torch.zeros(0, K, dtype=torch.int64)


def some(ids, kept):
    return ids.masked_fill(~kept, -1)


def routings(world: int) -> dict:
    """Name -> the experts (world * tokens, K) of all ranks' tokens."""
    n, even, each = world * T, torch.ones(E), E // world
    mine, others = torch.arange(E) < each, (torch.arange(E) >= each).float()
    return {
        "random": distinct(even, n),
        "zipf": distinct(1 / torch.arange(1.0, E + 1), n),
        "one rank": distinct(mine.float(), n),
        "an empty rank": distinct(others, n),
        "masked tokens": some(distinct(even, n), torch.rand(n, 1) < 0.6),
        "over capacity": some(distinct(even, n), torch.rand(n, K) < 0.7),
        "everything dropped": torch.full((n, K), -1),
        "an expert twice": torch.randint(0, E, (n, 1)).expand(n, K),
        "no tokens": distinct(even, 0),
    }


def build(dtype=torch.float32, **options) -> Experts:
    torch.manual_seed(0)
    return Experts(E, H, I, bias=True, dtype=dtype, **options)


def share(experts, world, **options):
    mesh = expert_mesh("cpu", world)["ep"]
    return parallelize_module(copy.deepcopy(experts), mesh, ExpertParallel(**options))


def inputs(n: int, dtype=torch.float32):
    torch.manual_seed(1)
    return torch.randn(n, H).to(dtype), torch.rand(n, K).softmax(1), torch.randn(n, H).bfloat16().to(dtype)


def step(fn, experts, x, ids, s, dout) -> dict:
    """Output and all gradients of one call."""
    experts.zero_grad()
    x, s = x.clone().requires_grad_(), s.clone().requires_grad_()
    out = fn(x, s, make_plan(ids, E))
    out.backward(dout)
    grads = {name: p.grad for name, p in experts.named_parameters()}
    return {"out": out.detach(), "dx": x.grad, "ds": s.grad} | grads


def reference(experts: Experts, dtype: torch.dtype, *given) -> dict:
    """Plain torch in a dtype."""
    experts = copy.deepcopy(experts).to(dtype)
    x, ids, s, dout = given
    s = s if dtype != torch.float64 else s.double()
    weights = experts.gate_up, experts.gate_up_bias, experts.down, experts.down_bias

    def fn(x, s, plan):
        i = ExpertInputs(x, *weights, s, *plan, experts.activation, experts.interleaved, False)
        return expert_loop_reference(*i)[0]

    return step(fn, experts, x.to(dtype), ids, s, dout.to(dtype))


def mine(rank: int, world: int, *tensors):
    """This rank's part of tensors of all ranks."""
    return [t.tensor_split(world)[rank] for t in tensors]


def check_routing(rank, world, name, ids, dtype):
    """No further from the truth than twice plain torch; weights' gradients in float32 to the bit."""
    experts = build(dtype)
    x, s, dout = inputs(len(ids), dtype)
    given = x, ids, s, dout
    # with bounds so large the rows of an expert are in one window, as in one process
    shared = share(experts, world, rows=float(world) if dtype == torch.float32 else 2.0)
    runs = [of_all_ranks(step(shared, shared, *mine(rank, world, *given))) for _ in range(2)]
    truth, torchs = (reference(experts, d, *given) for d in (torch.float64, dtype))
    alone = step(experts, experts, *given)
    for what, value in runs[0].items():
        assert torch.equal(value, runs[1][what]), f"{name}, {what}: two runs differ"
        got, best = error(value, truth[what]), error(torchs[what], truth[what])
        assert got <= 2 * best + 1e-7, f"{name}, {dtype}, {what}: error {got:.2e}, torch {best:.2e}"
        if dtype == torch.float32 and what not in ("out", "dx"):
            assert torch.equal(value, alone[what]), f"{name}, {what} is not that of one process"


class Largest(TorchDispatchMode):
    """Notes the most rows of any matrix with `columns` columns."""

    def __init__(self, columns):
        self.columns, self.rows = columns, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and t.dim() == 2 and t.shape[1] in self.columns:
                self.rows = max(self.rows, t.shape[0])
        return out


def check_windows(rank, world):
    for keep_x in (False, True):
        windows_of_one_rank(rank, world, keep_x)


def windows_of_one_rank(rank, world, keep_x):
    """All tokens on one rank: as many passes as ranks, none with more rows than the bound."""
    experts, ids, bound = build(), routings(world)["one rank"], T * K
    x, s, dout = inputs(len(ids))
    given = x, ids, s, dout
    shared = share(experts, world, rows=1.0, keep_x=keep_x)
    computed = []
    compute, shared.compute = shared.compute, lambda *a, **k: computed.append(a[2]) or compute(*a, **k)
    with Largest({I, 2 * I}) as largest:
        results = step(shared, shared, *mine(rank, world, *given))
    del shared.compute
    assert len(computed) == (world if rank == 0 else 1)
    assert all(len(plan.order) == bound for plan in computed)
    assert largest.rows <= bound + (0 if rank == 0 else E)
    results, truth = of_all_ranks(results), reference(experts, torch.float64, *given)
    torchs, alone = reference(experts, torch.float32, *given), step(experts, experts, *given)
    for what in results:
        got, *others = (error(r[what], truth[what]) for r in (results, torchs, alone))
        # one process adds an expert's rows one after the other, torch in pairs
        assert got <= 2 * max(others) + 1e-7, f"{what}: error {got:.2e}, torch and one process {others}"


def check_nothing_is_kept(rank, world):
    """Backward sends the tokens again: no slots among what is saved, with the same bits as if they were."""
    experts, x, ids = build(), torch.randn(T, H), distinct(torch.ones(E), T)
    results = []
    for keep_x in (False, True):
        shared, saved = share(experts, world, keep_x=keep_x), []
        with saved_tensors_hooks(lambda t, saved=saved: saved.append(t.shape) or t, lambda t: t):
            s = torch.ones(T, K)
            leaf = x.clone().requires_grad_()
            out = shared(leaf, s, make_plan(ids, E))
        assert ((world * T, H) in saved) == keep_x
        out.backward(torch.ones_like(out), retain_graph=True)
        first = leaf.grad.clone()
        out.backward(torch.ones_like(out))
        assert torch.equal(leaf.grad, 2 * first)
        results.append(first)
    assert torch.equal(*results)


def check_what_is_trained(rank, world):
    """Frozen weights, tokens without a gradient, and no gradient at all."""
    experts, (x, s, dout) = build(), inputs(world * T)
    ids = distinct(torch.ones(E), world * T)
    want = step(experts, experts, x, ids, s, dout)
    x, ids, s, dout = mine(rank, world, x, ids, s, dout)
    shared = share(experts, world)
    plan = make_plan(ids, E)
    with torch.no_grad():
        torch.testing.assert_close(shared(x, s, plan), mine(rank, world, want["out"])[0])
    shared(x, s, plan).backward(dout)
    assert torch.equal(whole(shared.down.grad), want["down"])
    shared.requires_grad_(False).zero_grad()
    x.requires_grad_()
    shared(x, s, plan).backward(dout)
    torch.testing.assert_close(x.grad, mine(rank, world, want["dx"])[0])
    assert shared.down.grad is None
    s.requires_grad_()
    shared(x.detach(), s, plan).backward(dout)
    torch.testing.assert_close(s.grad, mine(rank, world, want["ds"])[0])
    with torch.autocast("cpu", torch.bfloat16):
        out = shared(x.detach(), s, plan)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), mine(rank, world, want["out"])[0], rtol=0.05, atol=0.02)


def check_max_tokens(rank, world):
    """Ranks with different numbers of tokens: padded, the results are those of the tokens."""
    experts, counts = build(), [3, 0, 17, 5][:world]
    n, start = sum(counts), sum(counts[:rank])
    x, s, dout = inputs(n)
    ids = distinct(torch.ones(E), n)
    want = step(experts, experts, x, ids, s, dout)
    shared = share(experts, world, max_tokens=20)
    own = slice(start, start + counts[rank])
    got = step(shared, shared, *(t[own] for t in (x, ids, s, dout)))
    for what, value in got.items():
        expected = want[what] if value.dim() and hasattr(value, "full_tensor") else want[what][own]
        torch.testing.assert_close(whole(value), expected, rtol=1e-5, atol=1e-5)


def check_unequal_tokens(rank, world):
    """An error on every rank, which names all numbers."""
    shared = share(build(), world)
    x = torch.randn(5 + rank, H)
    with pytest.raises(ValueError, match=r"have \[5, 6.*\] tokens: pass the same number"):
        shared(x, torch.rand(len(x), K), make_plan(distinct(torch.ones(E), len(x)), E))
    few = share(build(), world, max_tokens=5)
    with pytest.raises(ValueError, match=r"have \[5, 6.*\] tokens, but max_tokens is 5"):
        few(x, torch.rand(len(x), K), make_plan(distinct(torch.ones(E), len(x)), E))


def check_inputs(rank, world):
    """Inputs that do not fit are refused before a rank waits for another."""
    shared, (x, s, _) = share(build(), world), inputs(T)
    ids = distinct(torch.ones(E), T)
    torch.testing.assert_close(shared(x, s, tuple(make_plan(ids, E))), shared(x, s, make_plan(ids, E)))
    with pytest.raises(ValueError, match=r"group_sizes is \(E=32,\) but 16 experts are shared"):
        shared(x, s, make_plan(ids, 2 * E))
    with pytest.raises(ValueError, match="routing_weights is"):
        shared(x, s[:, 1:], make_plan(ids, E))
    with pytest.raises(ValueError, match=r"x must be \(T, H\), but it has shape \(16,\)"):
        shared(x[0, :16], s, make_plan(ids, E))
    with pytest.raises(TypeError, match="routing_weights must be floating"):
        shared(x, s.long(), make_plan(ids, E))
    for kind in (ExpertParallel, functools.partial(ExpertDispatcher, dist.group.WORLD, E)):
        with pytest.raises(ValueError, match="keep_x=True always uses collectives"):
            kind(keep_x=True, transport="symmetric")
    few = share(build(), world, max_tokens=T)
    few(x, s, make_plan(ids, E))
    more = torch.cat([x, x])
    compiled = torch.compile(few, backend="eager")
    for layer in (few, compiled):
        with pytest.raises(Exception, match=rf"have \[{2 * T}.*\] tokens, but max_tokens is {T}"):
            layer(more, torch.cat([s, s]), make_plan(torch.cat([ids, ids]), E))


def check_changed_weights(rank, world):
    """Autograd does not see that a DTensor has changed in place."""
    shared, (x, s, _) = share(build(), world), inputs(T)
    out = shared(x.requires_grad_(), s, make_plan(distinct(torch.ones(E), T), E))
    with torch.no_grad():
        shared.down.mul_(2)
    with pytest.raises(RuntimeError, match="a weight of shared experts was changed in place"):
        out.sum().backward()


def check_uneven_experts(rank, world):
    """Experts that the ranks do not divide: as torch.chunk."""
    torch.manual_seed(0)
    experts = Experts(7, H, I)
    shared = share(experts, world)
    sizes = [len(part) for part in torch.arange(7).chunk(world)]
    assert shared.down.to_local().shape[0] == sizes[rank]
    x, s = torch.randn(T, H), torch.rand(T, K)
    plan = make_plan(torch.randint(0, 7, (T, K)), 7)
    torch.testing.assert_close(shared(x, s, plan), experts(x, s, plan))
    with pytest.raises(ValueError, match="leaves ranks without an expert"):
        share(Experts(world + 1 if world > 2 else 1, H, I), world)


def save_products(*_):
    names = "expert_loop", "route_once"
    ops = {getattr(torch.ops.moe_aiter, name).default for name in names}

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


CHECKPOINTS = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": save_products},
}


def check_checkpointing(rank, world):
    for kind in CHECKPOINTS:
        as_without(rank, world, kind)


def as_without(rank, world, kind):
    """The routing of a repeated forward pass is that of the first, which noise would change."""
    torch.manual_seed(0)
    moe = MoE(H, I, E, K, jitter=0.3)
    x = torch.randn(T, H) + rank
    grads = []
    for repeated in (False, True):
        layer = copy.deepcopy(moe)
        layer.experts = share(layer.experts, world)
        leaf = x.clone().requires_grad_()
        torch.manual_seed(rank)
        fn = functools.partial(checkpoint, layer, **CHECKPOINTS[kind]) if repeated else layer
        fn(leaf).square().sum().backward()
        grads.append(
            [leaf.grad, layer.router.weight.grad, *map(whole, (p.grad for p in layer.experts.parameters()))]
        )
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)


def check_main_grad(rank, world, **options):
    """Ten micro-batches add to a float32 main gradient of this rank's bfloat16 experts."""
    experts = build(torch.bfloat16)
    shared = share(experts, world, **options)
    for layer in (experts, shared):
        for p in (layer.gate_up, layer.down):
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    for seed in range(10):
        torch.manual_seed(seed)
        x, s = torch.randn(world * T, H).bfloat16(), torch.rand(world * T, K)
        ids = distinct(torch.ones(E), world * T)
        experts(x, s, make_plan(ids, E)).float().square().sum().backward()
        x, s, ids = mine(rank, world, x, s, ids)
        x = x.clone().requires_grad_()  # so that x's gradient may leave early
        shared(x, s, make_plan(ids, E)).float().square().sum().backward()
    for got, want in ((shared.gate_up, experts.gate_up), (shared.down, experts.down)):
        assert got.grad is None
        assert error(whole(got.main_grad), want.main_grad) < 3e-3  # outputs are rounded twice


def check_options(rank, world):
    """Other activations, z computed again, FP8."""
    z, fp8 = {"recompute": "z"}, {"fp8": "e4m3"}
    for options in (z, {"activation": "gelu"}, {"interleaved": True}, fp8, z | fp8):
        with use("torch"):
            experts, (x, s, dout) = build(**options), inputs(world * T)
            ids = distinct(torch.ones(E), world * T)
            want = step(experts, experts, x, ids, s, dout)
            shared = share(experts, world)
            got = of_all_ranks(step(shared, shared, *mine(rank, world, x, ids, s, dout)))
        for what, value in got.items():
            torch.testing.assert_close(value, want[what], rtol=1e-4, atol=1e-5, msg=f"{options}, {what}")


def check_compiled(rank, world):
    """One graph, with the same numbers."""
    torch.manual_seed(0)
    moe = MoE(H, I, E, K)
    moe.experts = share(moe.experts, world)
    x = torch.randn(T, H)
    results = []
    for layer in (moe, torch.compile(moe, fullgraph=True, backend="aot_eager")):
        moe.zero_grad()
        leaf = x.clone().requires_grad_()
        layer(leaf).square().sum().backward()
        results.append([leaf.grad, *(whole(p.grad) for p in moe.parameters())])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def everything(rank, world, _):
    checks = [
        check_windows,
        check_nothing_is_kept,
        check_what_is_trained,
        check_main_grad,
        check_checkpointing,
    ]
    others = [check_options, check_max_tokens, check_unequal_tokens, check_uneven_experts, check_inputs]
    others += [check_changed_weights]
    for backend in BACKENDS:
        with use(backend):
            torch.manual_seed(0)
            for name, ids in routings(world).items():
                for dtype in (torch.float32, torch.bfloat16):
                    check_routing(rank, world, name, ids, dtype)
            for check in checks:
                torch.manual_seed(0)
                check(rank, world)
    for check in others + [check_compiled] * (world == 2):
        torch.manual_seed(0)
        check(rank, world)


@pytest.mark.parametrize("world", few([2, 4], 2))
def test_shared_experts(world, tmp_path):
    run(world, everything, tmp_path)


def check_transports(rank, world):
    """Two layers through one pool, the second with more tokens: the bits of the collective transport."""
    torch.manual_seed(0)
    layers = [build(), build(activation="gelu")]
    results = []
    for name in ("collective", "symmetric"):
        shared, found = [share(layer, world, transport=name) for layer in layers], []
        for tokens in (T, 2 * T, T, 1):
            torch.manual_seed(tokens)
            ids = distinct(torch.ones(E), tokens)
            x, s = torch.randn(tokens, H).requires_grad_(), torch.rand(tokens, K).requires_grad_()
            out = x
            for factor, layer in enumerate(shared, 1):
                layer.zero_grad()
                out = layer(out, factor * s, make_plan(ids, E))
            out.square().sum().backward()
            weights = [whole(p.grad) for layer in shared for p in layer.parameters()]
            found += [out.detach(), x.grad, s.grad, *weights]
        results.append(found)
    assert all(map(torch.equal, *results))


@contextlib.contextmanager
def as_on_gpus():
    """All experts at once, by the ops that a GPU uses, in plain torch."""
    with pytest.MonkeyPatch.context() as patch, use("torch"):
        patch.setitem(IMPLS["expert_mlp"], "torch", by_layer)
        yield


def check_overflow(rank, world):
    """Windows that are added later have the results of those that autograd adds up."""
    x, s, dout = inputs(world * T)
    ids = routings(world)["one rank"]
    given = mine(rank, world, x, ids, s, dout)
    for options, frozen in (({}, ()), ({"activation": "gelu"}, ("gate_up", "down_bias")), ({}, ("down",))):
        results = []
        for transport_name in ("collective", "auto"):
            for keep_x in (True, False):
                shared = share(build(**options), world, rows=1.0, keep_x=keep_x, transport=transport_name)
                for name in frozen:
                    getattr(shared, name).requires_grad_(False)
                with Largest({I, 2 * I}) as largest:
                    got = step(shared, shared, *given)
                assert largest.rows <= T * K + E
                assert shared.dispatcher.symmetric == (transport_name == "auto" and not keep_x)
                with torch.no_grad():
                    alone = shared(given[0], given[2], make_plan(given[1], E))
                torch.testing.assert_close(alone, got["out"])
                results.append({name: whole(t) for name, t in got.items() if name not in frozen})
        for others in results[1:]:
            for name, value in others.items():
                assert error(value, results[0][name]) < 1e-6, (name, options)


def check_overflow_in_training(rank, world):
    """Backward outside of forward's autocast; a frozen weight's main gradient stays as it is."""
    x, ids, s, dout = mine(
        rank, world, inputs(world * T)[0], routings(world)["one rank"], *inputs(world * T)[1:]
    )
    results = []
    for keep_x in (True, False):
        shared = share(build(), world, rows=1.0, keep_x=keep_x)
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = shared(leaf, s, make_plan(ids, E))
        out.backward(dout.to(out.dtype))
        results.append([leaf.grad, whole(shared.gate_up.grad), whole(shared.down.grad)])
    for autograds, ours in zip(*results, strict=True):
        assert error(ours, autograds) < 2e-2
    shared = share(build(), world, rows=1.0)
    shared.down.main_grad = torch.zeros_like(shared.down)
    shared.down.requires_grad_(False)
    shared(x.clone().requires_grad_(), s, make_plan(ids, E)).backward(dout)
    assert not whole(shared.down.main_grad).count_nonzero()


def check_no_tokens_first(rank, world):
    """The first call of a group may have no tokens."""
    transport.POOLS.clear()
    shared, leaf = share(build(), world, transport="symmetric"), torch.zeros(0, H, requires_grad=True)
    x = leaf.exp()  # whose backward needs x as it was
    out = shared(x, torch.zeros(0, K), make_plan(distinct(torch.ones(E), 0), E))
    out.sum().backward()
    assert out.shape == leaf.grad.shape == (0, H)


def check_pools(rank, world):
    """Regions that grow slowly need few pools; the first has the sizes asked for, and others keep theirs."""
    group, unit = expert_mesh("cpu", world)["ep"].get_group(), transport.ALIGNMENT
    transport.POOLS.clear()
    for tokens in range(100, 201):
        sizes = [tokens * unit, 50 * unit]
        pool = transport.pool_for(group, sizes, torch.device("cpu"))
        assert all(got >= size and got % unit == 0 for got, size in zip(pool.sizes, sizes, strict=True))
    assert [pool.sizes[0] // unit for pool in transport.POOLS[group]] == [100, 125, 157, 197, 247]
    assert {pool.sizes[1] for pool in transport.POOLS[group]} == {50 * unit}
    pool = transport.pool_for(group, [1000 * unit, 0], torch.device("cpu"))
    assert pool.sizes == [1000 * unit, 50 * unit]
    transport.POOLS.clear()


def check_other_tokens(rank, world):
    """After the first call, other numbers of tokens are an error on each rank, and not a wrong result.

    The first call of a copy compares the numbers.
    """
    shared = share(build(), world, transport="symmetric")

    def call(experts, tokens):
        ids = distinct(torch.ones(E), tokens)
        experts(torch.randn(tokens, H), torch.rand(tokens, K), make_plan(ids, E))

    call(shared, 8)
    debug = settings.debug
    object.__setattr__(settings, "debug", False)  # which compares the numbers in every call
    for copied in (copy.deepcopy(shared), pickle.loads(pickle.dumps(shared))):
        with pytest.raises(ValueError, match="tokens: pass the same number"):
            call(copied, 8 - (rank == 0))
    with pytest.raises(RuntimeError, match="different numbers of tokens"):
        call(shared, 8 - (rank == 0))
    object.__setattr__(settings, "debug", debug)


def through_memory(rank, world, folder):
    with pytest.MonkeyPatch.context() as patch:
        use_files(folder, patch)
        with as_on_gpus():
            many = functools.partial(check_main_grad, rows=0.5)
            for check in (
                check_no_tokens_first,
                check_overflow,
                check_overflow_in_training,
                many,
            ):
                torch.manual_seed(0)
                check(rank, world)
        for backend in BACKENDS:
            with use(backend):
                torch.manual_seed(0)
                for name, ids in routings(world).items():
                    check_routing(rank, world, name, ids, torch.float32)
                checks = [check_transports, check_windows, check_overflow, check_nothing_is_kept]
                checks += [check_what_is_trained, check_main_grad, check_checkpointing, check_max_tokens]
                checks += [check_uneven_experts]
                for check in checks:
                    torch.manual_seed(0)
                    check(rank, world)
        check_options(rank, world)
        check_pools(rank, world)
        check_other_tokens(rank, world)


@pytest.mark.parametrize("world", few([2, 3], 3))
def test_shared_experts_through_memory(world, tmp_path):
    run(world, through_memory, tmp_path)
