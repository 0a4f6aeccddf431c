"""How close is close: no further from the truth than twice what plain torch is, in the same dtype."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_aiter.op import IMPLS, INPUTS, bound


def few(values, *those, several: bool = False) -> list:
    """Parameters of a test, each of `several` values: `make test` takes those named, `make test-full` all."""
    values = [(v, pytest.param(*(v if several else (v,)), marks=pytest.mark.full)) for v in values]
    return [v if v in those else full for v, full in values]


def fits(op: str, *inputs) -> bool:
    """Whether the Hopper kernel of an op takes these inputs."""
    return bool(IMPLS[op]["hopper"].fits(INPUTS[op](*inputs)))


def launcher(op: str, impl: Callable) -> Callable:
    """Return an implementation of an op as `launch(out, *inputs)`, which decides anew at each call."""

    def launch(out, *inputs):
        i = INPUTS[op](*inputs)
        bound(impl, i)(out, i)

    return launch


def error(got: Tensor, exact: Tensor) -> float:
    """The relative distance of `got` from `exact`, in the Frobenius norm; NaN if either holds one."""
    exact = exact.double()
    distance = (got.to(exact.device).double() - exact).norm()
    return (distance / exact.norm().clamp_min(1e-30)).item()


def to_double(value):
    return value.detach().double() if isinstance(value, Tensor) and value.is_floating_point() else value


def as_tuple(outputs) -> tuple:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def assert_as_good_as_torch(
    fn: Callable, reference: Callable, *inputs, slack: float = 2.0, floor: float = 1e-7
) -> None:
    """Hold each output of `fn(*inputs)` against `reference` in float64.

    Its error may be `slack` times that of `reference(*inputs)` in the dtype of the inputs, which is what
    plain torch achieves, plus `floor`.  Shapes and dtypes must be the reference's, integers must be equal.
    """
    exact = as_tuple(reference(*map(to_double, inputs)))
    ours, theirs = as_tuple(fn(*inputs)), as_tuple(reference(*inputs))
    assert len(ours) == len(theirs), f"{len(ours)} outputs instead of {len(theirs)}"
    for i, (a, b, truth) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert_output_as_good(f"output {i}", a, b, truth, slack, floor)


def assert_output_as_good(
    name: str, ours: Tensor, theirs: Tensor, truth: Tensor, slack: float = 2.0, floor: float = 1e-7
) -> None:
    """One output against torch's own and the truth; see `assert_as_good_as_torch`."""
    assert ours.shape == truth.shape, f"{name} is {tuple(ours.shape)} instead of {tuple(truth.shape)}"
    assert ours.dtype == theirs.dtype, f"{name} is {ours.dtype} instead of {theirs.dtype}"
    if not truth.is_floating_point():
        assert torch.equal(ours, truth), f"{name} differs"
        return
    got, best = error(ours, truth), error(theirs, truth)
    assert got <= slack * best + floor, f"{name}: error {got:.2e}, torch in the same dtype {best:.2e}"


def of_groups(op, group_sizes):
    """An op whose first two outputs lack the rows of no group, which its kernels do not write."""
    n = int(group_sizes.sum())
    return lambda *inputs: tuple(t[:n] if i < 2 else t for i, t in enumerate(op(*inputs)))


def with_gradients(fn: Callable) -> Callable:
    """`fn`, returning after its outputs the gradient of each floating input, for a fixed random `dout`.

    `dout` is rounded to bfloat16 first: then it is the same number in every dtype that is compared.
    """

    def run(*inputs):
        floats = [isinstance(t, Tensor) and t.is_floating_point() for t in inputs]
        inputs = [t.detach().requires_grad_() if f else t for t, f in zip(inputs, floats, strict=True)]
        outputs = as_tuple(fn(*inputs))
        differentiable = [out for out in outputs if out.requires_grad]
        generator = torch.Generator().manual_seed(1)
        douts = [torch.randn(out.shape, generator=generator).bfloat16().to(out) for out in differentiable]
        leaves = [t for t, f in zip(inputs, floats, strict=True) if f]
        grads = torch.autograd.grad(differentiable, leaves, douts, allow_unused=True, materialize_grads=True)
        return *(out.detach() for out in outputs), *grads

    return run


def gather_and_release(model: torch.nn.Module) -> None:
    """As ZeRO-3: outside of its module's forward pass, and of backward, a parameter has no numbers."""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        kept = {p: p.data for p in own}

        def gather(*_, kept=kept):
            for p, data in kept.items():
                p.data = data

        def release(*_, kept=kept):
            for p in kept:
                p.data = torch.empty(0)

        release()
        module.register_forward_pre_hook(gather)
        module.register_forward_hook(lambda *_, release=release: release())


class Hidden(torch.optim.Optimizer):
    """Leaves no trace in the version."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(1)


class Copies(TorchDispatchMode):
    """Notes the sizes of the tensors that are cloned."""

    def __init__(self):
        super().__init__()
        self.sizes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.clone.default:
            self.sizes.add(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


class Peak(TorchDispatchMode):
    """Notes the most bytes that the results of all operations had at one time."""

    def __init__(self):
        super().__init__()
        self.results, self.most = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.results += [weakref.ref(t) for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.most = max(self.most, self.now())
        return out

    def now(self):
        live = [t.untyped_storage() for result in self.results if (t := result()) is not None]
        return sum({storage.data_ptr(): storage.nbytes() for storage in live}.values())
