"""Attention and convolution beside torch's: cases are what they say, and ours are right at small sizes."""

import pytest
import torch

from benchmarks import torchlike
from benchmarks.torchlike import attention_case, convolution_case, pairs

from .measured import measure

HOW = [{}, {"is_causal": True}, {"is_causal": True, "window": (5, 0)}, {"window": (3, 2)}, {"padded": True}]
CPU = torch.device("cpu")


@pytest.mark.parametrize("lengths", [(16, 16), (7, 20), (1, 20), (9, 4)])
@pytest.mark.parametrize("how", HOW[:4], ids=str)
def test_pairs_are_counted(lengths, how):
    Sq, Sk = lengths
    left, right = how.get("window", (-1, -1))
    right = 0 if how.get("is_causal") else right
    seen = [(i + Sk - Sq, j) for i in range(Sq) for j in range(Sk)]
    seen = [(i, j) for i, j in seen if (left < 0 or i - j <= left) and (right < 0 or j - i <= right)]
    assert pairs(Sq, Sk, **how) == len(seen)


@pytest.mark.parametrize("sizes", [(2, 4, 2, 16, 16, 8), (2, 4, 2, 7, 20, 8), (2, 4, 2, 1, 20, 8)])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_attention(sizes, how):
    case = attention_case("small", *sizes, dtypes=("float32",), **how)
    rows, wrong = measure(case, torch.float32)
    assert not wrong and {row["contender"] for row in rows} == {"moe_aiter", "torch"}


def test_convolution():
    case = convolution_case("small", 2, 3, 8, 4, dtypes=("float32",))
    rows, wrong = measure(case, torch.float32)
    assert not wrong and len(rows) == 3 and case.flops == 2 * 9 * 2 * 3 * 4 * 64


def test_each_case_holds_ours_to_torchs():
    names = [case.name for case in torchlike.CASES]
    assert len(set(names)) == len(names)
    assert all(case.goals == {"torch": 0.97} and case.flops > 0 for case in torchlike.CASES)
