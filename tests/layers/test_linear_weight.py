"""ShuffledWeight keeps the fact that a tensor's attribute loses."""

import copy
import io

import pytest
import torch
from torch import nn

from moe_aiter.compat.aiter import ShuffledWeight, deepgemm, shuffle_weight


def test_it_keeps_the_order_through_what_modules_go_through():
    weight = torch.randn(3, 32, 64)
    module = nn.Sequential(ShuffledWeight(weight))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = nn.Sequential(ShuffledWeight(torch.zeros(3, 32, 64)))
    other.load_state_dict(torch.load(file))
    for kept in (module, other, copy.deepcopy(module), module.to("cpu")):
        assert kept[0].is_shuffled and torch.equal(kept[0].shuffled, shuffle_weight(weight))
        assert torch.equal(kept[0].unshuffled(), weight)
    assert not list(module.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_shuffles_again(dtype):
    weight = torch.randn(32, 64)
    module = ShuffledWeight(weight).to(dtype)
    assert torch.equal(module.shuffled, shuffle_weight(weight.to(dtype)))
    assert torch.equal(module.unshuffled(), weight.to(dtype))


def test_a_cast_that_has_no_such_order_changes_nothing():
    weight = torch.randn(32, 64)
    module = ShuffledWeight(weight, (16, 2))
    with pytest.raises(ValueError, match="must be a multiple of the 8 elements"):
        module.half()
    assert torch.equal(module.unshuffled(), weight)


def test_a_state_in_another_order_is_refused():
    module = ShuffledWeight(torch.randn(32, 64).bfloat16())
    for other in (
        ShuffledWeight(torch.zeros(32, 64)),
        ShuffledWeight(torch.zeros(32, 64).bfloat16(), (32, 16)),
    ):
        with pytest.raises((ValueError, RuntimeError), match="shuffled by"):
            module.load_state_dict(other.state_dict())


def test_a_state_with_codes_of_another_dtype_is_refused():
    """The order of 8-bit elements is the same for all of them."""
    codes = torch.randint(-100, 100, (32, 64), dtype=torch.int8)
    module = ShuffledWeight(codes)
    for other in (codes.view(torch.uint8), codes.view(torch.float8_e4m3fn)):
        with pytest.raises(RuntimeError, match=r"shuffled is .* in the state and torch\.int8 here"):
            module.load_state_dict(ShuffledWeight(other).state_dict(), strict=False)
    assert torch.equal(module.unshuffled(), codes)
    wide = ShuffledWeight(torch.zeros(32, 64).bfloat16())
    wide.load_state_dict(ShuffledWeight(torch.ones(32, 64).half()).state_dict())
    assert wide.shuffled.dtype == torch.bfloat16 and wide.shuffled.all()


def test_deepgemm_takes_it():
    x, w, rows = torch.randn(2, 8, 64), torch.randn(2, 32, 64), torch.tensor([8, 3])
    out, expected = torch.zeros(2, 8, 32), torch.zeros(2, 8, 32)
    deepgemm(x, w, expected, rows, weight_shuffled=False)
    assert deepgemm(x, ShuffledWeight(w), out, rows) is out
    assert torch.equal(out, expected)
    with pytest.raises(ValueError, match=r"WQ must be shuffled by \(16, 16\), not \(32, 16\)"):
        deepgemm(x, ShuffledWeight(w, (32, 16)), out, rows)
    with pytest.raises(ValueError, match="weight_shuffled is False but WQ is a ShuffledWeight"):
        deepgemm(x, ShuffledWeight(w), out, rows, weight_shuffled=False)
