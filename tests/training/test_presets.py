"""Settings of a run: presets, flags, errors, and the way to disk and back."""

import argparse
import dataclasses

import pytest
import torch

from moe_aiter.training.errors import UsageError
from moe_aiter.training.presets import PRESETS, TrainConfig, add_flags, flag, given_flags, make_config

FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}


def parse(*words: str) -> dict:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return given_flags(parser.parse_args(words))


def test_no_flag_changes_nothing():
    assert parse() == {}


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.type in (int, float)])
def test_every_number_has_a_flag(name):
    assert parse(flag(name), "3") == {name: FIELDS[name].type(3)}


def test_switches_texts_and_paths(tmp_path):
    assert parse("--dense", "--no-compile") == {"dense": True, "compile": False}
    assert parse("--dtype", "float32", "--device", "cpu") == {"dtype": "float32", "device": "cpu"}
    assert parse("--data", "a", str(tmp_path))["data"][1] == str(tmp_path)
    assert parse("--data", "a")["data"][0].startswith("/")  # a resumed run may start elsewhere


def test_every_field_has_help_and_the_types_that_flags_understand():
    for field in FIELDS.values():
        assert field.metadata["help"] and field.type in (int, float, bool, str, tuple[str, ...])


def test_round_trip_through_a_file(tmp_path):
    config = dataclasses.replace(PRESETS["gpu"], data=("/a", "/b"), dense=True)
    config.save(tmp_path / "config.json")
    assert TrainConfig.load(tmp_path / "config.json") == config


def test_auto_is_resolved():
    config = make_config("test", {"device": "auto", "dtype": "auto"})
    assert torch.device(config.device).type in ("cpu", "cuda") and config.dtype in ("float32", "bfloat16")


def test_preset_follows_the_device():
    config = make_config(None, {"device": "cpu", "dtype": "float32", "steps": 7})
    expected = dataclasses.replace(PRESETS["cpu"], device="cpu", dtype="float32", steps=7)
    assert config == expected
    assert PRESETS["gpu"].hidden > PRESETS["cpu"].hidden


@pytest.mark.parametrize(
    "given, message",
    [
        ({"top_k": 5}, "top_k is 5 but num_experts is 4"),
        ({"hidden": 30, "heads": 4}, "hidden is 30 but heads is 4"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"dtype": "int8"}, "dtype is 'int8'; it takes auto, float32, bfloat16"),
        ({"device": "toaster"}, "device is 'toaster'"),
        ({"val_fraction": 1.0}, "val_fraction is 1.0"),
    ],
)
def test_impossible_settings(given, message):
    with pytest.raises(UsageError, match=message):
        make_config("test", given)


def test_unknown_preset():
    with pytest.raises(UsageError, match="unknown preset 'huge'; known: cpu, gpu, test"):
        make_config("huge", {})
