"""The form for the kernel hub: another name and other ops than an installed package, the same results."""

import ast
import base64
import hashlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).parent.parent
# what `kernels` does with a folder: it imports `__init__.py` by the id of metadata.json
LOADED = """
import importlib.util, json, logging, pathlib, sys
logging.basicConfig(format="%(message)s")

def load(name, folder):
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

folder = pathlib.Path(sys.argv[1])
metadata = json.loads((folder / "metadata.json").read_text())
kernel = load(metadata["id"], folder)

import torch
torch.manual_seed(0)
x, gate_up, down = torch.randn(9, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
weights, ids = torch.rand(9, 2), torch.randint(0, 4, (9, 2))

def step(package):
    inputs = [t.clone().requires_grad_() for t in (x, gate_up, down, weights)]
    out = package.expert_mlp(*inputs, package.make_plan(ids, 4))
    out.square().sum().backward()
    return [out, *(t.grad for t in inputs)]

got = step(kernel)
assert not [name for name in sys.modules if name.partition(".")[0] == "moe_aiter"]
import moe_aiter
assert moe_aiter.expert_mlp is not kernel.expert_mlp
for ours, theirs in zip(step(moe_aiter), got, strict=True):
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)

ops = getattr(torch.ops, metadata["id"])
for name in ("route", "mha_fwd"):  # the second from a file that nothing has imported so far
    assert getattr(ops, name).default.name() == f"{metadata['id']}::{name}"
    assert getattr(torch.ops.moe_aiter, name).default.name() == f"moe_aiter::{name}"
layer = kernel.MoE(8, 6, 4, 2)
torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))
from moe_aiter.op import forced
with kernel.use("torch"), moe_aiter.use("triton"):  # neither sees the other's choice
    assert (kernel.op.forced(), forced()) == ("torch", "triton")
# `kernels` before 0.11.7 imports a folder of the variant, by a name of its own
assert load("moe_aiter_1f", folder / "moe_aiter").MoE is kernel.MoE
"""


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    target = tmp_path_factory.mktemp("hub")
    done = subprocess.run(
        [sys.executable, REPOSITORY / "hub.py", target], capture_output=True, text=True, check=True
    )
    return {path.name: path for path in map(pathlib.Path, done.stdout.splitlines())}


def run(*arguments):
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", *arguments], capture_output=True, text=True, env=env)


def test_a_copy_computes_beside_an_installed_package(variants):
    done = run(LOADED, str(variants["torch-cpu"]))
    assert done.returncode == 0, done.stderr
    assert "Copies from the kernel hub have none" in done.stderr  # of the C++ extension


def read(folder):
    return json.loads((folder / "metadata.json").read_text())


def test_the_metadata(variants):
    """Each key that the form requires; an id for each backend; hashes of all files but metadata.json."""
    assert variants.keys() == {"torch-cpu", "torch-cuda", "torch-rocm"}
    assert len({read(folder)["id"] for folder in variants.values()}) == 3
    for name, folder in variants.items():
        found = read(folder)
        backend = name.removeprefix("torch-")
        assert found["id"].isidentifier() and found["id"].startswith(f"_moe_aiter_{backend}_")
        assert (found["name"], found["license"], found["python-depends"]) == ("moe-aiter", "mit", ["einops"])
        assert found["backend"]["type"] == backend and ("archs" in found["backend"]) == (backend != "cpu")
        files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        sums = {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()) for path in files}
        del sums["metadata.json"]
        expected = {file: base64.b64encode(sha.digest()).decode() for file, sha in sums.items()}
        assert found["digest"] == {"algorithm": "sha256", "files": expected}
        assert {"tuning/tables/h200.csv", "layers/moe.py", "moe_aiter/__init__.py"} <= expected.keys()


def test_a_changed_file_changes_the_id(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("hub", REPOSITORY / "hub.py")
    hub = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hub)
    package = tmp_path / "moe_aiter"
    package.mkdir()
    monkeypatch.setattr(hub, "PACKAGE", package)
    ids = []
    for text in ('VERSION = "1.2.0"', 'VERSION = "1.2.1"', 'VERSION = "1.2.0"'):
        (package / "config.py").write_text(text)
        found = read(hub.write(tmp_path / "hub")[0])
        assert found["version"] == 1
        ids.append(found["id"])
    assert ids[0] == ids[2] != ids[1]


def test_what_is_imported_is_allowed(variants):
    """At import: the standard library, torch and what comes with it, einops, and the package itself."""
    allowed = sys.stdlib_module_names | {"torch", "triton", "numpy", "einops"}
    for path in variants["torch-rocm"].rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module]
            assert {module.partition(".")[0] for module in modules} <= allowed, path
