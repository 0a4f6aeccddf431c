"""`moe-aiter tune`: measure a few configurations of each kernel, and write what wins into this GPU's table.

A candidate has to be right, and clearly faster than the default; all of them run in turn.  A family is the
products of a training step, `layer`, those of a step with frozen experts of 4 bits, `four_bit`, or those of
cases.py, whose tiles are held against float64.  Where torch has the product too, the table of choices gets a
row that names the fastest: see tiles.py.
"""

import argparse
import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterable

import torch

from .. import tuning
from ..kernels.quantize.four_bit import FORMATS
from ..tuning.candidates import OPS, Config, of_few_rows
from ..tuning.choice import CHOICES
from ..tuning.table import TILES, Key
from . import cases, tune_gemm
from .measure import add_list, append, count, provenance, refuse
from .problem import DEFAULT, Shape, listed, named
from .tiles import (
    FASTER,
    Kernel,
    Product,
    check_tiles,
    compare_backends,
    four_bit_products,
    pick_tile,
    step_products,
    time_tiles,
)

COMPILE, FLUSH, RATE = 1.5, 1e-4, 5e14  # s for a configuration, s before a run, FLOP/s: for the estimate
LAYER, FOUR_BIT = STEPS = "layer", "four_bit"  # which have the shapes of layers
NF4 = FORMATS["nf4"].block
TILE = [field.name for field in dataclasses.fields(Config)]
TIMES = [*Key._fields, "flops", *TILE, "us", "date", "commit", "gpu", "torch", "triton"]
FAMILIES = (*STEPS, *cases.FAMILIES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = f"shapes, groups or T,H,I,E,k [{', '.join(DEFAULT['cuda'])}]; for other families cases"
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=[LAYER], metavar="NAME",
                        help=f"kernels to tune: {', '.join(FAMILIES)} [{LAYER}]")  # fmt: skip
    parser.add_argument("--shape", nargs="+", metavar="NAME", help=names)
    text = "numbers of tokens [the shape's]"
    parser.add_argument("--tokens", nargs="+", type=count, metavar="T", help=text)
    text = "tune only these kernels [all that this GPU can run]"
    parser.add_argument("--op", nargs="+", choices=OPS, metavar="OP", help=text)
    text = "file to write [the table of this GPU]; choices of backends go to choice/ beside it"
    parser.add_argument("--out", type=pathlib.Path, metavar="CSV", help=text)
    text = "append the time of every tile to this file [none]"
    parser.add_argument("--times", type=pathlib.Path, metavar="CSV", help=text)
    parser.add_argument("--reps", type=count, default=15, metavar="N", help="timed runs of each tile [15]")
    text = "time dense products and write a table in AITER's format"
    known = lambda: f"kernels: {', '.join(OPS)}; {listed()}; {cases.case_names(cases.FAMILIES)}"  # noqa: E731
    add_list(parser, known, of="kernels, shapes and cases")
    parser.set_defaults(prog=parser.prog)
    several = parser.add_subparsers(dest="product", metavar="gemm")
    tune_gemm.add_arguments(several.add_parser("gemm", help=text, description=text))


@dataclasses.dataclass
class Run:
    """The results of one command so far, and the file that it writes."""

    ops: list[str] | None
    reps: int
    save: Callable[[dict], None]  # a row of the table
    save_choice: Callable[[dict], None]
    drop: Callable[[Key], None]  # the table's row with that key
    note: Callable[[list[dict]], None]  # the time of every tile
    done: dict[Key, Config] = dataclasses.field(default_factory=dict)
    asked: set = dataclasses.field(default_factory=set)  # cases of the table of choices
    wrong: int = 0


def main(args: argparse.Namespace) -> int:
    """Tune every shape asked for; 1 if a candidate was wrong, 2 if nothing can be measured."""
    if args.product == "gemm":
        return tune_gemm.main(args)
    try:
        shapes, selected = asked_products(args)
    except ValueError as mistake:
        return refuse(args, str(mistake))
    if not torch.cuda.is_available():
        return refuse(args, "there is no GPU that torch can use")
    gpu = torch.cuda.get_device_name()
    out = args.out or TILES.folder / f"{tuning.gpu_table(gpu)}.csv"
    choices = out.parent / "choice" / out.name
    try:
        TILES.write(out, [])  # a file that cannot be written shows now, not after the measurement
        if args.times:
            append(args.times, [], TIMES)
        TILES.read(out)
        if choices.exists():
            CHOICES.read(choices)
    except (ValueError, OSError) as error:
        return refuse(args, str(error))
    where = provenance(torch.device("cuda"), "")
    where["gpu"] = where.pop("device")
    del where["dtype"]
    print(", ".join(f"{k} {v}" for k, v in where.items()), f"-> {out}")
    run = Run(
        args.op,
        args.reps,
        save=lambda row: TILES.write(out, [row | where]),
        save_choice=lambda row: CHOICES.write(choices, [row | where]),
        drop=lambda key: TILES.write(out, [], without=key),
        note=lambda rows: args.times and append(args.times, [row | where for row in rows], TIMES),
    )
    for family in (name for name in STEPS if name in args.family):
        tune_layers(args, shapes, run, family)
    for family, case in selected:
        print(f"\n{family}, {case.name} ({case.shape}), {case.dtypes[0]}")
        torch.manual_seed(0)
        operands = case.make(*case.sizes, device=torch.device("cuda"), dtype=getattr(torch, case.dtypes[0]))
        tune_kernels(list(operands.kernels()), run)
        del operands  # before the next ones are made
        torch.cuda.empty_cache()
    return int(run.wrong > 0)


def asked_products(args: argparse.Namespace) -> tuple[dict[str, Shape], list[tuple[str, cases.Case]]]:
    """Return the layers by name, and (family, case) of each other product; ValueError for a mistake."""
    families = {name: own for name, own in cases.FAMILIES.items() if name in args.family}
    steps = [name for name in STEPS if name in args.family]
    if steps and families and args.shape:
        raise ValueError(f"--shape names shapes of {steps[0]} or of other families, not of both")
    if args.tokens and not steps:
        raise ValueError(f"--tokens is for {' and '.join(STEPS)}")
    shapes = named(args.shape or DEFAULT["cuda"]) if steps else {}
    for name, s in shapes.items():
        if FOUR_BIT in steps and (s.hidden % NF4 or s.intermediate % NF4):
            raise ValueError(
                f"{FOUR_BIT} needs H and I that are multiples of {NF4}, not those of {name}: {s}"
            )
    return shapes, cases.select(families, args.shape, None, "cuda") if families else []


def tune_layers(args: argparse.Namespace, shapes: dict[str, Shape], run: Run, family: str) -> None:
    for name, known in shapes.items():
        for tokens in args.tokens or [known.num_tokens]:
            shape = dataclasses.replace(known, num_tokens=tokens)
            print(f"\nshape {name}: T, H, I, E, k = {shape}")
            step = shape, torch.device("cuda"), torch.bfloat16, bool(run.ops)
            tune_products(step_products(*step) if family == LAYER else four_bit_products(*step), run)
            torch.cuda.empty_cache()


@torch.no_grad()
def tune_kernels(kernels: list[Kernel], run: Run) -> None:
    """Tune the tiles of each kernel, and then choose the backend of each case."""
    tune_products([p for kernel in kernels if kernel.tiled for p in kernel.products().values()], run)
    for kernel in kernels:
        if kernel.case is not None and "torch" in kernel.launches and kernel.case not in run.asked:
            run.asked.add(kernel.case)
            row, wrong = compare_backends(kernel, run.done, run.reps)
            run.wrong += len(wrong)
            for backend in wrong:
                print(f"WRONG, left out: {kernel.name} by {backend}")
            if row and not run.ops:
                run.save_choice(row)


def tune_products(several: Iterable[Product], run: Run) -> None:
    """Tune each product, and print a line of it.

    Several may look up the same keys, as do shapes that differ in the number of experts alone: the first of
    them speaks, and what is done is left out.
    """
    found: dict[Key, Product] = {}
    shared, idle = [], set(run.ops or ())
    for product in several:
        key = product.key()
        idle.discard(key.op)
        if key in run.done or key in found:
            shared.append(product.name)
        elif not run.ops or key.op in run.ops:
            found[key] = product
    if idle:
        print(f"nothing here runs {', '.join(sorted(idle))}")
    if shared:
        print(f"as for a shape above: {', '.join(shared)}")
    work = [(p, len(tuning.to_try(key))) for key, p in found.items()]
    total = sum(n for _, n in work)
    seconds = sum(n * run.reps * (p.flops / RATE + FLUSH) for p, n in work)
    print(f"{total} configurations: about {seconds:.0f} s, and up to {COMPILE * total:.0f} s of compiling")
    print(f"{'op':<24} {'product':<10} {'rows, n, k':<20} {'default us':>10} {'best us':>9}  choice")
    for key, product in found.items():
        tune_product(product, key, run)


def tune_product(product: Product, key: Key, run: Run) -> None:
    default, *_ = every = tuning.to_try(key)
    good, bad = check_tiles(product, every)
    run.wrong += len(bad)
    for config in bad:
        print(f"WRONG, left out: {key.op} {config}")
    if default in bad:
        return
    times = time_tiles(product, good, run.reps)
    rival = times.pop(None, math.inf)
    what = key._asdict() | {"flops": product.flops}
    run.note([what | dataclasses.asdict(config) | {"us": us} for config, us in times.items()])
    run.done[key] = choice = pick_tile(default, times)
    sizes = f"{key.rows}, {key.n}, {key.k}"
    kept = " (default)" if choice == default else ""
    if of_few_rows(key.op, key.rows) and times[choice] > FASTER * rival:  # which a row would replace
        kept += ", no row"
        run.drop(key)
    else:
        figures = {"us": f"{times[choice]:.1f}", "default_us": f"{times[default]:.1f}"}
        run.save(key._asdict() | dataclasses.asdict(choice) | figures)
    kept += "" if rival == math.inf else f" (Hopper kernel: {rival:.1f} us)"
    us, best = times[default], min(times.values())
    print(f"{key.op:<24} {product.name:<10} {sizes:<20} {us:10.1f} {best:9.1f}  {choice}{kept}", flush=True)
