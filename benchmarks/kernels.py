"""Time each tiled kernel alone, under each tile worth trying: what the tables in moe_aiter/tuning hold.

    python benchmarks/kernels.py A B C D E --out benchmarks/results/kernels.csv

Each kernel is checked against float32 on three experts, its outputs filled with NaN first; then the median of
seven runs, each after a flush of L2, in bfloat16 with SwiGLU and the routing of softmax(randn).
The kernels of routing, which have no tile to choose, are timed as a CUDA graph replays them; they are held
against float64, and the plan against torch's stable sort.
"""

import argparse
import contextlib
import csv
import dataclasses
import datetime
import pathlib
import subprocess

import torch
import torch.nn.functional as F
import triton

from moe_aiter import sort_by_expert, tuning
from moe_aiter.bench.shapes import SHAPES
from moe_aiter.kernels.expert_down import launch_expert_down_grad
from moe_aiter.kernels.expert_up import launch_expert_up
from moe_aiter.kernels.gmm import launch_gmm
from moe_aiter.kernels.route import choose_experts, launch_route
from moe_aiter.kernels.route_grad import launch_route_backward
from moe_aiter.kernels.sort import launch_sort, sort_reference
from moe_aiter.kernels.tgmm import launch_tgmm
from moe_aiter.tuning import Config

WIDE = [Config(128, 256, 64, group, 8, stages) for group in (1, 8, 16) for stages in (3, 4)]
SMALL = [Config(128, 128, 64, 8, 4, 3), Config(64, 128, 64, 8, 4, 4), Config(64, 256, 64, 8, 4, 3)]
GATHER = [Config(128, 256, 64, group, 8, 5) for group in (1, 4, 8, 16)]
CANDIDATES = {
    "up": WIDE + SMALL,
    "gmm": WIDE + SMALL,
    "down_grad": [c for c in WIDE if c.num_stages == 3] + SMALL,
    "tgmm_gather": GATHER,
}


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, float("nan"), device="cuda", dtype=dtype)


def swiglu(z: torch.Tensor) -> torch.Tensor:
    gate, up = z.chunk(2, 1)
    return F.silu(gate) * up


class Step:
    """The kernels of one forward and backward pass over the experts, and their operands."""

    def __init__(self, name: str):
        shape = SHAPES[name]
        T, H, I, E, k = dataclasses.astuple(shape)  # noqa: E741
        self.top_k, self.flops = k, shape.forward_flops // 3  # of one product with H x I weights
        ids = torch.randn(T, E, device="cuda").softmax(1).topk(k).indices
        self.order, self.rank, self.sizes = sort_by_expert(ids, E)
        self.x, self.dout, self.s = random(T, H), random(T, H), torch.rand(T, k, device="cuda")
        self.gate_up, self.down = random(E, 2 * I, H, scale=H**-0.5), random(E, H, I, scale=I**-0.5)
        self.z, self.a, self.y = poisoned(T * k, 2 * I), poisoned(T * k, I), poisoned(T * k, H)
        self.dz, self.sa, self.ds = (
            poisoned(T * k, 2 * I),
            poisoned(T * k, I),
            poisoned(T, k, dtype=torch.float32),
        )
        self.dx, self.dgate_up, self.ddown = poisoned(T * k, H), poisoned(E, 2 * I, H), poisoned(E, H, I)

    def kernels(self) -> dict:
        """name -> (op of the table, products of H x I weights, function)."""
        plan, act = (self.order, self.rank, self.sizes), ("swiglu", False, True)
        return {
            "up": ("up", 2, lambda: launch_expert_up(
                (self.z, self.a), self.x, self.gate_up, None, *plan, *act, None)),
            "down": ("gmm", 1, lambda: launch_gmm(self.y, self.a, self.down.mT, self.sizes, None)),
            "dz": ("down_grad", 1, lambda: launch_expert_down_grad(
                (self.dz, self.sa, self.ds), self.dout, self.z, self.down, self.s, *plan, *act)),
            "dx": ("gmm", 2, lambda: launch_gmm(self.dx, self.dz, self.gate_up, self.sizes, None)),
            "ddown": ("tgmm_gather", 1, lambda: launch_tgmm(
                self.ddown, self.dout, self.sa, self.sizes, self.order, self.top_k, False)),
            "dgate_up": ("tgmm_gather", 2, lambda: launch_tgmm(
                self.dgate_up, self.x, self.dz, self.sizes, self.order, self.top_k, True)),
        }  # fmt: skip

    def errors(self) -> dict[str, float]:
        """The relative error of each kernel's outputs, the worst of three experts."""
        ends = [0, *self.sizes.cumsum(0).tolist()]
        worst: dict[str, float] = {}
        for e in (0, len(self.sizes) // 2, len(self.sizes) - 1):
            rows = slice(ends[e], ends[e + 1])
            choice = self.order[rows].long()
            x, dout = self.x[choice // self.top_k].float(), self.dout[choice // self.top_k].float()
            s, (gate_up, down) = (
                self.s.flatten()[choice, None],
                (self.gate_up[e].float(), self.down[e].float()),
            )
            exact_z = x @ gate_up.T
            z = self.z[rows].float().requires_grad_()
            a = swiglu(z)
            (dz,) = torch.autograd.grad(a, z, s * (dout @ down))
            pairs = {
                "up": [(z, exact_z), (self.a[rows], swiglu(exact_z))],
                "down": [(self.y[rows], self.a[rows].float() @ down.T)],
                "dz": [
                    (self.dz[rows], dz),
                    (self.sa[rows], s * a),
                    (self.ds.flatten()[choice], (dout @ down * a).sum(1)),
                ],
                "dx": [(self.dx[rows], self.dz[rows].float() @ gate_up)],
                "ddown": [(self.ddown[e], dout.T @ self.sa[rows].float())],
                "dgate_up": [(self.dgate_up[e], self.dz[rows].float().T @ x)],
            }
            for name, results in pairs.items():
                for got, want in results:
                    error = ((got.float() - want).norm() / want.norm()).item()
                    worst[name] = max(worst.get(name, 0.0), error)
        return worst


class Routing:
    """The kernels that route the tokens of one shape, as softmax over E, top-k, renormalised."""

    how = (False, True, 1.0)

    def __init__(self, name: str):
        shape = SHAPES[name]
        T, self.E, self.k = shape.num_tokens, shape.num_experts, shape.top_k
        self.logits, self.dweights = (torch.randn(T, n, device="cuda") for n in (self.E, self.k))
        self.scores, self.dlogits = (poisoned(T, self.E, dtype=torch.float32) for _ in range(2))
        self.weights = poisoned(T, self.k, dtype=torch.float32)
        self.ids = torch.full((T, self.k), -1, device="cuda")
        ints = {"device": "cuda", "dtype": torch.int32}
        self.plan = tuple(torch.empty(n, **ints) for n in (T * self.k, (T, self.k), self.E))

    def kernels(self) -> dict:
        """name -> (bytes that have to be read and written, function)."""
        logits, choices = self.logits.numel(), self.ids.numel()
        routed = self.scores, self.weights, self.ids
        return {
            "route": (8 * logits + 12 * choices, lambda: launch_route(
                routed, self.logits, self.k, *self.how)),
            "plan": (16 * choices, lambda: launch_sort(self.plan, self.ids, self.E)),
            "dlogits": (4 * logits + 16 * choices, lambda: launch_route_backward(
                self.dlogits, self.weights, self.ids, None, self.dweights, None, self.E, *self.how)),
        }  # fmt: skip

    def error(self) -> float:
        """The worst relative error of what is a float; the rest must be equal."""
        logits = self.logits.double().requires_grad_()
        scores, weights, ids = choose_experts(logits, self.k)
        (dlogits,) = torch.autograd.grad(weights, logits, self.dweights.double())
        for got, want in zip((self.ids, *self.plan), (ids, *sort_reference(ids, self.E)), strict=True):
            assert torch.equal(got.long(), want)
        pairs = (self.scores, scores), (self.weights, weights), (self.dlogits, dlogits)
        return max(((got - want).norm() / want.norm()).item() for got, want in pairs)


def in_a_graph(fn):
    """`fn` as one launch: a small kernel takes less time than Python needs to launch it."""
    fn()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def measure_routing(name: str) -> list[dict]:
    """Every kernel of routing one shape; a line of each is printed."""
    torch.manual_seed(0)
    routing, rows = Routing(name), []
    kernels = routing.kernels()
    for _, run in kernels.values():
        run()
    error = routing.error()
    assert error < 1e-6, f"{name} routing: error {error}"
    kernels["route and plan"] = (
        kernels["route"][0] + kernels["plan"][0],
        lambda: (kernels["route"][1](), kernels["plan"][1]()),
    )
    untiled = dict.fromkeys((field.name for field in dataclasses.fields(Config)), "")
    for kernel, (size, run) in kernels.items():
        ms = median(in_a_graph(run))
        what = {"shape": name, "kernel": kernel, "op": "routing", "error": f"{error:.1e}"}
        rows.append(what | untiled | {"us": round(1e3 * ms, 1), "tflops": ""})
        print(f"{name} {kernel:14s} {1e3 * ms:6.1f} us   {size / ms / 1e6:5.0f} GB/s", flush=True)
    return rows


def median(fn, runs: int = 7) -> float:
    """Milliseconds on the GPU."""
    flushed, times = torch.empty(2**26, dtype=torch.int32, device="cuda"), []
    fn()
    for _ in range(runs):
        flushed.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        fn()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[runs // 2]


@contextlib.contextmanager
def tile(op: str, config: Config):
    """Every lookup of `op` gives `config`."""
    before = tuning.lookup
    tuning.lookup = lambda name, *rest: config if name == op else before(name, *rest)
    try:
        yield
    finally:
        tuning.lookup = before


def commit() -> str:
    """The commit that is measured, where git can say."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def measure(name: str) -> list[dict]:
    """Every kernel of one shape under every candidate, best first; a line of each kernel is printed."""
    torch.manual_seed(0)
    step, rows = Step(name), []
    kernels = step.kernels()
    for _, _, run in kernels.values():
        run()
    errors = step.errors()
    for kernel, (op, products, run) in kernels.items():
        assert errors[kernel] < 3e-3, f"{name} {kernel}: error {errors[kernel]}"
        found = []
        for config in CANDIDATES[op]:
            with tile(op, config):
                ms = median(run)
            figures = {"us": round(1e3 * ms, 1), "tflops": round(products * step.flops / ms / 1e9, 1)}
            what = {"shape": name, "kernel": kernel, "op": op, "error": f"{errors[kernel]:.1e}"}
            found.append(what | dataclasses.asdict(config) | figures)
        found.sort(key=lambda row: row["us"])
        best = [
            f"{r['tflops']:.0f} {r['block_m']}x{r['block_n']} g{r['group_m']} s{r['num_stages']}"
            for r in found
        ]
        print(f"{name} {kernel:9s} error {errors[kernel]:.1e}   " + "   ".join(best[:5]), flush=True)
        rows += found
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", default=["A", "B", "C", "D", "E"])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--commit", default=commit())
    args = parser.parse_args()
    where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    when = {"commit": args.commit, "date": datetime.date.today().isoformat()}
    rows = [row | where | when for name in args.shapes for row in measure_routing(name) + measure(name)]
    if args.out:
        with open(args.out, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
