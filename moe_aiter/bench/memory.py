"""`moe-aiter info --memory`: the memory of one MoE layer in a training step on a GPU, by option.

The sizes of the parts are those of docs/memory.md.  How many rows of y and dx are there at a time is asked of
the rule that the layer itself uses, `kernels/experts/inputs.py`.
"""

import torch

from ..distributed.slots import window_rows
from ..distributed.transport import region_sizes
from ..kernels import hopper
from ..kernels.base.fp8 import ROW_BLOCK
from ..kernels.base.tile import column_slices
from ..kernels.experts.fp8 import ALL, BLOCK
from ..kernels.experts.inputs import MOST, row_bytes, row_bytes_fp8, slice_bytes
from ..kernels.experts.tiers import PORTABLE, Product, meta_experts, products, tier
from ..kernels.grouped import tgmm
from ..kernels.quantize.blocks import most_row_blocks
from .problem import Shape

MIB = 2**20
DTYPES = "bfloat16", "float16", "float32"
SCALE = 4  # bytes of a float32
ROUTING = 20  # bytes for each choice of a token: its weight 4, id 8, order 4, rank 4
ROUTING_OF_RANKS = 16  # for each choice of all ranks that share the experts
ROWS = 2  # the default of `parallelize`
RECIPES = "e4m3", "e4m3" + ALL, BLOCK  # with e5m2 for gradients they take the same
OPTIONS = {}, {"recompute": "z"}, {"row_chunks": 2}, {"row_chunks": 4}
NOTE = """\
held: between forward and backward, for each layer.  forward, backward: the most in that pass of one layer,
with output and gradients, without the weights and x"""


def report_lines(name: str, shape: Shape, dtype: torch.dtype, target: str, portable: str) -> list[str]:
    """Return a head, the memory of weights and their optimizer, and a row for each option, in MiB.

    `portable` is as for `Step`.
    """
    dtype_name = str(dtype).removeprefix("torch.")
    head = f"{name} on {target}, {dtype_name}, MiB: T, H, I, E, k = {shape}; {shape.activation}"
    table = [("one layer", "held", "forward", "backward")]
    found = steps(shape, dtype, portable)
    for words, step in found.items():
        table.append((words, *(f"{n / MIB:.0f}" for n in (step.held(), *step.peaks()))))
    rows = [f"{first:<20}  " + "".join(f"{n:>10}" for n in rest) for first, *rest in table]
    if len(found) == len(OPTIONS):
        rows.append("no rows of fp8: these sizes, this dtype or this GPU would multiply in 16 bits")
    return [head, *figures(of_weights(shape, dtype, shape.num_experts)), "", *rows, *NOTE.splitlines()]


def steps(shape: Shape, dtype: torch.dtype, portable: str) -> dict[str, "Step"]:
    """Return the step of each option, by the words that name it."""
    recipes = RECIPES if multiplies_8_bits(shape, dtype) and not portable else ()
    found = {}
    for options in (*OPTIONS, *({"fp8": recipe} for recipe in recipes)):
        words = ", ".join(f"{option}={value!r}" for option, value in options.items()) or "default"
        found[words] = Step(shape, dtype, portable=portable, **options)
    return found


def lines_of_layers(shape: Shape, dtype: torch.dtype, portable: str, layers: int) -> list[str]:
    """Return the most that so many layers take in a training step, by option."""
    fixed, found = of_weights(shape, dtype, shape.num_experts), {}
    for words, step in steps(shape, dtype, portable).items():
        of_one = step.peaks()[1] - fixed["gradients"] - step.held() + step.x
        found[words] = layers * (sum(fixed.values()) + step.held()) + of_one
    head = (
        f"forward and backward of {layers} layers at most with AdamW's states; the rest of the model on top"
    )
    return ["", head, *figures(found)]


def lines_of_ranks(shape: Shape, dtype: torch.dtype, ranks: int) -> list[str]:
    """Return what each of so many ranks has, which share the experts; their peaks are not predicted."""
    i, size = Step(shape, dtype).i, dtype.itemsize
    choices = ranks * len(i.order)  # of all ranks' tokens
    z = window_rows(choices, int(min(ROWS / ranks, 1) * choices)) * shape.width * size
    found = of_weights(shape, dtype, -(-shape.num_experts // ranks))
    found["held"] = i.x.numel() * size + z + choices * ROUTING_OF_RANKS
    found["buffer of all layers"] = sum(region_sizes(ranks, i.x, i.routing_weights, shape.num_experts))
    head = f"each of {ranks} ranks that share the experts, rows={ROWS}; the buffer, with symmetric memory"
    return ["", head, *figures(found)]


def of_weights(shape: Shape, dtype: torch.dtype, num_experts: int) -> dict[str, int]:
    """The bytes that belong to the weights of the router and of so many experts."""
    of_expert = shape.hidden * (shape.width + shape.intermediate)
    weights = (num_experts * of_expert + shape.num_experts * shape.hidden) * dtype.itemsize
    return {"weights": weights, "gradients": weights, "AdamW's two states": 2 * weights}


def figures(found: dict[str, int]) -> list[str]:
    return [f"{words:<20}  {n / MIB:>10.0f}" for words, n in found.items()]


def multiplies_8_bits(shape: Shape, dtype: torch.dtype) -> bool:
    """Whether Hopper's 8-bit kernels take the sizes; without them the memory of `fp8` is another."""
    sizes = shape.hidden % hopper.GATHERED_K == 0 and shape.intermediate % 64 == 0
    return dtype in hopper.DTYPES and sizes


class Step:
    """The bytes of the parts of a training step with these options, if every weight and x have gradients.

    `portable` is a reason why no product runs on Hopper's kernels, as for `tier`.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, *, recompute: str = "none", row_chunks: int | None = None,
        fp8: str | None = None, portable: str = "",
    ) -> None:  # fmt: skip
        T, H, inner, E, k = shape.sizes
        self.R, self.H, self.size, self.fp8, self.row_chunks = T * k, H, dtype.itemsize, fp8, row_chunks
        how = {"bias": shape.bias, "interleaved": shape.interleaved, "transposed": shape.transposed}
        i = meta_experts(shape.sizes, shape.activation, **how, dtype=dtype)
        for t in (i.x, i.gate_up, i.down):
            t.requires_grad_()
        self.i = i._replace(save_z=recompute == "none")
        self.x, self.z, self.a = (t * self.size for t in (T * H, self.R * shape.width, self.R * inner))
        self.saved_z = self.z if self.i.save_z else 0
        self.gate_up, self.down = i.gate_up.nbytes, i.down.nbytes
        self.scores, self.routing = T * E * SCALE, self.R * ROUTING + E * SCALE
        self.kept_scores = self.scores if k == 1 else 0  # by the router
        # with 8-bit products: numbers of one byte, with scales
        by_columns = fp8 is not None and fp8.endswith(ALL)  # also of the rows, for the gradients of weights
        self.x8, self.a8, self.z8 = T * (H + SCALE), self.rows8(inner), self.rows8(shape.width)
        self.gate_up8 = i.gate_up.numel() + E * shape.width * SCALE
        self.down8 = i.down.numel() + E * H * SCALE
        self.block_rows = most_row_blocks(self.R, E) * ROW_BLOCK if by_columns else 0
        self.a_columns8, self.z_columns8 = self.block_rows * inner, self.block_rows * shape.width
        self.down_rows, self.up_rows = self.gathered(products(i), portable)
        kept_scales = E * (shape.width + inner) * SCALE if fp8 not in (None, BLOCK) and self.i.save_z else 0
        self.kept8 = kept_scales + (self.x8 if by_columns else 0)

    def rows8(self, columns: int) -> int:
        scales = -(-columns // ROW_BLOCK) if self.fp8 == BLOCK else 1
        return self.R * (columns + SCALE * scales)

    def gathered(self, found: dict[str, Product], portable: str) -> tuple[int, ...]:
        """The rows that portable kernels gather for the gradients of down and gate_up, at a time."""
        sizes = []
        for name in ("dW_down", "dW_up"):
            i, runs = found[name].inputs, tier(found[name], portable)
            sizes.append(gathered(i.x, i.y, len(i.group_sizes)) if runs.name == PORTABLE else 0)
        return tuple(sizes)

    def held(self) -> int:
        """Return what is kept between forward and backward: x, z, the routing, and parts of 8 bits."""
        return self.x + self.saved_z + self.routing + self.kept_scores + self.kept8

    def peaks(self) -> tuple[int, int]:
        """Return the most in forward and in backward, without weights and x, with output and gradients."""
        if self.block_rows:
            *limits, peak = row_bytes_fp8(self.i, self.row_chunks)
        else:
            limits, peak = row_bytes(self.i, self.row_chunks), 0
        y, dx = map(self.rows, limits)
        if self.fp8 is None:
            forward = [self.a + y]
            early, late = self.z + self.down, self.z + self.down + self.x
            backward = [early + self.a + self.down_rows, late + max(dx, self.gate_up + self.up_rows)]
        else:
            x8 = 0 if self.block_rows else self.x8  # which is kept there
            forward = [self.a + max(x8 + self.gate_up8, self.a8), self.a8 + self.down8 + y]
            backward = self.backward_all(dx, peak) if self.block_rows else self.backward_rows(dx)
        base = self.x + self.routing + self.kept8
        return base + self.saved_z + self.scores + max(forward), base + self.kept_scores + max(backward)

    def backward_rows(self, dx: int) -> list[int]:
        """The stages of backward where the gradients of the weights are not products of 8 bits."""
        late = self.z + self.down + self.x
        return [
            self.z + self.a + self.x8 + max(self.down + self.down_rows, self.down8),
            late + max(self.gate_up + self.up_rows, self.z8 + self.gate_up8 + dx),
        ]

    def backward_all(self, dx: int, peak: int) -> list[int]:
        """The stages of backward where all products are of 8 bits; `peak` as `row_bytes_fp8` returns it."""
        room = peak - self.x - self.x8
        down = self.slice8(room - self.x8 - self.z - self.a_columns8 - self.down)
        up = self.slice8(room - self.x - self.down - self.z_columns8 - self.gate_up)
        late = self.down + self.z_columns8
        return [
            self.z + self.a + self.x8 + max(self.a_columns8, self.down8),
            self.z + self.a_columns8 + self.x8 + self.down + down,
            late + self.z + self.z8,
            late + self.x + max(self.z8 + self.gate_up8 + dx, self.gate_up + up),
        ]

    def rows(self, most: int) -> int:
        """The rows of y or dx that are there at a time, if they may have so many bytes."""
        return widest(self.H, self.R * self.size, most)

    def slice8(self, room: int) -> int:
        """The columns of 8 bits that the gradient of a weight transposes at a time."""
        least = slice_bytes(self.i, MOST) // (self.R * self.size) * self.block_rows
        return widest(self.H, self.block_rows, max(room, least))


def gathered(x: torch.Tensor, y: torch.Tensor, groups: int) -> int:
    """The bytes of the rows of x that `tgmm.bind_gathered` gathers at a time; 0 if the product does."""
    if not tgmm.gathers_first(x, y, groups):
        return 0
    (M, N), K, size = y.shape, x.shape[1], x.element_size()
    least = M * size * -(-K // (tgmm.MOST * tgmm.BLOCK)) * tgmm.BLOCK
    return widest(K, M * size, max((M * N + groups * K * N) * size // tgmm.SLACK, least))


def widest(columns: int, column_bytes: int, most: int) -> int:
    """The bytes of the widest slice that `column_slices` returns."""
    return max(n.stop - n.start for n in column_slices(columns, column_bytes, most)) * column_bytes
