"""Settings of a run: presets, flags, errors, and the way to disk and back."""

import argparse
import dataclasses
import math

import pytest
import torch
from language_model import UsageError
from language_model.presets import PRESETS, TrainConfig, add_flags, flag, flag_values, make_config

pytestmark = pytest.mark.full
FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}


def parse(*words: str) -> dict:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return flag_values(parser.parse_args(words))


def test_no_flag_changes_nothing():
    assert parse() == {}


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.type in (int, float)])
def test_every_number_has_a_flag(name):
    assert parse(flag(name), "3") == {name: FIELDS[name].type(3)}


def test_switches_texts_and_paths(tmp_path):
    assert parse("--dense", "--no-compile") == {"dense": True, "compile": False}
    assert parse("--dtype", "float32", "--device", "cpu") == {"dtype": "float32", "device": "cpu"}
    assert parse("--data", "a", str(tmp_path))["data"][1] == str(tmp_path)
    assert len(parse("--data", "a", "--data", "b")["data"]) == 2
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
        ({"top_k": 5}, "--top-k is 5 but --num-experts is 4"),
        ({"hidden": 30, "heads": 4}, r"--hidden is 30; it must be a multiple of 2 \* --heads, which is 8"),
        ({"steps": 0}, "--steps is 0; it must be at least 1"),
        ({"dtype": "int8"}, "dtype is 'int8'; it takes auto, float32, bfloat16"),
        ({"fp8": "e8m0"}, "--fp8 is 'e8m0'; it takes none, e4m3, e5m2, e4m3_all, e5m2_all"),
        ({"fp8": "e4m3", "dense": True}, "--fp8 is 'e4m3', but --dense has no experts"),
        ({"device": "toaster"}, "--device is 'toaster'; it takes auto, cpu, cuda or cuda:N"),
        ({"device": "meta"}, "--device is 'meta'; it takes auto, cpu, cuda or cuda:N"),
        ({"val_fraction": 1.0}, "--val-fraction is 1.0; it must be above 0 and below 1"),
        ({"lr": math.nan}, "--lr is nan; it must be above 0 and below inf"),
        ({"dense": "no"}, "--dense is 'no'; it must be of type bool"),
        ({"layers": True}, "--layers is True; it must be of type int"),
    ],
)
def test_impossible_settings(given, message):
    with pytest.raises(UsageError, match=message):
        make_config("test", given)


OUTSIDE = {  # what the fields do not take, and the ends of what they do
    "val_fraction": ([0.0, 1.0], []),
    "shared_intermediate": ([-4], [0]),
    "lr": ([-1.0, 0.0, math.inf], [1e-9, 1e30]),
    "min_lr": ([-0.1, 1.1], [0.0, 1.0]),
    "warmup": ([-0.1, 1.1], [0.0, 1.0]),
    "beta1": ([-0.1, 1.0, 2.0], [0.0]),
    "beta2": ([-0.1, 1.0, 2.0], [0.0]),
    "weight_decay": ([-0.1, math.inf], [0.0]),
    "clip": ([-1.0, 0.0], [math.inf]),
    "balance_coef": ([-0.1, math.inf], [0.0]),
    "z_coef": ([-0.1, math.inf], [0.0]),
    "seed": ([-(2**63) - 1, 2**64], [-(2**63), 2**64 - 1]),
    "threads": ([-1, 1025], [0, 1024]),
    "ep": ([-1, 2**31], [0]),
    "sample_bytes": ([-5, 2**31], [0]),
    "temperature": ([-0.1, math.inf], [0.0]),
}
NUMBERS = [name for name, field in FIELDS.items() if field.type in (int, float)]


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_a_range(name):
    outside, inside = OUTSIDE.get(name, ([-1, 0, 2**31], []))
    for value in (*outside, math.nan) if FIELDS[name].type is float else outside:
        with pytest.raises(UsageError, match=f"^{flag(name)} is {value}; it must be (at least|above) "):
            TrainConfig(**{name: value})
    for value in inside:
        assert getattr(TrainConfig(**{name: value}), name) == value


@pytest.mark.parametrize("name, gpus", [("cuda:2", 2), ("cuda:200", 2), ("cuda", 0)])
def test_a_gpu_that_is_not_there(name, gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(UsageError, match=f"'{name}' but torch .* sees {'GPUs 0 to 1' if gpus else 'no GPU'}"):
        make_config("test", {"device": name})


@pytest.mark.parametrize(
    "text",
    ["", '{"data": [], "st', "[1]", "{}", '{"data": [], "colour": 1}', '{"data": [], "steps": "many"}',
     '{"data": [], "lr": -1}', '{"data": 1}', "\udcff"],
)  # fmt: skip
def test_a_damaged_file_is_a_mistake_in_one_line(text, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(UsageError, match=r"config.json is not the configuration of a run: .+") as caught:
        TrainConfig.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_preset_needs_a_gpu():
    with pytest.raises(UsageError, match=r"--preset gpu needs a GPU.* leave --preset out"):
        make_config("gpu", {})
    assert make_config("gpu", {"device": "cpu"}).hidden == PRESETS["gpu"].hidden


def test_unknown_preset():
    with pytest.raises(UsageError, match="unknown preset 'huge'; known: cpu, gpu, test"):
        make_config("huge", {})
