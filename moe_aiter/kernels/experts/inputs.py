"""The inputs of the experts as one tuple, checks that every backend needs, and sizes of column chunks.

`row_bytes` decides how many bytes the rows of Y (forward) and of dX (backward) may take at a time.  R = T * k
rows of H columns are often the largest tensor of a step, and they live only from a product to the sum of each
token's rows.  In chunks of columns they take less memory, but each chunk reads the product's rows of I or 2I
columns again and adds some launches.  So `row_bytes` takes as few chunks as keep these rows from setting the
peak.  A step also needs, above its inputs, at the moments when it needs most:

    forward   O + Z + A                   + rows of Y
    backward  O + dZ + dWdown + s * A                       dZ in the memory of Z
              O + dZ + dWdown + dX        + rows of dX
              O + dZ + dWdown + dX + dWgate_up

The rows may lift the highest of these by an eighth.  With T 24576, H 1536, I 256, E 128, k 8 the highest is
the last, 624 MiB; Y or dX in one piece take 576 MiB and would lift it to 1008, in 2 and 3 chunks to 648.
"""

from typing import Annotated, NamedTuple

from torch import Tensor

from ...op import notes_of, once
from ..base.activations import get_activation
from ..base.check import (
    Extra,
    Index,
    Operand,
    check_device,
    check_fields,
    check_order,
    check_own_memory,
    check_plan_values,
    check_shape,
    check_size,
    check_sizes,
    check_whole_shape,
    needs_grad,
)
from ..base.fp8 import ROW_BLOCK
from ..base.sources import by_source
from ..base.tile import BLOCK
from ..quantize.blocks import most_row_blocks


class ExpertInputs(NamedTuple):
    """The inputs of the experts, which are the arguments of `expert_loop_op`, in order.

    x and the weights share a dtype, float32, bfloat16, float16 or float64; the weights may have any strides.
    `order`, `rank` and `group_sizes` are those of `sort_by_expert`.  Backward alone needs z
    (R, width), which has no rows without `save_z`.  Differentiable in the first six; a frozen input costs
    nothing.  A weight with a main gradient, of its shape and any floating dtype, has its gradient added
    there; autograd gets None.
    """

    x: Annotated[Operand, "T, H"]
    gate_up: Annotated[Operand, "E, width, H"]
    gate_up_bias: Annotated[Extra, "E, width"] | None
    down: Annotated[Operand, "E, H, I"]
    down_bias: Annotated[Extra, "E, H"] | None
    routing_weights: Annotated[Extra, "T, k"]
    order: Annotated[Index, "R"]
    rank: Annotated[Index, "T, k"]
    group_sizes: Annotated[Index, "E"]
    activation: str
    interleaved: bool
    save_z: bool
    gate_up_main_grad: Tensor | None = None  # (E, width, H)
    down_main_grad: Tensor | None = None  # (E, H, I)

    def need_grad(self) -> bool:
        """Whether a gradient of one of the differentiable inputs is needed."""
        biases = self.gate_up_bias, self.down_bias
        return needs_grad(self.x, self.gate_up, self.down, self.routing_weights, *biases)


notes_of(ExpertInputs)  # here, because torch.compile, which traces `check_experts`, cannot read annotations


@once
def check_experts(i: ExpertInputs) -> None:
    """Raise ValueError for shapes or devices that do not fit, TypeError for dtypes, naming both sides."""
    check_shape("rank", i.rank, "T", "k")
    check_sizes(k=i.rank.shape[1])
    size = check_fields(i)
    width, asked = size["width"], get_activation(i.activation).projections * size["I"]
    check_size("gate_up is (E, width={}, H)", width, f"{i.activation} and down ask for {{}}", asked)
    check_order(i.order, i.rank)
    for name in ("gate_up", "down"):
        check_main_grad(f"{name}_main_grad", getattr(i, f"{name}_main_grad"), getattr(i, name).shape, i.x)


def check_expert_values(i) -> None:
    """Raise ValueError for a plan that contradicts itself; this synchronises."""
    check_plan_values(i.order.shape[0], i.group_sizes, i.order, i.rank)


def check_main_grad(name: str, main_grad: Tensor | None, shape: tuple, x: Tensor) -> None:
    """Raise unless the gradient of a weight of that shape, from the device of `x`, can be added to it."""
    if main_grad is None:
        return
    check_whole_shape(name, main_grad, shape)
    if not main_grad.is_floating_point():
        raise TypeError(f"{name} must be floating, not {main_grad.dtype}")
    check_own_memory(name, main_grad)
    check_device(x=x, **{name: main_grad})


# column chunks


SLACK = 8  # the rows may lift the peak by a part in so many
WINDOW_SLACK = 2  # the same of rows that are taken in passes: a window has room for twice a balanced load
MOST = 4  # chunks: more cost more time than their memory is worth


def row_bytes(i: ExpertInputs, row_chunks: int | None) -> tuple[int, int]:
    """Return the most bytes for the rows of Y and for those of dX: for `row_chunks`, or by the rule above.

    Without gradients the limits are those of training every weight.  Sizes that a compiler does not know are
    compared by `max` alone, which the compiler can record.
    """
    return limits(i, row_chunks, *step_bytes(i))


def limits(i: ExpertInputs, row_chunks: int | None, forward: int, late: int, rest: int) -> tuple[int, int]:
    """Do as `row_bytes`, given what `step_bytes` returns."""
    least = slice_bytes(i, MOST if row_chunks is None else row_chunks)
    if row_chunks is not None:
        return least, least
    limit = rest + rest // (SLACK if by_source.get() is None else WINDOW_SLACK)
    return max(limit - forward, least), max(limit - late, least)


def row_bytes_fp8(i: ExpertInputs, row_chunks: int | None) -> tuple[int, int, int]:
    """Return the same where all products are of 8 bits, and the peak of a step in the dtype of x.

    The 8-bit copies leave less room for the rows below that peak, which they shall not lift.
    """
    (T, H), (E, width, _), R, inner = i.x.shape, i.gate_up.shape, i.order.shape[0], i.down.shape[2]
    size, (forward, late, rest) = i.x.element_size(), step_bytes(i)
    y, dx = limits(i, row_chunks, forward, late, rest)
    peak = max(rest, forward + min(y, R * H * size), late + min(dx, R * H * size))
    if row_chunks is not None:
        return y, dx, peak
    by_columns = most_row_blocks(R, E) * width * (ROW_BLOCK + 4)  # of dz, which is freed; with scales
    forward += T * H + i.down.numel() + R * inner - R * inner * size
    late += T * H + i.gate_up.numel() + R * width + by_columns - R * width * size
    least = slice_bytes(i, MOST)
    return min(y, max(peak - forward, least)), min(dx, max(peak - late, least)), peak


def slice_bytes(i: ExpertInputs, chunks: int) -> int:
    """The bytes of the rows in so many chunks of columns."""
    return -(-i.x.shape[1] // (chunks * BLOCK)) * BLOCK * i.order.shape[0] * i.x.element_size()


def step_bytes(i: ExpertInputs) -> tuple[int, int, int]:
    """Return what is there beside the rows of Y and beside those of dX, and the most without any rows."""
    (T, H), (E, width, _), R, inner = i.x.shape, i.gate_up.shape, i.order.shape[0], i.down.shape[2]
    size, every = i.x.element_size(), not i.need_grad()
    of_x, of_gate_up, of_down = (every or t.requires_grad for t in (i.x, i.gate_up, i.down))
    out, z, a = T * H * size, R * width * size, R * inner * size
    forward = out + a + (z if i.save_z else 0)
    early = out + z + (E * H * inner * size if of_down and i.down_main_grad is None else 0)
    late = early + (T * H * size if of_x else 0)
    last = late + (E * width * H * size if of_gate_up and i.gate_up_main_grad is None else 0)
    return forward, late, max(forward, early + (a if of_down else 0), last)
