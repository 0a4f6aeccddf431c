"""A decision is taken once: where activation checkpointing runs a forward pass again, the first one holds.

Which experts a token goes to can turn on the last bit of a logit, and a repetition need not have the bits of
the first run: autocast, an attention that sums in any order, noise.  Its gradient would then be that of
another function than the one whose loss was computed, or the shapes would not fit.

So each checkpointed region of a forward pass keeps the decisions taken in it, in their order, and its
repetition is given them.  What stands for a region is an object that torch itself keeps from the first run to
the repetition, and for each call anew: micro-batches in flight, in any order, cannot be mixed up, and the
decisions are freed with the graph.  torch says nothing of it in public, so `private_api` looks:

  use_reentrant=True   the `ctx` of CheckpointFunction, in the frames of its `forward` and `backward` that are
                       on Python's stack; Megatron's and DeepSpeed's have the same name and form
  use_reentrant=False  the `_CheckpointFrame`, which the hooks for saved tensors hold

The first use of a region raises RuntimeError if torch's own checkpoints are not recognised as described here.
Where a repetition asks for more than the first run decided, a decision is taken anew.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils import checkpoint

from .private_api import (
    CachingMode,
    allows_forward_gradients,
    check_checkpoints,
    checkpoint_regions,
    graph_task,
    top_hooks,
)

STORED = f"_{__package__}_decisions"  # the attribute of a region, for each copy of the package


class Decisions:
    """The decisions of one checkpointed region: for each subject, in the order in which they were made."""

    def __init__(self):
        self.taken: dict[str, list[Tensor]] = defaultdict(list)
        self.repetition = None
        self.asked: dict[str, int] = {}

    def next(self, what: str, repetition: Any) -> Tensor | None:
        if repetition != self.repetition:  # the backward pass of a graph that was kept repeats once more
            self.repetition, self.asked = repetition, defaultdict(int)
        place = self.asked[what]
        self.asked[what] += 1
        taken = self.taken[what]
        return taken[place] if place < len(taken) else None


class Pass:
    """The regions that a forward pass is in: those which run first, and the one that is repeated."""

    def __init__(self, first: list, repeated: Any = None, repetition: Any = None):
        self.first, self.repeated, self.repetition = first, repeated, repetition

    def recall(self, what: str, *shape: int) -> Tensor | None:
        """Return the decision about `what`, if its shape starts with `shape`; its dtype may be small."""
        decisions = getattr(self.repeated, STORED, None)
        decision = None if decisions is None else decisions.next(what, self.repetition)
        return decision if decision is not None and decision.shape[: len(shape)] == shape else None

    def keep(self, what: str, decision: Tensor, below: int) -> None:
        """Integers `below` a bound, negative ones of any size, for the repetitions of this pass."""
        if not self.first:
            return
        if below < 2**15:  # which itself stands for all numbers that are no less
            decision = decision.clamp(-1, below).to(torch.int16)
        for region in self.first:
            if not hasattr(region, STORED):
                setattr(region, STORED, Decisions())
            getattr(region, STORED).taken[what].append(decision)


ALONE = Pass([])


def current_pass() -> Pass:
    """Return the current forward pass; without checkpointing, this takes three calls of torch's functions."""
    if torch.compiler.is_compiling():
        return ALONE  # its ops ask as they run
    task = graph_task()
    # of all that runs without gradients only an autograd.Function disables both modes
    within = not allows_forward_gradients() and not torch.is_inference_mode_enabled()
    hooked = top_hooks(True) is not None
    if task == -1 and not within and not hooked:
        return ALONE
    check_checkpoints()
    return Pass(*checkpoint_regions(task, within, hooked))


def always_save(op: str) -> None:
    """Have activation checkpointing save what an op gives, whatever its policy.

    For compiled graphs, whose forward and backward pass are two functions that know nothing of each other.
    """

    def rule(mode, func, types, args=(), kwargs=None):
        policy, mode.policy_fn = mode.policy_fn, lambda *_, **__: checkpoint.CheckpointPolicy.MUST_SAVE
        try:
            return mode.__torch_dispatch__(func, types, args, kwargs or {})
        finally:
            mode.policy_fn = policy

    def tag(mode, func, types, args=(), kwargs=None):
        meta, before = traceback.current_meta, traceback.current_meta.get("recompute")
        if before is not None:  # within a region that torch 2.11 tags node by node
            meta["recompute"] = checkpoint.CheckpointPolicy.MUST_SAVE
        try:
            return mode.__torch_dispatch__(func, types, args, kwargs or {})
        finally:
            if before is not None:
                meta["recompute"] = before

    torch.library.register_torch_dispatch(op, CachingMode, rule)
    torch.library.register_torch_dispatch(op, ProxyTorchDispatchMode, tag)
