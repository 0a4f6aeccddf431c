"""get_config and AITER's files of block sizes."""

import json
import logging

import pytest
import torch
from aot import TARGETS, compiling_for

from moe_aiter.config import interpret, settings
from moe_aiter.tuning import aiter_json
from moe_aiter.tuning.aiter_json import get_config, tile_of, write_configs

BLOCKS = {"BLOCK_SIZE_M", "BLOCK_SIZE_K", "BLOCK_SIZE_N", "GROUP_SIZE", "num_warps", "num_stages"}
SEED = """{
  "gmm": {
    "default": {
      "BLOCK_SIZE_M": 128, "BLOCK_SIZE_K": 64,
      "BLOCK_SIZE_N": 64, "GROUP_SIZE": 8, "GRID_DIM": 256
    }
  }
}"""


@pytest.fixture(autouse=True)
def forgotten():
    get_config.cache_clear()
    yield
    get_config.cache_clear()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder of files."""
    before = settings.gmm_configs
    object.__setattr__(settings, "gmm_configs", str(tmp_path))
    yield tmp_path
    object.__setattr__(settings, "gmm_configs", before)


@pytest.mark.parametrize("gmm_type", ["gmm", "ptgmm", "nptgmm"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_every_variant_has_block_sizes(gmm_type, accumulate):
    config = get_config(gmm_type, 4096, 512, 1024, 8, accumulate, dtype=torch.float16, trans=True)
    assert config.keys() == BLOCKS | ({"GRID_DIM"} if gmm_type != "nptgmm" else set())
    assert all(isinstance(n, int) and n >= 1 for n in config.values())


def test_the_dict_is_the_callers_own_and_answers_are_cached():
    first = get_config("gmm", 4000, 512, 1024, 8)
    first["BLOCK_SIZE_M"] = -1
    assert get_config("gmm", 4096, 512, 1024, 8)["BLOCK_SIZE_M"] > 0, "4000 rows count as 4096"
    info = get_config.cache_info()
    assert (info.hits, info.misses) == (1, 1)
    get_config.cache_clear()
    assert get_config.cache_info().currsize == 0


def test_another_variant_is_refused():
    with pytest.raises(ValueError, match="gmm_type is 'tgmm'; known: gmm, ptgmm, nptgmm"):
        get_config("tgmm", 1, 1, 1, 1)


def test_a_partial_file_is_taken(folder, caplog):
    """The one that the guide prints: one variant, no warps nor stages."""
    (folder / f"{aiter_json.arch()}-GMM.json").write_text(SEED)
    given = json.loads(SEED)["gmm"]["default"]
    with caplog.at_level(logging.WARNING, "moe_aiter"):
        config = get_config("gmm", 4096, 512, 1024, 8)
        assert config == config | given and config.keys() >= BLOCKS
        assert get_config("gmm", 4096, 512, 1024, 8, accumulate=True) == config
        for m in (4096, 9999):
            assert get_config("ptgmm", m, 512, 1024, 8).keys() == config.keys()
    assert len([r for r in caplog.records if "has no ptgmm" in r.message]) == 1
    tile, programs = tile_of("gmm", None, (4096, 512, 1024, 8), torch.bfloat16)
    assert (tile[:4], programs) == ((128, 64, 64, 8), 256)
    assert tile_of("ptgmm", None, (4096, 512, 1024, 8), torch.bfloat16) == ((), -1)


def test_a_file_that_is_not_there(folder, caplog):
    with caplog.at_level(logging.WARNING, "moe_aiter"):
        for m in (10, 1000):
            assert get_config("gmm", m, 512, 1024, 8).keys() >= BLOCKS
    assert len(caplog.records) == 1 and "there is no" in caplog.text


def test_what_is_written_is_read(folder):
    configs = {"ptgmm": {"accumulate": {"BLOCK_SIZE_K": 32}, "default": get_config("ptgmm", 9, 9, 9, 9)}}
    write_configs(folder / f"{aiter_json.arch()}-GMM.json", configs)
    assert get_config("ptgmm", 9, 9, 9, 9) == configs["ptgmm"]["default"]
    assert get_config("ptgmm", 9, 9, 9, 9, True)["BLOCK_SIZE_K"] == 32


BAD = {
    "[]": "must hold an object of objects",
    "{": "is not JSON",
    '{"gmm": {"fast": {}}}': "gmm has 'fast'; known: accumulate, default",
    '{"gmmm": {"default": {}}}': "gmm_type is 'gmmm'",
    '{"nptgmm": {"default": {"GRID_DIM": 4}}}': "nptgmm has no 'GRID_DIM'",
    '{"gmm": {"default": {"BLOCK_SIZE_N": 8}}}': "BLOCK_SIZE_N must be a power of two from 16 on, not 8",
    '{"gmm": {"default": {"num_warps": 3}}}': "num_warps must be a power of two, not 3",
}


@pytest.mark.parametrize("text, message", BAD.items(), ids=BAD)
def test_mistakes_are_named(folder, text, message):
    (folder / f"{aiter_json.arch()}-GMM.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        get_config(next(iter(aiter_json.NAMES)), 9, 9, 9, 9)


@pytest.mark.skipif(interpret, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    "target, name, units", [("sm_90", "sm90", 132), ("gfx942", "gfx942", 304), ("gfx950", "gfx950", 256)]
)
def test_files_are_named_by_architecture(target, name, units):
    with compiling_for(TARGETS[target], compile=False):
        assert aiter_json.arch() == name
        if not torch.cuda.is_available():
            assert get_config("gmm", 4096, 512, 1024, 8)["GRID_DIM"] == units
