"""Random small shapes on a GPU, forward and backward, without a crash: `make scan-gpu`.

A kernel that reads a wrong address ends its process, so each process runs 50 shapes; if it dies, each of them
runs again in a process of its own.  The number of a shape decides all that is random: `--first N` resumes.
The shapes of a process have one form: dtype, options and layout, and which sizes are 1, multiples of 16 or
neither, since Triton compiles a kernel again for each.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

import moe_aiter
from moe_aiter.kernels.base.activations import get_activation

from ..shapes import NAMES
from .draw import DEVICE, ON_GPU, Draw

EACH, FORMS, MOST = 50, 40, 130
SECONDS = 300  # after which a process hangs
DIED = 9  # the status of a process whose GPU reports an error that ends all of its work
WORST = {torch.float64: 1e-11, torch.float32: 1e-2, torch.float16: 1e-2, torch.bfloat16: 5e-2}
KINDS = {"one": [1], "sixteens": range(16, MOST, 16), "others": [n for n in range(2, MOST + 1) if n % 16]}


class Shape(Draw):
    """The sizes and numbers of one shape, whose form is that of its process."""

    def __init__(self, number: int):
        super().__init__("scan", number)
        self.of = Draw("scan form", number // EACH % FORMS)

    def size(self) -> int:
        sizes = KINDS[self.of.form.choices(list(KINDS), (1, 2, 7))[0]]
        return sizes[self.form.randrange(len(sizes)) // self.pick(1, 1, 4)]

    def dtype(self) -> torch.dtype:
        return self.of.form.choices(list(WORST), (1, 3, 6, 6))[0]

    def lay(self, x: Tensor) -> Tensor:
        return x.to(DEVICE).contiguous()


def experts(draw: Shape) -> tuple[Callable, list[Tensor]]:
    """Return a function of the experts of a layer, and its inputs; weights lie by rows or by columns."""
    T, H, inner, of = draw.size(), draw.size(), draw.size(), draw.of
    E, k, dtype, activation = (
        of.form.randint(1, 12),
        of.form.randint(1, 4),
        draw.dtype(),
        of.pick(*NAMES),
    )
    gated, bias, by_columns = get_activation(activation).gated, of.flip(0.3), of.flip()
    how = {"activation": activation, "interleaved": gated and of.flip()}
    how |= {"row_chunks": of.pick(None, None, 2), "recompute": of.pick("none", "none", "z")}
    width = 2 * inner if gated else inner
    ids = draw.experts(T, k, E)
    tensors = [draw.numbers(T, H, dtype=dtype)]
    tensors.append(draw.numbers(T, k, dtype=torch.promote_types(dtype, torch.float32)))
    tensors += [draw.weights(*shape, dtype=dtype) for shape in ((E, H, width), (E, inner, H))]
    if not by_columns:
        tensors[2:] = [w.mT.contiguous().mT for w in tensors[2:]]
    if bias:
        tensors += [draw.numbers(E, width, dtype=dtype), draw.numbers(E, H, dtype=dtype)]

    def run(x, weights, w1, w2, *biases):
        named = dict(zip(("gate_up_bias", "down_bias"), biases, strict=False))
        plan = moe_aiter.make_plan(ids.to(x.device), E)
        return moe_aiter.expert_mlp(x, w1.mT, w2.mT, weights, plan, **how, **named)

    return run, tensors


def products(draw: Shape) -> tuple[Callable, list[Tensor]]:
    """Return a function that multiplies groups, segments or single matrices, and its inputs."""
    M, K, N, G, dtype = draw.size(), draw.size(), draw.size(), draw.of.form.randint(1, 9), draw.dtype()
    cuts = sorted(draw.form.randint(0, M) for _ in range(G))
    sizes = torch.tensor([end - begin for begin, end in zip([0, *cuts], cuts, strict=False)])
    shapes, activation = (
        {"x": (M, K), "w": (G, K, N), "y": (M, N)},
        draw.of.pick(None, "relu", "gelu", "silu"),
    )
    x, w, y = (draw.numbers(*shape, dtype=dtype) for shape in shapes.values())
    rows = partial(moe_aiter.gmm, trans_rhs=False)
    columns = partial(moe_aiter.ptgmm, trans_lhs=False)
    kinds = {
        "gmm": (lambda x, w: rows(x, w, sizes.to(x.device)), [x, w]),
        "segments": (lambda x, w: moe_aiter.segment_gmm(x, w, lens=sizes.to(x.device)), [x, w]),
        "gemm": (lambda x, w: moe_aiter.gemm(x, w, activation=activation), [x, w[0]]),
        "ptgmm": (lambda x, y: columns(x.mT, y, sizes.to(x.device)), [x, y]),
        "rows side by side": (lambda x, y: columns(x, y, sizes.to(x.device)), [x.mT.contiguous(), y]),
        "nptgmm": (lambda x, y: moe_aiter.nptgmm(x.mT, y, sizes.to(x.device), trans_lhs=False), [x, y]),
    }
    return kinds[draw.of.pick(*kinds)]


def results(run, tensors: list[Tensor]) -> list[Tensor]:
    """Return the output, and the gradients where it has some, for an output's gradient that is drawn."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = run(*leaves)
    if not out.requires_grad:
        return [out]
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout, allow_unused=True, materialize_grads=True)]


def wrong(number: int) -> str | None:
    """Run a shape, on the backend of choice or with portable kernels; say what is wrong with it."""
    draw = Shape(number)
    run, tensors = (experts if draw.of.flip(0.6) else products)(draw)
    portable = ON_GPU and tensors[0].dtype != torch.float64 and draw.of.flip(0.4)
    with moe_aiter.use("triton" if portable else "auto"):
        found = results(run, tensors)
    truth = results(run, [t.cpu().double() for t in tensors])
    for i, (a, b) in enumerate(zip(found, truth, strict=True)):
        error, most = (a.cpu().double() - b).norm().item(), b.norm() + b.numel() ** 0.5
        if not error <= WORST[tensors[0].dtype] * most:
            return f"result {i} {tuple(a.shape)} {a.dtype} is off by {error:.2g}, of {b.norm():.2g}"
    return None


Check = Callable[[int], str | None]  # what is wrong with the shape of a number


def work(numbers: range, path: str, check: Check | None = None) -> None:
    """Run shapes in this process, and write the lines of those that are wrong to a file."""
    torch.set_num_threads(1)
    with open(path, "w", buffering=1) as out:
        for number in numbers:
            try:
                why = (check or wrong)(number)
            except (RuntimeError, ValueError, TypeError, LookupError, AssertionError) as error:
                why = f"{type(error).__name__}: {error}".splitlines()[0]
            if why:
                print(f"{number}: {why}", file=out)
                if is_lost():
                    sys.exit(DIED)


def is_lost() -> bool:
    """Whether the GPU refuses all further work of this process."""
    try:
        torch.zeros(1, device=DEVICE).item()
    except RuntimeError:
        return True
    return False


def start(first: int, count: int, *check: Check) -> tuple[int, list[str]]:
    """Run shapes in a process of their own; return its status, and the lines of wrong shapes."""
    with tempfile.NamedTemporaryFile("r") as file:
        child = server().Process(target=work, args=(range(first, first + count), file.name, *check))
        child.start()
        child.join(SECONDS)
        if child.exitcode is None:
            child.kill()
            child.join()
            return DIED, [f"{first}: takes more than {SECONDS} s"]
        return child.exitcode, file.read().splitlines()


def server() -> multiprocessing.context.BaseContext:
    """Return what starts processes: a fork of one that has imported torch, and has not touched the GPU."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fuzz.draw", "moe_aiter.kernels.experts.mlp"])
    return context


def scan(first: int, count: int, *check: Check) -> list[str]:
    """Run the shapes of a process; if the process dies, run each again alone."""
    status, lines = start(first, count, *check)
    if status == 0:
        return lines
    alone = [start(number, 1, *check) for number in range(first, first + count)]
    dead = [
        f"{number}: ends its process with status {s}: {' '.join(said)}"
        for number, (s, said) in zip(range(first, first + count), alone, strict=True)
        if s
    ]
    rest = [line for s, said in alone if s == 0 for line in said]
    died = f"{first} to {first + count - 1}: status {status}, but no shape alone ends so: {' '.join(lines)}"
    return rest + (dead or [died])


def main(check: Check = wrong, shapes: int = 20_000, description: str = __doc__) -> int:
    name = check.__module__.rpartition(".")[2]
    parser = argparse.ArgumentParser(prog=f"python -m tests.fuzz.{name}", description=description)
    parser.add_argument("--shapes", type=int, default=shapes, help=f"how many [{shapes}]")
    parser.add_argument("--first", type=int, default=None, help="number of the first shape [by the clock]")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at a time [one a CPU]")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no process later [no end]")
    given = parser.parse_args()
    first = int(time.time()) * 1000 if given.first is None else given.first
    print(f"{given.shapes} shapes from number {first}", flush=True)
    began, done, failures = time.monotonic(), 0, 0
    parts = [(n, min(EACH, first + given.shapes - n)) for n in range(first, first + given.shapes, EACH)]

    def run(part):
        return (part[1], scan(*part, check)) if time.monotonic() - began < given.seconds else (0, [])

    with ThreadPoolExecutor(given.workers) as pool:
        for i, (count, lines) in enumerate(pool.map(run, parts)):
            done, failures = done + count, failures + len(lines)
            for line in lines:
                print(line, flush=True)
            if i % 20 == 19 or i == len(parts) - 1:
                print(f"{done} shapes, {time.monotonic() - began:.0f} s, {failures} failures", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
