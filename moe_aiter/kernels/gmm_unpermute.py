"""Grouped matmul whose rows go home: forward the experts' second product, backward the gradient of x.

    out[t] = sum over j of s[t, j] * rows[rank[t, j]],   rows[s:e] = x[s:e] @ w[g] + bias[g]

R rows, K in, N out.  The rows (R, N) live only between the product and the sum, a chunk of their columns
at a time.
"""

from ..op import define_op, takes
from ._check import check_float, check_shape, check_size
from ._tile import TILE_DTYPES
from .gmm import gmm_op, gmm_reference
from .permute import check_plan, launch_unpermute, unpermute_reference

BLOCK = 256  # columns of the widest tile: chunks are multiples, so that no tile is wasted

# reference


def gmm_unpermute_reference(x, w, group_sizes, bias, order, rank, routing_weights, row_bytes):
    return unpermute_reference(gmm_reference(x, w, group_sizes, bias), order, rank, routing_weights)


# launcher


def new_gmm_unpermute(x, w, group_sizes, bias, order, rank, routing_weights, row_bytes):
    check_shape("x", x, "R", "K")
    check_shape("w", w, "G", "K", "N")
    check_float(x=x, w=w)
    check_plan(x, order, rank, routing_weights)
    check_size("x is (R={}, K)", x.shape[0], "order is (R={},)", order.shape[0])
    return x.new_empty(rank.shape[0], w.shape[2])


def column_chunks(columns: int, column_bytes: int, most_bytes: int) -> list[slice]:
    """Even chunks of columns, as few as have `most_bytes` at most, or one block of columns each."""
    blocks = max(-(-columns // BLOCK), 1)
    fit = max(most_bytes // (BLOCK * column_bytes), 1)
    width = -(-blocks // -(-blocks // fit)) * BLOCK
    return [slice(first, min(first + width, columns)) for first in range(0, columns, width)]


@takes(*TILE_DTYPES)
def launch_gmm_unpermute(out, x, w, group_sizes, bias, order, rank, routing_weights, row_bytes):
    for n in column_chunks(out.shape[1], x.shape[0] * x.element_size(), row_bytes):
        # one expression: a chunk of rows is gone before the next one comes
        launch_unpermute(
            out[:, n],
            gmm_op(x, w[:, :, n], group_sizes, None if bias is None else bias[:, n]),
            order, rank, routing_weights,
        )  # fmt: skip


# op


gmm_unpermute_op = define_op(
    "gmm_unpermute(Tensor x, Tensor w, Tensor group_sizes, Tensor? bias, Tensor order, Tensor rank, "
    "Tensor? routing_weights, SymInt row_bytes) -> Tensor",
    new=new_gmm_unpermute,
    reference=gmm_unpermute_reference,
    triton=launch_gmm_unpermute,
)
