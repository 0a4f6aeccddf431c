"""Where tokens and rows stand: padding, the rows of a window."""

import pytest
import torch

from moe_aiter.distributed.slots import ROWS, pad, window_rows


@pytest.mark.parametrize("shape", [(3,), (3, 2), (0, 2)])
def test_padding(shape):
    x = torch.randn(shape)
    padded = pad(x, 4, -1)
    assert padded.shape == (4, *shape[1:])
    assert torch.equal(padded[: shape[0]], x) and (padded[shape[0] :] == -1).all()
    assert pad(x, shape[0]) is x


@pytest.mark.parametrize(
    "choices, bound, expected", [(0, 0, 1), (1, 5, 1), (768, 384, 384), (768, 385, 512), (768, 1000, 768)]
)
def test_how_many_rows_a_window_has(choices, bound, expected):
    rows = window_rows(choices, bound)
    assert rows == expected and rows <= max(bound + ROWS, 1)
