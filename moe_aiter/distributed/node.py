"""Dispatch, experts and combine as one autograd node, which keeps no tokens of other ranks: `experts.py`."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from ..kernels.base.lent import guest_gradients
from ..kernels.base.sources import by_source, travelling
from ..kernels.experts.fp8 import QuantizedTokens, quantized_dout
from ..kernels.experts.options import ExpertOptions, ExpertWeights
from ..kernels.quantize.four_bit import FourBit
from ..op import saved_tensors
from ..private_api import is_alias, keeps_graph, version_of
from ..routing.plan import RoutePlan
from .guests import Guests, Lending, strides_of, with_strides
from .overflow import add_dx, add_gradients, cast_weights, options_of, targets
from .transport import DOUT, Pass, Sources, Transport, X
from .wire import Slots, parts_of, receive, send

if TYPE_CHECKING:
    from .experts import ExpertDispatcher, LocalExperts

NO_PASSES = (
    "a kernel that was registered for a product of the experts does not take the rows of one rank after the "
    "other, as shared experts need: pass transport='collective'"
)


def in_passes(spans: Tensor | None, *given: Any) -> contextlib.AbstractContextManager[None]:
    """Let products inside the block take the rows of one rank after the other, if there are spans.

    The other arguments are those of `Sources`.
    """
    return contextlib.nullcontext() if spans is None else by_source.set(Sources(spans, *given))


class Saved:
    """The tensors that operations inside of `Dispatched` save for backward.

    torch saves these tensors as those of the one node that `Dispatched` is, so that activation checkpointing
    and offloading treat them as usual.  A number stands for one of them.  A view stands for a part of what
    has arrived, the weights of guests and the slots: in backward, `lent` and `again` return these as they
    arrive again, and this object is what `travelling` of kernels/base/sources.py holds.
    """

    again: Callable[[], Sequence[Tensor]]
    lent: Callable[[], Sequence[Tensor]]

    def __init__(self, borrowed: Sequence[Tensor], slots: Slots):
        self.arrived, self.uses_slots, self.waits = (*borrowed, *parts_of(slots)), False, True
        self.borrowed, self.tensors = len(borrowed), list[Tensor]()
        self.strides: list[Sequence[int]] = []
        x = self.arrived[self.borrowed]
        self.stand_in = torch.empty(x.shape, dtype=x.dtype, device="meta")

    def pack(self, t: Tensor) -> "int | View":
        for i, whole in enumerate(self.arrived):
            if is_alias(t, whole):
                if t.dtype == whole.dtype:
                    self.uses_slots |= i >= self.borrowed
                    part = t.shape, t.stride(), t.storage_offset() - whole.storage_offset()
                    return View(i, None if part == (whole.shape, whole.stride(), 0) else part)
                t = t.clone()  # memory of what has arrived is used again
        self.tensors.append(t)
        self.strides.append(strides_of(t))
        return len(self.tensors) - 1

    def unpack(self, what: "int | View") -> Tensor:
        if isinstance(what, int):
            return with_strides(self.tensors[what], self.strides[what])  # own weights lie as guests do
        if what == View(self.borrowed, None) and not self.waits:
            return self.stand_in
        whole = self.part(what.of)
        if what.part is None:  # which in 8 bits has come without its numbers, and comes with them
            return whole
        shape, stride, offset = what.part
        return whole.as_strided(shape, stride, whole.storage_offset() + offset)

    def receive(self) -> Tensor:
        """Return the slots, once they have arrived."""
        return self.again()[0]

    def part(self, i: int) -> Tensor:
        """Return what has arrived, by its number: guests' weights are here before the tokens."""
        return self.lent()[i] if i < self.borrowed else self.again()[i - self.borrowed]


class View(NamedTuple):
    """A part of a tensor that has arrived: its shape, its strides and its offset; None: all of it."""

    of: int
    part: tuple[Sequence[int], Sequence[int], int | torch.SymInt] | None


def leaf(t: Tensor | FourBit | None, needs_grad: bool) -> Tensor | FourBit | None:
    """Return the same numbers outside of any graph."""
    return t.detach().requires_grad_(needs_grad) if isinstance(t, Tensor) else t


def edge_of(t: Tensor | FourBit | None) -> GradientEdge | None:
    """Return where the gradient of `t` arrives, or None if it has none."""
    return get_gradient_edge(t) if isinstance(t, Tensor) and t.requires_grad else None


class Anchor(torch.autograd.Function):
    """Give slots a place in the graph that does not hold their memory."""

    apply: ClassVar[Callable[[Tensor, Tensor], Tensor]]

    @staticmethod
    def forward(ctx: Any, nothing: Tensor, slots: Tensor) -> Tensor:
        return slots.view_as(slots)

    @staticmethod
    def backward(ctx: Any, dslots: Tensor) -> tuple[None, None]:
        return None, None


class Dispatched(torch.autograd.Function):
    """Dispatch, experts and combine as one node that keeps no slots: backward sends the tokens again.

    The node holds the graph of the experts, which autograd records as usual.
    """

    apply: ClassVar[Callable[..., Tensor]]

    @staticmethod
    def forward(
        ctx: Any, dispatcher: "ExpertDispatcher", transport: Transport, experts: "LocalExperts",
        plan: RoutePlan, lending: Lending | None, x: Tensor, s: Tensor, *weights: Tensor | FourBit | None,
    ) -> Tensor:  # fmt: skip
        needs_x, needs_s, *needs = ctx.needs_input_grad[5:]
        transport.begin()

        def record(
            slots: Slots, slots_s: Tensor, plans: Sequence[RoutePlan], guests: Guests | None, at_once: bool
        ) -> Tensor:
            borrowed = [] if guests is None else guests.tensors()
            saved = ctx.saved = Saved(borrowed, slots)
            ctx.windows = len(plans)
            with torch.enable_grad(), saved_tensors_hooks(saved.pack, saved.unpack):
                anchored, *codes = parts_of(slots)
                if needs_x:
                    anchored = Anchor.apply(anchored.new_empty(0, requires_grad=True), anchored)
                slots = QuantizedTokens(anchored, *codes) if codes else anchored
                slots_s = slots_s.detach().requires_grad_(needs_s)
                leaves = [leaf(t, need) for t, need in zip(weights, needs, strict=True)]
                lent = () if guests is None else guests.build(borrowed)
                # products add the gradients of gate_up and down: a leaf would keep their numbers for nothing
                of_lent = (False, False, *needs[2:]) if at_once else needs
                guest_leaves = [leaf(t, need) for t, need in zip(lent, of_lent, strict=False)]
                out = dispatcher.passes(experts, slots, slots_s, plans, leaves, guest_leaves, at_once)
                ctx.edges = [edge_of(t) for t in (anchored, slots_s, *leaves, *guest_leaves)]
                ctx.edge = get_gradient_edge(out)
            return out.detach()

        ran = dispatcher.run(transport, experts, x, s, plan, weights, lending, record)
        sums, slots_s, others, spans, guests, ctx.at_once, ctx.wire = ran
        ctx.dispatcher, ctx.experts, ctx.transport, saved = dispatcher, experts, transport, ctx.saved
        # DTensors hide from autograd that a weight has changed
        ctx.parameters = tuple(getattr(experts, "parameters", tuple)())
        ctx.versions = tuple(map(version_of, ctx.parameters))
        ctx.needs, ctx.num_others = needs, len(others)
        rest = (slots_s, *weights, *itertools.chain(*others)) if others else ()
        own = () if guests is None else (guests.guests_of, *guests.own)
        ctx.build, ctx.num_own = None if guests is None else guests.build, len(own)
        ctx.strides = [] if guests is None else list(map(strides_of, guests.own))
        # tokens travel again on all ranks or on none, also where only one of them has further windows
        several = bool(others) or ctx.windows > 1 or guests is not None
        kept = x if saved.uses_slots or several else None
        ctx.save_for_backward(kept, spans, *own, *rest, *saved.tensors)
        saved.arrived = ()
        saved.tensors = []  # what torch saves may be other tensors by then
        return sums.receive()[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        if tuple(map(version_of, ctx.parameters)) != ctx.versions:
            raise RuntimeError(
                "a weight of shared experts was changed in place between the forward and the backward pass, "
                "by an optimizer step say, and backward needs the weight as it was"
            )
        return (*[None] * 5, *Backward(ctx).gradients(dout))


class Backward:
    """The backward pass of one `Dispatched`."""

    def __init__(self, ctx: Any):
        self.experts, self.transport, self.needs, self.wire = ctx.experts, ctx.transport, ctx.needs, ctx.wire
        self.saved, self.edge, self.edges, self.at_once = ctx.saved, ctx.edge, ctx.edges, ctx.at_once
        self.x, self.spans, *tensors = saved_tensors(ctx)
        own, tensors = tensors[: ctx.num_own], tensors[ctx.num_own :]
        self.guests = None
        if own:
            guests_of, *parts = own
            where = self.transport, ctx.dispatcher.first, ctx.dispatcher.each
            parts = list(map(with_strides, parts, ctx.strides))
            self.guests = Guests(*where, guests_of, parts, ctx.build)
            self.guests.dtype = self.x.dtype if self.at_once else None
        self.others: list[RoutePlan] = []
        if ctx.num_others:
            self.slots_s, *self.weights = (tensors.pop(0) for _ in range(5))
            self.others = [RoutePlan(*(tensors.pop(0) for _ in range(3))) for _ in range(ctx.num_others)]
            if self.guests is not None:
                self.weights = list(self.guests.build(self.guests.own))
        self.saved.tensors = tensors
        self.dlent: list[Tensor | None] = []  # gradients of guests' weights

    def gradients(self, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, the routing weights and the weights."""
        transport, x, spans, edges = self.transport, self.x, self.spans, self.edges
        transport.begin()
        arriving, again, sums = transport.dispatch(DOUT), transport.dispatch(X), transport.combine()
        send(arriving, dout, self.wire.dout)
        if x is not None:
            send(again, x, self.wire.again)
        if self.guests is not None:
            self.guests.lend()
            self.dlent = self.guests.gradients(self.needs) if self.at_once else []
        transport.fetch(arriving, again)
        self.arriving, self.again = arriving, again
        self.saved.again = self.arrived
        self.saved.lent = list if self.guests is None else functools.cache(self.guests.tensors)
        known = [edge for edge in edges if edge is not None]
        how = {"retain_graph": keeps_graph(), "allow_unused": True}
        found = receive(arriving, self.wire.dout, dout) if spans is None else arriving.arrived[0]
        dout, dout8 = (found, None) if isinstance(found, Tensor) else (found.x, found)
        products = in_passes(
            spans, arriving, again, sums, self.add_dx_of_windows if self.others else None
        )  # fmt: skip
        try:
            with products, self.adding(), travelling.set(self.saved), quantized_dout.set(dout8):
                computed = iter(torch.autograd.grad(self.edge, known, dout, **how))
        finally:
            del self.saved.again, self.saved.lent
            self.saved.tensors = []
        leaves = bool(self.others) and edges[0] is not None
        if spans is not None and not (arriving.results and (sums.sent or not leaves)):
            raise RuntimeError(NO_PASSES)
        arriving.receive()  # on all ranks, also where nothing has read what arrives
        if x is not None:
            again.receive()
        dx, ds, *dweights = (None if edge is None else next(computed) for edge in edges)
        dweights, dguests = dweights[: len(self.needs)], dweights[len(self.needs) :]
        left = bool(sums.sent)
        self.add_late(None if left else dx, ds, dweights, dguests)
        # what a collective has received is free before the sums arrive
        arriving = again = dout = dout8 = found = None  # type: ignore[assignment]
        self.arriving = self.again = None
        for d in (None if left else dx, ds):
            if d is not None:
                sums.send(d)
        arrived = iter(sums.receive() if sums.sent else ())
        dx, ds = (None if d is None else next(arrived) for d in (dx, ds))
        if self.guests is not None and any(self.needs):
            if dx is None and ds is None:
                transport.begin()  # no sum has brought a barrier
            self.guests.add_to(targets(self.experts, dweights), self.dlent)
        return dx, ds, *dweights

    def arrived(self) -> Sequence[Tensor]:
        """Return the slots of which `Saved` has views."""
        assert self.x is not None
        return parts_of(receive(self.again, self.wire.again, self.x))

    def adding(self) -> contextlib.AbstractContextManager[None]:
        """Let products inside the block add the gradients of guests' weights to those that travel home."""
        if self.guests is None or not self.at_once:
            return contextlib.nullcontext()
        return guest_gradients.set((self.dlent[0], self.dlent[1]))

    def options(self) -> ExpertOptions:
        options = options_of(self.experts)
        assert options is not None  # as `can_add` has said
        return options

    def cast_weights(self, dtype: torch.dtype) -> ExpertWeights:
        """Return the weights of own experts and of guests."""
        return cast_weights(dtype, self.weights, () if self.guests is None else self.guests.weights())

    def add_dx_of_windows(self, dx: Tensor, passes: Sequence[Pass]) -> None:
        """Add the other windows' part to the gradient of some tokens, before that of own rows is added."""
        tensors = self.arriving.arrived[0], self.options(), self.again.arrived[0], self.slots_s
        add_dx(dx, *tensors, self.others, self.cast_weights(dx.dtype), passes)

    def add_late(
        self, dx: Tensor | None, ds: Tensor | None, dweights: Sequence[Tensor | None],
        dguests: Sequence[Tensor | None],
    ) -> None:  # fmt: skip
        """Add the gradients of guests' weights that autograd computed, and the other windows'."""
        if self.guests is not None and not self.at_once:
            self.dlent = self.guests.gradients(self.needs)
        for to, d in zip(self.dlent, dguests, strict=False):
            if to is not None and d is not None:
                to.copy_(d)
        if self.others:
            gradients = [dx, ds, *targets(self.experts, dweights)]
            (x,), (dout,) = self.again.receive(), self.arriving.receive()
            weights = self.cast_weights(x.dtype)
            with self.adding():
                add_gradients(
                    gradients, dout, self.options(), x, self.slots_s, self.others, weights, self.dlent
                )
