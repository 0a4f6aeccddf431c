"""What the package says about itself."""

import pathlib
import re
import runpy

import forked
import pytest
import setuptools

import moe_aiter

ROOT = pathlib.Path(__file__).parents[1]
RELATIVE_LINK = r"\]\((?!https?:|#)"


@pytest.fixture
def setup(monkeypatch):
    monkeypatch.setattr(setuptools, "setup", lambda **given: None)
    return runpy.run_path(str(ROOT / "setup.py"))


def test_one_version():
    changes, citation = ((ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff"))
    assert re.search(r"^## \[(.*?)\]", changes, re.M)[1] == moe_aiter.__version__
    assert re.search(r"^version: (.*)", citation, re.M)[1] == moe_aiter.__version__


def test_links_without_an_address(setup):
    setup["description"].__globals__["REPOSITORY"] = ""
    assert not re.search(RELATIVE_LINK, setup["description"]()) and not setup["urls"]()


def test_links_from_an_address(setup):
    setup["description"].__globals__["REPOSITORY"] = address = "https://example.org/moe_aiter"
    text = setup["description"]()
    assert f"[CONTRIBUTING]({address}/blob/main/CONTRIBUTING.md)" in text
    images = re.findall(r"!\[[^]]*\]\((?!https?:)([^)]*)", (ROOT / "README.md").read_text())
    assert images and all(f"({address}/raw/main/{image})" in text for image in images)
    assert f"[![tests]({address}/actions/" in text and not re.search(RELATIVE_LINK, text)
    assert all(url.startswith(address) for url in setup["urls"]().values())


def test_the_readme_trains_a_layer(tmp_path):
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    (tmp_path / "block.py").write_text(block)
    done = forked.run(tmp_path / "block.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+), balance", done.stdout, re.M)]
    assert len(losses) > 2 and losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 10


def test_the_readme_has_the_versions_that_tests_run_on():
    readme, workflow = ((ROOT / name).read_text() for name in ("README.md", ".github/workflows/tests.yml"))
    versions = r'{python: "([\d.]+)", torch: "([\d.]+)\.\*", triton: "([\d.]+)\.\*"'
    oldest, newest = re.findall(versions, workflow)
    for name, first, last in zip(("Python", "PyTorch", "Triton"), oldest, newest, strict=True):
        assert f"{name} {first} to {last}" in readme
    pins = dict(re.findall(r'^    "(torch|triton)>=([\d.]+)', (ROOT / "pyproject.toml").read_text(), re.M))
    assert f"PyTorch {pins['torch']} to" in readme and f"Triton {pins['triton']} to" in readme


def test_documents_name_every_extra_of_users():
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    documents = ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").glob("*.md")
    named = {name for path in documents for name in re.findall(r"'\.\[(\w+)\]'", path.read_text())}
    assert named == extras.keys() - {"dev", "docs"}  # those that make installs


def test_messages_name_extras_that_exist():
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    call = r"""need\("[\w.]+", "(\w+)"\)|'\.\[(\w+)\]'"""
    patterns = "moe_aiter/**/*.py", "benchmarks/*.py", "examples/**/*.py", "examples/*.ipynb"
    sources = [path.read_text() for pattern in patterns for path in ROOT.glob(pattern)]
    named = {a or b for text in sources for a, b in re.findall(call, text)}
    assert {"hf", "convert", "bench", "peft"} <= named <= extras.keys()
