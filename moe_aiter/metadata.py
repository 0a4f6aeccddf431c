"""What the metadata of tensors decides is decided once.

A training step gives an op the same shapes, strides and dtypes again and again.  To check them, to choose an
implementation and to say how large the outputs are takes the host longer than a small kernel takes the GPU;
to see that they are those of an earlier step takes a few microseconds.  So does the launch of a kernel, if
nothing is asked but where the tensors lie.
"""

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

_decisions = 0  # how often something has changed that decisions go by, beside metadata
# types of inputs in which there is nothing hidden
PLAIN = {Tensor, torch.nn.Parameter, int, bool, float, str, torch.dtype, tuple, type(None)}
_lock = threading.Lock()
MOST = 1024  # what is remembered of each op: steps of many different sizes must not fill the memory


def metadata(inputs: tuple, *others) -> tuple | None:
    """All but the values of these tensors, which is what checks and choices go by, and the rest as it is; and
    how often `decide_again` was called.

    None where tensors are not what they seem: under a transform, of a class of their own, or the negative of
    what their memory holds.
    """
    kinds = tuple(map(type, inputs))
    if peek_interpreter_stack() is not None or not PLAIN.issuperset(kinds):
        return None
    key = [kinds, _decisions, *others]  # with the kinds, since 1 == True == 1.0
    for t in inputs:
        if isinstance(t, Tensor):
            if t.is_neg():
                return None
            key += t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16
        elif type(t) is tuple and any(type(n) is not int for n in t):
            return None
        else:
            key.append(str(t) if type(t) is float and not t else t)  # since 0.0 == -0.0
    return tuple(key)


def resolved(*inputs) -> list:
    """The same with tensors that hold what they say, as the imaginary part of a conjugate does not."""
    return [t.resolve_neg() if isinstance(t, Tensor) else t for t in inputs]


def decide_again() -> None:
    """Decide anew at the next call, in every thread: a table, say, or a registered kernel has changed."""
    global _decisions
    with _lock:
        _decisions += 1


def decisions() -> int:
    """Return how often `decide_again` was called: a part of each key under which a decision is kept."""
    return _decisions


class Scoped:
    """A value that holds inside a `with` block: in its thread, and in the backward passes that it starts.

    No threading.local or ContextVar: autograd runs CUDA gradients on threads of its own.  torch hands them
    the thread-local objects of the thread that called backward.
    """

    def __init__(self, name: str, default):
        self.key, self.default = f"moe_aiter.{name}", default
        self.blocks = 0  # that are open, in all threads: with none, which is usual, no thread has to be asked

    def get(self):
        """Return the value of the innermost block, or the default."""
        if self.blocks and torch._C._is_key_in_tls(self.key):
            return torch._C._get_obj_in_tls(self.key)
        return self.default

    @contextlib.contextmanager
    def set(self, value):
        """Hold `value` inside the block."""
        before = self.get()
        with _lock:
            self.blocks += 1
        stash(self.key, value)
        try:
            yield
        finally:
            stash(self.key, before)
            with _lock:
                self.blocks -= 1


def stash(key: str, value) -> None:
    """Set a thread-local object of torch's."""
    torch._C._stash_obj_in_tls(key, value)
    if STEALS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def steals() -> bool:
    """Whether torch drops a reference to a stashed object that it never took, as torch 2.11 does."""
    probe = object()
    references = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("moe_aiter.probe", probe)
    stolen = sys.getrefcount(probe) == references
    if stolen:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return stolen


STEALS = steals()
undecided = Scoped("undecided", False)  # True: launchers decide at each call what they launch


def keep(known: dict, key: tuple | None, what) -> None:
    """Remember what some metadata decided."""
    if key is not None:
        if len(known) >= MOST:
            known.clear()
        known[key] = what


def once(check: Callable) -> Callable:
    """`check(inputs)`, which looks at metadata alone, made once for all inputs with the same."""
    passed = {}

    def run(inputs):
        if torch.compiler.is_compiling():  # which would compile again for whatever is remembered here
            return check(inputs)
        key = metadata(inputs)
        if key not in passed:
            check(inputs)
            keep(passed, key, True)

    return run


def completion(arguments: list) -> Callable[[tuple], tuple]:
    """What adds to an op's inputs the defaults of those that a caller, or torch on the way, has left out."""
    count, values = len(arguments), [a.default_value for a in arguments if a.has_default_value()]
    defaults = [tuple(v) if isinstance(v, list) else v for v in values]  # what can be part of a key

    def whole(inputs: tuple) -> tuple:
        missing = count - len(inputs)
        return (*inputs, *defaults[-missing:]) if missing else inputs

    return whole


def layout(t: Tensor) -> tuple:
    """The arguments of torch.empty_strided for another such tensor."""
    return t.shape, t.stride(), {"dtype": t.dtype, "device": t.device}


# launches


class Noting(threading.local):
    """What a thread's launcher launches, while a `Launcher` asks: for each launch a function of the addresses
    of all tensors, which returns a launch for others like them, or None; None for what it cannot note."""

    launches: list[Callable | None] | None = None


noting = Noting()
TRIES = 3
_steady: set[Callable] = set()


def steady(launch: Callable) -> Callable:
    """Say that a launcher does nothing but launch kernels.  No attribute does: what wraps it may do more."""
    _steady.add(launch)
    return launch


def is_steady(launch: Callable | None) -> bool:
    return launch in _steady


class Launcher:
    """A `steady` launcher of an op, for inputs of one `metadata`, so until decisions change.

    The first call may compile; one of the next notes what is launched.  If that follows from metadata and
    addresses, the calls after it do without the launcher.
    """

    def __init__(self, launch: Callable):
        self.launch = launch
        self.compiled, self.tries = False, 0
        self.known: list[Callable] = []

    def __call__(self, out: Tensor | tuple[Tensor, ...], *inputs) -> None:
        if noting.launches is not None:  # by the launcher of another op, which does not know what is in here
            noting.launches.append(None)
        elif not undecided.get():
            if self.known:
                addresses = addresses_of(out, inputs)
                if all(launch(addresses) for launch in self.known):
                    return
            elif self.compiled and self.tries < TRIES:
                return self.note(out, inputs)
        self.launch(out, *inputs)
        self.compiled = True

    def note(self, out: Tensor | tuple[Tensor, ...], inputs: tuple) -> None:
        self.tries += 1
        noting.launches = []
        try:
            self.launch(out, *inputs)
            addresses = addresses_of(out, inputs)
            found = [launch and launch(addresses) for launch in noting.launches]
        finally:
            noting.launches = None
        if all(found):
            self.known = found


def addresses_of(out: Tensor | tuple[Tensor, ...], inputs: tuple) -> list[int]:
    outs = out if isinstance(out, tuple) else (out,)
    return [t.data_ptr() for t in (*outs, *inputs) if isinstance(t, Tensor)]
