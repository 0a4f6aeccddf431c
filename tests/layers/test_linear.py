"""nn.Linear patched for a whole program, its shuffled weights, and the way back."""

import copy
import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tuned import rows_for, tuned_files

from moe_aiter.kernels import tuned_gemm as tuned
from moe_aiter.kernels.shuffle import shuffle_weight
from moe_aiter.kernels.tuned_gemm import NotSupportedError
from moe_aiter.layers import linear as module
from moe_aiter.layers.linear import (
    linear_with_split_bias,
    patch_linear,
    preshuffle_weights,
    unpatch_linear,
)

files = pytest.fixture(tuned_files)
ORIGINAL = nn.Linear.forward


@pytest.fixture(autouse=True)
def unpatched():
    assert nn.Linear.forward is ORIGINAL
    yield
    unpatch_linear()
    nn.Linear.forward = ORIGINAL


@pytest.fixture
def calls(monkeypatch):
    """What patched Linears gave to tuned_gemm: the weight, and whether it is shuffled."""
    seen = []

    def watched(x, weight, bias=None, **kwargs):
        seen.append((weight, kwargs.get("is_shuffled", False)))
        return tuned.tuned_gemm(x, weight, bias, **kwargs)

    monkeypatch.setattr(module, "tuned_gemm", watched)
    return seen


def layer(K=32, N=16, dtype=torch.bfloat16, **kind):
    return nn.Linear(K, N, dtype=dtype, **kind)


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


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


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


# bias by itself


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_split_bias_is_one_rounding_more(device, dtype):
    x, w, b = (torch.randn(*s).to(device, dtype) for s in ((7, 64), (16, 64), (16,)))
    got, exact = linear_with_split_bias(x, w, b).double(), F.linear(*(t.double() for t in (x, w, b)))
    ulp = torch.finfo(dtype).eps * torch.maximum(exact.abs(), (exact - b.double()).abs())
    slack = 1e-5 if dtype == torch.float32 else 0
    assert ((got - exact).abs() <= 1.01 * ulp + slack).all()
    assert torch.equal(linear_with_split_bias(x, w, None), tuned.tuned_gemm(x, w))
    w.requires_grad_()
    linear_with_split_bias(x, w, b).sum().backward()
    assert w.grad is not None


# shuffled weights


def model_to_shuffle():
    """Two eligible layers of nine modules."""
    return nn.ModuleDict(
        {
            "yes": layer(256, 512, bias=False),
            "nested": nn.Sequential(layer(512, 256, bias=False)),
            "biased": layer(256, 256),
            "float32": layer(256, 256, bias=False, dtype=torch.float32),
            "float16": layer(256, 256, bias=False, dtype=torch.float16),
            "odd N": layer(256, 128, bias=False),
            "odd K": layer(264, 256, bias=False),
            "no Linear": nn.Embedding(256, 256, dtype=torch.bfloat16),
            "own": Own(256, 256, bias=False, dtype=torch.bfloat16),
        }
    )


def test_the_count_is_that_of_eligible_layers():
    model = model_to_shuffle()
    assert preshuffle_weights(model) == 2
    assert preshuffle_weights(model) == 2, "again"
    with patch_linear():
        assert preshuffle_weights(model) == 2
    assert preshuffle_weights(model, require_multiple=128) == 3
    assert preshuffle_weights(model, require_multiple=1024) == 0


def test_the_buffer_holds_the_shuffled_weight_and_no_state_dict_does():
    model = model_to_shuffle()
    before = list(model.state_dict())
    preshuffle_weights(model)
    one = model["yes"]
    assert torch.equal(one._preshuffled_weight, shuffle_weight(one.weight.detach()))
    assert list(model.state_dict()) == before
    assert "_preshuffled_weight" in dict(one.named_buffers())
    assert model.to("meta")["yes"]._preshuffled_weight.is_meta


def test_a_layout_that_does_not_divide_changes_nothing():
    model = model_to_shuffle()
    with pytest.raises(ValueError, match="must be a multiple of 48"):
        preshuffle_weights(model, layout=(48, 16))
    assert not any("_preshuffled" in name for name, _ in model.named_buffers())


def frozen(**settings_of):
    one = layer(256, 512, bias=False).requires_grad_(False)
    assert preshuffle_weights(one) == 1
    return one


def test_it_is_taken_from_the_threshold_on(calls, files):
    one, x = frozen(), torch.randn(2, 64, 256).bfloat16()
    files.set_to("preshuffle_m_threshold", 64)
    with patch_linear():
        for rows in (63, 64, 65):
            torch.testing.assert_close(one(x[:1, :1].expand(1, rows, -1)), one(x[:1, :1]).expand(1, rows, -1))
    assert [shuffled for _, shuffled in calls] == [False, False, True, False, True, False]
    files.set_to("preshuffle_m_threshold", 1)
    with patch_linear():
        torch.testing.assert_close(one(x), F.linear(x, one.weight))
    assert calls[-1][1] and calls[-1][0] is one._preshuffled_weight


@pytest.mark.parametrize("shuffled_us, taken", [(1.0, True), (3.0, False)])
def test_a_file_with_both_orders_decides(calls, files, shuffled_us, taken):
    sizes = {"M": 16, "N": 512, "K": 256, "dtype": "bf16"}
    cpu = torch.device("cpu")
    rows = rows_for(cpu, "torch", us=2.0, **sizes)
    files(rows + rows_for(cpu, "triton", us=shuffled_us, shuffled=1, **sizes))
    one = frozen()
    with patch_linear():
        one(torch.randn(16, 256).bfloat16())
        one(torch.randn(100, 256).bfloat16())  # of which the file says nothing
    assert [shuffled for _, shuffled in calls] == [taken, True]


def changed(one):
    with torch.no_grad():
        one.weight.mul_(-2)


def loaded(one):
    one.load_state_dict({"weight": torch.randn(512, 256).bfloat16()})


def replaced(one):
    one.weight = nn.Parameter(torch.randn(512, 256).bfloat16(), requires_grad=False)


def moved(one):
    one.weight.data = one.weight.data.clone() * 3


@pytest.mark.parametrize("change", [changed, loaded, replaced, moved])
def test_a_weight_that_changed_is_shuffled_again(calls, change):
    one, x = frozen(), torch.randn(64, 256).bfloat16()
    with patch_linear():
        one(x)
        change(one)
        torch.testing.assert_close(one(x), F.linear(x, one.weight))
        one(x)
    assert [shuffled for _, shuffled in calls] == [True, True, True]
    assert calls[1][0] is calls[2][0] is one._preshuffled_weight is not calls[0][0]
    assert torch.equal(one._preshuffled_weight, shuffle_weight(one.weight))


def test_it_is_not_taken_where_a_gradient_would_be_lost(calls):
    one, x = frozen().requires_grad_(True), torch.randn(64, 256).bfloat16()
    with patch_linear():
        one(x).sum().backward()
        assert one.weight.grad is not None and not calls[-1][1]
        with torch.no_grad():
            one(x)
    assert calls[-1][1]


def test_gradients_of_inputs_pass_through_it(calls):
    one, x = frozen(), torch.randn(64, 256).bfloat16().requires_grad_()
    with patch_linear():
        one(x).float().square().sum().backward()
    mine, x.grad = x.grad, None
    assert calls[-1][1]
    one(x).float().square().sum().backward()
    torch.testing.assert_close(mine, x.grad)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda one: one.to(torch.float16), lambda one: one.float()])
def test_copies_and_casts_multiply_by_their_own_weight(how, files):
    one = how(frozen())
    x = torch.randn(64, 256).to(one.weight.dtype)
    with patch_linear():
        torch.testing.assert_close(one(x), F.linear(x, one.weight))


def test_another_layout_is_kept_and_not_multiplied(calls):
    one, x = layer(256, 512, bias=False).requires_grad_(False), torch.randn(64, 256).bfloat16()
    assert preshuffle_weights(one, layout=(32, 16)) == 1
    assert torch.equal(one._preshuffled_weight, shuffle_weight(one.weight, (32, 16)))
    with patch_linear():
        one(x)
    assert not calls[-1][1]


def test_tied_weights_are_shuffled_once():
    a, b = layer(256, 256, bias=False), layer(256, 256, bias=False)
    b.weight = a.weight
    assert preshuffle_weights(nn.ModuleList([a, b])) == 2
    assert a._preshuffled_weight is b._preshuffled_weight


def test_compiled_models_multiply_by_the_weight_itself(calls):
    one, x = frozen(), torch.randn(64, 256).bfloat16()
    with patch_linear():
        torch._dynamo.reset()
        compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), F.linear(x, one.weight))
        changed(one)
        torch.testing.assert_close(compiled(x), F.linear(x, one.weight))
