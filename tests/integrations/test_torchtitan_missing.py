"""Without torchtitan, or with one that is too old, the import says what to install."""

import importlib
import sys

import pytest


def test_import_says_what_to_install(monkeypatch):
    name = "moe_aiter.integrations.torchtitan"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "torchtitan.config", None)
    with pytest.raises(ImportError, match=r"needs torchtitan 0\.3 or newer: pip install"):
        importlib.import_module(name)
