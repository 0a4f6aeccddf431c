import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_aiter import private_api, replay


@pytest.fixture
def unchecked():
    private_api.check_checkpoints.cache_clear()
    yield
    private_api.check_checkpoints.cache_clear()


@pytest.mark.parametrize("name", ["torch._C._gone", "torch.gone._C"])
def test_a_missing_name_says_which_versions_work(name):
    with pytest.raises(ImportError) as error:
        private_api.find(name)
    said = f"torch {torch.__version__} is installed, moe_aiter works with torch 2.11 to 2.15"
    assert str(error.value) == f"there is no {name}: {said}"


def test_a_missing_name_of_triton_says_which_versions_work(monkeypatch):
    jit = pytest.importorskip("triton.runtime.jit")
    monkeypatch.delattr(jit, "JITFunction")
    with pytest.raises(ImportError, match=r"no triton.runtime.jit.JITFunction: triton .* 3.6 to 3.9$"):
        private_api.triton_launches()


def test_the_first_of_several_names_is_taken():
    assert private_api.find("torch.gone", "torch.Tensor", "torch.nn") is torch.Tensor
    with pytest.raises(ImportError, match=r"no torch.gone nor torch._gone: "):
        private_api.find("torch.gone", "torch._gone")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_recognised(reentrant):
    assert private_api.recognises(reentrant)


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [("CONTEXT", True), ("FRAME", False), ("REPEATED", False), ("REPETITION", False)],
)
def test_checkpoints_of_another_form_raise_at_the_first_use(monkeypatch, unchecked, name, reentrant):
    monkeypatch.setattr(private_api, name, "renamed")

    def region(x):
        replay.current_pass()
        return x.sin()

    with pytest.raises(RuntimeError, match=rf"not recognise .*={reentrant}\): torch .* 2.11 to 2.15$"):
        checkpoint(region, torch.ones(1, requires_grad=True), use_reentrant=reentrant).backward()


def test_the_check_leaves_the_hooks_and_the_pass_alone(unchecked):
    """An outer checkpoint counts what its region saves."""
    passes = []

    def region(x):
        passes.append(replay.current_pass())
        return x.sin()

    x = torch.ones(1, requires_grad=True)
    checkpoint(lambda x: checkpoint(region, x, use_reentrant=False).sin(), x, use_reentrant=False).backward()
    assert len(passes[0].first) == 2 and passes[-1].repeated is not None
    expected = torch.ones(1, requires_grad=True)
    expected.sin().sin().backward()
    torch.testing.assert_close(x.grad, expected.grad, rtol=0, atol=0)


def test_importing_it_imports_no_compiler():
    script = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('private_api', {private_api.__file__!r})\n"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
        "heavy = {'torch._dynamo', 'torch._inductor', 'triton', 'sympy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
