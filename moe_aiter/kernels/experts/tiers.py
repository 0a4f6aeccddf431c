"""The products of a training step of experts, and for each the tier of kernels that computes it and why.

There are two tiers of kernels for GPUs: `hopper` (Gluon, on sm_90) and `portable` (Triton).  A product is
portable where the predicates of kernels/hopper refuse its inputs; they say why.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...op import IMPLS, first_read
from .. import hopper
from ..base.activations import get_activation
from ..grouped.gmm import GroupedIntoInputs
from ..grouped.tgmm import TgmmInputs
from .down import DownGradInputs
from .inputs import ExpertInputs
from .up import UpInputs

HOPPER, PORTABLE = "hopper", "portable"


class Product(NamedTuple):
    """One of the six products: which op computes it from which inputs, and how large it is."""

    op: str
    inputs: tuple
    rows: int  # of all experts
    columns: int
    inner: int  # what is summed over; for the gradient of a weight the rows, of which each expert has its own


class Tier(NamedTuple):
    """The tier that computes a product, and the reason why not Hopper's, or ""."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}" if self.why else self.name


def meta_experts(
    shape: tuple[int, int, int, int, int], activation: str = "swiglu", *, interleaved: bool = False,
    bias: bool = False, transposed: bool = False, dtype: torch.dtype = torch.bfloat16,
) -> ExpertInputs:  # fmt: skip
    """Return inputs without memory for T tokens, H, I, E experts and k choices of each token.

    With `transposed`, gate_up lies in memory as (E, H, width) and down as (E, I, H).
    """
    T, H, inner, E, k = shape
    width = get_activation(activation).projections * inner

    def new(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    def weight(rows: int, columns: int) -> torch.Tensor:
        return new(E, columns, rows).mT if transposed else new(E, rows, columns)

    biases = (new(E, width), new(E, H)) if bias else (None, None)
    routing = new(T, k, dtype=torch.float32), *(new(*n, dtype=torch.int32) for n in ((T * k,), (T, k), (E,)))
    return ExpertInputs(
        new(T, H), weight(width, H), biases[0], weight(H, inner), biases[1], *routing,
        activation, interleaved, True,
    )  # fmt: skip


def products(i: ExpertInputs) -> dict[str, Product]:
    """Return the products of a step by name, in the order of time; `i` may be on the meta device."""
    H, inner, width, R, k = *i.down.shape[1:], i.gate_up.shape[1], len(i.order), i.rank.shape[1]
    z, a, y = (i.x.new_empty(R, columns) for columns in (width, inner, H))
    plan, act = (i.order, i.rank, i.group_sizes), (i.activation, i.interleaved)

    def into(lhs: torch.Tensor, rhs: torch.Tensor, bias: torch.Tensor | None) -> GroupedIntoInputs:
        return GroupedIntoInputs(y, lhs, rhs, i.group_sizes, bias)

    def gradient(x: torch.Tensor, rows: torch.Tensor, w: torch.Tensor) -> TgmmInputs:
        return TgmmInputs(x, rows, i.group_sizes, i.order, k, w.stride(1) < w.stride(2))

    up = UpInputs(i.x, i.gate_up, i.gate_up_bias, *plan, *act, True, 0, None)
    down_grad = DownGradInputs(i.x, z, i.down, i.routing_weights, *plan, *act, True)
    return {
        "up": Product("expert_up", up, R, width, H),
        "down": Product("gmm_into", into(a, i.down.mT, i.down_bias), R, H, inner),
        "down_grad": Product("expert_down_grad", down_grad, R, inner, H),
        "dW_down": Product("tgmm", gradient(i.x, a, i.down), H, inner, R),
        "dx": Product("gmm_into", into(z, i.gate_up, None), R, H, width),
        "dW_up": Product("tgmm", gradient(i.x, z, i.gate_up.mT), H, width, R),
    }


def tier(product: Product, why_not: str = "") -> Tier:
    """Return the tier of a product; `why_not` is a reason against Hopper's kernels that holds for all.

    Looks up the tables of the current GPU, or of `tuning.tables_of`.
    """
    impl: Callable = IMPLS[product.op][HOPPER]
    i, dtype = product.inputs, first_read(product.inputs).dtype
    if why_not:
        return Tier(PORTABLE, why_not)
    if dtype not in impl.takes:
        return Tier(PORTABLE, f"{dtype} has no Hopper kernel")
    if not (fit := impl.fits_on_hopper(i)):
        return Tier(PORTABLE, str(fit) if isinstance(fit, hopper.No) else "its sizes do not fit")
    if not getattr(impl, "should_use", lambda i: True)(i):
        return Tier(PORTABLE, "it is faster for so few rows of an expert")
    return Tier(HOPPER, "")
