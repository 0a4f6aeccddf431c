"""Checkpoints come back bit for bit, and a crash at any point leaves a whole one."""

import json
import math
import os
import pathlib
import random
import shutil

import pytest
import torch
from language_model import UsageError, checkpoint
from language_model.checkpoint import (
    RANDOM,
    checkpoints,
    load_checkpoint,
    load_newest,
    newest_checkpoint,
    read_state,
    save_checkpoint,
    state_sum,
)  # fmt: skip
from language_model.model import Transformer
from language_model.presets import PRESETS
from language_model.trainer import make_optimizer

from moe_aiter import files

load_file = pytest.importorskip("safetensors.torch").load_file
save_file = pytest.importorskip("safetensors.torch").save_file
CONFIG = PRESETS["test"]
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


def new_model(seed: int = 0):
    """A model and an optimizer that have made one step."""
    torch.manual_seed(seed)
    model = Transformer(CONFIG)
    optimizer = make_optimizer(model, CONFIG)
    model(torch.randint(256, (2, 8)))[0].square().mean().backward()
    optimizer.step()
    return model, optimizer


def bits(model, optimizer):
    moments = [tensor for p in model.parameters() for _, tensor in sorted(optimizer.state[p].items())]
    return torch.cat([t.detach().flatten() for t in (*model.parameters(), *moments)])


def test_everything_comes_back(tmp_path):
    model, optimizer = new_model()
    path = save_checkpoint(tmp_path, 7, model, optimizer, fingerprint="abc")
    drawn = torch.rand(3)
    other = new_model(seed=1)
    assert not torch.equal(bits(*other), bits(model, optimizer))
    state = load_checkpoint(path, *other)
    assert state == {"step": 7, "fingerprint": "abc"}
    assert torch.equal(bits(*other), bits(model, optimizer))
    assert torch.equal(torch.rand(3), drawn)


def test_the_newest_two_are_kept(tmp_path):
    model, optimizer = new_model()
    for step in (5, 90, 100, 1000):
        save_checkpoint(tmp_path, step, model, optimizer)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000100", "step-00001000"]
    assert sorted(os.listdir(tmp_path)) == ["step-00000100", "step-00001000"]


def test_saving_a_step_again_replaces_it(tmp_path):
    model, optimizer = new_model()
    save_checkpoint(tmp_path, 5, model, optimizer, fingerprint="old")
    path = save_checkpoint(tmp_path, 5, model, optimizer, fingerprint="new")
    assert json.loads((path / "state.json").read_text())["fingerprint"] == "new"
    assert os.listdir(tmp_path) == ["step-00000005"]


def test_nothing_to_resume_from(tmp_path):
    (tmp_path / "unfinished-3-1").mkdir()
    with pytest.raises(UsageError, match="holds no checkpoint"):
        newest_checkpoint(tmp_path)
    assert not os.listdir(tmp_path)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def write(text: str):
    return lambda path: path.write_text(text)


DAMAGES = [
    *((name, how) for name in FILES for how in (pathlib.Path.unlink, cut, write(""))),
    *(("state.json", write(text)) for text in ("[]", "{}", '{"step": 8}', '{"step": "9"}')),
    ("model.safetensors", lambda path: shutil.copy(path.with_name("optimizer.safetensors"), path)),
    ("optimizer.safetensors", lambda path: shutil.copy(path.with_name("model.safetensors"), path)),
]


@pytest.mark.parametrize("name, damage", DAMAGES)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(name, damage, tmp_path, capsys):
    model, optimizer = new_model()
    for step in (8, 9):
        path = save_checkpoint(tmp_path, step, model, optimizer)
    damage(path / name)
    other = new_model(seed=1)
    assert load_newest(tmp_path, *other)["step"] == 8
    assert torch.equal(bits(*other), bits(model, optimizer))
    err = capsys.readouterr().err
    assert err.startswith(f"moe-aiter train: warning: {path} is damaged") and err.count("\n") == 1
    assert err.endswith("going back to step-00000008\n")
    shutil.rmtree(tmp_path / "step-00000008")
    with pytest.raises(UsageError, match="step-00000009 is damaged") as caught:
        load_newest(tmp_path, *other)
    assert "\n" not in str(caught.value) and not capsys.readouterr().err


def flip(path: pathlib.Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_a_flipped_bit_gives_way_to_the_checkpoint_before(tmp_path, capsys):
    """Some of each file, in turn: nothing but the checksums could tell most of them."""
    model, optimizer = new_model()
    for step in (8, 9):
        path = save_checkpoint(tmp_path, step, model, optimizer, fingerprint="abc")
    other, draw = new_model(seed=1), random.Random(0)
    sizes = {name: 8 * (path / name).stat().st_size for name in FILES}
    cases = [(name, draw.randrange(sizes[name])) for name in FILES[:2] for _ in range(10)]
    for name, bit in cases:
        flip(path / name, bit)
        assert load_newest(tmp_path, *other)["step"] == 8, (name, bit)
        assert f"SHA-256 of {name} is not the one in state.json; going back" in capsys.readouterr().err
        flip(path / name, bit)
    for bit in range(0, sizes["state.json"], 13):
        flip(path / "state.json", bit)
        with pytest.raises((ValueError, KeyError, TypeError)):
            read_state(path)
        flip(path / "state.json", bit)
    assert load_newest(tmp_path, *other) == {"step": 9, "fingerprint": "abc"}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"step": 9.0}, "has no step, a whole number"),
        ({"step": True}, "has no step, a whole number"),
        ({"step": "9"}, "has no step, a whole number"),
        ({"step": None}, "has no step, a whole number"),
        ({"fingerprint": 1}, "fingerprint is a int; it should be a text"),
        ({"fingerprint": ["a"]}, "fingerprint is a list; it should be a text"),
        ({"sha256": []}, "sha256 are not those of files in this folder"),
        ({"sha256": None}, "sha256 are not those of files in this folder"),
        ({"sha256": {"../../secret": "0"}}, "sha256 are not those of files in this folder"),
        ({"sha256": {"/etc/passwd": "0"}}, "sha256 are not those of files in this folder"),
        ({"sha256": {"model.safetensors": 1}}, "sha256 are not those of files in this folder"),
        ({"sha256": {}}, "SHA-256 of model.safetensors, optimizer.safetensors, state.json is not the one"),
        ({"more": 1}, "has an unknown key, 'more'"),
    ],
)
def test_fields_of_another_type_are_refused_before_a_step(fields, message, tmp_path):
    """Also where the sums are right."""
    model, optimizer = new_model()
    path = save_checkpoint(tmp_path, 9, model, optimizer)
    state = json.loads((path / "state.json").read_text()) | fields
    if "sha256" not in fields:
        sums = state.pop("sha256")
        state["sha256"] = sums | {"state.json": state_sum(state)}
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(UsageError, match=message) as caught:
        load_checkpoint(path, *new_model(seed=1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_a_link_out_of_a_checkpoint_is_not_followed(name, tmp_path):
    path = save_checkpoint(tmp_path, 9, *new_model())
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to("../elsewhere")
    with pytest.raises(UsageError, match=f"{name}: it is a link out of the folder, to /"):
        load_checkpoint(path, *new_model(seed=1))


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/step-00000001", "checkpoints/step-00000003"])
def test_a_linked_folder_is_neither_read_nor_emptied(name, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    for step in (1, 2):
        save_checkpoint(folder, step, *new_model())
    link, mine = tmp_path / "run" / name, tmp_path / "mine"
    link.rename(mine) if link.exists() else mine.mkdir()
    link.symlink_to(mine)
    (mine / "unfinished-of-others").touch()
    before = sorted(mine.rglob("*"))
    for use in (lambda: load_newest(folder, *new_model()), lambda: save_checkpoint(folder, 4, *new_model())):
        with pytest.raises(UsageError, match=f"^{link} is a link"):
            use()
        assert sorted(mine.rglob("*")) == before
    assert link.is_symlink()


def rewrite(path: pathlib.Path, name: str, change) -> None:
    """Change a tensor, in a checkpoint from before there were checksums."""
    tensors = load_file(path / name)
    key = min(key for key in tensors if key.endswith(change[0]))
    tensors[key] = change[1](tensors[key])
    save_file(tensors, path / name)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({"step": state["step"], "fingerprint": None}))


def with_first(value):
    def change(tensor):
        tensor.view(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    "name, change, message",
    [
        (FILES[1], ("/exp_avg", lambda t: torch.zeros(1)), "/exp_avg is torch.float32 (1,); it should be"),
        (FILES[1], ("/exp_avg_sq", lambda t: t.half()), "/exp_avg_sq is torch.float16 ("),
        (FILES[1], ("/exp_avg", with_first(math.nan)), "/exp_avg has a value that is not finite"),
        (FILES[1], ("/exp_avg_sq", with_first(-1.0)), "/exp_avg_sq has a value below 0"),
        (FILES[1], ("/step", with_first(-1.0)), "/step has a value below 1"),
        (FILES[1], ("/step", lambda t: t.reshape(1)), "/step is torch.float32 (1,); it should be "),
        (FILES[1], (RANDOM, lambda t: t[1:]), "random_state is torch.uint8 ("),
        (FILES[0], ("weight", lambda t: t.to(torch.int8)), "is torch.int8 ("),
        (FILES[0], ("weight", with_first(math.inf)), "has a value that is not finite"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_a_models_are_never_given_to_adamw(name, change, message, tmp_path, capsys):
    model, optimizer = new_model()
    for step in (8, 9):
        path = save_checkpoint(tmp_path, step, model, optimizer)
    rewrite(path, name, change)
    other = new_model(seed=1)
    assert load_newest(tmp_path, *other)["step"] == 8
    assert torch.equal(bits(*other), bits(model, optimizer))
    old, err = capsys.readouterr().err.splitlines()
    assert old.endswith("was saved without checksums, so damage of its numbers may go unnoticed")
    assert message in err and name in err and "--lr" not in err


@pytest.mark.parametrize("file", [0, 1])
def test_a_name_of_a_tensor_is_no_other_error(file, tmp_path, capsys):
    """The line that is shown is the error's, whatever a stranger's tensor is called."""
    model, optimizer = new_model()
    for step in (8, 9):
        path = save_checkpoint(tmp_path, step, model, optimizer)
    evil = "!\x1b[31m\nmoe-aiter: all is well"
    rewrite(path, FILES[file], ("", lambda t: t))
    save_file(load_file(path / FILES[file]) | {evil: torch.zeros(1)}, path / FILES[file])
    with pytest.raises(UsageError) as refused:
        load_checkpoint(path, model, optimizer)
    text = str(refused.value)
    assert text.isprintable() and text.startswith(f"{path} is damaged") and FILES[file] in text
    capsys.readouterr()
    assert load_newest(tmp_path, model, optimizer)["step"] == 8
    assert all(line.isprintable() for line in capsys.readouterr().err.splitlines())


def test_a_tensor_of_the_optimizer_too_many_or_too_few(tmp_path):
    model, optimizer = new_model()
    path = save_checkpoint(tmp_path, 1, model, optimizer)
    good = load_file(path / FILES[1])
    for tensors, message in (
        (good | {"a/exp_avg": torch.zeros(1)}, "has an unknown tensor a/exp_avg"),
        ({k: t for k, t in good.items() if k != RANDOM}, "lacks random_state"),
    ):
        save_file(tensors, path / FILES[1])
        (path / "state.json").write_text('{"step": 1}')
        with pytest.raises(UsageError, match=message):
            load_checkpoint(path, model, optimizer)


def test_a_full_disk_leaves_no_draft(tmp_path, monkeypatch):
    def full(path, tensors):
        path.write_bytes(b"half")
        raise UsageError("No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(UsageError):
        save_checkpoint(tmp_path, 1, *new_model())
    assert not os.listdir(tmp_path)


def test_what_was_saved_last_is_kept_beside_damaged_later_ones(tmp_path):
    model, optimizer = new_model()
    for step in (20, 30):
        cut(save_checkpoint(tmp_path, step, model, optimizer) / "model.safetensors")
    for step in (11, 12):
        save_checkpoint(tmp_path, step, model, optimizer)
        assert load_newest(tmp_path, *new_model(seed=1))["step"] == step


def test_a_disk_that_refuses_is_a_mistake_in_one_line(tmp_path, monkeypatch):
    model, optimizer = new_model()
    monkeypatch.setattr(pathlib.Path, "mkdir", lambda *_, **__: None)
    with pytest.raises(UsageError, match=r"model.safetensors cannot be written: "):
        save_checkpoint(tmp_path / "nowhere", 1, model, optimizer)


class Crash(BaseException):
    """Stands for the power going off."""


def test_a_crash_at_any_system_call_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    """Saving step 3 ends before its n-th write, sync, rename or removal, for every n."""
    moments = 0
    while not save_that_crashes(tmp_path / str(moments), monkeypatch, moments):
        moments += 1
    assert moments > 8


def save_that_crashes(folder, monkeypatch, moment: int) -> bool:
    """Whether saving was over before the moment of the crash."""
    model, optimizer = new_model()
    for step in (1, 2):
        save_checkpoint(folder, step, model, optimizer)
    calls = iter(range(1000))

    def crashing(function):
        def call(*args, **kwargs):
            if next(calls) >= moment:  # nothing can be tidied up afterwards either
                raise Crash
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for owner, name in [
            (files.os, "fsync"), (files.shutil, "rmtree"), (pathlib.Path, "rename"),
            (pathlib.Path, "mkdir"), (pathlib.Path, "write_text"),
        ]:  # fmt: skip
            patch.setattr(owner, name, crashing(getattr(owner, name)))
        try:
            save_checkpoint(folder, 3, model, optimizer)
            finished = True
        except Crash:
            finished = False
    newest = newest_checkpoint(folder)
    assert newest.name == "step-00000003" or (not finished and newest.name == "step-00000002")
    other = new_model(seed=1)
    load_checkpoint(newest, *other)
    assert torch.equal(bits(*other), bits(model, optimizer))
    assert all(name.startswith("step-") for name in os.listdir(folder))
    save_checkpoint(folder, 4, *other)
    assert newest_checkpoint(folder).name == "step-00000004"
    return finished
