"""`import moe_aiter` is enough for `torch.ops.moe_aiter`: using an op imports the files that define ops.

`import moe_aiter` itself does not import torch.  If torch is imported later, this file acts right after that.
C++ code that looks an op up by name needs the modules in OPS imported.

A copy of the package that is imported by another name, as Hugging Face's `kernels` does, has ops of its own:
`torch.ops.<its name>`.
"""

import contextlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator

NAMESPACE = __package__.replace(".", "_")  # of the ops: moe_aiter
TWIN = "_in_any_batch"  # what the name of a twin ends with: see invariance.py
# these modules, and what they import, define the ops
OPS = tuple(
    f"{__package__}.{module}"
    for module in (
        "layers",
        "distributed.collective",
        "kernels.dense.muon",
        "kernels.experts.split",
        "kernels.grouped.grouped_gemm",
        "kernels.sparse.gemm",
    )
)


state = threading.local()


@contextlib.contextmanager
def defining() -> Iterator[None]:
    """Inside, this thread defines an op, and torch looks whether there is one of that name."""
    state.defines = True
    try:
        yield
    finally:
        state.defines = False


def define_on_demand() -> None:
    """Extend `torch.ops.moe_aiter`, now or as soon as torch is imported."""
    if sys.modules.get("torch"):
        extend_namespace()
    else:
        sys.meta_path.insert(0, AfterTorch())


class AfterTorch:
    """A finder of modules that waits for torch, and leaves the search to the other finders."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            loader, run = spec.loader, spec.loader.exec_module

            def exec_module(module) -> None:
                loader.exec_module = run  # what was there before, another hook's too
                run(module)
                extend_namespace()

            loader.exec_module = exec_module
        return spec


def extend_namespace() -> None:
    """Let `torch.ops.moe_aiter` import the files that define ops, where it does not know an op."""
    import torch

    namespace = getattr(torch.ops, NAMESPACE)

    class Namespace(type(namespace)):
        __module__ = type(namespace).__module__  # a part of each op's name in exported programs

        def __getattr__(self, name: str):
            try:
                return super().__getattr__(name)
            except AttributeError:
                if getattr(state, "defines", False) or name.startswith("__"):
                    raise
            for module in OPS:
                importlib.import_module(module)
            if name.endswith(TWIN):
                importlib.import_module(f"{__package__}.invariance").make_twins()
            return super().__getattr__(name)

    namespace.__class__ = Namespace
