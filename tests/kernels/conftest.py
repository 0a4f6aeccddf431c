"""What the tests of several ops share."""

import pytest

from moe_aiter.config import interpret
from moe_aiter.kernels.base.host import ext
from moe_aiter.op import ORDER, use

from ..conftest import absent

# the interpreter is slow, and the others were tested without it
BACKENDS = ["triton"] if interpret else ["torch", "host", "triton"]  # and Hopper's in test_hopper.py


@pytest.fixture(params=BACKENDS)
def backend(request, device):
    """Each implementation there is on this device, and for the `dtype` of the test if it has one, forced."""
    name = request.param
    params = request.node.callspec.params
    if name not in ORDER[device.type]:
        pytest.skip(f"no {name} backend on {device.type}")
    if name == "host" and ext is None:
        pytest.skip("the C++ extension is not built")
    if why := absent(params):
        pytest.skip(why)
    with use(name):
        yield name
