"""AITER's names for the tiles of the grouped products, and its files of them, `{arch}-GMM.json`.

    {"gmm": {"default": {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_K": 64, "BLOCK_SIZE_N": 256, "GROUP_SIZE": 8}},
     "ptgmm": {"default": {...}, "accumulate": {...}}}

A file may lack variants and a configuration may lack keys: what is missing is chosen as if there were no
file.  Files are looked for where `MOE_AITER_GMM_CONFIGS` says; there are none unless a user has some.
"""

import json
import logging
import pathlib

import torch

from ..config import SettingError, settings
from ..files import drafted, read_json
from . import arch, bucket, decided_by, default_tile, num_units
from .candidates import Config
from .store import cache_clear, remembered

log = logging.getLogger("moe_aiter")

TILE = ("block_m", "block_n", "block_k", "group_m", "num_warps", "num_stages")
AMD_OPTIONS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")  # compiler options for AMD GPUs only
GMM = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")  # rows, columns and what is summed over
TGMM = ("BLOCK_SIZE_K", "BLOCK_SIZE_N", "BLOCK_SIZE_M")
NAMES = {t: (*(GMM if t == "gmm" else TGMM), "GROUP_SIZE", *TILE[4:]) for t in ("gmm", "ptgmm", "nptgmm")}
SUMMED = {"default", "accumulate"}
PROGRAMS = {"gmm": 0, "ptgmm": -1, "nptgmm": 0}  # one a tile, or as many as the device runs at once
SMALLEST = 16  # what tl.dot multiplies


def get_config(
    gmm_type: str,
    M: int,
    K: int,
    N: int,
    G: int,
    accumulate: bool = False,
    *,
    dtype: torch.dtype | None = None,
    trans: bool | None = None,
) -> dict[str, int]:
    """The block sizes with which the Triton kernel of `gmm_type` runs: "gmm", "ptgmm" or "nptgmm".

    BLOCK_SIZE_M, BLOCK_SIZE_K, BLOCK_SIZE_N, GROUP_SIZE (row tiles that walk the columns together),
    GRID_DIM (programs; not for nptgmm), num_warps and num_stages: from a user's `{arch}-GMM.json` where
    there is one, else from the tables of this GPU.  `dtype` is that of the operands, bfloat16 unless given;
    `trans`, their layout, makes no difference here.

    The dict is the caller's own.  Answers are cached, M up to the next power of two, as the `cache_info` and
    `cache_clear` of this function show.  Raises ValueError for another `gmm_type`.
    """
    variant(gmm_type)
    sizes = bucket(M), K, N, G
    return dict(cached(gmm_type, sizes, bool(accumulate), dtype or torch.bfloat16, arch(), decided_by()))


@remembered
def cached(gmm_type, sizes, accumulate, dtype, name, decided) -> dict[str, int]:
    M, K, N, G = sizes
    from_user = from_file(gmm_type, accumulate, name) or {}
    op = "gmm" if gmm_type == "gmm" else "tgmm"
    return from_tile(gmm_type, default_tile(op, dtype, M, N, K, G)) | from_user


get_config.cache_info, get_config.cache_clear = cached.cache_info, cache_clear


def variant(gmm_type: str) -> tuple[str, ...]:
    """The keys of a variant's configuration."""
    if gmm_type not in NAMES:
        raise ValueError(f"gmm_type is {gmm_type!r}; known: {', '.join(NAMES)}")
    return (*NAMES[gmm_type], *(() if gmm_type == "nptgmm" else ("GRID_DIM",)), *AMD_OPTIONS)


def from_tile(gmm_type: str, tile: Config) -> dict[str, int]:
    config = {name: getattr(tile, field) for name, field in zip(NAMES[gmm_type], TILE, strict=True)}
    return config if gmm_type == "nptgmm" else config | {"GRID_DIM": num_units()}


def from_file(gmm_type: str, accumulate: bool, name: str) -> dict[str, int] | None:
    """Return the entry of the user's file for this architecture, or None, with one warning."""
    if not settings.gmm_configs:
        return None
    path = pathlib.Path(settings.gmm_configs) / f"{name}-GMM.json"
    if not path.exists():
        return warn(f"there is no {path}")
    keys = read_configs(path).get(gmm_type)
    if not keys:
        return warn(f"{path} has no {gmm_type}")
    key = "accumulate" if accumulate and "accumulate" in keys else "default"
    return keys.get(key) or warn(f"{path} has no {key} for {gmm_type}")


@remembered
def warn(problem: str) -> None:
    log.warning("%s: tiles are those of the package's tables", problem)


@remembered
def read_configs(path: pathlib.Path) -> dict[str, dict[str, dict[str, int]]]:
    """A file of configurations.  Raises ValueError, in one line, where there is a mistake."""
    try:
        configs = read_json(path)
    except ValueError as error:
        raise SettingError(f"{path} is not JSON: {error}") from error
    try:
        check_configs(configs, str(path))
    except (ValueError, TypeError) as error:
        raise SettingError(str(error)) from error
    return configs


def write_configs(path: pathlib.Path, configs: dict[str, dict[str, dict[str, int]]]) -> None:
    """Write configurations, by variant and by "default" or "accumulate", as AITER reads them."""
    check_configs(configs, "configs")
    with drafted(path) as file:
        file.write(json.dumps(configs, indent=2) + "\n")
    cache_clear()


def check_configs(configs: dict, where: str) -> None:
    if not isinstance(configs, dict) or not all(isinstance(keys, dict) for keys in configs.values()):
        raise ValueError(f"{where} must hold an object of objects")
    for gmm_type, keys in configs.items():
        for key, config in keys.items():
            if key not in SUMMED:
                raise ValueError(f"{where}: {gmm_type} has {key!r}; known: {', '.join(sorted(SUMMED))}")
            check_config(gmm_type, config)


def check_config(gmm_type: str, config: dict[str, int]) -> None:
    """Raise unless these are block sizes that the kernel can have."""
    names = variant(gmm_type)
    if not isinstance(config, dict):
        raise TypeError(f"the configuration of {gmm_type} must be a dict, not {type(config).__name__}")
    for name, n in config.items():
        if name not in names:
            raise ValueError(f"{gmm_type} has no {name!r}; known: {', '.join(names)}")
        check_int(name, n, least=0 if name in AMD_OPTIONS else 1)
        if name.startswith("BLOCK") and (n < SMALLEST or n.bit_count() > 1):
            raise ValueError(f"{name} must be a power of two from {SMALLEST} on, not {n}")
        if name == "num_warps" and n.bit_count() > 1:
            raise ValueError(f"{name} must be a power of two, not {n}")


def check_int(name: str, n: int, least: int = 1) -> int:
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(f"{name} must be an int, not {type(n).__name__}")
    if n < least:
        raise ValueError(f"{name} must be at least {least}, not {n}")
    return n


def tile_of(
    gmm_type: str,
    config: dict[str, int] | None,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    grid_dim: int | None = None,
    accumulate: bool = False,
) -> tuple[tuple[int, ...], int]:
    """Return the tile and the programs for a caller's `config` and `grid_dim` and the sizes M, K, N, G.

    No tile where neither the caller nor a file has one: then the op chooses, and the backend as well.
    """
    if config is None and settings.gmm_configs and from_file(gmm_type, accumulate, arch()):
        config = get_config(gmm_type, *sizes, accumulate, dtype=dtype)
    tile, programs = (), PROGRAMS[gmm_type]
    if config is not None:
        check_config(gmm_type, config)
        programs = config.get("GRID_DIM", programs)
        whole = get_config(gmm_type, *sizes, accumulate, dtype=dtype) | config
        tile = tuple(whole.get(name, 0) for name in (*NAMES[gmm_type], *AMD_OPTIONS))
    if grid_dim is not None:
        programs = check_int("grid_dim", grid_dim)
    return tile, programs
