"""Problem sizes for products, random or by name, as in AITER's `aiter.ops.triton.utils.gmm_common`."""

import torch
from torch import Tensor

from ......kernels.base.check import INDICES, check_axes, check_probability, check_shape, checked, oriented

__all__ = ["gen_group_sizes", "gen_uniform_group_sizes", "get_gmm_shape", "get_tgmm_shape", "is_power_of_2"]


@checked
def is_power_of_2(x: int) -> bool:
    return x > 0 and not x & (x - 1)


@checked
def gen_uniform_group_sizes(
    M: int, G: int, group_sizes_dtype: torch.dtype = torch.int32, device: torch.device | str = "cuda"
) -> Tensor:
    """(G,) int32, or int64: M rows in G groups of as equal sizes as there are, the larger ones first."""
    check_counts(M, G, group_sizes_dtype)
    sizes = torch.full((G,), M // G, dtype=group_sizes_dtype, device=device)
    sizes[: M % G] += 1
    return sizes


@checked
def gen_group_sizes(
    M: int,
    G: int,
    group_sizes_dtype: torch.dtype = torch.int32,
    device: torch.device | str = "cuda",
    rng_seed: int | None = 0,
    unused_tokens_prob: float = 0.0,
    unused_experts_prob: float = 0.1,
) -> Tensor:
    """(G,) int32 or int64: each of M rows in a random group of those, at least one, drawn to have rows.

    A row is in no group with `unused_tokens_prob`, a group has no rows with `unused_experts_prob`.
    `rng_seed` starts a generator of this call's own, so the sizes are not AITER's; None goes on with torch's.
    """
    check_counts(M, G, group_sizes_dtype)
    check_probability(unused_tokens_prob=unused_tokens_prob, unused_experts_prob=unused_experts_prob)
    generator = None if rng_seed is None else torch.Generator().manual_seed(rng_seed)
    used = (torch.rand(G, generator=generator) >= unused_experts_prob).nonzero().flatten()
    used = used if len(used) else torch.randint(G, (1,), generator=generator)
    rows = int((torch.rand(M, generator=generator) >= unused_tokens_prob).sum())
    groups = used[torch.randint(len(used), (rows,), generator=generator)]
    return torch.bincount(groups, minlength=G).to(device, group_sizes_dtype)


def get_gmm_shape(lhs: Tensor, rhs: Tensor, group_sizes: Tensor) -> tuple[int, int, int, int]:
    """M, K, N and G of `gmm(lhs, rhs, group_sizes)`, where `rhs` may be (G, N, K).

    Raises ValueError where they do not agree.
    """
    check_shape("lhs", lhs, "M", "K")
    check_shape("rhs", rhs, "G", "K", "N")
    rhs = oriented("trans_rhs", rhs, -2, lhs.shape[1], None)
    (M, K), (G, _, N) = lhs.shape, rhs.shape
    check_axes(lhs=(lhs, "M, K"), rhs=(rhs, "G, K, N"), group_sizes=(group_sizes, "G"))
    return M, K, N, G


def get_tgmm_shape(lhs: Tensor, rhs: Tensor, group_sizes: Tensor) -> tuple[int, int, int, int]:
    """M, K, N and G of `ptgmm(lhs, rhs, group_sizes)`, where `lhs` may be (M, K).

    Raises ValueError where they do not agree.
    """
    check_shape("lhs", lhs, "K", "M")
    check_shape("rhs", rhs, "M", "N")
    check_shape("group_sizes", group_sizes, "G")
    lhs = oriented("trans_lhs", lhs, -1, rhs.shape[0], None)
    (K, M), N = lhs.shape, rhs.shape[1]
    check_axes(lhs=(lhs, "K, M"), rhs=(rhs, "M, N"))
    return M, K, N, group_sizes.shape[0]


def check_counts(M: int, G: int, dtype: torch.dtype) -> None:
    if dtype not in INDICES:
        raise TypeError(f"group_sizes_dtype must be int32 or int64, not {dtype}")
    if M < 0 or G < 1:
        raise ValueError(f"there must be rows, or none, and a group at least, but M={M} and G={G}")
