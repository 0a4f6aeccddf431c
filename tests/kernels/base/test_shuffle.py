"""shuffle_weight: the closed form, its inverse, and what it refuses."""

import copy

import pytest
import torch

from moe_aiter.kernels.base.shuffle import shuffle_weight, unshuffle_weight

from ...shapes import transposed

pytestmark = pytest.mark.no_interpreter
DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz]
DTYPES += [torch.float4_e2m1fn_x2, torch.uint8]


def random(*shape, dtype):
    """Any bytes, seen as this dtype."""
    size = dtype.itemsize
    return torch.randint(256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype)


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape, layout",
    [
        ((16, 32), (16, 16)),
        ((48, 96), (16, 16)),
        ((3, 32, 64), (32, 16)),
        ((2, 2, 16, 64), (8, 32)),
        ((0, 16, 32), (16, 16)),
        ((0, 32), (16, 16)),
    ],
)
def test_the_inverse_is_exact(dtype, shape, layout):
    x = random(*shape, dtype=dtype)
    shuffled = shuffle_weight(x, layout=layout)
    assert shuffled.data_ptr() != x.data_ptr() or not x.numel()
    assert shuffled.shape == x.shape and shuffled.is_contiguous()
    assert same(unshuffle_weight(shuffled, layout=layout), x)
    x = x.view(torch.uint8) if dtype.itemsize == 1 else x  # torch copies few 8-bit floats
    assert same(shuffle_weight(transposed(x).view(dtype), layout), shuffled)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_the_closed_form(dtype):
    N, K, v = 32, 96, 16 // dtype.itemsize
    n, k = torch.arange(N)[:, None], torch.arange(K)[None, :]
    place = n // 16 * 16 * K + k // 32 * 512 + k % 32 // v * 16 * v + n % 16 * v + k % v
    assert torch.equal(place, n // 16 * 16 * K + k // v * 16 * v + n % 16 * v + k % v)
    x = torch.randint(-100, 100, (N, K)).to(dtype)
    assert torch.equal(shuffle_weight(x).flatten()[place], x)


def test_int4_has_vectors_of_32():
    x = torch.arange(32 * 64).view(32, 64).to(torch.int16)
    n, k = torch.arange(32)[:, None], torch.arange(64)[None, :]
    place = n // 16 * 16 * 64 + k // 32 * 512 + n % 16 * 32 + k % 32
    shuffled = shuffle_weight(x, use_int4=True)
    assert torch.equal(shuffled.flatten()[place], x)
    assert torch.equal(unshuffle_weight(shuffled, use_int4=True), x)


def test_it_depends_on_the_size_of_an_element_and_is_not_its_own_inverse():
    x = torch.randint(-8, 8, (32, 64)).float()
    by_bits = {dtype: shuffle_weight(x.to(dtype)).float() for dtype in (torch.float16, torch.int8)}
    assert not torch.equal(*by_bits.values())
    x = x.half()  # float32 with K = 64 has 16 x 16 vectors, which are transposed
    assert not torch.equal(shuffle_weight(shuffle_weight(x)), x)


def test_the_tag_is_set_and_does_not_last():
    shuffled = shuffle_weight(torch.zeros(16, 32))
    assert shuffled.is_shuffled is True and unshuffle_weight(shuffled).is_shuffled is False
    assert copy.deepcopy(shuffled).is_shuffled
    assert not any(hasattr(t, "is_shuffled") for t in (shuffled.clone(), shuffled[:], shuffled.detach()))


@pytest.mark.parametrize(
    "shape, layout, kind, message",
    [
        (
            (17, 32),
            (16, 16),
            ValueError,
            r"N=17 must be a multiple of 16 and K=32 of 32 for the layout \(16, 1",
        ),
        ((16, 48), (16, 16), ValueError, "N=16 must be a multiple of 16 and K=48 of 32"),
        ((16, 32), (32, 16), ValueError, "N=16 must be a multiple of 32"),
        (
            (16, 32),
            (16, 2),
            ValueError,
            r"2 \* layout\[1\] = 4 must be a multiple of the 8 elements of a vector",
        ),
        ((16, 32), (16, 0), ValueError, r"layout\[1\] must be at least 1, not 0"),
        ((16, 32), (16, 16, 1), ValueError, r"layout must be \(rows, columns / 2\), not \(16, 16, 1\)"),
        ((32,), (16, 16), ValueError, r"x must be \(..., N, K\), but it has shape \(32,\)"),
    ],
)
def test_what_does_not_fall_into_blocks_is_named(shape, layout, kind, message):
    for fn in (shuffle_weight, unshuffle_weight):
        with pytest.raises(kind, match=message):
            fn(torch.zeros(shape, dtype=torch.bfloat16), layout=layout)
    with pytest.raises(TypeError, match="x must be a tensor, not list"):
        shuffle_weight([1.0])
