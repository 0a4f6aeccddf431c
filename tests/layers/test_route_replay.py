"""Routes of whole models: recorded, replayed, refused where they do not fit."""

import copy

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_aiter import (
    Capacity,
    GroupLimit,
    MoE,
    Route,
    Sinkhorn,
    TopP,
    pack_routes,
    record_routes,
    replay_routes,
)
from moe_aiter.routing.plan import make_plan

H, E, K, LAYERS = 16, 6, 3, 2
OPTIONS = {
    "softmax": {},
    "probabilities": {"renormalize": False},
    "sigmoid": {"score": "sigmoid", "scale": 2.5, "selection_bias": True, "bias": True},
    "topk_softmax": {"score": "topk_softmax", "shared_intermediate": 8},
    "capacity": {"capacity": Capacity(0.7, "probability")},
    "groups": {"choice": GroupLimit(3, 2, "max")},
    "top-p": {"choice": TopP(0.5)},
    "sinkhorn": {"choice": Sinkhorn(3)},
}


class Model(nn.Module):
    step = 1  # -1: the last layer runs first

    def __init__(self, reentrant=None, **options):
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(MoE(H, 8, E, K, **options) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers[:: self.step]:
            if self.reentrant is None:
                x = x + layer(x)
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.square().mean()


def moved(model):
    """A copy whose routers choose other experts."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for layer in model.layers:
            layer.router.weight += torch.randn_like(layer.router.weight)
    return model


def chosen(model, run):
    """The expert ids of all calls, by hooks of the test's own."""
    found = []
    hooks = [
        layer.experts.register_forward_pre_hook(lambda _, args: found.append(args[2].rank.clone()))
        for layer in model.layers
    ]
    run()
    for hook in hooks:
        hook.remove()
    return found


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def gradients(model):
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_record_and_replay(options):
    model, x = Model(**options), torch.randn(2, 7, H)
    with torch.inference_mode(), record_routes(model, weights=True) as routes:
        want = chosen(model, lambda: model(x))
        loss = model(x)
    assert list(routes) == ["layers.0", "layers.1"] and all(len(calls) == 2 for calls in routes.values())
    assert routes["layers.0"][0].expert_ids.dtype == torch.int16
    with replay_routes(model, routes) as replay:
        assert_same(chosen(model, lambda: model(x)), want)
        again = model(x)
        again.backward()
    assert torch.allclose(again, loss, atol=1e-6, rtol=0)
    assert all(d == (0, 0) for d in replay.differences().values())
    assert all(layer.router.weight.grad.abs().sum() > 0 for layer in model.layers)
    other = moved(model)
    own = chosen(other, lambda: other(x))
    with replay_routes(other, routes) as replay:
        other(x)
        other(x)
    assert all(not torch.equal(a, b) for a, b in zip(own, want, strict=True))
    assert all(0 < d.choices <= d.tokens <= 1 for d in replay.differences().values())
    model.zero_grad()
    with replay_routes(model, routes, weights=True):
        model(x)
        again = model(x)
        again.backward()
    assert torch.equal(again, loss) and model.layers[0].router.weight.grad is None


def test_differences_are_counted_exactly():
    model, x = Model(), torch.randn(4, H)
    with record_routes(model) as routes:
        model(x)
    route = routes["layers.0"][0].expert_ids
    unused = next(e for e in range(E) if e not in route[0])
    route[0, 1] = unused
    route[3] = -1
    with replay_routes(model, routes) as replay:
        model(x)
        assert copy.deepcopy(model).layers[0].routes is None
    assert replay.differences()["layers.0"] == (1 / 9, 1 / 3)  # of 3 tokens with 3 choices


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_micro_batches(reentrant):
    """Two micro-batches in flight, backward in both orders: each repetition has the routes of its own."""
    model = Model()
    batches = [torch.randn(n, H, requires_grad=True) for n in (5, 5, 8)]
    with record_routes(model) as routes:
        for x in batches:
            model(x)
    other = moved(model)
    with replay_routes(other, routes):
        for x in batches:
            other(x).backward()
    want = gradients(other)
    checkpointed = copy.deepcopy(other)
    checkpointed.reentrant = reentrant
    with replay_routes(checkpointed, routes) as replay:
        losses = [checkpointed(x) for x in batches[:2]]
        for loss in losses[::-1]:
            loss.backward()
        checkpointed(batches[2]).backward()
    for a, b in zip(gradients(checkpointed), want, strict=True):
        torch.testing.assert_close(a, b)
    assert replay.differences()["layers.0"].tokens > 0
    with record_routes(checkpointed) as again:
        checkpointed(batches[0]).backward()
    assert len(again["layers.0"]) == 1  # a repetition is not recorded
    one = {name: calls[:1] for name, calls in routes.items()}
    late = pytest.raises(RuntimeError, match=r"layers.0 ran in a checkpointed region")
    with late, replay_routes(checkpointed, one):
        loss = checkpointed(batches[0])
    with replay_routes(checkpointed, one), torch.no_grad():
        checkpointed(batches[0])  # no backward pass will follow


def rank_trains(rank, world, folder):
    torch.manual_seed(0)
    model = Model()
    parallel = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(1 + rank)
    x = torch.randn(5 + rank, H)  # each rank has tokens and routes of its own
    with record_routes(parallel) as routes:
        loss = parallel(x)
    with replay_routes(parallel, routes) as replay:
        again = parallel(x)
        again.backward()
    assert abs(again - loss) < 1e-6 and replay.differences()["module.layers.0"] == (0, 0)
    other = [torch.empty_like(model.layers[0].router.weight) for _ in range(world)]
    dist.all_gather(other, model.layers[0].router.weight.grad)
    assert torch.equal(*other) and other[0].abs().sum() > 0


@pytest.mark.ranks
def test_data_parallel(tmp_path):
    ranks.run(2, rank_trains, tmp_path)


def test_arrays_of_an_engine():
    model = Model()
    lengths, x = [4, 2, 3], torch.randn(9, H)
    with record_routes(model) as routes:
        loss = model(x)
    whole = torch.stack([calls[0].expert_ids for calls in routes.values()], 1)  # (tokens, layers, k)
    sequences = whole.split(lengths)
    packed = pack_routes([s.numpy().astype("uint8") for s in sequences])
    assert torch.equal(packed, whole.int())
    for given in (packed, packed.numpy(), [packed], {n: packed[:, i] for i, n in enumerate(routes)}):
        with replay_routes(model, given):
            assert torch.allclose(model(x), loss, atol=1e-6, rtol=0)
    with replay_routes(model, [packed[:4], packed[4:]]) as replay:  # micro-batches
        model(x[:4])
        model(x[4:])
    assert replay.differences()["layers.1"] == (0, 0)
    mask = torch.zeros(3, 5, dtype=torch.bool)
    for row, n in zip(mask, lengths, strict=True):
        row[5 - n :] = True  # padding on the left
    padded = pack_routes(list(sequences), mask=mask)
    assert torch.equal(padded[mask.flatten()], packed) and (padded[~mask.flatten()] == -1).all()
    short = pack_routes([s[:-1] for s in sequences], lengths=lengths)  # no route for the last token
    assert (short[[3, 5, 8]] == -1).all() and torch.equal(short[:3], packed[:3])
    x = torch.randn(3, 5, H)
    with replay_routes(model, padded):
        out = model.layers[0](x)
        model.layers[1](x)
    assert out[~mask].count_nonzero() == 0


FAR = {  # numbers whose last 32 or 16 bits name an expert, and the ends of each dtype
    torch.int64: (2**32 + 3, 2**31, 2**63 - 1, -(2**63), -(2**32) + 3, -(2**31) - 1),
    torch.int32: (2**16 + 3, 2**31 - 1, -(2**31), -(2**16) + 3),
    torch.uint16: (2**16 - 1, 2**15),
    torch.uint32: (2**32 - 1, 2**31, 2**16 + 3),
    torch.uint64: (2**64 - 1, 2**63, 2**32 + 3),
}


@pytest.mark.parametrize("dtype", FAR, ids=str)
def test_numbers_that_no_expert_has(dtype, device):
    """They are looked at before they are narrowed."""
    model, x = Model().to(device), torch.randn(1, H, device=device)
    fine = torch.tensor([[[0, 1, 2], [3, 4, 5]]], dtype=dtype, device=device)
    with replay_routes(model, fine), torch.no_grad():
        model(x)
    assert torch.equal(pack_routes([fine]), fine.int())
    for far in FAR[dtype]:
        ids = torch.tensor([[[0, 1, 2], [3, far, 5]]], dtype=dtype, device=device)
        given = [ids, ids.cpu().numpy(), {"layers.0": ids[:, 0], "layers.1": ids[:, 1]}]
        for routes in given:
            with pytest.raises(ValueError, match=rf"layers.1 has experts 0 to 5, .*{min(far, 2**63 - 1)}"):
                replay_routes(model, routes)
        if -(2**31) <= far < 2**31:
            assert pack_routes([ids])[0, 1, 1] == far
        else:
            with pytest.raises(ValueError, match=r"sequences\[1\] has ids .* must fit int32"):
                pack_routes([fine, ids])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, *FAR], ids=str)
@pytest.mark.parametrize("num_experts", [4, 127, 128, 256, 300])
def test_ids_of_every_dtype(dtype, num_experts):
    """Also where the number of experts, or -1, does not fit the dtype of the ids."""
    model, x = MoE(H, 8, num_experts, 2), torch.randn(2, H)
    ids = torch.tensor([[0, 1], [2, 3]])
    with replay_routes(model, ids[:, None].to(dtype)), torch.no_grad():
        got = model(x)
    with replay_routes(model, ids[:, None]), torch.no_grad():
        assert torch.equal(model(x), got)


@pytest.mark.gpu
def test_numbers_that_no_expert_has_wait_for_replay(no_debug):
    """`pack_routes` waits for nothing, and leaves them out of range."""
    ids = torch.tensor([[[0, 2**32 + 3]], [[1, -(2**32) + 3]]], device="cuda")
    assert pack_routes([ids]).tolist() == [[[0, 2**31 - 1]], [[1, -(2**31)]]]


def test_given_numbers_that_no_expert_has_are_recorded_as_none(device):
    layer, ids = MoE(H, 8, E, K).to(device), torch.tensor([[0, 2**16 + 3, -(2**16) + 1]], device=device)
    with pytest.raises(ValueError, match="65539"), record_routes(layer) as routes:  # in debug mode on a GPU
        layer(torch.randn(1, H, device=device), expert_ids=ids)
    assert routes["MoE"][0].expert_ids.tolist() == [[0, -1, -1]]


class Reversed(Model):
    step = -1


def routes_of(model, x):
    with record_routes(model) as routes:
        model(x)
    return routes


def array_of(routes):
    """(tokens, layers, k), in the order of the dict, of the first call of each layer."""
    return torch.stack([calls[0].expert_ids for calls in routes.values()], 1)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_layers_that_run_in_another_order(reentrant):
    """Columns are bound by name or number; by registration only to passes in that order."""
    model, x = Reversed(reentrant), torch.randn(5, H, requires_grad=True)
    with record_routes(model) as routes:
        want = model(x)
        want.backward()
    other, array, (a, b) = moved(model), array_of(routes), routes
    other.zero_grad()
    with replay_routes(other, routes):
        want = other(x)
        want.backward()
    grads = gradients(other)
    as_run = array.flip(1)  # as an engine has them, which numbers layers as they run
    for layers in ([b, a], [1, 0], (1, 0), range(1, -1, -1), [b, 0], ["layers._orig_mod.1", 0]):
        with replay_routes(other, as_run, layers=layers):
            loss = other(x)
            loss.backward()
        assert torch.equal(loss, want)
        assert_same(gradients(other), grads)
    with replay_routes(other, array, layers=[a, b]), torch.no_grad():
        assert torch.equal(other(x), want)
    left = []
    for given in (array, as_run, [array, array]):
        early = pytest.raises(ValueError, match=r"layers.1 runs before layers.0, .* pass layers=")
        with early, replay_routes(other, given):
            left.append(other(x))
        assert not left and all(layer.routes is None for layer in other.layers)


def test_passes_that_overlap_run_in_order():
    """Each stage runs all micro-batches before the next one, and backward repeats them, the last first."""
    model, batches = Model(), [torch.randn(n, H) for n in (3, 5, 2)]
    with record_routes(model) as routes:
        for x in batches:
            model(x)
    arrays = [torch.stack(ids, 1) for ids in zip(*([r[0] for r in c] for c in routes.values()), strict=True)]
    other = moved(model)
    with replay_routes(other, routes):
        want = [other(x) for x in batches]
    with replay_routes(other, arrays):
        states = batches
        for layer in other.layers:
            states = [x + checkpoint(layer, x, use_reentrant=False) for x in states]
        losses = [x.square().mean() for x in states]
        for loss in losses[::-1]:
            loss.backward()
    assert_same(losses, want)


def test_stages_of_a_pipeline():
    """A stage has some of the layers, under their names, and takes its columns of the whole array."""
    model, x = Model(), torch.randn(5, H)
    with record_routes(model) as routes:
        want = model(x)
    other = moved(model)
    with replay_routes(other, routes):
        want = other(x)
    array, names = array_of(routes), list(routes)
    for i, name in enumerate(names):
        stage = nn.ModuleDict({"layers": nn.ModuleDict({str(i): other.layers[i]})})
        for given, layers in ((array, names), (array[:, [i]], [0]), (array[:, [i]], None)):
            with replay_routes(stage, given, layers=layers) as replay:
                y = x + other.layers[i](x)
            assert list(replay.differences()) == [name]
        x = y
    assert torch.equal(x.square().mean(), want)


def test_a_layer_that_a_pass_calls_twice_has_two_columns():
    layer, x = nn.Sequential(MoE(H, 8, E, K)), torch.randn(2, 5, H)
    columns = torch.rand(2, 5, 2, E).argsort(3)[..., :K]  # of two passes
    found = []
    layer[0].experts.register_forward_pre_hook(lambda _, args: found.append(args[2].rank.clone()))
    with replay_routes(layer, list(columns), layers=["0", "0"]):
        for batch in x:
            layer(layer(batch))
    want = [make_plan(ids, E).rank for array in columns for ids in array.unbind(1)]
    assert_same(found, want)


def test_a_layer_that_is_skipped_is_missed_at_once():
    model, x = Model(), torch.randn(5, H)
    array = array_of(routes_of(model, x))
    skipped = pytest.raises(ValueError, match=r"layers.1 runs before layers.0")
    with skipped, replay_routes(model, array):
        model.layers[1](x)
    at_end = pytest.raises(ValueError, match=r"layers.0 was called 0 times, routes have 1 calls")
    with at_end, replay_routes(model, array, layers=[0, 1]):
        model.layers[1](x)


def test_compiled_layers_that_run_in_another_order():
    torch.compiler.reset()
    model, x = Reversed(), torch.randn(5, H)
    routes = routes_of(model, x)
    compiled, array = torch.compile(moved(model), backend="aot_eager"), array_of(routes)
    compiled(x)
    with replay_routes(compiled, routes):
        want = compiled(x)
    with replay_routes(compiled, array.flip(1), layers=[1, 0]):
        assert torch.equal(compiled(x), want)
    with pytest.raises(ValueError, match="runs before"), replay_routes(compiled, array):
        compiled(x)


def test_mismatches():
    model, x = Model(), torch.randn(5, H)
    routes = routes_of(model, x)
    ids = routes["layers.0"][0].expert_ids
    array = torch.stack([ids, ids, ids], 1)

    def wrong(given, message, kind=ValueError, calls=1, **options):
        with pytest.raises(kind, match=message), replay_routes(model, given, **options):
            for _ in range(calls):
                model(x)
        assert all(layer.routes is None for layer in model.layers)

    wrong({"layers.0": ids}, "layer layers.1: the model has it, routes do not .2 layers, 1 in routes")
    wrong(routes | {"layers.7": ids}, "layer layers.7: routes have it, the model does not")
    wrong(routes | {"layers.1": ids[:4]}, "layers.1 gets 5 tokens, but its routes have 4")
    wrong(routes | {"layers.1": ids[:, :2]}, "layers.1 chooses 3 experts a token, but its routes have k=2")
    wrong(routes | {"layers.1": ids + 6}, "layers.1 has experts 0 to 5, but its routes have ids 6 to 11")
    wrong(routes | {"layers.1": ids - 9}, "layers.1 has experts 0 to 5")
    wrong(routes, "layers.0 is called once more, but routes have 1 of its calls", calls=2)
    wrong(routes, "layers.0 was called 0 times, routes have 1 calls", calls=0)
    wrong(array, "2 MoE layers, layers.0 to layers.1, one for each .* but routes are .tokens, layers=3, k.")
    wrong(array.float(), "routes must be integers", TypeError)
    wrong([[1]], "routes must be .tokens, layers, k., but it has shape .1,.")
    wrong({1, 2}, "routes must be tensors, NumPy arrays, .* not set", TypeError)
    order = "layers.0 to layers.1, and layers= names 3, but routes are .tokens, layers=2, k."
    wrong(array[:, :2], order, layers=[0, 1, "layers.7"])
    wrong(array[:, :2], "layers holds 2, but the model's MoE layers are 0 to 1", layers=[0, 2])
    wrong(array[:, :2], "layers holds -1", layers=[0, -1])
    wrong(array[:, :2], "layer layers.1: the model has it, layers= does not", layers=[0, "layers.7"])
    wrong(array[:, :2], "layer layers.0: the model has it, layers= does not", layers=[1, 1])
    wrong(array[:, :2], "layers must be names or numbers of layers, not bool", TypeError, layers=[0, True])
    wrong(array[:, :2], "layers must be a list or a tuple or a range, not str", TypeError, layers="layers.0")
    wrong(routes, "layers are given, but routes are a dict", layers=[0, 1])
    wrong(routes, "weights=True, but routes have no routing weights of layers.0", weights=True)
    wrong(routes | {"layers.1": Route(ids, torch.ones(4, 3))}, "layers.1 has ids .5, 3. but")
    with replay_routes(model, routes), pytest.raises(ValueError, match=r"layers.0 are .* already"):
        model(x)
        replay_routes(model, routes).__enter__()
    with pytest.raises(ValueError, match="model has no MoE layer, Linear"):
        record_routes(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no layer of the model has run"), record_routes(model):
        pass
    with pytest.raises(ValueError, match=r"sequences\[1\] has the routes of 3 tokens, but .* 5 tokens"):
        pack_routes([array, array[:3]], lengths=[5, 5])
    with pytest.raises(ValueError, match=r"sequences\[1\] is"):
        pack_routes([array, array[:, :2]])
    with pytest.raises(ValueError, match="mask has rows for 1 sequences, but sequences has 2"):
        pack_routes([array, array], mask=torch.ones(1, 5, dtype=torch.bool))
