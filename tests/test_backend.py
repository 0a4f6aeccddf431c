"""Which implementation runs, and that a forced one never becomes another."""

import importlib
import subprocess
import sys
import threading
import uuid
from typing import NamedTuple

import pytest
import torch
from torch.autograd import forward_ad

from moe_aiter import MoE, op
from moe_aiter.kernels.experts.up import expert_z_op
from moe_aiter.op import IMPLS, ORDER, BackendError, define_op, pick, register_kernel, takes, use


class Inputs(NamedTuple):
    x: torch.Tensor


@takes(torch.float32)
def launch_half(out, i):
    out.copy_(i.x / 2)


def save_nothing(ctx, i, output):
    pass


def backward_half(ctx, dout):
    ran.append(op.forced())
    return dout / 2


ran = []
# a name of its own: this module can be imported twice, an op is defined once
NAME = f"half_{uuid.uuid4().hex}"
half_op = define_op(
    NAME,
    Inputs,
    new=lambda i: torch.empty_like(i.x),
    reference=lambda i: i.x / 2,
    host=launch_half,
    backward=backward_half,
    save=save_nothing,
)


@pytest.fixture
def impls():
    """The implementations of the op, put back afterwards."""
    before = dict(IMPLS[NAME])
    yield IMPLS[NAME]
    IMPLS[NAME].clear()
    IMPLS[NAME].update(before)


def test_use_restores_after_an_error():
    before = op.forced()
    with pytest.raises(ZeroDivisionError), use("torch"):
        assert op.forced() == "torch"
        raise ZeroDivisionError
    assert op.forced() == before


def test_use_nests():
    before = op.forced()
    with use("torch"):
        with use("host"):
            assert op.forced() == "host"
        assert op.forced() == "torch"
    assert op.forced() == before


def test_use_is_for_its_thread_alone():
    seen = []
    with use("torch"):
        thread = threading.Thread(target=lambda: seen.append(op.forced()))
        thread.start()
        thread.join()
    assert seen == [op.forced()] != ["torch"]


class Nested(torch.autograd.Function):
    """A backward pass within a backward pass; autograd gives the 60th and deeper ones to other threads."""

    @staticmethod
    def forward(ctx, x, depth, seen):
        ctx.depth, ctx.seen = depth, seen
        return x.clone()

    @staticmethod
    def backward(ctx, dout):
        ctx.seen[threading.get_ident()] = op.forced()
        if ctx.depth:
            with torch.enable_grad():
                x = torch.ones(1, requires_grad=True)
                Nested.apply(x, ctx.depth - 1, ctx.seen).sum().backward()
        return dout, None, None


def test_use_reaches_the_threads_of_autograd():
    """CUDA gradients always run on such threads."""
    seen = {}
    out = Nested.apply(torch.ones(1, requires_grad=True), 70, seen)
    with use("torch"):
        out.sum().backward()
    assert len(seen) > 1 and set(seen.values()) == {"torch"} and op.forced() != "torch"


def test_use_reaches_the_gradient():
    ran.clear()
    x = torch.ones(3, requires_grad=True)
    with use("torch"):
        half_op(x).sum().backward()
    assert ran == ["torch"]
    assert torch.equal(x.grad, torch.full((3,), 0.5))


def test_auto_takes_the_first_that_can():
    assert pick(NAME, Inputs(torch.ones(2))) is launch_half
    assert pick(NAME, Inputs(torch.ones(2, dtype=torch.float64))) is IMPLS[NAME]["torch"]


def test_forced_never_falls_back():
    with use("host"), pytest.raises(LookupError) as caught:
        half_op(torch.ones(2, dtype=torch.float64))
    assert (
        str(caught.value)
        == f"{NAME}: no host backend for torch.float64 on cpu; there is torch; use() forces host"
    )
    with use("torch"):
        assert pick(NAME, Inputs(torch.ones(2))) is IMPLS[NAME]["torch"]


def test_an_error_says_who_forced_a_backend(monkeypatch):
    x = torch.ones(2, dtype=torch.float64)
    monkeypatch.setattr(
        op._forced, "default", ("host", "MOE_AITER_BACKEND")
    )  # as the variable does, before anything else
    with pytest.raises(BackendError, match=r"there is torch; MOE_AITER_BACKEND forces host$"):
        half_op(x)
    with use("hopper"), pytest.raises(BackendError, match=r"no hopper backend .*; use\(\) forces hopper$"):
        half_op(x)
    with use("triton"), pytest.raises(BackendError, match=r"; use\(\) forces triton$"):
        half_op(x)
    with pytest.raises(BackendError, match=r"MOE_AITER_BACKEND forces host$"):
        half_op(x)


def test_forcing_what_is_not_there_names_what_is():
    with use("triton"), pytest.raises(LookupError, match=r"no triton backend .*; there is host, torch"):
        half_op(torch.ones(2))


def test_an_unknown_backend_is_refused_at_once():
    with pytest.raises(
        ValueError, match="unknown backend 'nonsense'; known: auto, hopper, triton, host, torch"
    ):
        use("nonsense").__enter__()
    assert op.forced() != "nonsense"
    with pytest.raises(ValueError, match="unknown backend 'mine'; known: hopper, triton, host, torch"):
        register_kernel(op=NAME, backend="mine")  # nothing would ever pick it


def forward_mode(fn, x):
    with forward_ad.dual_level():
        return fn(forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS = {
    "forward mode": forward_mode,
    "jvp": lambda fn, x: torch.func.jvp(fn, (x,), (torch.ones_like(x),)),
    "jvp of vmap": lambda fn, x: torch.func.jvp(torch.func.vmap(fn), (x,), (torch.ones_like(x),)),
    "grad": lambda fn, x: torch.func.grad(lambda x: fn(x).sum())(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_other_derivatives_are_refused(transform):
    """torch itself would drop the tangents in forward mode, and give zeros."""
    with pytest.raises(NotImplementedError, match=f"{NAME} has gradients by torch.autograd only"):
        transform(half_op, torch.ones(2, 3))


def test_other_tensors_may_have_tangents():
    x = torch.ones(3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        assert torch.equal(half_op(x), x / 2)
        assert torch.equal(forward_ad.unpack_dual(dual * half_op(x)).tangent, x / 2)
    assert torch.equal(torch.func.vmap(half_op)(x[None]), x[None] / 2)


def test_many_samples_at_once():
    """torch's dispatcher gives the op one after another, and their gradients find each way back."""
    x = torch.randn(3, 4, requires_grad=True)
    out = torch.func.vmap(half_op)(x)
    out.backward(torch.ones(3, 4))
    assert torch.equal(out, x / 2) and torch.equal(x.grad, torch.full((3, 4), 0.5))
    jacobian = torch.autograd.functional.jacobian(half_op, x[0].detach(), vectorize=True)
    assert torch.equal(jacobian, torch.eye(4) / 2)


def test_a_backend_of_another_device_is_not_picked(impls):
    register_kernel(op=NAME, backend="triton")(launch_half)
    if "triton" not in ORDER["cpu"]:
        with use("triton"), pytest.raises(LookupError, match=r"no triton backend for torch.float32 on cpu"):
            half_op(torch.ones(2))


def test_register_kernel(impls):
    @register_kernel(op=NAME, backend="host", takes=(torch.float64,))
    def thirds(out, x):
        out.copy_(x / 3)

    assert torch.equal(
        half_op(torch.full((2,), 3.0, dtype=torch.float64)), torch.ones(2, dtype=torch.float64)
    )
    assert torch.equal(half_op(torch.full((2,), 3.0)), torch.full((2,), 1.5))  # float32 it does not take


def test_a_kernel_of_fewer_inputs(monkeypatch):
    """An op that has got another input since a kernel was written: the kernel runs where that is None."""
    monkeypatch.setitem(IMPLS, "expert_z", dict(IMPLS["expert_z"]))
    x, w, order = torch.randn(4, 8), torch.randn(1, 12, 8), torch.arange(4, dtype=torch.int32)

    @register_kernel(op="expert_z", backend="host")
    def ones(out, x, gate_up, bias, order, rank, group_sizes, activation, interleaved):
        out.fill_(1)

    given = x, w, None, order, order[:, None], order[-1:] + 1, "swiglu", False
    assert expert_z_op(*given).eq(1).all()
    with pytest.raises(TypeError, match="ones"):
        expert_z_op(*given, torch.randn(1, 12, 8))


def test_register_kernel_knows_its_ops():
    with pytest.raises(ValueError, match="unknown op 'hlaf'; known: "):
        register_kernel(op="hlaf", backend="host")


def test_debug_makes_forgotten_elements_visible(impls):
    register_kernel(op=NAME, backend="host")(lambda out, x: None)
    assert half_op(torch.ones(2)).isnan().all()


def test_nothing_is_launched_for_no_elements(impls):
    register_kernel(op=NAME, backend="host")(lambda out, x: 1 / 0)
    assert half_op(torch.ones(0, 3)).shape == (0, 3)


def test_forcing_a_backend_leaves_ops_that_are_only_torch():
    layer = MoE(8, 8, 4, 2)
    expected = layer(torch.ones(3, 8))
    with use("host"):
        if "host" in op.IMPLS["sort_by_expert"]:
            torch.testing.assert_close(layer(torch.ones(3, 8)), expected)
    with use("host"):
        assert op.pick("router_logits", Inputs(expected)) is op.IMPLS["router_logits"]["torch"]


def test_without_triton():
    """Everything imports, and a layer runs on the CPU."""
    script = (
        "import sys\n"
        "sys.modules['triton'] = None  # importing it is now an ImportError\n"
        "import torch, moe_aiter\n"
        "moe_aiter.MoE(16, 8, 4, 2)(torch.randn(5, 16)).sum().backward()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_former_module(monkeypatch):
    monkeypatch.delitem(sys.modules, "moe_aiter.backend", raising=False)
    with pytest.deprecated_call(match="import from moe_aiter.op"):
        importlib.import_module("moe_aiter.backend")
