"""Without an optional package, or with one that is too old, the error says what to install."""

import importlib
import sys

import pytest
from torch import nn

from moe_aiter.integrations.lora import load_lora


@pytest.mark.parametrize(
    "module, missing, message",
    [
        ("torchtitan", "torchtitan.config", r"needs torchtitan 0\.3 or newer: pip install"),
        ("monitor", "transformers", r"transformers is missing: pip install '\.\[hf\]'"),
    ],
)
def test_import_says_what_to_install(module, missing, message, monkeypatch):
    name = f"moe_aiter.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=message):
        importlib.import_module(name)


def test_adapters_say_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"safetensors is missing: pip install '\.\[convert\]'"):
        load_lora(nn.Linear(2, 2), tmp_path)
