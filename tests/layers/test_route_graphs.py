"""Routes in compiled graphs, without a graph break, and new ones without another graph."""

import copy

import pytest
import torch
from layers.test_route_replay import E, H, K, Model, array_of, moved, routes_of
from torch import nn
from torch._dynamo.utils import counters

from moe_aiter import Capacity, GroupLimit, MoE, Monitor, TopP, pack_routes, record_routes, replay_routes
from moe_aiter.layers import route_replay
from moe_aiter.layers.route_replay import Foreign


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    counters.clear()


def compiled(model):
    return torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)


def single(**options):
    """A model of one layer, which is compiled in half the time."""
    model = Model(**options)
    del model.layers[1]
    return model


def graphs():
    return counters["stats"]["unique_graphs"]


def trained(model, run, routes, batches, **options):
    """Losses, gradients and differences of the micro-batches, which are all in flight at once."""
    with replay_routes(model, routes, **options) as replay:
        losses = [run(x) for x in batches]
        for loss in losses[::-1]:
            loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return [loss.detach() for loss in losses], grads, replay.differences()


@pytest.mark.parametrize(
    "reentrant",
    [pytest.param(None, marks=pytest.mark.full), False, pytest.param(True, marks=pytest.mark.full)],
)
def test_replay_with_checkpoints_inside(reentrant):
    """The backward pass has the routes of its forward pass, and each replay has the same graphs."""
    model, batches = single(), [torch.randn(n, H, requires_grad=True) for n in (5, 5, 8)]
    with record_routes(model, weights=True) as routes:
        for x in batches:
            model(x)
    other = moved(model)
    want = trained(other, other, routes, batches)
    assert want[2]["layers.0"].choices > 0
    repeated = copy.deepcopy(other)
    repeated.reentrant = reentrant
    run = compiled(repeated)
    found = []
    for _ in range(2):
        got = trained(repeated, run, routes, batches)
        torch.testing.assert_close(got[:2], want[:2])
        assert got[2] == want[2]
        found.append(graphs())
    assert found == [2, 2]  # of one number of tokens, and of any
    late = {name: calls[::-1] for name, calls in routes.items()}
    got = trained(repeated, run, late, batches[::-1])
    torch.testing.assert_close(got[0], want[0][::-1])
    assert graphs() == 2


@pytest.mark.parametrize("reentrant", [pytest.param(False, marks=pytest.mark.full), True])
def test_replay_with_checkpoints_outside(reentrant):
    """Each compiled layer runs again in the backward pass."""
    model, batches = single(), [torch.randn(n, H, requires_grad=True) for n in (5, 8)]
    with record_routes(model) as routes:
        for x in batches:
            model(x)
    other = moved(model)
    want = trained(other, other, routes, batches)
    repeated = copy.deepcopy(other)
    repeated.reentrant = reentrant
    for layer in repeated.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    got = trained(repeated, repeated, routes, batches)
    torch.testing.assert_close(got[:2], want[:2])
    assert got[2] == want[2]
    with record_routes(repeated) as again:
        repeated(batches[0]).backward()
    assert len(again["layers.0"]) == 1
    late = pytest.raises(RuntimeError, match=r"layers.0 ran in a checkpointed region")
    one = {name: calls[:1] for name, calls in routes.items()}
    with late, replay_routes(repeated, one):
        loss = repeated(batches[0])
    del loss


def test_options():
    options = {"choice": GroupLimit(3, 2, "max"), "capacity": Capacity(0.7, "probability")}
    options |= {
        "score": "sigmoid",
        "selection_bias": True,
        "load_balance_coef": 0.1,
        "shared_intermediate": 8,
    }
    model, x = single(**options), torch.randn(2, 4, H, requires_grad=True)
    routes = routes_of(model, x)
    other = moved(model)
    want = trained(other, other, routes, [x])
    got = trained(other, compiled(other), routes, [x])
    torch.testing.assert_close(got[:2], want[:2])
    assert got[2] == want[2] and got[2]["layers.0"].choices > 0


def test_recording():
    model, batches = single(), [torch.randn(n, H) for n in (5, 8, 8)]
    with record_routes(model, weights=True) as want:
        losses = [model(x) for x in batches]
    run, found = compiled(model), []
    for _ in range(2):
        with record_routes(model, weights=True) as routes, torch.no_grad():
            for x in batches:
                run(x)
        for got, expected in zip(routes["layers.0"], want["layers.0"], strict=True):
            torch.testing.assert_close(got, expected)
        found.append(graphs())
    assert found == [2, 2]
    with record_routes(model) as routes, torch.no_grad():  # a graph need not know what is recorded
        run(batches[0])
    assert routes["layers.0"][0].routing_weights is None and graphs() == 2
    other = moved(model)
    run = compiled(other)
    with replay_routes(other, {name: calls[:1] for name, calls in want.items()}, weights=True):
        again = run(batches[0])
        again.backward()
    torch.testing.assert_close(again, losses[0])
    grad = other.layers[0].router.weight.grad
    assert grad is None or not grad.any()


def test_packed_sequences_and_padding():
    """Of packed sequences; a token without a route goes to no expert."""
    layer, lengths = MoE(H, 8, E, K), [3, 4]
    sequences = [torch.rand(n - 1, 1, E).argsort(2)[..., :K].to(torch.uint8).numpy() for n in lengths]
    packed, x = pack_routes(sequences, lengths=lengths), torch.randn(7, H)
    with replay_routes(layer, packed), torch.no_grad():
        want = layer(x)
    with replay_routes(layer, packed), torch.no_grad():
        got = compiled(layer)(x)
    torch.testing.assert_close(got, want)
    assert got[[2, 6]].count_nonzero() == 0


def test_loads():
    """One block for all steps: `load` begins anew, also with other numbers of tokens and calls."""
    model, batches = single(), [torch.randn(n, H, requires_grad=True) for n in (5, 8, 6)]
    arrays = [array_of(routes_of(model, x)) for x in batches]
    other = moved(model)
    want = [trained(other, other, array, [x]) for array, x in zip(arrays, batches, strict=True)]
    for run in (other, compiled(other)):
        with replay_routes(other, arrays[0], layers=[0]) as replay:
            for i, x in enumerate(batches):
                if i:
                    replay.load([arrays[i]])
                loss = run(x)
                loss.backward()
                torch.testing.assert_close(loss.detach(), want[i][0][0])
                torch.testing.assert_close([p.grad for p in other.parameters()], want[i][1])
                other.zero_grad()
            replay.load([arrays[0], arrays[1]])
            torch.testing.assert_close([run(x) for x in batches[:2]], [w[0][0] for w in want[:2]])
        assert replay.differences()["layers.0"].choices > 0
    with replay_routes(model, arrays[0]) as replay:
        with pytest.raises(ValueError, match=r"layers.0 was called 0 times, routes have 1 calls"):
            replay.load(arrays[1])
        model(batches[0])
        with pytest.raises(ValueError, match=r"layers.0 has experts 0 to 5, but its routes have ids"):
            replay.load(arrays[1] + E)
        replay.load(arrays[1])
        model(batches[1])


def test_what_a_cuda_graph_reads_stays_in_its_memory():
    """As after a capture, which a GPU alone can make."""
    model, x = Model(), torch.randn(5, H)
    arrays = [array_of(routes_of(model, torch.randn(5, H))) for _ in range(2)]
    with replay_routes(model, arrays[0]) as replay, torch.no_grad():
        model(x)
        for player in replay.players.values():
            player.captured = True
        memory = [player.calls[0].expert_ids for player in replay.players.values()]
        before = [t.data_ptr() for t in memory]
        replay.load(arrays[1])
        assert torch.equal(torch.stack(memory, 1), arrays[1])
        assert [player.calls[0].expert_ids.data_ptr() for player in replay.players.values()] == before
        shapes = (
            r"layers.0 is in a CUDA graph with routes and weights of shapes .*5, 3.*, but these are .*4, 3"
        )
        with pytest.raises(ValueError, match=shapes):
            replay.load(arrays[0][:4])
        with pytest.raises(ValueError, match=r"layers.0 is in a CUDA graph"):
            replay.load(arrays[0], weights=torch.ones(5, 2, K))
        assert torch.equal(torch.stack(memory, 1), arrays[1])


def test_errors_name_the_layer():
    """Raised by the call itself, as without compilation."""
    model, x = single(), torch.randn(5, H)
    array = array_of(routes_of(model, x))
    run = compiled(model)

    def wrong(given, message, calls=1, **options):
        with pytest.raises(ValueError, match=message), replay_routes(model, given, **options):
            for _ in range(calls):
                run(x)

    with replay_routes(model, array):
        run(x)
    wrong(array[:4], r"layers.0 gets 5 tokens, but its routes have 4")
    wrong(array, r"layers.0 is called once more, but routes have 1 of its calls", calls=2)
    wrong([array, array], r"layers.0 was called 1 times, routes have 2 calls")


def test_routes_of_another_width():
    """The graph has one k, where a router chooses any number of experts."""
    layer, x, ids = MoE(H, 8, E, K, choice=TopP(0.5)), torch.randn(2, H), torch.tensor([[0, 1], [2, 3]])
    narrow = pytest.raises(ValueError, match="MoE has routes with k=2 and with k=1, and its graph is")
    with narrow, replay_routes(layer, {"MoE": [ids, ids[:, :1]]}):
        number = layer.routes.use.number
        for _ in range(2):
            torch.ops.moe_aiter.take_route(x, number, 2, False)


@pytest.mark.parametrize("op", ["take_route", "keep_route"])
def test_no_cuda_graph_of_torch_compile_captures_them(op):
    """A replay would not ask for the next route."""
    assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.moe_aiter, op).default.tags


def test_without_tokens():
    """A rank may have none: the call takes its route."""
    layer, x = MoE(H, 8, E, K), torch.randn(3, H)
    routes = {"MoE": [torch.zeros(0, K).int(), torch.tensor([[0, 1, 2]] * 3)]}
    run = compiled(layer)
    with replay_routes(layer, routes), torch.no_grad():
        want = [layer(x[:0]), layer(x)]
    for _ in range(2):
        with replay_routes(layer, routes), torch.no_grad():
            torch.testing.assert_close([run(x[:0]), run(x)], want)


@pytest.mark.parametrize(
    "compiles, reentrant",
    [(False, None), (False, False), (True, None), pytest.param(True, False, marks=pytest.mark.full)],
)
def test_a_monitor_counts_mismatches(compiles, reentrant):
    """As `differences` does, once for each call, and in training mode alone."""
    model, x = single(), torch.randn(9, H, requires_grad=True)
    routes = routes_of(model, x)
    for calls in routes.values():
        calls[0].expert_ids[4] = -1  # counts nowhere
    other = moved(model)
    other.reentrant = reentrant
    run = compiled(other) if compiles else other
    with Monitor(other) as monitor:
        run(x).backward()
        assert monitor.read()["layers.0"].mismatch_rate is None
        with replay_routes(other, routes) as replay:
            run(x).backward()
        read = monitor.read()
        for name, layer in replay.differences().items():
            assert layer == (read[name].mismatch_rate, read[name].token_mismatch_rate)
            assert 0 < layer.choices < layer.tokens <= 1
        assert {"mismatch_rate", "token_mismatch_rate"} <= read["layers.0"].scalars().keys()
        other.eval()
        with replay_routes(other, routes), torch.no_grad():
            run(x)
        assert monitor.read()["layers.0"][-2:] == read["layers.0"][-2:]
        monitor.reset()
        assert monitor.read()["layers.0"].token_mismatch_rate is None


class ForeignExperts(nn.Module):
    """Experts of another package, which are told where to send tokens."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, H, H) / H)

    def forward(self, x, top_k_index, top_k_weights):
        one_hot = nn.functional.one_hot(top_k_index, E + 1)[..., :E].to(x.dtype)
        scale = torch.einsum("tke,tk->te", one_hot, top_k_weights)
        return torch.einsum("te,th,ehi->ti", scale, x, self.weight)


class ForeignBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(H, E, bias=False), ForeignExperts()

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(K)
        return x + self.experts(x, ids, weights)


@pytest.fixture
def foreign(monkeypatch):
    kind = Foreign(1, 2, E, dropped=lambda module: E)
    finders = {"": lambda m: kind if isinstance(m, ForeignExperts) else None}
    monkeypatch.setattr(route_replay, "FINDERS", finders)
    return nn.Sequential(ForeignBlock(), ForeignBlock())


@pytest.mark.parametrize("weights", [False, pytest.param(True, marks=pytest.mark.full)])
def test_layers_of_other_packages(foreign, weights):
    """Their graphs too serve all replays, and each record."""
    x, counts = torch.randn(5, H), []
    run = compiled(foreign)
    run(x)
    for _ in range(2):
        with record_routes(foreign, weights=True) as routes:
            run(x)
        counts.append(graphs())
    assert list(routes) == ["0.experts", "1.experts"] and len(routes["0.experts"]) == 1
    routes["1.experts"][0].expert_ids[2] = -1
    with torch.no_grad():
        for block in foreign:
            block.gate.weight += torch.randn(E, H)
    want = trained(foreign, lambda x: foreign(x).square().mean(), routes, [x], weights=weights)
    for _ in range(2):
        got = trained(foreign, lambda x: run(x).square().mean(), routes, [x], weights=weights)
        torch.testing.assert_close(got[:2], want[:2])
        assert got[2] == want[2] and got[2]["1.experts"].choices > 0
        counts.append(graphs())
    assert counts == [2, 2, 3, 3]
    assert not any("forward" in vars(m) for m in foreign.modules())


@pytest.mark.parametrize("k", [2, 3])
def test_one_group_whose_score_is_a_topk(foreign, monkeypatch, k):
    """Of tokens (B, S, H), as torchtitan's router ranks them; routes without the best expert."""

    def forward(block, x):
        scores = block.gate(x).softmax(-1)
        scores.view(-1, 1, E).topk(2)  # the group's
        ids = scores.topk(k)[1]
        out = block.experts(x.view(-1, H), ids.view(-1, k), scores.gather(-1, ids).view(-1, k))
        return x + out.view_as(x)

    monkeypatch.setattr(ForeignBlock, "forward", forward)
    block, x = foreign[0], torch.randn(5, 1, H)
    scores = block.gate(x.view(-1, H)).softmax(-1)
    ids = scores.topk(k + 1)[1][:, 1:]
    want = x + block.experts(x.view(-1, H), ids, scores.gather(-1, ids)).view_as(x)
    for run in (block, compiled(block)):
        with replay_routes(block, {"experts": ids}) as replay:
            torch.testing.assert_close(run(x), want)
        assert replay.players["experts"].totals.tolist() == [5, 5 * k, 5, 5]


def test_a_block_that_does_not_choose_by_topk(foreign):
    foreign[0].forward = lambda x: foreign[0].experts(x, torch.arange(K).expand(5, K), torch.ones(5, K))
    given = pytest.raises(ValueError, match=r"0.experts has chosen its experts without torch.topk")
    with given, replay_routes(foreign, torch.zeros(5, 2, K).int()):
        foreign(torch.randn(5, H))
    assert "forward" in vars(foreign[0]) and "forward" not in vars(foreign[1])
