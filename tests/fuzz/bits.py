"""The bits of every case's results, saved at one commit and compared at another.

python -m tests.fuzz.bits FILE      saves them, or compares where FILE exists
"""

import argparse
import hashlib
import json
import pathlib
import sys

import torch

from moe_aiter import MoE
from moe_aiter.bench.problem import SHAPES

from . import run
from .draw import DEVICE, ON_GPU, Draw
from .hold import TARGETS, as_bytes, results, trained_names


def bits(t: torch.Tensor) -> str:
    return f"{tuple(t.shape)} {hashlib.sha256(as_bytes(t).cpu().numpy().tobytes()).hexdigest()[:16]}"


def fuzzed(name: str, seed: int) -> dict[str, str]:
    """Outputs and gradients of a case of the fuzzer."""
    draw = Draw(name, seed)
    torch.manual_seed(seed)
    case = TARGETS[name](draw)
    found = results(case.ours, case.tensors, trained_names(case, draw), [], draw)
    return {key: bits(t) for key, t in found.items()}


def step(shape: str, **options) -> dict[str, str]:
    """A training step of the layer in bfloat16."""
    s = SHAPES[shape]
    torch.manual_seed(0)
    with torch.device(DEVICE):
        kind = {"dtype": torch.bfloat16, "activation": s.activation, "interleaved": s.interleaved}
        moe = MoE(s.hidden, s.intermediate, s.num_experts, s.top_k, **kind, **options)
        x = torch.randn(s.num_tokens, s.hidden, dtype=torch.bfloat16, requires_grad=True)
    y = moe(x)
    y.backward(torch.randn_like(y))
    found = {"y": y, "x.grad": x.grad} | {f"{name}.grad": p.grad for name, p in moe.named_parameters()}
    return {key: bits(t) for key, t in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.bits", description=__doc__)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--seeds", type=int, default=15, help="cases of each target [15]")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {f"{name}:{seed}": fuzzed(name, seed) for name in TARGETS for seed in range(given.seeds)}
    for shape in ("A", "B", "C", "D", "E") if ON_GPU else ("cpu", "toy"):
        for options in ({}, {"fp8": "e4m3"}, {"recompute": "z"}):
            found[f"{shape} {options}"] = step(shape, **options)
    if not given.file.exists():
        given.file.write_text(json.dumps(found))
        print(f"{len(found)} cases saved")
        return 0
    before = json.loads(given.file.read_text())
    differ = [case for case in before if found.get(case) != before[case]]
    print(*differ, f"{len(differ)} of {len(before)} cases differ", sep="\n")
    return int(bool(differ))


if __name__ == "__main__":
    assert run.MODULES  # which fill TARGETS
    sys.exit(main())
