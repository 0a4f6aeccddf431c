"""Routes in the forms in which engines and frameworks hand them over; samples as they have recorded them."""

import base64
import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from layers.test_route_replay import E, H, K, Model, array_of, assert_same, moved, routes_of

from moe_aiter import MoE, Route, pack_routes, record_routes, replay_routes

LAYERS = 2
SHAPE = 4, LAYERS, K  # of the samples: (tokens, layers, k)
IDS = [
    [[5, 0, 3], [1, 2, 4]],
    [[2, 1, 0], [5, 3, 0]],
    [[4, 5, 1], [0, 1, 2]],
    [[0, 3, 2], [4, 0, 5]],
]
# SGLang's text for IDS: int32, flat
SGLANG = (
    "BQAAAAAAAAADAAAAAQAAAAIAAAAEAAAAAgAAAAEAAAAAAAAABQAAAAMAAAAAAAAABAAAAAUAAAABAAAAAAAAAAEAAAACAAAAAAAAAAMAAAACAAAA"
    "BAAAAAAAAAAFAAAA"
)
PRIME_RL = {"data": "BQADAQIEAgEABQMABAUBAAECAAMCBAAF", "shape": [4, 2, 3], "start": 0, "dtype": "uint8"}


def npy(array):
    """A .npy file as text, which vLLM's server answers with."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def raw(array):
    return base64.b64encode(array.tobytes()).decode()


def numpy(dtype):
    return np.array(IDS, dtype)


FORMS = {  # that say their shape
    "vLLM, up to 256 experts": numpy("uint8"),
    "vLLM, more experts": numpy("uint16"),
    "vLLM, older": numpy("int16"),
    "vLLM's server": npy(numpy("uint8")),
    "vLLM's server, more experts": npy(numpy("uint16")),
    "a .npy file's bytes": base64.b64decode(npy(numpy("int32"))),
    "prime-rl's server": PRIME_RL,
    "prime-rl's server, more experts": PRIME_RL | {"data": raw(numpy("uint16")), "dtype": "uint16"},
    "prime-rl's server at first": {"data": PRIME_RL["data"], "shape": [4, 2, 3]},
    "prime-rl's trainer": SimpleNamespace(data=numpy("uint8").tobytes(), shape=[4, 2, 3], dtype="uint8"),
    "slime, Miles": numpy("int32"),
    "lists": IDS,
    "a tensor of 64 bits": torch.tensor(IDS),
    "read-only": np.frombuffer(numpy("int32").tobytes(), "int32").reshape(SHAPE),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    array, model, x = FORMS[form], Model(), torch.randn(4, H)
    with replay_routes(model, torch.tensor(IDS)), torch.no_grad():
        want = model(x)
    assert pack_routes([array]).tolist() == IDS
    for given in (array, [array]):
        with replay_routes(model, given), torch.no_grad():
            assert torch.equal(model(x), want)


def test_numbers_without_a_shape():
    assert pack_routes([SGLANG], shape=(LAYERS, K)).tolist() == IDS
    assert pack_routes([base64.b64decode(SGLANG)], shape=(LAYERS, K)).tolist() == IDS
    assert pack_routes([raw(numpy("uint8"))], shape=(LAYERS, K), dtype="uint8").tolist() == IDS
    assert pack_routes([SGLANG, ""], shape=(LAYERS, K)).shape == SHAPE  # a prompt of one token, none sampled
    one_less = pack_routes([SGLANG, SGLANG], lengths=[5, 4], shape=(LAYERS, K))
    assert one_less.tolist() == [*IDS, [[-1] * K] * LAYERS, *IDS]
    with pytest.raises(ValueError, match=r"routes is 96 bytes without a shape: pass pack_routes"):
        replay_routes(Model(), SGLANG)
    with pytest.raises(ValueError, match=r"sequences\[0\] is 96 bytes, but 2 tokens of int32 .2, 5. have 80"):
        pack_routes([SGLANG], shape=(2, 5))
    with pytest.raises(ValueError, match=r"sequences\[0\] is 24 bytes, but 5 tokens of uint8 .2, 3. have 30"):
        pack_routes([PRIME_RL | {"shape": [5, 2, 3]}])
    with pytest.raises(ValueError, match=r"unknown sequences\[0\]: dtype 'int'"):
        pack_routes([PRIME_RL | {"dtype": "int"}])
    with pytest.raises(ValueError, match=r"shape must be .layers, k., but it is .2,."):
        pack_routes([SGLANG], shape=(2,))
    with pytest.raises(ValueError, match=r"sequences\[1\] is text, but not base64"):
        pack_routes([SGLANG, "routes?"], shape=(LAYERS, K))
    with pytest.raises(ValueError, match=r"sequences\[0\] begins at token 2: join"):
        pack_routes([PRIME_RL | {"start": 2}])
    with pytest.raises(ValueError, match="the lists do not form one"):
        replay_routes(Model(), [[[1, 2, 3], [1, 2]]])


def test_layers_first():
    """Where the first axis alone is that of the layers, an array says so itself."""
    model, x, by_layer = Model(), torch.randn(4, H), torch.tensor(IDS).transpose(0, 1)
    with replay_routes(model, torch.tensor(IDS)), torch.no_grad():
        want = model(x)
    for given, layers_first in ((by_layer, None), (by_layer, True), (by_layer.tolist(), None)):
        with replay_routes(model, given, layers_first=layers_first), torch.no_grad():
            assert torch.equal(model(x), want)
    assert pack_routes([by_layer.numpy()], layers_first=True).tolist() == IDS
    with pytest.raises(ValueError, match=r"routes are .tokens, layers=4, k."):
        replay_routes(model, by_layer, layers_first=False)
    square = torch.tensor(
        IDS[:2]
    )  # as many tokens as layers: (tokens, layers, k), unless the caller says more
    for layers_first in (None, False, True):
        with replay_routes(model, square, layers_first=layers_first), torch.no_grad():
            got = model(x[:2])
        turned = square.transpose(0, 1) if layers_first else square
        with replay_routes(model, {f"layers.{i}": turned[:, i] for i in range(LAYERS)}), torch.no_grad():
            assert torch.equal(model(x[:2]), got)


def test_batches_of_frameworks():
    """verl's and NeMo-RL's (batch, tokens, layers, k), padded or nested."""
    batch = torch.tensor([IDS, IDS[::-1]])
    mask = torch.tensor([[False, True, True, True], [True, True, False, False]])
    want = torch.cat([batch[0], batch[1]]).masked_fill(~mask.flatten()[:, None, None], -1)
    for dtype in (torch.uint8, torch.int16, torch.int64):
        assert torch.equal(pack_routes(batch.to(dtype), mask=mask), want.int())
    nested = torch.nested.as_nested_tensor([batch[0, 1:], batch[1, :2]], layout=torch.jagged)
    assert torch.equal(pack_routes(nested, mask=mask), want.int())
    assert torch.equal(pack_routes(nested), want[mask.flatten()].int())
    model, x = Model(), torch.randn(2, 4, H)
    with replay_routes(model, batch), torch.no_grad():
        got = model(x)
    with replay_routes(model, batch.flatten(0, 1)), torch.no_grad():
        assert torch.equal(model(x), got)
    with pytest.raises(ValueError, match=r"a padded batch: pass mask"):
        pack_routes(batch)
    with pytest.raises(ValueError, match=r"sequences is .2, 4, 2, 3. but mask is .1, 4."):
        pack_routes(batch, mask=mask[:1])


def test_calls_of_lists():
    model, x = Model(), torch.randn(4, H)
    with replay_routes(model, torch.tensor(IDS)), torch.no_grad():
        want = model(x)
    of_layers = [[token[layer] for token in IDS] for layer in range(LAYERS)]
    for calls in (of_layers, [[ids] for ids in of_layers]):
        with replay_routes(model, dict(zip(("layers.0", "layers.1"), calls, strict=True))), torch.no_grad():
            assert torch.equal(model(x), want)


def test_weights_beside_ids():
    """In every form of ids; of padding they are 0."""
    model, x = Model(), torch.randn(4, H)
    with record_routes(model, weights=True) as routes:
        want = model(x)
    other, ids = moved(model), array_of(routes)
    given = torch.stack([calls[0].routing_weights for calls in routes.values()], 1).detach()
    array = given.numpy()
    packed = pack_routes([raw(array)], shape=(LAYERS, K), dtype="float32")
    assert packed.dtype == torch.float32 and torch.equal(packed, given)
    fields = {"data": raw(array), "shape": array.shape, "dtype": "float32"}
    by_layer = {name: given[:, i] for i, name in enumerate(routes)}
    for weights in (
        given,
        array,
        [given],
        npy(array),
        fields,
        given.tolist(),
        given.transpose(0, 1),
        by_layer,
    ):
        with replay_routes(other, ids, weights=weights):
            loss = other(x)
            loss.backward()
        assert torch.equal(loss, want) and other.layers[0].router.weight.grad is None
    short = pack_routes([given[:-1]], lengths=[4])
    assert torch.equal(short[:-1], given[:-1]) and short[-1].count_nonzero() == 0
    for weights, message, kind in (
        (given[:3], r"layers.0 has ids .4, 3. but routing weights .3, 3.", ValueError),
        (ids, "weights must be floating, not torch.int16", TypeError),
        ([given, given], "layers.0 has routes of 1 calls but weights of 2", ValueError),
        ({"layers.0": given[:, 0]}, "layer layers.1: the model has it, weights do not", ValueError),
    ):
        with pytest.raises(kind, match=message):
            replay_routes(other, ids, weights=weights)
    with pytest.raises(TypeError, match=r"sequences\[1\] must be floating"):
        pack_routes([given, ids])


def zigzag(lengths, rank, ranks):
    """The tokens of packed sequences that a rank has in ring attention: its chunk from either end of each."""
    parts, start = [], 0
    for length in lengths:
        chunks = torch.arange(start, start + length).chunk(2 * ranks)
        parts += [chunks[rank], chunks[2 * ranks - 1 - rank]]
        start += length
    return torch.cat(parts)


@pytest.mark.parametrize("weights", [False, True])
def test_slices_of_context_parallelism(weights):
    """Each rank replays the tokens that it has, in its order."""
    model, lengths, ranks = Model(), [8, 12], 2
    x = torch.randn(20, H)
    with record_routes(model, weights=True) as routes:
        model(x)
    other, want = moved(model), []
    hooks = [layer.register_forward_hook(lambda _, args, out: want.append(out)) for layer in other.layers]
    with replay_routes(other, routes, weights=weights), torch.no_grad():
        other(x)
    full = want.copy()
    for rank in range(ranks):
        order = zigzag(lengths, rank, ranks)
        half = slice(rank * 10, rank * 10 + 10)
        for tokens, index in (
            (order, order),
            (order.numpy(), order),
            (order.tolist(), order),
            (lambda t, index=order: t[index], order),
            (lambda t, half=half: t[half], half),
        ):
            want.clear()
            with replay_routes(other, routes, tokens=tokens, weights=weights) as replay, torch.no_grad():
                other(x[index])
            for got, of_all in zip(want, full, strict=True):
                torch.testing.assert_close(got, of_all[index])
            assert replay.differences()["layers.0"].tokens > 0
    for hook in hooks:
        hook.remove()
    for index, message in (([20], "20 to 20, but the routes are those of 20 tokens"), ([-1], "-1 to -1")):
        with pytest.raises(ValueError, match=message):
            replay_routes(model, routes, tokens=index)
    whole = pytest.raises(ValueError, match=r"layers.0 gets 20 tokens, but its routes have 10")
    with whole, replay_routes(model, routes, tokens=order):
        model(x)
    with pytest.raises(TypeError, match=r"what tokens returns for layers.0 must be a tensor, not int"):
        replay_routes(model, routes, tokens=len)
    with pytest.raises(TypeError, match="tokens must be integers"):
        replay_routes(model, routes, tokens=torch.ones(20))


def test_slices_of_arrays():
    """Also of a padded batch, whose columns are sliced before they are those of layers."""
    model, x = Model(), torch.randn(2, 4, H)
    batch = torch.tensor([IDS, IDS[::-1]])
    with replay_routes(model, batch[:, 1:3]), torch.no_grad():
        want = model(x[:, 1:3])
    with replay_routes(model, batch, tokens=[1, 2, 5, 6]), torch.no_grad():
        assert torch.equal(model(x[:, 1:3]), want)


def test_routes_are_kept_apart_from_what_was_given():
    layer, x = MoE(H, 8, E, K), torch.randn(4, H)
    given = Route(torch.tensor([ids[0] for ids in IDS]), torch.rand(4, K))
    with replay_routes(layer, {"MoE": given}, weights=True), torch.no_grad():
        want = layer(x)
    with replay_routes(layer, {"MoE": given}, weights=True), torch.no_grad():
        given.expert_ids.zero_()
        given.routing_weights.zero_()
        assert_same([layer(x)], [want])


def test_columns_of_several_passes():
    """A list of arrays of any form is one of passes."""
    model, x = Model(), torch.randn(4, H)
    array = array_of(routes_of(model, x))
    for passes in ([array, array.numpy()], (array.tolist(), npy(array.numpy()))):
        with replay_routes(model, passes) as replay, torch.no_grad():
            assert torch.equal(model(x), model(x))
        assert replay.differences()["layers.1"] == (0, 0)


def test_numpy_arrays_that_torch_does_not_take():
    assert pack_routes([numpy(">i4"), numpy("int32")[::-1]]).tolist() == IDS + IDS[::-1]


@pytest.mark.parametrize("data", [24, None, [0] * 24])
def test_data_that_is_no_bytes(data):
    with pytest.raises(TypeError, match=r"the data of sequences\[0\] must be bytes or base64, not"):
        pack_routes([PRIME_RL | {"data": data}])


@pytest.mark.parametrize("shape", [12, "423", [], [4.0, 2, 3], [4, -2, -3], [-1, 2, 3]])
def test_a_shape_that_is_none(shape):
    with pytest.raises(ValueError, match=r"the shape of sequences\[0\] must be .tokens, layers, k., but"):
        pack_routes([PRIME_RL | {"shape": shape}])


def test_arrays_that_are_not_dense():
    ids = torch.tensor(IDS)
    with pytest.raises(ValueError, match=r"routes is a nested tensor: pass pack_routes"):
        replay_routes(Model(), torch.nested.nested_tensor([ids], layout=torch.jagged))
    with pytest.raises(ValueError, match=r"routes must be dense, not torch\.sparse_coo"):
        replay_routes(Model(), ids.to_sparse())
    with pytest.raises(ValueError, match="the lists do not form one"):
        replay_routes(Model(), [[[None, 1, 2]] * 2])
    with pytest.raises(ValueError, match="routes is text, but not base64"):
        replay_routes(Model(), "é")


def test_what_tokens_returns_is_looked_at():
    """An id that no expert has would drop a choice."""
    ids, weights = torch.tensor(IDS), torch.rand(SHAPE)
    for change, error, words in (
        (lambda t: t + E, ValueError, rf"experts 0 to {E - 1}, but its routes have ids {E} to"),
        (lambda t: t.float(), TypeError, r"what tokens returns for .* must be integers"),
    ):
        with pytest.raises(error, match=words):
            replay_routes(Model(), ids, tokens=change)
    with pytest.raises(ValueError, match=r"what tokens returns for .*, of weights, is .2, 3. but must be .4"):
        replay_routes(Model(), ids, weights=weights, tokens=lambda t: t[:2] if t.is_floating_point() else t)


def test_weights_of_a_route_in_any_form():
    model, x, ids, weights = Model(), torch.randn(4, H), torch.tensor(IDS), torch.rand(SHAPE)
    names, outs = list(routes_of(model, x)), []
    for form in (lambda t: t, lambda t: t.tolist()):
        routes = {name: Route(form(ids[:, n]), form(weights[:, n])) for n, name in enumerate(names)}
        with replay_routes(model, routes, weights=True), torch.no_grad():
            outs.append(model(x))
    assert torch.equal(*outs)
