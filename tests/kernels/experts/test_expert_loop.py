"""The expert loop against the double loop over tokens and choices, with its steps in torch and in C++."""

import functools

import pytest
import torch
from check import assert_as_good_as_torch, error, with_gradients
from shapes import KINDS, spread, transposed

from moe_aiter.kernels.base.activations import get_activation
from moe_aiter.kernels.base.host import ext
from moe_aiter.kernels.experts import cpu
from moe_aiter.kernels.experts.cpu import HostSteps, expert_loop_op
from moe_aiter.kernels.experts.inputs import ExpertInputs
from moe_aiter.kernels.grouped import tgmm
from moe_aiter.kernels.rows.sort import sort_by_expert
from moe_aiter.op import use

pytestmark = pytest.mark.no_interpreter
NAMES = ExpertInputs._fields[:6]  # the inputs that have gradients


@pytest.fixture(params=["torch", "host", "workers"])
def steps(request, monkeypatch):
    """Steps in torch, in C++, and that by three workers; and blocks so small that experts have several."""
    backend = "torch" if request.param == "torch" else "host"
    if backend == "host" and ext is None:
        pytest.skip("the C++ extension is not built")
    monkeypatch.setattr(cpu, "BLOCK_ROWS", 4)
    monkeypatch.setattr(cpu, "num_threads", lambda: 3)
    workers = 3 if request.param == "workers" else 1
    monkeypatch.setattr(HostSteps, "num_workers", lambda self, rows, multiplications: workers)
    with use(backend):
        yield backend


def make(ids, H=20, I=12, E=5, kind=("swiglu", False), dtype=torch.float32, bias=True, **named):  # noqa: E741
    """Inputs of modest size for these experts; the routing weights are float32 at least."""
    width = get_activation(kind[0]).projections * I
    tensors = {
        "x": torch.randn(len(ids), H),
        "gate_up": torch.randn(E, width, H) * H**-0.5,
        "gate_up_bias": torch.randn(E, width) if bias else None,
        "down": torch.randn(E, H, I) * I**-0.5,
        "down_bias": torch.randn(E, H) if bias else None,
    }
    tensors = {name: None if t is None else t.to(dtype) for name, t in tensors.items()}
    weights = torch.rand(ids.shape).to(torch.promote_types(dtype, torch.float32))
    plan = dict(zip(("order", "rank", "group_sizes"), sort_by_expert(ids, E), strict=True))
    options = dict(activation=kind[0], interleaved=kind[1], save_z=True)
    return ExpertInputs(**tensors, routing_weights=weights, **plan, **options)._replace(**named)


def random_ids(T=17, k=3, E=5):
    """Choices with repeats in a token, and some dropped."""
    return torch.randint(-1, E, (T, k))


def run(i: ExpertInputs, *floats):
    """The output alone, with these in the place of the inputs that have gradients."""
    named = dict(zip(NAMES, floats, strict=True)) if floats else {}
    return expert_loop_op(*i._replace(**named))[0]


def double_loop(ids, i, *floats):
    """The meaning: one token, one choice at a time."""
    x, gate_up, gate_up_bias, down, down_bias, weights = floats
    act, rows = get_activation(i.activation), []
    for t, experts in enumerate(ids.tolist()):
        row = x[t] * 0
        for j, e in enumerate(experts):
            if e >= 0:
                z = gate_up[e] @ x[t] + (0 if gate_up_bias is None else gate_up_bias[e])
                y = down[e] @ act(z, i.interleaved) + (0 if down_bias is None else down_bias[e])
                row = row + weights[t, j].to(x.dtype) * y
        rows.append(row)
    return torch.stack(rows)


def compare(ids, i):
    ours, meaning = functools.partial(run, i), functools.partial(double_loop, ids, i)
    assert_as_good_as_torch(with_gradients(ours), with_gradients(meaning), *i[:6], floor=2e-7)


def gradients(i: ExpertInputs, *names):
    """Output and the gradients of the named inputs, for a fixed gradient of the output."""
    leaves = {name: getattr(i, name).detach().requires_grad_() for name in names}
    out = run(i._replace(**leaves))
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
    return out.detach(), *torch.autograd.grad(out, list(leaves.values()), dout)


def exact_gradients(i: ExpertInputs, *names):
    """The same, without the output, in float64."""
    tensors = {name: t for name, t in i._asdict().items() if isinstance(t, torch.Tensor)}
    doubles = {name: t.double() for name, t in tensors.items() if t.is_floating_point()}
    with use("torch"):
        return gradients(i._replace(**doubles), *names)[1:]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.pairwise
def test_activations(steps, kind, bias):
    ids = random_ids()
    compare(ids, make(ids, kind=kind, bias=bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(steps, dtype):
    if steps == "host" and dtype != torch.bfloat16:
        pytest.skip(f"the C++ extension has no {dtype}")
    ids = random_ids(40)
    compare(ids, make(ids, H=32, I=24, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_products_are_float32_where_16_bits_are_slow(steps, dtype, monkeypatch):
    if steps == "host" and dtype != torch.bfloat16:
        pytest.skip(f"the C++ extension has no {dtype}")

    def multiply(out, *operands):
        assert out.dtype.itemsize > 2
        return fast(out, *operands)

    fast = tgmm.multiply_in_place
    monkeypatch.setattr(tgmm, "multiply_in_place", multiply)
    monkeypatch.setattr(tgmm, "fast_on_cpu", lambda dtype: dtype.itemsize > 2)
    ids = random_ids()
    compare(ids, make(ids, dtype=dtype))


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_float64_weights(steps, kind):
    """They are used in float32, the dtype of sums of rows in float32."""
    ids = random_ids()
    i = make(ids, kind=(kind, False))
    compare(ids, i._replace(routing_weights=i.routing_weights.double()))


ROUTINGS = {
    "one choice": torch.tensor([[2]]),
    "one expert takes all": torch.full((9, 2), 3),
    "one expert twice in a token": torch.tensor([[1, 1], [0, 0], [1, 2], [1, 1], [1, 1], [4, 1]]),
    "empty experts": torch.tensor([[1, 3]] * 6),
    "everything dropped": torch.full((3, 2), -1),
    "int32": random_ids().int(),
}


@pytest.mark.parametrize("ids", ROUTINGS.values(), ids=ROUTINGS)
def test_routings(steps, ids):
    compare(ids, make(ids))


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (64, 33)], ids=str)
def test_odd_sizes(steps, shape):
    ids = random_ids()
    compare(ids, make(ids, *shape))


def test_experts_without_rows_get_exact_zeros(steps):
    """Outputs are poisoned in tests, so what nobody writes is NaN."""
    i = make(torch.tensor([[1, 3]] * 6))
    _, *grads = gradients(i, "gate_up", "gate_up_bias", "down", "down_bias")
    for grad in grads:
        assert (grad[[0, 2, 4]] == 0).all()
        assert (grad[[1, 3]] != 0).any(-1).all()


def test_no_tokens(steps):
    i = make(torch.empty(0, 2, dtype=torch.int64))
    out, *grads = gradients(i, *NAMES)
    assert out.shape == (0, 20)
    for grad, name in zip(grads, NAMES, strict=True):
        assert torch.equal(grad, torch.zeros_like(getattr(i, name)))


def test_z_is_kept_or_computed_again(steps):
    """The same bits either way; the rows of z that belong to nobody are zeros."""
    ids = random_ids()
    i = make(ids)
    z = expert_loop_op(*i)[1]
    assert z.shape == (ids.numel(), 24) and (z[i.order < 0] == 0).all()
    assert expert_loop_op(*i._replace(save_z=False))[1].shape == (0, 24)
    for a, b in zip(gradients(i, *NAMES), gradients(i._replace(save_z=False), *NAMES), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("frozen", [*NAMES, "all but x", "all but down", "all but gate_up"])
def test_frozen_inputs(steps, frozen):
    """They get no gradient, and the others' do not change."""
    i = make(random_ids())
    all_of_them = dict(zip(NAMES, gradients(i, *NAMES)[1:], strict=True))
    trained = [n for n in NAMES if n != frozen and ("all but" not in frozen or frozen.endswith(f" {n}"))]
    for name, grad in zip(trained, gradients(i, *trained)[1:], strict=True):
        assert torch.equal(grad, all_of_them[name]), name


def test_the_backward_op_computes_only_what_is_needed(steps):
    i = make(random_ids())
    out, z = expert_loop_op(*i)
    grads = torch.ops.moe_aiter.expert_loop_backward(out, z, *i, [False] * 6)
    assert [g.numel() for g in grads] == [0, 0, 0, 0, 0, i.rank.numel()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_gradients(steps, dtype):
    """Two backward passes add up in float32, onto what was there; the weights get no gradient."""
    i = make(random_ids(30), dtype=dtype, bias=False)
    once = exact_gradients(i, "gate_up", "down")
    mains = [torch.ones_like(t, dtype=torch.float32) for t in (i.gate_up, i.down)]
    gate_up, down, x = (t.clone().requires_grad_() for t in (i.gate_up, i.down, i.x))
    with_mains = i._replace(
        x=x, gate_up=gate_up, down=down, gate_up_main_grad=mains[0], down_main_grad=mains[1]
    )
    dout = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for _ in range(2):
        run(with_mains).backward(dout)
    assert gate_up.grad is None and down.grad is None and x.grad is not None
    for main, grad in zip(mains, once, strict=True):
        empty = (i.group_sizes == 0).nonzero().flatten()
        assert (main[empty] == 1).all()
        assert error(main - 1, 2 * grad) < (1e-6 if dtype == torch.float32 else 1e-2)


def test_main_gradients_alone(steps):
    """No other gradient is asked for."""
    i = make(random_ids(), bias=False)
    (want,) = gradients(i, "down")[1:]
    main = torch.zeros_like(i.down)
    i = i._replace(down=i.down.clone().requires_grad_(), down_main_grad=main)
    dout = torch.randn(i.x.shape, generator=torch.Generator().manual_seed(0))
    run(i).backward(dout)
    torch.testing.assert_close(main, want)


@pytest.mark.parametrize("layout", [transposed, spread])
def test_any_strides(steps, layout):
    i = make(random_ids())
    want = gradients(i, *NAMES)
    strided = i._replace(**{name: layout(getattr(i, name)) for name in NAMES})
    strided = strided._replace(order=torch.stack([i.order] * 2, 1)[:, 0], group_sizes=i.group_sizes.long())
    for got, expected in zip(gradients(strided, *NAMES), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_gradient_of_stride_0(steps):
    i = make(random_ids())
    x = i.x.clone().requires_grad_()
    run(i._replace(x=x)).sum().backward()
    copy = i.x.clone().requires_grad_()
    run(i._replace(x=copy)).backward(torch.ones_like(copy))
    assert torch.equal(x.grad, copy.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_determinism(steps, dtype):
    i = make(random_ids(200, 4), H=130, I=70, dtype=dtype)
    for first, second in zip(gradients(i, *NAMES), gradients(i, *NAMES), strict=True):
        assert torch.equal(first, second)


def test_sums_of_several_blocks_are_rounded_once(steps):
    """bfloat16 weight gradients over 300 blocks: no worse than one product, which sums in float32."""
    ids = torch.zeros(1200, 1, dtype=torch.int64)
    i = make(ids, H=8, I=8, E=1, dtype=torch.bfloat16, bias=False)
    exact = exact_gradients(i, "gate_up", "down")
    for got, want in zip(gradients(i, "gate_up", "down")[1:], exact, strict=True):
        assert error(got, want) < 6e-3


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_gradcheck(kind):
    i = make(random_ids(5, 2, 3), H=4, I=3, E=3, kind=kind, dtype=torch.float64)
    floats = [t.requires_grad_() for t in i[:6]]
    for save_z in (True, False):
        fn = functools.partial(run, i._replace(save_z=save_z))
        assert torch.autograd.gradcheck(fn, floats)


def test_opcheck(steps):
    i = make(random_ids())
    trained = i._replace(**{name: getattr(i, name).clone().requires_grad_() for name in NAMES})
    torch.library.opcheck(torch.ops.moe_aiter.expert_loop.default, trained)
    z = expert_loop_op(*i)[1]
    op = torch.ops.moe_aiter.expert_loop_backward.default
    torch.library.opcheck(op, (i.x, z, *i, [True, False] * 3))
    mains = i._replace(gate_up_main_grad=torch.zeros_like(i.gate_up))
    torch.library.opcheck(op, (i.x, z, *mains, [True] * 6))


def test_compiled(steps):
    """One graph; the number of tokens may change."""
    compiled = torch.compile(lambda i: run(i), backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (9, 14):
        i = make(random_ids(tokens))
        i = i._replace(x=i.x.requires_grad_(), down=i.down.requires_grad_())
        want = torch.autograd.grad(run(i).square().sum(), (i.x, i.down))
        got = torch.autograd.grad(compiled(i).square().sum(), (i.x, i.down))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


def test_group_sizes_that_lie(steps, no_debug):
    """Sizes past the rows there are, and negative ones, are clamped: nothing else is read or written."""
    i = make(torch.tensor([[0, 1], [1, 2], [2, 0]]), E=3)
    want = run(i)
    assert torch.equal(run(i._replace(group_sizes=torch.tensor([2, 2, 99]))), want)
    assert run(i._replace(group_sizes=torch.tensor([2, -5, 4]))).isfinite().all()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(x=torch.ones(17, 19)), r"x is \(T, H=19\) but gate_up is \(E, width, H=20\)"),
        (
            dict(down=torch.ones(5, 20, 11)),
            r"gate_up is \(E, width=24, H\) but swiglu and down ask for 22",
        ),
        (dict(down=torch.ones(4, 20, 12)), r"gate_up is \(E=5, width, H\) but down is \(E=4, H, I\)"),
        (dict(down=torch.ones(5, 9, 12)), r"x is \(T, H=20\) but down is \(E, H=9, I\)"),
        (dict(down=torch.ones(5, 20)), r"down must be \(E, H, I\)"),
        (dict(group_sizes=torch.ones(4, dtype=torch.int32)), r"but group_sizes is \(E=4,\)"),
        (dict(order=torch.ones(52, dtype=torch.int32)), r"order is \(R=52,\) but rank \(T, k\) holds 51"),
        (dict(routing_weights=torch.ones(17, 2)), r"routing_weights is \(17, 2\) but must be \(17, 3\)"),
        (dict(down_bias=torch.ones(5, 12)), r"down_bias is \(5, 12\) but must be \(5, 20\)"),
        (dict(gate_up_main_grad=torch.ones(5, 20, 24)), r"gate_up_main_grad is \(5, 20, 24\) but must be"),
        (dict(activation="swish"), "unknown activation 'swish'"),
        (dict(x=torch.ones(17, 20).half()), "x is torch.float16 but gate_up is torch.float32"),
        (dict(group_sizes=torch.ones(5)), "group_sizes must be int32 or int64"),
        (dict(x=torch.ones(17, 20, device="meta")), "x is on meta but gate_up is on cpu"),
    ],
)
def test_errors(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        run(make(random_ids())._replace(**change))
