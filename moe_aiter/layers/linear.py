"""nn.Linear by `tuned_gemm`: for a whole program, without a change to a model; and shuffled weights."""

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import settings
from ..invariance import batch_invariant
from ..kernels.base.check import (
    check_device,
    check_float,
    check_layout,
    check_shape,
    check_size,
    check_sizes,
    checked,
    needs_grad,
    renamed,
)
from ..kernels.base.shuffle import LAYOUT, check_shuffle, shuffle_weight, unshuffle_weight
from ..kernels.dense.gemm import multiply_linear
from ..kernels.dense.tuned_gemm import PARAMETERS, NotSupportedError, tuned_gemm
from ..private_api import LINEAR, own_buffers, own_parameters, version_of
from ..tuning.aiter_csv import GemmKey, find_tuned, this_device
from ..tuning.choice import measured
from .loading import Loading

HALVES = (torch.bfloat16, torch.float16)
BUFFER = "_preshuffled_weight"
ROWS = 64  # from which on a shuffled weight is taken where nothing says otherwise

# the switch

_handles: list["LinearPatch"] = []  # those that are in force
_switches: list[dict[str, Any]] = []  # of the forward that they share


class LinearPatch(AbstractContextManager["LinearPatch"]):
    """The result of `patch_linear()`: `undo()`, or the end of a `with` block, removes the patch."""

    def undo(self) -> None:
        """Take this one back; others that are in force stay.  Again it does nothing."""
        if self in _handles:
            _handles.remove(self)
            if not _handles:
                uninstall()

    def __exit__(self, *_: object) -> None:
        self.undo()


def patch_linear() -> LinearPatch:
    """Make every nn.Linear multiply by `tuned_gemm` if input and weight are both bfloat16 or both float16.

        with patch_linear():
            model(x)

    With batch invariance (`enable_batch_invariance`), all floating dtypes, under autocast too, and all calls
    of F.linear with a weight (N, K).

    All other products, and those that `tuned_gemm` does not support, run as before.  The patch holds for
    modules that inherit nn.Linear's own forward, gradients included.  torch computes products of weights that
    are not plain tensors (sharded or quantised ones), and without batch invariance products under autocast to
    another dtype.  A second patch changes nothing; the patch lasts until each call has been undone.  Patch
    before torch.compile: code compiled before is compiled again.  Errors are not hidden.
    """
    handle = LinearPatch()
    if not _handles:
        install()
    _handles.append(handle)
    return handle


def unpatch_linear() -> None:
    """Undo every `patch_linear()`."""
    for handle in _handles[:]:  # of which `undo` takes one
        handle.undo()


def install() -> None:
    original = nn.Linear.forward
    switch: dict[str, Any] = {"on": True}

    @functools.wraps(original)
    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        # switched off: another patch has wrapped this function and goes on to call it
        return multiply_patched(self, input, original) if switch["on"] else original(self, input)

    switch["forward"] = forward
    _switches.append(switch)
    nn.Linear.forward = forward  # type: ignore[method-assign]  # what the switch is
    F.linear = invariant_linear


def uninstall() -> None:
    switch = _switches.pop()
    switch["on"] = False
    forward = switch.pop("forward")
    if F.linear is invariant_linear:
        F.linear = LINEAR
    if nn.Linear.forward is forward:
        nn.Linear.forward = forward.__wrapped__  # type: ignore[method-assign, attr-defined]


def invariant_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear, with batch invariance by `gemm`: the routers of transformers call no nn.Linear."""
    by_gemm = batch_invariant() and is_for_gemm(input, weight)
    return (multiply_linear if by_gemm else LINEAR)(input, weight, bias)


def is_for_gemm(x: Tensor, weight: Tensor) -> bool:
    """Whether `gemm` can multiply; under autocast to any dtype, it does."""
    plain = type(x) in PARAMETERS and type(weight) in PARAMETERS and not x.is_meta
    return plain and x.dim() > 0 and weight.dim() == 2 and all(t.is_floating_point() for t in (x, weight))


def multiply_patched(module: nn.Linear, x: Tensor, original: Callable[[nn.Linear, Tensor], Tensor]) -> Tensor:
    """Compute the output of a patched nn.Linear."""
    weight = module.weight
    if not is_ours(x, weight):
        return original(module, x)
    shuffled = preshuffled(module, x, weight)
    try:
        if shuffled is not None:
            return tuned_gemm(x, shuffled, is_shuffled=True)
        return tuned_gemm(x, weight, module.bias)
    except NotSupportedError:
        return original(module, x)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute what a patched nn.Linear with this weight would."""
    if is_ours(x, weight):
        try:
            return tuned_gemm(x, weight, bias)
        except NotSupportedError:
            pass  # torch's own may be able to
    return F.linear(x, weight, bias)


def is_ours(x: Tensor, weight: Tensor) -> bool:
    if type(x) not in PARAMETERS or type(weight) not in PARAMETERS:
        return False
    dtypes = (*HALVES, torch.float32) if batch_invariant() else HALVES
    if x.dtype not in dtypes or weight.dtype != x.dtype:
        return False
    device = x.device.type
    if x.is_meta:  # torch knows no autocast of meta tensors
        return False
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]  # sizes are tensors then
        return False
    return not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) == x.dtype


def linear_with_split_bias(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `tuned_gemm(x, weight) + bias` in two steps, for implementations without a bias.

    x (..., K), weight (N, K), bias (N,) or None; returns (..., N) in the dtype of `x`.  The product is
    rounded before the bias is added, and the sum is rounded again: up to one more unit in the last place than
    in one step.
    Raises ValueError for shapes and devices, TypeError for dtypes.
    """
    out = tuned_gemm(x, weight)
    if bias is None:
        return out
    check_shape("bias", bias, "N")
    check_float(bias=bias)
    check_size("bias is ({},)", bias.shape[0], "weight is (N={}, K)", out.shape[-1])
    check_device(x=x, bias=bias)
    return out + bias.to(out.dtype)


# shuffled copies of weights

State = tuple[weakref.ref[Tensor], int, int, torch.dtype]  # of a weight
_shuffled_from: weakref.WeakKeyDictionary[nn.Module, State] = weakref.WeakKeyDictionary()


@checked
def preshuffle_weights(
    model: nn.Module, require_multiple: int = 256, layout: tuple[int, int] = LAYOUT
) -> int:
    """Add a shuffled copy of the weight to each eligible nn.Linear of `model`; return the number of layers.

    Eligible are bfloat16 weights (N, K), with N and K multiples of `require_multiple`, without a bias, not
    made in inference mode.  The copy is in the order of `shuffle_weight`, in the buffer
    `_preshuffled_weight`, which state dicts leave out.  A patched Linear (`patch_linear`) uses the copy if
    its weight needs no gradient, outside of torch.compile, under the first of these conditions that applies:

      * a file of tuned products has a row for both orders: if the shuffled order is faster
      * `MOE_AITER_PRESHUFFLE_M_THRESHOLD` is set: from this number of rows on
      * the usual order was faster at every measured size on this GPU, as on the H200: never
      * otherwise: from 64 rows on

    If a weight has changed, its next use shuffles it again.  A write through `.data` is not noticed: call
    this function again after it.

    Shuffled weights are for AMD's matrix instructions: measure before and after.  On NVIDIA's GPUs and on
    CPUs they gain nothing.  Kernels read only the layout (16, 16); copies in other layouts are not used.
    Raises ValueError if a weight does not divide into blocks of the layout, before anything is changed.
    """
    check_sizes(require_multiple=require_multiple)
    check_layout(layout)
    eligible = [m for m in model.modules() if is_eligible(m, require_multiple)]
    copies: dict[int, Tensor] = {}  # of weights, which several modules may share
    for module in eligible:
        weight = module.weight
        if id(weight) not in copies:
            copies[id(weight)] = shuffle_weight(weight.detach(), layout)
    for module in eligible:
        module.register_buffer(BUFFER, copies[id(module.weight)], persistent=False)
        vars(module)["_preshuffled_layout"] = tuple(layout)
        _shuffled_from[module] = state_of_weight(module.weight)
    return len(eligible)


def is_eligible(module: nn.Module, multiple: int) -> TypeGuard[nn.Linear]:
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return False
    weight = own_parameters(module).get("weight")  # None where it is computed
    if (
        weight is None
        or type(weight) not in PARAMETERS
        or weight.dtype != torch.bfloat16
        or module.bias is not None
    ):
        return False
    if weight.is_inference():  # such a weight has no version, so a change could not be noticed
        return False
    return weight.dim() == 2 and all(size % multiple == 0 for size in weight.shape)


def state_of_weight(weight: Tensor) -> State:
    """Return values that change if the weight does; a new weight may have the address of a deleted one."""
    return weakref.ref(weight), version_of(weight), weight.data_ptr(), weight.dtype


def is_same(before: State | None, now: State) -> bool:
    """Whether two states are equal; the first entries must be the same object."""
    return before is not None and before[0] is now[0] and before[1:] == now[1:]


def preshuffled(module: nn.Linear, x: Tensor, weight: Tensor) -> Tensor | None:
    """The shuffled weight, as new as the weight itself, if there is one and it is for this input."""
    if "_preshuffled_layout" not in vars(module):  # which most calls end with
        return None
    shuffled = own_buffers(module).get(BUFFER)
    if shuffled is None or torch.compiler.is_compiling() or needs_grad(weight):
        return None
    if (
        weight.dtype != torch.bfloat16
        or vars(module)["_preshuffled_layout"] != LAYOUT
        or module.bias is not None
    ):
        return None
    if weight.is_inference():
        return None
    if not takes_shuffled(x.numel() // max(x.shape[-1], 1), weight):
        return None
    if not is_same(_shuffled_from.get(module), state_of_weight(weight)):
        shuffled = shuffle_weight(weight.detach(), LAYOUT)
        own_buffers(module)[BUFFER], _shuffled_from[module] = shuffled, state_of_weight(weight)
    return shuffled


def takes_shuffled(rows: int, weight: Tensor) -> bool:
    """Whether so many rows are multiplied by the shuffled weight."""
    if batch_invariant():
        return False
    shuffled = None
    if settings.config_gemm_bf16:
        (N, K), device = weight.shape, this_device(weight.device)
        problem = GemmKey(rows, N, K, False, weight.dtype, weight.dtype)
        usual, shuffled = find_tuned(problem, device), find_tuned(problem._replace(shuffled=True), device)
        if usual is not None and shuffled is not None:
            return shuffled.us < usual.us
    if settings.preshuffle_m_threshold:
        return rows >= settings.preshuffle_m_threshold
    if shuffled is None and measured("gemm_shuffled", weight.device) == {"torch"}:  # in the usual order
        return False
    return rows >= ROWS


# a shuffled weight as a module, which knows that it is one


class ShuffledWeight(Loading):
    """`weight` (..., N, K) as `shuffle_weight` orders it, in the buffer `shuffled`; it is not trained.

    A tensor's attribute `is_shuffled` is lost by most operations; a module's type is not.  Copies, moves and
    state dicts keep the order, and a cast to elements of another size shuffles again, as it must.  `deepgemm`
    takes it for its `WQ`.

    Raises what `shuffle_weight` does, ValueError for a state dict with another order, and RuntimeError for
    one with codes of another dtype.
    """

    is_shuffled = True
    shuffled: Tensor

    @checked
    @renamed(x="weight")
    def __init__(self, weight: Tensor, layout: tuple[int, int] = LAYOUT, use_int4: bool = False):
        super().__init__()
        check_layout(layout)
        self.layout, self.use_int4 = (layout[0], layout[1]), bool(use_int4)
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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        before = self.shuffled
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
        if self.shuffled.itemsize != before.itemsize:
            self.shuffled = before  # what stays where the cast has no such order
            self.shuffled = shuffle_weight(fn(self.unshuffled()), self.layout, self.use_int4)
        return self
