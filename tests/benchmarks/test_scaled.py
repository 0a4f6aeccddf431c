"""The cases of 8 bits: small ones are right, and their goals name contenders."""

import pytest
import torch

from benchmarks import scaled

from .measured import measure

SMALL = [case for case in scaled.CASES if case.flops < 1e6]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_small_ones_are_accurate(case, capsys):
    dtype = getattr(torch, case.dtypes[0])
    rows, wrong = measure(case, dtype)
    names = {row["contender"] for row in rows}
    assert not wrong and "moe_aiter" in names and "refused" not in capsys.readouterr().out
    assert (
        case.goals.keys() <= case.make(*case.sizes, device=torch.device("cpu"), dtype=dtype).contenders.keys()
    )


def test_goals():
    goals = {case.name: case.goals for case in scaled.CASES}
    assert goals["int8-8192"] == {"torch._int_mm": 0.97, "torch, bfloat16": 1.5}
    assert goals["fp8-decode-16"] == {"torch._scaled_mm": 0.97, "copy": 0.85}
