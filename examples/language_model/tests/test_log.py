"""`moe-aiter train --log`: each logger gets the numbers of every step, and is closed."""

import sys
import types

import pytest
from language_model.metrics import LOGGERS
from language_model.tests.test_trainer import arguments, in_a_folder_of_its_own, losses, train  # noqa: F401

from moe_aiter import cli

pytestmark = pytest.mark.full


class Logger:
    """What a run of W&B, a run of trackio or a SummaryWriter gets."""

    def __init__(self, *words, **options):
        self.words, self.options, self.rows, self.ended = words, options, {}, 0

    def finish(self):
        self.ended += 1

    close = finish


class Run(Logger):
    def log(self, scalars, step):
        assert step > max(self.rows, default=0)  # W&B drops what is out of order
        self.rows[step] = scalars


class Writer(Logger):
    def add_scalar(self, name, value, step):
        self.rows.setdefault(step, {})[name] = value


@pytest.fixture
def opened(monkeypatch):
    """The loggers that training opens, from modules that stand for the packages."""
    found = []

    def opens(kind):
        return lambda *words, **options: found.append(kind(*words, **options)) or found[-1]

    for name in LOGGERS:
        module = types.ModuleType(name)
        module.init, module.Error = opens(Run), KeyError
        monkeypatch.setitem(sys.modules, name, module)
    board = types.ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = opens(Writer)
    monkeypatch.setitem(sys.modules, board.__name__, board)
    return found


@pytest.mark.parametrize("name", LOGGERS)
def test_a_logger_gets_every_step(name, opened):
    assert train(*arguments("--out", "run", "--log", name, "--log-every", "4")) == 0
    assert train("--resume", "run", "--steps", "21", "--log", name) == 0
    first, second = opened
    assert [log.ended for log in opened] == [1, 1]
    assert list(first.rows) == list(range(1, 21)) and list(second.rows) == [21]
    assert losses("run") == [
        (step, row["loss"], row["grad_norm"], row.get("val_loss"))
        for step, row in (first.rows | second.rows).items()
    ]
    layers = {step for step, row in first.rows.items() if row.get("moe/blocks.1.mlp/entropy", 0) > 0}
    assert layers == {4, 8, 10, 12, 16, 20}
    assert all(type(value) in (int, float) for row in first.rows.values() for value in row.values())
    if name == "tensorboard":
        assert [log.options["purge_step"] for log in opened] == [1, 21]
    else:
        assert [log.options["name"] for log in opened] == ["run", "run"]
        assert first.options["config"]["steps"] == 20


def test_a_dense_run_has_no_layers_to_log(opened):
    assert train(*arguments("--out", "run", "--log", "trackio", "--dense", "--steps", "1")) == 0
    assert not [name for name in opened[0].rows[1] if name.startswith("moe/")]


def test_a_logger_that_does_not_start_is_one_line(opened, monkeypatch, capsys):
    def init(**_):
        raise KeyError("no API key")

    monkeypatch.setattr(sys.modules["wandb"], "init", init)
    assert cli.main(["train", *arguments("--out", "run", "--log", "wandb")]) == 2
    assert capsys.readouterr().err == "moe-aiter train: error: --log wandb: KeyError: 'no API key'\n"


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_logger_names_its_extra(name, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, name, None)
    assert cli.main(["train", *arguments("--log", name)]) == 2
    message = f"{name} is missing: pip install '.[{name}]' in the source tree"
    assert capsys.readouterr().err == f"moe-aiter train: error: {message}\n"
