"""Switches that a program can change while it runs.  They start with the settings that `config.py` read.

A switch is process-wide, as torch's own are, and counts for the next call in every thread.
"""

import contextlib
import dataclasses
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .config import CHOICES, check_choice, printable, settings
from .invariance import INVARIANT, batch_invariant, make_twins
from .op import SCOPES, log, no_autocast
from .private_api import Scoped, outside_of_graph

HALVES = {"FP16": torch.float16, "BF16": torch.bfloat16}
FLOAT32 = {"TF32": "tf32", "FP32": "ieee"}  # in torch's words, which are Triton's
FLOAT32_SWITCHES = (
    torch.backends.cuda.matmul,
    torch.backends.cudnn.conv,
    torch.backends.mkldnn.matmul,
    torch.backends.mkldnn.conv,
)


@dataclasses.dataclass
class Switches:
    precision: str = settings.default_precision
    tensor_cores: bool = settings.enable_tensor_cores
    fusion: bool = settings.enable_fusion
    dynamic_shapes: bool = settings.enable_dynamic_shapes
    matmul: str = settings.matmul_precision  # of float32 products


switches = Switches()


# precision


def set_default_precision(precision: str | None) -> None:
    """Compute float32 inputs of AITER's functions as FP16, BF16, TF32 or FP32; the result is float32 again.

    None, the default, computes them as they are: products as MOE_AITER_MATMUL_PRECISION says, convolution and
    attention as torch's own switches do.  FP32 is strict, whatever those say.
    float16, bfloat16 and float64 inputs are computed as they are.  Raises ValueError for another name.
    """
    choices = CHOICES["default_precision"]
    switches.precision = "" if precision is None else check_choice("precision", precision, choices[1:])


def get_default_precision() -> str | None:
    """FP16, BF16, TF32, FP32, or None: see `set_default_precision`."""
    return switches.precision or None


def enable_tensor_cores(on: bool = True) -> None:
    """Without them AITER's functions compute 16- and 32-bit inputs in float32, by multiply-add instructions.

    The result has its usual dtype, and the default precision does not count.  To find out whether a number
    is due to the arithmetic; slow.
    """
    switches.tensor_cores = check_bool(on)


def tensor_cores_enabled() -> bool:
    """Return the last value passed to `enable_tensor_cores`, or that of the environment."""
    return switches.tensor_cores


def enable_fusion(on: bool = True) -> None:
    """Without it AITER's functions run as the separate steps that they stand for, each with a result of its
    own: product, bias, activation; scores, softmax, weighted sum."""
    switches.fusion = check_bool(on)


def fusion_enabled() -> bool:
    """Return the last value passed to `enable_fusion`, or that of the environment."""
    return switches.fusion


def enable_dynamic_shapes(on: bool = True) -> None:
    """With it `conv2d` and `dynamic_conv2d` take cuDNN's or MIOpen's first choice for a shape; without, as
    `torch.backends.cudnn.benchmark` says, they may time all kernels whenever a shape is new."""
    switches.dynamic_shapes = check_bool(on)


def dynamic_shapes_enabled() -> bool:
    """Return the last value passed to `enable_dynamic_shapes`, or that of the environment."""
    return switches.dynamic_shapes


def enable_batch_invariance(on: bool = True) -> None:
    """With it the bits of a token's output and of its gradients depend on that token alone: not on the number
    of tokens, its position or the other tokens.  Some products are then slower.

    It holds for the layers and products of moe_aiter, and for the gradients of tokens and routing weights.
    The gradient of a weight is a sum over all tokens, and no part of it.  A backward pass does as its forward
    pass did; a forward pass that activation checkpointing repeats does as the switch says by then.  A layer
    that cannot be invariant raises ValueError: `Capacity`, expert choice and others that compare tokens,
    jitter, dropout.
    """
    if check_bool(on):
        make_twins()
    INVARIANT.default = on


def batch_invariance_enabled() -> bool:
    """Whether batch invariance is on: by `enable_batch_invariance`, the environment, or a layer that runs."""
    return batch_invariant()


def check_bool(on: bool) -> bool:
    if not isinstance(on, bool):
        raise TypeError(f"on must be a bool, not {type(on).__name__}")
    return on


def computed(fn: Callable, exact: Sequence[str] = ()) -> Callable:
    """`fn` of tensors, computed as the default precision and the switch for tensor cores say.

    Its first tensor decides, if it is floating: that is the dtype of the result too, unless `out_dtype` names
    another.  Arguments that are called one of `exact`, scales say, keep their dtype.
    FP16 and BF16 compile; the others set torch's switches around forward and backward pass, which breaks a
    graph, and such a result has no second derivative.
    """

    @functools.wraps(fn)
    def run(*args, **kwargs):
        if keeps_dtypes():
            return fn(*args, **kwargs)
        return compute(fn, args, kwargs, exact)

    return run


def keeps_dtypes() -> bool:
    """Whether `computed` leaves every dtype as it is."""
    return switches.tensor_cores and not switches.precision


def compute(fn: Callable, args: tuple, kwargs: dict, exact: Sequence[str]):
    x, precision = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None), None
    if not is_float(x):  # of integers as well, whose scales are floats
        return fn(*args, **kwargs)
    if not switches.tensor_cores and x.dtype in (torch.float32, *HALVES.values()):
        dtype, precision = torch.float32, "ieee"
    elif x.dtype == torch.float32:
        dtype, precision = HALVES.get(switches.precision, x.dtype), FLOAT32.get(switches.precision)
    else:
        return fn(*args, **kwargs)

    def cast(t):
        return t.to(dtype) if is_float(t) and t.dtype == x.dtype else t

    args = [cast(t) for t in args]
    kwargs = {name: t if name in exact else cast(t) for name, t in kwargs.items()}
    with no_autocast(x):
        if precision is None:
            out = fn(*args, **kwargs)
        else:
            out = inside(functools.partial(float32_products, precision), fn, args, kwargs)
    return out if kwargs.get("out_dtype") else out.to(x.dtype)


def is_float(t) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


class Shared:
    """Switches of torch's, which it has once for the whole process, set while some thread needs them.

    Blocks that set the same value run side by side: the last to leave puts back what the first has found.
    A block that sets another value waits for them.  A block within a block changes nothing, also where
    autograd runs it on a thread of its own.
    """

    def __init__(self, name: str, *attributes: tuple[object, str]):
        self.attributes, self.inside = attributes, Scoped(name, False)
        self.changed = threading.Condition()
        self.blocks, self.value, self.before = 0, None, []

    @contextlib.contextmanager
    def set(self, value) -> Iterator[None]:
        """Every switch has this value inside."""
        if self.inside.get():
            yield
            return
        with self.changed:
            self.changed.wait_for(lambda: not self.blocks or self.value == value)
            if not self.blocks:
                self.value, self.before = value, [getattr(*a) for a in self.attributes]
                for a in self.attributes:
                    setattr(*a, value)
            self.blocks += 1
        try:
            with self.inside.set(True):
                yield
        finally:
            with self.changed:
                self.blocks -= 1
                if not self.blocks:
                    for a, before in zip(self.attributes, self.before, strict=True):
                        setattr(*a, before)
                    self.changed.notify_all()


MATMUL = Shared("cuda matmul", (torch.backends.cuda.matmul, "fp32_precision"))
OTHERS = Shared("convolutions and oneDNN", *[(switch, "fp32_precision") for switch in FLOAT32_SWITCHES[1:]])
_matmul = Scoped("matmul", None)
SCOPES.append(_matmul)


def float32_precision() -> str:
    """The precision of float32 products in this thread: ieee, or tf32 on tensor cores."""
    return _matmul.get() or switches.matmul


@contextlib.contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Inside, float32 products are "ieee" or "tf32", in cuBLAS, cuDNN, oneDNN and our Triton kernels."""
    with MATMUL.set(precision), OTHERS.set(precision), _matmul.set(_matmul.get() or precision):
        yield


Context = Callable[[], contextlib.AbstractContextManager]


def inside(context: Context, fn: Callable, args: Sequence, kwargs: dict) -> Tensor:
    """`fn(*args, **kwargs)` inside of `context()`, as is its gradient.  A compiled graph ends before it."""
    return outside_of_graph(
        "switches of torch's are set around the call", run_inside, context, fn, args, kwargs
    )


def run_inside(context: Context, fn: Callable, args: Sequence, kwargs: dict) -> Tensor:
    """Run `fn` inside of the context.  A compiler must not trace this function."""
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]

    def call(*inputs):
        left = iter(inputs)
        now = [next(left) if isinstance(t, Tensor) else t for t in (*args, *kwargs.values())]
        with context():
            return fn(*now[: len(args)], **dict(zip(kwargs, now[len(args) :], strict=True)))

    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        return call(*tensors)
    return Inside.apply(context, call, *tensors)


class Inside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, context: Context, call: Callable, *tensors: Tensor) -> Tensor:
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        with torch.enable_grad():
            out = call(*inputs)
        ctx.context, ctx.inputs, ctx.out = context, inputs, out
        found = out.detach()
        if not out.requires_grad:  # it depends on none of those that do
            ctx.mark_non_differentiable(found)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):
        wanted = [t for t in ctx.inputs if t.requires_grad]
        with ctx.context():
            grads = iter(torch.autograd.grad(ctx.out, wanted, dout, retain_graph=True, allow_unused=True))
        return None, None, *(next(grads) if t.requires_grad else None for t in ctx.inputs)


# log


class Console(logging.StreamHandler):
    """Writes to stderr what no handler of the program's would, as Python does by itself from WARNING on."""

    def __init__(self):
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

    def filter(self, record: logging.LogRecord) -> bool:
        others = [h for h in (*log.handlers, *logging.getLogger().handlers) if h is not self]
        return not others and super().filter(record)


def set_log_level(level: str) -> None:
    """Log from DEBUG, INFO, WARNING or ERROR on, to stderr unless the program has handlers for its log.

    Raises ValueError for another name."""
    log.setLevel(check_choice("level", level, CHOICES["log_level"]))


def get_log_level() -> str:
    """DEBUG, INFO, WARNING or ERROR: see `set_log_level`."""
    return logging.getLevelName(log.level)


log.addHandler(Console())
