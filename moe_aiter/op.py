"""The one place that decides which implementation of an op runs.

An op has a NamedTuple of inputs, which is its schema, one reference in plain torch, and any number of
implementations by name: `hopper` (Gluon, on sm_90), `triton` (any GPU, or the CPU under Triton's
interpreter), `host` (C++ on the CPU) and `torch` (the reference).  An implementation that `binds` decides
once what follows from the metadata of its inputs, and then only launches.
"""

import contextlib
import functools
import inspect
import logging
import numbers
import threading
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .config import CHOICES, interpret, settings
from .invariance import INVARIANT, as_remembered, keep_twin, remembering, twin_of
from .private_api import (
    Scoped,
    any_autocast,
    arguments_of,
    check_formats,
    current_device,
    dispatch_modes,
    dual_level,
    innermost_transform,
    is_alias,
    is_batched,
    is_batching_gradients,
    is_differentiated,
    keeps_graph,
)
from .torch_ops import NAMESPACE, defining

Function = Callable[..., Any]
Key = tuple[Any, ...] | None  # of a decision
Kernel = TypeVar("Kernel", bound=Function)
Inputs = TypeVar("Inputs", bound=tuple[Any, ...])  # the NamedTuple of an op's arguments
Outs = TypeVar("Outs", Tensor, tuple[Tensor, ...])
T = TypeVar("T")

# Decisions that follow from metadata
#
# A training step calls an op with the same shapes, strides and dtypes again and again.  The host needs longer
# to check them, to choose an implementation and to lay out the outputs than the GPU needs for a small kernel.
# All of this depends on metadata alone, so each op keeps its decisions, by metadata.

_decisions = 0  # how often something has changed that decisions go by, beside metadata
SCOPES: list[Scoped[Any]] = [INVARIANT]  # whose values in this thread decisions go by as well
# types of inputs in which there is nothing hidden
PLAIN = {Tensor, torch.nn.Parameter, int, bool, float, str, torch.dtype, tuple, type(None)}
_lock = threading.Lock()
MOST = 1024  # what is remembered of each op: steps of many different sizes must not fill the memory
ROCM, FAR = torch.version.hip is not None, 2**31  # there, kernels with near memory alone have 32-bit offsets


def metadata(inputs: tuple[Any, ...], *others: Any) -> Key:
    """Return all that decisions go by: everything but the values of these tensors, the values of SCOPES, how
    many threads a CPU may use, `others`, and how often `invalidate_decisions` was called.

    None where tensors are not what they seem: under a transform, of a class of their own, or the negative of
    what their memory holds.
    """
    kinds = tuple(map(type, inputs))
    if innermost_transform() is not None or not PLAIN.issuperset(kinds):
        return None
    # with the kinds, since 1 == True == 1.0
    key: list[Any] = [kinds, _decisions, torch.get_num_threads(), *others]
    key += [scope.get() if scope.blocks else scope.default for scope in SCOPES]
    for t in inputs:
        if isinstance(t, Tensor):
            if t.is_neg():
                return None
            key += t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16
            if ROCM:
                key.append(t.untyped_storage().size() < FAR)
        elif type(t) is tuple and any(type(n) is not int for n in t):
            return None
        else:
            key.append(str(t) if type(t) is float and not t else t)  # since 0.0 == -0.0
    return tuple(key)


def resolved(*inputs: Any) -> list[Any]:
    """Return the inputs without lazy negation, as the imaginary part of a conjugate has it, and with Python's
    numbers in place of numpy's, which Triton does not take."""
    return [t.resolve_neg() if isinstance(t, Tensor) else in_python(t) for t in inputs]


def in_python(value: Any) -> Any:
    if type(value) in PLAIN or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def invalidate_decisions() -> None:
    """Make every thread decide anew at its next call, because for example a table has changed."""
    global _decisions
    with _lock:
        _decisions += 1


def decisions() -> int:
    """Return how often `invalidate_decisions` was called: a part of each kept decision's key."""
    return _decisions


def keep(cache: dict[Key, T], key: Key, value: T, most: int | None = None) -> None:
    """Remember what some metadata decided."""
    if key is not None:
        if len(cache) >= (MOST if most is None else most):
            cache.clear()
        cache[key] = value


def once(check: Callable[[Inputs], None]) -> Callable[[Inputs], None]:
    """`check(inputs)`, which looks at metadata alone, made once for all inputs with the same."""
    passed: dict[Key, bool] = {}

    def run(inputs: Inputs) -> None:
        if torch.compiler.is_compiling():  # which would compile again for whatever is remembered here
            return check(inputs)
        key = metadata(inputs)
        if key not in passed:
            check(inputs)
            keep(passed, key, True)

    return run


def layout(t: Tensor) -> tuple[torch.Size, tuple[int, ...], dict[str, Any]]:
    """The arguments of torch.empty_strided for another such tensor."""
    return t.shape, t.stride(), {"dtype": t.dtype, "device": t.device}


# The call
#
# torch's dispatcher takes longer to reach an op from Python than a small kernel takes to run.  A call skips
# the dispatcher where it would add nothing: no mode, tensor subclass, transform or compiler is at work.

LIB = torch.library.Library(NAMESPACE, "DEF")
INTEGERS = (int, torch.SymInt, numbers.Integral)
KINDS = {  # in a schema -> in Python, and in words
    "Tensor": (Tensor, "a tensor"),
    "Optional[Tensor]": ((Tensor, type(None)), "a tensor or None"),
    "int": (INTEGERS, "an int"),
    "float": ((numbers.Real, torch.SymFloat, torch.SymInt), "a number"),
    "bool": ((bool, torch.SymBool), "a bool"),
    "str": (str, "a str"),
}


def register(
    schema: str, inputs: type[Inputs], run: Callable[[Inputs], T], fake: Callable[[Inputs], object],
    backward: Function | None = None, save: Function | None = None,
) -> Callable[..., T]:  # fmt: skip
    """Tell torch about an op: its implementation on every device, its fake and its gradient.

    Returns a function that calls it, after a look for what torch would pass over or refuse obscurely.
    """
    name, _, rest = schema.partition("(")
    keep_twin(name, lambda twin, *fns: register(f"{twin}({rest}", inputs, *fns), run, fake, backward, save)
    with defining():
        LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag, *getattr(inputs, "tags", ())))
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    mutates = "!" in schema
    # torch would record what is written in place by products of its own, or refuse them
    unrecorded = torch.no_grad()(run) if mutates else run
    hashable = lambda v: tuple(v) if type(v) is list else v  # noqa: E731  a key takes no list
    LIB.impl(name, lambda *args: unrecorded(inputs(*map(hashable, args))), "CompositeExplicitAutograd")
    if mutates:  # `run` writes to negative views, which torch's own kernel for them cannot
        LIB.impl(name, torch.library.fallthrough_kernel, "Negative")
    torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *args: fake(inputs(*args)), lib=LIB)
    if backward is not None and not mutates:  # torch takes a formula only for an op that changes nothing
        kind, save, backward = inputs, remembering(save), as_remembered(backward)
        setup = lambda ctx, inputs, output: save(ctx, kind(*inputs), output)  # noqa: E731
        torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup, lib=LIB)
    arguments = [(a.name, *KINDS.get(str(a.type), (object, ""))) for a in arguments_of(op)]
    names = [name for name, *_ in arguments]
    short = run if backward is None else shortcut(name, inputs, run, backward, save)
    accepted: set[tuple[type, ...]] = set()  # types of inputs that are checked and need no dispatcher

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            check_formats(names, args)
            return twin_of(name, op)(*args)
        i = inputs(*args)
        kinds = tuple(map(type, i))
        if kinds not in accepted or is_transformed() or i[0].is_meta:
            check_kinds(arguments, i)
            check_formats(names, i)
            check_transforms(name, i, mutates)
            # one sample after another, of which torch's dispatcher knows no way to write in place
            if not is_plain(i) or (is_batched() and not mutates):
                return op(*i)
            if PLAIN.issuperset(kinds):
                accepted.add(kinds)
        elif dispatch_modes():
            return op(*i)
        return op(*i) if backward is None and torch.is_grad_enabled() else short(i)

    return call


def compose(schema: str, fn: Function) -> None:
    """Tell torch about an op that consists of torch's: its gradient, fake and compiled form are theirs."""
    with defining():
        LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIB.impl(schema.partition("(")[0], fn, "CompositeImplicitAutograd")


def check_kinds(arguments: list[tuple[str, Any, str]], inputs: tuple[Any, ...]) -> None:
    for (argument, kind, words), value in zip(arguments, inputs, strict=True):
        # a bool is an int to Python, and a mistake here
        if not isinstance(value, kind) or (isinstance(value, bool) and words in ("an int", "a number")):
            raise TypeError(f"{argument} must be {words}, not {type(value).__name__}")


def shortcut(
    name: str, inputs: type[Inputs], run: Callable[[Inputs], T], backward: Function, save: Function | None
) -> Callable[[Inputs], T]:
    """The op without torch's dispatcher, whose way to an op from Python takes longer than a small kernel."""

    def forward(ctx: Any, *args: Any) -> T:
        i = inputs(*args)
        out = run(i)
        if save is not None:
            save(ctx, i, out)
        return out

    functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(name, (torch.autograd.Function,), functions)
    apply = super(torch.autograd.Function, function).apply  # without what is for torch.func

    def call(i: Inputs) -> Any:
        if torch.is_grad_enabled():
            for t in i:
                if isinstance(t, Tensor) and t.requires_grad:
                    return (function.apply if innermost_transform() is not None else apply)(*i)
        return run(i)

    return call


def saved_tensors(ctx: Any) -> tuple[Any, ...]:
    """Return ctx.saved_tensors.  If x, of the shape ctx.x_shape, changed in place, the error says so."""
    try:
        return tuple(ctx.saved_tensors)
    except RuntimeError as error:
        if f"Tensor {list(ctx.x_shape)}]" not in str(error):
            raise
        raise RuntimeError(
            f"x of MoE or Experts, {tuple(ctx.x_shape)}, was changed in place after the forward pass, and "
            "backward needs x as it was: write x = x + y instead of x += y"
        ) from error


def is_transformed() -> bool:
    """Whether torch.func, autograd's is_grads_batched or forward-mode AD is at work."""
    return innermost_transform() is not None or dual_level() >= 0 or is_batching_gradients()


def is_plain(inputs: tuple[Any, ...]) -> bool:
    """Whether torch's dispatcher would do nothing but run the op: no mode, subclass or fake tensor."""
    hidden = [isinstance(t, Tensor) and (type(t) not in PLAIN or t.is_meta) for t in inputs]
    return dispatch_modes() == 0 and not any(hidden)


def is_unwatched(*tensors: Tensor) -> bool:
    """Whether no compiler, mode or graph of gradients would see memory change."""
    return not torch.compiler.is_compiling() and not torch.is_grad_enabled() and is_plain(tensors)


def is_last_use(saved: Tensor) -> bool:
    """Whether the backward pass that runs is the last that can ask for what is saved.

    Not where the graph is kept, nor where a CUDA graph may replay this pass without the forward pass.
    """
    replayed = saved.is_cuda and torch.cuda.is_current_stream_capturing()
    return not replayed and not keeps_graph()


def check_transforms(name: str, inputs: tuple[Any, ...], mutates: bool) -> None:
    """Refuse forward-mode AD, whose tangents torch would drop without a word, and torch.func's gradients.

    Many gradients at once too, where memory changes.
    """
    if mutates and is_batching_gradients():
        raise NotImplementedError(
            f"moe_aiter::{name} takes one gradient at a time: not is_grads_batched=True nor vectorize=True"
        )
    if is_differentiated(inputs):
        raise NotImplementedError(
            f"moe_aiter::{name} has gradients by torch.autograd only, not by forward-mode AD or torch.func; "
            "for those of each sample ask torch.autograd.grad once a sample"
        )


def refuse(name: str) -> Function:
    """A backward for ops without one: torch alone would warn, and go on without this op's share."""

    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(f"moe_aiter::{name} has no gradient; a second derivative may have asked for it")

    return backward


# Whether tensors share memory, which the metadata of one tensor does not say


def check_apart(names: list[str], inputs: tuple[Any, ...], written: list[int]) -> None:
    """Raise ValueError if what an op writes shares memory with another of its inputs."""
    for i in written:
        for j, other in enumerate(inputs):
            if j != i and isinstance(other, Tensor) and inputs[i] is not None and overlap(inputs[i], other):
                raise ValueError(f"{names[i]} shares memory with {names[j]}")


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether some byte belongs to both, by storage, offsets and strides; in doubt, True."""
    if not is_alias(x, y) or not x.numel() or not y.numel():
        return False
    x_start, y_start = (t.storage_offset() * t.itemsize for t in (x, y))
    steps = steps_of(x), steps_of(y)
    x_bytes, y_bytes = width(x, steps[0], 0), width(y, steps[1], 0)
    if x_start + x_bytes <= y_start or y_start + y_bytes <= x_start:
        return False
    for period, _ in steps[0] + steps[1]:  # of columns of one buffer, the distance of its rows
        x_width, y_width = width(x, steps[0], period), width(y, steps[1], period)
        if (y_start - x_start) % period >= x_width and (x_start - y_start) % period >= y_width:
            return False
    return True


def steps_of(x: Tensor) -> list[tuple[int, int]]:
    """For each axis, by how many bytes its elements are apart, and how often."""
    sizes = zip(x.stride(), x.shape, strict=True)
    return [(stride * x.itemsize, size - 1) for stride, size in sizes if stride and size > 1]


def width(x: Tensor, steps: list[tuple[int, int]], period: int) -> int:
    """The bytes from the first of `x` to its last, where those a multiple of `period` apart are one."""
    return x.itemsize + sum(step * count for step, count in steps if not period or step % period)


log = logging.getLogger("moe_aiter")
log.setLevel(settings.log_level)

ORDER = {  # first choice first; ROCm also says "cuda"; any other device runs the reference
    "cuda": ("hopper", "triton", "torch"),
    "cpu": ("triton", "host", "torch") if interpret else ("host", "torch"),
}
IMPLS: dict[str, dict[str, Function]] = {}  # op -> backend -> implementation
INPUTS: dict[str, type] = {}  # op -> the NamedTuple of its inputs
IN_PLACE: set[type] = set()  # the inputs of ops that write to the first one
Written = Annotated[Tensor, "written"]  # a field of an op's inputs that the op writes to

_forced = Scoped("backend", (settings.backend, "MOE_AITER_BACKEND"))  # and what forces it
SCOPES.append(_forced)


class BackendError(LookupError):
    """No backend that may run takes these inputs."""


@contextlib.contextmanager
def use(backend: str) -> Iterator[None]:
    """Force one backend inside the block: `with use("torch"): ...`.  For tests and debugging.

    Raises ValueError unless it is auto, hopper, triton, host or torch.

    Only in this thread, and in the backward passes that it starts.  For the whole process set
    MOE_AITER_BACKEND.
    """
    check_backend(backend)
    with _forced.set((backend, "use()")):
        yield


def forced() -> str:
    """The backend that is forced now, or auto."""
    return _forced.get()[0]


def may_be_forced() -> bool:
    """Whether some thread may force a backend: what torch.compile can ask while it traces."""
    return _forced.blocks > 0 or _forced.default[0] != "auto"


def check_backend(backend: str, allowed: tuple[str, ...] = CHOICES["backend"]) -> None:
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a str, not {type(backend).__name__}")
    if backend not in allowed:
        raise ValueError(f"unknown backend {backend!r}; known: {', '.join(allowed)}")


def takes(*dtypes: torch.dtype) -> Callable[[Kernel], Kernel]:
    """Mark an implementation as valid only when its first input has one of these dtypes."""

    def mark(fn: Kernel) -> Kernel:
        fn.takes = dtypes  # type: ignore[attr-defined]  # a mark, here and below
        return fn

    return mark


def binds(bind: Kernel) -> Kernel:
    """Mark an implementation of two stages: `bind(i)` decides all that follows from the metadata of an op's
    inputs, and returns `launch(out, i)`.  What `bind` returns must hold no tensor of `i`."""
    bind.binds = True  # type: ignore[attr-defined]
    return bind


def bound(impl: Callable[..., Function], i: tuple[Any, ...], **options: Any) -> Function:
    """Return `launch(out, i)` of an implementation for all inputs of the metadata of `i`."""
    return impl(i, **options) if hasattr(impl, "binds") else impl


def fill(name: str, out: Tensor | tuple[Tensor, ...], i: tuple[Any, ...]) -> None:
    """Let the implementation of an op that `pick` chooses fill `out`, without the op's checks."""
    bound(pick(name, i), i)(out, i)


def pick(name: str, i: tuple[Any, ...]) -> Function:
    """Return the forced backend, which never falls back, or the first in ORDER that takes the inputs `i` and
    should be used for them: one without `should_use` is used for all that it takes.

    An op whose only backend is torch ignores what is forced.  Under "hopper" an op without a Hopper
    kernel runs its Triton kernel.
    """
    impls, x = IMPLS[name], first_read(i)
    order = ORDER.get(x.device.type, ("torch",))
    requested, by = _forced.get() if _forced.blocks else _forced.default
    forced = "triton" if requested == "hopper" and "hopper" not in impls else requested
    tried = order if forced == "auto" or impls.keys() == {"torch"} else (forced,)
    for backend in tried:
        impl = impls.get(backend)
        usable = backend in order or backend == "torch"
        if impl is not None and usable and runs(impl, i):
            should_use = getattr(impl, "should_use", None) if forced == "auto" else None
            if should_use is None or should_use(i):
                return impl
    there = ", ".join(b for b in order if b in impls and runs(impls[b], i))
    missing = " or ".join(tried) if requested == "auto" else requested
    why = "" if requested == "auto" else f"; {by} forces {requested}"
    raise BackendError(
        f"{name}: no {missing} backend for {x.dtype} on {x.device.type}; there is {there}{why}"
    )


def picked(name: str, i: tuple[Any, ...]) -> Function:
    """Return what `pick` does, and log it at level DEBUG: once for inputs of the same metadata."""
    impl = pick(name, i)
    if log.isEnabledFor(logging.DEBUG):
        backend = next(backend for backend, other in IMPLS[name].items() if other is impl)
        tensors = [f"{tuple(t.shape)} {t.dtype}" for t in i if isinstance(t, Tensor)]
        log.debug("%s on %s: backend %s for %s", name, i[0].device, backend, ", ".join(tensors))
    return impl


def runs(impl: Function, i: tuple[Any, ...]) -> bool:
    """Return whether an implementation takes the dtype, and does not say that the inputs do not fit."""
    fits, dtype = getattr(impl, "fits", None), first_read(i).dtype
    return dtype in getattr(impl, "takes", (dtype,)) and (fits is None or bool(fits(i)))


def first_read(i: tuple[Tensor, ...]) -> Tensor:
    """Return the first input that the op does not write: its dtype and its device choose the backend."""
    return i[1] if type(i) in IN_PLACE else i[0]


def register_kernel(
    *, op: str, backend: str, takes: tuple[torch.dtype, ...] | None = None
) -> Callable[[Kernel], Kernel]:
    """Add or replace an implementation of an op: `@register_kernel(op="gmm", backend="triton")`.

    The function is called as `impl(out, *inputs)` and fills `out` (a tuple for ops with several outputs).
    An op that writes to its first input calls it as `impl(*inputs)`.
    """
    if not isinstance(op, str):
        raise TypeError(f"op must be a str, not {type(op).__name__}")
    if not (takes is None or (isinstance(takes, tuple) and all(isinstance(d, torch.dtype) for d in takes))):
        raise TypeError(f"takes must be a tuple of dtypes, not {takes!r}")
    if op not in IMPLS:
        raise ValueError(f"unknown op {op!r}; known: {sorted(IMPLS)}")
    check_backend(backend, CHOICES["backend"][1:])  # "auto" has no implementation

    def add(fn: Kernel) -> Kernel:
        if takes is not None:
            fn.takes = takes  # type: ignore[attr-defined]
        IMPLS[op][backend] = fn if hasattr(fn, "binds") else with_arguments(fn)
        invalidate_decisions()
        return fn

    return add


def with_arguments(fn: Function) -> Function:
    """Return `launch(out, i)` of a function of an op's inputs, or without the last where these are None."""
    kinds = [p.kind for p in inspect.signature(fn).parameters.values()]
    room = None if inspect.Parameter.VAR_POSITIONAL in kinds else sum(kind < 2 for kind in kinds)

    @functools.wraps(fn)  # and what it takes
    def launch(out: Any, i: tuple[Any, ...]) -> None:
        args = i if type(i) in IN_PLACE else (out, *i)
        fn(*(args[:room] if all(a is None for a in args[room:]) else args))

    return launch


NOTES: dict[type, dict[str, tuple[Any, ...]]] = {}  # the inputs of an op -> what `notes_of` returns
SCHEMA = {  # an annotation -> in a schema
    Tensor: "Tensor", Tensor | None: "Tensor?", int: "int", int | torch.SymInt: "SymInt", float: "float",
    bool: "bool", str: "str", torch.dtype | None: "ScalarType?", tuple[int, ...]: "int[]",
    tuple[bool, ...]: "bool[]",
}  # fmt: skip


def schema_of(name: str, inputs: type, outputs: int) -> str:
    """Return the schema of an op whose arguments are the fields of the NamedTuple `inputs`."""
    arguments, aliases, hints = [], iter("abc"), get_type_hints(inputs)
    for n, (field, p) in enumerate(inspect.signature(inputs).parameters.items()):
        kind = SCHEMA[hints[field]]
        kind = kind.replace("Tensor", f"Tensor({next(aliases)}!)") if n in written_of(inputs) else kind
        value = f'"{p.default}"' if isinstance(p.default, str) else [] if p.default == () else p.default
        default = "" if p.default is p.empty else f"={value}"
        arguments.append(f"{kind} {field}{default}")
    results = "Tensor" if outputs == 1 else f"({', '.join(['Tensor'] * outputs)})"
    return f"{name}({', '.join(arguments)}) -> {results}"


def notes_of(inputs: type) -> dict[str, tuple[Any, ...]]:
    """Return what the annotations of a NamedTuple say of each field beside its type; None: it may be None."""

    def notes(hint: object) -> tuple[Any, ...]:
        if metadata := getattr(hint, "__metadata__", ()):
            return tuple(metadata)
        options = get_args(hint)
        return (*notes(options[0]), None) if type(None) in options else ()

    if inputs not in NOTES:  # not a cache of functools, which torch.compile would trace into
        hints = get_type_hints(inputs, include_extras=True)
        NOTES[inputs] = {name: notes(hint) for name, hint in hints.items()}
    return NOTES[inputs]


def written_of(inputs: type) -> list[int]:
    """Return the positions of the fields of the NamedTuple `inputs` that are Written."""
    return [n for n, notes in enumerate(notes_of(inputs).values()) if "written" in notes]


def write_back(args: tuple[Any, ...], i: tuple[Any, ...], written: list[int]) -> None:
    """Copy what was written to `i`, the inputs `args` as `resolved` returned them, to the latter.

    A graph that had saved what is written now must notice.
    """
    for n in written:
        if i[n] is not args[n]:
            args[n].copy_(i[n])
    increment_version([args[n] for n in written if args[n] is not None])


def extended(name: str, inputs: type, first: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Return a NamedTuple: `first`, the fields of another, and `fields`: None leaves a field out.

    The last ones that may be None have that default."""
    every = (first or {}) | get_type_hints(inputs, include_extras=True) | fields
    kinds = [(field, kind) for field, kind in every.items() if kind is not None]
    made: Any = NamedTuple(name, kinds)  # type: ignore[misc]
    last = next(n for n, (_, kind) in enumerate(reversed(kinds)) if type(None) not in get_args(kind))
    made.__new__.__defaults__ = (None,) * last
    return made


def gradients(inputs: type[NamedTuple], **computed: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of an op's inputs in order: those `computed`, by name, and None for the others."""
    make: Callable[..., tuple[Tensor | None, ...]] = inputs
    return make(**(dict.fromkeys(inputs._fields) | computed))


def define_op(
    name: str, inputs: type[Inputs], *, new: Callable[[Inputs], T], outputs: int = 1,
    reference: Callable[[Inputs], T] | None = None, check_values: Callable[[Inputs], None] | None = None,
    backward: Function | None = None, save: Function | None = None, **impls: Function | None,
) -> Callable[..., T]:  # fmt: skip
    """Register one op, whose outputs are all fresh.

    `inputs` is a NamedTuple whose fields are the op's arguments, and `i` such a tuple.
    `new(i)` checks the inputs and allocates the output, a tensor or a tuple; it is also the fake.
    `check_values(i)` raises for bad values; it synchronises, so it runs with settings.debug only.
    `reference(i)` is the meaning, in plain torch; it is also the "torch" backend, unless `torch` is passed.
    Every other backend is `launch(out, i)`, which fills `out`, or `binds`.  A backend that is None is absent.
    """
    INPUTS[name] = inputs
    IMPLS[name] = {k: v for k, v in impls.items() if v is not None}
    if reference is not None:
        IMPLS[name].setdefault("torch", lambda out, i: copy_into(out, reference(i)))
    cache: dict[Key, tuple[list[Any], Function | None]] = {}  # -> the outputs' layouts, what fills them
    written = written_of(inputs)

    def run(args: Inputs) -> Any:
        i, key = args, metadata(args, *IMPLS[name].values())
        if key is None:
            i = inputs(*resolved(*args))
        if decided := cache.get(key):
            layouts, launch = decided
            outs = tuple([torch.empty_strided(size, stride, **kind) for size, stride, kind in layouts])
            out: Any = outs if outputs > 1 else outs[0]
        else:
            out = new(i)
            outs = out if outputs > 1 else (out,)
            launch = on_device_of(i[0], bound, picked(name, i), i) if any(t.numel() for t in outs) else None
            keep(cache, key, ([layout(t) for t in outs], launch))
        if settings.debug:
            poison(outs)
            if check_values is not None:
                check_values(i)
        if torch.is_anomaly_enabled():  # which looks for NaN also in rows that a kernel need not write
            for t in outs:
                t.zero_()
        if launch is not None:
            on_device_of(i[0], launch, out, i)
            if written:
                write_back(args, i, written)
        return out

    return register(schema_of(name, inputs, outputs), inputs, run, new, backward or refuse(name), save)


def define_inplace_op(
    name: str, inputs: type[Inputs], *, check: Callable[[Inputs], object],
    reference: Callable[[Inputs], object], check_values: Callable[[Inputs], None] | None = None,
    **impls: Function | None,
) -> Callable[..., None]:  # fmt: skip
    """Register an op that updates what is Written of its inputs, at least the first one, without gradient.

    `check(i)` raises for bad inputs, and each call for one that shares memory with what is updated.  An
    implementation is `launch(out, i)`, where `out` is the first input, or `binds`.  The rest is as for
    `define_op`.
    """
    INPUTS[name] = inputs
    IN_PLACE.add(inputs)
    IMPLS[name] = {k: v for k, v in impls.items() if v is not None}
    IMPLS[name]["torch"] = lambda out, i: reference(i)
    cache: dict[Key, tuple[Function | None]] = {}  # metadata -> what updates the output
    names, written = [*notes_of(inputs)], written_of(inputs)

    def run(args: Inputs) -> None:
        i, key = args, metadata(args, *IMPLS[name].values())
        if key is None:
            i = inputs(*resolved(*args))
        if decided := cache.get(key):
            (launch,) = decided
        else:
            check(i)
            some = any(args[n] is not None and args[n].numel() for n in written)
            launch = on_device_of(i[1], bound, picked(name, i), i) if some else None
            keep(cache, key, (launch,))
        check_apart(names, args, written)
        if settings.debug and check_values is not None:
            check_values(i)
        if launch is not None:
            on_device_of(i[1], launch, i[0], i)
            write_back(args, i, written)

    return register(schema_of(name, inputs, 0), inputs, run, check)


def on_device_of(x: Tensor, function: Callable[..., T], *args: Any) -> T:
    """Return `function(*args)`, called with the device of `x` as the current one, and without autocast."""
    if (x.is_cuda and x.get_device() != current_device()) or any_autocast():
        with torch.cuda.device_of(x), no_autocast(x):
            return function(*args)
    return function(*args)


def no_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """An op means the same under torch.autocast, which would lower the float32 products inside of it."""
    device = x.device.type
    if not x.is_meta and torch.is_autocast_enabled(device):  # torch knows no autocast of meta tensors
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def copy_into(out: Outs, result: Outs) -> None:
    """Fill an op's outputs from the reference's results."""
    for o, r in zip(out, result, strict=True) if isinstance(out, tuple) else [(out, result)]:
        o.copy_(r)


def poison(outs: tuple[Tensor, ...]) -> None:
    """Make an element that an implementation forgets visible: NaN, or an index far out of range."""
    for t in outs:
        t.fill_(float("nan") if t.is_floating_point() else max(-(2**30), torch.iinfo(t.dtype).min))
