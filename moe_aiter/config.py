"""Settings.  The only file that reads the environment."""

import dataclasses
import functools
import logging
import os
import sys
import typing

VERSION = "0.2.0"
PREFIX = "MOE_AITER_"
# settings that AITER's documents call AITER_<FIELD>: that counts where ours is not given
AITER = {"cache_size", "debug", "default_precision", "enable_fusion", "enable_tensor_cores", "log_level"}
AITER |= {"config_gemm_bf16", "log_tuned_config", "tune_gemm"}
log = logging.getLogger("moe_aiter")
CHOICES = {
    "backend": ("auto", "hopper", "triton", "host", "torch"),
    "matmul_precision": ("ieee", "tf32"),
    "log_level": ("DEBUG", "INFO", "WARNING", "ERROR"),
    "default_precision": ("", "FP16", "BF16", "TF32", "FP32"),
}
LOGGED = {"log_level": "INFO"}  # unless a level is given, where products are to be logged


def printable(text: str) -> str:
    """The text as one line without commands to a terminal: a name in a stranger's file may contain both."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(*lines: str, file: typing.TextIO | None = None) -> None:
    """Print lines with texts that may be a stranger's."""
    for line in lines:
        print(printable(line), file=file, flush=True)


class SettingError(ValueError):
    """A setting that cannot be, or a mistake in a file that one names: its text is a line."""

    def __init__(self, text: str):
        super().__init__(printable(text))


@dataclasses.dataclass(frozen=True)
class Settings:
    """Each field is set by `MOE_AITER_<FIELD>`, some by `AITER_<FIELD>` as well.  An unknown `MOE_AITER_*`
    variable is an error; what else is called `AITER_*` is AITER's own."""

    backend: str = "auto"  # force one implementation everywhere: hopper, triton, host or torch
    batch_invariant: bool = False  # 1: a token's bits do not depend on the rest of the batch
    cache_size: int = 1024  # MB for tensors derived from weights (8-bit copies, say); 0 keeps none
    config_gemm_bf16: str = ""  # AITER's CSV files of tuned products: mine.csv:theirs.csv
    debug: bool = False  # check values (expert ids, plans) and NaN-fill outputs; synchronises
    default_precision: str = ""  # precision of AITER's functions for float32: FP16, BF16, TF32 or FP32
    enable_dynamic_shapes: bool = False  # 1: convolutions skip cuDNN's search for each new shape
    enable_fusion: bool = True  # 0: AITER's functions run as separate steps: product, bias, activation
    enable_tensor_cores: bool = True  # 0: AITER's functions multiply in float32, without tensor cores
    gmm_configs: str = ""  # folder with block sizes for gmm, ptgmm and nptgmm: gfx942-GMM.json
    log_level: str = "WARNING"  # level of the `moe_aiter` logger: DEBUG, INFO, WARNING or ERROR
    log_tuned_config: bool = False  # log what computes each tuned product; level INFO unless you set one
    matmul_precision: str = "ieee"  # precision of float32 products: ieee, or tf32 on tensor cores
    num_threads: int = 0  # most threads of the C++ extension; 0: torch.get_num_threads()
    preshuffle_m_threshold: int = 0  # least rows for which a shuffled weight is used; 0: see linear.md
    tune_gemm: str = ""  # file for the sizes of tuned products; 1: bf16_untuned_gemm.csv

    @classmethod
    def from_env(cls, env: typing.Mapping[str, str] = os.environ) -> "Settings":
        fields = {f.name: f for f in dataclasses.fields(cls)}
        variable_of = {k.removeprefix(PREFIX).lower(): k for k in env if k.startswith(PREFIX)}
        if unknown := variable_of.keys() - fields.keys():
            raise SettingError(f"unknown settings {variables(unknown)}; known: {variables(fields)}")
        aiter = {name: f"AITER_{name.upper()}" for name in AITER}
        variable_of = {name: variable for name, variable in aiter.items() if variable in env} | variable_of
        given = {k: parse(variable, env[variable], fields[k]) for k, variable in variable_of.items()}
        return cls(**(LOGGED | given if given.get("log_tuned_config") else given))


def variables(names: typing.Iterable[str]) -> str:
    return ", ".join(PREFIX + name.upper() for name in sorted(names))


def parse(variable: str, text: str, field: dataclasses.Field):
    """The value of one setting, or a SettingError that names its variable and the choices."""
    if field.type is bool:
        if text.lower() not in ("", "0", "false", "1", "true"):
            raise SettingError(f"{variable} is {text!r}; it takes 0 or 1, or false or true")
        return text.lower() in ("1", "true")
    if field.type is int:
        if not text.isdecimal():
            raise SettingError(f"{variable} is {text!r}; it takes a whole number, 0 or more")
        return int(text)
    if variable == "AITER_LOG_LEVEL" and text.upper() not in CHOICES["log_level"]:  # as AITER does
        levels = ", ".join(CHOICES["log_level"])
        log.warning("%s is %r, which is no level: INFO counts; it takes %s", variable, text, levels)
        return "INFO"
    return check_choice(variable, text, CHOICES.get(field.name, (text,)))


def check_choice(what: str, value: str, choices: tuple[str, ...]) -> str:
    """Return the one of `choices` that `value` is in any case, or raise a SettingError that lists them."""
    known = {choice.lower(): choice for choice in choices}
    if str(value).lower() not in known:
        raise SettingError(f"{what} is {value!r}; it takes {', '.join(filter(None, choices))}")
    return known[str(value).lower()]


def say_in_a_line(before: typing.Callable, kind: type, error: BaseException, trace) -> None:
    """Report an uncaught SettingError in one line, with status 2: the traceback tells a user nothing."""
    if not isinstance(error, SettingError):
        return before(kind, error, trace)
    print(f"moe-aiter: error: {error}", file=sys.stderr)
    if not hasattr(sys, "ps1"):  # an interactive session goes on
        sys.exit(2)


try:
    settings = Settings.from_env()
except SettingError:  # no program has imported the package by then, so that none could report the mistake
    sys.excepthook = functools.partial(say_in_a_line, sys.excepthook)
    raise
interpret = os.environ.get("TRITON_INTERPRET") == "1"  # Triton kernels run on the CPU, slowly, for tests


class Launch(typing.NamedTuple):
    """What torchrun's environment variables say about the processes; without torchrun, one process."""

    rank: int = 0
    world: int = 1  # processes
    local_rank: int = 0
    local_world: int = 1  # processes on this machine
    restarts: int = 0  # so often torchrun has started all processes again
    name: str = ""  # of this call of torchrun, the same after a restart


ONE_PROCESS = Launch()


def launch(env: typing.Mapping[str, str] = os.environ) -> Launch:
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if not all(env.get(variable, "").isdecimal() for variable in variables):
        return ONE_PROCESS
    restarts = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    # the identifier is "none" unless the user gives one; the parent is torchrun itself
    name = f"{env.get('TORCHELASTIC_RUN_ID', '')} {os.getppid()}"
    return Launch(*(int(env[variable]) for variable in variables), int(restarts), name)
