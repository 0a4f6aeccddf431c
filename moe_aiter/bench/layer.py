"""`moe-aiter bench layer`: check each contender, then time it, then measure its memory."""

import argparse
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .contenders import contenders
from .measure import (
    FLOOR,
    PASSES,
    PEER_ERRORS,
    REPS,
    SLACK,
    Contender,
    append,
    columns,
    distances,
    floors,
    measure_memory,
    provenance,
    refuse,
    time_all,
    time_host,
    widen,
)
from .problem import DEFAULT, SHAPES, Problem, Shape, checked_experts, named, new_problem, truth

PARTS = ("output", "dx", "dgate_up", "ddown", "drouting", "dgate_up_bias", "ddown_bias")
PER_EXPERT = ("dgate_up", "ddown", "dgate_up_bias", "ddown_bias")
HOST = [f"{name}_host_ms" for name in PASSES]
ADDED = ["routing", "forward_roofline", "step_roofline", *HOST]  # columns that older files may lack
FIELDS = [
    *("date", "commit", "device", "torch", "triton", "dtype", "shape"),
    *("tokens", "hidden", "intermediate", "experts", "top_k", "contender"),
    *(f"{name}_{figure}" for name in PASSES for figure in ("ms", "p20", "p80", "tflops")),
    *("held_mib", "peak_mib", "error", "torch_error"),
    *ADDED,
]


def bench_layer(args: argparse.Namespace) -> int:
    """Measure every shape asked for; 1 if one of our own contenders was not as good as torch."""
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        return refuse("bench layer", "there is no GPU that torch can use")
    if args.out and args.out.is_file():
        widen(args.out, FIELDS, ADDED)
        if columns(args.out) != FIELDS:
            return refuse("bench layer", f"{args.out} has other columns: {columns(args.out)}")
    if args.out:
        append(args.out, [], FIELDS)  # a place that cannot be written shows now, not after the measurement
    torch.backends.cuda.matmul.allow_tf32 = False
    dtype, device = getattr(torch, args.dtype), torch.device(kind)
    where = provenance(device, args.dtype, args.commit)
    print(", ".join(f"{k} {v}" for k, v in where.items()))
    wrong = False
    for name in named(args.shape or DEFAULT[kind]):
        shape = SHAPES[name]
        print(f"\nshape {name}: T, H, I, E, k = {shape}; {args.routing} routing")
        problem = new_problem(shape, dtype, device, args.routing)
        field = list(contenders(problem))
        words = args.only or [""]
        if strangers := [word for word in words if not any(word in c.name for c in field)]:
            there = ", ".join(repr(c.name) for c in field)
            return refuse(
                "bench layer", f"--only: no contender matches {', '.join(strangers)}; there are {there}"
            )
        field = [c for c in field if any(word in c.name for word in words)]
        rows, refused = bench_field(field, problem, args.reps or REPS[kind])
        wrong = wrong or refused
        about = where | shape_cells(name, shape) | {"routing": args.routing}
        floor = floors(shape, where["device"])  # of what is checked, which computes the same
        rows = [about | row | (shares(row, floor) if "error" in row else {}) for row in rows]
        show(rows)
        if args.out:
            append(args.out, rows, FIELDS)
    return int(wrong)


def bench_field(field: list[Contender], problem: Problem, reps: int) -> tuple[list[dict], bool]:
    """A row for each contender, and whether one of ours was refused."""
    rows = [
        {"contender": c.name} | errors for c, errors in zip(field, check_all(field, problem), strict=True)
    ]
    passed = [i for i, row in enumerate(rows) if not row.pop("refused")]
    times = time_all([field[i] for i in passed], problem, reps)
    for i, by_pass in zip(passed, times, strict=True):
        host = time_host(field[i], problem) if problem.x.is_cuda else {}
        for name, t in by_pass.items():
            rows[i] |= {f"{name}_ms": t.median, f"{name}_p20": t.p20, f"{name}_p80": t.p80}
            rows[i] |= {f"{name}_host_ms": host[name].median} if host else {}
            flops = PASSES[name] * problem.shape.forward_flops
            rows[i] |= {f"{name}_tflops": flops / sustained(rows[i], name) / 1e9}
        memory = None if field[i].graphed else measure_memory(field[i], problem)
        if memory:
            rows[i] |= {"held_mib": memory[0], "peak_mib": memory[1]}
    return rows, any(c.ours and i not in passed for i, c in enumerate(field))


def sustained(row: dict, name: str) -> float:
    """Milliseconds of a pass when many follow each other: of the GPU, or of the host where it is slower."""
    return max(row[f"{name}_ms"], row.get(f"{name}_host_ms", 0.0))


def check_all(field: list[Contender], problem: Problem) -> list[dict]:
    """The worst error of each contender against float64, torch's own there, and whether to refuse it."""

    @functools.cache
    def given(routed: bool) -> tuple[list[Tensor], list[float]]:
        exact = truth(problem, problem.expert_ids, routed, torch.float64)
        return exact, distances(truth(problem, problem.expert_ids, routed, problem.x.dtype), exact)

    found = []
    for contender in field:
        try:
            found.append(check(contender, problem, given))
        except (*PEER_ERRORS, *contender.errors) as error:
            if contender.ours:
                raise
            print(f"{contender.name} cannot run here: {error}")
            found.append({"refused": True})
    return found


def check(contender: Contender, problem: Problem, given: Callable) -> dict:
    """The errors of one contender; `given(routed)` is the truth and the errors of plain torch."""
    with contender.context():
        out = contender.run()
        gradients = contender.gradients(out, problem)
    if not contender.checked:
        return {"refused": False}
    got = [out.detach(), *contender.as_ours(gradients)]
    exact, torch_errors = given(contender.routed)
    if contender.expert_ids and not torch.equal(contender.expert_ids(), problem.expert_ids):
        exact = truth(problem, contender.expert_ids(), contender.routed, torch.float64)
    errors = distances(comparable(got, problem.shape), exact)
    bars = [SLACK * error + FLOOR for error in torch_errors]
    worst = max(range(len(errors)), key=lambda i: errors[i] / bars[i])
    refused = not all(error <= bar for error, bar in zip(errors, bars, strict=True))
    if refused:
        print(
            f"{contender.name}: {PARTS[worst]} has error {errors[worst]:.1e}, torch {torch_errors[worst]:.1e}"
        )
    return {"error": errors[worst], "torch_error": torch_errors[worst], "refused": refused}


def comparable(got: list[Tensor], shape: Shape) -> list[Tensor]:
    """What the truth has: of the weights' gradients, those of `checked_experts`."""
    experts = checked_experts(shape)
    if len(experts) == shape.num_experts:
        return got
    return [t[experts] if part in PER_EXPERT else t for part, t in zip(PARTS, got, strict=False)]


def shape_cells(name: str, shape: Shape) -> dict:
    sizes = ("tokens", "hidden", "intermediate", "experts", "top_k")
    return {"shape": name} | dict(zip(sizes, shape.sizes, strict=True))


def shares(row: dict, floor: dict[str, float]) -> dict:
    """How near each pass came to its floor, in percent."""
    return {f"{p}_roofline": 100 * ms / sustained(row, p) for p, ms in floor.items() if f"{p}_ms" in row}


def show(rows: list[dict]) -> None:
    heads = "".join(f"{name + ' ms, TFLOP/s':>22}" for name in PASSES)
    print(f"{'':<40}{heads} {'host':>6} {'roofline %':>11} {'held':>8} {'peak MiB':>9} {'error':>9}")
    for row in rows:
        if "step_ms" not in row:
            print(f"{row['contender']:<40} refused")
            continue
        cells = [f"{row['contender']:<40}"]
        cells += [f"{row[p + '_ms']:13.2f} {row[p + '_tflops']:7.2f}" for p in PASSES]
        cells += [f"{row['step_host_ms']:6.2f}" if "step_host_ms" in row else " " * 6]
        cells += [f"{row[f]:5.0f}" if f in row else " " * 5 for f in ("forward_roofline", "step_roofline")]
        cells += [f"{row[m]:8.0f}" if m in row else " " * 8 for m in ("held_mib", "peak_mib")]
        cells += [f"{row['error']:9.1e}" if "error" in row else ""]
        print(" ".join(cells))
