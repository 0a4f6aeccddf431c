"""The learning rate's course, and what decays."""

import dataclasses

import pytest
from language_model.model import Transformer
from language_model.presets import PRESETS
from language_model.trainer import learning_rate, make_optimizer

pytestmark = pytest.mark.full
CONFIG = dataclasses.replace(PRESETS["test"], steps=100, warmup=0.1, lr=2.0, min_lr=0.25)


def test_rate_rises_to_its_peak_and_falls_to_its_floor():
    rates = [learning_rate(CONFIG, step) for step in range(1, 101)]
    assert [rates[0], rates[9], rates[-1]] == pytest.approx([0.2, 2.0, 0.5])
    assert rates[:10] == sorted(rates[:10]) and rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[54] == pytest.approx((2.0 + 0.5) / 2)  # halfway down the cosine


def test_no_warmup():
    assert learning_rate(dataclasses.replace(CONFIG, warmup=0.0), 1) == pytest.approx(2.0)


def test_only_matrices_decay():
    model = Transformer(CONFIG)
    groups = make_optimizer(model, CONFIG).param_groups
    decay = {p: group["weight_decay"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert decay[parameter] == (0.0 if "norm" in name else CONFIG.weight_decay)
