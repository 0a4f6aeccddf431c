"""What a convolution refuses, by name."""

import pytest
import torch

from moe_aiter.layers.convolution import conv2d


@pytest.mark.parametrize(
    "options, kind, message",
    [
        (dict(padding="sam"), ValueError, "unknown padding 'sam'; known: valid, same"),
        (dict(padding="same", stride=2), ValueError, "padding='same' needs a stride of 1, not 2"),
        (dict(padding=(1, 2, 3)), TypeError, "padding must be an int or two"),
        (dict(padding=-1), ValueError, "padding must be at least 0, not -1"),
        (dict(stride="a"), TypeError, "stride must be an int or two, not 'a'"),
        (dict(stride=0), ValueError, "stride must be at least 1, not 0"),
        (dict(dilation=(0, 1)), ValueError, r"dilation must be at least 1, not \(0, 1\)"),
    ],
)
def test_steps_that_cannot_be(options, kind, message):
    with pytest.raises(kind, match=message):
        conv2d(torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3), **options)
