"""The one place that decides which implementation of an op runs.

An op has one schema, one reference in plain torch, and any number of implementations by name: `hopper`
(Gluon, on sm_90), `triton` (any GPU, or the CPU under Triton's interpreter), `host` (C++ on the CPU) and
`torch` (the reference).
"""

import contextlib
import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .config import CHOICES, interpret, settings
from .dispatch import refuse, register
from .metadata import Launcher, Scoped, decide_again, is_steady, keep, layout, metadata, resolved
from .overlap import check_apart

log = logging.getLogger("moe_aiter")
log.setLevel(settings.log_level)

ORDER = {  # first choice first; ROCm also says "cuda"; any other device runs the reference
    "cuda": ("hopper", "triton", "torch"),
    "cpu": ("triton", "host", "torch") if interpret else ("host", "torch"),
}
IMPLS: dict[str, dict[str, Callable]] = {}  # op -> backend -> implementation

_forced = Scoped("backend", (settings.backend, "MOE_AITER_BACKEND"))  # and who forces it


class BackendError(LookupError):
    """No backend that may run takes these inputs."""


@contextlib.contextmanager
def use(backend: str):
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


def check_backend(backend: str, known: tuple[str, ...] = CHOICES["backend"]) -> None:
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a str, not {type(backend).__name__}")
    if backend not in known:
        raise ValueError(f"unknown backend {backend!r}; known: {', '.join(known)}")


def takes(*dtypes: torch.dtype):
    """Mark an implementation as valid only when its first input has one of these dtypes."""

    def mark(fn):
        fn.takes = dtypes
        return fn

    return mark


def pick(name: str, x: Tensor, *rest) -> Callable:
    """The forced backend, which never falls back, or the first in ORDER that takes these and, where it says
    so by `wants`, wants them: it could compute what another is faster at.

    An op that is nothing but torch has no other backend to force.  Under "hopper" an op without such
    a kernel runs the one of any GPU.
    """
    impls = IMPLS[name]
    order = ORDER.get(x.device.type, ("torch",))
    asked, by = _forced.get()
    forced = "triton" if asked == "hopper" and "hopper" not in impls else asked
    tried = order if forced == "auto" or impls.keys() == {"torch"} else (forced,)
    for backend in tried:
        impl = impls.get(backend)
        usable = backend in order or backend == "torch"
        if impl is not None and usable and runs(impl, x, *rest):
            wants = getattr(impl, "wants", None) if forced == "auto" else None
            if wants is None or wants(x, *rest):
                return impl
    there = ", ".join(b for b in order if b in impls and runs(impls[b], x, *rest))
    why = "" if asked == "auto" else f"; {by} forces {asked}"
    raise BackendError(
        f"{name}: no {' or '.join(tried)} backend for {x.dtype} on {x.device.type}; there is {there}{why}"
    )


def runs(impl: Callable, x: Tensor, *rest) -> bool:
    """Whether an implementation takes the dtype, and says of nothing else that it does not fit."""
    fits = getattr(impl, "fits", None)
    return x.dtype in getattr(impl, "takes", (x.dtype,)) and (fits is None or fits(x, *rest))


def register_kernel(*, op: str, backend: str, takes: tuple[torch.dtype, ...] | None = None):
    """Add or replace an implementation of an op: `@register_kernel(op="gmm", backend="triton")`.

    The function is called as `impl(out, *inputs)` and fills `out` (a tuple for ops with several outputs).
    """
    if not isinstance(op, str):
        raise TypeError(f"op must be a str, not {type(op).__name__}")
    if not (takes is None or isinstance(takes, tuple) and all(isinstance(d, torch.dtype) for d in takes)):
        raise TypeError(f"takes must be a tuple of dtypes, not {takes!r}")
    if op not in IMPLS:
        raise ValueError(f"unknown op {op!r}; known: {sorted(IMPLS)}")
    check_backend(backend, CHOICES["backend"][1:])  # "auto" has no implementation

    def add(fn):
        if takes is not None:
            fn.takes = takes
        IMPLS[op][backend] = fn
        decide_again()
        return fn

    return add


def define_op(
    schema: str,
    *,
    new: Callable,
    reference: Callable | None = None,
    backward: Callable | None = None,
    save: Callable | None = None,
    check_values: Callable | None = None,
    **impls: Callable | None,
) -> Callable:
    """Register one op, whose outputs are all fresh.

    `new(*inputs)` checks its inputs and allocates the output, a tensor or a tuple; it is also the fake.
    `check_values(*inputs)` raises for bad values; it synchronises, so it runs with settings.debug only.
    `reference(*inputs)` is the meaning, in plain torch; it is also the "torch" backend, unless that is given.
    Every other backend is `impl(out, *inputs)`: it fills `out`.  A backend given as None is absent.
    """
    name, _, results = schema.partition("(")
    several = "->" in results and results.rpartition("-> ")[2].startswith("(")
    IMPLS[name] = {k: v for k, v in impls.items() if v is not None}
    IMPLS[name].setdefault("torch", lambda out, *inputs: copy_into(out, reference(*inputs)))
    known = {}  # metadata -> the outputs' layouts, and what fills them

    def run(x, *rest):
        key = metadata((x, *rest), _forced.get(), *IMPLS[name].values())
        if key is None:
            x, *rest = resolved(x, *rest)
        if decided := known.get(key):
            layouts, launch = decided
            outs = tuple([torch.empty_strided(size, stride, **kind) for size, stride, kind in layouts])
            out = outs if several else outs[0]
        else:
            out = new(x, *rest)
            outs = out if several else (out,)
            # nobody launches an empty grid
            launch = pick(name, x, *rest) if any(t.numel() for t in outs) else None
            if x.is_cuda and is_steady(launch):
                launch = Launcher(launch)
            keep(known, key, ([layout(t) for t in outs], launch))
        if settings.debug:
            poison(outs)
            if check_values is not None:
                check_values(x, *rest)
        if launch is not None:
            call_launcher(launch, out, x, *rest)
        return out

    if backward is None and "!" not in schema:  # torch takes a formula only for an op that changes nothing
        backward = refuse(name)
    return register(schema, run, new, backward, save)


def define_inplace_op(
    schema: str,
    *,
    check: Callable,
    reference: Callable,
    check_values: Callable | None = None,
    **impls: Callable | None,
) -> Callable:
    """Register an op that updates its first argument, `name(Tensor(a!) out, ...) -> ()`, without gradient.

    `check` raises for bad inputs, and each call for one that shares memory with what is updated.  `fits` is
    given the first argument last; the rest is as for `define_op`.
    """
    name = schema.partition("(")[0]
    IMPLS[name] = {k: v for k, v in impls.items() if v is not None}
    IMPLS[name]["torch"] = reference
    known = {}  # metadata -> what updates the output
    arguments = torch._C.parse_schema(f"moe_aiter::{schema}").arguments
    names = [a.name for a in arguments]
    written = [place for place, a in enumerate(arguments) if a.alias_info is not None]

    def run(out, x, *rest):
        key = metadata((out, x, *rest), _forced.get(), *IMPLS[name].values())
        given = out, x, *rest
        if key is None:
            out, x, *rest = resolved(*given)
        if decided := known.get(key):
            (launch,) = decided
        else:
            check(out, x, *rest)
            written_to = any(given[i] is not None and given[i].numel() for i in written)
            launch = pick(name, x, *rest, out) if written_to else None
            keep(known, key, (launch,))
        check_apart(names, given, written)
        if settings.debug and check_values is not None:
            check_values(out, x, *rest)
        if launch is not None:
            call_launcher(launch, out, x, *rest)
            for i, t in enumerate((out, x, *rest)):
                if t is not given[i] and i in written:
                    given[i].copy_(t)
            # a graph that had saved what is written now must notice
            increment_version([given[i] for i in written if given[i] is not None])

    return register(schema, run, check, None, None)


def call_launcher(launch: Callable, out: Tensor | tuple[Tensor, ...], x: Tensor, *rest) -> None:
    """On the device of `x`, and without autocast."""
    elsewhere = x.is_cuda and x.get_device() != torch._C._cuda_getDevice()
    if elsewhere or torch._C._is_any_autocast_enabled():
        with torch.cuda.device_of(x), no_autocast(x):
            launch(out, x, *rest)
    else:
        launch(out, x, *rest)


def no_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """An op means the same under torch.autocast, which would lower the float32 products inside of it."""
    device = x.device.type
    if not x.is_meta and torch.is_autocast_enabled(device):  # torch knows no autocast of meta tensors
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def copy_into(out: Tensor | tuple[Tensor, ...], result: Tensor | tuple[Tensor, ...]) -> None:
    """Fill an op's outputs from the reference's results."""
    if isinstance(out, tuple):
        for o, r in zip(out, result, strict=True):
            o.copy_(r)
    else:
        out.copy_(result)


def poison(outs: tuple[Tensor, ...]) -> None:
    """Make an element that an implementation forgets visible: NaN, or an index far out of range."""
    for t in outs:
        t.fill_(float("nan") if t.is_floating_point() else max(-(2**30), torch.iinfo(t.dtype).min))
