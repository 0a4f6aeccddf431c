"""The configurations worth trying of each kernel, and the choice of the Hopper kernels by rule.

A kernel that has other limits where its inputs differ, in registers say, has a name for each: `tgmm_gather`.
Of the masked ones `_few` transposes the product, for groups of less than 128 rows, and `_decode` makes
float16 of 8-bit floats that the GPU does not multiply.  `scaled_long` adds sums of int8 that int32 overflows.
Of the dense ones `_full` has an activation or a matrix to add, on Hopper the latter, and `_act` the former;
`few_rows` are those of up to 16 rows, and `_row` those of a single one.
On Hopper `_int8` sums in int32, `_fp8` adds the sums of 8-bit floats in float32, `_plain` without scales or
for a float32 result.
Names that begin with `hopper_` are those of `kernels/hopper`; tests compile every tile of theirs below.
"""

import dataclasses

BIG_WEIGHT = 30 * 2**20  # bytes of one expert's weight
FEW_COLUMNS = 2048  # of all matrices
WALKS = (1, 16)
DENSE_WALKS = (8, 16)


@dataclasses.dataclass(frozen=True)
class Config:
    """One kernel's tile: rows x columns x contraction, and how the compiler may schedule it."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 1  # row tiles that walk the columns together, so that weights stay in L2
    num_warps: int = 4
    num_stages: int = 2
    store_n: int = 0  # columns of a tile that are stored at a time; Hopper only
    turns: int = 0  # 1: two warpgroups take turns with whole tiles; Hopper's dense products only

    def __str__(self) -> str:
        rest = f", {self.store_n} stored" if self.store_n else ""
        rest += ", in turns" if self.turns else ""
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{tile}, {self.num_stages} stages, {self.num_warps} warps, walk {self.group_m}{rest}"


def hopper(block_n: int, num_stages: int, store_n: int, block_k: int = 64) -> Config:
    return Config(128, block_n, block_k, num_stages=num_stages, store_n=store_n)


def in_turns(num_stages: int, store_n: int) -> Config:
    return Config(128, 128, 64, num_stages=num_stages, store_n=store_n, turns=1)


def few_rows(block_n: int, block_k: int, num_warps: int) -> Config:
    """block_k is what each warp has of K, in a step of which there is but one stage."""
    return Config(16, block_n, block_k, num_warps=num_warps, num_stages=1)


WIDE_ROWS = Config(256, 128, 64, 1, 4, 4, 32)
# the first is the usual one
HOPPER_TILES = {
    "hopper_up": (hopper(256, 4, 32), hopper(256, 3, 64), hopper(128, 5, 64)),
    "hopper_up_plain": (hopper(256, 4, 32), hopper(256, 3, 32), hopper(128, 5, 32)),
    "hopper_gmm": (hopper(256, 3, 256), hopper(256, 4, 128), hopper(128, 6, 128)),
    "hopper_four_bit": (hopper(256, 3, 128), hopper(128, 5, 128)),
    "hopper_gemm": (hopper(256, 4, 128), hopper(128, 6, 128), in_turns(6, 64)),
    "hopper_gemm_act": (in_turns(6, 64), hopper(256, 4, 64), hopper(128, 6, 64), WIDE_ROWS),
    "hopper_gemm_full": (hopper(256, 4, 32), hopper(128, 6, 32), in_turns(6, 32)),
    "hopper_few_rows": tuple(
        few_rows(*c) for c in ((16, 128, 8), (16, 64, 8), (16, 128, 16), (16, 64, 16), (32, 64, 16))
    ),
    "hopper_masked": (hopper(256, 3, 256), hopper(256, 4, 128), hopper(128, 6, 128)),
    "hopper_masked_int8": (hopper(256, 4, 128, block_k=128), hopper(128, 6, 128, block_k=128)),
    "hopper_masked_fp8": (hopper(256, 4, 128, block_k=128), hopper(128, 6, 128, block_k=128)),
    "hopper_masked_fp8_plain": (hopper(128, 6, 128, block_k=128), hopper(128, 5, 128, block_k=128)),
    "hopper_down_grad": (hopper(256, 6, 0, block_k=32), hopper(256, 3, 0)),
    "hopper_up_fp8": (hopper(256, 4, 32, block_k=128), hopper(128, 6, 32, block_k=128)),
    "hopper_up_int8": (hopper(256, 4, 32, block_k=128), hopper(128, 6, 32, block_k=128)),
    "hopper_up_plain_int8": (hopper(256, 4, 32, block_k=128), hopper(128, 5, 32, block_k=128)),
    "hopper_gmm_int8": (hopper(256, 4, 128, block_k=128), hopper(128, 6, 128, block_k=128)),
    "hopper_up_plain_fp8": (hopper(256, 4, 32, block_k=128), hopper(128, 5, 32, block_k=128)),
    "hopper_gmm_fp8": (hopper(256, 4, 128, block_k=128), hopper(128, 6, 128, block_k=128)),
    "hopper_down_grad_fp8": (hopper(128, 5, 0, block_k=128), hopper(128, 4, 0, block_k=128)),
    "hopper_tgmm": (hopper(256, 4, 128), hopper(256, 3, 128), hopper(256, 3, 256)),
    "hopper_tgmm_accumulate": (hopper(256, 4, 32), hopper(256, 3, 32), hopper(256, 3, 64)),
    "hopper_tgmm_fp8": (hopper(256, 4, 64, block_k=128), hopper(128, 6, 128, block_k=128)),
    "hopper_tgmm_accumulate_fp8": (hopper(256, 4, 32, block_k=128), hopper(128, 6, 32, block_k=128)),
}
# the sums up to which the second is better
SHORT_K = dict.fromkeys(("hopper_gemm", "hopper_gmm", "hopper_masked"), 512)
SHORT_K |= {"hopper_down_grad": 1024, "hopper_few_rows": 8192}
# of groups with few rows: up to how many rows, and which tile is better
SHORT_GROUP = {"hopper_up": (128, 1), "hopper_gmm": (512, 0), "hopper_down_grad": (256, 1)}

WIDE = (
    Config(128, 256, 64, 8, 8, 3), Config(128, 256, 64, 8, 8, 4), Config(128, 256, 64, 16, 8, 3),
    Config(128, 256, 64, 1, 8, 3), Config(128, 128, 64, 8, 4, 3), Config(64, 128, 64, 8, 4, 4),
)  # fmt: skip
MASKED = (  # 128x256 has no registers left for sums of 8-bit products: see `is_promoted`
    Config(128, 128, 128, 8, 8, 6), Config(128, 128, 128, 8, 8, 4), Config(128, 128, 128, 1, 8, 4),
    Config(64, 128, 128, 8, 4, 3), Config(128, 256, 64, 8, 8, 3), Config(128, 256, 64, 8, 8, 4),
)  # fmt: skip
FEW_ROWS = (  # of each group: weights come as fast as memory has them where 40 KiB are on the way to each SM
    Config(16, 64, 128, 1, 4, 4), Config(16, 64, 128, 1, 4, 3), Config(16, 64, 64, 1, 4, 6),
    Config(16, 128, 64, 1, 4, 4), Config(32, 64, 128, 8, 4, 4), Config(32, 128, 64, 8, 4, 4),
    Config(64, 128, 64, 8, 4, 4), Config(64, 256, 64, 8, 8, 4),
)  # fmt: skip
FEW = 32  # rows of a group, on average
MASKED_FEW = (
    Config(16, 64, 128, 1, 4, 6), Config(16, 64, 128, 1, 4, 8), Config(16, 128, 128, 1, 4, 4),
    Config(32, 64, 128, 1, 4, 8), Config(64, 128, 128, 2, 4, 3), Config(64, 64, 128, 2, 4, 4),
)  # fmt: skip
SEGMENT = (Config(16, 64, 128, 1, 4, 4), Config(32, 64, 128, 1, 4, 4), Config(64, 128, 64, 1, 4, 4))
GEMM_FEW = (  # the last ones read 1 and 2 KiB of a weight's row at a time, and fit in 64 KiB
    Config(16, 64, 128, 1, 4, 6), Config(16, 32, 256, 1, 4, 6), Config(16, 128, 128, 1, 4, 4),
    Config(16, 16, 512, 1, 8, 3), Config(16, 16, 1024, 1, 8, 2),
)  # fmt: skip
SCALED = (  # Triton waits for every step whose sum is int32: of the second an SM has room for two programs
    Config(128, 256, 128, 8, 8, 4), Config(128, 128, 128, 16, 4, 3), Config(128, 128, 128, 16, 4, 4),
    Config(64, 128, 128, 16, 4, 6), Config(64, 64, 128, 1, 4, 6),
    Config(64, 32, 256, 1, 4, 5), Config(16, 64, 256, 1, 4, 6),
)  # fmt: skip
SCALED_FP8 = (
    Config(128, 128, 128, 8, 8, 6), *SCALED[3:5],
    Config(64, 32, 128, 1, 4, 10), Config(16, 64, 128, 1, 4, 12),
)  # fmt: skip
FOUR_BIT = (
    Config(128, 128, 64, 8, 4, 3), Config(128, 128, 64, 8, 8, 3), Config(128, 256, 64, 8, 8, 3),
    Config(256, 128, 64, 8, 8, 3), Config(64, 128, 64, 8, 4, 4), Config(128, 128, 128, 8, 8, 3),
)  # fmt: skip
SPARSE = (  # the last ones for blocks of 64, 128 and 32
    Config(128, 128, 64, 8, 4, 4), Config(128, 128, 64, 8, 8, 4), Config(256, 64, 64, 8, 8, 3),
    Config(128, 64, 64, 8, 4, 4), Config(128, 128, 64, 1, 4, 4), Config(128, 32, 32, 8, 4, 5),
)  # fmt: skip
SPARSE_GRAD = (
    Config(128, 128, 64, 1, 8, 4), Config(128, 64, 64, 1, 4, 4), Config(64, 64, 64, 1, 4, 4),
    Config(64, 64, 128, 1, 4, 3), Config(64, 64, 128, 1, 8, 3), Config(32, 32, 128, 1, 4, 3),
)  # fmt: skip
OF_EXPERTS = ("up", "gmm", "down_grad", "tgmm", "tgmm_gather")  # whose tiles have a cost: see cost.py
EXPERTS = (
    Config(128, 256, 64, 8, 8, 3), Config(128, 256, 64, 8, 8, 4), Config(128, 256, 32, 8, 8, 4),
    Config(128, 128, 64, 8, 8, 3), Config(128, 128, 32, 8, 8, 4),
    Config(64, 256, 64, 8, 8, 3), Config(64, 128, 64, 8, 4, 4), Config(64, 64, 64, 8, 4, 4),
)  # fmt: skip
EXPERTS_AMD = (
    Config(128, 256, 64, 4, 8, 2), Config(128, 128, 64, 4, 8, 2), Config(64, 256, 64, 4, 8, 2),
    Config(64, 128, 64, 4, 4, 2), Config(64, 64, 64, 4, 4, 2),
)  # fmt: skip
FEW_ROWS_AMD = (Config(16, 64, 128, 1, 4, 2), Config(32, 64, 128, 4, 4, 2), *EXPERTS_AMD[3:])
PORTABLE = {
    **dict.fromkeys(OF_EXPERTS, EXPERTS),
    "tgmm_gather": (Config(128, 256, 64, 8, 8, 5), *EXPERTS[1:]),
    "masked": MASKED,
    "masked_few": MASKED_FEW,
    "masked_decode": (Config(128, 128, 64, 8, 8, 3), Config(64, 128, 64, 8, 4, 3)),
    "masked_few_decode": (Config(16, 64, 256, 1, 4, 4), Config(64, 64, 128, 2, 4, 3)),
    "scaled_int8": SCALED,
    "scaled_fp8": SCALED_FP8,
    "scaled_decode": (Config(128, 128, 64, 8, 8, 3), Config(16, 64, 256, 1, 4, 4)),
    "scaled_long": (Config(64, 128, 128, 8, 8, 3), Config(64, 64, 128, 8, 4, 3)),
    "four_bit": FOUR_BIT,
    "segment_gmm": (*SEGMENT, *WIDE[:2]),
    "segment_expand": tuple(Config(m, 128, 64, 1, 4, 4) for m in (16, 32, 64, 128)),
    "segment_tgmm": (Config(64, 128, 64, 8, 4, 3), Config(128, 128, 64, 8, 8, 3)),
    "sparse_blocks": SPARSE,
    "sparse_blocks_grad": SPARSE_GRAD,
    "gemm": (*GEMM_FEW, Config(64, 128, 64, 8, 4, 4), *WIDE[:2]),
    "gemm_full": (*GEMM_FEW, Config(64, 128, 64, 8, 4, 4), Config(128, 128, 64, 8, 8, 4)),
    "gemm_row": tuple(
        Config(1, *tile, num_stages=1)
        for tile in ((1, 2048), (1, 4096), (2, 1024), (2, 2048, 1, 8), (4, 512), (4, 1024))
    ),
}
OPS = (*PORTABLE, *HOPPER_TILES)


def candidates(op: str, rows: int | None = None, arch: str = "sm90") -> tuple[Config, ...]:
    """At most eight, for groups of so many rows on average; None: many.  `arch` is a table's name."""
    amd = arch.startswith("gfx")
    if of_few_rows(op, rows):
        return FEW_ROWS_AMD if amd else FEW_ROWS
    if amd and op in OF_EXPERTS:
        return EXPERTS_AMD
    if op in PORTABLE:
        return PORTABLE[op]
    return tuple(dataclasses.replace(tile, group_m=w) for tile in HOPPER_TILES[op] for w in walks(op))


def of_few_rows(op: str, rows: int | None) -> bool:
    """Return whether weights, read for few rows, decide how long a portable kernel takes."""
    return op in ("up", "gmm") and rows is not None and rows <= FEW


def walks(op: str) -> tuple[int, ...]:
    if op == "hopper_few_rows":
        return WALKS[:1]  # there is one row of tiles
    return DENSE_WALKS if op.startswith("hopper_gemm") else WALKS


def is_legal(op: str, config: Config) -> bool:
    """Whether a table may name `config`: Triton needs powers of two, and a Hopper kernel has only the tiles
    of its list, in any walk."""
    powers = config.block_m, config.block_n, config.block_k, config.num_warps
    if min(config.group_m, config.num_stages) < 1 or any(n.bit_count() != 1 for n in powers):
        return False
    if op == "gemm_row" and config.block_m != 1:
        return False
    return op in PORTABLE or dataclasses.replace(config, group_m=1) in HOPPER_TILES[op]


def rule(op: str, n: int, k: int, rows: int | None = None) -> Config | None:
    """The choice of a Hopper kernel where no table has one.  `rows`: of a group, on average; None: many.

    Where the sum is short, gmm's epilogue comes often, and one more stage helps, unless groups have few rows.
    dz gathers whole lines, 64 columns at a time, where the sum is short or groups have few rows.  For groups
    of few rows `up` has fewer stages and stores more columns at a time.  Where one expert's 16-bit weight
    fits in L2, no row tiles need to walk the columns together.  All dense products walk in eights, and hide
    an activation by turns.  Of few columns a program of few rows has many warps.
    """
    if op not in HOPPER_TILES:
        return None
    limit, of_few = SHORT_GROUP.get(op, (0, 0))
    tile = HOPPER_TILES[op][of_few if rows is not None and rows <= limit else k <= SHORT_K.get(op, 0)]
    if op == "hopper_few_rows" and n <= FEW_COLUMNS:
        tile = HOPPER_TILES[op][2]
    steps = walks(op)
    walk = steps[2 * k * n > BIG_WEIGHT] if steps is WALKS else steps[0]
    return dataclasses.replace(tile, group_m=walk)
