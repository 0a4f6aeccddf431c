"""Every op is there after `import moe_aiter`, before and after torch, and without any of our modules."""

import subprocess
import sys

import pytest
from check import few
from samples import SAMPLES

ASK = "torch.ops.moe_aiter.mha_fwd.default, torch.ops.moe_aiter.route.default"
COMPILED = (
    "call = lambda q: torch.ops.moe_aiter.mha_fwd(q, q, q, 0.0, 1.0, True, -1, -1, True, False)[0]\n"
    "q = torch.randn(2, 4, 2, 16)\n"
    "torch.compile(call, backend='eager', fullgraph=True)(q)\n"
)


def run(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


FROM = "from moe_aiter import topk\nimport torch"
IMPORTS = ["import torch, moe_aiter", "import moe_aiter, torch", FROM]
IMPORTS += ["import torch\nfrom moe_aiter.kernels.rows.topk import topk"]


@pytest.mark.parametrize("imports", few(IMPORTS, IMPORTS[0], FROM))
def test_an_op_is_there_when_asked_for(imports):
    run(f"{imports}\n{ASK}\nassert not hasattr(torch.ops.moe_aiter, 'nothing')")


def test_every_op_is_there():
    ask = f"for name in {sorted(SAMPLES)}:\n    getattr(torch.ops.moe_aiter, name).default"
    run(f"import torch, moe_aiter\n{ask}")


def test_a_compiled_graph_may_be_the_first_to_ask():
    run(f"import moe_aiter, torch\n{COMPILED}")


def test_threads_may_be_the_first_to_ask():
    run(
        "import threading, torch, moe_aiter\n"
        "found = []\n"
        "def ask():\n"
        "    found.append(torch.ops.moe_aiter.mha_fwd.default)\n"
        "    # torch could not free it if the program ends now\n"
        "    assert not torch._C._is_key_in_tls('moe_aiter.probe')\n"
        "threads = [threading.Thread(target=ask) for _ in range(8)]\n"
        "for t in threads: t.start()\n"
        "for t in threads: t.join()\n"
        "assert len(found) == 8\n"
    )


def test_torch_may_be_missing():
    run(
        "import sys, moe_aiter\n"
        "sys.path[:] = []; sys.path_importer_cache.clear()\n"
        "try: import torch\n"
        "except ModuleNotFoundError: sys.exit()\n"
        "sys.exit(1)\n"
    )


@pytest.mark.parametrize("first", [True, False])
def test_another_package_may_hook_the_import_of_torch_in_the_same_way(first):
    run(
        "import importlib.util, pathlib, sys, moe_aiter\n"
        "from moe_aiter import torch_ops\n"
        "path = pathlib.Path(torch_ops.__file__)\n"
        "other = importlib.util.module_from_spec(importlib.util.spec_from_file_location('other', path))\n"
        "other.__spec__.loader.exec_module(other)\n"
        "other.extend_namespace = lambda: ran.append(1)\n"
        "ran = []\n"
        "other.define_on_demand()\n"
        f"if {first}: sys.meta_path[:2] = sys.meta_path[1::-1]\n"
        f"import torch\n{ASK}\nassert ran == [1]"
    )
