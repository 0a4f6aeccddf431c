"""torch's opcheck for every op that is registered, and gradcheck for every op with a gradient."""

import importlib

import pytest
import torch
from samples import FIRST_OUTPUT, NO_GRADCHECK, SAMPLES, Draw, is_ours
from torch import Tensor

from moe_aiter import torch_ops
from moe_aiter.op import use

for module in torch_ops.OPS:
    importlib.import_module(module)
REGISTERED = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("moe_aiter::")}
OPS = sorted(filter(is_ours, {name.removeprefix("moe_aiter::").partition(".")[0] for name in REGISTERED}))
# torch compares inputs by a product, which 8-bit floats have not
TESTS_OF_8_BITS = "test_autograd_registration", "test_faketensor"


def test_every_op_has_samples():
    assert SAMPLES.keys() == set(OPS)
    assert NO_GRADCHECK.keys() | FIRST_OUTPUT <= SAMPLES.keys()


def make(name: str, dtype: torch.dtype, device: torch.device) -> list:
    return [t.to(device) if isinstance(t, Tensor) else t for t in SAMPLES[name](Draw(dtype))]


def op_of(name: str):
    return getattr(torch.ops.moe_aiter, name).default


def is_8_bit(t: object) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point() and t.itemsize == 1


def with_leaves(inputs: list) -> list:
    """The inputs, of which floating ones ask for a gradient."""
    floats = [isinstance(t, Tensor) and t.is_floating_point() and not is_8_bit(t) for t in inputs]
    return [t.clone().requires_grad_() if f else t for t, f in zip(inputs, floats, strict=True)]


def needing(ts: object) -> list[Tensor]:
    ts = ts if isinstance(ts, (tuple, list)) else (ts,)
    return [t for t in ts if isinstance(t, Tensor) and t.requires_grad]


def has_gradient(name: str, device: torch.device) -> bool:
    op = op_of(name)
    inputs = make(name, torch.float32, device)
    if op._schema.is_mutable or not needing(with_leaves(inputs)):
        return False
    inputs = with_leaves(inputs)
    outputs = needing(op(*inputs))
    if not outputs:
        return False
    try:
        torch.autograd.grad(
            outputs, needing(inputs), [torch.ones_like(t) for t in outputs], allow_unused=True
        )
    except RuntimeError as error:
        if f"moe_aiter::{name} has no gradient" not in str(error):
            raise
        return False
    return True


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name, device):
    inputs = make(name, torch.float32, device)
    outputs = op_of(name)(*[t.clone() if isinstance(t, Tensor) else t for t in inputs])
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    some = {"test_utils": TESTS_OF_8_BITS} if any(map(is_8_bit, (*inputs, *outputs))) else {}
    inputs = with_leaves(inputs) if has_gradient(name, device) else inputs
    torch.library.opcheck(op_of(name), tuple(inputs), **some)


@pytest.mark.parametrize("name", sorted(set(OPS) - NO_GRADCHECK.keys()))
def test_gradcheck(name):
    """In float64, by the reference."""
    if not has_gradient(name, torch.device("cpu")):
        pytest.skip("it has no gradient, and says so")
    inputs = with_leaves(make(name, torch.float64, torch.device("cpu")))

    def run(*leaves):
        rest = iter(leaves)
        outputs = op_of(name)(*[next(rest) if needing(t) else t for t in inputs])
        return outputs[0] if name in FIRST_OUTPUT else outputs

    with use("torch"):
        assert torch.autograd.gradcheck(run, needing(inputs))
