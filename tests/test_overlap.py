"""What shares memory, against a search byte by byte; and that no product is written over its operands."""

import random

import pytest
import torch
from torch import Tensor

from moe_aiter.compat.aiter import deepgemm
from moe_aiter.kernels.grouped.gmm import gmm
from moe_aiter.kernels.grouped.masked_gmm import masked_gmm
from moe_aiter.kernels.grouped.ptgmm import nptgmm, ptgmm
from moe_aiter.kernels.grouped.segment_gmm import segment_gmm
from moe_aiter.kernels.grouped.tgmm import tgmm_accumulate
from moe_aiter.op import overlap


def bytes_of(x: Tensor) -> set[int]:
    """The numbers of the bytes of its storage that it covers."""
    memory = torch.arange(x.untyped_storage().nbytes() // x.itemsize)
    firsts = memory.as_strided(x.shape, x.stride(), x.storage_offset()).flatten().tolist()
    return {first * x.itemsize + byte for first in firsts for byte in range(x.itemsize)}


def test_nothing_that_overlaps_is_taken_for_apart():
    numbers = random.Random(0)
    memory = torch.zeros(400)
    apart = 0
    for _ in range(3000):
        pair = []
        for _ in range(2):
            whole = memory.view(torch.float16) if numbers.random() < 0.3 else memory
            shape = [numbers.randrange(4) for _ in range(numbers.randrange(1, 4))]
            strides = [numbers.choice([0, 1, 2, 3, 4, 8, 12, 24]) for _ in shape]
            pair.append(whole.as_strided(shape, strides, numbers.randrange(60)))
        if bytes_of(pair[0]) & bytes_of(pair[1]):
            assert overlap(*pair), [(x.shape, x.stride(), x.storage_offset(), x.dtype) for x in pair]
        else:
            apart += not overlap(*pair)
    assert apart > 500


APART = {
    "rows": lambda m: (m[:6], m[6:]),
    "columns": lambda m: (m[:, :4], m[:, 4:]),
    "columns of other rows": lambda m: (m[2:, 5:], m[:7, :5]),
    "columns, transposed": lambda m: (m[:, :4].T, m[:, 4:]),
    "columns of matrices": lambda m: (m.view(2, 5, 8)[:, :, :3], m.view(2, 5, 8)[:, :, 3:]),
    "every other row": lambda m: (m[::2], m[1::2]),
    "every other element": lambda m: (m[:, ::2], m[:, 1::2]),
    "another storage": lambda m: (m, m.clone()),
    "nothing": lambda m: (m[:0], m),
    "halves of another dtype": lambda m: (m.view(torch.float16)[:, :8], m[:, 4:]),
}


@pytest.mark.parametrize("parts", APART.values(), ids=APART)
def test_parts_of_one_buffer_may_be_used_at_once(parts):
    x, y = parts(torch.zeros(10, 8))
    assert not overlap(x, y) and not overlap(y, x)


def call_gmm(out, x, w):
    gmm(x, w, torch.tensor([2, 4]), bias=w[:, 0], existing_out=out)


def call_segment_gmm(out, x, w):
    segment_gmm(x, w, torch.tensor([2, 4]), out=out)


PRODUCTS = {"gmm": call_gmm, "segment_gmm": call_segment_gmm}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize("grad", [True, False])
def test_products_are_not_written_over_their_operands(product, grad):
    memory = torch.randn(600)
    x, w = memory[:48].view(6, 8), memory[100:228].view(2, 8, 8)
    before = memory.clone()
    with torch.set_grad_enabled(grad):
        for start in (0, 47, 53, 100, 200):
            with pytest.raises(ValueError, match=r"out shares memory with (x|w|lhs|rhs)"):
                product(memory[start : start + 48].view(6, 8), x, w)
            assert torch.equal(memory, before)
        product(memory[48:96].view(6, 8), x, w)
    assert not torch.equal(memory, before)


@pytest.mark.parametrize("variant", [ptgmm, nptgmm])
def test_weight_gradients_are_not_written_over_their_operands(variant):
    memory, sizes = torch.randn(600), torch.tensor([2, 4])
    x, y = memory[:48].view(6, 8), memory[48:96].view(6, 8)
    out, sums = memory[200:328].view(2, 8, 8), memory[96:112].view(2, 8)
    before = memory.clone()
    for name, bad in {
        "existing_out shares memory with x": {"existing_out": memory[40:168].view(2, 8, 8)},
        "existing_out shares memory with bias_grad": {"existing_out": memory[110:238].view(2, 8, 8)},
        "bias_grad shares memory with y": {"existing_out": out, "bias_grad": memory[90:106].view(2, 8)},
    }.items():
        with pytest.raises(ValueError, match=name):
            variant(x.T, y, sizes, **({"bias_grad": sums} | bad))
    with pytest.raises(ValueError, match="existing_out shares memory with y"):
        tgmm_accumulate(memory[90:218].view(2, 8, 8), x, y, sizes)
    assert torch.equal(memory, before)
    variant(x.T, y, sizes, bias_grad=sums, existing_out=out)


def test_masked_products_are_not_written_over_their_operands():
    memory, sizes = torch.randn(600), torch.tensor([2, 4])
    x, w = memory[:64].view(2, 4, 8), memory[64:192].view(2, 8, 8)
    before = memory.clone()
    for start, name in ((60, "x"), (180, "w")):
        out = memory[start : start + 64].view(2, 4, 8)
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            masked_gmm(out, x, w, sizes)
        with pytest.raises(ValueError, match=f"Y shares memory with {name.upper()}Q"):
            deepgemm(x, w, out, sizes, weight_shuffled=False)
    assert torch.equal(memory, before)
    masked_gmm(memory[192:256].view(2, 4, 8), x, w, sizes)
