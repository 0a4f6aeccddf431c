"""A weight in the order of `shuffle_weight`, which knows that it is."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..kernels.base.check import check_layout, checked, renamed
from ..kernels.base.shuffle import LAYOUT, check_shuffle, shuffle_weight, unshuffle_weight


class ShuffledWeight(nn.Module):
    """`weight` (..., N, K) as `shuffle_weight` orders it, in the buffer `shuffled`; it is not trained.

    A tensor's attribute `is_shuffled` is lost by most operations; a module's type is not.  Copies, moves and
    state dicts keep the order, and a cast to elements of another size shuffles again, as it must.  `deepgemm`
    takes it for its `WQ`.

    Raises what `shuffle_weight` does, and ValueError for a state dict with another order.
    """

    is_shuffled = True

    @checked
    @renamed(x="weight")
    def __init__(self, weight: Tensor, layout: tuple[int, int] = LAYOUT, use_int4: bool = False):
        super().__init__()
        check_layout(layout)
        self.layout, self.use_int4 = tuple(layout), bool(use_int4)
        self.register_buffer("shuffled", shuffle_weight(weight.detach(), self.layout, self.use_int4))

    def unshuffled(self) -> Tensor:
        """A copy in the usual order."""
        return unshuffle_weight(self.shuffled, self.layout, self.use_int4)

    def order(self) -> tuple[int, ...]:
        """Rows and columns of a block, and elements of a vector: all that the order depends on."""
        return check_shuffle(self.shuffled, self.layout, self.use_int4)

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.order())

    def set_extra_state(self, state: Tensor) -> None:
        if tuple(state.tolist()) != self.order():
            raise ValueError(
                f"the state is shuffled by {tuple(state.tolist())} but this weight by {self.order()}"
            )

    def extra_repr(self) -> str:
        return f"{tuple(self.shuffled.shape)}, {self.shuffled.dtype}, layout={self.layout}"

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        before = self.shuffled
        super()._apply(fn, recurse)
        if self.shuffled.itemsize != before.itemsize:
            self.shuffled = before  # what stays where the cast has no such order
            self.shuffled = shuffle_weight(fn(self.unshuffled()), self.layout, self.use_int4)
        return self
