"""Settings of a training run, and named presets.  Each field is a flag of `moe-aiter train`."""

import argparse
import dataclasses
import json
import math
import operator
import os
import re
import typing
from pathlib import Path

import torch

from moe_aiter.cli import summary
from moe_aiter.config import ONE_PROCESS, Launch
from moe_aiter.files import drafted, read_json, read_text

from . import UsageError

RECIPES = "e4m3", "e5m2", "e4m3_all", "e5m2_all", "block"  # of MoE's fp8=
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RESUMABLE = (  # what may change when a run is resumed
    "steps", "decay_steps", "val_every", "save_every", "log_every", "device", "threads", "compile",
    "sample_bytes", "temperature", "ep", "fsdp",
)  # fmt: skip
LOADS = Path("/proc/loadavg")  # on Linux
COMPARE = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}
SIZE = {"at_least": 1, "at_most": 2**31 - 1}
SIZE_OR_NONE = SIZE | {"at_least": 0}
THREADS = {"at_least": 0, "at_most": 1024}
SHARE = {"at_least": 0, "at_most": 1}
DECAY = {"at_least": 0, "below": 1}
FACTOR = {"at_least": 0, "below": math.inf}
SEED = {"at_least": -(2**63), "below": 2**64}  # what torch's generators take


def option(default, text: str, **bounds: float):
    """A field with its help and its range, in the words of COMPARE.  NaN is in no range."""
    return dataclasses.field(default=default, metadata={"help": text, "bounds": bounds})


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """All settings that decide what a run computes; the defaults are the `cpu` preset."""

    data: tuple[str, ...] = option((), "files or folders of text [Python's standard library]")
    val_fraction: float = option(0.05, "share of the text that is kept for validation", above=0, below=1)

    layers: int = option(4, "transformer blocks", **SIZE)
    hidden: int = option(128, "width of the model", **SIZE)
    heads: int = option(2, "attention heads", **SIZE)
    sequence: int = option(128, "context length in bytes", **SIZE)
    intermediate: int = option(128, "inner width of one expert", **SIZE)
    num_experts: int = option(16, "experts of each layer", **SIZE)
    top_k: int = option(2, "experts that each token uses", **SIZE)
    shared_intermediate: int = option(0, "inner width of an expert that every token uses", **SIZE_OR_NONE)
    dense: bool = option(False, "replace each MoE layer by one MLP as wide as its active experts")

    steps: int = option(1400, "optimizer steps", **SIZE)
    batch: int = option(16, "sequences in one step, of all processes together", **SIZE)
    lr: float = option(3e-3, "peak learning rate of AdamW", above=0, below=math.inf)
    min_lr: float = option(0.05, "final learning rate, as a share of --lr", **SHARE)
    warmup: float = option(0.05, "share of the steps in which the learning rate rises", **SHARE)
    decay_steps: int = option(
        SIZE["at_most"], "step at which the learning rate reaches --min-lr, where it stays [--steps]", **SIZE
    )
    beta1: float = option(0.9, "AdamW's beta1", **DECAY)
    beta2: float = option(0.95, "AdamW's beta2", **DECAY)
    weight_decay: float = option(0.1, "AdamW's weight decay, on matrices only", **FACTOR)
    clip: float = option(1.0, "maximum gradient norm", above=0)
    balance_coef: float = option(0.01, "weight of the load-balance loss, which is 1 at balance", **FACTOR)
    z_coef: float = option(0.001, "weight of the router's z-loss", **FACTOR)
    seed: int = option(0, "random seed for weights and batches", **SEED)

    device: str = option("auto", "cpu, cuda, cuda:N or auto (a GPU if there is one)")
    threads: int = option(
        0, "CPU threads of a process; 0: OMP_NUM_THREADS, or the process's share of idle CPUs", **THREADS
    )
    ep: int = option(
        1,
        "under torchrun, processes that share the experts of a layer; 0: as many of one machine as divide "
        "--num-experts",
        **SIZE_OR_NONE,
    )
    fsdp: bool = option(False, "under torchrun, shard all parameters and the optimizer's state by FSDP2")
    dtype: str = option("auto", "dtype of activations: float32, bfloat16 or auto; weights stay float32")
    fp8: str = option("none", f"8-bit recipe of the experts: none, {', '.join(RECIPES)}; see docs/fp8.md")
    compile: bool = option(False, "compile the model with torch.compile")
    log_every: int = option(1, "steps between updates of the progress bar and metrics.jsonl", **SIZE)
    val_every: int = option(100, "steps between validations", **SIZE)
    val_batches: int = option(16, "batches of one validation", **SIZE)
    save_every: int = option(
        250, "steps between checkpoints; the first comes after a minute at the latest", **SIZE
    )
    sample_bytes: int = option(400, "length of the text sample", **SIZE_OR_NONE)
    temperature: float = option(
        0.7, "sampling temperature of the text; 0 takes the most likely byte", **FACTOR
    )

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check(field, getattr(self, field.name))
        if self.top_k > self.num_experts:
            raise UsageError(f"--top-k is {self.top_k} but --num-experts is {self.num_experts}")
        if self.hidden % (2 * self.heads):
            raise UsageError(
                f"--hidden is {self.hidden}; it must be a multiple of 2 * --heads, which is {2 * self.heads}"
            )
        if self.dtype not in ("auto", *DTYPES):
            raise UsageError(f"--dtype is {self.dtype!r}; it takes auto, {', '.join(DTYPES)}")
        if self.fp8 not in ("none", *RECIPES):
            raise UsageError(f"--fp8 is {self.fp8!r}; it takes none, {', '.join(RECIPES)}")
        if self.fp8 != "none" and self.dense:
            raise UsageError(f"--fp8 is {self.fp8!r}, but --dense has no experts")

    @property
    def active_intermediate(self) -> int:
        """Inner width that one token meets, in the MoE model and in the dense one."""
        return self.top_k * self.intermediate + self.shared_intermediate

    @property
    def decay_end(self) -> int:
        """The step at which the learning rate reaches its minimum."""
        return self.steps if self.decay_steps == SIZE["at_most"] else self.decay_steps

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.sequence

    def save(self, path: Path) -> None:
        with drafted(path) as file:
            file.write(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "TrainConfig":
        """Read what `save` wrote; a file that is absent, damaged or of another program raises UsageError."""
        if not path.exists():
            raise UsageError(f"{path.parent} is not a run folder: it has no {path.name}")
        try:
            values = read_json(path, path.parent)
            return cls(**values | {"data": tuple(map(str, values["data"]))})
        except (ValueError, TypeError, KeyError) as error:
            # keys of the file, where the command line has flags
            text = re.sub("--([a-z][a-z0-9-]*)", lambda flag: flag[1].replace("-", "_"), summary(error))
            raise UsageError(f"{path} is not the configuration of a run: {text}") from error


def check(field: dataclasses.Field, value, called: str = "") -> None:
    """Raise UsageError unless `value`, of a flag `called` so, is of the field's type and in its range."""
    called = called or flag(field.name)
    kind = typing.get_origin(field.type) or field.type
    if type(value) is not kind and (kind, type(value)) != (float, int):
        raise UsageError(f"{called} is {value!r}; it must be of type {kind.__name__}")
    bounds = field.metadata["bounds"]
    if not all(COMPARE[word](value, bound) for word, bound in bounds.items()):
        wanted = " and ".join(f"{word.replace('_', ' ')} {bound}" for word, bound in bounds.items())
        raise UsageError(f"{called} is {value}; it must be {wanted}")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


PRESETS = {
    "cpu": TrainConfig(),
    "gpu": TrainConfig(
        layers=8, hidden=768, heads=12, sequence=1024, intermediate=384, num_experts=32, top_k=4,
        steps=1200, batch=64, lr=1e-3, log_every=20, val_every=100, val_batches=4, save_every=200,
        sample_bytes=1000,
    ),
    "test": TrainConfig(
        layers=2, hidden=32, heads=2, sequence=32, intermediate=16, num_experts=4, top_k=2, steps=20, batch=4,
        val_every=10, val_batches=2, save_every=10, sample_bytes=20, device="cpu", dtype="float32",
    ),
}  # fmt: skip


def add_flags(parser: argparse.ArgumentParser, texts: dict[str, str] | None = None) -> None:
    """One flag for each field, or for those in `texts`, which have their help.

    A flag that is not given leaves no trace in the parsed arguments.
    """
    for field in dataclasses.fields(TrainConfig):
        if texts is not None and field.name not in texts:
            continue
        text = texts[field.name] if texts else field.metadata["help"] + defaults_of(field)
        keywords = {"default": argparse.SUPPRESS, "help": text}
        if field.type is bool:
            parser.add_argument(flag(field.name), action=argparse.BooleanOptionalAction, **keywords)
        elif field.name == "data":
            parser.add_argument(
                flag(field.name), action="extend", nargs="+", type=path, metavar="PATH", **keywords
            )
        else:
            parser.add_argument(
                flag(field.name), type=field.type, metavar=field.type.__name__.upper(), **keywords
            )


def defaults_of(field: dataclasses.Field) -> str:
    """For the help: what the presets of a user's own runs say, both where they differ."""
    cpu, gpu = (getattr(PRESETS[name], field.name) for name in ("cpu", "gpu"))
    if field.type is bool or field.name in ("data", "decay_steps"):
        return ""
    return f" [{cpu}]" if cpu == gpu else f" [{cpu}, gpu {gpu}]"


def path(text: str) -> Path:
    """For argparse: an empty name, as from an unset variable, is not the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return Path(text)


def flag_values(args: argparse.Namespace) -> dict:
    """The fields that the command line sets."""
    values = {f.name: getattr(args, f.name) for f in dataclasses.fields(TrainConfig) if hasattr(args, f.name)}
    if "data" in values:
        values["data"] = tuple(str(path.resolve()) for path in values["data"])
    return values


def make_config(preset: str | None, values: dict) -> TrainConfig:
    """Return a preset, by default the one for the device, with `values` for its fields, none on auto."""
    device = pick_device(values.get("device", "auto"))
    name = preset or ("gpu" if device.type == "cuda" else "cpu")
    if name not in PRESETS:
        raise UsageError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    if preset == "gpu" and device.type == "cpu" and "device" not in values:
        raise UsageError(
            "--preset gpu needs a GPU: on a CPU its model takes more than 24 GB; leave --preset out, or add "
            "--device cpu"
        )
    config = dataclasses.replace(PRESETS[name], **values)
    device = pick_device(config.device)
    dtype = pick_dtype(device) if config.dtype == "auto" else config.dtype
    return dataclasses.replace(config, device=str(device), dtype=dtype)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device is {name!r}; it takes auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not 0 <= (device.index or 0) < there:
            gpus = f"GPUs 0 to {there - 1}" if there else "no GPU"
            raise UsageError(f"--device is {name!r} but torch {torch.__version__} sees {gpus}")
    return device


def set_threads(config: TrainConfig, launch: Launch = ONE_PROCESS) -> None:
    """Set torch's threads to --threads, or on a CPU to this process's share of those that are free.

    An OpenMP thread that has to wait for its CPU keeps all others waiting.
    """
    most, processes = torch.get_num_threads(), launch.local_world
    if config.threads:
        torch.set_num_threads(config.threads)
    elif config.device == "cpu" and "OMP_NUM_THREADS" not in os.environ and (LOADS.exists() or processes > 1):
        free = os.cpu_count()
        if LOADS.exists():
            load, *_, tasks, _ = read_text(LOADS).split()
            # the mean load of a minute includes programs that have ended; tasks that run now may end at once
            others = max(0, int(tasks.partition("/")[0]) - processes)
            free = round(free - min(float(load), others))
        free = max(1, free // processes)
        if free < most:
            torch.set_num_threads(free)
            if launch.rank == 0:
                print(f"threads  {free} of {most}: other programs use the rest;"
                      f" to choose, add --threads {most}")  # fmt: skip


def pick_dtype(device: torch.device) -> str:
    """Return bfloat16 if the hardware multiplies it, else float32: emulated bfloat16 would be slower."""
    if device.type == "cuda":
        return "bfloat16"
    cpu = getattr(torch.cpu, "get_capabilities", dict)()  # not in the oldest torch
    fast = any(cpu.get(name) for name in ("avx512_bf16", "amx_bf16", "sve_bf16", "bf16"))
    return "bfloat16" if fast else "float32"
