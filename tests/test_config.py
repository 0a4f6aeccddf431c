"""Settings come from MOE_AITER_* variables, and a wrong one says what would be right."""

import dataclasses
import os
import subprocess
import sys

import pytest

from moe_aiter.config import (
    AITER,
    CHOICES,
    ONE_PROCESS,
    PREFIX,
    SettingError,
    Settings,
    launch,
    printable,
    say,
)


def test_defaults():
    assert Settings.from_env({}) == Settings()
    assert Settings.from_env({"PATH": "/bin", "TRITON_INTERPRET": "1"}) == Settings()


def test_each_field_has_its_variable():
    texts = {"True": "0", "False": "1", "0": "3", "64": "3", "1024": "3"}  # by default
    for field in dataclasses.fields(Settings):
        text = texts.get(str(field.default)) or CHOICES.get(field.name, ["folder"])[-1]
        got = getattr(Settings.from_env({PREFIX + field.name.upper(): text}), field.name)
        assert str(got) == {"0": "False", "1": "True"}.get(text, text)
        assert got != field.default or len(CHOICES.get(field.name, ())) == 1


@pytest.mark.parametrize("name", sorted(AITER))
def test_aiters_variables_count_where_ours_are_not_given(name):
    default = getattr(Settings(), name)
    other = {bool: str(int(not default)), int: "5", str: CHOICES.get(name, ["file.csv"])[-1]}[type(default)]
    variable = f"AITER_{name.upper()}"
    changed = getattr(Settings.from_env({variable: other}), name)
    assert changed != default
    ours = str(int(default)) if isinstance(default, bool) else str(default)
    given = {variable: other, PREFIX + name.upper(): ours}
    assert getattr(Settings.from_env(given), name) == default


def test_other_variables_of_aiter_are_its_own():
    assert Settings.from_env({"AITER_JIT_DIR": "x", "AITER_REBUILD": "1"}) == Settings()


@pytest.mark.parametrize(
    "text, value", [("1", True), ("true", True), ("0", False), ("False", False), ("", False)]
)
def test_switches(text, value):
    assert Settings.from_env({"MOE_AITER_DEBUG": text}).debug is value


@pytest.mark.parametrize(
    "variable, text, message",
    [
        ("MOE_AITER_DEBUG", "yes", "MOE_AITER_DEBUG is 'yes'; it takes 0 or 1"),
        ("MOE_AITER_NUM_THREADS", "-1", "MOE_AITER_NUM_THREADS is '-1'; it takes a whole number"),
        (
            "MOE_AITER_BACKEND",
            "cuda",
            "MOE_AITER_BACKEND is 'cuda'; it takes auto, hopper, triton, host, torch",
        ),
        ("MOE_AITER_LOG_LEVEL", "loud", "MOE_AITER_LOG_LEVEL is 'loud'; it takes DEBUG"),
        ("AITER_DEFAULT_PRECISION", "INT3", "^AITER_DEFAULT_PRECISION is 'INT3'; it takes FP16, BF16, TF32"),
        ("AITER_ENABLE_FUSION", "no", "^AITER_ENABLE_FUSION is 'no'; it takes 0 or 1"),
        ("AITER_CACHE_SIZE", "1 GB", "^AITER_CACHE_SIZE is '1 GB'; it takes a whole number"),
        ("MOE_AITER_DEBGU", "1", "unknown settings MOE_AITER_DEBGU; known: .*MOE_AITER_DEBUG"),
    ],
)
def test_a_wrong_setting_is_an_error(variable, text, message):
    with pytest.raises(ValueError, match=message):
        Settings.from_env({variable: text})


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_may_have_any_case(name):
    for choice in filter(None, CHOICES[name]):
        for text in (choice.lower(), choice.upper(), choice.capitalize()):
            assert getattr(Settings.from_env({PREFIX + name.upper(): text}), name) == choice
            if name in AITER:
                assert getattr(Settings.from_env({f"AITER_{name.upper()}": text}), name) == choice


@pytest.mark.parametrize("text", ["loud", "", "10"])
def test_an_unknown_level_of_aiter_warns_and_counts_as_info(text, caplog):
    """As in AITER; ours is an error, like every other unknown value."""
    assert Settings.from_env({"AITER_LOG_LEVEL": text}).log_level == "INFO"
    assert caplog.messages == [
        f"AITER_LOG_LEVEL is {text!r}, which is no level: INFO counts; it takes DEBUG, INFO, WARNING, ERROR"
    ]
    assert Settings.from_env({"AITER_LOG_LEVEL": text, "MOE_AITER_LOG_LEVEL": "error"}).log_level == "ERROR"
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("prefix", ["AITER_", PREFIX])
def test_tuned_products_are_logged_without_a_second_variable(prefix):
    on, off = {f"{prefix}LOG_TUNED_CONFIG": "1"}, {f"{prefix}LOG_TUNED_CONFIG": "0"}
    assert Settings.from_env(on).log_level == "INFO"
    assert Settings.from_env(off).log_level == Settings().log_level == "WARNING"
    for level in ("DEBUG", "ERROR"):
        assert Settings.from_env(on | {"AITER_LOG_LEVEL": level}).log_level == level


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().debug = True


def test_a_typo_stops_the_import():
    done = subprocess.run(
        [sys.executable, "-c", "import moe_aiter.config"],
        env=os.environ | {"MOE_AITER_BAKCEND": "torch"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "unknown settings MOE_AITER_BAKCEND" in done.stderr


def test_what_torchrun_says():
    env = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert launch(env)[:5] == (3, 8, 1, 2, 0)
    env |= {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "job"}
    assert launch(env)[4:] == (2, f"job {os.getppid()}")
    for other in ({}, {"RANK": "0", "WORLD_SIZE": "4"}, env | {"RANK": "x"}):  # of other launchers
        assert launch(other) == ONE_PROCESS


def test_a_strangers_text_is_one_line_without_commands(capsys):
    text, shown = "a é\n\x1b[31m\u202e\udcff\x9b1m\r\\", r"a é\n\x1b[31m\u202e\udcff\x9b1m\r" + "\\"
    assert printable(text) == printable(shown) == str(SettingError(text)) == shown
    say(text, "second")
    assert capsys.readouterr().out.splitlines() == [shown, "second"]
