"""requirements.lock has a hash for everything that `make install` installs, in the pinned versions."""

import pathlib
import re

import pytest

tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
REPOSITORY = pathlib.Path(__file__).parent.parent
UNHASHED = {"torch"}  # one version, many builds


def name_of(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def locked():
    """{name: versions} of requirements.lock."""
    found = {}
    for entry in (REPOSITORY / "requirements.lock").read_text().replace("\\\n", " ").splitlines():
        pin = re.match(r"([\w.-]+)==(\S+)", entry)
        assert pin, f"{entry[:60]} pins no version"
        hashes = re.findall(r"--hash=sha256:[0-9a-f]{64}\b", entry)
        assert hashes, f"{pin[0]} has no hash"
        found.setdefault(pin[1], set()).add(pin[2])
    return found


def test_every_dependency_is_locked():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["train"], *extras["hf"], *extras["peft"], *extras["dev"]]
    names = {name_of(requirement) for requirement in wanted} - {"moe-aiter"} - UNHASHED
    assert names <= locked().keys()


def test_the_lock_has_the_pinned_versions():
    pins = [line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if "==" in line]
    for pin in pins:
        name, version = re.match(r"([\w.-]+)==([^;\s]+)", pin).groups()
        assert name in UNHASHED or version in locked()[name], pin
