"""Settings.  The only file that reads the environment."""

import dataclasses
import os
import typing

PREFIX = "MOE_AITER_"
CHOICES = {
    "backend": ("auto", "hopper", "triton", "host", "torch"),
    "matmul_precision": ("ieee", "tf32"),
    "log_level": ("DEBUG", "INFO", "WARNING", "ERROR"),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Each field is set by `MOE_AITER_<FIELD>`; an unknown `MOE_AITER_*` variable is an error."""

    backend: str = "auto"  # force one implementation everywhere: hopper, triton, host or torch
    cache_size: int = 1024  # MB of what is computed from weights and kept; 0 keeps nothing
    debug: bool = False  # check values (expert ids, plans) and NaN-fill outputs; synchronises
    gmm_configs: str = ""  # a folder with files of block sizes for gmm, ptgmm and nptgmm: gfx942-GMM.json
    log_level: str = "WARNING"  # of the `moe_aiter` logger
    matmul_precision: str = "ieee"  # float32 products in Triton kernels: ieee, or tf32 on tensor cores
    num_threads: int = 0  # threads of the C++ extension, at most torch.get_num_threads(); 0: as many

    @classmethod
    def from_env(cls, env: typing.Mapping[str, str] = os.environ) -> "Settings":
        known = {f.name: f for f in dataclasses.fields(cls)}
        given = {k.removeprefix(PREFIX).lower(): v for k, v in env.items() if k.startswith(PREFIX)}
        if unknown := given.keys() - known.keys():
            raise ValueError(f"unknown settings {variables(unknown)}; known: {variables(known)}")
        return cls(**{k: parse(k, v, known[k].type) for k, v in given.items()})


def variables(names: typing.Iterable[str]) -> str:
    return ", ".join(PREFIX + name.upper() for name in sorted(names))


def parse(name: str, text: str, kind: type):
    """The value of one setting, or a ValueError that names its variable and the choices."""
    variable = PREFIX + name.upper()
    if kind is bool:
        if text.lower() not in ("", "0", "false", "1", "true"):
            raise ValueError(f"{variable} is {text!r}; it takes 0 or 1")
        return text.lower() in ("1", "true")
    if kind is int:
        if not text.isdecimal():
            raise ValueError(f"{variable} is {text!r}; it takes a whole number, 0 or more")
        return int(text)
    if name in CHOICES and text not in CHOICES[name]:
        raise ValueError(f"{variable} is {text!r}; it takes {', '.join(CHOICES[name])}")
    return text


settings = Settings.from_env()
interpret = os.environ.get("TRITON_INTERPRET") == "1"  # Triton kernels run on the CPU, slowly, for tests


def repeatable_cublas() -> None:
    """Let cuBLAS give the same bits every time; only before its first product, when it reads the variable."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
