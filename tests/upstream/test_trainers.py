"""trainers.py with its stubs: each trainer's own way to our experts, beside eager ones."""

import functools
import json
import pathlib

import forked
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

SCRIPT = pathlib.Path(__file__).parent / "trainers.py"
TRAINERS = ["axolotl", "ms_swift", "verl", "trl", "llamafactory", "lightning", "accelerate", "deepspeed"]


@functools.cache
def differences():
    done = forked.run(SCRIPT, "--stubs", "--json")
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("trainer", [*TRAINERS, "prime_rl"])
def test_trains_as_with_eager_experts(trainer):
    found = differences()[trainer]
    assert found["float32"] < 1e-5 and 0 < found["bfloat16"] < 1e-3
