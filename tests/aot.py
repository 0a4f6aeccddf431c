"""Compiles Triton kernels for GPUs that are not there, through the package's own launchers.

A stand-in for Triton's driver names the target; tensors on torch's meta device have shapes, strides and
dtypes but no memory; and a launch stops once its kernel is compiled.
"""

import contextlib
import dataclasses
import importlib
import pathlib
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Callable, Collection

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITCallable, JITFunction

import moe_aiter.kernels
from moe_aiter import tuning
from moe_aiter.kernels.base.sources import by_source
from moe_aiter.private_api import reads_registers_in_time


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU, the shared memory that one program may use, and the name of its matrix instructions."""

    gpu: GPUTarget
    shared_bytes: int
    matrix: str


TARGETS = {
    # an A100 has more shared memory, but its table serves the next two also
    "sm_80": Target(GPUTarget("cuda", 80, 32), 99 * 1024, "mma.sync"),
    "sm_89": Target(GPUTarget("cuda", 89, 32), 99 * 1024, "mma.sync"),
    "sm_120": Target(GPUTarget("cuda", 120, 32), 99 * 1024, "mma.sync"),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 * 1024, "wgmma.mma_async"),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 * 1024, "tcgen05.mma"),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 * 1024, "v_mfma"),
    "gfx950": Target(GPUTarget("hip", "gfx950", 64), 160 * 1024, "v_mfma"),
}
FEW_TARGETS = [name for name in TARGETS if name not in ("sm_89", "sm_120")]  # sm_80 stands for them

PRODUCTS = {
    *("gmm_kernel", "tgmm_kernel", "expert_up_kernel", "expert_down_grad_kernel", "gemm_kernel"),
    *("masked_gmm_kernel", "scaled_gemm_kernel", "sparse_blocks_kernel", "sparse_blocks_grad_kernel"),
    *("segment_gmm_kernel", "segment_expand_kernel", "segment_tgmm_kernel", "gather_entries_kernel"),
    *("four_bit_gmm_kernel", "symmetric_product_kernel"),
}
# Triton 3.9's compilers keep one or two registers of five kernels in memory, and read one a step at most
FEW_SPILLED = 0 if triton.__version__.startswith("3.6.") else 8  # bytes, or registers of AMD's


def kernels() -> dict[str, JITFunction]:
    """Every function of the package that is launched, by file and name."""
    prefix, found = "moe_aiter.kernels.", {}
    for info in pkgutil.walk_packages(moe_aiter.kernels.__path__, prefix):
        for name, f in vars(importlib.import_module(info.name)).items():
            if isinstance(f, JITCallable):
                f.cache_key  # noqa: B018  Triton's keys depend on the order: the same one in each process
            launched = isinstance(f, JITFunction) and name.endswith("_kernel")
            if launched and f.__module__ == info.name:
                found[f"{info.name.removeprefix(prefix)}.{name}"] = f
    return found


KERNELS = kernels()


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
    def overwrites_operands(self) -> bool:
        """Whether products that read registers may be under way while code goes on that writes there."""
        reads = re.search(r"wgmma\.mma_async[^{]*\{[^}]*\}, *\{", self.assembly)
        waits = re.findall(r"wgmma\.wait_group\S* (\d+)", self.assembly)
        return bool(reads) and set(waits) != {"0"}

    @property
    def multiplies_behind_a_loop(self) -> bool:
        """Whether a branch skips a loop of Hopper's products, and such a product follows.

        ptxas 12.8 may compute that product's descriptors where it enters the loop, and nowhere else.  Hopper
        kernels have a loop for each group of warps, in one text, and no product behind it.
        """
        lines = [] if isinstance(self.fn, GluonJITFunction) else self.assembly.splitlines()
        labels = {line.partition(":")[0]: place for place, line in enumerate(lines) if line.startswith("$L")}
        products = [place for place, line in enumerate(lines) if "wgmma.mma_async" in line]
        branches = [
            (place, labels[found[1]])
            for place, line in enumerate(lines)
            if (found := re.search(r"\bbra(?:\.uni)?\s+(\$L\w+);", line))
        ]
        loops = [(to, at) for at, to in branches if to < at and any(to < p < at for p in products)]
        skipped = [to for at, to in branches for begin, end in loops if at < begin and end < to]
        return any(product > to for to in skipped for product in products)

    @property
    def narrow_loads(self) -> list[str]:
        """The loads of 1 or 2 bytes: such a loop waits for each, since no asynchronous copy is as small."""
        nvidia = r"\bld\.global(?!\S*\.v\d)\S*\.[bsuf](?:8|16)\b|cp\.async\S* .*, (?:0x)?[12][,;]"
        amd = r"(?:global|buffer|flat)_load_(?:u|s)?(?:short|byte)\w*"
        return re.findall(nvidia if "ptx" in self.compiled.asm else amd, self.assembly)

    @property
    def shared_bytes(self) -> int:
        return self.compiled.metadata.shared

    @property
    def choices(self) -> set[tuple]:
        """What Triton compiles for, numbers aside: dtypes, what is there, and other constants."""
        named = {**dict(zip(self.fn.arg_names, self.args, strict=False)), **self.options}
        dtypes = {found for v in named.values() if isinstance(found := kind(v), torch.dtype)}
        return dtypes | {(name, torch.dtype if kind(v) in dtypes else kind(v)) for name, v in named.items()}

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


def kind(value) -> object:
    if isinstance(value, tuple):
        return tuple(map(kind, value))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return int
    whole = getattr(value, "base", value)  # of a descriptor
    return whole.dtype if hasattr(whole, "dtype") else repr(value)


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


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of launchers, its targets, and what must be true of the kernels that it compiles.

    Without `spills` no register spills.  `matrix`: "own" if each product must use the target's matrix
    instruction, "any" if an older one will do, the only one for tiles of less than 64 rows.  `kernels`: their
    names in order.  `also` checks more: it takes the target's name and the launches.
    """

    run: Callable[[], object]
    targets: Collection[str] = tuple(TARGETS)
    spills: Collection[str] = ()
    matrix: str | None = None
    kernels: list[str] | None = None
    also: Callable[[str, list[Launch]], None] | None = None

    def choices(self, target: str) -> tuple[set[tuple], int]:
        """What a compilation for `target` would cover of its maker's GPUs, and about how long it takes."""
        with compiling_for(TARGETS[target], compile=False) as launches:
            self.run()
        check = getattr(self.also, "__qualname__", self.also)
        choices = {(launch.fn, c) for launch in launches for c in (target, check, *launch.choices)}
        if self.matrix:
            choices |= {(launch.fn, (target, "matrix")) for launch in launches if launch.kernel in PRODUCTS}
        if self.kernels:
            choices.add((launches[0].fn, tuple(self.kernels)))
        return choices, sum(5 if ("INTERLEAVED", "True") in launch.choices else 1 for launch in launches)

    def check(self, target: str):
        """Compile for `target`, and check the kernels."""
        gpu = TARGETS[target]
        with compiling_for(gpu) as launches:
            self.run()
        assert launches
        for launch in launches:
            spilled = launch.spilled()
            few = all(n <= FEW_SPILLED for n in spilled.values())
            assert target in self.spills or few, f"{launch.kernel}: {spilled}"
            assert launch.shared_bytes <= gpu.shared_bytes, f"{launch.kernel}: {launch.shared_bytes} bytes"
            assert reads_registers_in_time() or not launch.overwrites_operands, launch.kernel
            assert not launch.multiplies_behind_a_loop, launch.kernel
        if self.matrix:
            allowed = {gpu.matrix} | ({"mma.sync"} if self.matrix == "any" else set())
            products = [launch for launch in launches if launch.kernel in PRODUCTS]
            assert products
            assert all(any(name in launch.assembly for name in allowed) for launch in products)
        assert self.kernels is None or [launch.kernel for launch in launches] == self.kernels
        if self.also:
            self.also(target, launches)


def with_tile(tile: tuning.Config, run: Callable[[], object], op: str = "") -> Callable[[], None]:
    """`run` where `op`, or every op, takes this tile."""

    def launch():
        with tuning.choose(lambda key: tile if op in ("", key.op) else None):
            run()

    return launch


def new(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape, dtype=torch.int32):
    return new(*shape, dtype=dtype)


class OnePass:
    """The groups of a pass, which lie apart: see `moe_aiter/kernels/base/sources.py`."""

    def arriving(self):
        yield ints(128), ints(128)


def in_passes(run, *given):
    with by_source.set(OnePass()):
        run(*given)
