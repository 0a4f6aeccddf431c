"""The cost of a tile of the portable 16-bit products of experts: it chooses where no table has a row.

A program computes one tile.  It takes steps of BLOCK_K until the sum is complete, then writes the tile.
A multiprocessor runs as many programs at once as have room there:

    step  = max(FLOPs / rate of the matrix units, bytes of both operands / bytes that arrive)
            + latency / (steps fetched ahead * programs at once)
    write = bytes of the epilogue / the multiprocessor's share of the memory's rate
    cost  = tiles of a group * (steps * step + write * (1 + ALONE / programs at once))

Rows past the end of a group and columns past N cost as much as the others.  The five constants were fitted
to times of two H100s.  `benchmarks/results/tiles.csv` has those of the second; tests/tuning/test_cost.py
compares the order of tiles.  Nothing was timed on other GPUs: their figures are those of data sheets.
"""

import math
from typing import NamedTuple

from .candidates import Config, candidates

RATE, ARRIVING, MEMORY = 0.75, 0.85, 0.8  # of what a data sheet promises
ALONE = 0.3  # more time for a write while no other program computes
LATENCY = 0.57  # us until operands are there
L2_BYTES = 64  # that reach a multiprocessor in a clock, at most
MOST_REGISTERS = 255  # of a thread


class Gpu(NamedTuple):
    """The GPU that stands for a table's architecture."""

    units: int  # multiprocessors
    tflops: float  # dense, 16 bits
    tb_per_s: float  # memory
    ghz: float
    lanes: int  # of a warp
    registers: int  # of a multiprocessor, 32 bits each
    shared_bytes: int  # of a multiprocessor
    program_bytes: int  # of these, the most for one program
    registers_of_step: int  # that a thread needs beside those of its sums
    through_registers: bool  # operands move on from shared memory to registers, which makes room for a step


GPUS = {
    # A100; a program has no more shared memory than on an RTX 4090, which has this table too
    "sm80": Gpu(108, 312, 2.0, 1.41, 32, 65536, 164 * 1024, 99 * 1024, 128, True),
    "sm90": Gpu(132, 989, 3.35, 1.75, 32, 65536, 228 * 1024, 227 * 1024, 56, False),  # H100
    "sm100": Gpu(148, 2250, 8.0, 1.85, 32, 65536, 228 * 1024, 227 * 1024, 104, False),  # B200
    "gfx942": Gpu(304, 1307, 5.3, 2.1, 64, 131072, 64 * 1024, 64 * 1024, 56, True),  # MI300X
    "gfx950": Gpu(256, 2300, 8.0, 2.4, 64, 131072, 160 * 1024, 160 * 1024, 56, True),  # MI350X
}


class EpilogueCost(NamedTuple):
    """The work of a kernel after a tile's sums."""

    bytes: int  # read and written for each sum
    registers: int  # that a thread needs for it, beside those of a step


EPILOGUES = {
    "up": EpilogueCost(3, 24),
    "gmm": EpilogueCost(2, 0),
    "down_grad": EpilogueCost(10, 40),
    "tgmm": EpilogueCost(2, 16),
    "tgmm_gather": EpilogueCost(2, 0),
}


def cost(arch: str, op: str, rows: int, n: int, k: int, tile: Config) -> float:
    """Microseconds of one multiprocessor for one group; infinite where the tile has no room.

    rows, n and k are those of a table's key: the group's rows on average, N and K.
    """
    gpu, epilogue = GPUS[arch], EPILOGUES[op]
    block_m, block_n, block_k = tile.block_m, tile.block_n, tile.block_k
    if op.startswith("tgmm"):  # whose sum runs over the rows
        tiles, steps = math.ceil(k / block_m) * math.ceil(n / block_n), rows / block_k + 0.5
    else:  # groups are ragged: the last tile of a group is half empty
        tiles, steps = max(1, rows / block_m + 0.5) * math.ceil(n / block_n), math.ceil(k / block_k)
    ahead = tile.num_stages - 1
    if op == "tgmm_gather":  # two fetches after each other, the row's number first
        ahead = max(1, math.ceil((tile.num_stages - 2) / 2))
    operands = 2 * (block_m + block_n) * block_k
    programs = programs_that_fit(gpu, epilogue, tile, operands * (ahead + (not gpu.through_registers)))
    if not programs:
        return math.inf
    flops = 2 * block_m * block_n * block_k
    busy = max(
        flops / (RATE * gpu.tflops * 1e6 / gpu.units), operands / (ARRIVING * L2_BYTES * gpu.ghz * 1e3)
    )
    step = busy + LATENCY / (ahead * programs)
    write = epilogue.bytes * block_m * block_n / (MEMORY * gpu.tb_per_s * 1e6 / gpu.units)
    return tiles * (steps * step + write * (1 + ALONE / programs))


def programs_that_fit(gpu: Gpu, epilogue: EpilogueCost, tile: Config, shared_bytes: int) -> int:
    """Return the number of programs that fit on a multiprocessor."""
    threads = gpu.lanes * tile.num_warps
    registers = tile.block_m * tile.block_n // threads + gpu.registers_of_step + epilogue.registers
    if registers > MOST_REGISTERS or shared_bytes > gpu.program_bytes:
        return 0
    return min(gpu.registers // (registers * threads), gpu.shared_bytes // shared_bytes)


def cheapest(arch: str, op: str, bits: int, rows: int, n: int, k: int) -> Config | None:
    """The candidate that costs least; None for what has no cost here."""
    if arch not in GPUS or op not in EPILOGUES or bits != 16:
        return None
    return min(candidates(op, rows, arch), key=lambda tile: cost(arch, op, rows, n, k, tile))
