"""The C++ extension itself: arithmetic, checks, threads and build; and the package without it."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from moe_aiter.config import Settings
from moe_aiter.kernels.base import host

pytestmark = pytest.mark.no_interpreter
REPOSITORY = pathlib.Path(__file__).parents[3]
built = pytest.mark.skipif(host.ext is None, reason="the C++ extension is not built")


def call(name, *arguments):
    return getattr(host.ext, name)(*arguments)


def bits(x):
    """float32 -> the nearest bfloat16, as the extension sees it."""
    return host.array(torch.from_numpy(x).bfloat16())


@built
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "relu2"])
def test_activations_are_as_exact_as_torch(activation):
    """In the worst case, against float64: exp and erf are polynomials of our own."""
    z = np.concatenate([np.linspace(-6, 20, 200_001), np.linspace(-1, 1, 200_001)]).astype(np.float32)[None]
    out, slope, ones = np.empty_like(z), np.empty_like(z), np.ones_like(z)
    call("glu", z, out, activation, [], False, False, 2)
    call("glu_backward", ones, z, slope, activation, [], False, False, 2)
    x = torch.from_numpy(z).double().requires_grad_()
    fn = {"relu2": lambda x: torch.relu(x) ** 2}.get(activation) or getattr(torch.nn.functional, activation)
    want = fn(x)
    (want_slope,) = torch.autograd.grad(want.sum(), x)
    x = torch.from_numpy(z).requires_grad_()
    torch_out = fn(x)
    (torch_slope,) = torch.autograd.grad(torch_out.sum(), x)
    for got, theirs, truth in ((out, torch_out, want), (slope, torch_slope, want_slope)):
        errors = [
            (y.detach() - truth).abs() / truth.abs().clamp(min=1 / 16)
            for y in (torch.from_numpy(got), theirs)
        ]
        assert errors[0].max() <= 1.2 * errors[1].max() + torch.finfo(torch.float32).eps / 2


@built
def test_bfloat16_rounds_to_nearest_even():
    """Every bfloat16 and the three float32 values between it and the next, through a weighted copy."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    floats = np.concatenate([upper + low for low in (0, 0x7FFF, 0x8000, 0x8001)]).view(np.float32)
    # x * 1 is exact only in float32, so the rounding is seen where float32 becomes bfloat16: in unpermute
    ones, weights = bits(np.ones((len(floats), 1), np.float32)), floats[:, None].copy()
    rank = np.arange(len(floats), dtype=np.int32)[:, None]
    out = np.empty((len(floats), 1), np.uint16)
    call("unpermute", ones, rank, weights, out, 2)
    got = torch.from_numpy(out).view(torch.bfloat16).flatten()
    want = torch.from_numpy(floats).bfloat16()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[~got.isnan()], want[~want.isnan()])


@built
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads_gives_the_same_bits(threads):
    rng = np.random.default_rng(0)
    T, k, H = 400, 4, 300
    x, rows = bits(rng.standard_normal((T, H), np.float32)), bits(rng.standard_normal((T * k, H), np.float32))
    order = np.arange(T * k, dtype=np.int32)  # rows of one token in turn, which must not be split
    shuffled = rng.permutation(T * k).astype(np.int32)
    rank = shuffled.argsort().astype(np.int32).reshape(T, k)
    weights = rng.random((T, k), np.float32)
    results = []
    for n in (1, threads):
        out = [np.empty((T * k, H), np.uint16), np.zeros((T, H), np.float32), np.empty((T, H), np.uint16)]
        out += [np.empty((T, k), np.float32), np.zeros(H, np.float32), np.zeros((T, H), np.float32)]
        call("gather", x, shuffled, weights, out[0], k, n)
        call("accumulate", rows, order, weights, out[1], k, n)
        call("unpermute", rows, rank, weights, out[2], n)
        call("row_dots", rows, x, rank, out[3], n)
        call("column_sums", rows, shuffled, weights, out[4], n)
        call("accumulate", rows, shuffled, weights, out[5], k, n)
        results.append(out)
    for one, many in zip(*results, strict=True):
        assert np.array_equal(one, many)


@built
def test_calls_from_several_python_threads():
    """The GIL is released, and the loops share torch's threads."""
    x = np.random.default_rng(1).standard_normal((600, 512)).astype(np.float32)
    want, wrong = np.empty_like(x), []
    call("glu", x, want, "gelu", [], False, False, 1)

    def work():
        out = np.empty_like(x)
        for _ in range(20):
            call("glu", x, out, "gelu", [], False, False, 2)
            if not np.array_equal(out, want):
                wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def good_arguments():
    """For each function, arguments that it takes."""
    f, i = np.float32, np.int32
    x, rows, order = np.ones((4, 8), f), np.ones((8, 8), f), np.arange(8, dtype=i)
    rank = order.reshape(4, 2).copy()
    weights, z, a = np.ones((4, 2), f), np.ones((8, 6), f), np.ones((8, 3), f)
    return {
        "sort_by_expert": [rank, order.copy(), rank.copy(), np.zeros(8, i)],
        "gather": [x, order, weights, rows, 2, 1],
        "accumulate": [rows, order, weights, x, 2, 1],
        "unpermute": [rows, rank, weights, x, 1],
        "row_dots": [rows, x, rank, weights, 1],
        "column_sums": [rows, order, weights, np.zeros(8, f), 1],
        "glu": [z, a, "silu", [], True, False, 1],
        "glu_backward": [a, z, z.copy(), "silu", [], True, False, 1],
        "weighted_glu_backward": [
            a,
            z,
            order,
            weights,
            z.copy(),
            a.copy(),
            weights.copy(),
            "silu",
            [],
            True,
            False,
            1,
        ],
    }


@built
@pytest.mark.parametrize("name", good_arguments())
def test_wrong_arrays_are_refused(name):
    """Each array in turn with another dtype, layout and size; nothing is converted, nothing is read."""
    arguments = good_arguments()[name]
    call(name, *arguments)
    for i, array in enumerate(arguments):
        if not isinstance(array, np.ndarray):
            continue
        for bad in (array.astype(np.float64), np.repeat(array, 2, -1)[..., ::2]):
            with pytest.raises(TypeError, match="incompatible function arguments"):
                call(name, *arguments[:i], bad, *arguments[i + 1 :])
        with pytest.raises(ValueError, match=r" but .* is |must stay below"):
            call(name, *arguments[:i], array[:-1].copy(), *arguments[i + 1 :])


@built
@pytest.mark.parametrize(
    "name, at, message",
    [
        ("sort_by_expert", 0, "expert_ids holds 8 but num_experts is 8"),
        ("gather", 1, "order holds 8 but must stay below 8"),
        ("accumulate", 1, "order holds 8 but must stay below 8"),
        ("unpermute", 1, "rank holds 8 but must stay below 8"),
        ("row_dots", 2, "rank holds 8 but must stay below 8"),
        ("column_sums", 1, "order holds 8 but must stay below 8"),
        ("weighted_glu_backward", 2, "order holds 8 but must stay below 8"),
    ],
)
def test_indices_past_the_end_are_refused(name, at, message):
    arguments = good_arguments()[name]
    arguments[at].flat[-1] = 8
    with pytest.raises(ValueError, match=message):
        call(name, *arguments)


@built
def test_other_bad_arguments():
    z, a, *_ = good_arguments()["glu"]
    with pytest.raises(ValueError, match="unknown activation tanh"):
        call("glu", z, a, "tanh", [], True, False, 1)
    wrong = ("silu", 1), ("silu_limit", 0), ("silu_limit", 3), ("silu_softcap", 1), ("silu_softcap", 4)
    for activation, numbers in wrong:
        with pytest.raises(ValueError, match=rf"the number of limits.*{numbers}"):
            call("glu", z, a, activation, [1.0] * numbers, True, False, 1)
    a.flags.writeable = False
    with pytest.raises(ValueError, match="not writeable"):
        call("glu", z, a, "silu", [], True, False, 1)
    x, order, weights, rows, *_ = good_arguments()["gather"]
    with pytest.raises(ValueError, match="top_k must be at least 1"):
        call("gather", x, order, weights, rows, 0, 1)


OUT_OF_MEMORY = """
import resource, torch
from moe_aiter import topk
scores = torch.zeros(2, 2**23)  # each of two threads needs 64 MiB for the keys of a row
want = topk(scores, 2)  # starts the threads, which need memory too
pages = int(open("/proc/self/statm").read().split()[0])
_, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**24, hard))
try:
    topk(scores, 2)
except MemoryError:
    print("MemoryError")
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
assert all(map(torch.equal, topk(scores, 2), want))
"""


@built
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="ASan ends a process without memory"
)
def test_out_of_memory_in_a_thread_is_a_python_error():
    """The process lives, and computes again once there is memory."""
    done = run(
        OUT_OF_MEMORY, OMP_NUM_THREADS="2", MOE_AITER_NUM_THREADS="2", MALLOC_MMAP_THRESHOLD_="1048576"
    )
    assert (done.returncode, done.stdout) == (0, "MemoryError\n"), done.stderr


@built
def test_views_leave_storages_resizable():
    """`Tensor.numpy()` does not, and FSDP2 resizes the storages of parameters."""
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.int64):
        x = torch.arange(6).to(dtype).view(2, 3)
        view = host.array(x)
        assert (
            view.shape == (2, 3)
            and view.tolist() == (x.view(torch.uint16) if dtype == torch.bfloat16 else x).tolist()
        )
        view[1, 2] = 0
        assert x[1, 2] == 0
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(x.nbytes)


@built
def test_views_keep_their_memory_and_copy_where_they_must():
    x = torch.arange(6.0).view(2, 3)
    want, view = x.mT.tolist(), host.array(x.mT)
    negative = host.array(torch._neg_view(x))
    del x
    assert view.tolist() == want and negative.tolist() == (-torch.arange(6.0)).view(2, 3).tolist()
    assert host.array(None) is None and host.array(torch.empty(0, 4)).shape == (0, 4)


@built
def test_tensors_without_memory_of_the_cpu_are_refused():
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="elements but no memory"):
        host.array(freed)
    for x in (torch.empty(3, device="meta"), torch.ones(3, dtype=torch.float16)):
        with pytest.raises(TypeError, match=f"takes .* on the CPU, not {x.dtype} on {x.device}"):
            host.array(x)


WITHOUT = """
import logging, sys
sys.modules["moe_aiter._host"] = None  # importing it is now an ImportError
logging.basicConfig(format="%(levelname)s %(message)s")
import torch
import moe_aiter.kernels.rows.permute, moe_aiter.kernels.experts.glu
from moe_aiter.op import IMPLS
from moe_aiter.kernels.experts.cpu import ExpertInputs, expert_loop_op, expert_loop_reference
from moe_aiter.kernels.rows.sort import sort_by_expert
print("imported", file=sys.stderr)
mine = ("sort_by_expert", "permute", "unpermute", "row_dots", "glu", "glu_backward", "expert_loop")
assert not any("host" in IMPLS[op] for op in mine)
for _ in range(2):
    plan = sort_by_expert(torch.randint(0, 4, (9, 2)), 4)
    x, gate_up, down = (torch.randn(s).requires_grad_() for s in ((9, 8), (4, 12, 8), (4, 8, 6)))
    inputs = x, gate_up, None, down, None, torch.rand(9, 2), *plan, "swiglu", False, True, None, None
    out = expert_loop_op(*inputs)[0]
    torch.testing.assert_close(out, expert_loop_reference(ExpertInputs(*inputs))[0])
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (x, gate_up, down))
"""


def run(script, *arguments, **environment):
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, *(["-c", script] if script else []), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=REPOSITORY)


@built
@pytest.mark.parametrize(
    "setting, torch_threads, expected", [(0, 2, 2), (1, 2, 1), (8, 2, 2), (10**12, 1, 1), (3, 1, 1)]
)
def test_the_number_of_threads(setting, torch_threads, expected, monkeypatch):
    monkeypatch.setattr(host, "settings", Settings(num_threads=setting))
    monkeypatch.setattr(torch, "get_num_threads", lambda: torch_threads)
    assert host.num_threads() == expected


FORK = """
import os, signal, torch
from moe_aiter import glu
x = torch.ones(600, 512)
glu(x, "silu")  # by threads, which a child has no share of
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:
    signal.alarm(20)  # ends a child that waits for them
    torch.set_num_threads(1)
    glu(x, "silu")
    os._exit(0)
"""


@built
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_with_one_thread_does_not_wait_for_others():
    done = run(FORK, OMP_NUM_THREADS="2", MOE_AITER_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr


def test_without_the_extension():
    """Everything works, and one warning, not before the first use, says what is missing and how to get it."""
    done = run(WITHOUT)
    assert done.returncode == 0, done.stderr
    first, warning = done.stderr.strip().splitlines()
    assert first == "imported"
    assert warning.startswith("WARNING the C++ extension moe_aiter._host is missing")
    assert "pip install" in warning


def test_the_source_folder_hides_an_installed_extension(tmp_path, monkeypatch):
    """Python in a clone takes the clone's folder, after `pip install .` too: the remedy is another one."""
    distribution = tmp_path / "moe_aiter-0.2.0.dist-info"
    (tmp_path / "moe_aiter").mkdir()
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: moe-aiter\nVersion: 0.2.0\n")
    (distribution / "RECORD").write_text("moe_aiter/_host.so,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "pip install ." in host.remedy(), "the file that is recorded is not there"
    (tmp_path / "moe_aiter/_host.so").touch()
    assert "leave the folder, or build in place" in host.remedy()
    assert str(tmp_path / "moe_aiter") in host.remedy()


@pytest.mark.parametrize("compiler", ["/nowhere/c++", "false"])
def test_the_build_goes_on_without_a_compiler(tmp_path, compiler):
    """No compiler, and one that fails: the build says what the package goes without, and succeeds."""
    for needed in ("setuptools", "pybind11"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    build = ("setup.py", "build_ext", "--build-lib", tmp_path / "lib", "--build-temp", tmp_path / "temp")
    done = run(None, *build, CC=compiler, CXX=compiler)
    assert done.returncode == 0, done.stderr
    assert "moe_aiter._host was not built" in done.stdout + done.stderr
    assert not list(tmp_path.rglob("*.so"))
