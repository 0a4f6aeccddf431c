"""`python -m benchmarks gemm --family sparse` measures each kind of its cases."""

import pytest

from benchmarks import sparse
from benchmarks.__main__ import main


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_toys(dtype, capsys):
    argv = [
        "gemm",
        "--device",
        "cpu",
        "--family",
        "sparse",
        "--shape",
        "toy",
        "--reps",
        "1",
        "--dtype",
    ]
    assert main([*argv, dtype]) == 0
    printed = capsys.readouterr().out
    assert (
        printed.count(sparse.DENSE) == 4
        and "moe_aiter, BSR" in printed
        and "moe_aiter: refused" not in printed
    )


def test_the_goals_are_at_nine_zeros_in_ten():
    goals = {case.name for case in sparse.CASES if sparse.DENSE in case.goals}
    cases = {"block64-90", "block128-90", "block64-90-8192", "block128-90-8192"}
    assert goals == cases | {f"{name}-step" for name in cases}
