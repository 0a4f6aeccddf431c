"""What PyPI gets."""

import pathlib
import shutil
import subprocess
import sys
import tarfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def test_what_a_source_distribution_holds(tmp_path):
    """Of a checkout in which people have worked: no build, no site, no caches, no half of the tests."""
    pytest.importorskip("pybind11", reason="pybind11 is not installed")
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for name in ("csrc", "examples", "moe_aiter", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for path in ROOT.glob("*"):
        if path.is_file():
            shutil.copy(path, source)
    for name in ("build/x.py", "site/x.html", ".carry/x", "runs/x", "moe_aiter/_host.so", "docs/x.md"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    command = [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=source, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/*")}
    for pattern in ("*.py", "tuning/**/*.csv", "bench/models.csv", "py.typed"):
        wanted |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "moe_aiter").glob(f"**/{pattern}")}
    wanted |= {"LICENSE", "CHANGELOG.md", "README.md", "pyproject.toml", "setup.py", "examples/upcycle.py"}
    assert wanted <= names
    rooms = {name.partition("/")[0] for name in names if "/" in name}
    assert rooms == {"csrc", "examples", "moe_aiter", "moe_aiter.egg-info"}
    assert not any(name.endswith((".so", ".pyc")) or "/tests/" in name for name in names)


def test_make_dist_takes_torch_alone_from_pytorch_s_index():
    """That index lacks the versions of constraints.txt of other packages, and pip fails."""
    done = subprocess.run(["make", "--dry-run", "dist", "CPU=1"], cwd=ROOT, text=True, capture_output=True)
    lines = [line for line in done.stdout.splitlines() if "--index-url" in line]
    assert len(lines) == 1 and "pip install --no-deps --index-url" in lines[0]
