"""nn.Linear patched for a whole program, and the way back."""

import copy
import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tuned import Own, layer, rows_for, tuned_calls, tuned_files, unpatched_after

from moe_aiter import gemm, op
from moe_aiter.invariance import INVARIANT
from moe_aiter.kernels.dense import tuned_gemm
from moe_aiter.kernels.dense.tuned_gemm import NotSupportedError
from moe_aiter.layers import linear as module
from moe_aiter.layers.linear import (
    linear_with_split_bias,
    patch_linear,
    unpatch_linear,
)

files = pytest.fixture(tuned_files)
ORIGINAL = nn.Linear.forward


calls = pytest.fixture(tuned_calls)
unpatched = pytest.fixture(unpatched_after, autouse=True)


# the switch


def test_patched_and_undone(calls):
    one, x = layer(), torch.randn(5, 32).bfloat16()
    expected = one(x)
    handle = patch_linear()
    assert torch.equal(one(x), expected) and len(calls) == 1
    assert torch.equal(one(input=x), expected) and len(calls) == 2
    handle.undo()
    handle.undo()
    assert nn.Linear.forward is ORIGINAL and torch.equal(one(x), expected) and len(calls) == 2


def test_patched_twice_is_patched_once_and_lasts_until_both_are_undone(calls):
    one, x = layer(), torch.randn(5, 32).bfloat16()
    first = patch_linear()
    forward = nn.Linear.forward
    second = patch_linear()
    assert nn.Linear.forward is forward
    one(x)
    assert len(calls) == 1
    first.undo()
    assert nn.Linear.forward is forward
    second.undo()
    assert nn.Linear.forward is ORIGINAL


def test_a_context_ends_also_by_an_error_and_contexts_nest():
    with pytest.raises(KeyError), patch_linear():
        with patch_linear():
            pass
        assert nn.Linear.forward is not ORIGINAL
        raise KeyError
    assert nn.Linear.forward is ORIGINAL


def test_unpatch_undoes_all():
    handle = patch_linear()
    patch_linear()
    unpatch_linear()
    assert nn.Linear.forward is ORIGINAL
    handle.undo()
    unpatch_linear()
    assert nn.Linear.forward is ORIGINAL


def test_somebody_else_s_patch_on_top_stays_and_goes_on_to_work(calls):
    one, x, theirs = layer(), torch.randn(5, 32).bfloat16(), []
    expected = one(x)
    handle = patch_linear()
    ours = nn.Linear.forward

    @functools.wraps(ours)
    def forward(self, x):
        theirs.append(1)
        return ours(self, x)

    nn.Linear.forward = forward
    assert torch.equal(one(x), expected) and (len(calls), len(theirs)) == (1, 1)
    handle.undo()
    assert nn.Linear.forward is forward
    assert torch.equal(one(x), expected) and (len(calls), len(theirs)) == (1, 2), "ours passes on"
    with patch_linear():
        assert torch.equal(one(x), expected) and len(calls) == 2
    assert nn.Linear.forward is forward


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated; a trace notes each branch
def test_a_trace_runs_torchs(calls):
    """The older exporter of ONNX traces as well.  Sizes are tensors there, which no table has."""
    one, x = layer(), torch.randn(5, 32).bfloat16()
    with patch_linear():
        traced = torch.jit.trace(one, x, check_trace=False)
    x = torch.randn(300, 32).bfloat16()
    assert torch.equal(traced(x), one(x)) and not calls


def test_several_threads_share_the_patch(calls):
    one, x = layer(), torch.randn(5, 32).bfloat16()
    with patch_linear():
        threads = [threading.Thread(target=one, args=(x,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(calls) == 3


# what is patched


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.pairwise
def test_results_and_gradients_are_torchs(device, calls, dtype, shape, bias):
    one = layer(dtype=dtype, bias=bias, device=device)
    x = torch.randn(*shape, 32).to(device, dtype).requires_grad_()
    dout = torch.randn(*shape, 16).to(device, dtype)
    results = []
    for on in (False, True):
        with patch_linear() if on else torch.enable_grad():
            out = one(x)
        results.append((out, *torch.autograd.grad(out, (x, *one.parameters()), dout)))
    assert len(calls) == 1
    for mine, theirs in zip(*results[::-1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


def test_gradcheck(monkeypatch):
    monkeypatch.setattr(module, "HALVES", (torch.float64,))
    one = nn.Linear(5, 4).double()
    x = torch.randn(3, 5).double().requires_grad_()
    with patch_linear():
        assert torch.autograd.gradcheck(lambda x, *_: one(x), (x, *one.parameters()))


def test_training_is_the_same(calls):
    torch.manual_seed(1)
    mine = nn.Sequential(layer(32, 64), nn.GELU(), layer(64, 32))
    theirs = copy.deepcopy(mine)
    x, target = torch.randn(64, 32).bfloat16(), torch.randn(64, 32).bfloat16()
    for model, on in ((mine, True), (theirs, False)):
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        with patch_linear() if on else torch.enable_grad():
            for _ in range(4):
                (model(x) - target).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert len(calls) == 8
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "weight, x",
    [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.float32, torch.bfloat16)],
)
def test_other_dtypes_run_as_before(calls, weight, x):
    one, x = layer(dtype=weight), torch.randn(5, 32).to(x)
    with patch_linear():
        if weight == x.dtype:
            assert torch.equal(one(x), F.linear(x, one.weight, one.bias))
        else:
            with pytest.raises(RuntimeError, match="same dtype"):
                one(x)
    assert not calls


def test_autocast_to_another_dtype_runs_as_before(calls):
    x = torch.randn(5, 32)
    with patch_linear(), torch.autocast("cpu", torch.bfloat16):
        assert layer(dtype=torch.float32)(x).dtype == torch.bfloat16
        assert not calls
        assert layer()(x.bfloat16()).dtype == torch.bfloat16 and len(calls) == 1
        assert layer(dtype=torch.float16)(x.half()).dtype == torch.bfloat16 and len(calls) == 1


class Mine(torch.Tensor):
    """As a quantised or a sharded weight is one."""


def test_subclasses_and_weights_of_a_class_of_their_own(calls):
    x = torch.randn(5, 32).bfloat16()
    own, quantised = Own(32, 16, dtype=torch.bfloat16), layer(bias=False)
    quantised.weight = nn.Parameter(quantised.weight.detach().as_subclass(Mine), requires_grad=False)
    before = own(x), quantised(x)
    with patch_linear():
        after = own(x), quantised(x)
    assert len(calls) == 1, "what Own asks of nn.Linear"
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_parametrised_weights(calls):
    one, x = layer(), torch.randn(5, 32).bfloat16()
    nn.utils.parametrizations.weight_norm(one)
    before = one(x)
    with patch_linear():
        assert torch.equal(one(x), before) and len(calls) == 1


def test_pefts_adapters_stay_what_they_are(calls):
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model = nn.Sequential(layer(32, 32), layer(32, 16))
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], init_lora_weights=False))
    model = model.bfloat16()
    x = torch.randn(5, 32).bfloat16()
    before = model(x)
    with patch_linear():
        after = model(x)
    torch.testing.assert_close(after, before)
    assert len(calls) == 4, "the base, both factors, and the other layer"
    after.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_what_is_not_supported_runs_as_before_and_other_errors_do_not(monkeypatch):
    one, x = layer(), torch.randn(5, 32).bfloat16()
    expected = one(x)

    def fail(error, *_, **__):
        raise error

    with patch_linear():
        monkeypatch.setattr(module, "tuned_gemm", functools.partial(fail, NotSupportedError("no")))
        assert torch.equal(one(x), expected)
        for error in (RuntimeError("CUDA out of memory"), ValueError("a file"), AssertionError()):
            monkeypatch.setattr(module, "tuned_gemm", functools.partial(fail, error))
            with pytest.raises(type(error)):
                one(x)


def test_a_missing_file_reaches_the_caller(files, tmp_path):
    files.set_to("config_gemm_bf16", f"{tmp_path}/a.csv:{tmp_path}/b.csv")
    with patch_linear(), pytest.raises(FileNotFoundError, match=r"a\.csv"):
        layer()(torch.randn(5, 32).bfloat16())


@pytest.mark.parametrize("with_file", [False, True])
def test_compiled_whole(device, files, with_file):
    files(rows_for(device, "torch", M=5, dtype="bf16", bias=1) if with_file else "")
    model = nn.Sequential(layer(32, 64, device=device), nn.GELU(), layer(64, 16, device=device))
    x = torch.randn(5, 32, device=device).bfloat16()
    expected = model(x)
    with patch_linear():
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), expected)
        compiled(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    torch.testing.assert_close(compiled(x), expected)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("on", [False, True], ids=["as it comes", "invariant"])
def test_a_forced_backend_without_such_a_product(files, monkeypatch, caplog, on, compiled):
    """Torch multiplies, as before the patch, and one line says so; products by name never fall back."""
    one, x = layer(bias=False), torch.randn(5, 32).bfloat16().requires_grad_()
    expected = torch.autograd.grad(one(x).sum(), [x, one.weight])
    files.set_to("log_tuned_config", False)  # and what was logged is forgotten
    monkeypatch.setattr(op._forced, "default", ("host", "MOE_AITER_BACKEND"))
    monkeypatch.setattr(INVARIANT, "default", on)
    with patch_linear(), caplog.at_level("WARNING", "moe_aiter"):
        torch._dynamo.reset()
        forward = torch.compile(one, fullgraph=True, backend="aot_eager") if compiled else one
        got = torch.autograd.grad(forward(x).sum(), [x, one.weight])
        torch.autograd.grad(forward(torch.randn(6, 32).bfloat16().requires_grad_()).sum(), [one.weight])
    torch.testing.assert_close(got, expected)
    assert caplog.messages == ([] if on else ["tuned products of host are computed by torch here"])
    with pytest.raises(op.BackendError, match="gemm: no host backend"):
        gemm(x, one.weight.mT)


# bias by itself


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_split_bias_is_one_rounding_more(device, dtype):
    x, w, b = (torch.randn(*s).to(device, dtype) for s in ((7, 64), (16, 64), (16,)))
    got, exact = linear_with_split_bias(x, w, b).double(), F.linear(*(t.double() for t in (x, w, b)))
    ulp = torch.finfo(dtype).eps * torch.maximum(exact.abs(), (exact - b.double()).abs())
    slack = 1e-5 if dtype == torch.float32 else 0
    assert ((got - exact).abs() <= 1.01 * ulp + slack).all()
    assert torch.equal(linear_with_split_bias(x, w, None), tuned_gemm.tuned_gemm(x, w))
    w.requires_grad_()
    linear_with_split_bias(x, w, b).sum().backward()
    assert w.grad is not None
