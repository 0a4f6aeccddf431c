"""Shuffled copies of weights: who gets one, when a patched Linear takes it, and when it is stale."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tuned import Own, layer, rows_for, tuned_calls, tuned_files, unpatched_after

from moe_aiter.kernels.base.shuffle import shuffle_weight
from moe_aiter.layers import linear
from moe_aiter.layers.linear import patch_linear, preshuffle_weights
from moe_aiter.tuning.choice import CHOICES
from moe_aiter.tuning.store import load

files = pytest.fixture(tuned_files)
calls = pytest.fixture(tuned_calls)
unpatched = pytest.fixture(unpatched_after, autouse=True)


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


@pytest.mark.parametrize(
    "found, threshold, taken", [({"torch"}, 0, False), ({"torch"}, 8, True), ({"triton"}, 0, True)]
)
def test_where_the_usual_order_was_measured_to_be_faster_it_is_the_default(
    calls, files, monkeypatch, found, threshold, taken
):
    monkeypatch.setattr(linear, "measured", lambda op, device: found if op == "gemm_shuffled" else set())
    files.set_to("preshuffle_m_threshold", threshold)
    one = frozen()
    with patch_linear():
        one(torch.randn(100, 256).bfloat16())
        sizes = {"M": 100, "N": 512, "K": 256, "dtype": "bf16"}
        files(rows_for(torch.device("cpu"), "triton", us=1.0, shuffled=1, **sizes))
        one(torch.randn(100, 256).bfloat16())  # somebody tuned it
    assert [shuffled for _, shuffled in calls] == [taken, True]


def test_the_h200s_table_has_measured_it():
    rows = [row for row in load(CHOICES, "h200") if row.key.op == "gemm_shuffled"]
    assert rows and {row.value for row in rows} == {"torch"}


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


def test_another_weight_at_the_same_address_is_shuffled_anew():
    one, x = layer(256, 256, bias=False).requires_grad_(False), torch.randn(64, 256).bfloat16()
    memory = torch.ones(256 * 256, dtype=torch.bfloat16).untyped_storage()

    def weight_in_memory():
        return nn.Parameter(x.new_empty(0).set_(memory, 0, (256, 256)), requires_grad=False)

    one.weight = weight_in_memory()
    assert preshuffle_weights(one) == 1
    version, address = one.weight._version, one.weight.data_ptr()
    weight_in_memory().fill_(3)
    one.weight = None
    one.weight = weight_in_memory()
    assert (one.weight._version, one.weight.data_ptr()) == (version, address)
    with patch_linear():
        torch.testing.assert_close(one(x), F.linear(x, one.weight))


@torch.inference_mode()
def test_a_weight_without_versions_has_no_shuffled_copy():
    one, x = layer(256, 256, bias=False), torch.randn(64, 256).bfloat16()
    assert one.weight.is_inference()
    assert preshuffle_weights(one) == 0
    with patch_linear():
        one(x)
        one.weight.zero_()
        assert not one(x).any()
