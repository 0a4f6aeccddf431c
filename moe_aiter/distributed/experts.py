"""Expert parallelism: each rank of a group holds some of the experts and computes them for the tokens of all.

    dispatch   every rank gets the tokens, ids and routing weights of all ranks
    experts    each rank computes the rows of its own experts, as it would for a batch of its own
    combine    each rank adds up, in the order of the ranks, what they computed for its tokens

`transport.py` says how the ranks send.  Rows are computed in windows of a fixed size, of which the first
usually holds all.  Rows past the first window take further passes: more time, the same result, no more
memory.

All of this is one autograd node, `Dispatched` of `node.py`.  Its forward pass records the experts' own graph,
and takes what they save for itself, so that checkpointing sees one node's tensors; the tokens of other ranks
are left out.  Its backward pass receives these tokens again, and runs the recorded graph.  `keep_x` and
torch.compile use plain operations instead, which keep the tokens.

Through symmetric memory, transfers run beside products (`Sources`).  While tokens or their gradients arrive,
the rows of own tokens are computed, and then those of one rank after the other.  In forward, the sums of a
rank's tokens follow at once, and leave while the next tokens arrive; those of own tokens come last.  In
backward, gradients of other ranks' tokens leave while those of own tokens and the gradient of gate_up are
computed.  Tokens that travel again are waited for by the products that read them, the last of backward.

With `guests`, ranks compute rows for each other: `guests.py`.
"""

import functools
import logging
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..config import interpret, settings
from ..invariance import batch_invariant
from ..kernels.base.check import (
    cast_as_linear,
    check_plan,
    check_positive,
    check_routing_weights,
    check_size,
    check_sizes,
    checked,
    wide,
)
from ..kernels.base.host import saturated
from ..kernels.quantize.four_bit import FourBit
from ..kernels.rows.lend import lend_rows
from ..kernels.rows.merge import merge_plans
from ..private_api import assert_async, process_group
from ..routing.plan import RoutePlan
from .by_choice import by_choice
from .collective import all_gather
from .guests import (
    AUTO,
    Guests,
    Lending,
    apart,
    auto_guests,
    guest_bytes,
    is_dense,
    lending_for,
    log_loans,
    split,
    way_of_lending,
)
from .node import NO_PASSES, Dispatched, in_passes
from .overflow import WHOLE, add_output, can_add, cast_weights, options_of
from .slots import pad, window_rows
from .transport import (
    ROUTING,
    TRANSPORTS,
    Collective,
    Pool,
    Transfer,
    Transport,
    X,
    pool_for,
    region_sizes,
    uses_symmetric,
)
from .wire import Slots, Wire, num_bytes, receive, send, wire_of

log = logging.getLogger("moe_aiter")

INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}  # of the same width


class LocalExperts(Protocol):
    """What a dispatcher asks of the experts of this rank."""

    def local_weights(self) -> tuple[Any, ...]:
        """Return the tensors, weights of 4 bits or None that `compute` takes as `weights`."""

    def compute(
        self, x: Any, routing_weights: Tensor, plan: RoutePlan, weights: Any, save_z: bool = True,
        lent: bool = False, guests: Any = (),
    ) -> Tensor:  # fmt: skip
        """Return the output (T, H) for `x` (T, H), as `Experts.compute`; what `wire_of` asks for as `x`.

        `guests` are given to experts whose `kernel_options` are not None, see `options_of`.
        """


class ExpertDispatcher:
    """Computes experts that the ranks of a process group share: `experts.dispatcher = ExpertDispatcher(...)`.

    `ExpertParallel` and `parallelize` make it, and shard the parameters.  Rank r of the group's R ranks holds
    the experts [r * c, (r + 1) * c) of E, c = ceil(E / R), the last rank those that are left.

    rows        rows of a window, as a multiple of the T * k rows that a rank has with a balanced load.  Any
                load is computed exactly; rows past the first window take further passes, which cost time.
    max_tokens  the most tokens that a rank may have in a call; fewer are padded, and more raise ValueError on
                that rank.  None: all ranks have the same number in each call.  The first call compares these
                numbers, with MOE_AITER_DEBUG=1 every call, and raises ValueError on all ranks.
    keep_x      True keeps the tokens of all ranks for backward, R * T rows a layer; False sends the
                tokens again.  Under torch.compile they are always kept.
    transport   "symmetric": GPUs of one host copy into each other's memory, by torch's symmetric memory.  All
                layers of a group share a buffer of some 3 * R * T rows on each GPU, and all calls must be on
                one stream.  "collective": an all-gather and an all-to-all, also between hosts and on CPUs.
                "auto": "symmetric" if the first call finds that it works on all ranks.  keep_x=True and
                torch.compile always use "collective"; keep_x=True with "symmetric" raises ValueError.
    guests      how many experts a rank can borrow from the others for a call, in which it computes some of
                their rows, so that no rank has many more rows than the others.  0: none.  "auto": as many as
                can save time with a call's number of tokens, and fit into a GiB.  The result is the same but
                for rounding.  Each slot takes the memory of an expert, and in training 4 bytes for each of
                its weights; all layers of a group share it.  torch.compile lends nothing; keep_x=True
                raises ValueError.

    All ranks must make the same calls in the same order, forward and backward, also with no tokens, and the
    same inputs and weights must require gradients: otherwise ranks wait for each other without end.  That
    holds for other numbers of tokens after the first call too, and for all calls under torch.compile; through
    symmetric memory, other numbers of tokens fail an assertion on the GPU.
    """

    @checked
    def __init__(
        self, group: dist.ProcessGroup, num_experts: int, *, rows: float = 2.0, max_tokens: int | None = None,
        keep_x: bool = False, transport: str = "auto", guests: int | str = 0,
    ):  # fmt: skip
        check_sizes(num_experts=num_experts)
        check_dispatch_options(rows, max_tokens, keep_x, transport, guests)
        # by name: the threads of a group end with the last object that holds the group itself
        self.group, self.ranks = group.group_name, group.size()
        self.num_experts, self.rows, self.max_tokens, self.keep_x = num_experts, rows, max_tokens, keep_x
        self.each = experts_of_a_rank(num_experts, self.ranks)
        self.first = group.rank() * self.each
        self.count = min(self.each, num_experts - self.first)
        self.guests = check_guests(guests, num_experts - self.each) if self.ranks > 1 else 0
        self.transport = "collective" if keep_x else transport
        self.collective = Collective(self.group, self.ranks)
        self.symmetric = self.called = self.told = False
        self.most_guests = 0

    def __repr__(self) -> str:
        last = self.first + self.count - 1
        held = f"experts {self.first} to {last} of {self.num_experts}, {self.ranks} ranks"
        return f"{held}, rows={self.rows}, guests={self.guests}"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: its first call checks again, perhaps in other processes."""
        return vars(self) | {"called": False}

    def __call__(self, experts: LocalExperts, x: Tensor, routing_weights: Tensor, plan: RoutePlan) -> Tensor:
        """Return the output (T, H) for this rank's tokens `x` (T, H), from the experts of all ranks.

        `routing_weights` (T, k) and `plan` are those of these tokens, with all E experts.
        """
        plan = self.checked_plan(x, routing_weights, plan)
        tokens, compiles = x.shape[0], torch.compiler.is_compiling()
        (x,) = cast_as_linear(x)  # fewer bytes travel
        s, weights = wide(routing_weights), experts.local_weights()
        if not (compiles or self.called):
            self.log_traffic(experts, x, weights, s.shape[1] if batch_invariant() else 1)
        self.check_ranks(x, weights, compiles)
        if self.max_tokens is not None:
            x, s = (pad(t, self.max_tokens) for t in (x, s))
        dispatch = functools.partial(self.dispatch, experts, weights)
        if batch_invariant() and self.ranks > 1:
            out = by_choice(dispatch, experts, x, s, plan)
        else:
            out = dispatch(x, s, plan)
        return out if out.shape[0] == tokens else out[:tokens].clone()  # no view, of which FSDP2 would warn

    def dispatch(
        self, experts: LocalExperts, weights: tuple[Any, ...], x: Tensor, s: Tensor, plan: RoutePlan
    ) -> Tensor:
        """Return the output for tokens of which all ranks have the same number."""
        compiles = torch.compiler.is_compiling()
        trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, s, *weights))
        plain = compiles or self.keep_x or (trains and not weights)
        lending = None if plain else self.lending(s, weights)
        transport = self.collective if plain else self.transport_for(x, s, weights, lending)
        if trains and not plain:
            return Dispatched.apply(self, transport, experts, plan, lending, x, s, *weights)
        transport.begin()
        (out,) = self.run(transport, experts, x, s, plan, weights, lending).sums.receive()
        return out

    def checked_plan(self, x: Tensor, routing_weights: Tensor, plan: RoutePlan) -> RoutePlan:
        """Return the plan; raise, before any rank waits for another, unless it fits these inputs."""
        check_plan(plan)
        plan = RoutePlan(*plan)
        check_routing_weights(routing_weights, plan.rank, x)
        check_size(
            "group_sizes is (E={},)", plan.group_sizes.shape[0], "{} experts are shared", self.num_experts
        )
        return plan

    def log_traffic(
        self, experts: LocalExperts, x: Tensor, weights: Sequence[Tensor | FourBit | None], times: int
    ) -> None:
        """Say once how much a training step sends, if each token travels so many `times`, beside what FSDP2
        would send for whole experts."""
        others, wire = self.ranks - 1, Wire() if self.keep_x else wire_of(experts)
        # x, dout, the sums for out and dx, and x again
        sent = [wire.x, wire.dout, None, None] + ([] if self.keep_x else [wire.again])
        rows = times * (x.shape[0] if self.max_tokens is None else self.max_tokens)
        tokens = others * sum(num_bytes(rows, x.shape[1], x.element_size(), how) for how in sent)
        # gathered twice, and gradients; FSDP2 sends no weights of 4 bits
        whole = 3 * others * sum(w.nbytes for w in weights if isinstance(w, Tensor))
        log.info(
            "expert parallelism over %d ranks: each sends %.1f MB a layer and training step; without it, "
            "FSDP2 would send %.1f MB for whole experts", self.ranks, tokens / 1e6, whole / 1e6,
        )  # fmt: skip

    def check_ranks(self, x: Tensor, weights: Sequence[Any], compiles: bool) -> None:
        """Raise ValueError unless the ranks' numbers of tokens fit, and all lend experts in the same way.

        In the first call and in debug mode, ranks compare them, and all of them raise.
        """
        most, counts, ways, way = self.max_tokens, [x.shape[0]], [0], ""
        if not compiles and (not self.called or settings.debug):
            way = way_of_lending(weights, self.guests)
            mine = torch.tensor([x.shape[0], zlib.crc32(way.encode())], device=x.device)
            found = mine.new_empty(self.ranks * 2)
            all_gather(found, mine, group=process_group(self.group))
            counts, ways = found.view(-1, 2).t().tolist()
        if most is not None and max(counts) > most:
            raise ValueError(f"the ranks have {counts} tokens, but max_tokens is {most}")
        if most is None and len(set(counts)) > 1:
            raise ValueError(
                f"the ranks of an expert-parallel group have {counts} tokens: pass the same number on each, "
                f"or set max_tokens={max(counts)}, so that shorter batches are padded"
            )
        if len(set(ways)) > 1:
            raise ValueError(f"ranks lend experts in the same way or not at all, but not all have {way}")
        if not (compiles or self.called):
            self.symmetric = uses_symmetric(self.transport, process_group(self.group), x.device)
        self.called = self.called or not compiles

    def lending(self, s: Tensor, weights: Sequence[Any]) -> Lending | None:
        """Return how much ranks may lend each other, or None for nothing."""
        if self.guests == 0 or not weights:
            return None
        guests = self.guests
        if isinstance(guests, str):  # "auto": the same on all ranks, as are sizes
            guests = auto_guests(weights, s.numel(), self.num_experts - self.each)
        if guests > self.most_guests:
            self.most_guests, size = guests, sum(guest_bytes(weights, guests)) / 1e6
            log.info("ranks borrow up to %d experts, for which each has %.1f MB", guests, size)
        return lending_for(weights, guests) if guests else None

    def transport_for(
        self, x: Tensor, s: Tensor, weights: Sequence[Any], lending: Lending | None
    ) -> Transport:
        if not self.symmetric:
            return self.collective
        guests = (0, 0) if lending is None else guest_bytes(weights, lending.guests)
        sizes = region_sizes(self.ranks, x, s, self.num_experts, guests)
        return pool_for(process_group(self.group), sizes, x.device)

    def arrive(
        self, transport: Transport, x: Tensor, s: Tensor, plan: RoutePlan, last_first: bool,
        lending: Lending | None, weights: Sequence[Any], wire: Wire,
    ) -> "Arrival":  # fmt: skip
        """Begin to send tokens to all slots, and weights to guest slots; plan the rows of this rank."""
        tokens, routed = transport.dispatch(X), transport.dispatch(ROUTING)
        top_k, kind = s.shape[1], INTEGERS[s.dtype]
        sizes = F.pad(saturated(plan.group_sizes), (0, 1), value=x.shape[0])[None]
        # rows travel with the weights, as numbers of the same bits
        rank = pad(saturated(plan.rank), s.shape[0], -1).to(kind)
        routing = torch.cat([rank.view(1, -1).view(s.dtype), s.reshape(1, -1)], 1)
        for t in sizes, routing:
            routed.send(t)
        send(tokens, x, wire.x)
        sizes, routing = routed.receive()
        shares = guests = None
        if lending is not None:
            every, guests_of = lend_rows(sizes[:, :-1], self.each, *lending)
            shares = every[self.first // self.each]
            if not self.told and log.isEnabledFor(logging.INFO):
                self.told = True
                log_loans(every, self.each)
            guests = Guests(transport, self.first, self.each, guests_of, *split(weights))
            guests.lend()
        transport.fetch(tokens)  # after the routing, which would wait behind the copies of tokens
        if transport is not self.collective:  # ranks may write to wrong slots, and nothing waits for ever
            same = (sizes[:, -1] == x.shape[0]).all()
            assert_async(same, "the ranks have different numbers of tokens: see max_tokens")
        rank, s = routing.chunk(2, 1)
        own = rank.detach().view(kind), sizes[:, :-1], top_k, self.first, self.count
        rows = self.window_rows(rank.numel())
        borrowed = 0 if lending is None else lending.guests
        order, *others, spans = merge_plans(*own, rows, last_first, shares, borrowed)
        plans = [RoutePlan(*parts) for parts in zip(order.split(rows), *others, strict=True)]
        # a copy: the weights may be saved, but a pool's memory is used again
        s = s.clone(memory_format=torch.contiguous_format).view(-1, top_k)
        return Arrival(tokens, s, plans, spans, guests)

    def window_rows(self, choices: int) -> int:
        """Return how many rows a window has, for so many choices of all ranks."""
        return window_rows(choices, int(min(self.rows / self.ranks, 1) * choices))

    def run(
        self, transport: Transport, experts: LocalExperts, x: Tensor, s: Tensor, plan: RoutePlan,
        weights: tuple[Any, ...], lending: Lending | None, compute: Callable[..., Tensor] | None = None,
    ) -> "Ran":  # fmt: skip
        """Compute all slots, and begin to send the sums home.

        `compute` is called in place of `passes`, with the tokens of all slots, their routing weights, the
        windows that `overflow.py` does not compute, the guests, and whether kernels take both tensors of
        weights at once.
        """
        recorded = torch.compiler.is_compiling() or (self.keep_x and torch.is_grad_enabled())
        adds, options = not recorded and can_add(experts, x), options_of(experts)
        adds = adds and (lending is None or all(map(is_dense, weights[:2])))  # guests lie as own experts do
        in_turn = adds and isinstance(transport, Pool) and has_passes(x, s.shape[1])
        wire = Wire() if recorded else wire_of(experts)
        arrival = self.arrive(transport, x, s, plan, in_turn, lending, weights, wire)
        arriving, s, plans, every_span, guests = arrival
        if guests is not None and adds:
            guests.dtype = x.dtype
        plans, others = (plans[:1], plans[1:]) if adds else (plans, [])
        others = others[::-1] if in_turn else others  # in the order in which they are computed
        spans = every_span[..., : len(plans[0].group_sizes)] if in_turn else None
        slots = receive(arriving, wire.x, x) if spans is None else arriving.arrived[0]
        sums = transport.combine()

        def add(out: Tensor, passes: Iterable[Any] = WHOLE) -> None:
            assert options is not None and isinstance(slots, Tensor)  # as `can_add` says
            lent = () if guests is None else guests.weights()
            add_output(out, options, slots, s, others, cast_weights(x.dtype, weights, lent), passes)

        with in_passes(spans, arriving, arriving, sums, add if others else None):
            if compute is None:
                lent = () if guests is None else guests.weights()
                out = self.passes(experts, slots, s, plans, weights, lent, adds)
            else:
                out = compute(slots, s, plans, guests, adds)
        if spans is not None and not (arriving.results and (sums.sent or not others)):
            raise RuntimeError(NO_PASSES)
        arriving.receive()  # on all ranks, also where nothing has read the tokens
        if not sums.sent:
            if others:
                add(out)
            sums.send(out)
        return Ran(sums, s, others, spans, guests, adds, wire)

    def passes(
        self, experts: LocalExperts, slots: Slots, s: Tensor, plans: Sequence[RoutePlan],
        weights: Sequence[Any], lent: Sequence[Any], at_once: bool,
    ) -> Tensor:  # fmt: skip
        """Return the sum over the windows, (R * T, H), with the guests' weights that other ranks have `lent`.

        What autograd records of any but the first window does not keep pre-activations.  `at_once`: kernels
        take both tensors of weights, and there is one window.
        """
        if lent and at_once:
            return experts.compute(slots, s, plans[0], tuple(weights), guests=tuple(lent))
        turns = [(plan, weights, False) for plan in plans]
        if lent:
            *own, of_guests = apart(plans, self.count, s.numel() // self.ranks)
            turns = [*((plan, weights, False) for plan in own), (of_guests, lent, True)]
        first, *others = turns
        out = experts.compute(slots, s, first[0], weights)
        for plan, w, borrowed in others:
            if has_rows(plan):
                out = wide(out) + wide(experts.compute(slots, s, plan, w, save_z=False, lent=borrowed))
        return out.to(slots.dtype)


class Arrival(NamedTuple):
    """What `ExpertDispatcher.arrive` returns."""

    tokens: Transfer  # of all slots, on their way
    s: Tensor  # (R * T, k): their routing weights
    plans: list[RoutePlan]  # the windows of own experts' rows
    spans: Tensor  # of `Sources`
    guests: Guests | None


class Ran(NamedTuple):
    """What `ExpertDispatcher.run` returns."""

    sums: Transfer  # the results for own tokens, on their way
    s: Tensor  # (R * T, k): the routing weights of all slots
    others: list[RoutePlan]  # the windows that `overflow.py` computes, in this order
    spans: Tensor | None  # of `Sources`, or None where products read all tokens at once
    guests: Guests | None
    at_once: bool  # whether kernels take own experts and guests at once, and `overflow.py` those windows
    wire: Wire


def experts_of_a_rank(num_experts: int, ranks: int) -> int:
    """Return how many experts each rank has, the last one perhaps fewer; ValueError if one has none."""
    each = -(-num_experts // ranks)
    if (ranks - 1) * each >= num_experts:
        raise ValueError(
            f"num_experts={num_experts} in {each} for each of {ranks} ranks leaves ranks without an expert: "
            f"use at most {-(-num_experts // each)} ranks"
        )
    return each


def check_dispatch_options(
    rows: float = 1.0, max_tokens: int | None = None, keep_x: bool = False, transport: str = "auto",
    guests: int | str = 0,
) -> None:  # fmt: skip
    """Raise TypeError or ValueError unless an `ExpertDispatcher` can have these options."""
    check_positive(rows=rows)
    check_guests(guests)
    if keep_x and guests:
        raise ValueError("keep_x=True keeps no weights of guests: leave out guests, or keep_x")
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, not {transport!r}")
    if keep_x and transport == "symmetric":
        raise ValueError("keep_x=True always uses collectives: transport cannot be 'symmetric'")
    if max_tokens is not None:
        check_sizes(max_tokens=max_tokens)


@checked
def check_guests(guests: int | str, most: float = math.inf) -> int | str:
    """Return `guests`; ValueError unless it is "auto" or at most as many experts as the other ranks have."""
    if guests == AUTO:
        return guests
    if isinstance(guests, str) or guests < 0:
        raise ValueError(f"guests must be at least 0, or {AUTO!r}, not {guests!r}")
    if guests > most:
        raise ValueError(f"guests={guests}, but the other ranks have only {most} experts to lend")
    return guests


def has_rows(plan: RoutePlan) -> bool:
    """Return False if a plan certainly has no rows, which only a CPU can tell without waiting."""
    sizes = plan.group_sizes
    return torch.compiler.is_compiling() or not sizes.is_cpu or bool(sizes.any())


def has_passes(x: Tensor, top_k: int) -> bool:
    """Whether products can take the rows of each rank's tokens (T, H) for themselves: kernels do, where the
    tensors of each rank begin at a multiple of 16 bytes."""
    tokens, choices = x.shape[0], x.shape[0] * top_k
    even = choices % 4 == 0 and tokens * x.shape[1] * x.element_size() % 16 == 0
    return (x.is_cuda or interpret) and tokens > 0 and even
