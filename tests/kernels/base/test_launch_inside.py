"""What a bound kernel gives the function behind Triton's launcher is what the launcher itself would give."""

import gc
import itertools
from types import SimpleNamespace

import pytest
import torch
from layers.test_moe_on_gpu import capture

from moe_aiter import MoE
from moe_aiter.kernels.base import launch as launches
from moe_aiter.kernels.base.launch import Descriptor, bind_kernel
from moe_aiter.op import invalidate_decisions
from moe_aiter.private_api import launch_inside

triton = pytest.importorskip("triton")
nvidia = pytest.importorskip("triton.backends.nvidia.driver")
pytestmark = pytest.mark.no_interpreter
T, B = torch.bfloat16, 64
GPUS = itertools.count(99)  # a new one for each test: Triton keeps the kernels of each


class Recorder:
    """The function behind the launchers of all kernels, which keeps what it is given."""

    def __init__(self):
        self.calls, self.fills = [], 0

    def __call__(self, *args):
        self.calls.append(args)

    def fill(self, *args):
        """Return a map that says what it was made of."""
        self.fills += 1
        return tuple(tuple(a) if isinstance(a, (list, tuple)) else a for a in args)

    def last(self):
        """What the last launch gave, in one list, with addresses for tensors."""
        args = self.calls[-1]
        args = [*args[:-1], *args[-1]] if isinstance(args[-1], (list, tuple)) else [*args]
        args = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
        return [None if type(a).__name__ in ("LazyDict", "HookChain") else a for a in args]  # of hooks


@pytest.fixture
def behind(monkeypatch):
    """A GPU of Hopper's kind that launches nothing, and its Recorder."""
    recorder, gpu = Recorder(), next(GPUS)
    utils = SimpleNamespace(
        launch=recorder, fill_tma_descriptor=recorder.fill, fill_tma_descriptor_tiled=recorder.fill,
        load_binary=lambda *_: (1, 77, 32, 0, 1024), build_signature_metadata=lambda _: b"",
        get_device_properties=lambda _: {"max_shared_mem": 2**18},
    )  # fmt: skip

    class Driver(nvidia.CudaDriver):
        def __init__(self):
            self.utils, self.launcher_cls = utils, nvidia.CudaLauncher
            self.get_current_device, self.get_current_stream = lambda: gpu, lambda device: 5
            self.get_device_capability, self.set_current_device = lambda device: (9, 0), lambda device: None

        def get_current_target(self):
            return triton.backends.compiler.GPUTarget("cuda", 90, 32)

        def get_active_torch_device(self):
            return torch.device("cpu")

    for name in ("PyKernelArg", "ARG_CONSTEXPR", "ARG_KERNEL", "ARG_TUPLE"):  # of Triton 3.7 and newer
        monkeypatch.setattr(nvidia, name, lambda name=name, **fields: (name, *fields.values()), raising=False)
    build = lambda *_, **__: SimpleNamespace(launch=recorder)  # noqa: E731  of Triton 3.6, a launcher a kernel
    monkeypatch.setattr(nvidia, "compile_module_from_src", build, raising=False)
    monkeypatch.setattr(nvidia, "library_dirs", lambda: [], raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(launches, "current_device", lambda: gpu)
    monkeypatch.setattr(launches, "current_stream", lambda device: 5)
    launches.MAPPED.clear()
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(), raising=False)
    yield recorder
    launches.MAPPED.clear()


@triton.jit
def copy_kernel(x, near, y, nothing, numbers, scale, N, BLOCK: triton.language.constexpr):
    tile = x.load([0, 0]) + near.load([0, 0, 0]).reshape(BLOCK, BLOCK)
    triton.language.store(y + N + numbers[1], triton.language.sum(tile) * scale)


@triton.jit
def plain_kernel(x, N, y, BLOCK: triton.language.constexpr):
    triton.language.store(y + N, triton.language.load(x + BLOCK))


def box(x, *box):
    return Descriptor(x, tuple(x.shape), x.stride(), box)


def arguments(x, y, scale=2.0):
    return box(x, B, B), box(x[None], 1, B, B), y, None, (8, 24), scale, 8


def draw():
    return torch.zeros(2 * B, 2 * B, dtype=T), torch.zeros(64, dtype=T)


def of_triton(behind, kernel, *args, **constants):
    """What Triton's own launcher gives."""
    kernel.run(*args, grid=(3, 1, 1), warmup=False, **constants)
    return behind.last()


def bound(kernel):
    launch = bind_kernel(kernel, (3,), BLOCK=B)
    assert isinstance(launch, launches.BoundKernel)
    return launch


def test_descriptors_become_what_triton_makes_of_them(behind):
    launch, first = bound(copy_kernel), draw()
    launch(*arguments(*first))
    for scale in (3.0, 4.0):
        args = arguments(*draw(), scale)
        launch(*args)
        given = behind.last()
        assert given[:4] == [3, 1, 1, 5] and given == of_triton(behind, copy_kernel, *args, BLOCK=B)
    run, _, tensors, boxes, *_ = launch.compiled
    assert run is behind and tensors == [2] and [n for n, *_ in boxes] == [1, 0]


def test_a_kernel_without_descriptors(behind):
    launch = bound(plain_kernel)
    for _ in range(3):
        x, y = draw()
        launch(x, 8, y)
    assert launch.compiled[0] is behind
    assert behind.last() == of_triton(behind, plain_kernel, x, 8, y, BLOCK=B)


def test_a_map_is_made_once_for_an_address(behind):
    launch, (x, y) = bound(copy_kernel), draw()
    for fills in (2, 4, 4, 4):  # of Triton's own launch, and of the first past it
        launch(*arguments(x, y))
        assert behind.fills == fills
    other, _ = draw()
    launch(*arguments(other, y))
    launch(*arguments(x, y))
    assert behind.fills == 6
    narrow = x.as_strided((B, B), x.stride())  # at the same address
    args = arguments(narrow, y)
    launch(*args)
    assert behind.fills == 8 and behind.last() == of_triton(behind, copy_kernel, *args, BLOCK=B)


def test_maps_hold_no_memory_and_are_few(behind, monkeypatch):
    monkeypatch.setattr(launches, "MOST_MAPPED", 4)
    launch, kept = bound(copy_kernel), [draw() for _ in range(6)]
    for x, y in kept:
        launch(*arguments(x, y))
        assert len(launches.MAPPED) <= 4
    gc.collect()
    assert not any(isinstance(a, torch.Tensor) for found in launches.MAPPED.values() for a in found)
    args = arguments(*kept[0])
    launch(*args)
    assert behind.last() == of_triton(behind, copy_kernel, *args, BLOCK=B)


def test_hooks_of_triton_are_called(behind, monkeypatch):
    launch, heard = bound(copy_kernel), []
    for hook in (None, heard.append, None):
        monkeypatch.setattr(launches.launch_hooks, "launch_enter_hook", hook)
        launch(*arguments(*draw()))
        assert (heard.append in behind.calls[-1]) == (hook is not None)


@pytest.mark.parametrize("change", ["scratch", "class", "launch", "arguments"])
def test_another_launcher_is_called_as_it_is(behind, monkeypatch, change):
    """One that allocates, of another class, that calls another function or that adds to the arguments."""
    compiled = copy_kernel.run(*arguments(*draw()), grid=(3, 1, 1), warmup=False, BLOCK=B)
    run, own = compiled.run, type(compiled.run)
    assert launch_inside(compiled) is not None
    if change == "scratch":
        monkeypatch.setattr(run, "global_scratch_size", 8)
    elif change == "class":
        monkeypatch.setattr(nvidia, "CudaLauncher", type("Another", (), {}))
    elif change == "launch":
        monkeypatch.setattr(run, "launch", lambda *args, inner=run.launch: inner(*args))
    else:
        call = own.__call__
        monkeypatch.setattr(own, "__call__", lambda self, *args: call(self, *args, 1))
    launch_inside.cache_clear()
    assert launch_inside(compiled) is None
    if change in ("class", "launch"):
        launch, (x, y) = bound(copy_kernel), draw()
        for _ in range(2):
            launch(*arguments(x, y))
        assert launch.compiled[0] is run
        assert behind.last() == of_triton(behind, copy_kernel, *arguments(x, y), BLOCK=B)


def test_a_kernel_of_hopper(behind, monkeypatch):
    """Its descriptors are bound, and have the layouts of Gluon."""
    from moe_aiter.kernels.hopper import gmm

    monkeypatch.setattr(gmm, "num_programs", lambda x: 3)
    w, sizes = torch.zeros(4, 256, 128, dtype=T), torch.full((4,), 128, dtype=torch.int32)
    new = lambda: (torch.zeros(512, 128, dtype=T), torch.zeros(512, 256, dtype=T))  # noqa: E731
    (out, x), made = new(), []
    bind = lambda *args, **constants: made.append(bind_kernel(*args, **constants)) or made[0]  # noqa: E731
    monkeypatch.setattr(gmm, "bind_kernel", bind)
    product = gmm.bind_product(x, w, (512, 256, 4), T)
    for _ in range(3):
        out, x = new()
        product(out, x, w, sizes)
    (launch,) = made
    past = behind.last()
    assert launch.compiled[0] is behind and behind.calls[-1] is not behind.calls[0]
    launch.compiled = None  # so that the next goes through Triton
    product(out, x, w, sizes)
    assert behind.last() == past


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_steps_on_a_gpu_have_the_same_bits(monkeypatch, no_debug, graph):
    """With other tensors at old addresses, on another stream and in a CUDA graph."""
    moe = MoE(num_experts=8, top_k=2, hidden=256, intermediate=128, device="cuda", dtype=T)

    def steps():
        invalidate_decisions()  # so that each kernel is bound anew
        torch.manual_seed(0)
        found = []
        for tokens in (512, 1024, 512, 512):
            x = torch.randn(tokens, 256, device="cuda", dtype=T, requires_grad=True)

            def step(x=x):
                return torch.autograd.grad(moe(x).square().sum(), (x, moe.experts.gate_up))

            if graph:
                captured, gradients = capture(step)
                captured.replay()
            else:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    step()  # the first launches, which compile
                torch.cuda.current_stream().wait_stream(side)
                gradients = step()
            found += [g.clone() for g in gradients]
        return found

    past = steps()
    assert launches.MAPPED or torch.cuda.get_device_capability()[0] != 9
    monkeypatch.setattr(launches, "launch_inside", lambda compiled: None)
    for a, b in zip(past, steps(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
