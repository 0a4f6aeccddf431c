"""Whole numbers that are decided once, by an op of their own where a graph is compiled; see replay.py."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..op import define_op
from ..replay import always_save, current_pass


# reference
def decide_reference(made: Tensor, what: str, below: int) -> Tensor:
    here = current_pass()
    decision = here.recall(what, *made.shape)
    decision = made if decision is None else decision
    here.keep(what, decision, below)
    return decision


# op
def new_decision(made: Tensor, what: str, below: int) -> Tensor:
    if made.dtype != torch.int64:
        raise TypeError(f"a decision must be int64, not {made.dtype}")
    return torch.empty_like(made)


decide_op = define_op(
    "decide(Tensor made, str what, int below) -> Tensor", new=new_decision, reference=decide_reference
)
always_save("moe_aiter::decide")


# public
def decide(what: str, make: Callable[[], Tensor], rows: int, below: int = 2**63 - 1) -> Tensor:
    """`make()` (rows, ...) int64, or what it gave when activation checkpointing ran this forward pass first.

    `what` tells decisions of one kind from those of another; each is below `below`, which saves memory.
    """
    if torch.compiler.is_compiling():
        return decide_op(make(), what, below)
    here = current_pass()
    decision = here.recall(what, rows)
    decision = make() if decision is None else decision.long()
    here.keep(what, decision, below)
    return decision
