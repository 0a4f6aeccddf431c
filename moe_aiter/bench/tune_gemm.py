"""`moe-aiter tune gemm`: find the fastest products, and write them as rows of AITER's tuned files.

Every implementation here is measured, torch's and each tile of the Triton and Hopper kernels, on the GPU or
CPU at hand.  One that is not as exact as torch is left out and fails the command; one that is not clearly
faster than torch loses to it.  A row goes to the end of the file, and one that is there for the same product
stays unless `--replace` is given.  `AITER_CONFIG_GEMM_BF16=FILE` puts them to use.
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import tuning
from ..config import say
from ..files import read_json
from ..kernels.base.shuffle import shuffle_weight
from ..kernels.dense.tuned_gemm import TILED, as_it_lies, gemm_inputs, is_here, tuned_gemm_op
from ..tuning.aiter_csv import COLUMNS, GemmKey, TunedRow, add_rows, drop, read, read_untuned, this_device
from ..tuning.candidates import candidates
from ..tuning.store import cache_clear
from .measure import FLOOR, REPS, SLACK, count, distances, provenance, refuse, time_calls, time_graphs
from .tiles import FASTER, fits

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
OUT = pathlib.Path("bf16_tuned_gemm.csv")  # as AITER calls it
ROWS = (1, 16, 64, 256, 1024, 4096)
SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")


def shape(text: str) -> tuple[int, int, int]:
    found = SHAPE.fullmatch(text)
    if not found or "0" in found.groups():
        raise argparse.ArgumentTypeError(f"{text!r} is not MxNxK, such as 16x256x256")
    return tuple(map(int, found.groups()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    dtypes = [str(dtype).removeprefix("torch.") for dtype in FLOATS]
    text = "sizes: x (M, K) times weight (N, K)"
    parser.add_argument("sizes", nargs="*", type=shape, metavar="MxNxK", help=text)
    text = "file of sizes that AITER_TUNE_GEMM wrote"
    parser.add_argument("--untuned", type=pathlib.Path, metavar="CSV", help=text)
    text = "config.json of a transformers model, instead of sizes"
    parser.add_argument("--model", type=pathlib.Path, metavar="JSON", help=text)
    rows = f"M of a model's products [{' '.join(map(str, ROWS))}]"
    parser.add_argument("--rows", nargs="+", type=count, default=ROWS, metavar="M", help=rows)
    text = f"dtype of x and weight [{dtypes[0]}]"
    parser.add_argument("--dtype", choices=dtypes, default=dtypes[0], help=text)
    parser.add_argument("--out-dtype", choices=dtypes, help="dtype of the result [that of x]")
    parser.add_argument("--bias", action="store_true", help="add a bias")
    parser.add_argument("--shuffled", action="store_true", help="also time shuffled weights")
    parser.add_argument("--out", type=pathlib.Path, default=OUT, metavar="CSV", help=f"file to write [{OUT}]")
    parser.add_argument("--replace", action="store_true", help="measure existing rows again and replace them")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device [cuda if there is a GPU, else cpu]")
    text = "timed runs of each [25 on a GPU, 11 on a CPU]"
    parser.add_argument("--reps", type=count, metavar="N", help=text)
    parser.add_argument("--commit", help="commit to record [the one that git reports]")
    parser.set_defaults(prog=parser.prog)


@dataclasses.dataclass
class Implementation:
    libtype: str
    kernel: str  # a tile, or nothing where the house's tables choose
    run: Callable[[], Tensor]
    error: float = 0.0
    us: float = 0.0


def main(args: argparse.Namespace) -> int:
    """Measure every product asked for; 1 if an implementation was wrong, 2 if there is nothing to measure."""
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        return refuse(args, "there is no GPU that torch can use")
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    try:
        wanted = problems(args)
        add_rows(args.out, [], COLUMNS)  # a file that cannot be written shows now, not after the measurement
        there = {row.problem: row for row in read(args.out) if row.device == this_device(device)}
    except ValueError as error:
        return refuse(args, str(error))
    if not wanted:
        return refuse(args, "give sizes as MxNxK, --untuned or --model")
    about = provenance(device, "", args.commit)
    about = "; ".join(f"{name} {value}" for name, value in about.items() if value)
    print(f"{about} -> {args.out}")
    wrong = 0
    for problem in wanted:
        reason = left_out(problem, there.get(problem), args)
        if reason:
            print(f"{described(problem)}: {reason}")
            continue
        found, bad = check_and_time(problem, device, args.reps or REPS[kind])
        wrong += len(bad)
        for one in bad:
            print(f"WRONG, left out: {one.libtype} {one.kernel}, its error is {one.error:.1e}")
        if (old := there.get(problem)) is not None:
            say(f"replaces {old.us} us by {old.libtype}")
            drop(args.out, old)
        add_rows(args.out, [row(problem, device, found, about)], COLUMNS)
        show_times(problem, found)
    cache_clear()
    return int(wrong > 0)


# what is asked for


def problems(args: argparse.Namespace) -> list[GemmKey]:
    dtype = getattr(torch, args.dtype)
    out_dtype = getattr(torch, args.out_dtype or args.dtype)
    sizes = list(args.sizes)
    if args.model:
        sizes += [(M, N, K) for (N, K), M in itertools.product(model_sizes(args.model), args.rows)]
    found = [GemmKey(*size, args.bias, dtype, out_dtype) for size in sizes]
    found += read_untuned(args.untuned) if args.untuned else []
    if args.shuffled:
        found += [problem._replace(shuffled=True) for problem in found if not problem.bias]
    return list(dict.fromkeys(found))


def model_sizes(path: pathlib.Path) -> list[tuple[int, int]]:
    """(N, K) of a transformer's projections, alone and fused, by its config.json or the folder of that."""
    path = path / "config.json" if path.is_dir() else path
    try:
        config = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object")

    def size(name: str, otherwise: int | None = None) -> int:
        if (found := config.get(name)) is None and otherwise is not None:
            return otherwise
        if name not in config:
            raise ValueError(f"{path} has no {name!r}")
        if type(found) is not int or found < 1:
            raise ValueError(f"{path}: {name} is {found!r}; it must be a whole number, 1 or more")
        return found

    hidden, width, heads = map(size, ("hidden_size", "intermediate_size", "num_attention_heads"))
    head = size("head_dim", hidden // heads)
    q, kv = heads * head, size("num_key_value_heads", heads) * head
    vocabulary = size("vocab_size")
    sizes = [(q + 2 * kv, hidden), (q, hidden), (kv, hidden), (hidden, q)]
    sizes += [(2 * width, hidden), (width, hidden), (hidden, width), (vocabulary, hidden)]
    return list(dict.fromkeys(sizes))


def left_out(problem: GemmKey, there: TunedRow | None, args: argparse.Namespace) -> str:
    """Why it is not measured; nothing where it is."""
    if there and not args.replace:
        return f"{args.out} has a row, {there.us} us by {there.libtype}: --replace measures again"
    if problem.scaled or problem.dtype not in FLOATS or problem.out_dtype not in FLOATS:
        return "scaled products and those of other dtypes have one implementation"
    return "" if min(problem[:3]) > 0 else "there is nothing to multiply"


# measuring


@torch.no_grad()
def check_and_time(problem: GemmKey, device: torch.device, reps: int) -> tuple[list, list]:
    """Implementations as good as torch, torch first, each with its time; and those that are not."""
    torch.manual_seed(0)
    M, N, K, *_ = problem
    kind = {"device": device, "dtype": problem.dtype}
    x, weight = torch.randn(M, K, **kind), torch.randn(N, K, **kind).mul_(K**-0.5)
    bias = torch.randn(N, **kind) if problem.bias else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    (bar,) = distances([F.linear(x, weight, bias).to(problem.out_dtype)], [exact])
    good, bad = [], []
    for one in implementations(problem, x, weight, bias):
        if one.kernel and not fits(one.run):
            continue
        (one.error,) = distances([one.run()], [exact])
        (good if one.error <= SLACK * bar + FLOOR else bad).append(one)
    runs = [one.run for one in good]
    on_gpu = device.type == "cuda"
    times = time_graphs(runs, reps) if on_gpu else [t.median for t in time_calls(runs, reps)]
    for one, us in zip(good, times, strict=True):
        one.us = us
    return good, bad


def implementations(
    problem: GemmKey, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Iterator[Implementation]:
    """torch, and the kernels that take these inputs: by the tables' tile, and by each worth trying."""
    dtype = problem.out_dtype

    def by_op(backend: str) -> Callable[[], Tensor]:
        return lambda: tuned_gemm_op(x, weight, bias, dtype, None, backend)

    own = dtype == problem.dtype
    yield Implementation("torch", "", functools.partial(F.linear, x, weight, bias) if own else by_op("torch"))
    inputs = gemm_inputs(x, weight, bias, dtype)
    if problem.shuffled:
        if own and is_here("triton", inputs):
            yield Implementation("triton", "", functools.partial(as_it_lies, x, shuffle_weight(weight)))
        return
    tried: set[str] = set()
    for backend in ("triton", "hopper"):
        tiles = tiles_of(by_op(backend)) if is_here(backend, inputs) else []
        if tried.issuperset(tiles):  # one row of both is one kernel
            continue
        tried.update(tiles)
        yield Implementation(backend, "", by_op(backend))
        for tile in tiles:
            yield Implementation(backend, tile, by_op(f"{backend}/{tile}"))


def tiles_of(call: Callable[[], Tensor]) -> list[str]:
    """Return the tiles worth trying for the kernel that a call launches."""
    ops: list[str] = []
    with tuning.choose(lambda key: ops.append(key.op)):
        call()
    return [str(tile) for op in ops if op in TILED for tile in candidates(op)]


def choice(found: list[Implementation]) -> Implementation:
    """The fastest, if it is clearly faster than torch."""
    best = min(found, key=lambda one: one.us)
    return best if best.us <= FASTER * found[0].us else found[0]


# rows


def row(problem: GemmKey, device: torch.device, found: list[Implementation], about: str) -> dict[str, str]:
    best = choice(found)
    (M, N, K), (gfx, units) = problem[:3], this_device(device)
    moved = problem.dtype.itemsize * (M * K + N * K) + problem.out_dtype.itemsize * M * N
    cells = {"gfx": gfx, "cu_num": units} | problem.cells()
    cells |= {"libtype": best.libtype, "solidx": 0, "splitK": 0}
    cells |= {"us": f"{best.us:.2f}", "kernelName": best.kernel, "err_ratio": f"{best.error:.2e}"}
    cells |= {"tflops": f"{2 * M * N * K / best.us / 1e6:.2f}", "bw": f"{moved / best.us / 1e3:.1f}"}
    cells["provenance"] = f"{about}; F.linear {found[0].us:.2f} us"
    return {name: str(cell) for name, cell in cells.items()}


def described(problem: GemmKey) -> str:
    flags = [name for name in ("bias", "shuffled") if getattr(problem, name)]
    kinds = [str(dtype).removeprefix("torch.") for dtype in dict.fromkeys((problem.dtype, problem.out_dtype))]
    return " ".join(["x".join(map(str, problem[:3])), "->".join(kinds), *flags])


def show_times(problem: GemmKey, found: list[Implementation]) -> None:
    best = choice(found)
    fastest: dict[str, float] = {}
    for one in found:
        fastest[one.libtype] = min(one.us, fastest.get(one.libtype, one.us))
    times = ", ".join(f"{name} {us:.1f}" for name, us in fastest.items())
    print(f"{described(problem):<36} {times} us -> {best.libtype} {best.kernel}".rstrip(), flush=True)
