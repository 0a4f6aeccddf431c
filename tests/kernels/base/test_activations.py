"""Names of activations, with numbers in them too."""

import math

import pytest
from shapes import CAPPED, LIMITED, NAMES

from moe_aiter.config import interpret
from moe_aiter.kernels.base.activations import OAI, Caps, Limits, get_activation, swiglu_limit, swiglu_softcap


@pytest.mark.parametrize("name", NAMES)
def test_a_name_finds_one_activation(name):
    assert get_activation(name) is get_activation(name) and get_activation(name).name == name


def test_one_name_for_equal_numbers():
    name = swiglu_limit(10, 10)
    assert name == "swiglu_limit(10.0, 10.0, 1.0, 0.0)" == swiglu_limit(10.0, up_limit=1e1, alpha=1)
    for other in ("swiglu_limit(10, 10)", "swiglu_limit(1e1,10.,1)", "swiglu_limit( 10, 10, 1, 0 )"):
        assert get_activation(other) is get_activation(name)
    assert get_activation(name).limits == (Limits(10.0, 10.0, 1.0, 0.0),)
    assert swiglu_softcap(4, 25) == "swiglu_softcap(4.0, 25.0)" == swiglu_softcap(4.0, up_cap=2.5e1)
    for other in ("swiglu_softcap(4, 25)", "swiglu_softcap( 4.,25 )"):
        assert get_activation(other) is get_activation("swiglu_softcap(4.0, 25.0)")
    assert get_activation("swiglu_softcap(4, 25)").limits == (Caps(4.0, 25.0),)
    assert swiglu_limit(0.1, 1 / 3, 65504, -7e-05) == f"swiglu_limit(0.1, {1 / 3!r}, 65504.0, -7e-05)"


def test_the_numbers_of_gpt_oss_have_a_name():
    assert swiglu_limit(7, 7, 1.702, 1) == swiglu_limit(*OAI) == "swiglu_oai"
    assert get_activation("swiglu_limit(7, 7, 1.702, 1)") is get_activation("swiglu_oai")


@pytest.mark.parametrize("number", [0, -1.0, math.inf, -math.inf, math.nan, 65505, 6e-5])
@pytest.mark.parametrize("name", ["gate_max", "up_limit", "alpha", "up_offset"])
def test_numbers_that_are_refused(name, number):
    numbers = {"gate_max": 7.0, "up_limit": 7.0, name: number}
    if name == "up_offset" and number in (0, -1.0):
        assert swiglu_limit(**numbers).endswith(f" {float(number)})")
        return
    with pytest.raises(ValueError, match=f"^{name} must be "):
        swiglu_limit(**numbers)
    text = ", ".join(str(n) for n in Limits(**{"alpha": 1.0, "up_offset": 0.0, **numbers}))
    with pytest.raises(ValueError, match=f"^{name} must be "):
        get_activation(f"swiglu_limit({text})")


@pytest.mark.parametrize("number", [0, -1.0, math.inf, -math.inf, math.nan, 65505, 6e-5])
@pytest.mark.parametrize("name", ["gate_cap", "up_cap"])
def test_caps_that_are_refused(name, number):
    caps = Caps(4.0, 25.0)._replace(**{name: number})
    with pytest.raises(ValueError, match=f"^{name} must be "):
        swiglu_softcap(*caps)
    with pytest.raises(ValueError, match=f"^{name} must be "):
        get_activation(f"swiglu_softcap({caps.gate_cap}, {caps.up_cap})")


@pytest.mark.parametrize("number", [None, "7", True, [7.0], 7j])
def test_no_numbers(number):
    with pytest.raises(TypeError, match="gate_cap must be a number, not "):
        swiglu_softcap(number, 7.0)
    with pytest.raises(TypeError, match="up_limit must be a number, not "):
        swiglu_limit(7.0, number)


@pytest.mark.parametrize(
    "inside", ["", "7", "7,", "7, x", "7 7", "7, 7, 1, 0, 0", "gate_max=7, up_limit=7", "(7, 7)"]
)
def test_not_two_to_four_numbers(inside):
    with pytest.raises(ValueError, match=r"but swiglu_limit takes 2 to 4 numbers$"):
        get_activation(f"swiglu_limit({inside})")


@pytest.mark.parametrize("inside", ["", "7", "7,", "7, x", "7, 7, 1", "gate_cap=7, up_cap=7"])
def test_not_two_numbers(inside):
    with pytest.raises(ValueError, match=r"but swiglu_softcap takes 2 numbers$"):
        get_activation(f"swiglu_softcap({inside})")


@pytest.mark.parametrize(
    "name", ["", "swiglu_limit", "swiglu_limit(7, 7", "swiglu_limit(7, 7) ", "geglu(7, 7)", "SwiGLU"]
)
def test_unknown_names(name):
    with pytest.raises(ValueError, match=r"^unknown activation '.*known: geglu, .*, and what swiglu_limit"):
        get_activation(name)


@pytest.mark.skipif(interpret, reason="the interpreter has no keys")
@pytest.mark.parametrize("functions", ["triton", "gluon"])
def test_kernels_of_their_own(functions):
    """Triton finds a compiled kernel by these keys."""
    pytest.importorskip("triton")
    from moe_aiter.kernels.hopper.epilogue import kernel_functions

    names = LIMITED, "swiglu_limit(2.5, 1.5, 0.75, -0.25)", CAPPED, "swiglu_softcap(2.0, 3.0)", "swiglu_oai"
    names += ("swiglu",)
    of = [get_activation(name) for name in names]
    found = [act.triton_fns if functions == "triton" else kernel_functions(act) for act in of]
    assert len({fns["UP"].cache_key for fns in found}) == len(names)
    assert len({fns["ACTIVATION"].cache_key for fns in found[1:]}) == len(found[1:])
    again = get_activation("swiglu_limit(2.5, 1.5, .75, -.5)")
    assert (again.triton_fns if functions == "triton" else kernel_functions(again)) is found[0]
