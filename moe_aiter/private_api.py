"""Every private name of torch and Triton that the package uses, and what relies on how they work inside.

Each name is looked up once: torch's at import, Triton's when a file that has imported Triton asks.  A name
that the installed version lacks raises ImportError, and checkpoints that work another way RuntimeError; both
errors say which versions work.
"""

import contextlib
import copy
import ctypes
import functools
import importlib
import inspect
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import checkpoint

T = TypeVar("T")
WORKS = {"torch": "2.11 to 2.15", "triton": "3.6 to 3.9"}  # versions whose tests have passed


def versions(package: str) -> str:
    """Say which version of torch or Triton is installed, and which ones work."""
    installed = importlib.import_module(package).__version__
    return f"{package} {installed} is installed, moe_aiter works with {package} {WORKS[package]}"


def find(*names: str) -> Any:
    """Return what the first of these full names stands for that the installed version has."""
    for name in names:
        package, _, path = name.partition(".")
        with contextlib.suppress(AttributeError):
            return operator.attrgetter(path)(importlib.import_module(package))
    raise ImportError(f"there is no {' nor '.join(names)}: {versions(package)}")


# tensors and ops

# how often a tensor has changed in place
version_of: Callable[[Tensor], int] = find("torch.Tensor._version").__get__
is_view = find("torch.Tensor._is_view")
coo_indices = find("torch.Tensor._indices")  # of a tensor that need not be coalesced
coo_values = find("torch.Tensor._values")
is_alias = find("torch._C._is_alias_of")  # whether two tensors have one storage
tree_leaves = find("torch.utils._pytree.tree_leaves")
addmm_activation = find("torch.ops.aten._addmm_activation")
attention_flash = find("torch.ops.aten._flash_attention_forward")
attention_math: Callable[..., tuple[Tensor, Tensor]] = find(
    "torch.ops.aten._scaled_dot_product_attention_math"
)
# the number of the kernel that torch would run
attention_choice: Callable[..., int] = find("torch._fused_sdp_choice")
softmax_gradient = find("torch.ops.aten._softmax_backward_data")
LINEAR = find("torch.nn.functional.linear")  # also while `patch_linear` has another in its place
int8_product = find("torch._int_mm")
assert_async = find("torch._assert_async")  # of a tensor with one bool, which the host does not wait for
scaled_product = find("torch._scaled_mm")


def arguments_of(op) -> list:
    """Return the arguments in the schema of one of torch.ops."""
    return op._schema.arguments


# oneDNN, which torch for Apple's CPUs lacks

ONEDNN = torch.backends.mkldnn.is_available()
FAST = {
    torch.bfloat16: ONEDNN and find("torch.ops.mkldnn._is_mkldnn_bf16_supported")(),
    torch.float16: ONEDNN and find("torch.ops.mkldnn._is_mkldnn_fp16_supported")(),
}
onednn_linear = ONEDNN and find("torch.ops.mkldnn._linear_pointwise")  # F.linear, of float32 too


def fast_on_cpu(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this dtype on this CPU.  torch's own products of 16-bit floats are slow."""
    return FAST.get(dtype, True)


# whether oneDNN multiplies 16-bit floats by tiles of 16 rows and 32 numbers
AMX = find("torch.cpu._is_amx_tile_supported")()


# GPUs, of which a torch for CPUs alone knows nothing

GPU = torch.version.cuda or torch.version.hip
current_device: Callable[[], int] = find("torch._C._cuda_getDevice") if GPU else None
current_stream = find("torch._C._cuda_getCurrentRawStream") if GPU else None  # a number, of a device's index


# process groups, which a torch without distributed lacks


def process_group(name: str) -> "torch.distributed.ProcessGroup":
    """Return the process group of this name."""
    return find("torch.distributed.distributed_c10d._resolve_process_group")(name)


def symmetric_memory() -> Any:
    """Return the module with `empty` and `rendezvous`: memory of GPUs that other ranks can write."""
    importlib.import_module("torch.distributed._symmetric_memory")  # torch does not import it by itself
    return find("torch.distributed._symmetric_memory")


def flattened(mesh, name: str):
    """Return all ranks of a mesh as one axis of this name; DTensors on `mesh` then need one collective."""
    path = "torch.distributed.device_mesh.DeviceMesh"
    return find(f"{path}.flatten", f"{path}._flatten")(mesh, name)


# what is at work in this thread

dispatch_modes = find("torch._C._len_torch_dispatch_stack")  # how many
any_autocast = find("torch._C._is_any_autocast_enabled")
innermost_transform = find("torch._C._functorch.peek_interpreter_stack")  # of torch.func; None without one
transforms = find("torch._C._functorch.get_interpreter_stack")  # None without one
includes_key = find("torch._C._dispatch_tls_is_dispatch_key_included")
TransformType = find("torch._C._functorch.TransformType")
GRADIENTS_BATCHED = find("torch._C._dispatch_key_parse")("VmapMode")
find("torch.autograd.forward_ad._current_level")
dual_level: Callable[[], int] = functools.partial(
    operator.attrgetter("_current_level"), forward_ad
)  # -1 without forward-mode AD
# whether torch.autograd.grad runs backward for many gradients at once, as jacobian(vectorize=True)
is_batching_gradients: Callable[[], bool] = functools.partial(includes_key, GRADIENTS_BATCHED)


def is_batched() -> bool:
    """Whether a vmap is at work."""
    levels = transforms() or ()
    return is_batching_gradients() or any(level.key() == TransformType.Vmap for level in levels)


def is_differentiated(inputs: tuple) -> bool:
    """Whether torch.func differentiates, or one of these inputs has a tangent of forward-mode AD."""
    levels = transforms() or ()
    return any(level.key() in (TransformType.Grad, TransformType.Jvp) for level in levels) or (
        dual_level() >= 0
        and any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in inputs)
    )


# modules

any_global_hook = find("torch.nn.modules.module._has_any_global_hook")
REPLICA = "_is_replica"  # an attribute of the copies that nn.DataParallel makes
SAME = "does_the_same"
MOVE = "_apply"  # the method behind `to`, `cuda`, `half` and so on
COMPILED = "_orig_mod"  # where the module that torch.compile returns has the original
WRAPPERS = {COMPILED, "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}  # where torch's wrappers have it


def check_formats(names: list[str], inputs: tuple) -> None:
    """Refuse torchao's tensors: those for training give an op their numbers, and torchao's recipe is lost."""
    for name, value in zip(names, inputs, strict=False):
        if is_of_torchao(value):
            raise TypeError(
                f"{name} is a {type(value).__name__} of torchao, a format that no kernel of moe_aiter reads: "
                "leave its module out of torchao's quantize_ (filter_fn). MoE(fp8=...) trains with 8-bit "
                "products; moe_aiter.quantize converts experts to 8 or 4 bits"
            )


def is_of_torchao(value: object) -> bool:
    """Whether it is a tensor of torchao: of 8 bits or fewer, or one whose products shall be."""
    return (
        isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter) and is_torchaos(type(value))
    )


def outside_of_dynamo(fn: Callable[..., T]) -> Callable[..., T]:
    """Let Dynamo call a function of constants, and not read it: it misreads names of functions and modules.

    torch.compiler.assume_constant_result does the same, but imports Dynamo.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


@outside_of_dynamo
def is_torchaos(kind: type) -> bool:
    return kind.__module__.startswith("torchao.")


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters of a module alone, by name."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers of a module alone, by name."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the modules directly below a module, by name."""
    return module._modules


def parameter_of(t: Tensor) -> Tensor:
    """Return the sharded parameter whose `to_local()` made `t`, and another tensor as it is."""
    if t.grad_fn is None or torch.compiler.is_compiling() or len(t.grad_fn.next_functions) != 1:
        return t
    p = getattr(t.grad_fn.next_functions[0][0], "variable", None)  # of a leaf's AccumulateGrad
    local = getattr(p, "_local_tensor", None)
    return t if local is None or local.data_ptr() != t.data_ptr() or local.shape != t.shape else p


def hooks_before(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Return the hooks that run before `forward`, by their keys."""
    return module._forward_pre_hooks


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of this module runs hooks of its own."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def is_changed(module: nn.Module, methods: tuple) -> bool:
    """Whether a call of this module runs anything but these `methods`: its class's __call__ and forward.

    An own `forward` with the attribute SAME does what that of the class does.
    """
    kind, forward = type(module), vars(module).get("forward")
    own = (kind.__call__, kind.forward) != methods or not (forward is None or hasattr(forward, SAME))
    return own or has_hooks(module) or any_global_hook() or module._compiled_call_impl is not None


def in_fsdp(module: nn.Module) -> bool:
    """Whether FSDP2 shards a unit that has this module."""
    return getattr(module, "_is_fsdp_managed_module", False)


def fsdp_groups(state: Any) -> list[Any]:
    """Return the groups of parameters of a module that FSDP2 shards, of which torch 2.11 has one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in ([state._fsdp_param_group] if groups is None else groups) if g is not None]


def forget_fsdp(unit: nn.Module, module: nn.Module, name: str) -> None:
    """Let FSDP2 leave a parameter of a module alone, sharded as it is, if it is one of `unit`."""
    state = unit._get_fsdp_state()
    for group in fsdp_groups(state):
        found = [(p, p._module_info) for p in group.fsdp_params]
        forget(group, [p for p, at in found if at.module is module and at.param_name == name])
    kept = [group for group in fsdp_groups(state) if group.fsdp_params]  # FSDP2 cannot gather an empty one
    keep_groups(state, kept)


def forget(group: Any, params: list[Any]) -> None:
    for p in params:  # or hooks of state_dict and load_state_dict would look for them
        p._post_load_hook_handle.remove()
    group.fsdp_params = [p for p in group.fsdp_params if p not in params]


def leave_fsdp(module: nn.Module) -> None:
    """Let FSDP2 gather the parameters of a module once more, and forget them."""
    module.unshard()
    state = module._get_fsdp_state()
    for group in fsdp_groups(state):
        forget(group, group.fsdp_params)
    keep_groups(state, [])


def keep_groups(state: Any, kept: list[Any]) -> None:
    """Let FSDP2 know only these groups of parameters of a module."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        state._fsdp_param_group = kept[0] if kept else None
    else:
        groups[:] = kept


# the compiler, which takes a second to import


def is_exporting() -> bool:
    """Whether torch.export runs.  torch.compiler.is_exporting is True in all that torch 2.11 compiles."""
    return torch.compiler._is_exporting_flag


def outside_of_graph(reason: str, fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call `fn`.  A compiled graph ends before it; with `fullgraph=True` the error says this reason."""
    if not torch.compiler.is_compiling():
        return fn(*args, **kwargs)
    torch._dynamo.graph_break(msg=reason)
    # as a decorator `disable` would import the compiler with this file
    return torch.compiler.disable(fn)(*args, **kwargs)


# objects of a thread, which torch hands on to the threads of its backward passes

_lock = threading.Lock()
is_stashed = find("torch._C._is_key_in_tls")
stashed = find("torch._C._get_obj_in_tls")
_stash = find("torch._C._stash_obj_in_tls")


def stash(key: str, value) -> None:
    """Set a thread-local object of torch's."""
    _stash(key, value)
    if steals():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@functools.cache  # not at import: while a thread with a stash ends, the end of the program aborts
def steals() -> bool:
    """Whether torch drops a reference to a stashed object that it never took, as torch 2.11 does."""
    probe = object()
    references = sys.getrefcount(probe)
    _stash("moe_aiter.probe", probe)
    stolen = sys.getrefcount(probe) == references
    if stolen:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return stolen


class Scoped(Generic[T]):
    """A value that holds inside a `with` block: in its thread, and in the backward passes that it starts.

    No threading.local or ContextVar: autograd runs CUDA gradients on threads of its own.  torch hands them
    the thread-local objects of the thread that called backward.
    """

    def __init__(self, name: str, default: T):
        self.key, self.default = f"{__package__}.{name}", default
        self.blocks = 0  # that are open, in all threads: with none, which is usual, no thread has to be asked

    def get(self) -> T:
        """Return the value of the innermost block, or the default."""
        if self.blocks and is_stashed(self.key):
            return stashed(self.key)
        return self.default

    @contextlib.contextmanager
    def set(self, value: T) -> Iterator[None]:
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


# autograd and its checkpoints: see `replay.py`

# the number of the backward pass that runs, or -1
graph_task: Callable[[], int] = find("torch._C._current_graph_task_id")
keeps_graph = find("torch._C._autograd._get_current_graph_task_keep_graph")
release_saved = find("torch._C._FunctionBase.maybe_clear_saved_tensors")  # of a ctx, if the graph is not kept
allows_forward_gradients = find("torch._C._is_fwd_grad_enabled")
top_hooks = find("torch._C._autograd._top_saved_tensors_default_hooks")  # (pack, unpack); None without
_pop_hooks = find("torch._C._autograd._pop_saved_tensors_default_hooks")
_push_hooks = find("torch._C._autograd._push_saved_tensors_default_hooks")
_hooks_enabled = find("torch._C._autograd._saved_tensors_hooks_is_enabled")
CachingMode = find("torch.utils.checkpoint._CachingTorchDispatchMode")  # of selective checkpointing
BACKWARD = find("torch.autograd.graph._engine_run_backward").__code__
CONTEXT = "CheckpointFunctionBackward"
UNPACK = "unpack_hook"  # what repeats a forward pass
FRAME, REPEATED, REPETITION = "frame", "target_frame_ref", "gid"  # variables of the functions that pack


def checkpoint_regions(task: int, within: bool, hooked: bool) -> tuple[list, Any, Any]:
    """Return the checkpointed regions that run first, the one that is repeated, and which repetition it is.

    `task` is the backward pass that runs, `within` says whether an autograd.Function may run, `hooked`
    whether saved tensors have hooks.
    """
    found = reentrant_regions(task) if within or task != -1 else ([], None, None)
    if not hooked or not _hooks_enabled():
        return found
    first, *other = hooked_regions()
    # a reentrant repetition is the inner one: a non-reentrant one ends where it unpacks
    return (found[0] + first, *(other if found[1] is None else found[1:]))


def reentrant_regions(task: int) -> tuple[list, Any, Any]:
    """Return `checkpoint_regions` of use_reentrant=True: the `ctx` of functions on Python's stack."""
    first, frame = [], sys._getframe(1)
    while frame is not None and (code := frame.f_code) is not BACKWARD:  # past that, another backward pass
        if code.co_name == UNPACK and code.co_filename == checkpoint.__file__:
            break  # a non-reentrant repetition, for which another node's backward pass waits
        if code.co_name in ("forward", "backward") and code.co_varnames[:1] == ("ctx",):
            ctx = frame.f_locals["ctx"]
            if type(ctx).__name__ == CONTEXT:
                if code.co_name == "backward":
                    return first, ctx, task
                first.append(ctx)
        frame = frame.f_back
    return first, None, None


def hooked_regions() -> tuple[list, Any, Any]:
    """Return `checkpoint_regions` of use_reentrant=False: what the hooks for saved tensors hold."""
    first = []
    for pack in map(inspect.unwrap, pack_hooks()):
        if getattr(pack, "__module__", "") != checkpoint.__name__:
            continue
        cells = zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True)
        inside = {name: cell.cell_contents for name, cell in cells}
        if REPEATED in inside:
            return first, inside[REPEATED](), inside[REPETITION]
        if FRAME in inside:
            first.append(inside[FRAME])
    return first, None, None


def pack_hooks() -> list[Callable]:
    """Return the hooks for saved tensors, the last first.  torch shows only the last: each is lifted off."""
    lifted = []
    while (pair := top_hooks(True)) is not None:
        _pop_hooks()
        lifted.append(pair)
    for pair in reversed(lifted):
        _push_hooks(*pair)
    return [pack for pack, _ in lifted]


@functools.cache
def check_checkpoints() -> None:
    """Raise RuntimeError where `checkpoint_regions` does not recognise torch's own checkpoints."""
    with ThreadPoolExecutor(1) as pool:  # a thread of its own is in no mode, under no hooks and in no pass
        for reentrant in (True, False):
            done = pool.submit(recognises, reentrant)
            if done.exception() or not done.result():
                form = f"torch.utils.checkpoint.checkpoint(use_reentrant={reentrant})"
                error = f"moe_aiter does not recognise {form}: {versions('torch')}"
                raise RuntimeError(error) from done.exception()


def recognises(reentrant: bool) -> bool:
    """Whether a checkpointed region is found as it runs and again as it is repeated."""
    found = []

    def region(x):
        found.append(checkpoint_regions(graph_task(), True, top_hooks(True) is not None))
        return x.sin()

    x = torch.ones(1, device="cpu", requires_grad=True)
    checkpoint.checkpoint(region, x, use_reentrant=reentrant, preserve_rng_state=False).backward()
    (first, *_), (_, repeated, _) = found
    return len(first) == 1 and first[0] is repeated


# Triton's, for files that have imported it


def triton_launches() -> tuple:
    """Return the class of a compiled kernel, that of a kernel, and the hooks of launches."""
    return (
        find("triton.compiler.CompiledKernel"),
        find("triton.runtime.jit.JITFunction"),
        find("triton.knobs.runtime"),
    )


@functools.lru_cache(1024)
def launch_inside(compiled: Any) -> tuple | None:
    """Return what NVIDIA's launcher of a compiled kernel does in the end, to do it without the launcher.

    The function that it calls with a grid and a stream; that function's arguments behind these; for each
    descriptor what its map depends on beside numbers, and a function that returns the arguments in its place;
    and whether the arguments of the kernel are one.  None where the launcher does more, as allocating memory,
    or is made in another way than those of WORKS.
    """
    try:
        driver, run, given = importlib.import_module("triton.backends.nvidia.driver"), compiled.run, object()
        more = run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False)
        if type(run) is not driver.CudaLauncher or more:
            return None
        calls: list[tuple] = []
        probe = copy.copy(run)
        probe.launch = lambda *args: calls.append(args)
        probe(*range(4), compiled.function, compiled.packed_metadata, None, None, None, given)
        ((*start, last),) = calls
        as_one = last == (given,)
        if start[:4] != [*range(4)] or not (as_one or last is given):
            return None
        if not inspect.isfunction(run.launch):  # there are no descriptors
            return run.launch, start[4:], [], as_one
        maps, place = [], operator.itemgetter(-1 if as_one else slice(len(start), None))
        kinds = [kind for kind in compiled.src.signature.values() if str(kind).startswith("tensordesc")]
        for kind, meta in zip(kinds, compiled.metadata.tensordesc_meta, strict=True):
            if meta is None:  # it has no map
                return None
            expand = driver.wrap_handle_tensordesc(lambda *args: place(args), {0: kind}, [meta])
            one = functools.partial(lambda expand, a: expand(*start, (a,) if as_one else a), expand)
            maps.append((f"{kind} {meta}", one))
        return inspect.getclosurevars(run.launch).nonlocals["launcher"], start[4:], maps, as_one
    except (AttributeError, ImportError, KeyError, TypeError, ValueError):
        return None


@functools.cache
def reads_registers_in_time() -> bool:
    """Whether Hopper's products read a left operand in registers before a loop writes there again.

    Before Triton 3.9 they may not, and sums are wrong: https://github.com/triton-lang/triton/issues/9433.
    """
    version = importlib.import_module("triton").__version__
    return tuple(map(int, version.split(".")[:2])) >= (3, 9)


def gluon_internals() -> tuple:
    """Return the decorator of a struct, and the function that gives a buffer another shape."""
    shared = "triton.experimental.gluon.language.shared_memory_descriptor"
    return (
        find("triton.language.core._aggregate"),
        find(f"{shared}.reinterpret", f"{shared}._reinterpret"),  # the former from Triton 3.9 on
    )
