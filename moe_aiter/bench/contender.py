"""One of those who are measured."""

import contextlib
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from ..op import use
from .problem import Problem


def identity(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return gradients


@dataclasses.dataclass
class Contender:
    """A function without arguments from the current inputs of a problem to (T, H)."""

    name: str
    run: Callable[[], Tensor | tuple[Tensor, ...]]  # one tensor, if it is checked
    leaves: tuple[Tensor, ...]  # x, gate_up, down, the router or the routing weights, and biases
    routed: bool = False  # it chooses the experts itself
    expert_ids: Callable[[], Tensor] | None = None  # what it chooses, if not what problem.expert_ids says
    checked: bool = True  # False for a yardstick that computes something else
    ours: bool = False
    graphed: bool = False  # it runs from a CUDA graph, which keeps memory of its own
    backend: str | None = None  # forced, forward and backward
    around: Callable[[], contextlib.AbstractContextManager] | None = None  # what is entered before, untimed
    dout: tuple[Tensor, ...] | None = None  # if not problem.dout
    as_ours: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = identity  # its gradients -> as in leaves
    errors: tuple[type[Exception], ...] = ()  # that it raises, beside PEER_ERRORS

    def gradients(self, out: Tensor | tuple[Tensor, ...], p: Problem) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.leaves, p.dout if self.dout is None else self.dout)

    def context(self) -> contextlib.AbstractContextManager:
        if self.around is not None:
            return self.around()
        return use(self.backend) if self.backend else contextlib.nullcontext()


PEER_ERRORS = (
    *(RuntimeError, ImportError, AttributeError, TypeError, ValueError),
    *(AssertionError, ArithmeticError, LookupError),
)


def parameter(x: Tensor) -> torch.nn.Parameter:
    """The same memory as a module's parameter."""
    return torch.nn.Parameter(x.detach())
