"""Dense and batched matmul on Hopper; see ../dense/gemm.py.

Up to 16 rows (`few_rows`): such a product takes as long as reading its weight, so the weight goes from memory
into registers without the detour through shared memory.  A lane's 16 bytes of a row of w are the operands of
two `mma.sync` instructions, if x has the K of a step in the same order.  The warps of a program lie side by
side along K, as a batch of products, and are added up once.  Programs are small, and many run on an SM.  Each
begins at a different step of K, or all would read the same lines of x from L2 at the same time.

More rows (`gemm`): the two consumers share a tile, half of the rows each; or they take TURNS, so that the
tensor cores have the next tile while a consumer finishes the last one.  Then only one consumer waits for
stages at a time: a barrier of the ring tells a stage from the one before it, not from the last but one.
"""

import functools
from collections.abc import Callable

from torch import Tensor

from ... import tuning
from ...invariance import batch_invariant
from ..base.choice import FEW
from ..base.gemm_row import GemmInputs, bind_one_row, bind_split, epilogue_of, finish, splits_of, takes_row
from ..base.launch import bind_kernel, cdiv, num_programs
from .epilogue import FUNCTIONS
from .gluon import (
    Number,
    aggregate,
    beside_groups,
    descriptor,
    fence_async_shared,
    flatten,
    gl,
    gluon,
    jit_kernel,
    mbarrier,
    mma_v2,
    ragged,
    ragged_descriptor,
    store_wait,
    tile_options,
    tma,
    tma_store,
    weights_descriptor,
    weights_layout,
)
from .pipeline import (
    CONSUMERS,
    Weights,
    add_bias,
    allocate_weights,
    blocks,
    make_barriers,
    make_ring,
    multiply,
    produce,
)
from .schedule import Tiles, make_queue

# few_rows: kernel


IN_FLIGHT = 2**15  # numbers, 64 KiB: the weight that an SM should be waiting for at any time

FEW_SMS = 4  # a program on one in so many is too few

finish_few_rows = gluon.jit(finish.fn)


@gluon.jit
def load_words(ptrs, k, depth, ONCE: gl.constexpr, EVEN: gl.constexpr):
    """A condition that always holds keeps a load from being moved behind a branch."""
    mask = depth > 0 if EVEN else k < depth
    if ONCE:
        words = gl.load(ptrs, mask=mask, other=0, eviction_policy="evict_first")
    else:
        words = gl.load(ptrs, mask=mask, other=0)
    return words


@gluon.jit
def in_order(words, dtype: gl.constexpr):
    """Words of two numbers (warps, rows, words) as numbers (warps, rows, K), each lane's own where it is.

    Of 8 words a product wants of lane t the words t and t + 4.  It has the words 4 t to 4 t + 3 of 16.
    """
    W: gl.constexpr = words.shape[0]
    R: gl.constexpr = words.shape[1]
    H: gl.constexpr = words.shape[2]
    words = words.reshape((W, R, H // 16, 4, 2, 2)).permute((0, 1, 2, 4, 5, 3)).reshape((W, R, H))
    low = (words & 0xFFFF).to(gl.uint16).to(dtype, bitcast=True)
    high = (words >> 16).to(gl.uint16).to(dtype, bitcast=True)
    return gl.join(low, high).reshape((W, R, 2 * H))


@gluon.jit
def sixteen(x):
    """Rows of zeros below 8 rows."""
    if x.shape[1] == 8:
        x = gl.join(x, gl.zeros_like(x)).permute((0, 3, 1, 2)).reshape((x.shape[0], 16, x.shape[2]))
    return x


@gluon.jit
def trap_if_negative(n):
    """Stop the kernel where n < 0."""
    asm: gl.constexpr = "{.reg .pred p; setp.lt.s32 p, $1, 0; @p trap; mov.b32 $0, $1;}"
    gl.inline_asm_elementwise(asm, "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1)


@functools.partial(jit_kernel, do_not_specialize=["M"])
def few_rows_kernel(
    x_ptr,  # (B, M, K)
    w_ptr,  # (B, N, K)
    bias_ptr,  # (N,) or None
    c_ptr,  # (B, M, N) or None
    z_ptr,  # (B, M, N) contiguous, as is out, or None
    out_ptr,
    partial_sums_ptr,  # (splits, B, M, N) float32, which gets the sums if K is split, or None
    B, M, N,
    K,  # this and what follows in eights of numbers, so that 16 bytes are known to be aligned
    part,  # of K that a program sums
    x_strides,  # b, m
    w_strides,  # b, n
    alpha, beta, bias_stride,
    c_strides,  # b, m, n
    ACTIVATION: gl.constexpr,
    ROWS: gl.constexpr,  # of x that are loaded, 8 or 16
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,  # of a warp
    EVEN: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    WORDS: gl.constexpr = BLOCK_K // 2
    STEP: gl.constexpr = WARPS * WORDS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LOAD: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    IN_WARP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LOAD))
    IN_ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LOAD))
    IN_K: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LOAD))
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    word: gl.constexpr = gl.pointer_type(gl.uint32)
    tiles = gl.cdiv(N, BLOCK_N)
    tile, rest = gl.program_id(0) % tiles, gl.program_id(0) // tiles
    b, split = rest % B, rest // B
    first, depth = split * part * 4, gl.minimum(K - split * part, part) * 4
    matrix = b.to(gl.int64)
    k = gl.arange(0, WARPS, layout=IN_WARP)[:, None, None] * WORDS
    k += gl.arange(0, WORDS, layout=IN_K)[None, None, :]
    m = gl.minimum(gl.arange(0, ROWS, layout=IN_ROW), M - 1).to(gl.int64)
    n = gl.minimum(tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=IN_ROW), N - 1).to(gl.int64)
    x_rows, w_rows = m * x_strides[1] * 4, n * w_strides[1] * 4
    x_ptrs = x_ptr.to(word) + (matrix * x_strides[0] * 4 + first) + (x_rows[None, :, None] + k)
    w_ptrs = w_ptr.to(word) + (matrix * w_strides[0] * 4 + first) + (w_rows[None, :, None] + k)
    acc = gl.zeros((WARPS, 16, BLOCK_N), gl.float32, layout=MMA)
    steps = (depth + STEP - 1) // STEP
    shift = tile % steps * STEP
    for step in range(0, steps * STEP, STEP):
        start = step + shift
        start = gl.where(start >= steps * STEP, start - steps * STEP, start)
        w_words = load_words(w_ptrs + start, k, depth - start, True, EVEN)
        x_words = load_words(x_ptrs + start, k, depth - start, False, EVEN)
        trap_if_negative(M)  # never: without a branch here the assembler puts each load before its product
        x = gl.convert_layout(
            sixteen(in_order(x_words, dtype)), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True
        )
        w = gl.convert_layout(
            in_order(w_words, dtype).permute((0, 2, 1)), gl.DotOperandLayout(1, MMA, 2), assert_trivial=True
        )
        acc = mma_v2(x, w, acc)

    ACROSS: gl.constexpr = min(BLOCK_N, 32)
    SUM: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, 32 // ACROSS, ACROSS], [1, WARPS, 1], [2, 1, 0])
    total = gl.sum(gl.convert_layout(acc, SUM), 0)
    m = gl.arange(0, 16, layout=gl.SliceLayout(1, total.type.layout))[:, None].to(gl.int64)
    n = (tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, total.type.layout)))[None, :]
    mask = (n < N) & (m < M)
    if partial_sums_ptr is not None:
        sums = partial_sums_ptr + (split * B + matrix) * M * N
        gl.store(sums + (m * N + n), total, mask=mask)
    else:
        matrix_first = matrix * M * N
        c_base = c_ptr if c_ptr is None else c_ptr + matrix * c_strides[0]
        z_base = z_ptr if z_ptr is None else z_ptr + matrix_first
        finish_few_rows(total, m, n, mask, m * N + n, bias_ptr, c_base, z_base, out_ptr + matrix_first, alpha,
                    beta, N, bias_stride, c_strides[1], c_strides[2], ACTIVATION)  # fmt: skip


# few_rows: launcher


def bind_few_rows(i: GemmInputs, config: tuning.Config | None) -> Callable:
    """Bind what `fits_gemm` lets through, of up to 16 rows, with a weight that lies by rows."""
    (B, M, K), N = i.x.shape, i.w.shape[2]
    config = config or tuning.lookup("hopper_few_rows", i.x.dtype, M, B * N, K, 1)
    step, tiles = config.num_warps * config.block_k, B * cdiv(N, config.block_n)
    splits, part = splits_of(tiles, K, step, units(tiles, num_programs(i.x), config))
    kernel = bind_kernel(
        few_rows_kernel, (tiles * splits,),
        ACTIVATION=FUNCTIONS[i.activation] if i.activation else None, ROWS=8 if M <= 8 else 16,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, EVEN=K % step == 0, num_warps=config.num_warps,
    )  # fmt: skip
    numbers = B, M, N, K // 8, part // 8, eights(i.x), eights(i.w.mT), *epilogue_of(i)
    return bind_split(i, splits, kernel, numbers)


def units(tiles: int, sms: int, config: tuning.Config) -> int:
    """Return the number of programs.  A split needs a second launch, which pays if most SMs are idle."""
    return sms * programs_at_once(config) if FEW_SMS * tiles <= sms else tiles


def programs_at_once(config: tuning.Config) -> int:
    """Return the number of programs on one SM."""
    return IN_FLIGHT // (config.num_warps * config.block_n * config.block_k)


def eights(x: Tensor) -> tuple[int, int]:
    """The strides of matrices and rows, of which `fits_gemm` has made sure."""
    return x.stride(0) // 8, x.stride(1) // 8


# gemm: kernel

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
        row_tile, column = tiles.position(gl.program_id(0) + n * tiles.PROGRAMS)
        matrix = row_tile // self.tiles
        first = matrix * self.M
        return matrix, first + row_tile % self.tiles * self.BLOCK_M, first + self.M, column


@aggregate
class Epilogue:
    """The epilogue alpha * acc + beta * c + bias, which may be saved, and an activation of it."""

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
    def block(self, part, CONSUMER: gl.constexpr, matrix, row, end, column):
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
            self.store(self.z_desc, part, CONSUMER, row, end, column)
        if self.ACTIVATION is not None:
            part = self.ACTIVATION(part)[0]
        self.store(self.out_desc, part, CONSUMER, row, end, column)

    @gluon.jit
    def store(self, desc, part, CONSUMER: gl.constexpr, row, end, column):
        store_wait(pendings=0)
        self.buffers.index(CONSUMER).store(part.to(desc.dtype).reshape(desc.block_type.shape))
        fence_async_shared()
        tma_store(desc, ragged(row, end, column), self.buffers.index(CONSUMER))


@jit_kernel
def gemm_kernel(
    x_desc,  # B matrices (M, K), x_rows apart
    x_rows,
    w_desc,  # (B, N, K) or (B, K, N)
    bias_ptr,  # (N,), or None
    bias_end, c_ptr, c_strides,
    z_desc,  # (B * M, N) ragged, or None
    out_desc,
    alpha,  # or None, as is beta
    beta, B, M, N, K, LAYOUT: gl.constexpr, ACTIVATION: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    STORES: gl.constexpr, TURNS: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    READERS: gl.constexpr = 1 if TURNS else CONSUMERS
    a = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    b = allocate_weights(STAGES, w_desc, BLOCK_N, BLOCK_K, LAYOUT)
    out = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout)
    ring = make_ring(a, b, False, STAGES, READERS)
    queue = make_queue(READERS)
    if TURNS:
        turns = make_barriers(CONSUMERS, 1)
    else:
        turns: gl.constexpr = None
    weights = Weights(w_desc, None, B, N, K, BLOCK_N, BLOCK_K, LAYOUT)
    rows = gl.cdiv(M, BLOCK_M)
    tiles = Tiles(B * rows, gl.cdiv(N, BLOCK_N), B, GROUP_M, PROGRAMS)
    c_matrix, c_row, c_column = c_strides
    finish = Epilogue(out_desc, z_desc, out, bias_ptr, bias_end, c_ptr, c_matrix, c_row, c_column,
                      alpha, beta, M, N, ACTIVATION)  # fmt: skip
    gap = x_rows - M
    gl.warp_specialize(
        [
            (gemm_consumer, (0, weights, ring, tiles, queue, turns, finish, BLOCK_M, STORES)),
            (gemm_consumer, (1, weights, ring, tiles, queue, turns, finish, BLOCK_M, STORES)),
            (produce, (x_desc, weights, None, None, ring, tiles, Matrices(M, rows, BLOCK_M), queue, gap)),
        ],
        [4, 4],
        [232, 40],
    )


@gluon.jit
def gemm_consumer(
    CONSUMER: gl.constexpr, weights, ring, tiles, queue, turns, finish,
    BLOCK_M: gl.constexpr, STORES: gl.constexpr,
):  # fmt: skip
    i = 0
    if turns is None:
        for n in range(tiles.mine()):
            matrix, first, end, tile_n = queue.get(n)
            acc, i = multiply(CONSUMER, weights, ring, i, weights.K, BLOCK_M)
            row = first + CONSUMER * (BLOCK_M // 2)
            finish_tile(acc, CONSUMER, finish, matrix, row, end, tile_n * weights.BLOCK_N, STORES)
    else:
        for n in range(CONSUMER, tiles.mine(), CONSUMERS):
            matrix, first, end, tile_n = queue.get(n)
            mbarrier.wait(turns.index(CONSUMER), n // CONSUMERS & 1 ^ 1 - CONSUMER)
            i = n * gl.cdiv(weights.K, weights.BLOCK_K)
            last = turns.index(1 - CONSUMER)
            acc, i = multiply(0, weights, ring, i, weights.K, 2 * BLOCK_M, last=last)
            finish_tile(acc, CONSUMER, finish, matrix, first, end, tile_n * weights.BLOCK_N, STORES)
    store_wait(pendings=0)


@gluon.jit
def finish_tile(acc, CONSUMER: gl.constexpr, finish, matrix, row, end, column, STORES: gl.constexpr):
    accs = blocks(acc, STORES)
    for j in gl.static_range(STORES):
        finish.block(accs[j], CONSUMER, matrix, row, end, column + j * (acc.shape[1] // STORES))


# gemm: launcher


def bind_gemm(i: GemmInputs, config: tuning.Config | None = None) -> Callable:
    (B, M, K), N, rows = i.x.shape, i.w.shape[2], i.w.stride(2) != 1
    few = M <= FEW and rows and not batch_invariant()  # few rows have other matrix instructions
    if config is not None and (config.block_m <= FEW) != few:  # a row of a user's file: another product's
        config = None
    if K > SHORT and takes_row(i.x, i.w, config) and not batch_invariant():
        return bind_one_row(i, config)
    if few:
        return bind_few_rows(i, None if config is not None and config.block_m == 1 else config)
    op = f"hopper_gemm{'_full' if i.c is not None else '_act' if i.activation else ''}"
    config = config or tuning.lookup(op, i.x.dtype, B * M, N, K, B)
    height = config.block_m if config.turns else config.block_m // 2
    config = beside_groups(config, 2 * height * config.store_n, 1, i.x.itemsize)
    box = height, config.store_n
    bias_end = 0 if i.bias is None else N
    programs = num_programs(i.x)
    kernel = bind_kernel(
        gemm_kernel, (programs,),
        LAYOUT=weights_layout(i.w), ACTIVATION=FUNCTIONS[i.activation] if i.activation else None,
        STORES=config.block_n // config.store_n, TURNS=bool(config.turns), PROGRAMS=programs,
        **tile_options(config),
    )  # fmt: skip
    alpha, beta = None if i.alpha == 1 else i.alpha, None if i.c is None else i.beta
    c_strides = (0, 0, 0) if i.c is None else i.c.stride()

    def launch(outs, i):
        (x, x_rows), (out, _) = flatten(i.x), flatten(outs[0])
        bias = None if i.bias is None else i.bias.contiguous()
        if bias is None and op != "hopper_gemm":
            # nothing is read of it, but what waits for a bias is not computed early, when there would be no
            # registers to keep it in
            bias = out
        kernel(
            descriptor(x, config.block_m, config.block_k), x_rows,
            weights_descriptor(i.w, config.block_n, config.block_k), bias, bias_end, i.c, c_strides,
            ragged_descriptor(flatten(outs[1])[0], *box) if i.save_z else None, ragged_descriptor(out, *box),
            alpha, beta, B, M, N, K,
        )  # fmt: skip

    return launch
