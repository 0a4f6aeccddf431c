"""Dense and batched matmul on Hopper; see ../gemm.py.

The consumers share a tile, a half of the rows each; or they take TURNS, so that the tensor cores have the
next tile while a consumer finishes the last.  Then only one waits for stages at a time: a barrier of the ring
tells a stage from the one before it, not from that before the last.
"""

from torch import Tensor

from ... import tuning
from .._gemm_choice import FEW
from .._gemm_row import launch_one_row, takes_row
from .._triton import num_programs
from ._gluon import (
    Number,
    aggregate,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    jit_kernel,
    mbarrier,
    ragged,
    ragged_descriptor,
    store_wait,
    tma,
    tma_store,
)  # fmt: skip
from ._launch import beside_groups, flatten, tile_options
from ._pipeline import CONSUMERS, Weights, add_bias, blocks, make_barriers, make_ring, multiply, produce
from ._schedule import Tiles, make_places
from .activations import FUNCTIONS
from .few_rows import launch_few_rows

SHORT = 1024  # the K up to which one row is multiplied as few rows are


@aggregate
class Matrices:
    """The tiles of matrices of M rows, one below the other: no lists are needed to find them."""

    M: Number
    tiles: Number  # row tiles of a matrix
    BLOCK_M: gl.constexpr

    @gluon.jit
    def find(self, tiles, n):
        """Matrix, first row, end row and column tile of the program's n-th tile."""
        row_tile, column = tiles.place(gl.program_id(0) + n * tiles.PROGRAMS)
        matrix = row_tile // self.tiles
        first = matrix * self.M
        return matrix, first + row_tile % self.tiles * self.BLOCK_M, first + self.M, column


@aggregate
class Epilogue:
    """What becomes of a sum: alpha * acc + beta * c + bias, which may be kept, and what is computed of it."""

    out_desc: tma.tensor_descriptor  # (B * M, N), ragged
    z_desc: object  # the same, or None
    buffers: gl.shared_memory_descriptor  # for a block of columns of each consumer
    bias_ptr: object  # (N,), of which none counts past bias_end, or None
    bias_end: Number
    c_ptr: object  # (B, M, N) or None
    c_matrix: Number  # strides
    c_row: Number
    c_column: Number
    alpha: object  # None is 1
    beta: object
    M: Number
    N: Number
    ACTIVATION: gl.constexpr

    @gluon.jit
    def block(self, part, WHO: gl.constexpr, matrix, row, end, column):
        """Finish and store a block of columns."""
        if self.alpha is not None:
            part *= self.alpha
        if self.c_ptr is not None:
            m = (
                row
                - matrix * self.M
                + gl.arange(0, part.shape[0], layout=gl.SliceLayout(1, part.type.layout))
            )
            n = column + gl.arange(0, part.shape[1], layout=gl.SliceLayout(0, part.type.layout))
            mask = (m < self.M)[:, None] & (n < self.N)[None, :]
            base = self.c_ptr + matrix.to(gl.int64) * self.c_matrix
            rows, columns = m.to(gl.int64) * self.c_row, n.to(gl.int64) * self.c_column
            added = gl.load(base + (rows[:, None] + columns[None, :]), mask=mask, other=0.0)
            part += self.beta * added.to(gl.float32)
        part = add_bias(part, self.bias_ptr, 0, column, self.bias_end)
        if self.z_desc is not None:
            self.store(self.z_desc, part, WHO, row, end, column)
        if self.ACTIVATION is not None:
            part = self.ACTIVATION(part)[0]
        self.store(self.out_desc, part, WHO, row, end, column)

    @gluon.jit
    def store(self, desc, part, WHO: gl.constexpr, row, end, column):
        store_wait(pendings=0)
        self.buffers.index(WHO).store(part.to(desc.dtype).reshape(desc.block_type.shape))
        fence_async_shared()
        tma_store(desc, ragged(row, end, column), self.buffers.index(WHO))


@jit_kernel
def gemm_kernel(
    x_desc,  # B matrices (M, K), x_rows apart
    x_rows,
    w_desc,  # B weights (N, K) or (K, N), w_rows apart
    w_rows,
    bias_ptr,  # (N,), or None
    bias_end,
    c_ptr,
    c_strides,
    z_desc,  # (B * M, N) ragged, or None
    out_desc,
    alpha,  # or None, as is beta
    beta,
    B,
    M,
    N,
    K,
    LAYOUT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    STORES: gl.constexpr,
    TURNS: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    READERS: gl.constexpr = 1 if TURNS else CONSUMERS
    a = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    b = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    out = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout)
    ring = make_ring(a, b, False, STAGES, READERS)
    places = make_places(READERS)
    if TURNS:
        turns = make_barriers(CONSUMERS, 1)
    else:
        turns: gl.constexpr = None
    weights = Weights(w_desc, N, K, BLOCK_N, BLOCK_K, LAYOUT, w_rows)
    rows = gl.cdiv(M, BLOCK_M)
    tiles = Tiles(B * rows, gl.cdiv(N, BLOCK_N), B, GROUP_M, PROGRAMS)
    c_matrix, c_row, c_column = c_strides
    finish = Epilogue(out_desc, z_desc, out, bias_ptr, bias_end, c_ptr, c_matrix, c_row, c_column,
                      alpha, beta, M, N, ACTIVATION)  # fmt: skip
    gap = x_rows - M
    gl.warp_specialize(
        [
            (gemm_consumer, (0, weights, ring, tiles, places, turns, finish, BLOCK_M, STORES)),
            (gemm_consumer, (1, weights, ring, tiles, places, turns, finish, BLOCK_M, STORES)),
            (produce, (x_desc, weights, None, None, ring, tiles, Matrices(M, rows, BLOCK_M), places, gap)),
        ],
        [4, 4],
        [232, 40],
    )


@gluon.jit
def gemm_consumer(
    WHO: gl.constexpr, weights, ring, tiles, places, turns, finish,
    BLOCK_M: gl.constexpr, STORES: gl.constexpr,
):  # fmt: skip
    i = 0
    if turns is None:
        for n in range(tiles.mine()):
            matrix, first, end, tile_n = places.get(n)
            acc, i = multiply(WHO, weights, ring, i, weights.K, BLOCK_M, None)
            row = first + WHO * (BLOCK_M // 2)
            finish_tile(acc, WHO, finish, matrix, row, end, tile_n * weights.BLOCK_N, STORES)
    else:
        for n in range(WHO, tiles.mine(), CONSUMERS):
            matrix, first, end, tile_n = places.get(n)
            mbarrier.wait(turns.index(WHO), n // CONSUMERS & 1 ^ 1 - WHO)
            i = n * gl.cdiv(weights.K, weights.BLOCK_K)
            acc, i = multiply(0, weights, ring, i, weights.K, 2 * BLOCK_M, None, last=turns.index(1 - WHO))
            finish_tile(acc, WHO, finish, matrix, first, end, tile_n * weights.BLOCK_N, STORES)
    store_wait(pendings=0)


@gluon.jit
def finish_tile(acc, WHO: gl.constexpr, finish, matrix, row, end, column, STORES: gl.constexpr):
    parts = blocks(acc, STORES)
    for j in gl.static_range(STORES):
        finish.block(parts[j], WHO, matrix, row, end, column + j * (acc.shape[1] // STORES))


# launcher


def launch_gemm(
    outs: tuple[Tensor, Tensor], x: Tensor, w: Tensor, bias: Tensor | None, c: Tensor | None,
    activation: str, alpha: float, beta: float, dtype, save_z: bool,
    *, config: tuning.Config | None = None,
) -> None:  # fmt: skip
    (B, M, K), N, rows = x.shape, w.shape[2], w.stride(2) != 1
    few = M <= FEW and rows
    if config is not None and (config.block_m <= FEW) != few:  # a row of a user's file: another product's
        config = None
    if K > SHORT and takes_row(x, w, config):
        return launch_one_row(outs, x, w, bias, c, activation, alpha, beta, save_z, config)
    if few:
        config = None if config is not None and config.block_m == 1 else config
        return launch_few_rows(outs, x, w, bias, c, activation, alpha, beta, save_z, config)
    out, z = outs
    op = f"hopper_gemm{'_full' if c is not None else '_act' if activation else ''}"
    config = config or tuning.lookup(op, x.dtype, B * M, N, K, B)
    height = config.block_m if config.turns else config.block_m // 2
    config = beside_groups(config, 2 * height * config.store_n, 1, x.itemsize)
    (x, x_rows), (w, w_rows), (out, _) = flatten(x), flatten(w.mT if rows else w), flatten(out)
    box = height, config.store_n
    w_box = (config.block_n, config.block_k) if rows else (config.block_k, config.block_n)
    bias, bias_end = (None, 0) if bias is None else (bias.contiguous(), N)
    if bias is None and op != "hopper_gemm":
        # nothing is read of it, but what waits for a bias is not computed early, when there would be no
        # registers to keep it in
        bias = out
    programs = num_programs(x)
    gemm_kernel[(programs,)](
        descriptor(x, config.block_m, config.block_k), x_rows,
        descriptor(w, *w_box), w_rows,
        bias, bias_end, c, (0, 0, 0) if c is None else c.stride(),
        ragged_descriptor(flatten(z)[0], *box) if save_z else None, ragged_descriptor(out, *box),
        None if alpha == 1 else alpha, None if c is None else beta, B, M, N, K,
        LAYOUT="rows" if rows else "columns", ACTIVATION=FUNCTIONS[activation] if activation else None,
        STORES=config.block_n // config.store_n, TURNS=bool(config.turns), PROGRAMS=programs,
        **tile_options(config),
    )  # fmt: skip
