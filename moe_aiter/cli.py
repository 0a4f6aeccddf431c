"""The command `moe-aiter`: info, train, sample, plot, report, bench, tune, convert."""

import argparse
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import io
import os
import pkgutil
import platform
import re
import signal
import sys
import time
import typing

from .config import VERSION, SettingError, launch

COMMANDS = {  # name: (module, or object in one, with add_arguments and main; help, arguments of an example)
    "info": (
        "moe_aiter.bench.info",
        "print versions, devices, backends and settings; with --model the kernels that a model runs",
        " --model config.json --target sm_90",
    ),
    "train": (
        "moe_aiter.training.command",
        "train a byte-level language model with MoE layers",
        " --data my_texts/ --steps 2000",
    ),
    "sample": (
        "moe_aiter.training.sample",
        "continue a text with the model of a run",
        " runs/one --prompt 'def '",
    ),
    "plot": ("moe_aiter.training.plots", "plot the loss curves of several runs", " runs/one runs/two"),
    "report": ("moe_aiter.training.report", "write an HTML page about a run", " runs/one"),
    "bench": ("moe_aiter.bench", "compare speed and memory with other implementations", " layer --shape C"),
    "tune": ("moe_aiter.bench.tune", "find the fastest tile of each kernel on this GPU", " --shape C"),
    "convert": (
        "moe_aiter.integrations.checkpoints.command",
        "convert Hugging Face checkpoints to the layout of MoE and back, or from dense to MoE",
        " Qwen3-30B-A3B converted",
    ),
}


def main(
    argv: list[str] | None = None,
    commands: dict = COMMANDS,
    prog: str = "moe-aiter",
    about: str = "Mixture-of-Experts layers for training.",
) -> int:
    """Run one command and return the exit status; a user's mistake is one line on stderr and status 2."""
    try:
        status = run(argv, commands, Parser(prog=prog, description=about))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has ended, as `head` does: nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # what a shell reports for SIGPIPE


def run(argv: list[str] | None, commands: dict, parser: "Parser") -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser.add_argument("--version", action="version", version=f"moe-aiter {VERSION}")
    parsers = parser.add_subparsers(dest="command", required=True)
    for name, (place, text, example) in commands.items():
        example = f"Example: {parser.prog} {name}{example}"
        command = parsers.add_parser(name, help=text, description=text, epilog=example)
        if name in argv[:1]:  # the others are not even imported
            pkgutil.resolve_name(place).add_arguments(command)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a letter that the terminal's encoding lacks
    if any("\0" in word for word in argv):
        parser.error("an argument has a zero byte, which no path has")
    args = parser.parse_args(argv)
    from .op import BackendError  # here, since --help and --version need no torch
    from .training import UsageError, out_of_memory, summary

    try:
        if args.command == "info" and args.model is None:
            if args.target or args.tokens:
                raise UsageError("--target and --tokens need --model")
            return info()
        return pkgutil.resolve_name(commands[args.command][0]).main(args)
    except (SettingError, BackendError) as error:
        mistake = str(error)
    except BrokenPipeError:
        raise
    except (UsageError, OSError) as error:
        mistake = summary(error)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        size = re.search(r"allocate [\d.]+ \w+", str(error))
        mistake = f"not enough memory{f' to {size[0]}' if size else ''}: try smaller sizes"
    except KeyboardInterrupt:
        return 130
    print(f"{parser.prog} {args.command}: error: {mistake}", file=sys.stderr)
    return 2


class Parser(argparse.ArgumentParser):
    """A mistake is one line; the usage, forty flags long, is left to --help."""

    def error(self, message: str) -> typing.NoReturn:
        if launch().rank:  # the first process says it; torchrun then ends this one
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
            time.sleep(10)
            sys.exit(2)
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")

    def parse_known_args(self, args=None, namespace=None) -> tuple[argparse.Namespace, list[str]]:
        """Refuse a flag that a command does not know where its --help lists those it does."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown


def info() -> int:
    """Print what a bug report needs."""
    import torch

    from .config import PREFIX, settings
    from .kernels.base import host
    from .kernels.hopper import is_hopper

    packages = ("moe-aiter", "torch", "triton", "numpy", "einops")
    versions = {name: version(name) for name in packages}
    versions["torch"] = torch.__version__  # with the build, which the distribution does not always carry
    print_table("versions", {"python": platform.python_version()} | versions)
    gpus = {f"cuda:{i}": torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    cpu = f"{platform.machine()}, {torch.get_num_threads()} threads"
    print_table("machine", {"system": platform.system(), "cpu": cpu} | gpus)
    built = "ready" if host.ext is not None else f"not built, so CPUs run in plain torch. {host.remedy()}"
    triton = "ready" if gpus else "installed, but there is no GPU"
    if importlib.util.find_spec("triton") is None:
        triton = "not installed"
    hopper = "ready" if any(is_hopper(torch.device(gpu)) for gpu in gpus) else "no H100 or H200 here"
    backends = {"hopper": hopper, "triton": triton, "host (C++)": built, "torch": "ready"}
    first = next(name for name, state in backends.items() if state == "ready")
    print_table(
        "backends", backends | {"first choice": first if settings.backend == "auto" else settings.backend}
    )
    print_table("settings", {PREFIX + k.upper(): v for k, v in dataclasses.asdict(settings).items()})
    return 0


def version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def print_table(title: str, rows: dict) -> None:
    print(title)
    width = max(28, *map(len, rows))
    for name, value in rows.items():
        print(f"  {name:<{width}} {'none' if value == '' else value}")


def leave(status: int) -> typing.NoReturn:
    """End the process."""
    if launch().world > 1:  # a thread of gloo that frees its last tensor while the interpreter ends aborts
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    leave(main())
