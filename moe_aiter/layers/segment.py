"""Segment GEMM under the name, and with the call, that FlashInfer documents."""

from functools import partial

import torch
from torch import Tensor

from ..kernels.base.check import check_flags, check_shape, check_size, check_tensor, checked, renamed
from ..kernels.grouped.segment_gmm import segment_gmm
from ..kernels.grouped.segments import check_count
from ..op import check_backend, use
from ..switches import inside

ORDER = "`out` is an argument by name alone; seg_lens, seg_indptr, weight_indices follow weight_column_major"
BACKENDS = ("auto", "sm80", "sm90", "triton", "torch")


class SegmentGEMMWrapper:
    """Multiply each segment of rows by a weight: `y[i] = x[i] @ W[i]`, or `x[i] @ W[weight_indices[i]]`.

    `float_workspace_buffer` is stored, as in FlashInfer, and has no effect: any tensor will do, even an empty
    one.  `backend` is "torch", the reference, or one of "auto", "triton", "sm80" and "sm90",
    which all run the kernel that `segment_gmm` chooses for the device; `run` raises ValueError for another
    name.
    """

    @checked
    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto"):
        check_tensor("float_workspace_buffer", float_workspace_buffer)
        self.backend = backend
        other = torch.empty(2**20, dtype=torch.int8, device=float_workspace_buffer.device)
        self.reset_workspace_buffer(float_workspace_buffer, other)

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Store these buffers, of any dtype, instead.  Raises TypeError unless both are tensors."""
        for kind, buffer in (("float", float_workspace_buffer), ("int", int_workspace_buffer)):
            check_tensor(f"{kind}_workspace_buffer", buffer)
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer

    @renamed(w="weights", lens="seg_lens", indptr="seg_indptr")
    def run(
        self, x: Tensor, weights: Tensor, batch_size: int, weight_column_major: bool,
        seg_lens: Tensor | None = None, seg_indptr: Tensor | None = None,
        weight_indices: Tensor | None = None, *, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Multiply `batch_size` segments of rows of `x` (M, d_in); returns (M, d_out).

        weights: (num_weights, d_in, d_out), or (num_weights, d_out, d_in) with `weight_column_major`.
        seg_lens (batch_size,), seg_indptr (batch_size + 1,) and weight_indices (batch_size,) are `lens`,
            `indptr` and `weight_indices` of `segment_gmm`, on any device.  If both of the first two are
            given, seg_indptr is used.  Without weight_indices there may be more weights than segments.
        out: (M, d_out) as in `segment_gmm`.  It is given by name; in FlashInfer it is the fifth argument.

        Dtypes, gradients and errors are those of `segment_gmm`.  Raises ValueError too for index tensors that
        are not of `batch_size`, and where neither lengths nor indptr are given; TypeError for an `out` in the
        place of `seg_lens`.
        """
        check_backend(self.backend, BACKENDS)
        check_order_of_arguments(seg_lens, seg_indptr, weight_indices, batch_size)
        if seg_indptr is not None:
            seg_lens = None
        check_tensor("x", x)
        check_flags(weight_column_major=weight_column_major)
        matrix = ("d_out", "d_in") if weight_column_major else ("d_in", "d_out")
        check_shape("weights", weights, "num_weights", *matrix)
        check_batch(batch_size, weights, seg_lens, seg_indptr, weight_indices)
        if weight_indices is None:
            weights = weights[:batch_size]
        w = weights.mT if weight_column_major else weights
        lens, indptr, numbers = (
            None if t is None else t.to(x.device, non_blocking=True)
            for t in (seg_lens, seg_indptr, weight_indices)
        )
        options = {"lens": lens, "indptr": indptr, "weight_indices": numbers, "out": out}
        if self.backend == "torch":  # for its gradient too, whenever that runs
            return inside(partial(use, "torch"), segment_gmm, (x, w), options)
        return segment_gmm(x, w, **options)

    forward = run


def check_order_of_arguments(
    seg_lens: Tensor | None, seg_indptr: Tensor | None, weight_indices: Tensor | None, batch_size: int
) -> None:
    """Raise without segments, and where arguments by position have an `out`, or None, before them."""
    tensors = {"seg_lens": seg_lens, "seg_indptr": seg_indptr, "weight_indices": weight_indices}
    for name, t in tensors.items():
        if isinstance(t, Tensor) and t.dim() == 2 and t.is_floating_point():
            raise TypeError(f"{name} is a floating matrix; {ORDER}")
    if seg_lens is None and seg_indptr is None:
        hint = "." if weight_indices is None else f"; {ORDER}"
        raise ValueError(f"Either seg_lens or seg_indptr should be provided{hint}")
    if seg_lens is None and isinstance(seg_indptr, Tensor) and seg_indptr.shape == (batch_size,):
        lengths = f"seg_indptr is ({batch_size},) but batch_size + 1 is {batch_size + 1}"
        raise ValueError(f"{lengths}, as if it were seg_lens; {ORDER}")


def check_batch(
    batch_size: int, weights: Tensor, seg_lens: Tensor | None, seg_indptr: Tensor | None,
    weight_indices: Tensor | None,
) -> None:  # fmt: skip
    """Raise unless the index tensors fit `batch_size` segments."""
    check_count("batch_size", batch_size)
    tensors = {"seg_lens": seg_lens, "seg_indptr": seg_indptr, "weight_indices": weight_indices}
    for name, t in tensors.items():
        if t is not None:
            if isinstance(t, Tensor) and t.is_meta and not weights.is_meta:
                raise ValueError(f"{name} is on meta, without numbers, but weights is on {weights.device}")
            more = " + 1" if name == "seg_indptr" else ""
            check_shape(name, t, f"batch_size{more}")
            length = batch_size + bool(more)
            check_size(f"{name} is ({{}},)", t.shape[0], f"batch_size{more} is {{}}", length)
    if weight_indices is None and weights.shape[0] < batch_size:
        raise ValueError(
            f"batch_size is {batch_size} but there are {weights.shape[0]} weights and no indices"
        )
