"""`python -m benchmarks parallel`: experts that several ranks share, by our layer and by plain torch.

    torchrun --standalone --nproc-per-node 2 -m -- benchmarks parallel --shape C

Each rank has T tokens of its own, and all contenders are given the routing.  A decision that depends on a
measurement uses numbers that all ranks agree on, so that all ranks make the same calls.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe_aiter.bench.command import Asked, Command, Contest, Error, Judge, errors_of
from moe_aiter.bench.layer import RESULTS, SIZES, qwen3_moe, shape_cells
from moe_aiter.bench.measure import (
    PASSES,
    WHERE,
    Contender,
    PassTimer,
    Times,
    add_contenders,
    add_shapes,
    built,
    count,
    distances,
    measure_memory,
    parameter,
    refuse,
    skip,
    time_all,
)  # fmt: skip
from moe_aiter.bench.problem import (
    DEFAULT,
    Problem,
    Shape,
    activation,
    checked_experts,
    named,
    new_problem,
    truth,
)  # fmt: skip
from moe_aiter.distributed import ExpertParallel, expert_mesh
from moe_aiter.distributed.collective import all_gather
from moe_aiter.distributed.experts import check_guests
from moe_aiter.distributed.guests import guest_bytes
from moe_aiter.distributed.transport import region_sizes, why_not_symmetric
from moe_aiter.integrations.transformers import parallel_interface
from moe_aiter.kernels.rows.lend import lend_rows
from moe_aiter.layers.experts import Experts, local_part
from moe_aiter.routing.plan import make_plan
from moe_aiter.routing.router import route

from .tables import of_balance, written

START = "torchrun --standalone --nproc-per-node N -m -- benchmarks parallel"
ONE_GPU = "moe_aiter, one GPU"  # the contender that the others are compared with
SYMMETRIC = "moe_aiter, symmetric"
DGATE_UP, DDOWN = RESULTS.index("dgate_up"), RESULTS.index("ddown")
TORCHTITAN, HUGGING_FACE = "torchtitan AllToAllTokenDispatcher", "Hugging Face all_to_all + grouped_mm"


def options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"Start it with: {START}"
    add_shapes(parser, "A to E on GPUs, cpu on a CPU; T tokens on each rank", plain=True)
    parser.add_argument("--ep", type=count, metavar="N", help="ranks that share the experts [all]")
    parser.add_argument(
        "--routing",
        choices=("normal", "zipf", "one-rank"),
        nargs="+",
        default=["normal"],
        help="normal logits, experts by a Zipf law, or all tokens to the experts of one rank [normal]",
    )
    text = "exponents of the Zipf law, each a problem of its own; adds zipf to --routing [1]"
    parser.add_argument("--skew", type=exponent, nargs="+", metavar="S", help=text)
    text = "guest slots of each rank, or auto: a contender for each, through symmetric memory [0]"
    parser.add_argument("--guests", type=slots, nargs="+", default=[0], metavar="N", help=text)
    add_contenders(parser)


def exponent(text: str) -> float:
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no exponent: give a number from 0 on")
    return float(text)


def slots(text: str) -> int | str:
    if text != "auto" and int(text) < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return text if text == "auto" else int(text)


def main(args: argparse.Namespace) -> int:
    """Run the command on all ranks, of which the first prints and writes; the same status on each."""
    try:
        start(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except ValueError as mistake:
        return refuse(args, str(mistake))
    with contextlib.ExitStack() as silence:
        if dist.get_rank():
            args.out = None
            silence.enter_context(contextlib.redirect_stdout(io.StringIO()))
            silence.enter_context(contextlib.redirect_stderr(io.StringIO()))
        status = COMMAND.main(args)
    dist.destroy_process_group()  # not after an error, when other ranks may still wait for this one
    return status


def start(kind: str) -> None:
    """Make the process group from what torchrun says, and give each rank its GPU."""
    if kind == "cuda":
        local, gpus = dist.get_node_local_rank(fallback_rank=0), torch.cuda.device_count()
        if local >= gpus:
            raise ValueError(f"rank {local} of this machine has no GPU: torch can use {gpus}")
        torch.cuda.set_device(local)
    try:
        dist.init_process_group(dist.get_default_backend_for_device(kind))
    except ValueError as error:  # there is no torchrun
        raise ValueError(f"it needs torchrun: {START}") from error


def asked(args: argparse.Namespace, kind: str) -> Iterator[Asked]:
    world = dist.get_world_size()
    ep = args.ep or world
    mesh = expert_mesh(kind, ep)["ep"]
    shapes = named(args.shape or DEFAULT[kind], plain=True)
    for (name, shape), (routing, skew) in itertools.product(shapes.items(), routings(args)):
        _, hidden, _, experts, top_k = shape.sizes
        if experts % ep:
            raise ValueError(f"shape {name} has {experts} experts, which --ep {ep} does not divide")
        if routing == "zipf" and hidden < experts:
            raise ValueError(f"--routing zipf: {name} has more experts than hidden sizes")
        if routing == "one-rank" and experts // ep < top_k:
            raise ValueError(f"--routing one-rank: a rank has {experts // ep} experts, a token needs {top_k}")
        for guests in args.guests:
            check_guests(guests, experts - experts // ep)
        law = f"{routing} {skew}".rstrip()
        title = f"shape {name}: T, H, I, E, k = {shape}; {law} routing; {world} ranks, ep {ep}"
        cells = {"ranks": world, "ep": ep, "routing": routing, "skew": skew} | shape_cells(name, shape)
        make = functools.partial(contest, shape, routing, float(skew or 1), mesh, dict.fromkeys(args.guests))
        yield Asked(title, cells, make)


def routings(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the routing and the exponent, or "", of each problem."""
    found = []
    for routing in dict.fromkeys([*args.routing, *["zipf"] * bool(args.skew)]):
        laws = [f"{skew:g}" for skew in args.skew or [1.0]] if routing == "zipf" else [""]
        found += [(routing, law) for law in dict.fromkeys(laws)]
    return found


def shares_of_balance(found: list[tuple[Asked, list[dict]]]) -> Iterator[str]:
    """Yield a line for each skewed row whose contender also ran with normal routing."""
    rows = [asked.cells | row for asked, rows in found for row in rows]
    for row in of_balance(rows):
        law = f"{row['routing']} {row['skew']}".rstrip()
        shares = " / ".join(written(row[f"{name}_of_balance"]) for name in ("forward", "step"))
        about = f"{row['shape']}, {law}, {row['contender']}"
        yield f"{about}: {shares} % of its rate with normal routing, forward / step"


COMMAND = Command(
    [
        *WHERE,
        *("ranks", "ep", "shape", *SIZES, "routing", "skew", "contender"),
        *(f"{name}_{figure}" for name in PASSES for figure in ("ms", "p20", "p80", "tflops")),
        *("forward_share", "step_share", "sent_mb", "pool_mib"),
        *("held_mib", "peak_mib", "error", "torch_error"),
    ],
    (
        "{contender:<42}",
        *(f"{{{name}_ms:12.3f}} {{{name}_tflops:9.4g}}" for name in PASSES),
        *("{forward_share:7.0f}", "{step_share:5.0f}", "{sent_mb:8.1f}", "{pool_mib:8.0f}"),
        *("{held_mib:8.0f}", "{peak_mib:8.0f}", "{error:9.1e}"),
    ),
    options,
    asked,
    head=f"{'':<42}{''.join(f'{name} ms, TFLOP/s'.rjust(22) for name in PASSES)} "
    f"{'% of one GPU':>13} {'sent MB':>8} {'pool':>8} {'held':>8} {'peak MiB':>8} {'error':>9}",
    added=("skew",),
    demands=all,
    summed_up=shares_of_balance,
)
add_arguments = COMMAND.add_arguments


@dataclasses.dataclass
class RankProblem(Problem):
    """The inputs of one rank: tokens and routing of its own, and the weights of all experts.

    `mine` are the experts that this rank holds.
    """

    mesh: DeviceMesh | None = None  # the ranks that share the experts

    @property
    def each(self) -> int:
        return self.shape.num_experts // self.mesh.size()

    @property
    def mine(self) -> range:
        first = self.mesh.get_local_rank() * self.each
        return range(first, first + self.each)

    @torch.no_grad()
    def renew(self, seed: int) -> None:
        """Do as `Problem.renew`; with one-rank routing, the router chooses the first rank's experts only."""
        super().renew(seed * dist.get_world_size() + dist.get_rank())
        if self.routing == "one-rank":
            routing = route(self.x.float() @ self.router[: self.each].float().T, self.shape.top_k)
            self.expert_ids.copy_(routing.expert_ids)
            self.routing_weights.copy_(routing.routing_weights)


def contest(
    shape: Shape, routing: str, skew: float, mesh: DeviceMesh, guests: Iterable[int | str],
    device: torch.device, dtype: torch.dtype,
) -> Contest:  # fmt: skip
    p = RankProblem(**vars(new_problem(shape, dtype, device, routing, skew)), mesh=mesh)
    p.renew(0)
    timer = SlowestRank(p, shape.forward_flops)
    return Contest(list(contenders(p, guests)), by_all_ranks(p), timer, compare, keeps_refused=True)


def compare(rows: list[dict]) -> None:
    """Add the share of the one-GPU rate, in percent."""
    for one in [row for row in rows if row["contender"] == ONE_GPU]:
        for row in rows:
            row |= {
                f"{name}_share": 100 * one[f"{name}_ms"] / row[f"{name}_ms"] for name in ("forward", "step")
            }


def most(values: Sequence, device: torch.device) -> list:
    """Return the largest of each value over all ranks."""
    t = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return t.tolist()


class SlowestRank(PassTimer):
    """Times passes that all ranks begin together; the slowest rank's time counts, and the most memory."""

    def times(self, reps: int) -> list[dict[str, Times]]:
        device = self.problem.x.device
        token = torch.zeros(1, device=device)

        def agree(times: dict[int, tuple]) -> dict[int, tuple]:
            return dict(zip(times, map(tuple, most(list(times.values()), device)), strict=True))

        # a GPU waits for the others in its stream, so that each host stays ahead
        return time_all(self.field, self.problem, reps, lambda: dist.all_reduce(token), agree)

    def host(self, contender: Contender) -> dict[str, Times]:
        return {}

    def memory(self, contender: Contender) -> list[float] | None:
        memory = measure_memory(contender, self.problem)
        return None if memory is None else most(memory, self.problem.x.device)


def by_all_ranks(p: RankProblem) -> Judge:
    """Judge by the plain loop in float64 over the tokens of all ranks; errors are the worst of all ranks."""

    @functools.cache
    def expected(shared: bool) -> tuple[list[Tensor], list[float]]:
        exact, plain = (truth(p, p.expert_ids, False, dtype) for dtype in (torch.float64, p.x.dtype))
        if shared:
            exact, plain = summed(exact, p), summed(plain, p)
        return exact, distances(plain, exact)

    def judge(contender: Contender) -> list[Error]:
        shared = contender.name != ONE_GPU
        experts = p.mine if shared else range(p.shape.num_experts)
        kept = [e - experts.start for e in checked_experts(p.shape) if e in experts]
        got = contender.results(p)
        got = [t[kept] if i in (DGATE_UP, DDOWN) else t for i, t in enumerate(got)]
        errors = errors_of(got, *expected(shared), RESULTS)
        ranks = [errors] * dist.get_world_size()
        dist.all_gather_object(ranks, errors)
        return [max(parts, key=lambda error: error.of_the_bar) for parts in zip(*ranks, strict=True)]

    return judge


def summed(results: list[Tensor], p: RankProblem) -> list[Tensor]:
    """Replace the weights' gradients by their sum over the ranks, in float64, of this rank's experts."""
    kept = [i for i, e in enumerate(checked_experts(p.shape)) if e in p.mine]
    for part in (DGATE_UP, DDOWN):
        total = results[part].double()
        dist.all_reduce(total, group=p.mesh.get_group())
        results[part] = total[kept]
    return results


def contenders(p: RankProblem, guests: Iterable[int | str] = (0,)) -> Iterator[Contender]:
    """Ours, then plain torch and peers; all ranks leave out those that cannot be made on one of them.

    Through symmetric memory, ours runs with each number of `guests`.
    An error on one rank while a contender runs ends all: going on would leave the others waiting.
    """
    yield ours(p, "moe_aiter, collective", ExpertParallel(transport="collective"))
    yield ours(p, "moe_aiter, collective, keep_x", ExpertParallel(keep_x=True))
    reasons = [""] * dist.get_world_size()  # groups that share experts may differ
    dist.all_gather_object(reasons, why_not_symmetric(p.mesh.get_group(), p.x.device))
    if any(reasons):
        skip(SYMMETRIC, RuntimeError(max(reasons)))
    else:
        for number in guests:
            name = f"{SYMMETRIC}, guests {number}" if number else SYMMETRIC
            yield ours(p, name, ExpertParallel(transport="symmetric", guests=number))
    yield ours(p, ONE_GPU, None)
    yield torch_all_to_all(p)
    peers = {TORCHTITAN: torchtitan, HUGGING_FACE: hugging_face}
    yield from built((name, functools.partial(build, p)) for name, build in peers.items())


def ours(p: RankProblem, name: str, style: ExpertParallel | None) -> Contender:
    from torch.distributed.tensor.parallel import parallelize_module

    _, hidden, width, num_experts, _ = p.shape.sizes
    experts = Experts(num_experts, hidden, width, device="meta", dtype=p.x.dtype)
    experts.gate_up, experts.down = parameter(p.gate_up), parameter(p.down)
    if style is not None:
        parallelize_module(experts, p.mesh, style, src_data_rank=None)

    def run() -> Tensor:
        return experts(p.x, p.routing_weights, make_plan(p.expert_ids, num_experts))

    leaves, sent, pool = (p.x, experts.gate_up, experts.down, p.routing_weights), 0, 0
    if style is not None:
        sent = bytes_sent(p, style.options["keep_x"])
        if style.options["transport"] == "symmetric":
            lent, guests = bytes_lent(p, experts)
            sent += lent
            pool = sum(region_sizes(p.mesh.size(), p.x, p.routing_weights, num_experts, guests))
    cells = cells_of(sent, pool)
    return Contender(name, run, leaves, ours=True, as_ours=local_parts, cells=cells)


def cells_of(sent: float, pool: int = 0) -> dict[str, float]:
    """Return the columns for bytes: what a rank sends in a step, and buffers that torch's allocator does not
    count."""
    return {"sent_mb": sent / 1e6, "pool_mib": pool / 2**20}


def local_parts(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(map(local_part, gradients))


def bytes_sent(p: RankProblem, keep_x: bool) -> int:
    """Return the bytes that a rank sends in a step: for each token of each other rank, or of its own to it.

    X, output, dO and dX travel, X twice unless it is kept; ids and weights of 4 bytes, and their gradients.
    """
    tokens, hidden, _, _, top_k = p.shape.sizes
    rows, routing = (4, 4 * top_k) if keep_x else (5, 3 * top_k)
    return (p.mesh.size() - 1) * tokens * (rows * hidden * p.x.element_size() + 4 * routing)


def bytes_lent(p: RankProblem, experts: Experts) -> tuple[float, tuple[int, int]]:
    """Return the most bytes that a rank sends in a step for loans, with the inputs at hand, and those of
    guests' weights and gradients in the pool.

    The home of an expert sends its weights twice, the borrower their gradients once.
    """
    dispatcher, weights = experts.dispatcher, experts.local_weights()
    lending = dispatcher.lending(p.routing_weights, weights)
    if lending is None:
        return 0, (0, 0)
    own = torch.bincount(p.expert_ids.flatten(), minlength=p.shape.num_experts)[None]
    sizes = own.repeat(p.mesh.size(), 1)
    all_gather(sizes, own, group=p.mesh.get_group())
    _, guests_of = lend_rows(sizes, p.each, *lending)
    there, rank = guests_of >= 0, p.mesh.get_local_rank()
    lent = there & (guests_of.div(p.each, rounding_mode="floor") == rank)
    of_weights, of_gradients = guest_bytes(weights, 1)
    sent = 2 * int(lent.sum()) * of_weights + int(there[rank].sum()) * of_gradients
    return most([sent], p.x.device)[0], guest_bytes(weights, lending.guests)


def torch_all_to_all(p: RankProblem) -> Contender:
    """The usual code in plain torch: sorted rows, split sizes read on the host, grouped products."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd  # that of torchtitan

    ranks, each, top_k, group = p.mesh.size(), p.each, p.shape.top_k, p.mesh.get_group()
    gate_up, down = (parameter(w[p.mine.start : p.mine.stop]) for w in (p.gate_up, p.down))

    def run() -> Tensor:
        flat = p.expert_ids.flatten()
        order = flat.argsort(stable=True)
        sent = torch.zeros(ranks * each, dtype=torch.int64, device=flat.device)
        sent.scatter_add_(0, flat, torch.ones_like(flat))
        received = torch.empty_like(sent)  # the rows of each rank for each expert here
        dist.all_to_all_single(received, sent, group=group)
        out_sizes, in_sizes = torch.stack([sent, received]).view(2, ranks, each).sum(2).tolist()
        rows = sum(in_sizes)
        x = all_to_all_single_autograd(p.x[order // top_k], in_sizes, out_sizes, group)
        experts = torch.arange(each, device=flat.device).repeat(ranks)
        by_expert = experts.repeat_interleave(received, output_size=rows).argsort(stable=True)
        x = x.index_select(0, by_expert)
        if not rows:
            x = F.pad(x, (0, 0, 0, 1))  # a row of no group, for products that do not take zero rows
        ends = received.view(ranks, each).sum(0).cumsum(0).int()
        a = activation(F.grouped_mm(x, gate_up.mT, offs=ends), p.shape)
        y = F.grouped_mm(a, down.mT, offs=ends)[:rows].index_select(0, by_expert.argsort())
        y = all_to_all_single_autograd(y, out_sizes, in_sizes, group)
        weighted = y * p.routing_weights.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(p.x).index_add(0, order // top_k, weighted)

    cells = cells_of(all_to_all_bytes(p))
    leaves = (p.x, gate_up, down, p.routing_weights)
    return Contender("torch all_to_all_single + grouped_mm", run, leaves, ours=True, cells=cells)


def torchtitan(p: RankProblem) -> Contender:
    """The routed experts of torchtitan's MoE, called as there, with `spmd_backend="partial_dtensor"`.

    The all-to-all of its default "spmd_types" copies the received rows once more, and gloo refuses it.
    """
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    tokens, hidden, width, num_experts, top_k = p.shape.sizes
    if p.x.dtype != torch.bfloat16:
        raise ValueError("its products are in bfloat16")
    if not hasattr(torch.compiler, "_is_non_strict_tracing"):  # which its dispatcher calls
        raise ImportError("torchtitan 0.3 needs torch 2.12 or newer")
    config = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(dim=hidden, hidden_dim=width, num_experts=num_experts),
        token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=num_experts, top_k=top_k),
    )
    with torch.device("meta"):
        routed = config.build()
    set_spmd_backend("partial_dtensor")
    routed.token_dispatcher.wire_meshes(ep_mesh=p.mesh)
    mine, experts = slice(p.mine.start, p.mine.stop), routed.inner_experts
    gate, up = (w.contiguous() for w in p.gate_up.detach()[mine].chunk(2, 1))
    experts.w1_EFD, experts.w3_EFD, experts.w2_EDF = map(parameter, (gate, up, p.down[mine]))

    def run() -> Tensor:
        chosen = torch.zeros(tokens, num_experts, dtype=torch.bool, device=p.x.device)
        counts = chosen.scatter_(1, p.expert_ids, True).sum(0)
        return routed(p.x[None], p.routing_weights[None], p.expert_ids[None], counts)[0]

    def as_ours(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        dx, dgate, dup, *rest = gradients
        return dx, torch.cat([dgate, dup], 1), *rest

    leaves = (p.x, experts.w1_EFD, experts.w3_EFD, experts.w2_EDF, p.routing_weights)
    cells = cells_of(all_to_all_bytes(p))
    return Contender(TORCHTITAN, run, leaves, ours=True, as_ours=as_ours, cells=cells)


def hugging_face(p: RankProblem) -> Contender:
    """The experts of Qwen3-MoE under the plan that a model with `DistributedConfig(ep_size=...)` applies."""
    block = qwen3_moe(p, "grouped_mm")
    if parallel_interface() is None:
        raise ImportError("ranks with tokens of their own need transformers 5.23 or newer")
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    experts = block.experts
    plan = experts.config.base_model_ep_plan
    plan = {name.removeprefix("layers.*.mlp."): style for name, style in plan.items()}
    alone = init_device_mesh(p.x.device.type, (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))["tp"]
    apply_expert_parallelism(block, p.mesh, alone, plan, "all_to_all")

    def run() -> Tensor:  # its router returns weights in the dtype of x
        return experts(p.x, p.expert_ids, p.routing_weights.to(p.x.dtype))

    leaves, cells = (p.x, *experts.parameters(), p.routing_weights), cells_of(all_to_all_bytes(p))
    return Contender(HUGGING_FACE, run, leaves, ours=True, as_ours=local_parts, cells=cells)


def all_to_all_bytes(p: RankProblem) -> float:
    """Return the most bytes that a rank sends in a step of an all-to-all contender, with the inputs at hand.

    X and dO of each choice go to another rank, the output and dX of each choice of other ranks go back.
    """
    own, group = p.mesh.get_local_rank(), p.mesh.get_group()
    sent = torch.bincount(p.expert_ids.flatten() // p.each, minlength=p.mesh.size())
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    rows = 2 * sum(int(t.sum() - t[own]) for t in (sent, received))
    size = rows * p.shape.hidden * p.x.element_size() + 8 * p.each * (p.mesh.size() - 1)
    return most([size], p.x.device)[0]
