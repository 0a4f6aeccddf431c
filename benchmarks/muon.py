"""`python -m benchmarks muon`: a step of Muon for stacked experts, beside torch's Muon on each matrix.

Almost all of a step's FLOPs are the products of its Newton-Schulz iterations.  Batched matmuls of the same
sizes, in bfloat16, show what rate a step can reach.
"""

import argparse
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from moe_aiter.bench.command import Asked, Command, Contest, Error, Judge, errors_of
from moe_aiter.bench.layer import SIZES, shape_cells
from moe_aiter.bench.measure import (
    WHERE,
    Contender,
    PassTimer,
    add_contenders,
    add_shapes,
    distances,
    measure_memory,
)  # fmt: skip
from moe_aiter.bench.problem import Problem, Shape, named, new_problem
from moe_aiter.kernels.dense.muon import COEFFICIENTS
from moe_aiter.optim import Muon

DEFAULT = {"cuda": ["C"], "cpu": ["cpu"]}
ITERATIONS = 5
OURS, LOOP, MATMULS = (
    "moe_aiter Muon",
    "torch Muon, one matrix at a time",
    "batched matmuls of the same FLOPs",
)


def options(parser: argparse.ArgumentParser) -> None:
    add_shapes(parser, "C on a GPU, cpu on a CPU; T and k change nothing", plain=True)
    add_contenders(parser)


def asked(args: argparse.Namespace, kind: str) -> Iterator[Asked]:
    for name, shape in named(args.shape or DEFAULT[kind], plain=True).items():
        title, make = f"shape {name}: T, H, I, E, k = {shape}", functools.partial(contest, shape)
        yield Asked(title, shape_cells(name, shape), make)


COMMAND = Command(
    [
        *(*WHERE, "shape", *SIZES, "contender", "ms", "p20", "p80", "tflops"),
        *("matmul_percent", "times_torch", "held_mib", "peak_mib", "error", "torch_error"),
    ],
    (
        *("{contender:<33}", "{ms:9.3f} ms,", "{tflops:7.2f} TFLOP/s,"),
        *("{matmul_percent:4.0f} % of matmuls,", "{times_torch:5.2f} x torch,"),
        *("held {held_mib:6.0f} MiB,", "peak {peak_mib:6.0f} MiB,", "error {error:.1e}"),
    ),
    options,
    asked,
    demands=all,
    reps={"cuda": 25, "cpu": 3},
)


def contest(shape: Shape, device: torch.device, dtype: torch.dtype) -> Contest:
    p = new_problem(shape, dtype, device)
    for stack in (p.gate_up, p.down):
        stack.grad = torch.randn_like(stack)
    each = [nn.Parameter(matrix) for matrix in matrices(p.gate_up.detach(), p.down.detach())]
    for matrix, gradient in zip(each, matrices(p.gate_up.grad, p.down.grad), strict=True):
        matrix.grad = gradient
    how = {"lr": 1.0, "ns_steps": ITERATIONS, "adjust_lr_fn": "match_rms_adamw"}
    stacks = [{"params": [p.gate_up], "halves": "rows"}, {"params": [p.down]}]
    optimizers = {OURS: Muon(stacks, **how), LOOP: torch.optim.Muon(each, **how)}
    field = [Contender(name, o.step, ours=name == OURS) for name, o in optimizers.items()]
    run, flops = batched_matmuls(shape, device)
    field.append(Contender(MATMULS, run, checked=False))
    return Contest(field, by_definition(p), StepTimer(p, flops, optimizers), compare)


def matrices(gate_up: Tensor, down: Tensor) -> list[Tensor]:
    """Views of gate and up of each expert, then of `down` of each expert."""
    return [*(half for e in gate_up for half in e.chunk(2)), *down]


def batched_matmuls(shape: Shape, device: torch.device) -> tuple[Callable[[], Tensor], int]:
    """Return a function that runs the products of the iterations of all matrices, and their FLOPs."""
    short, long = sorted((shape.hidden, shape.intermediate))
    x = torch.randn(3 * shape.num_experts, short, long, device=device, dtype=torch.bfloat16)
    x.mul_(long**-0.5)
    gram, square = x.new_empty(2, len(x), short, short)
    out = torch.empty_like(x)

    def run() -> Tensor:
        for _ in range(ITERATIONS):
            torch.bmm(x, x.mT, out=gram)
            torch.bmm(gram, gram, out=square)
            torch.bmm(square, x, out=out)
        return out

    return run, ITERATIONS * len(x) * 2 * short**2 * (2 * long + short)


class StepTimer(PassTimer):
    """Times steps, and measures the memory of a first step, which allocates the optimizer's state."""

    def __init__(self, problem: Problem, flops: float, optimizers: dict[str, torch.optim.Optimizer]) -> None:
        super().__init__(problem, flops)
        self.optimizers = optimizers

    def memory(self, contender: Contender) -> tuple[float, float] | None:
        if contender.name not in self.optimizers:
            return None
        self.optimizers[contender.name].state.clear()
        return measure_memory(contender, self.problem)


@torch.no_grad()
def by_definition(p: Problem) -> Judge:
    """Judge by the first update of three experts in float64; the bar is the definition in bfloat16."""
    experts = sorted({0, p.shape.num_experts // 2, p.shape.num_experts - 1})
    size = 0.2 * max(p.shape.hidden, p.shape.intermediate) ** 0.5

    def parts(gate_up: Tensor, down: Tensor) -> list[Tensor]:
        return [*gate_up[experts].chunk(2, 1), down[experts]]

    def updates(dtype: torch.dtype) -> list[Tensor]:
        return [-size * newton_schulz(u.to(dtype)) for u in parts(p.gate_up.grad, p.down.grad)]

    exact = updates(torch.float64)
    bars = distances(updates(torch.bfloat16), exact)

    @torch.no_grad()
    def judge(contender: Contender) -> list[Error]:
        if not contender.checked:
            return []
        for stack in (p.gate_up, p.down):
            stack.zero_()  # at a learning rate of 1, the weights are then the update
        contender.run()
        return errors_of(parts(p.gate_up, p.down), exact, bars, ("gate", "up", "down"))

    return judge


def newton_schulz(u: Tensor) -> Tensor:
    """Return the iterations of `moe_aiter.optim` for (n, A, B), as written there, in the dtype of `u`."""
    a, b, c = COEFFICIENTS
    tall = u.shape[1] > u.shape[2]
    x = u.mT if tall else u
    x = x / x.norm(dim=(1, 2), keepdim=True)
    for _ in range(ITERATIONS):
        p = x @ x.mT
        x = a * x + (b * p + c * (p @ p)) @ x
    return x.mT if tall else x


def compare(rows: list[dict]) -> None:
    """Add each row's share of the batched matmuls' rate, and how many times as fast as torch's Muon it is."""
    times = {row["contender"]: row["ms"] for row in rows}
    for row in rows:
        if MATMULS in times:
            row["matmul_percent"] = 100 * times[MATMULS] / row["ms"]
        if LOOP in times:
            row["times_torch"] = times[LOOP] / row["ms"]
