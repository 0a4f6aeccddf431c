"""One case: what is computed, what a plain loop computes, and how far apart they may be."""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from moe_aiter.config import interpret
from moe_aiter.op import use

from .draw import DEVICE, ON_GPU, Draw, again, written_beside

BACKENDS = ("auto",) if ON_GPU or interpret else ("auto", "torch")
TARGETS: dict[str, Callable[[Draw], "Case"]] = {}


class Ambiguous(Exception):
    """Two scores lie so close that rounding decides which is higher: the case says nothing."""


@dataclasses.dataclass
class Loss:
    """A scalar that a plain loop returns last: its gradient is added, and its value is not compared."""

    value: Tensor


@dataclasses.dataclass
class Case:
    """`ours(**tensors)` and `plain(**tensors)` return a tensor or several.

    `plain` is run three times: in float64, which is the truth; in the dtypes of the tensors, which is what
    torch achieves; and in float64 with each number moved by a rounding, which is what the problem allows.
    """

    ours: Callable
    plain: Callable
    tensors: dict[str, Tensor]
    frozen: tuple[str, ...] = ()  # tensors that get no gradient
    gradients: bool = True
    exact: bool = False  # no rounding happens: equal to the bit
    coarse: torch.dtype | float | None = None  # the narrowest dtype, or the unit, of roundings on the way
    by_row: bool = False  # each row is held by itself, however small its numbers are


def target(fn: Callable[[Draw], Case]) -> Callable:
    """Register a function that draws cases under its name."""
    TARGETS[fn.__name__] = fn
    return fn


def run_case(name: str, seed: int) -> None:
    """Raise AssertionError if a backend is wrong, Ambiguous if rounding decides."""
    draw = Draw(name, seed)
    torch.manual_seed(seed)
    case = TARGETS[name](draw)
    hold(case, draw)


def hold(case: Case, draw: Draw) -> None:
    trained = trained_names(case, draw)
    exact = {name: in_double(t) for name, t in case.tensors.items()}
    douts: list[Tensor] = []
    truth = results(case.plain, exact, trained, douts, draw)
    copies = {name: again(t) for name, t in case.tensors.items()}
    best = truth if case.exact else results(case.plain, copies, trained, douts)

    def rounded(seed: int) -> dict[str, Tensor]:
        inputs = {**exact, **{str(i): t.double() for i, t in enumerate(douts)}}
        if case.exact:
            return truth
        inputs = roundings(case, inputs, seed)
        return results(case.plain, inputs, trained, [inputs.pop(str(i)) for i in range(len(douts))])

    moved, twice = [rounded(0)], draw.flip(0.2)
    for backend in BACKENDS:
        given = {name: again(t) for name, t in case.tensors.items()}
        with use(backend):
            ours = results(case.ours, given, trained, douts, twice=twice)
        wrong = differences(ours, best, truth, moved, case)
        if wrong and len(moved) == 1:  # one draw of roundings may be a lucky one
            moved += map(rounded, range(1, 8))
            wrong = differences(ours, best, truth, moved, case)
        assert not wrong, f"{backend} {wrong[0]}"
        for name, t in given.items():
            same = torch.equal(as_bytes(t), as_bytes(case.tensors[name]))
            assert same and not written_beside(t.detach(), case.tensors[name]), f"{backend}: {name} changed"


def differences(
    ours: dict[str, Tensor],
    best: dict[str, Tensor],
    truth: dict[str, Tensor],
    moved: list[dict[str, Tensor]],
    case: Case,
) -> list[str]:
    """What is wrong with our results, one line each."""
    if ours.keys() != truth.keys():
        return [f"{list(ours)} instead of {list(truth)}"]
    found = [
        (key, difference(ours[key], best[key], truth[key], [m[key] for m in moved], case)) for key in truth
    ]
    return [f"{key} {wrong}" for key, wrong in found if wrong]


def trained_names(case: Case, draw: Draw) -> list[str]:
    """The tensors that require a gradient: mostly all that could."""
    if not case.gradients:
        return []
    floats = [n for n, t in case.tensors.items() if t.is_floating_point() and n not in case.frozen]
    kept = [n for n in floats if draw.flip(0.85)]
    return kept or floats[:1]


def as_bytes(t: Tensor) -> Tensor:
    return t.new_empty(t.shape).copy_(t.detach()).flatten().view(torch.uint8)


def in_double(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t


def unit(rounding: torch.dtype | float) -> float:
    """The unit in the last place of 1."""
    return rounding if isinstance(rounding, float) else torch.finfo(rounding).eps


def roundings(case: Case, exact: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Each number moved by up to half a unit in the last place of its dtype, or of the narrowest dtype used.

    Inputs of 8 bits are multiplied as they are: of float32.
    """
    out, gen = {}, torch.Generator().manual_seed(seed)
    for name, t in exact.items():
        # a gradient of the result holds bfloat16 numbers, which meet results of float32 or less
        dtype = case.tensors[name].dtype if name in case.tensors else torch.float32
        if dtype.is_floating_point:
            noise = torch.rand(t.shape, generator=gen, dtype=torch.float64).to(DEVICE) * 2 - 1
            own = dtype if dtype.itemsize > 1 else torch.float32
            eps = max(map(unit, (own, case.coarse or own)))
            t = t * (1 + noise * eps / 2)
        out[name] = t
    return out


def results(
    fn: Callable,
    tensors: dict[str, Tensor],
    trained: list[str],
    douts: list[Tensor],
    draw: Draw | None = None,
    twice: bool = False,
) -> dict[str, Tensor]:
    """The outputs, and the gradients for `douts`, which `draw` draws if it is given.

    `twice`: from a graph that is kept, the same gradients to the bit.
    """
    leaves = {n: t.detach().requires_grad_(n in trained) for n, t in tensors.items()}
    outputs = fn(**leaves)
    outputs = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
    losses = [out.value for out in outputs if isinstance(out, Loss) and out.value.requires_grad]
    outputs = tuple(out for out in outputs if not isinstance(out, Loss))
    found = {f"output {i}": out.detach() for i, out in enumerate(outputs) if out is not None}
    ends = [out for out in outputs if out is not None and out.requires_grad]
    if not trained or not ends + losses:
        return found | {f"gradient of {n}": torch.zeros_like(tensors[n]) for n in trained}
    if draw is not None:
        douts += [draw.numbers(*out.shape, dtype=torch.bfloat16) for out in ends]
    assert len(ends) == len(douts), f"{len(ends)} outputs have gradients instead of {len(douts)}"
    given = [like(dout, out) for dout, out in zip(douts, ends, strict=True)]
    ends, given = ends + losses, given + [torch.ones_like(loss) for loss in losses]
    wanted = [leaves[n] for n in trained]
    how = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(ends, wanted, given, **how, retain_graph=True) if twice else None
    grads = torch.autograd.grad(ends, wanted, given, **how)
    assert not twice or all(map(torch.equal, map(as_bytes, first), map(as_bytes, grads))), "gradients differ"
    return found | {f"gradient of {n}": g for n, g in zip(trained, grads, strict=True)}


def like(dout: Tensor, out: Tensor) -> Tensor:
    """`dout`, of bfloat16 numbers and so the same in every dtype, in that of `out`, with its strides kept."""
    if 0 in dout.stride():
        return dout[:1].to(out.dtype).expand_as(out)
    return dout.to(out.dtype)


def difference(ours: Tensor, best: Tensor, truth: Tensor, moved: list[Tensor], case: Case) -> str | None:
    """No further from the truth than twice plain torch, twice what a rounding of the input moves it, and two
    roundings of the result: in the Euclidean norm, and for the worst element."""
    if ours.shape != truth.shape:
        return f"is {tuple(ours.shape)} instead of {tuple(truth.shape)}"
    if not truth.is_floating_point():
        return None if torch.equal(ours, truth.to(ours.dtype)) else "differs"
    if case.exact:
        same = torch.equal(ours.double().nan_to_num(7e7), truth.double().nan_to_num(7e7))
        return None if same else "differs"
    if ours.dtype != best.dtype:
        return f"is {ours.dtype} instead of {best.dtype}"
    if not truth.numel():
        return None
    dtype = ours.dtype
    rows = len(truth) if case.by_row else 1
    ours, best, truth = (t.double().reshape(rows, -1) for t in (ours, best, truth))
    moved = [t.double().reshape(rows, -1) for t in moved]
    eps = max(map(unit, (dtype, case.coarse or dtype)))
    for order, what in ((2, "error"), (float("inf"), "error of the worst element")):
        norm = functools.partial(torch.linalg.vector_norm, ord=order, dim=1)
        by_rounding = torch.stack([norm(t - truth) for t in moved]).amax(0)
        allowed = 2 * norm(best - truth) + 2 * by_rounding + 2 * eps * norm(truth)
        # all numbers drawn are about 1, and 1e-6 is left where they cancel
        allowed = allowed if case.by_row else allowed + 1e-6
        got = norm(ours - truth)
        wrong = ~(got <= allowed)  # a NaN is never `<=`
        if wrong.any():
            return f"has {what} {got[wrong][0]:.3g}, allowed {allowed[wrong][0]:.3g}"
    return None
