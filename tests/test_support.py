"""docs/support.md says what the tests do: a GPU that is new in the code needs a row."""

import re
from pathlib import Path

from aot import TARGETS

from moe_aiter.bench.info import HOPPER
from moe_aiter.bench.info import TARGETS as GPUS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "support.md").read_text()
ROW = re.compile(r"^\| ([^|]+) \| `(\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.M)


def test_each_gpu_has_a_row():
    rows = {target: cells for _, target, *cells in ROW.findall(PAGE)}
    assert {target: gpu for gpu, target, *_ in ROW.findall(PAGE)} == GPUS
    assert rows.keys() >= TARGETS.keys()
    for target, (plain, fp8, four_bit, parallel) in rows.items():
        state = "**tested**" if target == HOPPER else "compiled" if target in TARGETS else "no test"
        assert {plain, four_bit, parallel} == {state}, target
        assert fp8 == ("**tested**" if target == HOPPER else "16-bit products"), target


def test_versions_are_those_of_the_workflow():
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    for name, words in {"torch": "PyTorch", "triton": "Triton"}.items():
        oldest, newest = re.findall(rf'\b{name}: "([\d.]+)\.\*"', workflow)
        assert f"| {words} | {oldest} to {newest} |" in PAGE
    pythons = set(re.findall(r'python(?:-version)?: "([\d.]+)"', workflow))
    line = next(line for line in PAGE.splitlines() if line.startswith("| Python |"))
    assert pythons <= set(re.findall(r"3\.\d+", line.split("|")[2])), pythons
