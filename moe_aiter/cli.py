"""The command `moe-aiter`: info, train, sample, report, bench, tune, convert."""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import io
import os
import pathlib
import pkgutil
import platform
import re
import signal
import sys
import time
import typing

from .config import VERSION, SettingError, launch, printable, say
from .files import read_text, version

EXAMPLE = pathlib.Path(__file__).resolve().parents[1] / "examples" / "language_model"
NO_MEMORY = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")
COMMANDS = {  # name: (module, or object in one, with add_arguments and main; help, arguments of an example)
    "info": (
        "moe_aiter.bench.info",
        "print versions, devices, backends and settings; with --model the kernels that a model runs, with "
        "--memory what a layer takes",
        " --model config.json --target sm_90",
    ),
    "train": (
        "language_model.command",
        "train a byte-level language model with MoE layers",
        " --data my_texts/ --steps 2000",
    ),
    "sample": (
        "language_model.sample",
        "continue a text with the model of a run",
        " runs/one --prompt 'def '",
    ),
    "plot": ("language_model.plots", "replaced by report", " runs/one runs/two"),
    "report": ("language_model.report", "write an HTML page about one or more runs", " runs/one"),
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
            try:
                imported(place).add_arguments(command)
            except SettingError as error:
                command.exit(2, f"{command.prog}: error: {error}\n")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a letter that the terminal's encoding lacks
    if any("\0" in word for word in argv):
        parser.error("an argument has a zero byte, which no path has")
    args = parser.parse_args(argv)
    from .op import BackendError  # here, since --help and --version need no torch

    try:
        if args.command == "info" and args.model is None and args.memory is None:
            if args.target or args.tokens or args.dtype or args.ranks or args.layers:
                text = (
                    "--target needs --model or --memory, --tokens needs --model; "
                    "--dtype, --ranks and --layers need --memory"
                )
                raise SettingError(text)
            return info()
        return imported(commands[args.command][0]).main(args)
    except BrokenPipeError:
        raise
    except BackendError as error:
        mistake = str(error)
    except (SettingError, OSError) as error:
        mistake = summary(error)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        size = re.search(r"allocate [\d.]+ \w+", str(error))
        mistake = f"not enough memory{f' to {size[0]}' if size else ''}: try smaller sizes"
    except KeyboardInterrupt:
        return 130
    say(f"{parser.prog} {args.command}: error: {mistake}", file=sys.stderr)
    return 2


def imported(place: str) -> typing.Any:
    """Import what a command names."""
    package = place.partition(".")[0]
    if package == EXAMPLE.name and package not in sys.modules:
        import_example(package)
    return pkgutil.resolve_name(place)


def import_example(package: str) -> None:
    """Import the example under this name from beside the package's source, never from sys.path."""
    if not is_source(EXAMPLE.parents[1]):
        raise SettingError(
            "an installed package does not contain this example, which is examples/language_model/ of "
            f"{repository()}: clone it, and run `pip install -e '.[train]'` there"
        )
    spec = importlib.util.spec_from_file_location(package, EXAMPLE / "__init__.py")
    sys.modules[package] = importlib.util.module_from_spec(spec)
    with contextlib.ExitStack() as failed:
        failed.callback(sys.modules.pop, package)
        spec.loader.exec_module(sys.modules[package])
        failed.pop_all()


def is_source(folder: pathlib.Path) -> bool:
    """Whether a folder is a checkout of this project, not a project that holds a copy of the package."""
    project, command = folder / "pyproject.toml", EXAMPLE / "command.py"
    there = command.is_file() and project.is_file()
    return there and 'name = "moe-aiter"' in read_text(project, errors="replace").splitlines()


def repository() -> str:
    """Return the address of the source, which an installed package knows."""
    try:
        urls = importlib.metadata.metadata("moe-aiter").get_all("Project-URL", [])
    except importlib.metadata.PackageNotFoundError:
        urls = []
    return next((u for name, _, u in (u.partition(", ") for u in urls) if name == "Source"), "its repository")


def summary(error: BaseException) -> str:
    """One line of an error: its kind if that says more, the first line of its text and the last, which is the
    most precise; but a stranger's name may have brought it."""
    if isinstance(error, OSError) and error.strerror:
        return printable(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    if isinstance(error, SettingError):
        return str(error)
    lines = str(error).strip().split("\n")
    text = " ... ".join(line.strip() for line in dict.fromkeys((lines[0], lines[-1])))
    return printable(f"{type(error).__name__}: {text}")


def out_of_memory(error: BaseException) -> bool:
    """torch has a type for a full GPU, but on a CPU the text alone tells."""
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


class Parser(argparse.ArgumentParser):
    """A mistake is one line; the usage, forty flags long, is left to --help."""

    def error(self, message: str) -> typing.NoReturn:
        if launch().rank:  # the first process says it; torchrun then ends this one
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
            time.sleep(10)
            sys.exit(2)
        self.exit(2, f"{self.prog}: error: {printable(message)}; see {self.prog} --help\n")

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
    versions = {name: version(name, "not installed") for name in packages}
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
