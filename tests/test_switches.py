"""What can be switched while a program runs is switched, and says what it may be switched to."""

import dataclasses
import logging
import os
import subprocess
import sys

import pytest
import torch

from moe_aiter import switches as s
from moe_aiter.compat import aiter
from moe_aiter.compat.aiter.ops.triton.gmm import gmm
from moe_aiter.compat.aiter.tuned_gemm import gemm_a16w16
from moe_aiter.config import CHOICES
from moe_aiter.switches import computed, float32_products, switches


@pytest.fixture(autouse=True)
def restored():
    before = dataclasses.asdict(switches), s.get_log_level(), aiter.get_cache_size()
    yield
    for name, value in before[0].items():
        setattr(switches, name, value)
    s.set_log_level(before[1])
    aiter.set_cache_size(before[2])


@computed
def product(x, w, *, out_dtype=None):
    seen.append((x.dtype, w.dtype, s.float32_precision(), torch.backends.cuda.matmul.fp32_precision))
    return (x @ w.T).to(out_dtype or x.dtype)


seen = []


@pytest.fixture
def operands():
    seen.clear()
    return torch.randn(5, 7, requires_grad=True), torch.randn(3, 7, requires_grad=True)


@pytest.mark.parametrize("name, dtype", [("FP16", torch.float16), ("BF16", torch.bfloat16)])
def test_float32_is_computed_in_16_bits(name, dtype, operands):
    s.set_default_precision(name)
    out = product(*operands)
    assert seen[0][:2] == (dtype, dtype) and out.dtype == torch.float32
    x, w = (t.detach().to(dtype).requires_grad_() for t in operands)
    expected = (x @ w.T).float()
    assert torch.equal(out, expected)
    dout = torch.randn_like(out)
    for got, best in zip(
        torch.autograd.grad(out, operands, dout), torch.autograd.grad(expected, (x, w), dout), strict=True
    ):
        assert torch.equal(got, best.float())


@pytest.mark.parametrize("name", ["FP16", "BF16", "TF32", "FP32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_computed_as_they_are(name, dtype, operands):
    s.set_default_precision(name)
    out = product(*(t.to(dtype) for t in operands))
    assert seen[0][0] == dtype and out.dtype == dtype


@pytest.mark.parametrize("name, word", [("TF32", "tf32"), ("FP32", "ieee")])
def test_float32_products_have_the_precision_forward_and_backward(name, word, operands):
    s.set_default_precision(name)
    before = torch.backends.cuda.matmul.fp32_precision
    states = []
    x, w = operands
    x.register_hook(lambda g: states.append(torch.backends.cuda.matmul.fp32_precision))

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            states.append((torch.backends.cuda.matmul.fp32_precision, s.float32_precision()))
            return dx

    out = computed(lambda x, w: product.__wrapped__(Watched.apply(x), w))(x, w)
    assert seen[0][2:] == (word, word) and torch.backends.cuda.matmul.fp32_precision == before
    out.sum().backward()
    assert states == [(word, word), before]
    torch.testing.assert_close(x.grad, w.detach().sum(0).expand(5, 7))
    torch.testing.assert_close(w.grad, x.detach().sum(0).expand(3, 7))


def test_a_second_derivative_through_torchs_switches_is_refused(operands):
    s.set_default_precision("FP32")
    x, w = operands
    (dx,) = torch.autograd.grad((product(x, w) ** 2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_without_tensor_cores_all_is_float32(dtype, operands):
    s.enable_tensor_cores(False)
    s.set_default_precision("BF16")  # does not count then
    out = product(*(t.to(dtype) for t in operands))
    assert seen[0] == (torch.float32, torch.float32, "ieee", "ieee") and out.dtype == dtype
    best = operands[0].to(dtype).double() @ operands[1].to(dtype).double().T
    torch.testing.assert_close(out, best.to(dtype))


def test_a_dtype_that_is_asked_for_stays(operands):
    s.set_default_precision("FP16")
    assert product(*operands, out_dtype=torch.float64).dtype == torch.float64


def test_autocast_does_not_change_what_is_asked_for(operands):
    s.set_default_precision("FP16")
    with torch.autocast("cpu", torch.bfloat16):
        out = product(*operands)
    assert torch.equal(out, (operands[0].half() @ operands[1].half().T).float())


def test_a_graph_ends_before_a_call_that_sets_switches_of_torchs(operands):
    graphs, compiling = [], []

    def product(x, w):
        compiling.append(torch.compiler.is_compiling())
        return x @ w.T

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def model(x, w):
        return computed(product)(x.sin(), w).cos()

    s.set_default_precision("FP32")
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(model, backend=keep)(*operands), model(*operands))
    assert not any(compiling) and len(graphs) > 1
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="switches of torch's are set around the call"):
        torch.compile(model, backend=keep, fullgraph=True)(*operands)


def test_16_bits_compile_into_one_graph(operands):
    s.set_default_precision("BF16")
    compiled = torch.compile(computed(lambda x, w: x @ w.T), backend="aot_eager", fullgraph=True)
    low = compiled(*operands)
    assert torch.equal(low, product(*operands))
    s.set_default_precision(None)  # the graph notices
    exact = compiled(*operands)
    assert torch.equal(exact, product(*operands)) and not torch.equal(exact, low)


def test_torchs_switches_are_put_back_after_an_error():
    before = [switch.fp32_precision for switch in s.FLOAT32_SWITCHES], s.float32_precision()
    with pytest.raises(KeyError), float32_products("tf32"):
        assert torch.backends.cudnn.conv.fp32_precision == "tf32"
        raise KeyError
    assert ([switch.fp32_precision for switch in s.FLOAT32_SWITCHES], s.float32_precision()) == before


def test_each_switch_is_read_back():
    for name, values in {"tensor_cores": (False, True), "fusion": (False, True)}.items():
        for value in values:
            getattr(aiter, f"enable_{name}")(value)
            assert getattr(aiter, f"{name}_enabled")() is value
    aiter.enable_dynamic_shapes(True)
    assert aiter.dynamic_shapes_enabled() is True
    for precision in ("FP16", "BF16", "TF32", "FP32", None):
        aiter.set_default_precision(precision)
        assert aiter.get_default_precision() == precision
    aiter.set_log_level("info")
    aiter.set_cache_size(5)
    assert (aiter.get_log_level(), aiter.get_cache_size()) == ("INFO", 5)


@pytest.mark.parametrize(
    "function, value, error, message",
    [
        ("set_default_precision", "INT8", ValueError, "precision is 'INT8'; it takes FP16, BF16"),
        ("set_default_precision", "", ValueError, "precision is ''; it takes FP16"),
        ("set_log_level", "LOUD", ValueError, "level is 'LOUD'; it takes DEBUG, INFO"),
        ("set_log_level", 10, ValueError, "level is 10; it takes DEBUG, INFO"),
        ("set_cache_size", -1, ValueError, "-1 MB"),
        ("set_cache_size", "1024", TypeError, "not str"),
        ("enable_fusion", 1, TypeError, "not int"),
        ("enable_tensor_cores", "no", TypeError, "not str"),
        ("enable_dynamic_shapes", None, TypeError, "not NoneType"),
    ],
)
def test_what_is_unknown_is_refused(function, value, error, message):
    before = dataclasses.asdict(switches)
    with pytest.raises(error, match=message):
        getattr(aiter, function)(value)
    assert dataclasses.asdict(switches) == before


SCRIPT = """
from moe_aiter.compat import aiter
from moe_aiter.compat.aiter.ops.triton.gmm import gmm
from moe_aiter.compat.aiter.tuned_gemm import gemm_a16w16
from moe_aiter.config import CHOICES
from moe_aiter.op import log
from moe_aiter.config import settings
assert aiter.get_log_level() == "INFO" and aiter.get_cache_size() == 7 and not aiter.fusion_enabled()
assert aiter.get_default_precision() == "BF16" and not aiter.tensor_cores_enabled() and settings.debug
log.info("shown")
aiter.set_log_level("WARNING")
log.info("hidden")
aiter.enable_fusion(True)
assert aiter.fusion_enabled()
"""


def test_the_environment_is_where_a_program_starts_and_a_call_wins():
    given = {"LOG_LEVEL": "INFO", "CACHE_SIZE": "7", "ENABLE_FUSION": "0", "DEFAULT_PRECISION": "BF16"}
    given |= {"ENABLE_TENSOR_CORES": "0", "DEBUG": "1"}
    env = {k: v for k, v in os.environ.items() if not k.startswith("MOE_AITER_")}
    env |= {f"AITER_{name}": value for name, value in given.items()}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "moe_aiter: shown\n")


def test_debug_says_more_than_info(device, caplog):
    """Which backend runs, once for inputs of a kind, and on a GPU with which tile."""
    x, w, sizes = torch.rand(13, 4), torch.rand(2, 4, 6), torch.tensor([5, 6])
    said = {}
    for rows, level in enumerate((logging.INFO, logging.DEBUG), start=11):
        caplog.clear()
        with caplog.at_level(level, "moe_aiter"):
            for _ in range(2):
                gmm(x[:rows].to(device), w.to(device), sizes.to(device))
        said[level] = [message for message in caplog.messages if message.startswith("gmm on")]
    assert not said[logging.INFO]
    (message,) = said[logging.DEBUG]
    assert f"gmm on {x.to(device).device}: " in message and "(12, 4) torch.float32" in message
    assert message.split()[4] in CHOICES["backend"]
    assert any(": tile " in text for text in caplog.messages) == (" triton for " in message)


def test_a_program_with_handlers_of_its_own_sees_each_line_once():
    script = "import logging; logging.basicConfig(level=0, format='%(message)s')\n" + (
        "from moe_aiter.op import log\nfrom moe_aiter.switches import log\nlog.warning('one line')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "one line\n")


@pytest.mark.parametrize("precision", ["FP16", "TF32"])
def test_integers_with_scales_of_floats_are_computed_as_they_are(precision):
    x, w = torch.ones(2, 16, dtype=torch.int8), torch.ones(3, 16, dtype=torch.int8)
    s.set_default_precision(precision)
    out = gemm_a16w16(x, w, scale_a=torch.full((2,), 0.5), scale_b=torch.ones(3))
    assert out.dtype == torch.bfloat16 and (out == 8).all()


def test_scales_keep_their_precision():
    x, w = torch.randn(2, 16), torch.randn(3, 16)
    s.set_default_precision("FP16")
    out = gemm_a16w16(x, w, scale_a=torch.tensor(1e-10), scale_b=torch.tensor(1e10))
    torch.testing.assert_close(out, x @ w.T, rtol=1e-2, atol=1e-2)


def test_a_result_that_depends_on_nothing_trained_needs_no_gradient():
    a, c = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
    for precision in (None, "TF32"):
        s.set_default_precision(precision)
        assert not aiter.cutlass_gemm(a, a, beta=0.0, c=c).requires_grad


def test_a_strangers_text_is_logged_without_commands_to_the_terminal():
    record = logging.LogRecord("moe_aiter", logging.WARNING, "", 0, "a %s", ("\x1b[31m\nb",), None)
    assert s.Console().format(record) == r"moe_aiter: a \x1b[31m\nb"
