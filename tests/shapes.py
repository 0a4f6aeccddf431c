"""The awkward shapes and layouts, each with a name.

@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES)
"""

import torch
from torch import Tensor

from moe_aiter.kernels.base.activations import ACTIVATIONS, get_activation, swiglu_limit, swiglu_softcap

GROUP_SIZES = {
    "even": [32, 32, 32],
    "ragged": [5, 1, 37, 20],
    "empty group first": [0, 9, 4],
    "empty groups between": [7, 0, 0, 12],
    "empty group last": [3, 8, 0],
    "all rows in one group": [0, 50, 0],
    "one group": [19],
    "one row": [0, 1, 0],
    "no rows": [0, 0, 0],
    "many groups": [3, 0, 1, 2] * 9,
}

MATRICES = {  # K, N
    "square": (32, 32),
    "wide": (16, 80),
    "no multiple of any block": (23, 37),
    "one column": (24, 1),
    "one to sum over": (1, 8),
}

LIMITED = swiglu_limit(2.5, 1.5, 0.75, -0.5)  # four unlike numbers, with many random ones beyond them
CAPPED = swiglu_softcap(1.5, 2.5)  # caps that bend most random numbers
NAMES = [*ACTIVATIONS, LIMITED, CAPPED]
KINDS = [(name, False) for name in NAMES] + [(name, True) for name in NAMES if get_activation(name).gated]

TINY = {f"{a} x {b}": (a, b) for a in (0, 1, 5) for b in (0, 1, 5) if (a, b) != (5, 5)}  # K, N or H, I


def in_turn(**sizes: int) -> list[dict[str, int]]:
    """These sizes, but each of them in turn 0 and 1."""
    return [sizes | {name: size} for name in sizes for size in (0, 1)]


def expert_ids(num_tokens: int, num_experts: int, top_k: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """(T, k): each token's distinct experts, uniformly random."""
    return torch.rand(num_tokens, num_experts).argsort(1)[:, :top_k].to(dtype)


def transposed(x: Tensor) -> Tensor:
    """The same values with the last two strides swapped."""
    return x.mT.contiguous().mT


def spread(x: Tensor) -> Tensor:
    """The same values, every stride doubled, with NaN in between."""
    wide = x.new_full([2 * n for n in x.shape], float("nan"))
    view = wide[tuple(slice(None, None, 2) for _ in x.shape)]
    return view.copy_(x)


def one_row_repeated(x: Tensor) -> Tensor:
    """The first row for every row, by a stride of 0, as the gradient of a sum has it."""
    return x[:1].expand_as(x)


LAYOUTS = {
    "contiguous": torch.clone,
    "transposed": transposed,
    "spread": spread,
    "one row repeated": one_row_repeated,
}
