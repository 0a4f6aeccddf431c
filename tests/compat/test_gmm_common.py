"""The sizes of `gmm_common`: drawn as its names say, and looked up."""

import pytest
import torch

from moe_aiter.compat.aiter.ops.triton.utils import gmm_common
from moe_aiter.compat.aiter.ops.triton.utils.gmm_common import gen_group_sizes, gen_uniform_group_sizes


def test_uniform():
    sizes = gen_uniform_group_sizes(11, 4, device="cpu")
    assert sizes.tolist() == [3, 3, 3, 2] and sizes.dtype == torch.int32


def test_random():
    state = torch.get_rng_state()
    sizes = gen_group_sizes(1000, 16, device="cpu")
    assert sizes.sum() == 1000 and sizes.shape == (16,) and sizes.dtype == torch.int32
    assert torch.equal(sizes, gen_group_sizes(1000, 16, device="cpu")) and torch.equal(
        state, torch.get_rng_state()
    )
    assert not torch.equal(sizes, gen_group_sizes(1000, 16, device="cpu", rng_seed=1))
    assert 300 < gen_group_sizes(1000, 16, device="cpu", unused_tokens_prob=0.5).sum() < 700
    assert (gen_group_sizes(1000, 16, device="cpu", unused_experts_prob=0.5) == 0).sum() > 2
    assert gen_group_sizes(10, 3, device="cpu", unused_experts_prob=1.0).max() == 10
    assert (
        not gen_group_sizes(0, 3, device="cpu").any()
        and gen_group_sizes(5, 3, device="cpu", rng_seed=None).sum() == 5
    )
    for draw in (gen_group_sizes, gen_uniform_group_sizes):
        with pytest.raises(ValueError, match="M=3 and G=0"):
            draw(3, 0, device="cpu")
        assert draw(3, 2, torch.int64, "cpu").dtype == torch.int64
        with pytest.raises(TypeError, match="group_sizes_dtype must be int32 or int64, not torch.int16"):
            draw(3, 2, torch.int16, "cpu")


def test_shapes():
    sizes = torch.zeros(3, dtype=torch.int32)
    assert gmm_common.get_gmm_shape(torch.zeros(7, 4), torch.zeros(3, 4, 5), sizes) == (7, 4, 5, 3)
    assert gmm_common.get_gmm_shape(torch.zeros(7, 4), torch.zeros(3, 5, 4), sizes) == (7, 4, 5, 3)
    assert gmm_common.get_tgmm_shape(torch.zeros(7, 4), torch.zeros(7, 5), sizes) == (7, 4, 5, 3)
    assert gmm_common.get_tgmm_shape(torch.zeros(4, 7), torch.zeros(7, 5), sizes) == (7, 4, 5, 3)
    with pytest.raises(ValueError, match=r"lhs is \(M, K=4\) but rhs is \(G, K=6, N\)"):
        gmm_common.get_gmm_shape(torch.zeros(7, 4), torch.zeros(3, 6, 5), sizes)
    with pytest.raises(ValueError, match=r"lhs is \(K, M=7\) but rhs is \(M=8, N\)"):
        gmm_common.get_tgmm_shape(torch.zeros(4, 7), torch.zeros(8, 5), sizes)


def test_powers():
    assert [n for n in range(-2, 20) if gmm_common.is_power_of_2(n)] == [1, 2, 4, 8, 16]
