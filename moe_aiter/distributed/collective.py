"""Send tokens to the slots of all ranks, and add up at home what the ranks computed for a token.

    dispatch_tokens    out[r * T + t] = x of rank r [t]                         (T, N) -> (R * T, N)
    combine_tokens     out[t] = sum over r of rows of rank r [own * T + t]      (R * T, N) -> (T, N)

for the R ranks of a process group, `own` being this rank.  Each is the gradient of the other.  A sum adds in
the order of the ranks, in float32 or float64, and is rounded once, so that two runs give the same bits.  Both
use collectives of equal sizes, which wait for nothing on the host: an all-gather and an all-to-all.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.base.check import check_float, check_shape, check_sizes
from ..kernels.rows.permute import UnpermuteInputs
from ..op import define_op, fill, gradients
from ..private_api import process_group

# the newer name; torch 2.11 has the older one alone
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class TokensInputs(NamedTuple):
    """The inputs of both ops."""

    x: Tensor  # (T, N), of `combine_tokens` (R * T, N)
    group: str  # the name of the process group
    ranks: int  # R


def new_dispatch(i: TokensInputs) -> Tensor:
    check_shape("x", i.x, "T", "N")
    check_sizes(ranks=i.ranks)
    return i.x.new_empty(i.ranks * i.x.shape[0], i.x.shape[1])


def new_combine(i: TokensInputs) -> Tensor:
    check_shape("x", i.x, "R * T", "N")
    check_float(x=i.x)
    check_sizes(ranks=i.ranks)
    if i.x.shape[0] % i.ranks:
        raise ValueError(f"x is ({i.x.shape[0]}, N), which is no multiple of {i.ranks} ranks")
    return i.x.new_empty(i.x.shape[0] // i.ranks, i.x.shape[1])


def launch_combine(out: Tensor, i: TokensInputs) -> None:
    received = torch.empty_like(i.x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, i.x.contiguous(), group=process_group(i.group))
    add_parts(out, received, i.ranks)


def add_parts(out: Tensor, parts: Tensor, ranks: int) -> None:
    """Write the sum over the ranks of `parts` (R * T, N), in their order, to `out` (T, N)."""
    columns = max(out.shape[1], math.gcd(out.numel(), 1024))  # rows of a few numbers take longer
    out, parts = out.view(-1, columns), parts.view(-1, columns)
    rows = torch.arange(parts.shape[0], dtype=torch.int32, device=parts.device)
    rank = rows.view(ranks, -1).t().contiguous()  # (T, R): the row of each rank
    fill("unpermute", out, UnpermuteInputs(parts, rows, rank, None))  # which reads `rank` alone


def backward_dispatch(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    return gradients(TokensInputs, x=combine_tokens(dout, *ctx.group))


def backward_combine(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    return gradients(TokensInputs, x=dispatch_tokens(dout, *ctx.group))


def save_group(ctx: Any, i: TokensInputs, output: Tensor) -> None:
    ctx.group = i.group, i.ranks


dispatch_tokens = define_op(
    "dispatch_tokens", TokensInputs, new=new_dispatch, save=save_group, backward=backward_dispatch,
    torch=lambda out, i: all_gather(out, i.x.contiguous(), group=process_group(i.group)),
)  # fmt: skip
combine_tokens = define_op(
    "combine_tokens", TokensInputs, new=new_combine, torch=launch_combine, save=save_group,
    backward=backward_combine,
)  # fmt: skip
