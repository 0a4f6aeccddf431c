"""`import moe_aiter` imports little; its names, modules and ops are there all the same."""

import ast
import importlib.util
import pathlib
import pickle
import pkgutil
import subprocess
import sys

import pytest

import moe_aiter

COMPILERS = "torch._dynamo", "torch._inductor", "sympy"


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def imported(script: str, *modules: str) -> set[str]:
    """Those of `modules` that a script imports."""
    return set(run(f"import sys\n{script}\nprint(*{{*{modules}}} & {{*sys.modules}})").split())


def test_importing_the_package_imports_neither_torch_nor_a_kernel():
    assert not imported("import moe_aiter", "torch", "triton", "moe_aiter.op", "moe_aiter.layers")


def test_no_public_name_imports_the_compiler():
    assert not imported("from moe_aiter import *", *COMPILERS)


def test_a_layer_on_a_cpu_does_not_import_the_compiler():
    layer = "moe_aiter.MoE(hidden=8, intermediate=8, num_experts=4, top_k=2)"
    assert not imported(f"import moe_aiter\n{layer}", *COMPILERS)


def test_the_table_the_list_and_the_imports_for_type_checkers_agree():
    tree = ast.parse(pathlib.Path(moe_aiter.__file__).read_text())
    (block,) = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    shown = [(a.name, n.module) for n in block.body for a in n.names]
    assert sorted(shown) == sorted(moe_aiter._MODULE.items())
    assert sorted(moe_aiter.__all__) == sorted(name for name, _ in shown)


def test_no_public_name_is_that_of_a_module():
    modules = {module.name for module in pkgutil.iter_modules(moe_aiter.__path__)}
    assert not modules & set(moe_aiter.__all__)


def test_every_name_is_listed_and_survives_pickling():
    assert set(moe_aiter.__all__) <= set(dir(moe_aiter))
    for name in moe_aiter.__all__:
        value = getattr(moe_aiter, name)
        assert vars(moe_aiter)[name] is value, name  # the next use is a plain look-up
        assert pickle.loads(pickle.dumps(value)) is value, name


def test_modules_are_attributes():
    names = "compat", "derived", "integrations", "kernels", "layers", "op", "routing"
    assert run(f"import moe_aiter\nfor n in {names}: print(getattr(moe_aiter, n).__name__)").split() == [
        f"moe_aiter.{name}" for name in names
    ]


@pytest.mark.parametrize("name", ["gmmm", "_gmm", "__wrapped__"])
def test_what_there_is_not_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match=f"module 'moe_aiter' has no attribute '{name}'"):
        getattr(moe_aiter, name)
    assert importlib.util.find_spec(f"moe_aiter.{name}") is None
