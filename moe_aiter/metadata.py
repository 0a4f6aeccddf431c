"""What the metadata of tensors decides is decided once.

A training step gives an op the same shapes, strides and dtypes again and again.  To check them, to choose an
implementation and to say how large the outputs are takes the host longer than a small kernel takes the GPU;
to see that they are those of an earlier step takes a few microseconds.  So does the launch of a kernel, if
nothing is asked but where the tensors lie.
"""

import contextlib
import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

# types of inputs in which there is nothing hidden
PLAIN = {Tensor, torch.nn.Parameter, int, bool, float, str, torch.dtype, tuple, type(None)}
MOST = 1024  # what is remembered of each op: steps of many different sizes must not fill the memory


def metadata(inputs: tuple, *others) -> tuple | None:
    """All but the values of these tensors, which is what checks and choices go by, and the rest as it is.

    None where tensors are not what they seem: under a transform, of a class of their own, or the negative of
    what their memory holds.
    """
    kinds = tuple(map(type, inputs))
    if peek_interpreter_stack() is not None or not PLAIN.issuperset(kinds):
        return None
    key = [kinds, *others]  # with the kinds, since 1 == True == 1.0
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
_decisions = _undecided = 0
_steady: set[Callable] = set()


def steady(launch: Callable) -> Callable:
    """Say that a launcher does nothing but launch kernels.  No attribute does: what wraps it may do more."""
    _steady.add(launch)
    return launch


def is_steady(launch: Callable | None) -> bool:
    return launch in _steady


def decide_again() -> None:
    """Forget what was noted: something else than metadata has changed that launchers go by."""
    global _decisions
    _decisions += 1


@contextlib.contextmanager
def undecided():
    """Inside the block launchers decide at each call what they launch."""
    global _undecided
    _undecided += 1
    decide_again()
    try:
        yield
    finally:
        _undecided -= 1
        decide_again()


class Launcher:
    """A `steady` launcher of an op, for inputs of one metadata.

    The first call may compile; one of the next notes what is launched.  If that follows from metadata and
    addresses, the calls after it do without the launcher.
    """

    def __init__(self, launch: Callable):
        self.launch = launch
        self.compiled = False
        self.decision, self.tries = _decisions, 0
        self.known: list[Callable] = []

    def __call__(self, out: Tensor | tuple[Tensor, ...], *inputs) -> None:
        if noting.launches is not None:  # by the launcher of another op, which does not know what is in here
            noting.launches.append(None)
        elif not _undecided:
            if self.decision != _decisions:
                self.known, self.decision, self.tries = [], _decisions, 0
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
        decision, noting.launches = _decisions, []
        try:
            self.launch(out, *inputs)
            addresses = addresses_of(out, inputs)
            found = [launch and launch(addresses) for launch in noting.launches]
        finally:
            noting.launches = None
        if all(found) and decision == _decisions:  # which another thread may have changed
            self.known = found


def addresses_of(out: Tensor | tuple[Tensor, ...], inputs: tuple) -> list[int]:
    outs = out if isinstance(out, tuple) else (out,)
    return [t.data_ptr() for t in (*outs, *inputs) if isinstance(t, Tensor)]
