"""Compiles Triton kernels for GPUs that are not there, through the package's own launchers.

A stand-in for Triton's driver names the target; tensors on torch's meta device have shapes, strides and
dtypes but no memory; and a launch stops once its kernel is compiled.
"""

import ast
import contextlib
import dataclasses
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterable

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU, the shared memory that one program may use, and the name of its matrix instructions."""

    gpu: GPUTarget
    shared_bytes: int
    matrix: str


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163 * 1024, "mma.sync"),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 * 1024, "wgmma.mma_async"),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 * 1024, "tcgen05.mma"),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 * 1024, "v_mfma"),
    "gfx950": Target(GPUTarget("hip", "gfx950", 64), 160 * 1024, "v_mfma"),
}


@dataclasses.dataclass(frozen=True)
class Driver:
    """What a launch asks of Triton's driver.  Kernels are cached by device, so each target is one."""

    target: Target

    def get_current_target(self) -> GPUTarget:
        return self.target.gpu

    def get_current_device(self) -> int:
        return 1000 + list(TARGETS.values()).index(self.target)  # no GPU that is there

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclasses.dataclass
class Launch:
    """A kernel's name, what it was compiled to, if it was, and what it was launched with."""

    kernel: str
    compiled: CompiledKernel | None
    fn: JITFunction
    args: tuple
    options: dict  # the arguments by name, constants all of them, and the number of warps

    @property
    def assembly(self) -> str:
        asm = self.compiled.asm
        return asm["ptx"] if "ptx" in asm else asm["amdgcn"]

    @property
    def shared_bytes(self) -> int:
        return self.compiled.metadata.shared

    def spilled(self) -> dict[str, int]:
        """Bytes or registers that live in memory instead of registers, where there are any.

        On AMD GPUs scalar registers spill to lanes of vector registers, not to memory: they do not count.
        """
        if "cubin" in self.compiled.asm:
            found = cubin_resources(self.compiled.asm["cubin"])
            names = ("STACK", "LOCAL")
        else:
            text = self.compiled.asm["amdgcn"]
            names = ("vgpr_spill_count", "private_segment_fixed_size")
            found = {n: int(re.search(rf"\.{n}:\s*(\d+)", text)[1]) for n in names}
        return {n: found[n] for n in names if found[n]}


def cubin_resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack, shared and local bytes of the one kernel in a cubin."""
    text = ask("cuobjdump", "--dump-resource-usage", cubin)
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", text.partition("Function")[2])}


def disassembled(cubin: bytes) -> str:
    """The machine's own instructions, in order."""
    return ask("nvdisasm", "--print-code", cubin)


def ask(tool: str, flag: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [pathlib.Path(triton.__file__).parent / "backends/nvidia/bin" / tool, flag, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@contextlib.contextmanager
def compiling_for(target: Target, compile: bool = True):
    """Inside the block a launch compiles its kernel for `target` and runs nothing; yields the list of them.

    Without `compile` the launches are only listed.
    """
    launches = []
    run = JITFunction.run

    def record(self, *args, grid, warmup, **kwargs):
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs) if compile else None
        launches.append(Launch(self.__name__, compiled, self, args, kwargs))
        return compiled

    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(Driver(target))
    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run
        triton.runtime.driver._active = before  # the default one may not exist, so there is no public way


@contextlib.contextmanager
def front_end_only():
    """Inside the block a compilation ends with Triton's first intermediate form, before a target's passes."""

    def write_ir(self, key, signature, device, constexprs, options, attrs, warmup):
        _, _, target, backend, _ = self.device_caches[device]
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions = backend.get_codegen_implementation(options), backend.get_module_map()
        self.ASTSource(self, signature, constexprs, attrs).make_ir(target, options, *functions, context)

    before = JITFunction._do_compile
    JITFunction._do_compile = write_ir
    try:
        yield
    finally:
        JITFunction._do_compile = before


def kernels_launched_by(files: Iterable[pathlib.Path]) -> set[str]:
    """Return the names of the kernels in `some_kernel[grid](...)` and `bind_kernel(some_kernel, ...)`."""
    calls = [n for f in files for n in ast.walk(ast.parse(f.read_text())) if isinstance(n, ast.Call)]
    launched = [c.func.value for c in calls if isinstance(c.func, ast.Subscript)]
    launched += [c.args[0] for c in calls if getattr(c.func, "id", "") == "bind_kernel"]
    return {v.id for v in launched if isinstance(v, ast.Name) and v.id.endswith("_kernel")}
