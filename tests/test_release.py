"""A tag is published only if all documents have its version; what PyPI gets, and from which job."""

import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import tarfile

import pytest

import moe_aiter

ROOT = pathlib.Path(__file__).parents[1]
TAG, ADDRESS = f"v{moe_aiter.__version__}", "https://example.org/moe_aiter"
RELEASE = runpy.run_path(str(ROOT / "release.py"))
CHECKED = "moe_aiter/config.py", "CITATION.cff", "CHANGELOG.md", "setup.py"


@pytest.fixture
def ready(tmp_path):
    """What release.py reads, as it is on the day of a release."""
    for name in CHECKED:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    change(tmp_path, "CHANGELOG.md", r"\] - .*", "] - 2026-12-01")
    change(tmp_path, "setup.py", r'REPOSITORY = ".*?"', f'REPOSITORY = "{ADDRESS}"')
    return tmp_path


def change(root, name, pattern, new):
    text, number = re.subn(pattern, new, (root / name).read_text(), count=1)
    assert number == 1, f"{name} has no {pattern}"
    (root / name).write_text(text)


def test_a_tag_that_may_be_published(ready):
    assert RELEASE["problems"](TAG, ADDRESS, ready) == [] == RELEASE["problems"](TAG, root=ready)


@pytest.mark.parametrize(
    "name, pattern, new, problem",
    [
        (
            "moe_aiter/config.py",
            "VERSION = .*",
            'VERSION = "9.9.9"',
            "has version 9.9.9: use v9.9.9",
        ),
        ("CITATION.cff", "(?m)^version: .*", "version: 9.9.9", "CITATION.cff has version 9.9.9"),
        ("CHANGELOG.md", r"## \[.*\]", "## [9.9.9]", "the newest version in CHANGELOG.md is 9.9.9"),
        ("CHANGELOG.md", r"\] - .*", "] - unreleased", "is dated unreleased: write the day"),
        (
            "CHANGELOG.md",
            r"## \[",
            "## [9.9.9] - 2026-12-02\n\n## [",
            "has no entries for 9.9.9",
        ),
        ("setup.py", ADDRESS, "", 'REPOSITORY in setup.py is "": write the address'),
        ("setup.py", ADDRESS, "https://example.org/fork", f"the address of this repository {ADDRESS}"),
    ],
)
def test_a_tag_that_may_not(ready, name, pattern, new, problem):
    change(ready, name, pattern, new)
    assert any(problem in line for line in RELEASE["problems"](TAG, ADDRESS, ready))


def test_the_newest_version_of_a_changelog():
    changes = "# Changes\n\n## [2.0.0] - 2026-12-01\n\n### Added\n\n* a\n\n## [1.0.0] - 2026-11-01\n\n* b\n"
    assert RELEASE["newest"](changes) == ("2.0.0", "2026-12-01", "\n### Added\n\n* a\n\n")
    assert RELEASE["newest"]("# Changes\n") == ("", "", "")


@pytest.mark.parametrize(
    "argv, status, said", [(["v9.9.9"], 1, "release: the tag is v9.9.9"), ([], 2, "usage")]
)
def test_the_command(argv, status, said):
    command = [sys.executable, ROOT / "release.py", *argv]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == status and said in done.stderr


def test_only_a_tag_is_published_and_only_after_all_builds():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())
    jobs = workflow["jobs"]
    publish = jobs.pop("publish")
    assert sorted(publish["needs"]) == sorted(jobs)
    assert publish["if"] == "github.event_name == 'push' && startsWith(github.ref, 'refs/tags/v')"
    assert publish["permissions"] == {"id-token": "write"} and publish["environment"]["name"] == "pypi"
    assert workflow["permissions"] == {"contents": "read"}
    assert not any("permissions" in job or "environment" in job for job in jobs.values())
    checks = [step for job in jobs.values() for step in job["steps"] if "release.py" in step.get("run", "")]
    assert [step["if"] for step in checks] == ["github.ref_type == 'tag'"]


def test_the_wheels_are_for_the_pythons_that_releases_md_names():
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pythons = [f"3.{minor}" for minor in re.findall(r"cp3(\d+)-", settings["tool"]["cibuildwheel"]["build"])]
    assert settings["project"]["requires-python"] == f">={pythons[0]}"
    text = (ROOT / "docs" / "releases.md").read_text()
    assert f"CPython {pythons[0]} to {pythons[-1]}" in text


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
