"""Checkpoints come back bit for bit, and a crash at any point leaves a whole one."""

import json
import os
import pathlib
import shutil

import pytest
import torch

from moe_aiter.training import checkpoint
from moe_aiter.training.checkpoint import (
    checkpoints,
    load_checkpoint,
    load_newest,
    newest_checkpoint,
    save_checkpoint,
)  # fmt: skip
from moe_aiter.training.errors import UsageError
from moe_aiter.training.model import Transformer
from moe_aiter.training.optimizer import make_optimizer
from moe_aiter.training.presets import PRESETS

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
    with pytest.raises(UsageError, match="model.safetensors cannot be written: "):
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
            if next(calls) == moment:
                raise Crash
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for owner, name in [
            (checkpoint.os, "fsync"), (checkpoint.shutil, "rmtree"), (pathlib.Path, "rename"),
            (pathlib.Path, "mkdir"), (pathlib.Path, "write_text"),
        ]:  # fmt: skip
            patch.setattr(owner, name, crashing(getattr(owner, name)))
        try:
            save_checkpoint(folder, 3, model, optimizer)
            finished = True
        except Crash:
            finished = False
    newest = newest_checkpoint(folder)
    assert newest.name == "step-00000003" or not finished and newest.name == "step-00000002"
    other = new_model(seed=1)
    load_checkpoint(newest, *other)
    assert torch.equal(bits(*other), bits(model, optimizer))
    assert all(name.startswith("step-") for name in os.listdir(folder))
    save_checkpoint(folder, 4, *other)
    assert newest_checkpoint(folder).name == "step-00000004"
    return finished
