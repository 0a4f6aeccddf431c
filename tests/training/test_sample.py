"""Text from a model."""

import pytest
import torch

from moe_aiter.training.model import Transformer, generate, readable
from moe_aiter.training.presets import PRESETS


@pytest.fixture
def model():
    return Transformer(PRESETS["test"]).eval()


def test_length_and_repeatability(model):
    """Longer than the model can see at once."""
    text = generate(model, 40, 1.0, seed=1)
    assert len(text) == 40 > len(model.cos)
    assert text == generate(model, 40, 1.0, seed=1) != generate(model, 40, 1.0, seed=2)


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 1e-38, 1e-6])
def test_no_temperature_takes_the_likeliest_byte(model, temperature):
    logits, _ = model(torch.tensor([list(b"abc")]))
    assert generate(model, 1, temperature, seed=1, prompt=b"abc")[0] == logits[0, -1].argmax()


def test_no_byte_reaches_the_terminal_that_could_upset_it():
    assert readable(b"a\0b\tc\x1b[2J\xff\n") == "a\nb\tc\ufffd[2J\ufffd\n"
