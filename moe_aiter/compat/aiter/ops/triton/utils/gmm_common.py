"""Random inputs, outputs and checks for grouped products, as in AITER's `aiter.ops.triton.utils.gmm_common`.

M rows, G groups, K in, N out.  `gmm` multiplies lhs (M, K) by rhs (G, K, N) or (G, N, K), and `ptgmm` and
`nptgmm` multiply lhs (K, M) or (M, K) by rhs (M, N).  Differences from AITER:

* Errors are ValueError and TypeError, not AssertionError.  M may be 0.
* Tensors may have any floating dtype.  A contiguous square operand is (K, N) or (K, M), not an error.
* A `rng_seed` seeds a generator of the call, so the values are not AITER's.  torch's generator keeps its
  state; None uses it.
* The default device is the CPU on a machine without a GPU.
* Where AITER has more than eight arguments by position, those after the eighth are keywords.
"""

import torch
from torch import Tensor

from ......kernels.base.check import (
    FLOATS,
    INDICES,
    check_axes,
    check_device,
    check_float,
    check_index,
    check_not_negative,
    check_probability,
    check_shape,
    check_sizes,
    check_tensor,
    checked,
    oriented,
)

__all__ = [
    "DEVICE", "DTYPE", "DTYPE_STR", "GROUP_SIZES_DTYPE", "GROUP_SIZES_DTYPE_STR", "NUM_GROUP_SIZES",
    "RNG_SEED", "SUPPORTED_DTYPES", "SUPPORTED_DTYPES_STR", "SUPPORTED_GROUP_SIZES_DTYPES",
    "SUPPORTED_GROUP_SIZES_DTYPES_STR", "TRANS_LHS", "TRANS_RHS", "UNUSED_EXPERTS_PROB", "UNUSED_TOKENS_PROB",
    "check_bias_shape_stride", "check_group_sizes_dtype", "check_input_device_dtype", "dtype_from_str",
    "gen_gmm_input", "gen_gmm_output", "gen_gmm_tensors", "gen_group_sizes", "gen_multiple_group_sizes",
    "gen_tgmm_bias_grad", "gen_tgmm_input", "gen_tgmm_output", "gen_tgmm_tensors", "gen_uniform_group_sizes",
    "get_gmm_output", "get_gmm_shape", "get_gmm_transposition", "get_tgmm_bias_grad", "get_tgmm_output",
    "get_tgmm_shape", "get_tgmm_transposition", "group_sizes_dtype_from_str", "is_power_of_2",
    "str_from_dtype", "str_from_group_sizes_dtype",
]  # fmt: skip

FLOAT_NAMES = {"fp16": torch.float16, "bf16": torch.bfloat16}
INDEX_NAMES = {"int32": torch.int32, "int64": torch.int64}

SUPPORTED_DTYPES_STR, SUPPORTED_DTYPES = set(FLOAT_NAMES), set(FLOAT_NAMES.values())
SUPPORTED_GROUP_SIZES_DTYPES_STR, SUPPORTED_GROUP_SIZES_DTYPES = set(INDEX_NAMES), set(INDEX_NAMES.values())

DTYPE_STR, DTYPE = "bf16", torch.bfloat16
GROUP_SIZES_DTYPE_STR, GROUP_SIZES_DTYPE = "int32", torch.int32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RNG_SEED = 0
NUM_GROUP_SIZES = 1
TRANS_LHS = TRANS_RHS = False
UNUSED_TOKENS_PROB, UNUSED_EXPERTS_PROB = 0.0, 0.1

# names of dtypes


@checked
def dtype_from_str(dtype_str: str) -> torch.dtype:
    """Return the dtype that "fp16" or "bf16" names, in any case; a first letter "i" or "o" is left out."""
    name = dtype_str.strip().lower()
    return look_up("dtype_str", FLOAT_NAMES, name[1:] if name[:1] in ("i", "o") else name)


@checked
def str_from_dtype(dtype: torch.dtype) -> str:
    return look_up("dtype", {kind: name for name, kind in FLOAT_NAMES.items()}, dtype)


@checked
def group_sizes_dtype_from_str(dtype_str: str) -> torch.dtype:
    return look_up("dtype_str", INDEX_NAMES, dtype_str.strip().lower())


@checked
def str_from_group_sizes_dtype(dtype: torch.dtype) -> str:
    return look_up("dtype", {kind: name for name, kind in INDEX_NAMES.items()}, dtype)


def look_up(argument: str, choices: dict, key: object):
    if key not in choices:
        raise ValueError(f"{argument} must be one of {', '.join(map(str, choices))}, not {key}")
    return choices[key]


# checks


@checked
def is_power_of_2(x: int) -> bool:
    return x > 0 and not x & (x - 1)


def check_group_sizes_dtype(dtype: torch.dtype) -> None:
    """Raise TypeError unless `dtype` is int32 or int64."""
    check_index_dtype(dtype=dtype)


def check_index_dtype(**dtypes: torch.dtype) -> None:
    for name, dtype in dtypes.items():
        if dtype not in INDICES:
            raise TypeError(f"{name} must be int32 or int64, not {dtype}")


def check_float_dtype(**dtypes: torch.dtype) -> None:
    for name, dtype in dtypes.items():
        if dtype not in FLOATS:
            raise TypeError(f"{name} must be a floating dtype, not {dtype}")


def check_input_device_dtype(
    lhs: Tensor, rhs: Tensor, group_sizes: Tensor, bias: Tensor | None = None
) -> None:
    """Raise unless all tensors share a device, the floating ones share a dtype and the sizes are integers."""
    tensors = {"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes} | ({} if bias is None else {"bias": bias})
    for name, x in tensors.items():
        check_tensor(name, x)
    check_device(**tensors)
    check_index(group_sizes=tensors.pop("group_sizes"))
    check_float(**tensors)


@checked
def check_bias_shape_stride(bias: Tensor, G: int, N: int) -> None:
    """Raise ValueError unless `bias` is (G, N) and row-major."""
    if bias.shape != (G, N):
        raise ValueError(f"bias must be (G, N) = {(G, N)}, but it has shape {tuple(bias.shape)}")
    check_row_major(bias=bias)


def check_row_major(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if not x.is_contiguous():
            raise ValueError(f"{name} must be row-major, but its strides are {x.stride()}")


def check_counts(M: int = 0, **sizes: int) -> None:
    """Raise unless M is at least 0 and every other size at least 1."""
    check_not_negative(M=M)
    check_sizes(**sizes)


# group sizes


@checked
def gen_uniform_group_sizes(
    M: int, G: int, group_sizes_dtype: torch.dtype = GROUP_SIZES_DTYPE, device: torch.device | str = DEVICE
) -> Tensor:
    """(G,) int32, or int64: M rows in G groups of as equal sizes as there are, the larger ones first."""
    check_counts(M, G=G)
    check_index_dtype(group_sizes_dtype=group_sizes_dtype)
    sizes = torch.full((G,), M // G, dtype=group_sizes_dtype, device=device)
    sizes[: M % G] += 1
    return sizes


@checked
def gen_group_sizes(
    M: int, G: int, group_sizes_dtype: torch.dtype = GROUP_SIZES_DTYPE, device: torch.device | str = DEVICE,
    rng_seed: int | None = RNG_SEED, unused_tokens_prob: float = UNUSED_TOKENS_PROB,
    unused_experts_prob: float = UNUSED_EXPERTS_PROB,
) -> Tensor:  # fmt: skip
    """(G,) int32 or int64: each of M rows in a random group of those, at least one, drawn to have rows.

    A row is in no group with `unused_tokens_prob`, a group has no rows with `unused_experts_prob`.
    """
    check_counts(M, G=G)
    check_index_dtype(group_sizes_dtype=group_sizes_dtype)
    check_probability(unused_tokens_prob=unused_tokens_prob, unused_experts_prob=unused_experts_prob)
    generator = seeded(rng_seed)
    used = (torch.rand(G, generator=generator) >= unused_experts_prob).nonzero().flatten()
    used = used if len(used) else torch.randint(G, (1,), generator=generator)
    rows = int((torch.rand(M, generator=generator) >= unused_tokens_prob).sum())
    groups = used[torch.randint(len(used), (rows,), generator=generator)]
    return torch.bincount(groups, minlength=G).to(device, group_sizes_dtype)


@checked
def gen_multiple_group_sizes(
    num_group_sizes: int, M: int, G: int, group_sizes_dtype: torch.dtype = GROUP_SIZES_DTYPE,
    device: torch.device | str = DEVICE,
    rng_seed: int | None = RNG_SEED, unused_tokens_prob: float = UNUSED_TOKENS_PROB,
    unused_experts_prob: float = UNUSED_EXPERTS_PROB, *, group_sizes_0: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return results of `gen_group_sizes`, each of another seed; `group_sizes_0`, if given, is the first."""
    check_sizes(num_group_sizes=num_group_sizes, G=G)
    check_index_dtype(group_sizes_dtype=group_sizes_dtype)
    first = []
    if group_sizes_0 is not None:
        first = [existing_or_new((G,), group_sizes_dtype, device, group_sizes_0=group_sizes_0)]
    seeds = [None if rng_seed is None else rng_seed + i for i in range(len(first), num_group_sizes)]
    unused = unused_tokens_prob, unused_experts_prob
    return first + [gen_group_sizes(M, G, group_sizes_dtype, device, seed, *unused) for seed in seeds]


def seeded(rng_seed: int | None, device: torch.device | str = "cpu") -> torch.Generator | None:
    return None if rng_seed is None else torch.Generator(device).manual_seed(rng_seed)


# tensors of gmm


@checked
def gen_gmm_input(
    M: int, K: int, N: int, G: int, preferred_element_type: torch.dtype = DTYPE,
    group_sizes_dtype: torch.dtype = GROUP_SIZES_DTYPE, device: torch.device | str = DEVICE,
    trans_rhs: bool = TRANS_RHS, *, alt_trans: bool = False, rng_seed: int | None = RNG_SEED,
    unif_group_sizes: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return random normal `lhs` and `rhs`, and random or uniform group sizes.

    With `trans_rhs`, each matrix of `rhs` is stored by columns: (G, N, K) with `alt_trans`, else its view
    (G, K, N).
    """
    check_counts(M, K=K, N=N, G=G)
    check_float_dtype(preferred_element_type=preferred_element_type)
    generator = seeded(rng_seed, device)
    lhs = random_normal(M, K, device=device, generator=generator)
    rhs = stored(trans_rhs, alt_trans, G, K, N, device=device, generator=generator)
    sizes = draw_sizes(unif_group_sizes, M, G, group_sizes_dtype, device, rng_seed)
    return lhs.to(preferred_element_type), rhs.to(preferred_element_type), sizes


@checked
def gen_gmm_output(
    M: int, N: int, preferred_element_type: torch.dtype = DTYPE, device: torch.device | str = DEVICE
) -> Tensor:
    """Return an uninitialised (M, N)."""
    return get_gmm_output(M, N, device, preferred_element_type)


@checked
def gen_gmm_tensors(
    M: int, K: int, N: int, G: int, num_group_sizes: int, input_type: torch.dtype = DTYPE,
    output_type: torch.dtype = DTYPE, group_sizes_dtype: torch.dtype = GROUP_SIZES_DTYPE, *,
    device: torch.device | str = DEVICE, trans_lhs: bool = TRANS_LHS, trans_rhs: bool = TRANS_RHS,
    alt_trans: bool = False, rng_seed: int | None = RNG_SEED, unif_group_sizes: bool = False,
    use_bias: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor], Tensor, Tensor | None]:  # fmt: skip
    """Return `lhs` and `rhs` of `gen_gmm_input`, a list of group sizes, an output and a bias (G, N) or None.

    `unif_group_sizes` is about the first group sizes; the others are random.  `trans_lhs` changes nothing.
    """
    check_float_dtype(input_type=input_type, output_type=output_type)
    lhs, rhs, first = gen_gmm_input(
        M, K, N, G, input_type, group_sizes_dtype, device, trans_rhs,
        alt_trans=alt_trans, rng_seed=rng_seed, unif_group_sizes=unif_group_sizes,
    )  # fmt: skip
    drawn = group_sizes_dtype, device, rng_seed
    group_sizes = gen_multiple_group_sizes(num_group_sizes, M, G, *drawn, group_sizes_0=first)
    out = gen_gmm_output(M, N, output_type, device)
    if not use_bias:
        return lhs, rhs, group_sizes, out, None
    generator = seeded(None if rng_seed is None else rng_seed + 1, device)
    return lhs, rhs, group_sizes, out, random_normal(G, N, device=device, generator=generator).to(input_type)


def random_normal(*shape: int, **how) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, **how)


def stored(by_columns: bool, swapped: bool, *shape: int, **how) -> Tensor:
    """Return random matrices, by columns as views, or with the two axes swapped."""
    if not by_columns:
        return random_normal(*shape, **how)
    x = random_normal(*shape[:-2], shape[-1], shape[-2], **how)
    return x if swapped else x.mT


def draw_sizes(uniform: bool, M: int, G: int, dtype: torch.dtype, device, rng_seed: int | None) -> Tensor:
    if uniform:
        return gen_uniform_group_sizes(M, G, dtype, device)
    return gen_group_sizes(M, G, dtype, device, rng_seed)


# what a call of gmm has


def get_gmm_shape(lhs: Tensor, rhs: Tensor, group_sizes: Tensor) -> tuple[int, int, int, int]:
    """M, K, N and G of `gmm(lhs, rhs, group_sizes)`, where `rhs` may be (G, N, K).

    Raises ValueError where they do not agree.
    """
    rhs = oriented_rhs(lhs, rhs, group_sizes=(group_sizes, "G"))
    return *lhs.shape, rhs.shape[2], rhs.shape[0]


@checked
def get_gmm_output(
    M: int, N: int, device: torch.device | str = DEVICE, preferred_element_type: torch.dtype = DTYPE,
    existing_out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return `existing_out`, or a new tensor (M, N) if there is none.

    Raises ValueError if its shape, dtype or device is another.
    """
    check_counts(M, N=N)
    check_float_dtype(preferred_element_type=preferred_element_type)
    return existing_or_new((M, N), preferred_element_type, device, existing_out=existing_out)


def get_gmm_transposition(lhs: Tensor, rhs: Tensor, out: Tensor) -> tuple[bool, int]:
    """Return whether the matrices of `rhs` are stored by columns, and the distance between columns or rows.

    Raises ValueError for shapes that do not agree, and for strides that leave gaps, which `gmm` accepts.
    """
    rhs = oriented_rhs(lhs, rhs, out=(out, "M, N"))
    check_row_major(lhs=lhs, out=out)
    return layout_of_matrices("rhs", rhs)


def oriented_rhs(lhs: Tensor, rhs: Tensor, **others: tuple[Tensor, str]) -> Tensor:
    """Return `rhs` as (G, K, N); raise unless its axes agree with those of `lhs` and of the others."""
    check_shape("lhs", lhs, "M", "K")
    check_shape("rhs", rhs, "G", "K", "N")
    rhs = oriented("trans_rhs", rhs, -2, lhs.shape[1], None)
    check_axes(lhs=(lhs, "M, K"), rhs=(rhs, "G, K, N"), **others)
    return rhs


def existing_or_new(shape: tuple, dtype: torch.dtype, device: torch.device | str, **existing) -> Tensor:
    """Return the tensor that is given by its name, or a new one."""
    ((name, x),) = existing.items()
    if x is None:
        return torch.empty(shape, dtype=dtype, device=device)
    device = torch.device(device)
    there = x.device.type == device.type and device.index in (None, x.device.index)
    if x.shape != shape or x.dtype != dtype or not there:
        found = f"{x.dtype} {tuple(x.shape)} on {x.device}"
        raise ValueError(f"{name} must be {dtype} {shape} on {device}, but it is {found}")
    return x


def layout_of_matrices(name: str, x: Tensor) -> tuple[bool, int]:
    """Return whether matrices are stored by columns, and their leading dimension."""
    if x.is_contiguous():
        return False, x.shape[-1]
    if not x.mT.is_contiguous():
        raise ValueError(
            f"{name} must be stored by rows or by columns without gaps, but its strides are {x.stride()}"
        )
    return True, x.shape[-2]


# tensors of ptgmm and nptgmm


@checked
def gen_tgmm_input(
    M: int, K: int, N: int, G: int, preferred_element_type: torch.dtype = DTYPE,
    group_sizes_dtype: torch.dtype = GROUP_SIZES_DTYPE, device: torch.device | str = DEVICE,
    trans_lhs: bool = TRANS_LHS, *, alt_trans: bool = False, rng_seed: int | None = RNG_SEED,
    unif_group_sizes: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return random normal `lhs` and `rhs`, and random or uniform group sizes.

    With `trans_lhs`, `lhs` is stored by columns: (M, K) with `alt_trans`, else its view (K, M).
    """
    check_counts(M, K=K, N=N, G=G)
    check_float_dtype(preferred_element_type=preferred_element_type)
    generator = seeded(rng_seed, device)
    lhs = stored(trans_lhs, alt_trans, K, M, device=device, generator=generator)
    rhs = random_normal(M, N, device=device, generator=generator)
    sizes = draw_sizes(unif_group_sizes, M, G, group_sizes_dtype, device, rng_seed)
    return lhs.to(preferred_element_type), rhs.to(preferred_element_type), sizes


@checked
def gen_tgmm_output(
    K: int, N: int, G: int, preferred_element_type: torch.dtype = DTYPE, device: torch.device | str = DEVICE
) -> Tensor:
    """Return an uninitialised (G, K, N)."""
    return get_tgmm_output(K, N, G, device, preferred_element_type)


@checked
def gen_tgmm_bias_grad(
    K: int, G: int, device: torch.device | str = DEVICE, with_bias_grad: bool = False
) -> Tensor:
    """Return an uninitialised float32 (G, K), or an empty tensor without `with_bias_grad`."""
    check_counts(K=K, G=G)
    return torch.empty((G, K) if with_bias_grad else 0, dtype=torch.float32, device=device)


@checked
def gen_tgmm_tensors(
    M: int, K: int, N: int, G: int, num_group_sizes: int, input_type: torch.dtype = DTYPE,
    output_type: torch.dtype = DTYPE, group_sizes_dtype: torch.dtype = GROUP_SIZES_DTYPE, *,
    device: torch.device | str = DEVICE, trans_lhs: bool = TRANS_LHS, trans_rhs: bool = TRANS_RHS,
    alt_trans: bool = False, rng_seed: int | None = RNG_SEED, unif_group_sizes: bool = False,
    use_bias: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor], Tensor, Tensor | None]:  # fmt: skip
    """Return `lhs` and `rhs` of `gen_tgmm_input`, a list of group sizes, an output and a `bias_grad` or None.

    `unif_group_sizes` is about the first group sizes; the others are random.  `trans_rhs` changes nothing.
    """
    check_float_dtype(input_type=input_type, output_type=output_type)
    lhs, rhs, first = gen_tgmm_input(
        M, K, N, G, input_type, group_sizes_dtype, device, trans_lhs,
        alt_trans=alt_trans, rng_seed=rng_seed, unif_group_sizes=unif_group_sizes,
    )  # fmt: skip
    drawn = group_sizes_dtype, device, rng_seed
    group_sizes = gen_multiple_group_sizes(num_group_sizes, M, G, *drawn, group_sizes_0=first)
    out = gen_tgmm_output(K, N, G, output_type, device)
    bias_grad = gen_tgmm_bias_grad(K, G, device, True) if use_bias else None
    return lhs, rhs, group_sizes, out, bias_grad


# what a call of ptgmm or nptgmm has


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


@checked
def get_tgmm_output(
    K: int, N: int, G: int, device: torch.device | str = DEVICE, preferred_element_type: torch.dtype = DTYPE,
    existing_out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return `existing_out`, or a new tensor (G, K, N) if there is none.

    Raises ValueError if its shape, dtype or device is another.
    """
    check_counts(K=K, N=N, G=G)
    check_float_dtype(preferred_element_type=preferred_element_type)
    return existing_or_new((G, K, N), preferred_element_type, device, existing_out=existing_out)


@checked
def get_tgmm_bias_grad(
    K: int, G: int, device: torch.device | str = DEVICE, existing_bias_grad: Tensor | None = None
) -> Tensor:
    """Return `existing_bias_grad` (G, K) float32 filled with zeros, or an empty tensor if there is none.

    Raises ValueError if its shape, dtype, device or strides are others.
    """
    check_counts(K=K, G=G)
    if existing_bias_grad is None:
        return gen_tgmm_bias_grad(K, G, device)
    existing_or_new((G, K), torch.float32, device, existing_bias_grad=existing_bias_grad)
    check_row_major(existing_bias_grad=existing_bias_grad)
    return existing_bias_grad.zero_()


def get_tgmm_transposition(lhs: Tensor, rhs: Tensor, out: Tensor) -> tuple[bool, int]:
    """Return whether `lhs` is stored by columns, and the distance between columns or rows.

    Raises ValueError for shapes that do not agree, and for strides that leave gaps, which `ptgmm` accepts.
    """
    check_shape("lhs", lhs, "K", "M")
    check_shape("rhs", rhs, "M", "N")
    lhs = oriented("trans_lhs", lhs, -1, rhs.shape[0], None)
    check_axes(lhs=(lhs, "K, M"), rhs=(rhs, "M, N"), out=(out, "G, K, N"))
    check_row_major(rhs=rhs, out=out)
    return layout_of_matrices("lhs", lhs)
